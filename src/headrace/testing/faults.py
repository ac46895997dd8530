"""Adapters that each break one promise, to show that the suites and the history checker would notice.

    class TestMine(BrokerSuite):
        def connect(self, folder, clock, **limits):
            return BoundlessBroker(clock, **limits)

Some tests of that class fail. A checker that lets any of these pass proves nothing about a healthy adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.brokers.base import Claim, Claims
from headrace.brokers.memory import MemoryBroker
from headrace.brokers.sqlite import SqliteBroker
from headrace.clock import Clock
from headrace.errors import BrokerUnavailable
from headrace.message import Dispatch, Result, encode_result
from headrace.stores.base import Finished
from headrace.stores.memory import MemoryStore

__all__ = [
    "BoundlessBroker",
    "ForgetfulBroker",
    "ImmortalClaimsBroker",
    "KeylessBroker",
    "LastWriterStore",
    "LeakyOutboxStore",
    "SkippingStore",
    "StaleTokenBroker",
    "UncountedStore",
]

_FOR_EVER_MS = 10**12


class ForgetfulBroker(SqliteBroker):
    """Counts the attempts taken alone in this object only: who opens the file again believes that it is the first."""

    def __init__(self, path: Path, clock: Clock, *, length_max: int = 1_000_000, bytes_max: int = 4 * 1024**3) -> None:
        super().__init__(path, clock, length_max=length_max, bytes_max=bytes_max)
        self._alone: dict[str, int] = {}

    async def claim(
        self, topics: Sequence[str], *, count_max: int, bytes_max: int, claim_ms: int, alone: bool
    ) -> Claims:
        """Claim, and keep the count to itself."""
        got = await super().claim(topics, count_max=count_max, bytes_max=bytes_max, claim_ms=claim_ms, alone=alone)
        if not alone:
            return got
        tokens = [(claim.token,) for claim in got.claims]
        forget = "UPDATE claims SET alone = 1 WHERE token = ?"
        await self._db.write(lambda c: c.executemany(forget, tokens).fetchall(), BrokerUnavailable)
        for claim in got.claims:
            self._alone[claim.message.id] = self._alone.get(claim.message.id, 0) + 1
        return replace(got, claims=[replace(c, claims_alone=self._alone[c.message.id]) for c in got.claims])

    async def release(self, claims: Sequence[Claim], *, delay_ms: int = 0) -> set[str]:
        """Give back, and take the count back too."""
        lost = await super().release(claims, delay_ms=delay_ms)
        for claim in claims:
            if claim.token not in lost and claim.message.id in self._alone:
                self._alone[claim.message.id] -= 1
        return lost


class ImmortalClaimsBroker(MemoryBroker):
    """States a deadline and never keeps it: what its holder lost is lost."""

    async def claim(
        self, topics: Sequence[str], *, count_max: int, bytes_max: int, claim_ms: int, alone: bool
    ) -> Claims:
        """Claim for ever."""
        due_ms = self._clock.now_ms() + claim_ms
        claim_ms += _FOR_EVER_MS
        got = await super().claim(topics, count_max=count_max, bytes_max=bytes_max, claim_ms=claim_ms, alone=alone)
        return replace(got, claims=[replace(claim, deadline_ms=due_ms) for claim in got.claims])

    def extend_blocking(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Extend for ever."""
        return super().extend_blocking(claims, claim_ms + _FOR_EVER_MS)


class StaleTokenBroker(MemoryBroker):
    """Lets whoever once held a message acknowledge it, though another one runs it now."""

    async def ack(self, claims: Sequence[Claim]) -> set[str]:
        """Remove by id."""
        rows = [self._rows.get(claim.message.id) for claim in claims]
        named = zip(claims, rows, strict=True)
        await super().ack([replace(claim, token=row.token) if row else claim for claim, row in named])
        return {claim.token for claim, row in zip(claims, rows, strict=True) if row is None}


class BoundlessBroker(MemoryBroker):
    """Takes its limits and ignores them."""

    def __init__(self, clock: Clock, *, length_max: int = 0, bytes_max: int = 0) -> None:
        super().__init__(clock, length_max=1 << 62, bytes_max=1 << 62)


