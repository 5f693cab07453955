"""A whole sale through stubs that are generated from proto/, as an order service would have them.

    python sale.py ADDRESS PROTO_FOLDER

It exits with 0 if the server at ADDRESS keeps what the contract promises. SECKILL_CA_FILE has it
call over TLS, and SECKILL_TOKEN with a token.
"""

import os
import pathlib
import sys
import tempfile
import threading
import time
import uuid

import grpc
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from grpc_tools import protoc

SKU = "phone-1"
UNITS = 2
CALL_LIMIT_S = 5
WAIT_LIMIT_S = 15


def generate(protos, folder):
    """Generates the stubs of every file of the contract into a folder of their own."""
    files = sorted(str(path) for path in pathlib.Path(protos).rglob("*.proto"))
    assert files, f"no proto files in {protos}"
    include = pathlib.Path(protoc.__file__).parent / "_proto"
    code = protoc.main(
        ["protoc", f"-I{protos}", f"-I{include}", f"--python_out={folder}",
         f"--grpc_python_out={folder}", *files]
    )
    assert code == 0, f"protoc ended with {code}"
    sys.path.insert(0, folder)


def eventually(what, check):
    """Polls until the check gives something."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def failure(call):
    """The error that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeded")


def details(error):
    """The error details by type."""
    found = {}
    for packed in rpc_status.from_call(error).details:
        for kind in (
            error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo
        ):
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                packed.Unpack(found[kind])
    return found


class Sale:
    """One activity with one offer of a few units."""

    def __init__(self, channel):
        from seckill.v1 import admin_pb2, admin_pb2_grpc, seckill_pb2, seckill_pb2_grpc, types_pb2

        self.pb, self.types, self.admin_pb = seckill_pb2, types_pb2, admin_pb2
        self.seckill = seckill_pb2_grpc.SeckillStub(channel)
        self.admin = admin_pb2_grpc.SeckillAdminStub(channel)
        self.activity = f"python-{uuid.uuid4().hex}"

    def call(self, method, request):
        return method(request, timeout=CALL_LIMIT_S)

    def open(self):
        spec = self.types.ActivitySpec(activity_id=self.activity, title="From Python")
        spec.start_time.FromSeconds(int(time.time()) - 1)
        spec.end_time.FromSeconds(int(time.time()) + 3600)
        offer = spec.offers.add(
            sku_id=SKU, title="Phone", price_minor=199900, currency_code="CNY", total=UNITS
        )
        offer.hold.FromSeconds(600)
        pb = self.admin_pb
        self.call(self.admin.CreateActivity, pb.CreateActivityRequest(spec=spec))
        approve = pb.ApproveActivityRequest(activity_id=self.activity, reason="test")
        self.call(self.admin.ApproveActivity, approve)
        warm = self.pb.WarmupRequest(activity_id=self.activity)
        answer = self.call(self.seckill.Warmup, warm)
        assert [offer.remaining for offer in answer.offers] == [UNITS], answer
        assert self.call(self.seckill.Warmup, warm).already_warm
        get = pb.GetActivityRequest(activity_id=self.activity)
        active = self.types.ACTIVITY_STATE_ACTIVE
        eventually(
            "the sale starts",
            lambda: self.call(self.admin.GetActivity, get).activity.state == active,
        )

    def request(self, user, request_id, **fields):
        return self.pb.ReserveRequest(
            activity_id=self.activity, sku_id=SKU, user_id=user, request_id=request_id, **fields
        )

    def reserve(self, user, request_id):
        return self.call(self.seckill.Reserve, self.request(user, request_id))

    def release(self, user, reservation_id):
        request = self.pb.ReleaseRequest(
            activity_id=self.activity, sku_id=SKU, user_id=user, reservation_id=reservation_id
        )
        return self.call(self.seckill.Release, request).outcome

    def confirm(self, user, reservation_id):
        request = self.pb.ConfirmRequest(
            activity_id=self.activity, sku_id=SKU, user_id=user, reservation_id=reservation_id
        )
        return self.call(self.seckill.Confirm, request)

    def get(self, reservation_id):
        request = self.pb.GetReservationRequest(reservation_id=reservation_id)
        return self.call(self.seckill.GetReservation, request).reservation


