from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.services.door import Call
from headrace.settings import SettingsError, load
from headrace.telemetry.trace import Recorder, Tracer
from headrace.tensor import Tensor
from headrace.web.app import WebSettings
from web.kit import FakeDoor, World, ask, world

GOOD = b'{"data": [[1, 2, 3]]}'


# -- ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/predict", "/nowhere", "/health", "/requests/x", "/metrics", "/docs"])
async def test_every_answer_carries_its_id_and_a_version(path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PATCH"):
        reply = await world().ask(method, path)
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", reply.headers["x-request-id"])
        assert reply.headers["x-model-version"] == "1"


@pytest.mark.parametrize("id", ["x" * 100_000, "a%0ab", "\x1b[31m", 'a"b', "\u00e9", "", "a b"])
async def test_a28_an_illegal_id_is_replaced_in_answer_and_log(id: str) -> None:
    here = world()
    reply = await here.predict([[1, 2]], {"X-Request-Id": id})
    made = reply.headers["x-request-id"]
    assert made != id
    assert reply.json()["request_id"] == made
    (line,) = here.lines.raw
    assert line.count(b"\n") == 1
    assert json.loads(line)["request_id"] == made
    assert len(line) < 1000


async def test_a28_a_legal_id_is_in_answer_log_and_call() -> None:
    here = world()
    reply = await here.predict([[1, 2, 3]], {"X-Request-Id": "Order_7.b-1"})
    assert reply.headers["x-request-id"] == reply.json()["request_id"] == "Order_7.b-1"
    assert here.lines.all()[0]["request_id"] == "Order_7.b-1"
    assert here.door.calls[0][1].request_id == "Order_7.b-1"


async def test_generated_ids_differ_between_requests_and_processes() -> None:
    one, other = world(), world()
    ids = {(await each.predict([[1, 2, 3]])).headers["x-request-id"] for each in (one, one, other)}
    assert len(ids) == 3


# -- the access log and the metrics -----------------------------------------------------------------------


async def test_every_request_has_one_line_with_every_field() -> None:
    here = world()
    await here.ask("POST", "/predict", GOOD, {"X-Request-Id": "a"})
    await here.ask("POST", "/predict", b"{", {"X-Request-Id": "b"})
    await here.ask("GET", "/nowhere?secret=1", b"", {"X-Request-Id": "c"})
    good, bad, lost = here.lines.all()
    assert {"timestamp", "latency_ms"} <= set(good)
    fields = (
        "request_id",
        "model",
        "model_version",
        "input_size",
        "queue_time_ms",
        "status",
        "error",
        "method",
        "route",
    )
    assert [good[name] for name in fields] == ["a", "echo", "1", len(GOOD), 0.5, 200, None, "POST", "/predict"]
    assert [bad[name] for name in fields] == ["b", "echo", "1", 1, None, 400, "invalid_json", "POST", "/predict"]
    assert [lost[name] for name in fields] == ["c", "", "", 0, None, 404, "request_not_found", "GET", "other"]
    assert b"secret" not in b"".join(here.lines.raw)


async def test_a27_strangers_cannot_make_series() -> None:
    here = world()
    await here.ask("GET", "/metrics")
    before = (await here.ask("GET", "/metrics")).body.count(b"\n")
    source = random.Random(27)
    for _ in range(500):
        name = source.randbytes(6).hex()
        await here.ask("GET", f"/{name}")
        await here.ask("POST", f"/predict/{name}", GOOD)
        await here.ask("POST", f"/v2/models/echo/versions/{name}/infer", GOOD)
        await here.ask(name.upper(), "/predict", b"", {"Content-Type": name})
    after = (await here.ask("GET", "/metrics")).body.count(b"\n")
    series = {labels for labels in here.count() if labels[2] in ("404", "405")}
    assert len(series) == 4
    # Each new series of a histogram is some twenty lines of text.
    assert after - before < 150


async def test_metrics_are_text_that_prometheus_reads() -> None:
    here = world()
    await here.predict([[1, 2, 3]])
    reply = await here.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (
        b'headrace_http_requests_total{instance="test",method="POST",route="/predict",status="200"} 1.0' in reply.body
    )
    assert b"headrace_http_in_flight" in reply.body


# -- methods and paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/predict/", "/v2/models/echo/infer/"])
async def test_a10_a_slash_at_the_end_changes_nothing_and_never_redirects(path: str) -> None:
    body = (
        GOOD
        if path.startswith("/predict")
        else (b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}')
    )
    headers = {"X-Forwarded-Proto": "https", "Host": "evil.example"}
    reply = await world().ask("POST", path, body, headers)
    assert reply.status == 200
    assert "location" not in reply.headers


@pytest.mark.parametrize(
    "path", ["//predict", "/predict//", "/v2/models/echo%2Finfer", "/PREDICT", "/%00", "/predict/a/b"]
)
async def test_a10_other_paths_are_404_or_405_and_never_redirect(path: str) -> None:
    reply = await world().ask("POST", path, GOOD)
    assert reply.status in (404, 405)
    assert "location" not in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/predict", "OPTIONS, POST"),
        ("PUT", "/predict", "OPTIONS, POST"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("POST", "/requests/a", "DELETE, GET, HEAD, OPTIONS"),
        ("DELETE", "/v2/models/echo", "GET, HEAD, OPTIONS"),
    ],
)
async def test_a10_a_wrong_method_is_405_with_the_right_allow(method: str, path: str, allow: str) -> None:
    reply = await world().ask(method, path)
    assert (reply.status, reply.json()["code"], reply.headers["allow"]) == (405, "method_not_allowed", allow)
    options = await world().ask("OPTIONS", path)
    assert (options.status, options.body, options.headers["allow"]) == (204, b"", allow)


