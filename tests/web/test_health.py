from __future__ import annotations

import pytest

from headrace.clock import ManualClock
from headrace.errors import DeadlineExceeded, HeadraceError, ModelFailed, Overloaded
from headrace.services.door import Call
from headrace.tensor import Tensor
from web.kit import FakeDoor, FakeRequests, World, state, world


def failing(error: HeadraceError, *, every: int = 1) -> tuple[World, ManualClock]:
    """A model that fails at every n-th request."""
    count = 0

    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        nonlocal count
        count += 1
        if count % every == 0:
            raise error
        return {"y": inputs["x"]}

    clock = ManualClock()
    return world(FakeDoor(run=run), clock), clock


async def test_health_says_what_is_promised() -> None:
    here, _ = failing(ModelFailed(), every=1000)
    await here.predict([[1, 2, 3]])
    reply = await here.ask("GET", "/health")
    assert reply.status == 200
    assert reply.json() == {
        "status": "ok",
        "model_version": "1",
        "latency_p95": 0.0,
        "error_rate": 0.0,
        "last_updated": "2027-01-15T08:00:00.000Z",
        "models": [
            {
                "name": "echo",
                "version": "1",
                "ready": True,
                "reason": "",
                "last_updated": "2027-01-15T08:00:00.000Z",
            }
        ],
    }
    assert reply.headers["x-model-version"] == "1"


@pytest.mark.parametrize(("every", "status", "http"), [(50, "ok", 200), (15, "degraded", 200), (5, "unhealthy", 503)])
async def test_our_own_failures_degrade_and_then_end_health(every: int, status: str, http: int) -> None:
    here, clock = failing(ModelFailed(), every=every)
    for _ in range(100):
        await here.predict([[1, 2, 3]])
    reply = await here.ask("GET", "/health")
    assert (reply.status, reply.json()["status"]) == (http, status)
    ready = await here.ask("GET", "/v2/health/ready")
    assert ready.status == http
    assert reply.json()["error_rate"] == pytest.approx(1 / every, abs=0.01)
    await clock.advance(61)
    assert (await here.ask("GET", "/health")).json()["status"] == "ok"
    assert (await here.ask("GET", "/v2/health/ready")).status == 200


@pytest.mark.parametrize("error", [Overloaded(), DeadlineExceeded()])
async def test_what_is_nobodys_fault_does_not_count(error: HeadraceError) -> None:
    here, _ = failing(error)
    for _ in range(50):
        await here.predict([[1, 2, 3]])
    assert (await here.ask("GET", "/health")).json()["error_rate"] == 0


async def test_what_is_the_callers_fault_does_not_count() -> None:
    here = world()
    for _ in range(50):
        await here.predict([[1, 2]])
        await here.ask("GET", "/nowhere")
    assert (await here.ask("GET", "/health")).json()["status"] == "ok"


async def test_probes_do_not_thin_the_rate() -> None:
    here, _ = failing(ModelFailed())
    for _ in range(20):
        await here.predict([[1, 2, 3]])
    for _ in range(500):
        await here.ask("GET", "/v2/health/live")
        await here.ask("GET", "/metrics")
    assert (await here.ask("GET", "/health")).json()["error_rate"] == 1


async def test_lookups_that_fail_by_our_fault_count() -> None:
    requests = FakeRequests()
    requests.error = ModelFailed()
    here = world(FakeDoor(requests=requests))
    for _ in range(20):
        await here.ask("GET", "/requests/a")
    assert (await here.ask("GET", "/health")).json()["status"] == "unhealthy"


async def test_several_models_have_no_one_version() -> None:
    here = world(FakeDoor(state("one"), state("two", "3", updated_at_ms=1_800_000_000_500)))
    reply = await here.ask("GET", "/health")
    assert reply.json()["model_version"] is None
    assert reply.json()["last_updated"] == "2027-01-15T08:00:00.500Z"
    assert [each["version"] for each in reply.json()["models"]] == ["1", "3"]
    assert reply.headers["x-model-version"] == "-"


async def test_a24_no_model_is_not_ready_and_live_all_the_same() -> None:
    door = FakeDoor()
    door.states = ()
    here = world(door)
    for path in ("/v2/health/ready", "/health"):
        reply = await here.ask("GET", path)
        assert (reply.status, reply.json()["code"]) == (503, "not_ready")
        assert reply.json()["details"]["reasons"] == ["no model is loaded"]
    assert (await here.ask("GET", "/v2/health/live")).json() == {"live": True}


async def test_a24_every_reason_is_told_and_server_and_model_agree() -> None:
    door = FakeDoor(state("good"), state("bad", ready=False, reason="loading"))
    door.reasons = ["the broker cannot be reached"]
    here = world(door)
    reply = await here.ask("GET", "/v2/health/ready")
    assert (reply.status, reply.json()["ready"]) == (503, False)
    assert reply.json()["details"]["reasons"] == ["the broker cannot be reached", "bad: loading"]
    assert (await here.ask("GET", "/v2/models/bad/ready")).status == 503
    health = await here.ask("GET", "/health")
    assert (health.status, health.json()["status"]) == (503, "unhealthy")
    assert isinstance(health.json()["error"], str)
    assert (await here.ask("GET", "/v2/health/live")).status == 200


async def test_a17_a_stop_turns_everything_not_ready_at_once() -> None:
    here = world()
    here.app.site.begin_to_stop()
    for path in ("/v2/health/ready", "/v2/models/echo/ready", "/health"):
        reply = await here.ask("GET", path)
        assert (reply.status, reply.headers["connection"]) == (503, "close")
    assert (await here.ask("GET", "/v2/health/live")).status == 200
    assert (await here.predict([[1, 2, 3]])).status == 200, "until the listener is closed, requests are served"


@pytest.mark.parametrize("path", ["/health", "/v2/health/live", "/v2/health/ready"])
async def test_a10_head_is_get_without_a_body(path: str) -> None:
    here = world()
    get, head = await here.ask("GET", path), await here.ask("HEAD", path)
    assert (head.status, head.body) == (get.status, b"")
    assert head.headers["content-length"] == str(len(get.body))
