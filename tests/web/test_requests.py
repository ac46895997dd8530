from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import Expired, StoreUnavailable
from web.kit import FakeDoor, FakeRequests, World, ask, world


def queued() -> tuple[World, FakeRequests]:
    requests = FakeRequests()
    return world(FakeDoor(requests=requests)), requests


async def test_pending_is_202_and_finished_200() -> None:
    here, requests = queued()
    requests.put("a")
    reply = await here.ask("GET", "/requests/a")
    assert (reply.status, reply.json()["status"]) == (202, "pending")
    assert "location" not in reply.headers, "only what accepts carries a Location"
    requests.put("a", "succeeded")
    reply = await here.ask("GET", "/requests/a")
    assert (reply.status, reply.json()["status"]) == (200, "succeeded")
    assert reply.headers["x-model-version"] == "1"
    assert reply.headers["cache-control"] == "no-store"
    requests.put("b", "failed")
    assert (await here.ask("GET", "/requests/b")).status == 200


@pytest.mark.parametrize("id", ["unknown", "..%2fa", "%00", "x" * 65, "a%20b"])
async def test_what_was_never_accepted_is_not_found(id: str) -> None:
    here, _ = queued()
    for method in ("GET", "DELETE"):
        reply = await here.ask(method, f"/requests/{id}")
        assert (reply.status, reply.json()["code"]) == (404, "request_not_found")
    assert (await here.ask("GET", f"/requests/{id}/events")).status == 404


@pytest.mark.parametrize(("error", "status"), [(Expired(), 410), (StoreUnavailable(), 503)])
async def test_expired_and_a_store_that_is_down_are_told_apart(error: Exception, status: int) -> None:
    here, requests = queued()
    requests.put("a")
    requests.error = error
    for method, path in (("GET", "/requests/a"), ("DELETE", "/requests/a"), ("GET", "/requests/a/events")):
        assert (await here.ask(method, path)).status == status


async def test_a_long_poll_returns_when_the_result_is_there() -> None:
    here, requests = queued()
    requests.put("a")
    polling = asyncio.create_task(here.ask("GET", "/requests/a?wait=30"))
    while not requests.waited_s:
        await asyncio.sleep(0)
    requests.put("a", "succeeded")
    assert (await polling).status == 200
    assert requests.waited_s == [30]


async def test_a_long_poll_that_is_over_says_pending() -> None:
    here, requests = queued()
    requests.put("a")
    assert (await here.ask("GET", "/requests/a?wait=0.01")).status == 202


@pytest.mark.parametrize("wait", ["-1", "x", "", "1e3", "nan"])
async def test_a_wait_that_is_no_number_is_refused(wait: str) -> None:
    here, requests = queued()
    requests.put("a")
    reply = await here.ask("GET", f"/requests/a?wait={wait}")
    assert (reply.status, reply.json()["details"]["input"]) == (400, "wait")


async def test_a_wait_is_clamped_to_the_setting() -> None:
    requests = FakeRequests()
    here = world(FakeDoor(requests=requests), wait_s_max=0.01)
    requests.put("a")
    assert (await here.ask("GET", "/requests/a?wait=9999")).status == 202
    assert requests.waited_s == [0.01]


async def test_a17_a_stop_ends_long_polls_with_what_is_known() -> None:
    here, requests = queued()
    requests.put("a")
    polling = asyncio.create_task(here.ask("GET", "/requests/a?wait=30"))
    while not requests.waited_s:
        await asyncio.sleep(0)
    here.app.site.begin_to_stop()
    reply = await polling
    assert (reply.status, reply.headers["connection"]) == (202, "close")


async def test_cancel_commits_a_failed_result_once() -> None:
    here, requests = queued()
    requests.put("a")
    reply = await here.ask("DELETE", "/requests/a")
    assert (reply.status, reply.json()["status"], reply.json()["error"]["code"]) == (200, "failed", "cancelled")
    requests.put("b", "succeeded")
    assert (await here.ask("DELETE", "/requests/b")).json()["status"] == "succeeded"


