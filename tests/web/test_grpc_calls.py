from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.clock import SystemClock
from headrace.errors import HeadraceError, ModelFailed, Overloaded
from headrace.models.statistics import Statistics
from headrace.services.door import Accepted, Call
from headrace.telemetry.trace import Recorder, Tracer
from headrace.tensor import Datatype, Tensor
from headrace.web.grpc.messages import messages
from web.grpc_kit import Gate, error_of, failure, raw_request, serving, trailer_of
from web.kit import FakeDoor, FakeRequests, signature, state, world

INFER = "/inference.GRPCInferenceService/ModelInfer"


# -- the protocol's methods ---------------------------------------------------------------------------------------


async def test_live_ready_and_metadata_say_what_http_says() -> None:
    door = FakeDoor(state("echo", "1"), state("echo", "2"), state("other", "1", ready=False, reason="loading"))
    here = world(door)
    async with serving(here) as (client, _):
        assert (await client.call("ServerLive")).live
        found = client.call("ServerReady")
        assert not (await found).ready
        assert "other: loading" in trailer_of(await found.trailing_metadata())["headrace-error-bin"].decode()
        assert (await client.call("ModelReady", client.message("ModelReady", name="echo"))).ready
        assert not (await client.call("ModelReady", client.message("ModelReady", name="other"))).ready
        assert not (await client.call("ModelReady", client.message("ModelReady", name="nobody"))).ready
        server = await client.call("ServerMetadata")
        assert (server.name, "model_configuration" in server.extensions) == ("headrace", True)
        model = await client.call("ModelMetadata", client.message("ModelMetadata", name="echo", version="2"))
        assert (model.name, list(model.versions), model.platform) == ("echo", ["1", "2"], "python")
        assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("x", "FP32", [-1, 3])]
        lost = await failure(client.call("ModelMetadata", client.message("ModelMetadata", name="nobody")))
        assert (lost.code(), error_of(lost)["code"]) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
        lost = await failure(client.call("ModelMetadata", client.message("ModelMetadata", name="echo", version="9")))
        assert error_of(lost)["code"] == "version_not_found"


async def test_what_tritons_clients_call_beside() -> None:
    sized = signature(Datatype.BYTES, (2, -1))
    door = FakeDoor(
        state("echo", "1"), state("fixed", "1", signature=sized), state("sick", "1", ready=False, reason="no")
    )
    here = world(door)
    done = Statistics()
    done.answered(2, 3, 0.25, 0.5, 1_800_000_000_000)
    done.refused(2, 0, 0)
    here.app.site.rows_max = 48
    here.app.site.statistics = lambda name, version: done if name == "echo" else None
    async with serving(here) as (client, _):
        config = (await client.call("ModelConfig", client.message("ModelConfig", name="echo"))).config
        assert (config.name, config.max_batch_size, list(config.input[0].dims)) == ("echo", 48, [3])
        assert (config.input[0].data_type, config.HasField("dynamic_batching")) == (11, True)
        config = (await client.call("ModelConfig", client.message("ModelConfig", name="fixed"))).config
        assert (config.max_batch_size, list(config.output[0].dims), config.output[0].data_type) == (0, [2, -1], 13)
        found = await client.call("ModelStatistics", client.message("ModelStatistics", name="echo"))
        (stats,) = found.model_stats
        assert (stats.inference_count, stats.execution_count, stats.inference_stats.fail.count) == (3, 1, 2)
        assert stats.inference_stats.compute_infer.ns == 1_000_000_000
        assert stats.inference_stats.HasField("cache_hit")
        assert (stats.last_inference, [(b.batch_size, b.compute_infer.count) for b in stats.batch_stats]) == (
            1_800_000_000_000,
            [(3, 1)],
        )
        assert [each.name for each in (await client.call("ModelStatistics")).model_stats] == ["echo"]
        assert "statistics" in (await client.call("ServerMetadata")).extensions
        index = await client.call("RepositoryIndex")
        assert [(m.name, m.version, m.state, m.reason) for m in index.models][2] == ("sick", "1", "UNAVAILABLE", "no")
        index = await client.call("RepositoryIndex", client.message("RepositoryIndex", ready=True))
        assert [m.name for m in index.models] == ["echo", "fixed"]
        for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            refused = await failure(client.call(name, client.message(name, model_name="echo")))
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
            assert error_of(refused)["details"]["listener"] == "admin"