def sell(sale):
    """Reserve, replay, duplicate, sold out, release, sale of what came back, confirm."""
    pb = sale.pb
    first = sale.reserve("u-1", "r-1")
    assert first.outcome == pb.RESERVE_OUTCOME_RESERVED and not first.replayed, first
    assert first.reservation.quantity == 1 and first.reservation.order_no, first
    # Opaque text, whatever it looks like.
    second = sale.reserve("9007199254740993", "00017")
    assert second.reservation.user_id == "9007199254740993", second

    replay = sale.reserve("u-1", "r-1")
    assert replay.outcome == pb.RESERVE_OUTCOME_RESERVED and replay.replayed, replay
    assert replay.reservation.reservation_id == first.reservation.reservation_id
    assert replay.reservation.order_no == first.reservation.order_no

    duplicate = sale.reserve("u-1", "r-2")
    assert duplicate.outcome == pb.RESERVE_OUTCOME_DUPLICATE, duplicate
    held = duplicate.existing_reservation.reservation_id
    assert held == first.reservation.reservation_id, duplicate
    assert not duplicate.HasField("reservation"), duplicate

    none = sale.reserve("u-2", "r-1")
    assert none.outcome == pb.RESERVE_OUTCOME_SOLD_OUT and none.remaining == 0, none
    assert not none.HasField("reservation"), none

    theirs = first.reservation.reservation_id
    assert sale.release("u-2", theirs) == pb.RELEASE_OUTCOME_WRONG_OWNER
    assert sale.release("u-1", theirs) == pb.RELEASE_OUTCOME_RELEASED
    assert sale.release("u-1", theirs) == pb.RELEASE_OUTCOME_ALREADY_RELEASED
    assert sale.reserve("u-1", "r-1").outcome == pb.RESERVE_OUTCOME_RELEASED
    assert sale.get(theirs).state == sale.types.RESERVATION_STATE_RELEASED

    again = sale.reserve("u-2", "r-2")
    assert again.outcome == pb.RESERVE_OUTCOME_RESERVED, again
    mine = again.reservation.reservation_id
    assert again.reservation.expire_time.seconds > time.time(), again

    confirmed = eventually(
        "the order is made",
        lambda: (answer := sale.confirm("u-2", mine)).outcome
        != pb.CONFIRM_OUTCOME_NOT_ORDERED_YET and answer,
    )
    assert confirmed.outcome == pb.CONFIRM_OUTCOME_CONFIRMED, confirmed
    assert confirmed.reservation.order_no == again.reservation.order_no, confirmed
    assert sale.confirm("u-2", mine).outcome == pb.CONFIRM_OUTCOME_CONFIRMED
    assert sale.release("u-2", mine) == pb.RELEASE_OUTCOME_CONFIRMED
    assert sale.get(mine).state == sale.types.RESERVATION_STATE_CONFIRMED


def watch(sale):
    """A snapshot, then a change that somebody makes meanwhile; the deadline ends the stream."""
    seen, first = [], threading.Event()
    request = sale.pb.WatchStockRequest(activity_id=sale.activity)
    stream = sale.seckill.WatchStock(request, timeout=CALL_LIMIT_S)

    def read():
        try:
            for update in stream:
                seen.append(update)
                first.set()
        except grpc.RpcError as error:
            seen.append(error)
            first.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert first.wait(CALL_LIMIT_S)
    snapshot = seen[0]
    assert snapshot.snapshot and snapshot.total == UNITS and snapshot.remaining == UNITS, snapshot
    won = sale.reserve("watched", "r-1").reservation
    eventually("the change is seen", lambda: seen[-1].remaining == UNITS - 1 or None)
    assert not seen[-1].snapshot and seen[-1].reserved == 1, seen[-1]
    assert seen[-1].revision > snapshot.revision
    assert sale.release("watched", won.reservation_id) == sale.pb.RELEASE_OUTCOME_RELEASED
    eventually("the way back is seen", lambda: seen[-1].remaining == UNITS)
    stream.cancel()
    reader.join(CALL_LIMIT_S)
    assert seen[-1].code() == grpc.StatusCode.CANCELLED, seen[-1]


