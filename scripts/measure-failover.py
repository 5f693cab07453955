#!/usr/bin/env python3
"""Measures for how long a failover freezes an offer, by the number of its reservations.

    SECKILL_TEST_PYTHON=target/venv/bin/python scripts/with-services \\
      target/venv/bin/python scripts/measure-failover.py target/release/seckill 1000 100000

Starts a Redis with a replica and three Sentinels, and a server over them and the PostgreSQL of
SECKILL_TEST_POSTGRES_URL. For each size an activity is filled with reservations in SQL, rebuilt, and
bought from without a pause, while the master is killed, and while the Sentinels make another one the
master that is well. Prints, in ms: until the Sentinels have a new master; from then until a buyer gets a
unit again; and what of that the server says it took to rebuild.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "clients" / "python"))

import grpc
from sale import generate

DOWN_AFTER_MS = 1000
PATIENCE_S = 120
REDIS = os.environ.get("SECKILL_TEST_REDIS_SERVER", "redis-server")
DATABASE = os.environ["SECKILL_TEST_POSTGRES_URL"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def until(what, check):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.002)


def ask(port, *words):
    done = subprocess.run(["redis-cli", "-p", str(port), *words], capture_output=True, text=True)
    return done.stdout.split("\n")


class Stores:
    """A master, a replica, three Sentinels; `run` in one folder each."""

    def __init__(self, folder):
        self.folder, self.running = pathlib.Path(folder), []
        self.ports = [free_port(), free_port()]
        self.redis(0)
        self.redis(1, "--replicaof", "127.0.0.1", str(self.ports[0]))
        until("a replica", lambda: "master_link_status:up" in "\n".join(ask(self.ports[1], "INFO")))
        self.sentinels = [free_port() for _ in range(3)]
        for port in self.sentinels:
            own = self.new_folder(f"sentinel-{port}") / "sentinel.conf"
            own.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {own.parent}\nlogfile log\n"
                f"sentinel monitor shop 127.0.0.1 {self.ports[0]} 2\n"
                f"sentinel down-after-milliseconds shop {DOWN_AFTER_MS}\n"
                "sentinel failover-timeout shop 4000\n"
            )
            self.start(REDIS, str(own), "--sentinel")
        self.all_know()

    def all_know(self):
        def known(port):
            facts = ask(port, "SENTINEL", "MASTER", "shop")
            facts = dict(zip(facts[::2], facts[1::2]))
            return facts.get("num-slaves") == "1" and facts.get("num-other-sentinels") == "2"

        until("Sentinels that know all", lambda: all(known(port) for port in self.sentinels))

    def new_folder(self, name):
        made = self.folder / name
        made.mkdir(exist_ok=True)
        return made

    def start(self, *command):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.running.append(process)
        return process

    def redis(self, place, *options):
        port = self.ports[place]
        folder = self.new_folder(f"redis-{port}")
        process = self.start(
            REDIS, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "yes", "--repl-diskless-sync-delay", "0", "--logfile", "log", *options
        )
        until("a Redis", lambda: ask(port, "PING")[0] == "PONG")
        setattr(self, f"redis_{place}", process)

    def master(self):
        named = [ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop")[1] for port in self.sentinels]
        return max(named, key=named.count) if len(set(named)) == 1 else None

    def stop(self):
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def sql(text):
    subprocess.run(["psql", DATABASE, "-qc", text], check=True)


def rows(activity, size):
    """Reservations as the server writes them."""
    return f"""
        INSERT INTO outbox (reservation_id, activity_id, sku_id, user_id, quantity, slot, order_no, epoch,
                            batch, state, attempts, next_attempt_time, create_time)
        SELECT '{activity}-' || n, '{activity}', 'big', 'user-' || n, 1, 1, '{activity}-o-' || n, 1,
               'measure', 'pending', 0, 0, 1000
        FROM generate_series(1, {size}) AS n;
        UPDATE offers SET reserved = {size} WHERE activity_id = '{activity}' AND sku_id = 'big';
    """


class Server:
    def __init__(self, binary, stores, folder):
        self.binary, self.port = binary, free_port()
        hosts = ",".join(f"127.0.0.1:{port}" for port in stores.sentinels)
        self.log = pathlib.Path(folder, "server.log")
        settings = {
            "SECKILL__GRPC__ADDR": f"127.0.0.1:{self.port}", "SECKILL__HTTP__ADDR": "",
            "SECKILL__ENGINE__URL": f"redis-sentinel://{hosts}/shop", "SECKILL__DATABASE__URL": DATABASE,
        }
        subprocess.run([binary, "migrate", "up"], env=settings, check=True, stdout=subprocess.DEVNULL)
        self.process = stores.start("/bin/sh", "-c", 'exec env "$@" 2>"$0"', str(self.log),
                                    *(f"{name}={value}" for name, value in settings.items()),
                                    binary, "serve")
        until("a server", lambda: '"message":"serving"' in self.log.read_text() if self.log.exists() else 0)

    def run(self, *words):
        command = [self.binary, *words, "--server", f"http://127.0.0.1:{self.port}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def rebuilds(self):
        """What the log says that the rebuilds of `big` took, in ms."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if "rebuilt from SQL" in line]
        return [line.get("frozen_ms") for line in lines if str(line.get("offer", "")).endswith("big")]


