from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import DeadlineExceeded, ModelFailed, Overloaded, StoreUnavailable
from headrace.services.door import Accepted, Call
from headrace.tensor import Tensor
from web.kit import FakeDoor, FakeRequests, Reply, World, world


async def accept(inputs: dict[str, Tensor], call: Call) -> Any:
    """Accept; answer at once only for those who did not ask for less."""
    call.accepted_id = "m1"
    if call.wait_s is None:
        return {"y": inputs["x"]}
    return Accepted("m1", "echo")


def long_road(run: Any = accept) -> World:
    return world(FakeDoor(run=run, requests=FakeRequests()))


async def predict(here: World, *headers: tuple[str, str]) -> Reply:
    return await here.predict([[1, 2, 3]], headers)


async def test_respond_async_is_accepted_with_its_location() -> None:
    here = long_road()
    reply = await predict(here, ("Prefer", "respond-async"))
    assert reply.status == 202
    assert reply.json() == {"id": "m1", "status": "accepted", "model": "echo"}
    assert reply.headers["location"] == "/requests/m1"
    assert reply.headers["preference-applied"] == "respond-async"
    assert here.door.calls[0][1].wait_s == 0


async def test_wait_is_handed_on_and_named_as_applied() -> None:
    here = long_road()
    reply = await predict(here, ("Prefer", "respond-async, wait=2"))
    assert here.door.calls[0][1].wait_s == 2
    assert reply.headers["preference-applied"] == "respond-async, wait=2"


async def test_a_wait_that_was_long_enough_answers_200() -> None:
    async def quick(inputs: dict[str, Tensor], call: Call) -> Any:
        call.accepted_id = "m1"
        return {"y": inputs["x"]}

    reply = await predict(long_road(quick), ("Prefer", "wait=5"))
    assert (reply.status, reply.headers["preference-applied"]) == (200, "wait=5")
    assert reply.json()["prediction"] == [[1.0, 2.0, 3.0]]


async def test_every_answer_after_acceptance_carries_the_location() -> None:
    reply = await predict(long_road())
    assert (reply.status, reply.headers["location"]) == (200, "/requests/m1")
    assert "preference-applied" not in reply.headers


async def test_a_wait_that_is_over_is_504_with_the_location() -> None:
    async def slow(inputs: dict[str, Tensor], call: Call) -> Any:
        call.accepted_id = "m1"
        return Accepted("m1", "echo", deadline_passed=True)

    reply = await predict(long_road(slow))
    assert (reply.status, reply.json()["code"]) == (504, "deadline_exceeded")
    assert reply.headers["location"] == "/requests/m1"
    assert reply.json()["details"]["id"] == "m1"


@pytest.mark.parametrize("error", [ModelFailed(), StoreUnavailable(), DeadlineExceeded()])
async def test_a_failure_after_acceptance_carries_the_location_too(error: Exception) -> None:
    async def fail(inputs: dict[str, Tensor], call: Call) -> Any:
        call.accepted_id = "m1"
        raise error

    reply = await predict(long_road(fail))
    assert reply.status >= 500
    assert reply.headers["location"] == "/requests/m1"


async def test_a_failure_before_acceptance_carries_none() -> None:
    async def full(inputs: dict[str, Tensor], call: Call) -> Any:
        raise Overloaded(retry_after_s=12.3)

    reply = await predict(long_road(full), ("Prefer", "respond-async"))
    assert (reply.status, reply.headers["retry-after"]) == (429, "13")
    assert "location" not in reply.headers


async def test_webhooks_and_key_are_handed_on() -> None:
    here = long_road()
    await predict(
        here,
        ("Webhook-URL", "https://a/, https://b/"),
        ("Webhook-URL", "https://a/"),
        ("Idempotency-Key", "k"),
        ("Prefer", "respond-async"),
    )
    call = here.door.calls[0][1]
    assert (call.destinations, call.key) == (("https://a/", "https://b/"), "k")


@pytest.mark.parametrize(
    ("name", "value"),
    [("Idempotency-Key", "two words"), ("Webhook-URL", "https://a b/"), ("Request-Timeout", "soon")],
)
async def test_a_header_that_cannot_be_honoured_is_refused_before_acceptance(name: str, value: str) -> None:
    here = long_road()
    reply = await predict(here, (name, value))
    assert (reply.status, reply.json()["code"]) == (400, "invalid_request")
    assert here.door.calls == []


async def test_the_short_road_promises_no_webhook() -> None:
    reply = await world().predict([[1, 2, 3]], {"Webhook-URL": "https://a/"})
    assert (reply.status, reply.json()["details"]["header"]) == (400, "Webhook-URL")


async def test_the_short_road_answers_at_once_whatever_is_preferred() -> None:
    reply = await world().predict([[1, 2, 3]], {"Prefer": "respond-async, wait=1"})
    assert reply.status == 200
    assert "preference-applied" not in reply.headers
    assert "location" not in reply.headers


async def test_the_protocols_route_is_accepted_in_the_same_way() -> None:
    here = long_road()
    body = b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}'
    reply = await here.ask("POST", "/v2/models/echo/infer", body, {"Prefer": "respond-async"})
    assert (reply.status, reply.headers["location"], reply.json()["id"]) == (202, "/requests/m1", "m1")


async def test_the_end_of_the_grace_period_still_tells_where_the_result_will_be() -> None:
    started = asyncio.Event()

    async def hang(inputs: dict[str, Tensor], call: Call) -> Any:
        call.accepted_id = "m1"
        started.set()
        await asyncio.Event().wait()

    here = long_road(hang)
    asking = asyncio.create_task(predict(here))
    await started.wait()
    here.app.cancel_all()
    reply = await asking
    assert (reply.status, reply.headers["location"]) == (503, "/requests/m1")