@pytest.mark.parametrize(
    "name", ["SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"]
)
async def test_what_is_not_offered_says_what_is(name: str) -> None:
    async with serving(world()) as (client, _):
        refused = await failure(client.channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"\x0a\x01a"))
    assert refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert name in refused.details()
    assert "ModelInfer" in error_of(refused)["details"]["expected"]


async def test_a27_strangers_cannot_make_series() -> None:
    here = world()
    async with serving(here) as (client, _):
        for number in range(20):
            await failure(client.channel.unary_unary(f"/a.B{number}/C")(b""))
            await failure(client.channel.unary_unary(f"/inference.GRPCInferenceService/M{number}")(b""))
    assert set(here.count()) == {("other", "POST", "405")}


# -- inference ----------------------------------------------------------------------------------------------------


async def test_the_answer_has_the_form_of_the_request() -> None:
    async with serving(world()) as (client, _):
        data = np.array([[1, float("nan"), -0.0]], np.float32).tobytes()
        answer = await client.call("ModelInfer", raw_request(data=data, id="mine"))
        assert (list(answer.raw_output_contents), answer.id, answer.model_version) == ([data], "mine", "1")
        typed = messages()["inference.ModelInferRequest"](model_name="echo")
        typed.inputs.add(name="x", datatype="FP32", shape=[1, 3]).contents.fp32_contents.extend([1, 2, 3])
        answer = await client.call("ModelInfer", typed)
        assert list(answer.outputs[0].contents.fp32_contents) == [1, 2, 3]
        assert not answer.raw_output_contents
        assert answer.id


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (raw_request(shape=(1, 4), data=b"\0" * 16), "shape_mismatch"),
        (raw_request(shape=(-1, 3)), "shape_mismatch"),
        (raw_request(shape=()), "shape_mismatch"),
        (raw_request(model="nobody"), "model_not_found"),
        (raw_request(model="../etc"), "model_not_found"),
        (raw_request(model_version="9"), "version_not_found"),
        (messages()["inference.ModelInferRequest"](model_name="echo"), "missing_input"),
    ],
)
async def test_a_bad_request_names_its_fault_and_the_server_goes_on(request_: Any, code: str) -> None:
    here = world()
    async with serving(here) as (client, _):
        error = await failure(client.call("ModelInfer", request_))
        body = error_of(error)
        assert body["code"] == code
        assert error.code() is (
            grpc.StatusCode.NOT_FOUND if body["status"] == 404 else grpc.StatusCode.INVALID_ARGUMENT
        )
        assert error.details() == body["error"]
        assert (await client.call("ModelInfer", raw_request())).model_name == "echo"
    assert here.lines.all()[0]["error"] == code


async def test_bytes_that_are_no_message_are_refused() -> None:
    async with serving(world()) as (client, _):
        error = await failure(client.channel.unary_unary(INFER)(b"\xff" * 20))
        assert (error.code(), error_of(error)["code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")


async def test_a_model_that_raises_something_is_internal_and_opaque() -> None:
    async def boom(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise RuntimeError("secret /path")

    here = world(FakeDoor(run=boom))
    async with serving(here) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request()))
    assert (error.code(), "secret" in error.details()) == (grpc.StatusCode.INTERNAL, False)
    assert "secret" in here.lines.all("request_failed")[0]["error"]
    assert here.lines.all()[0]["status"] == 500


async def test_a_text_that_no_string_can_hold_is_still_told() -> None:
    async def half(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise ModelFailed("half \ud83d of it\n\x1b[31m")

    async with serving(world(FakeDoor(run=half))) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request()))
        assert (error.code(), error.details()[:5]) == (grpc.StatusCode.INTERNAL, "half ")
        assert error_of(error)["code"] == "model_failed"
        stream = client.stream("ModelStreamInfer")
        await stream.write(raw_request())
        assert (await stream.read()).error_message.startswith("half ")
        stream.cancel()


