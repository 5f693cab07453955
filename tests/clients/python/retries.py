"""A client whose library repeats calls by itself, by the service config that comes with proto/.

    python retries.py ADDRESS PROTO_FOLDER

Prints `asking` before its one call of Reserve, and after it the answer on one line: the outcome,
whether it was replayed, and the reservation's id. Then it asks once more with the same request_id.
"""

import pathlib
import sys
import tempfile

import grpc

from sale import generate


def main(address, protos):
    config = pathlib.Path(protos, "seckill/v1/seckill_grpc_service_config.json").read_text()
    options = [("grpc.service_config", config), ("grpc.enable_retries", 1)]
    with tempfile.TemporaryDirectory() as folder:
        generate(protos, folder)
        from seckill.v1 import seckill_pb2, seckill_pb2_grpc, types_pb2

        with grpc.insecure_channel(address, options) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
            stub = seckill_pb2_grpc.SeckillStub(channel)
            request = seckill_pb2.ReserveRequest(
                activity_id="sale", sku_id="sku-1", user_id="u1", request_id="r1"
            )
            print("asking", flush=True)
            for _ in range(2):
                answer = stub.Reserve(request)
                outcome = seckill_pb2.ReserveOutcome.Name(answer.outcome)
                reservation = answer.reservation.reservation_id
                print(outcome, answer.replayed, reservation, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
