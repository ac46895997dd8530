from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headrace.services.door import Call
from headrace.tensor import Tensor
from headrace.web.grpc.messages import messages
from headrace.web.grpc.streams import IN_FLIGHT_MAX
from web.grpc_kit import Gate, error_of, failure, raw_request, serving
from web.kit import FakeDoor, state, world

HEALTH = "grpc.health.v1.Health"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def rows(value: float, count: int = 1, **more: Any) -> Any:
    data = np.full((count, 3), value, np.float32)
    return raw_request(shape=(count, 3), data=data.tobytes(), **more)


# -- inference in a stream ----------------------------------------------------------------------------------------


async def test_answers_come_in_the_order_in_which_they_are_done() -> None:
    gates = {float(value): asyncio.Event() for value in range(3)}
    begun: list[float] = []

    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        value = float(inputs["x"].array[0, 0])
        begun.append(value)
        await gates[value].wait()
        return {"y": inputs["x"]}

    here = world(FakeDoor(run=run))
    async with serving(here) as (client, _):
        stream = client.stream("ModelStreamInfer", metadata=(("x-request-id", "s"),))
        for value in range(3):
            await stream.write(rows(value, id=f"r{value}"))
        for value in (2, 0, 1):
            gates[float(value)].set()
            answer = (await stream.read()).infer_response
            assert answer.id == f"r{value}"
            assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [value] * 3
            assert answer.parameters["triton_final_response"].bool_param
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
    assert begun == [0, 1, 2]
    lines = here.lines.all()
    assert sorted(line["request_id"] for line in lines) == ["s-1", "s-2", "s-3"]
    assert {line["route"] for line in lines} == {STREAM}


async def test_a_failure_ends_its_request_and_not_the_stream() -> None:
    here = world()
    async with serving(here) as (client, _):
        stream = client.stream("ModelStreamInfer")
        await stream.write(raw_request(shape=(1, 4), data=b"\0" * 16, id="bad"))
        answer = await stream.read()
        assert "[1, 4]" in answer.error_message
        assert (answer.infer_response.id, answer.infer_response.parameters["code"].string_param) == (
            "bad",
            "shape_mismatch",
        )
        await stream.write(rows(1, id="good"))
        assert (await stream.read()).infer_response.id == "good"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK
    assert [line["status"] for line in here.lines.all()] == [400, 200]


async def test_bytes_that_are_no_message_fail_alone_too() -> None:
    async with serving(world()) as (client, _):
        method = messages().methods("inference.GRPCInferenceService")["ModelStreamInfer"]
        stream = client.channel.stream_stream(STREAM, response_deserializer=method.response.FromString)()
        await stream.write(b"\xff\xff\xff")
        assert "cannot be read" in (await stream.read()).error_message
        await stream.write(rows(1).SerializeToString())
        assert not (await stream.read()).error_message
        stream.cancel()


async def test_cancelling_a_stream_drops_all_that_waits_in_it() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate))
    async with serving(here) as (client, _):
        stream = client.stream("ModelStreamInfer")
        for value in range(5):
            await stream.write(rows(value))
        while len(here.door.calls) < 5:
            await asyncio.sleep(0)
        stream.cancel()
        while here.app.inflight:
            await asyncio.sleep(0)
        assert here.door.cancelled == 5
    assert [(line["status"], line["error"]) for line in here.lines.all()] == [(499, "cancelled")] * 5


async def test_i10_a_stream_is_not_read_faster_than_it_is_answered() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate))
    async with serving(here) as (client, _):
        stream = client.stream("ModelStreamInfer")

        async def write() -> None:
            for value in range(IN_FLIGHT_MAX + 50):
                await stream.write(rows(value))
            await stream.done_writing()

        writing = asyncio.create_task(write())
        while len(here.door.calls) < IN_FLIGHT_MAX:
            await asyncio.sleep(0)
        # Another call goes all the way there and back; the stream's next request would have been begun before.
        await client.call("ServerLive")
        assert len(here.door.calls) == IN_FLIGHT_MAX
        gate.open.set()
        count = 0
        async for answer in stream:
            assert not answer.error_message
            count += 1
        assert count == IN_FLIGHT_MAX + 50
        await writing


