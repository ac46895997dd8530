"""What every broker test stands on: how to get a broker, how to let time pass, and messages to publish."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.brokers.base import Broker, Claim, Claims, Receipt
from headrace.clock import Clock, ManualClock
from headrace.errors import HeadraceError
from headrace.message import Message, keyed_id, new_id

__all__ = ["SECRET", "BrokerBench", "Opened", "stored"]

SECRET = b"conformance".ljust(32, b".")

#: Opens a broker; called again in one test, it opens what another process would open. All are closed at the end.
Opened = Callable[..., Awaitable[Broker]]

#: Everything that should happen "soon" happens within this, however slow the machine; nothing waits so long.
SOON_S = 20.0


class BrokerBench(ABC):
    """The hooks of the suite, and the steps that its tests share."""

    pytestmark = pytest.mark.asyncio

    #: How long the tests claim for. An engine whose own clock rules sets this short and overrides `pass_ms`.
    claim_ms = 10_000
    #: The topic that most tests use; an engine that cannot empty its topics overrides it as a property.
    topic = "fraud"

    @abstractmethod
    def connect(self, folder: Path, clock: Clock, **limits: int) -> Broker:
        """Return a broker that is not opened yet; `limits` are length_max and bytes_max.

        Called again with the same folder, it returns what another process would have: the same topics, where
        the engine is shared or durable.
        """

    @pytest.fixture
    def clock(self) -> Clock:
        """Return the clock that rules the deadlines."""
        return ManualClock()

    async def pass_ms(self, clock: Clock, delta_ms: int) -> None:
        """Let time pass for the broker."""
        assert isinstance(clock, ManualClock), "override pass_ms"
        await clock.advance(delta_ms / 1000)

    def too_large(self, clock: Clock) -> Message | None:
        """Return a message that this engine refuses as too large; None if there is no such limit."""
        return None

    @pytest_asyncio.fixture
    async def opened(self, tmp_path: Path, clock: Clock) -> AsyncIterator[Opened]:
        """Return the opener of brokers of this test."""
        brokers: list[Broker] = []

        async def open_one(**limits: int) -> Broker:
            broker = self.connect(tmp_path, clock, **limits)
            brokers.append(broker)
            await broker.open()
            return broker

        yield open_one
        for broker in brokers:
            await broker.close()

    @pytest_asyncio.fixture
    async def broker(self, opened: Opened) -> Broker:
        """Return an open broker with roomy limits."""
        return await opened()

    def message(self, clock: Clock, **changes: Any) -> Message:
        """Return a message, new unless `changes` say otherwise."""
        now_ms = clock.now_ms()
        given: dict[str, Any] = {
            "id": new_id(now_ms, SECRET),
            "model": "fraud",
            "signature": "s" * 32,
            "accepted_at_ms": now_ms,
            "header_length": 2,
            "payload": b"{}\x00\x01",
        }
        return Message(**(given | changes))

    def keyed(self, clock: Clock, key: str, fingerprint: str = "f" * 64, **changes: Any) -> Message:
        """Return a message with an idempotency key."""
        return self.message(clock, id=keyed_id(key, SECRET), fingerprint=fingerprint, **changes)

    async def publish(self, broker: Broker, clock: Clock, count: int, **changes: Any) -> list[Message]:
        """Publish that many messages to the topic, all of which must be stored."""
        messages = [self.message(clock, **changes) for _ in range(count)]
        outcomes = await broker.publish(self.topic, messages)
        assert outcomes == [Receipt(message.id) for message in messages]
        return messages

    async def take(
        self, broker: Broker, count_max: int = 100, *, alone: bool = False, bytes_max: int = 1 << 30
    ) -> Claims:
        """Claim from the topic."""
        return await broker.claim(
            [self.topic], count_max=count_max, bytes_max=bytes_max, claim_ms=self.claim_ms, alone=alone
        )

    async def take_one(self, broker: Broker, *, alone: bool = False) -> Claim:
        """Claim exactly one message, which must be there."""
        claims = (await self.take(broker, 1, alone=alone)).claims
        assert len(claims) == 1, f"one message should be there to be claimed{' alone' if alone else ''}"
        return claims[0]

    async def lose(self, broker: Broker, clock: Clock, count: int = 1, *, alone: bool = False) -> Sequence[Claim]:
        """Claim, and let the claims expire."""
        claims = (await self.take(broker, count, alone=alone)).claims
        assert len(claims) == count
        await self.expire(clock)
        return claims

    async def expire(self, clock: Clock) -> None:
        """Let every claim of before expire."""
        await self.pass_ms(clock, self.claim_ms + 1)

    async def soon(self, waited: Awaitable[Any]) -> Any:
        """Await what must not take long, so that a hang is a failure and no timeout of the runner."""
        return await asyncio.wait_for(waited, SOON_S)


def stored(outcomes: Sequence[Receipt | HeadraceError]) -> list[str]:
    """Return the ids that are stored by this very call."""
    return [found.id for found in outcomes if isinstance(found, Receipt) and not found.already_present]