async def test_where_models_run_elsewhere_there_are_no_statistics_to_promise() -> None:
    async with serving(world(FakeDoor(requests=FakeRequests()))) as (client, _):
        assert "statistics" not in (await client.call("ServerMetadata")).extensions
        error = await failure(client.call("ModelStatistics"))
        assert (error.code(), "/metrics" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)


async def test_overload_says_when_to_come_back() -> None:
    async def busy(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise Overloaded(retry_after_s=2.2)

    async with serving(world(FakeDoor(run=busy))) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailer_of(error.trailing_metadata())["retry-after"] == "3"


async def test_an_error_with_long_details_still_arrives_whole() -> None:
    class Long(HeadraceError):
        code = "invalid_request"

    async def long(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise Long("ä" * 5000, details={"a": "b" * 50_000})

    async with serving(world(FakeDoor(run=long))) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(error)["error"] == error.details() == "ä" * 1024 + "…"


# -- sizes --------------------------------------------------------------------------------------------------------


async def test_a34_one_limit_for_both_protocols() -> None:
    here = world(body_bytes_max=8 << 20)
    async with serving(here) as (client, _):
        rows = 450_000
        data = bytes(12 * rows)
        answer = await client.call("ModelInfer", raw_request(shape=(rows, 3), data=data))
        assert answer.raw_output_contents[0] == data
        large = raw_request(shape=(700_000, 3), data=bytes(12 * 700_000))
        error = await failure(client.call("ModelInfer", large))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(8 << 20) in error.details() and str(large.ByteSize()) in error.details()
        assert (await client.call("ServerLive")).live
    assert [(line["status"], line["error"]) for line in here.lines.all()] == [
        (200, None),
        (413, "too_large"),
        (200, None),
    ]


async def test_a_compressed_message_is_no_way_around_the_limit() -> None:
    here = world(body_bytes_max=1 << 20)
    async with serving(here) as (client, _):
        # Small on the wire, fifty times the limit once it is inflated.
        large = raw_request(shape=(4_500_000, 3), data=bytes(54_000_000))
        assert len(gzip.compress(large.raw_input_contents[0], 1)) < 1 << 20
        error = await failure(client.call("ModelInfer", large, compression=grpc.Compression.Gzip))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        small = raw_request(shape=(1000, 3), data=bytes(12_000))
        answer = await client.call("ModelInfer", small, compression=grpc.Compression.Gzip)
        assert answer.raw_output_contents[0] == small.raw_input_contents[0]
    assert here.door.calls[0][0].inputs["x"].rows == 1000


async def test_all_bodies_together_have_a_limit_too() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate), body_bytes_max=1 << 20, bodies_bytes_max=1 << 20)
    async with serving(here) as (client, _):
        big = raw_request(shape=(60_000, 3), data=bytes(720_000))
        first = asyncio.ensure_future(client.call("ModelInfer", big))
        await gate.begun.wait()
        error = await failure(client.call("ModelInfer", big))
        assert (error.code(), error_of(error)["code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        gate.open.set()
        assert (await first).model_name == "echo"
        assert (await client.call("ModelInfer", big)).model_name == "echo"


async def test_a_call_that_is_still_being_sent_is_in_progress_and_not_for_ever() -> None:
    here = world(body_timeout_s=0.1, body_bytes_max=1024, body_bytes_per_s_min=1 << 30)
    async with serving(here) as (client, _):
        call = client.channel.stream_unary(INFER)()
        while not here.app.inflight:
            await asyncio.sleep(0)
        error = await failure(call)
        assert (error.code(), error_of(error)["details"]) == (grpc.StatusCode.INVALID_ARGUMENT, {"input": "body"})
    assert [line["status"] for line in here.lines.all()] == [400]


async def test_a_stop_does_not_wait_for_a_body_that_never_comes() -> None:
    here = world(grace_s=0.1)
    async with serving(here) as (client, listener):
        call = client.channel.stream_unary(INFER)()
        while not here.app.inflight:
            await asyncio.sleep(0)
        await asyncio.wait_for(listener.stop(), 30)
        assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE


# -- what comes around a request ----------------------------------------------------------------------------------


async def test_metadata_means_what_the_headers_mean() -> None:
    here = world()
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    metadata = (
        ("idempotency-key", '"k 1"'),
        ("x-request-id", "Order_7"),
        ("traceparent", trace),
        ("tracestate", "v=1"),
        ("prefer", "wait=7"),
        ("request-timeout", "9"),
    )
    async with serving(here) as (client, _):
        call = client.call("ModelInfer", raw_request(), metadata=metadata)
        await call
        trailer = trailer_of(await call.trailing_metadata())
    (_, seen) = here.door.calls[0]
    assert (seen.key, seen.request_id, seen.wait_s, seen.deadline_s) == ("k 1", "Order_7", 7.0, 9.0)
    assert seen.traceparent is not None and seen.traceparent.split("-")[1] == "a" * 32
    assert seen.tracestate == "v=1"
    assert (trailer["x-request-id"], trailer["x-model-version"]) == ("Order_7", "1")


async def test_a_bad_key_is_refused_as_over_http() -> None:
    async with serving(world()) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request(), metadata=(("idempotency-key", "a b"),)))
        assert error_of(error)["details"]["header"] == "Idempotency-Key"