async def test_a_key_for_a_whole_stream_is_refused() -> None:
    async with serving(world()) as (client, _):
        stream = client.stream("ModelStreamInfer", metadata=(("idempotency-key", "k"),))
        error = await failure(stream.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a17_a_stop_answers_what_a_stream_has_asked_and_then_ends_it() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate), grace_s=30)
    async with serving(here) as (client, listener):
        stream = client.stream("ModelStreamInfer")
        await stream.write(rows(1, id="last"))
        await gate.begun.wait()
        stopping = asyncio.create_task(listener.stop())
        while not here.app.site.refusing:
            await asyncio.sleep(0)
        gate.open.set()
        assert (await stream.read()).infer_response.id == "last"
        error = await failure(stream.read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await stopping


async def test_a_stream_that_asks_nothing_holds_up_no_stop() -> None:
    here = world(grace_s=600)
    async with serving(here) as (client, listener):
        stream = client.stream("ModelStreamInfer")
        await stream.write(rows(1))
        await stream.read()
        await asyncio.wait_for(listener.stop(), 30)
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE


# -- health -------------------------------------------------------------------------------------------------------


async def test_health_knows_the_server_its_services_and_its_models() -> None:
    door = FakeDoor(state("echo", "1"), state("sick", "1", ready=False, reason="loading"))
    async with serving(world(door)) as (client, _):

        async def status(service: str) -> int:
            request = messages()["grpc.health.v1.HealthCheckRequest"](service=service)
            return int((await client.call("Check", request, service=HEALTH)).status)

        assert [await status(s) for s in ("echo", "echo/1", "sick", "", HEALTH)] == [1, 1, 2, 2, 2]
        door.states = (state("echo", "1"),)
        assert [await status(s) for s in ("", "inference.GRPCInferenceService")] == [1, 1]
        for unknown in ("nobody", "echo/9", "../x"):
            error = await failure(status(unknown))
            assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_watching_tells_every_change_and_ends_with_the_server() -> None:
    here = world(grace_s=600)
    async with serving(here) as (client, listener):
        method = messages().methods(HEALTH)["Watch"]
        watch = client.channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        late = watch(method.request(service="later"))
        assert (await late.read()).status == 3
        found = watch(method.request(service="echo"))
        assert (await found.read()).status == 1
        assert not here.app.inflight
        here.door.states = (state("echo", "1", ready=False, reason="gone"), state("later"))
        assert (await found.read()).status == 2
        assert (await late.read()).status == 1
        await asyncio.wait_for(listener.stop(), 30)
        # The last word is that it is not serving any more; the status comes after all words.
        assert (await late.read()).status == 2
        assert (await failure(late.read())).code() is grpc.StatusCode.UNAVAILABLE
    assert len(here.lines.all()) == 2


# -- reflection ---------------------------------------------------------------------------------------------------


async def test_a_client_without_files_finds_everything_by_reflection() -> None:
    async with serving(world()) as (client, _):
        for version in ("v1", "v1alpha"):
            service = f"grpc.reflection.{version}.ServerReflection"
            stream = client.stream("ServerReflectionInfo", service=service)
            ask = messages()[f"grpc.reflection.{version}.ServerReflectionRequest"]
            await stream.write(ask(list_services=""))
            names = [each.name for each in (await stream.read()).list_services_response.service]
            assert names == messages().services
            await stream.write(ask(file_containing_symbol="inference.GRPCInferenceService"))
            (data,) = (await stream.read()).file_descriptor_response.file_descriptor_proto
            # As grpcurl does: a pool of its own, and a call with what was found there.
            pool = descriptor_pool.DescriptorPool()
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
            found = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ServerMetadata"]
            response = message_factory.GetMessageClass(found.output_type)
            raw = await client.channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")(b"")
            assert response.FromString(raw).name == "headrace"
            for unknown in (
                ask(file_containing_symbol="no.Such"),
                ask(file_by_filename="/etc/passwd"),
                ask(all_extension_numbers_of_type="no.Such"),
            ):
                await stream.write(unknown)
                answer = await stream.read()
                assert (answer.error_response.error_code, answer.original_request) == (5, unknown)
            await stream.write(ask())
            assert (await stream.read()).error_response.error_code == 12
            await stream.write(ask(all_extension_numbers_of_type="inference.ModelInferRequest"))
            assert (await stream.read()).all_extension_numbers_response.base_type_name
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK


async def test_an_unknown_streaming_method_is_refused_with_what_there_is() -> None:
    async with serving(world()) as (client, _):
        error = await failure(client.channel.stream_stream("/inference.GRPCInferenceService/Nope")().read())
        assert (error.code(), error_of(error)["code"]) == (grpc.StatusCode.UNIMPLEMENTED, "method_not_allowed")