async def test_a10_options_for_the_server_itself() -> None:
    assert (await world().ask("OPTIONS", "*")).status == 204


# -- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"\x80\x81\xff\x00", random.Random(7).randbytes(2_000_000)])
async def test_a7_body_that_is_not_utf8_is_400_without_its_bytes_in_answer_or_log(body: bytes) -> None:
    here = world()
    reply = await here.ask("POST", "/predict", body, {"Content-Type": "application/json"})
    assert (reply.status, reply.json()["code"]) == (400, "invalid_json")
    assert len(reply.body) < 500
    assert sum(map(len, here.lines.raw)) < 2048
    assert (await here.predict([[1, 2, 3]])).status == 200


async def test_a7_a_multipart_upload_to_a_json_route_is_415() -> None:
    here = world()
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    for path in ("/predict", "/v2/models/echo/infer"):
        reply = await here.ask("POST", path, b"--b\r\n\r\nx\r\n--b--\r\n", headers)
        assert (reply.status, reply.json()["code"]) == (415, "unsupported_media_type")
    assert here.door.calls == []


async def test_too_large_names_limit_and_size() -> None:
    here = world(body_bytes_max=1024)
    reply = await here.ask("POST", "/predict", b"x" * 2000)
    assert (reply.status, reply.json()["code"]) == (413, "too_large")
    assert reply.json()["details"] == {"input": "body", "limit": 1024, "size": 2000}
    reply = await here.ask("POST", "/predict", [b"x" * 1000, b"x" * 1000])
    assert (reply.status, reply.headers["connection"]) == (413, "close")


async def test_memory_for_bodies_is_bounded_and_given_back() -> None:
    here = world(bodies_bytes_max=100_000)
    clients = [Client(here, length=1_000_000) for _ in range(2)]
    clients[0].send(b"x" * 70_000)
    await turn()
    clients[1].send(b"x" * 70_000)
    await turn()
    clients[1].go()
    reply = await clients[1].task
    assert (reply.status, reply.json()["code"]) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    clients[0].go()
    await clients[0].task
    assert here.app._bodies.held == 0


async def test_a9_answers_are_never_compressed_whatever_is_accepted() -> None:
    for accept in ("gzip", "deflate", "br", "gzip;q=0", "identity"):
        for data in ([[1, 2, 3]], [[1]]):
            reply = await world().predict(data, {"Accept-Encoding": accept})
            assert "content-encoding" not in reply.headers
            reply.json()


# -- clients that go or dawdle ----------------------------------------------------------------------------


