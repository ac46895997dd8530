"""The intake: which messages this process claims next, and when. It claims; it never settles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.brokers.base import Broker, Claim, Claims
from headrace.clock import Clock
from headrace.services.keeper import Keeper
from headrace.services.lanes import Lane
from headrace.services.pace import Turns
from headrace.services.settings import InferenceSettings

__all__ = ["Intake", "Taken"]

#: How long to wait for a hint: claims that expire ring no bell, and they must be seen within a second.
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Taken:
    """What one round brought; the claims' time runs since `asked_s`."""

    claims: Sequence[Claim] = ()
    asked_s: float = 0.0
    claim_ms: int = 0
    alone: bool = False
    #: A call that failed while others of the same round did not.
    failure: BaseException | None = None


_NOTHING = Taken()


class Intake:
    """Decides by room and by turn; the consumer keeps the books of what is held."""

    def __init__(
        self,
        broker: Broker,
        topics: Callable[[], Sequence[str]],
        settings: InferenceSettings,
        keeper: Keeper,
        clock: Clock,
    ) -> None:
        """Prepare; `changed` is set by whoever makes room."""
        self._broker, self._topics, self._settings, self._keeper, self._clock = broker, topics, settings, keeper, clock
        self.changed = asyncio.Event()
        self._turns = Turns(clock)
        self._lanes: dict[str, Lane] = {}
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    def lane(self, topic: str) -> Lane:
        """Return the lane of a topic, made when first asked for."""
        found = self._lanes.get(topic)
        if found is None:
            hold_s = min(self._settings.claim_s / 4, self._settings.hold_s)
            found = self._lanes[topic] = Lane(topic, hold_s, self._settings.claim_count_max)
        return found

    def close(self) -> None:
        """Claim no more; a wait that is going on ends now."""
        self._closed = True
        self.changed.set()
        if self._waiting is not None:
            self._waiting.cancel()

    def ran_suspect(self) -> None:
        """Note that a suspect is settled and the process empty again."""
        self._turns.ran_suspect()
        self._hope_again()

    async def next(self, held: int, held_bytes: int, *, paused: bool) -> Taken:
        """Claim, or wait for a reason to; may return with nothing. Raises what the broker raises.

        `held` claims with `held_bytes` of payload are held now; `paused` means that nothing new may be begun.
        """
        self.changed.clear()
        for lane in self._lanes.values():
            lane.end_round()
        if self._closed:
            return _NOTHING
        if paused or (self._turns.alone and held):
            # An empty process is what a suspect needs: what runs is finished first, nothing is begun.
            await self.changed.wait()
            return _NOTHING
        if self._turns.alone:
            return await self._claim_suspect()
        asked = self._with_room(held, held_bytes)
        if asked:
            return await self._claim_fresh(asked, held_bytes)
        await self._wait()
        return _NOTHING

    def _with_room(self, held: int, held_bytes: int) -> list[tuple[Lane, int]]:
        room = self._settings.claim_count_max - held
        if held_bytes >= self._settings.claim_bytes_max or room <= 0:
            return []
        lanes = [self.lane(topic) for topic in self._topics()]
        return [(lane, min(room, lane.room)) for lane in lanes if lane.hopeful and lane.room > 0]

    async def _claim_fresh(self, asked: list[tuple[Lane, int]], held_bytes: int) -> Taken:
        asked_s, claim_ms = self._clock.monotonic_s(), self._keeper.claim_ms
        bytes_max = max(1, (self._settings.claim_bytes_max - held_bytes) // len(asked))
        calls = [
            self._broker.claim([lane.topic], count_max=count, bytes_max=bytes_max, claim_ms=claim_ms, alone=False)
            for lane, count in asked
        ]
        got: Sequence[Claims | BaseException]
        # What one call got must not be forgotten because another one failed.
        got = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls, return_exceptions=True)
        claims: list[Claim] = []
        suspects = 0
        failure: BaseException | None = None
        for (lane, count), answer in zip(asked, got, strict=True):
            if isinstance(answer, BaseException):
                failure = answer
                continue
            lane.claimed(len(answer.claims), count)
            claims += answer.claims
            suspects += answer.suspects_waiting
        self._turns.saw_fresh(len(claims), suspects)
        return Taken(claims, asked_s, claim_ms, False, failure)

    async def _claim_suspect(self) -> Taken:
        asked_s, claim_ms = self._clock.monotonic_s(), self._keeper.claim_ms
        bytes_max = self._settings.claim_bytes_max
        got = await self._broker.claim(self._topics(), count_max=1, bytes_max=bytes_max, claim_ms=claim_ms, alone=True)
        self._turns.saw_suspect(len(got.claims), got.suspects_waiting)
        return Taken(got.claims, asked_s, claim_ms, True)

    def _hope_again(self) -> None:
        # While suspects had their turn nobody looked for fresh messages.
        for lane in self._lanes.values():
            lane.hopeful = True

    async def _wait(self) -> None:
        """Wait for a hint from the broker, for room where there was none, or for the end."""
        if self._waiting is None:
            topics = self._topics()
            hint = self._broker.wait(topics, _POLL_S) if topics else self._clock.sleep(_POLL_S)
            self._waiting = asyncio.ensure_future(hint)
            await asyncio.sleep(0)
            # What came after the last claim and before we listened has rung in vain: look once more, listening.
            self._hope_again()
            return
        changed = asyncio.ensure_future(self.changed.wait())
        both: set[asyncio.Future[Any]] = {self._waiting, changed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if self._waiting.done():
            waited, self._waiting = self._waiting, None
            self._hope_again()
            if not waited.cancelled():
                waited.result()
