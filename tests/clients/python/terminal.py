"""Runs a command on a terminal of a given size, ends it as Ctrl-C does two seconds after it has drawn
some words, or after so many seconds without them, and prints what it drew.

    python terminal.py LINES COLUMNS SECONDS WORDS COMMAND…

Exits with 1 if the terminal is not as it was before.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time


def main(lines, columns, seconds, words, command):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    before = termios.tcgetattr(slave)
    child = os.fork()
    if child == 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for stream in range(3):
            os.dup2(slave, stream)
        # Whoever was started in the background ignores it, and so would the command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(command[0], command)
    drawn, seen, give_up = b"", False, time.monotonic() + seconds
    while True:
        left = give_up - time.monotonic()
        if left <= 0:
            break
        if select.select([master], [], [], left)[0]:
            drawn += os.read(master, 65536)
            if not seen and words.encode() in drawn:
                seen, give_up = True, time.monotonic() + 2
    os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)
    sys.stdout.buffer.write(drawn)
    return 0 if termios.tcgetattr(slave) == before else 1


if __name__ == "__main__":
    sizes = [int(argument) for argument in sys.argv[1:4]]
    sys.exit(main(*sizes, sys.argv[4], sys.argv[5:]))
