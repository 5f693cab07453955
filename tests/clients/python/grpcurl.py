"""As much of grpcurl as README.md uses: it asks the server by reflection what it has.

    python grpcurl.py -plaintext [-d JSON|@] ADDRESS list|SERVICE/METHOD
"""

import sys

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def call(channel, database, name, text):
    service, method = name.rsplit("/", 1)
    pool = descriptor_pool.DescriptorPool(database)
    found = pool.FindServiceByName(service).methods_by_name[method]
    kind = message_factory.GetMessageClass(found.input_type)
    request = json_format.Parse(text, kind())
    answer = message_factory.GetMessageClass(found.output_type)
    path = f"/{service}/{method}"
    if found.server_streaming:
        answers = channel.unary_stream(path, kind.SerializeToString, answer.FromString)(request)
    else:
        answers = [
            channel.unary_unary(path, kind.SerializeToString, answer.FromString)(request, timeout=10)
        ]
    for message in answers:
        print(json_format.MessageToJson(message), flush=True)


def main(arguments):
    assert arguments.pop(0) == "-plaintext"
    text = "{}"
    if arguments[0] == "-d":
        text = arguments[1] if arguments[1] != "@" else sys.stdin.read()
        del arguments[:2]
    address, name = arguments
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if name == "list":
            print("\n".join(sorted(database.get_services())))
        else:
            call(channel, database, name, text)


if __name__ == "__main__":
    main(sys.argv[1:])