@pytest.mark.parametrize("id", ["a b", "x" * 5000, "a%0ab"])
async def test_a28_an_illegal_id_is_replaced(id: str) -> None:
    here = world()
    async with serving(here) as (client, _):
        call = client.call("ServerLive", metadata=(("x-request-id", id),))
        await call
        made = trailer_of(await call.trailing_metadata())["x-request-id"]
    assert made != id
    assert here.lines.all()[0]["request_id"] == made


async def test_spans_cover_the_call_until_its_answer_is_sent() -> None:
    recorder = Recorder()
    clock = SystemClock()
    async with serving(world(clock=clock, tracer=Tracer(clock, [recorder]))) as (client, _):
        await client.call("ModelInfer", raw_request())
    received, sent = recorder.named("request_received")[0], recorder.named("response_sent")[0]
    assert sent.parent_id == received.span_id
    assert (received.attributes["model"], sent.attributes["status"]) == ("echo", 200)


async def test_every_call_has_its_line_and_counts_in_health() -> None:
    here = world()
    async with serving(here) as (client, _):
        await client.call("ModelInfer", raw_request())
    (line,) = here.lines.all()
    wanted = {"model": "echo", "model_version": "1", "status": 200, "error": None, "route": INFER, "method": "POST"}
    assert wanted.items() <= line.items()
    assert line["input_size"] == raw_request().ByteSize() and line["queue_time_ms"] == 0.5
    assert here.count() == {(INFER, "POST", "200"): 1}
    assert here.app.site.window.latency_p95_ms() is not None
    assert not here.app.inflight


# -- the long road ------------------------------------------------------------------------------------------------


async def test_an_accepted_message_is_answered_with_its_place() -> None:
    async def accept(inputs: dict[str, Tensor], call: Call) -> Any:
        call.accepted_id = "id1"
        return Accepted("id1", "echo", deadline_passed=call.wait_s is None)

    here = world(FakeDoor(run=accept))
    async with serving(here) as (client, _):
        call = client.call("ModelInfer", raw_request(id="mine"), metadata=(("prefer", "respond-async"),))
        answer = await call
        trailer = trailer_of(await call.trailing_metadata())
        assert (trailer["location"], trailer["preference-applied"]) == ("/requests/id1", "respond-async")
        assert (answer.id, len(answer.outputs)) == ("mine", 0)
        assert answer.parameters["accepted"].bool_param
        assert answer.parameters["location"].string_param == "/requests/id1"
        error = await failure(client.call("ModelInfer", raw_request()))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert trailer_of(error.trailing_metadata())["location"] == "/requests/id1"
        assert error_of(error)["details"]["location"] == "/requests/id1"
    assert [line["status"] for line in here.lines.all()] == [202, 504]


