"""Buys a unit of a flash sale, or watches the stock. See README.md."""

import argparse
import os
import pathlib
import random
import sys
import threading
import time
import uuid

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, os.environ.get("SECKILL_STUBS", str(HERE / "gen")))

from seckill.v1 import seckill_pb2, seckill_pb2_grpc  # noqa: E402

SERVICE_CONFIG = HERE.parents[1] / "proto/seckill/v1/seckill_grpc_service_config.json"

ATTEMPT_S = 2  # how long one call may take, the library's repeats included
GIVE_UP_S = 30  # how long all calls for one answer may take
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
SILENCE_S = 20  # a stream says something every 15 seconds

NO = 1
UNAVAILABLE = 69

# After these the outcome is unknown, or nothing was decided yet.
WORTH_A_REPEAT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}


def connect(address):
    """A channel whose library repeats calls by the service config."""
    options = [
        ("grpc.service_config", SERVICE_CONFIG.read_text()),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", 30_000),
    ]
    ca = os.environ.get("SECKILL_CA_FILE")
    if not ca:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes())
    return grpc.secure_channel(address, credentials, options)


def metadata():
    token = os.environ.get("SECKILL_TOKEN")
    return [("authorization", f"Bearer {token}")] if token else []


def retry_after(error):
    """The wait that the server asks for, in seconds, if it names one."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


class Waits:
    """Waits between attempts: as long as the server says, or longer each time; then gives up."""

    def __init__(self, limit_s=GIVE_UP_S):
        self.give_up_at = time.monotonic() + limit_s
        self.backoff_s = FIRST_BACKOFF_S

    def wait(self, named_s=None):
        """False when there is no time left."""
        wait_s = named_s if named_s is not None else self.backoff_s * random.uniform(0.5, 1)
        self.backoff_s = min(self.backoff_s * 2, MAX_BACKOFF_S)
        if time.monotonic() + wait_s > self.give_up_at:
            return False
        time.sleep(wait_s)
        return True


def ask(method, request):
    """Calls until there is an answer. The request stays the same, so a repeat takes nothing twice."""
    waits = Waits()
    while True:
        try:
            return method(request, timeout=ATTEMPT_S, metadata=metadata())
        except grpc.RpcError as error:
            named_s = retry_after(error)
            # A message that is too large is RESOURCE_EXHAUSTED too, and has no RetryInfo.
            unclear = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            repeatable = error.code() in WORTH_A_REPEAT and (named_s is not None or unclear)
            if not repeatable or not waits.wait(named_s):
                raise


def buy(stub, activity, sku, user, request_id, payment_fails):
    request = seckill_pb2.ReserveRequest(
        activity_id=activity, sku_id=sku, user_id=user, request_id=request_id
    )
    answer = ask(stub.Reserve, request)
    outcome = seckill_pb2.ReserveOutcome.Name(answer.outcome).removeprefix("RESERVE_OUTCOME_")
    if answer.outcome != seckill_pb2.RESERVE_OUTCOME_RESERVED:
        print(f"reserve: {outcome}")
        return NO
    reservation = answer.reservation
    again = " again" if answer.replayed else ""
    print(f"reserve: {outcome}{again}, order {reservation.order_no}")

    names = dict(
        activity_id=activity,
        sku_id=sku,
        user_id=user,
        reservation_id=reservation.reservation_id,
    )
    if payment_fails:
        print("payment: failed")
        request = seckill_pb2.ReleaseRequest(**names, reason="payment failed")
        outcome = ask(stub.Release, request).outcome
        print("release:", seckill_pb2.ReleaseOutcome.Name(outcome).removeprefix("RELEASE_OUTCOME_"))
        given_back = (
            seckill_pb2.RELEASE_OUTCOME_RELEASED,
            seckill_pb2.RELEASE_OUTCOME_ALREADY_RELEASED,
        )
        return 0 if outcome in given_back else NO

    print("payment: paid")
    outcome = confirm(stub, seckill_pb2.ConfirmRequest(**names))
    print("confirm:", seckill_pb2.ConfirmOutcome.Name(outcome).removeprefix("CONFIRM_OUTCOME_"))
    if outcome != seckill_pb2.CONFIRM_OUTCOME_CONFIRMED:
        print("payment: refunded")
        return NO
    return 0


def confirm(stub, request):
    """The order is made a moment after the reservation."""
    waits = Waits()
    while True:
        outcome = ask(stub.Confirm, request).outcome
        if outcome != seckill_pb2.CONFIRM_OUTCOME_NOT_ORDERED_YET or not waits.wait():
            return outcome


def watch(stub, activity):
    """Reads streams, one after the other, until the activity is settled."""
    request = seckill_pb2.WatchStockRequest(activity_id=activity)
    waits = Waits()
    while True:
        stream = stub.WatchStock(request, metadata=metadata())
        named_s = None
        try:
            for update in read(stream):
                waits = Waits()
                if not update.heartbeat:
                    print(
                        f"{update.sku_id} remaining={update.remaining} reserved={update.reserved}",
                        flush=True,
                    )
            return 0  # it ends by itself only when the activity is settled
        except grpc.RpcError as error:
            # CANCELLED is ours: nothing came for too long.
            passing = WORTH_A_REPEAT | {grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}
            if error.code() not in passing:
                raise
            named_s = retry_after(error)
            print(f"the stream ended ({error.code().name}); calling again", file=sys.stderr)
        if not waits.wait(named_s):
            return UNAVAILABLE


def read(stream):
    """The messages of a stream; one that says nothing for too long is cancelled."""
    while True:
        timer = threading.Timer(SILENCE_S, stream.cancel)
        timer.daemon = True
        timer.start()
        try:
            update = next(stream)
        except StopIteration:
            return
        finally:
            timer.cancel()
        yield update


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    buys = commands.add_parser("buy")
    for name in ("address", "activity", "sku", "user"):
        buys.add_argument(name)
    buys.add_argument("--payment-fails", action="store_true")
    buys.add_argument("--request-id", default=str(uuid.uuid4()))
    watches = commands.add_parser("watch")
    for name in ("address", "activity"):
        watches.add_argument(name)
    args = parser.parse_args()

    with connect(args.address) as channel:
        stub = seckill_pb2_grpc.SeckillStub(channel)
        try:
            if args.command == "watch":
                return watch(stub, args.activity)
            return buy(
                stub, args.activity, args.sku, args.user, args.request_id, args.payment_fails
            )
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return UNAVAILABLE if error.code() in WORTH_A_REPEAT else NO


if __name__ == "__main__":
    sys.exit(main())