class Client:
    """A client whose moves the test decides."""

    def __init__(self, here: World, *, length: int = 0, body: bytes = GOOD) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        headers = {"Content-Length": str(length)} if length else {}
        self.task = asyncio.create_task(ask(here.app, "POST", "/predict", b"", headers, receive=self.messages.get))
        if not length:
            self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def send(self, piece: bytes) -> None:
        self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": True})

    def go(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


async def turn(times: int = 10) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_a11_a_client_that_goes_while_sending_is_counted_as_such_and_no_more() -> None:
    here = world()
    for _ in range(200):
        client = Client(here, length=1_000_000)
        client.send(b"x" * 10_000)
        client.go()
        assert (await client.task).status == 0
    assert here.door.calls == []
    assert here.count() == {("/predict", "POST", "499"): 200}
    assert {line["error"] for line in here.lines.all()} == {"cancelled"}
    assert not here.lines.all("request_failed")
    assert not here.app.inflight
    assert here.app.site.window.error_rate() == 0


async def test_a11_work_is_dropped_when_the_client_has_gone() -> None:
    started = asyncio.Event()

    async def hang(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    clock = ManualClock()
    here = world(FakeDoor(run=hang), clock)
    client = Client(here)
    await started.wait()
    here.app.sweep()
    await turn()
    assert here.door.cancelled == 0, "nobody watches a request that has just come"
    await clock.advance(0.3)
    here.app.sweep()
    await turn()
    assert here.door.cancelled == 0
    client.go()
    assert (await client.task).status == 0
    assert here.door.cancelled == 1
    assert here.lines.all()[0]["status"] == 499
    assert not here.app.inflight


async def test_a_watched_request_that_ends_well_is_answered() -> None:
    release = asyncio.Event()

    async def wait(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        await release.wait()
        return {"y": inputs["x"]}

    clock = ManualClock()
    here = world(FakeDoor(run=wait), clock)
    client = Client(here)
    await turn()
    await clock.advance(1)
    here.app.sweep()
    here.app.sweep()
    await turn()
    release.set()
    assert (await client.task).status == 200
    await turn()
    assert len(asyncio.all_tasks()) == 1, "the watcher has ended too"


async def test_a11_a_slow_sender_is_cut_with_408_and_a_steady_one_is_not() -> None:
    clock = ManualClock()
    here = world(clock=clock, body_timeout_s=30.0, body_bytes_per_s_min=1000)
    slow, steady = Client(here, length=1_000_000), Client(here, length=1_000_000)
    for _ in range(29):
        slow.send(b"x")
        steady.send(b"x" * 2000)
        await clock.advance(1)
        here.app.sweep()
    await turn()
    assert not slow.task.done()
    await clock.advance(2)
    here.app.sweep()
    reply = await slow.task
    assert (reply.status, reply.json()["code"], reply.json()["status"]) == (408, "invalid_request", 408)
    assert reply.headers["connection"] == "close"
    await turn()
    assert not steady.task.done()
    assert here.door.calls == []
    steady.go()
    await steady.task


async def test_a_sender_that_sends_nothing_at_all_is_cut_too() -> None:
    clock = ManualClock()
    here = world(clock=clock)
    client = Client(here, length=10)
    await turn()
    await clock.advance(31)
    here.app.sweep()
    assert (await client.task).status == 408


# -- the stop ---------------------------------------------------------------------------------------------


async def test_a17_after_the_listener_is_closed_requests_are_refused_and_health_is_not() -> None:
    here = world()
    here.app.site.begin_to_stop()
    here.app.site.refusing = True
    reply = await here.predict([[1, 2, 3]])
    assert (reply.status, reply.json()["code"], reply.headers["connection"]) == (503, "not_ready", "close")
    assert (await here.ask("GET", "/v2/health/live")).status == 200
    assert here.door.calls == []


async def test_finish_waits_for_requests_and_for_no_longer_than_told() -> None:
    release = asyncio.Event()

    async def wait(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        await release.wait()
        return {"y": inputs["x"]}

    here = world(FakeDoor(run=wait))
    await here.app.finish(60)
    client = Client(here)
    await turn()
    await here.app.finish(0.01)
    assert not client.task.done()
    finishing = asyncio.create_task(here.app.finish(60))
    await turn()
    release.set()
    await finishing
    assert (await client.task).status == 200


# -- traces -----------------------------------------------------------------------------------------------

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a29_the_trace_goes_on_through_the_door() -> None:
    clock, recorder = ManualClock(), Recorder()
    here = world(clock=clock, tracer=Tracer(clock, [recorder]))
    await here.predict([[1, 2, 3]], {"traceparent": TRACE, "tracestate": "a=b"})
    call = here.door.calls[0][1]
    (received,), (sent,) = recorder.named("request_received"), recorder.named("response_sent")
    assert call.traceparent == f"00-{received.trace_id}-{received.span_id}-01"
    assert (received.trace_id, received.parent_id) == (TRACE[3:35], TRACE[36:52])
    assert (sent.trace_id, sent.parent_id, sent.attributes["status"]) == (TRACE[3:35], received.span_id, 200)
    assert call.tracestate == "a=b"
    assert here.lines.all()[0]["trace_id"] == TRACE[3:35]


async def test_a29_without_anybody_to_tell_the_trace_still_goes_on() -> None:
    here = world()
    await here.predict([[1, 2, 3]], {"traceparent": TRACE})
    assert here.door.calls[0][1].traceparent.startswith(TRACE[:36])
    assert not here.door.calls[0][1].traceparent.startswith(TRACE[:50]), "a hop is a span of its own"


@pytest.mark.parametrize("value", ["", "x", TRACE[:-3], "ff" + TRACE[2:], "00-" + "0" * 32 + TRACE[35:]])
async def test_a29_a_malformed_trace_is_ignored(value: str) -> None:
    here = world()
    assert (await here.predict([[1, 2, 3]], {"traceparent": value})).status == 200
    assert here.door.calls[0][1].traceparent is None


async def test_a_failed_request_is_a_failed_span() -> None:
    clock, recorder = ManualClock(), Recorder()
    here = world(clock=clock, tracer=Tracer(clock, [recorder]))
    await here.predict([[1, 2]])
    await here.ask("GET", "/nowhere")
    assert [span.error for span in recorder.named("request_received")] == [None, "request_not_found"]


# -- settings ---------------------------------------------------------------------------------------------


def test_settings_that_contradict_each_other_are_a_fault() -> None:
    with pytest.raises(SettingsError) as caught:
        load([WebSettings], environ={"HEADRACE_WEB_BODIES_BYTES_MAX": "2048"})
    assert [fault.key for fault in caught.value.faults] == ["web.bodies_bytes_max"]
    assert load([WebSettings], environ={})[WebSettings] == WebSettings()