def hear_errors(sale):
    """Every error says why, in a way that a program can read."""
    request = sale.request("has a space", "", quantity=0)
    error = failure(lambda: sale.call(sale.seckill.Reserve, request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    found = details(error)
    info = found[error_details_pb2.ErrorInfo]
    assert (info.reason, info.domain) == ("INVALID_FIELD", "inventory.seckill"), info
    violations = found[error_details_pb2.BadRequest].field_violations
    fields = sorted(violation.field for violation in violations)
    assert fields == ["quantity", "user_id"], fields
    assert error_details_pb2.RetryInfo not in found, "a repeat does not help"

    request = sale.pb.WarmupRequest(activity_id="no-such-activity")
    error = failure(lambda: sale.call(sale.seckill.Warmup, request))
    assert error.code() == grpc.StatusCode.NOT_FOUND, error
    assert details(error)[error_details_pb2.ErrorInfo].reason == "UNKNOWN_ACTIVITY"


def meet_deadlines(sale):
    """A deadline ends a call and a stream with its own code, and a repeat tells what came of it."""
    request = sale.request("in-a-hurry", "r-1")
    error = failure(lambda: sale.seckill.Reserve(request, timeout=-1))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
    assert sale.reserve("in-a-hurry", "r-1").outcome == sale.pb.RESERVE_OUTCOME_SOLD_OUT

    request = sale.pb.WatchStockRequest(activity_id=sale.activity)
    started = time.monotonic()
    error = failure(lambda: list(sale.seckill.WatchStock(request, timeout=0.3)))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
    assert time.monotonic() - started < 2


def reflect(channel, version, sale):
    """Reflection names every service and method that the generated stubs know."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        # Both versions have the same messages.
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    def answer(**request):
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        return next(ask(requests, timeout=CALL_LIMIT_S))

    listed = answer(list_services="").list_services_response.service
    names = {service.name for service in listed}
    assert "grpc.health.v1.Health" in names, names
    for file in (sale.pb.DESCRIPTOR, sale.admin_pb.DESCRIPTOR):
        for service in file.services_by_name.values():
            assert service.full_name in names, (service.full_name, names)
            found = answer(file_containing_symbol=service.full_name)
            methods = set()
            for encoded in found.file_descriptor_response.file_descriptor_proto:
                reflected = descriptor_pb2.FileDescriptorProto.FromString(encoded)
                for each in reflected.service:
                    if each.name == service.name:
                        methods = {method.name for method in each.method}
            expected = {method.name for method in service.methods}
            assert methods == expected, (version, service.full_name, methods ^ expected)
            assert expected


def connect(address):
    """A channel to the server; with a CA over TLS, where a token may go along."""
    ca, token = os.environ.get("SECKILL_CA_FILE"), os.environ.get("SECKILL_TOKEN")
    if not ca:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes())
    if token:
        caller = grpc.access_token_call_credentials(token)
        credentials = grpc.composite_channel_credentials(credentials, caller)
    return grpc.secure_channel(address, credentials)


def main(address, protos):
    with tempfile.TemporaryDirectory() as folder:
        generate(protos, folder)
        with connect(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=CALL_LIMIT_S)
            sale = Sale(channel)
            sale.open()
            watch(sale)
            sell(sale)
            hear_errors(sale)
            meet_deadlines(sale)
            for version in ("v1", "v1alpha"):
                reflect(channel, version, sale)
    print("the sale went well")


if __name__ == "__main__":
    main(*sys.argv[1:])