# -- deadlines and cancelling ---------------------------------------------------------------------------------------


async def test_a_deadline_reaches_the_door_and_ends_the_work() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate))
    async with serving(here) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request(), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await gate.cancelled.wait()
        while here.app.inflight:
            await asyncio.sleep(0)
    assert 0 < (here.door.calls[0][1].deadline_s or 0) <= 0.3
    (line,) = here.lines.all()
    assert (line["status"], line["error"]) == (504, "deadline_exceeded")


async def test_no_deadline_and_an_absurd_one_are_no_trouble() -> None:
    here = world()
    async with serving(here) as (client, _):
        await client.call("ModelInfer", raw_request())
        await client.call("ModelInfer", raw_request(), timeout=1e9)
    assert [call.deadline_s for _, call in here.door.calls] == [None, 24 * 3600.0]


async def test_a_caller_that_cancels_drops_the_work() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate))
    async with serving(here) as (client, _):
        call = client.call("ModelInfer", raw_request())
        await gate.begun.wait()
        assert call.cancel()
        await gate.cancelled.wait()
        while here.app.inflight:
            await asyncio.sleep(0)
        assert here.door.cancelled == 1
    (line,) = here.lines.all()
    assert (line["status"], line["error"]) == (499, "cancelled")


async def test_a_caller_whose_connection_breaks_drops_the_work() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate))
    async with serving(here) as (_, listener):
        port = listener.companion.port  # type: ignore[union-attr]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.unary_unary(INFER)(raw_request().SerializeToString())
            waiting = asyncio.ensure_future(failure(call))
            await gate.begun.wait()
            await channel.close(None)
            await asyncio.gather(waiting, return_exceptions=True)
        await gate.cancelled.wait()


# -- stopping -------------------------------------------------------------------------------------------------------


async def test_a17_a_stop_finishes_what_is_in_progress_and_refuses_what_comes_later() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate), grace_s=30)
    async with serving(here) as (client, listener):
        call = asyncio.ensure_future(client.call("ModelInfer", raw_request()))
        await gate.begun.wait()
        stopping = asyncio.create_task(listener.stop())
        await here.app.site.stopping.wait()
        while not here.app.site.refusing:
            await asyncio.sleep(0)
        error = await failure(client.call("ModelInfer", raw_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        gate.open.set()
        assert (await call).model_name == "echo"
        await stopping
    assert not here.door.cancelled


async def test_what_does_not_finish_in_the_grace_period_is_told_so() -> None:
    gate = Gate()
    here = world(FakeDoor(run=gate), grace_s=0.1)
    async with serving(here) as (client, listener):
        call = asyncio.ensure_future(failure(client.call("ModelInfer", raw_request())))
        await gate.begun.wait()
        await listener.stop()
        error = await call
    assert (error.code(), error_of(error)["code"]) == (grpc.StatusCode.UNAVAILABLE, "not_ready")
    assert [line["status"] for line in here.lines.all()] == [503]


async def test_while_it_drains_it_is_live_and_not_ready_and_still_answers() -> None:
    here = world(drain_s=0.0)
    async with serving(here) as (client, _):
        here.app.site.begin_to_stop()
        assert (await client.call("ServerLive")).live
        assert not (await client.call("ServerReady")).ready
        assert not (await client.call("ModelReady", client.message("ModelReady", name="echo"))).ready
        assert (await client.call("ModelInfer", raw_request())).model_name == "echo"


async def test_the_error_object_is_json_with_every_member() -> None:
    async with serving(world()) as (client, _):
        error = await failure(client.call("ModelInfer", raw_request(model="nobody")))
    body = json.loads(trailer_of(error.trailing_metadata())["headrace-error-bin"])
    assert set(body) == {"error", "code", "details", "request_id", "status"}
    assert body["request_id"] == trailer_of(error.trailing_metadata())["x-request-id"]
