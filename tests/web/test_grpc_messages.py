from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from headrace.web.grpc.messages import INFERENCE, Messages, messages


def every(descriptor: Any) -> Iterator[Any]:
    yield descriptor
    for nested in descriptor.nested_types:
        yield from every(nested)


OURS = [
    message
    for top in sorted(
        messages().pool.FindFileByName("headrace/inference.proto").message_types_by_name.values(), key=str
    )
    for message in every(top)
    # The protocol's own, which Triton has not.
    if message.name != "PropertiesEntry"
]


@pytest.mark.parametrize("message", OURS, ids=lambda message: message.full_name)
def test_every_field_is_the_one_that_tritonclient_means(message: Any) -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    name = message.full_name.removeprefix("inference.")
    theirs: Any = service_pb2 if hasattr(service_pb2, name.split(".")[0]) else model_config_pb2
    for part in name.split("."):
        theirs = getattr(theirs, part, None) or theirs.DESCRIPTOR.nested_types_by_name[part]
    theirs = getattr(theirs, "DESCRIPTOR", theirs)
    for field in message.fields:
        if field.name == "properties":
            continue
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
        assert (field.containing_oneof is None) == (other.containing_oneof is None)
        if field.message_type is not None:
            assert field.message_type.full_name == other.message_type.full_name
            assert field.message_type.GetOptions().map_entry == other.message_type.GetOptions().map_entry
        if field.enum_type is not None:
            assert field.enum_type.values_by_name.keys() == other.enum_type.values_by_name.keys()
            for value in field.enum_type.values:
                assert value.number == other.enum_type.values_by_name[value.name].number


def test_every_method_has_tritons_form() -> None:
    from tritonclient.grpc import service_pb2

    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, method in messages().methods(INFERENCE).items():
        other = theirs[name]
        assert method.request.DESCRIPTOR.full_name == other.input_type.full_name
        assert method.response.DESCRIPTOR.full_name == other.output_type.full_name
        assert (method.client_streams, method.server_streams) == (other.client_streaming, other.server_streaming)


def test_two_pools_live_beside_each_other_and_beside_tritonclient() -> None:
    from tritonclient.grpc import service_pb2

    mine = Messages()["inference.ModelInferRequest"](model_name="m", id="é")
    assert service_pb2.ModelInferRequest.FromString(mine.SerializeToString()).id == "é"
    assert messages()["inference.ModelInferRequest"].FromString(mine.SerializeToString()).model_name == "m"


def test_the_files_hold_nothing_that_the_reader_does_not_know() -> None:
    for name in ("inference", "health", "reflection"):
        file = messages().pool.FindFileByName(f"headrace/{name}.proto")
        proto = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
        from headrace.web.grpc import messages as module

        text = re.sub(r"//[^\n]*", "", (module._FOLDER / f"{name}.proto").read_text())

        def fields(message: Any) -> int:
            own = 0 if message.options.map_entry else len(message.field)
            return own + sum(fields(nested) for nested in message.nested_type)

        def values(message: Any) -> int:
            return sum(len(e.value) for e in message.enum_type) + sum(values(n) for n in message.nested_type)

        count = sum(fields(m) + values(m) for m in proto.message_type) + sum(len(e.value) for e in proto.enum_type)
        assert len(re.findall(r"= \d+;", text)) == count
