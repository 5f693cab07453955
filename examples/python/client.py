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

from seckill.v1 import seckill_pb2, seckill_pb2_grpc, types_pb2  # noqa: E402

SERVICE_CONFIG = HERE.parents[1] / "proto/seckill/v1/seckill_grpc_service_config.json"

ATTEMPT_S = 2  # how long one call may take, the library's repeats included
# How long all calls for one answer may take.
GIVE_UP_S = float(os.environ.get("SECKILL_GIVE_UP_S", 30))
LATE_S = 8  # after so long, an attempt that nobody has seen wins no more
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

# Outcomes of Reserve that come before those of the request.
STATE_OF_THE_SALE = (
    seckill_pb2.RESERVE_OUTCOME_NOT_STARTED,
    seckill_pb2.RESERVE_OUTCOME_PAUSED,
    seckill_pb2.RESERVE_OUTCOME_ENDED,
)
HOLDS_NOTHING = (
    types_pb2.RESERVATION_STATE_RELEASED,
    types_pb2.RESERVATION_STATE_REFUSED,
)
GIVEN_BACK = (
    seckill_pb2.RELEASE_OUTCOME_RELEASED,
    seckill_pb2.RELEASE_OUTCOME_ALREADY_RELEASED,
)


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
        self.unclear = False  # an attempt went unanswered

    def wait(self, named_s=None):
        """False when there is no time left."""
        wait_s = named_s if named_s is not None else self.backoff_s * random.uniform(0.5, 1)
        self.backoff_s = min(self.backoff_s * 2, MAX_BACKOFF_S)
        if time.monotonic() + wait_s > self.give_up_at:
            return False
        time.sleep(wait_s)
        return True


def ask(method, request, waits=None):
    """Calls until there is an answer. The request stays the same, so a repeat takes nothing twice."""
    waits = waits or Waits()
    while True:
        try:
            return method(request, timeout=ATTEMPT_S, metadata=metadata())
        except grpc.RpcError as error:
            named_s = retry_after(error)
            # A message that is too large is RESOURCE_EXHAUSTED too, and has no RetryInfo.
            unclear = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            waits.unclear |= unclear
            repeatable = error.code() in WORTH_A_REPEAT and (named_s is not None or unclear)
            if not repeatable or not waits.wait(named_s):
                raise


def buy(stub, activity, sku, user, request_id, payment_fails):
    request = seckill_pb2.ReserveRequest(
        activity_id=activity, sku_id=sku, user_id=user, request_id=request_id
    )
    waits = Waits()
    answer = ask(stub.Reserve, request, waits)
    outcome = seckill_pb2.ReserveOutcome.Name(answer.outcome).removeprefix("RESERVE_OUTCOME_")
    reservation, again = None, answer.replayed
    if answer.outcome == seckill_pb2.RESERVE_OUTCOME_RESERVED:
        reservation = answer.reservation
    elif answer.outcome in STATE_OF_THE_SALE:
        reservation, again = won_before(stub, request, waits.unclear), True
        if reservation is not None and reservation.state == types_pb2.RESERVATION_STATE_HELD:
            print(f"reserve: {outcome}, and an earlier attempt is not decided")
            return UNAVAILABLE
    if reservation is None:
        print(f"reserve: {outcome}")
        return NO
    print(f"reserve: RESERVED{' again' if again else ''}, order {reservation.order_no}")

    names = dict(
        activity_id=activity,
        sku_id=sku,
        user_id=user,
        reservation_id=reservation.reservation_id,
    )
    if payment_fails:
        print("payment: failed")
        return 0 if release(stub, names, "payment failed") in GIVEN_BACK else NO

    print("payment: paid")
    outcome = confirm(stub, seckill_pb2.ConfirmRequest(**names))
    print("confirm:", seckill_pb2.ConfirmOutcome.Name(outcome).removeprefix("CONFIRM_OUTCOME_"))
    if outcome == seckill_pb2.CONFIRM_OUTCOME_CONFIRMED:
        return 0
    if outcome == seckill_pb2.CONFIRM_OUTCOME_NOT_ORDERED_YET:
        # It still holds its units: whoever refunds first gives away what was paid.
        released = release(stub, names, "not ordered in time")
        if released == seckill_pb2.RELEASE_OUTCOME_CONFIRMED:
            return 0  # meanwhile, so the buyer has what was paid
        if released not in GIVEN_BACK:
            print("payment: kept; somebody must look")
            return NO
    print("payment: refunded")
    return NO


def won_before(stub, request, unclear):
    """What an attempt of this request won before; it is HELD while that is open.

    Reserve tells the state of the sale first. The attempt may be one of the library, or of a process
    before this one, so this asks in any case.
    """
    key = seckill_pb2.ReservationKey(
        activity_id=request.activity_id,
        sku_id=request.sku_id,
        user_id=request.user_id,
        request_id=request.request_id,
    )
    waits, late = Waits(), Waits(LATE_S)
    while True:
        try:
            by_key = seckill_pb2.GetReservationRequest(key=key)
            reservation = ask(stub.GetReservation, by_key).reservation
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            # What was not answered may still arrive.
            if not unclear or not late.wait():
                return None
            continue
        if reservation.state in HOLDS_NOTHING:
            return None
        if reservation.state != types_pb2.RESERVATION_STATE_HELD or not waits.wait():
            return reservation


def release(stub, names, reason):
    request = seckill_pb2.ReleaseRequest(**names, reason=reason)
    outcome = ask(stub.Release, request).outcome
    print("release:", seckill_pb2.ReleaseOutcome.Name(outcome).removeprefix("RELEASE_OUTCOME_"))
    return outcome


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
