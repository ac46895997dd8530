from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from headrace.brokers.base import Broker, Receipt
from headrace.clock import ManualClock
from headrace.errors import BrokerUnavailable, HeadraceError, Internal, Overloaded, StorageFull
from headrace.message import Message
from headrace.services.publisher import Publisher
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from services.messages import message

Outcome = Receipt | HeadraceError


class Script:
    """A broker that publishes as the test says, call by call; the last line is repeated."""

    def __init__(self, *lines: Callable[[Message], Outcome]) -> None:
        self.lines = list(lines) or [lambda found: Receipt(found.id)]
        self.calls: list[tuple[str, list[str]]] = []

    async def publish(self, topic: str, messages: Sequence[Message]) -> list[Outcome]:
        self.calls.append((topic, [found.id for found in messages]))
        await asyncio.sleep(0)
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        return [line(found) for found in messages]


def unknown(found: Message) -> HeadraceError:
    return BrokerUnavailable(details={"outcome": "unknown"})


def raises(found: Message) -> Outcome:
    raise BrokerUnavailable("nobody is there")


def publisher(script: Script, clock: ManualClock, **changes: Any) -> Publisher:
    given: dict[str, Any] = {"attempts_max": 3}
    return Publisher(
        cast(Broker, script),
        clock=clock,
        metrics=Metrics(clock, instance="t"),
        logs=Logs(clock, level="error"),
        **(given | changes),
    )


async def test_all_that_come_in_one_turn_are_published_in_one_call_per_topic() -> None:
    script = Script()
    found = publisher(script, ManualClock())
    messages = [message() for _ in range(50)]
    receipts = await asyncio.gather(*(found.publish("a", each) for each in messages), found.publish("b", message()))
    assert [receipt.id for receipt in receipts[:50]] == [each.id for each in messages]
    assert [(topic, len(ids)) for topic, ids in script.calls] == [("a", 50), ("b", 1)]


@pytest.mark.parametrize("error", [Overloaded("full"), StorageFull("full"), BrokerUnavailable("gone")])
async def test_a_refusal_reaches_its_own_caller_only_and_is_not_tried_again(error: HeadraceError) -> None:
    bad = message()
    script = Script(lambda found: error if found.id == bad.id else Receipt(found.id))
    found = publisher(script, ManualClock())
    good, refused = await asyncio.gather(found.publish("a", message()), found.publish("a", bad), return_exceptions=True)
    assert isinstance(good, Receipt)
    assert type(refused) is type(error)
    assert len(script.calls) == 1


async def test_what_is_uncertain_is_published_again_under_the_same_id() -> None:
    script = Script(unknown, lambda found: Receipt(found.id, already_present=True))
    clock = ManualClock()
    sent = message()
    waiting = publisher(script, clock).publish("a", sent)
    await clock.advance(1)
    assert (await waiting).already_present
    assert script.calls == [("a", [sent.id]), ("a", [sent.id])]


async def test_a_broker_that_stays_uncertain_is_an_error_after_a_bounded_number_of_tries() -> None:
    script = Script(unknown)
    clock = ManualClock()
    waiting = publisher(script, clock).publish("a", message())
    await clock.advance(60)
    with pytest.raises(BrokerUnavailable):
        await waiting
    assert len(script.calls) == 3


@pytest.mark.parametrize("line", [raises, lambda found: cast(Outcome, 1 / 0)])
async def test_whatever_goes_wrong_everybody_gets_an_answer(line: Callable[[Message], Outcome]) -> None:
    found = publisher(Script(line), ManualClock())
    outcomes = await asyncio.gather(*(found.publish("a", message()) for _ in range(3)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {BrokerUnavailable, Internal}
    assert len({id(outcome) for outcome in outcomes}) == 3


async def test_a_caller_that_goes_away_changes_nothing_for_the_others() -> None:
    script = Script()
    found = publisher(script, ManualClock())
    gone, stays = found.publish("a", message()), found.publish("a", message())
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).id == script.calls[0][1][1]


async def test_closing_waits_for_every_outcome() -> None:
    script = Script()
    found = publisher(script, ManualClock())
    waiting = found.publish("a", message())
    await found.close()
    assert waiting.done()