def sale(activity, size):
    offer = {"sku_id": "big", "title": "A thing", "price_minor": 1, "currency_code": "CNY",
             "total": size + 1_000_000}
    return {"activity_id": activity, "title": "A failover", "start_time": "+4s", "end_time": "+1h",
            "offers": [offer]}


def measure(server, stores, stub, pb, size, how):
    activity = f"failover-{how}-{size}-{os.getpid()}"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(sale(activity, size)))
        file.flush()
        server.run("activity", "create", "--file", file.name)
    server.run("activity", "approve", activity)
    server.run("warmup", activity)
    sql(rows(activity, size))
    server.run("rebuild", activity, "--reason", "to be measured")
    numbers = iter(range(10**9))

    def buys():
        number = next(numbers)
        request = pb.ReserveRequest(activity_id=activity, sku_id="big", user_id=f"b-{number}", request_id="r")
        try:
            return stub.Reserve(request, timeout=1).outcome == pb.RESERVE_OUTCOME_RESERVED
        except grpc.RpcError:
            return False

    until("a sale", buys)
    # All of it are orders, so nothing but the failover is measured.
    left = f"SELECT count(*) FROM outbox WHERE activity_id = '{activity}' AND state = 'pending'"
    until("orders", lambda: subprocess.run(["psql", DATABASE, "-Atc", left], capture_output=True,
                                           text=True).stdout.strip() == "0")
    place = stores.ports.index(int(stores.master()))
    other = stores.ports[1 - place]
    in_step = "\n".join(ask(other, "INFO", "replication"))
    assert "master_link_status:up" in in_step, in_step
    before = len(server.rebuilds())
    begun = time.monotonic()
    if how == "kill":
        getattr(stores, f"redis_{place}").send_signal(signal.SIGKILL)
    else:
        ask(stores.sentinels[0], "SENTINEL", "FAILOVER", "shop")
    named, sells, failed = None, None, False
    deadline = begun + PATIENCE_S
    while sells is None or named is None:
        assert time.monotonic() < deadline, "it does not sell again"
        ok = buys()
        if named is None and any(
            ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop")[1] == str(other) for port in stores.sentinels
        ):
            named = time.monotonic()
        failed = failed or not ok
        if ok and failed and named is not None:
            sells = time.monotonic()
    until("the log", lambda: len(server.rebuilds()) > before)
    took = server.rebuilds()[before:]
    print(f"{how:>8} {size:>12} {(named - begun) * 1000:>10.0f} {(sells - named) * 1000:>10.0f} {took}", flush=True)
    if how == "kill":
        stores.redis(place, "--replicaof", "127.0.0.1", str(other))
    until("a replica in step", lambda: "slave0:" in "\n".join(ask(other, "INFO", "replication"))
          and "master_link_status:up" in "\n".join(ask(stores.ports[place], "INFO", "replication")))
    stores.all_know()


def main(binary, *sizes):
    with tempfile.TemporaryDirectory() as folder:
        generate(ROOT / "proto", folder)
        from seckill.v1 import seckill_pb2, seckill_pb2_grpc

        stores = Stores(folder)
        try:
            server = Server(binary, stores, folder)
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub = seckill_pb2_grpc.SeckillStub(channel)
                print(f"{'how':>8} {'reservations':>12} {'Sentinels':>10} {'then':>10} rebuild")
                for size in sizes:
                    for how in ("kill", "planned"):
                        measure(server, stores, stub, seckill_pb2, int(size), how)
        finally:
            stores.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
