"""Buyers who come all the time, through several servers, while these are restarted.

    python rolling.py ADDRESS,ADDRESS… PROTO_FOLDER

The library deals the calls to the servers and repeats them, by the service config that comes with
proto/. Prints a line for each buyer: a name, the outcome, the reservation's id and the order's number.
What the library hands on as an error is printed as `error`, the code and the reason, and then the
buyer asks again with the same request_id. When standard input ends no more buyers come.
"""

import itertools
import pathlib
import sys
import tempfile
import threading
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sale import generate

BUYERS_AT_ONCE = 12
PAUSE_S = 0.02
PATIENCE_S = 20
RECONNECT_MS = 100


def reason_of(error):
    """The reason that an error gives, or `none`."""
    status = rpc_status.from_call(error)
    for detail in status.details if status else []:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    return "none"


def main(addresses, protos):
    config = pathlib.Path(protos, "seckill/v1/seckill_grpc_service_config.json").read_text()
    options = [("grpc.service_config", config), ("grpc.enable_retries", 1)]
    options += [(f"grpc.{name}_reconnect_backoff_ms", RECONNECT_MS) for name in ("initial", "min", "max")]
    # Without it the library takes the whole list for a name, which HTTP/2 refuses.
    options += [("grpc.default_authority", "seckill")]
    stop, numbers, printing = threading.Event(), itertools.count(), threading.Lock()

    def say(*words):
        with printing:
            print(*words, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        generate(protos, folder)
        from seckill.v1 import seckill_pb2, seckill_pb2_grpc

        with grpc.insecure_channel(f"ipv4:{addresses}", options) as channel:
            stub = seckill_pb2_grpc.SeckillStub(channel)

            def insist(buyer):
                request = seckill_pb2.ReserveRequest(
                    activity_id="sale", sku_id="sku-1", user_id=buyer, request_id="first"
                )
                until = time.monotonic() + PATIENCE_S
                while True:
                    try:
                        return stub.Reserve(request)
                    except grpc.RpcError as error:
                        say("error", error.code().name, reason_of(error))
                        if time.monotonic() > until:
                            raise
                        time.sleep(PAUSE_S)

            def buy():
                while not stop.is_set():
                    buyer = f"buyer-{next(numbers)}"
                    answer = insist(buyer)
                    outcome = seckill_pb2.ReserveOutcome.Name(answer.outcome)
                    won = answer.reservation
                    say(buyer, outcome, won.reservation_id, won.order_no)
                    time.sleep(PAUSE_S)

            buyers = [threading.Thread(target=buy) for _ in range(BUYERS_AT_ONCE)]
            for thread in buyers:
                thread.start()
            sys.stdin.read()
            stop.set()
            for thread in buyers:
                thread.join()
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