class KeylessBroker(MemoryBroker):
    """Forgets a keyed id with its message: the same key is then accepted, and run, again."""

    async def ack(self, claims: Sequence[Claim]) -> set[str]:
        """Remove, fingerprints too."""
        lost = await super().ack(claims)
        await self.forget([claim.message.id for claim in claims if claim.token not in lost], 0)
        return lost


class LastWriterStore(MemoryStore):
    """Has no unique key: a second result of an id stands beside the first in the line and hides it from `get`."""

    def _commit_one(self, entry: Finished, body: bytes) -> bool:
        self._results.pop(entry.result.id, None)
        return super()._commit_one(entry, body)

    async def purge(self, *, accepted_before_ms: int, limit: int = 1000) -> list[str]:
        """Remove what is older, each of the rows that share an id."""
        old = [(seq, kept) for seq, kept in self._kept.items() if kept.accepted_at_ms < accepted_before_ms]
        for seq, kept in old:
            if self._results.get(kept.id, (seq, b""))[0] != seq:
                del self._kept[seq]
        return await super().purge(accepted_before_ms=accepted_before_ms, limit=limit)


class LeakyOutboxStore(MemoryStore):
    """Writes the outbox of a result that lost: a receiver gets what nobody can read."""

    def _commit_one(self, entry: Finished, body: bytes) -> bool:
        id, kept = entry.result.id, self._results.get(entry.result.id)
        if kept is None:
            return super()._commit_one(entry, body)
        del self._results[id]
        newest = self._newest
        super()._commit_one(replace(entry, dead=None), encode_result(entry.result))
        del self._kept[self._newest]
        self._newest, self._results[id] = newest, kept
        return False


class UncountedStore(MemoryStore):
    """Counts an attempt when its outcome is recorded: a delivery that dies in the middle never counts."""

    async def claim_due(
        self, *, now_ms: int, claim_ms: int, count_max: int, busy: Collection[str] = ()
    ) -> list[Dispatch]:
        """Take hold of due pairs and count nothing yet."""
        found = await super().claim_due(now_ms=now_ms, claim_ms=claim_ms, count_max=count_max, busy=busy)
        self._count(found, -1)
        return found

    async def delivered(self, dispatches: Sequence[tuple[Dispatch, int]]) -> None:
        """Count now, and record."""
        self._count([dispatch for dispatch, _ in dispatches], 1)
        await super().delivered(dispatches)

    async def retry(self, dispatch: Dispatch, *, next_at_ms: int, status: int | None, error: str) -> None:
        """Count now, and record."""
        self._count([dispatch] if self._held(dispatch) else [], 1)
        await super().retry(dispatch, next_at_ms=next_at_ms, status=status, error=error)

    async def give_back(self, dispatch: Dispatch, *, next_at_ms: int) -> None:
        """Count now what the store takes off."""
        self._count([dispatch] if self._held(dispatch) else [], 1)
        await super().give_back(dispatch, next_at_ms=next_at_ms)

    async def give_up(
        self, dispatch: Dispatch, *, now_ms: int, status: int | None, code: str, error: str, tried: bool = True
    ) -> None:
        """Count now, and record."""
        self._count([dispatch] if self._held(dispatch) else [], 1)
        await super().give_up(dispatch, now_ms=now_ms, status=status, code=code, error=error, tried=tried)

    def _count(self, dispatches: Sequence[Dispatch], change: int) -> None:
        for dispatch in dispatches:
            pair = self._pairs.get((dispatch.id, dispatch.destination))
            if pair is not None and pair.state == "pending":
                pair.attempts += change


class SkippingStore(MemoryStore):
    """Moves a cursor to the newest result, whatever the page had room for."""

    async def after(self, cursor: str, limit: int) -> tuple[list[Result], str]:
        """Return a page, and a cursor that is too far on."""
        page, end = await super().after(cursor, limit)
        return page, str(self._newest) if page else end