async def test_the_short_road_has_no_requests() -> None:
    for path in ("/requests/a", "/requests/a/events", "/results"):
        reply = await world().ask("GET", path)
        assert (reply.status, reply.json()["code"]) == (404, "request_not_found")


async def test_results_are_pulled_in_order_by_cursor() -> None:
    here, requests = queued()
    for name in "abc":
        requests.put(name, "succeeded")
    first = (await here.ask("GET", "/results?limit=2")).json()
    assert [each["id"] for each in first["results"]] == ["a", "b"]
    second = (await here.ask("GET", f"/results?after={first['next']}&limit=2")).json()
    assert [each["id"] for each in second["results"]] == ["c"]
    third = (await here.ask("GET", f"/results?after={second['next']}")).json()
    assert third == {"results": [], "next": second["next"]}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=", "limit=" + "9" * 500, "after=" + "9" * 300, "after=%00"]
)
async def test_a_bad_cursor_or_limit_is_refused(query: str) -> None:
    here, _ = queued()
    reply = await here.ask("GET", f"/results?{query}")
    assert (reply.status, reply.json()["code"]) == (400, "invalid_request")


class Stream:
    """The pieces of an answer, as they come."""

    def __init__(self, here: World, path: str) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.gone = asyncio.Event()
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": []}
        scope["query_string"] = b""
        self.task = asyncio.create_task(here.app(scope, self.receive, self.sent.put))

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_events_tell_the_state_and_end_with_the_result() -> None:
    here, requests = queued()
    requests.put("a")
    stream = Stream(here, "/requests/a/events")
    start = await stream.sent.get()
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream"
    first = (await stream.sent.get())["body"]
    assert b"event: pending\ndata: {" in first
    assert first.endswith(b"}\n\n")
    requests.put("a", "succeeded")
    assert (await stream.sent.get())["body"].startswith(b"event: succeeded\ndata: {")
    assert (await stream.sent.get()).get("more_body", False) is False
    await stream.task


async def test_a_failure_amid_events_is_an_event() -> None:
    here, requests = queued()
    requests.put("a")
    stream = Stream(here, "/requests/a/events")
    await stream.sent.get()
    await stream.sent.get()
    requests.error = StoreUnavailable()
    requests.changed.set()
    requests.views["a"] = requests.views["a"]
    while len(requests.waited_s) < 2:
        await asyncio.sleep(0)
    here.app.site.begin_to_stop()
    assert (await stream.sent.get())["body"].startswith(b"event: error\ndata: {")
    await stream.task


async def test_a11_events_end_when_the_reader_has_gone() -> None:
    here, requests = queued()
    requests.put("a")
    stream = Stream(here, "/requests/a/events")
    await stream.sent.get()
    await stream.sent.get()
    stream.gone.set()
    here.app.site.clock = here.clock
    for exchange in here.app.inflight:
        exchange.started_s -= 1
    here.app.sweep()
    await stream.task
    assert not here.app.inflight


async def test_a17_a_stop_ends_events() -> None:
    here, requests = queued()
    requests.put("a")
    stream = Stream(here, "/requests/a/events")
    await stream.sent.get()
    await stream.sent.get()
    here.app.site.begin_to_stop()
    await stream.task


async def test_two_in_flight_requests_with_one_id_get_their_own_results() -> None:
    here, requests = queued()
    requests.put("a", "succeeded", mark="A")
    requests.put("b", "succeeded", mark="B")
    same = {"X-Request-Id": "same"}
    a, b = await asyncio.gather(
        ask(here.app, "GET", "/requests/a", b"", same), ask(here.app, "GET", "/requests/b", b"", same)
    )
    assert (a.json()["mark"], b.json()["mark"]) == ("A", "B")
