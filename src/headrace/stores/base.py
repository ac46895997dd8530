"""The store port: where results live; the unique key on a message's id is what makes one result of many runs.

The comments here are the contract; `headrace.testing.StoreSuite` checks every line of it. Adapters are
opened, used and closed on one event loop. No method blocks the loop; every method either returns or raises
`StoreUnavailable` or `StorageFull`; foreign exceptions never escape. Times are wall-clock milliseconds and are
passed in, so that one clock rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.message import Dispatch, Message, Result

__all__ = ["Counts", "DeadLetter", "Delivery", "Finished", "Report", "Store"]


@dataclass(frozen=True, slots=True)
class Finished:
    """What one transaction writes for one message."""

    result: Result
    #: (destination, body): the outbox rows; the body is frozen here and never rendered again.
    outbox: Sequence[tuple[str, bytes]] = ()
    #: The message itself, where it is given up on: it becomes a dead letter with the result's error.
    dead: Message | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """The state of one (result, destination) pair, as people see it."""

    id: str
    destination: str
    state: Literal["pending", "delivered", "dead"]
    attempts: int
    next_at_ms: int | None
    last_status: int | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message, or a delivery, that was given up on."""

    kind: Literal["message", "delivery"]
    id: str
    model: str
    reason_code: str
    reason: str
    attempts: int
    dead_at_ms: int
    destination: str | None = None
    #: The message with its payload; None for a delivery and in listings.
    message: Message | None = None
    #: The id (message) that was made of this by a replay, if any.
    replayed_as: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What the store holds now; with the broker's depth it must add up to what was accepted (I11)."""

    succeeded: int
    failed: int
    dead: int
    outbox_pending: int
    outbox_dead: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one service instance last said of itself; how ingest shows the metrics of its siblings."""

    instance: str
    at_ms: int
    body: bytes


class Store(ABC):
    """Results, dead letters and the outbox on one engine."""

    @abstractmethod
    async def open(self) -> None:
        """Connect; make or migrate what is missing. Idempotent. Raises StoreUnavailable, saying what to do."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine."""

    @abstractmethod
    async def secret(self, name: str) -> bytes:
        """Return 32 random bytes that are the same for everybody who opens this store, for ever."""

    # -- results ----------------------------------------------------------------------------------------

    @abstractmethod
    async def commit(self, finished: Sequence[Finished]) -> list[bool]:
        """Write results, their outbox rows and dead letters in one durable transaction.

        One answer per entry, in order: True where this result is now *the* result, False where another was
        there first; then nothing of this entry was written. Two entries with one id in one call: the first
        wins. Wakes `wait_results` and `wait_outbox` everywhere.
        """

    @abstractmethod
    async def get(self, ids: Collection[str]) -> dict[str, Result]:
        """Return the results that are there."""

    @abstractmethod
    async def present(self, ids: Collection[str]) -> set[str]:
        """Return those of `ids` that have a result; cheaper than `get`."""

    @abstractmethod
    async def after(self, cursor: str, limit: int) -> tuple[list[Result], str]:
        """Return results in commit order after `cursor` ("" is the beginning), and the cursor to go on from.

        No result is ever skipped: one that commits later is never before a cursor already handed out. A
        cursor that we never gave raises InvalidRequest.
        """

    @abstractmethod
    async def latest(self) -> str:
        """Return the cursor after the newest result."""

    @abstractmethod
    async def wait_results(self, timeout_s: float) -> None:
        """Return when results may have been committed, at the latest after `timeout_s`; a hint."""

    # -- outbox -----------------------------------------------------------------------------------------

    @abstractmethod
    async def claim_due(
        self, *, now_ms: int, claim_ms: int, count_max: int, busy: Collection[str] = ()
    ) -> list[Dispatch]:
        """Take hold of pairs that are due, oldest due first; the attempt is counted durably before it returns.

        A pair is due when it is pending, `next_at` has come and nobody holds it (or the hold expired). No pair
        of a destination in `busy` is handed out, however many of them are due: a dead receiver's rows must not
        hide the others'. Pairs of a disabled destination are never handed out. Each says what its last attempt
        ended in.
        """

    @abstractmethod
    async def delivered(self, dispatches: Sequence[tuple[Dispatch, int]]) -> None:
        """Record success and the HTTP status. A lost token changes nothing unless the pair is still pending."""

    @abstractmethod
    async def retry(self, dispatch: Dispatch, *, next_at_ms: int, status: int | None, error: str) -> None:
        """Record a failed attempt; the pair is due again at `next_at_ms`. A lost token changes nothing."""

    @abstractmethod
    async def give_back(self, dispatch: Dispatch, *, next_at_ms: int) -> None:
        """Undo a claim whose attempt was not made: it is not counted, and the pair is due again at `next_at_ms`.

        What the pair's last attempt ended in stays as it was. A lost token changes nothing, so whoever died while
        sending has made an attempt.
        """

    @abstractmethod
    async def give_up(
        self, dispatch: Dispatch, *, now_ms: int, status: int | None, code: str, error: str, tried: bool = True
    ) -> None:
        """Make the pair a dead letter with its reason; without `tried`, this claim's attempt was not made and is not
        counted. A lost token changes nothing."""

    @abstractmethod
    async def disable(self, destination: str, *, now_ms: int, reason: str) -> int:
        """Mark a destination as gone (it answered 410): its pending pairs become dead letters, and so does
        every later one at once. Returns how many pairs died now. `enable` undoes it."""

    @abstractmethod
    async def enable(self, destination: str) -> None:
        """Let a disabled destination be sent to again."""

    @abstractmethod
    async def deliveries_of(self, ids: Collection[str]) -> dict[str, list[Delivery]]:
        """Return the pairs of results, sorted by destination; an id without pairs is left out."""

    async def deliveries(self, id: str) -> list[Delivery]:
        """Return the pairs of one result, sorted by destination."""
        return (await self.deliveries_of([id])).get(id, [])

    @abstractmethod
    async def wait_outbox(self, timeout_s: float) -> None:
        """Return when a pair may have become due by a commit, at the latest after `timeout_s`; a hint."""

    # -- dead letters -----------------------------------------------------------------------------------

    @abstractmethod
    async def dead_letters(self, *, after: str = "", limit: int = 100) -> tuple[list[DeadLetter], str]:
        """List dead letters of both kinds, oldest first, and the cursor to go on from."""

    @abstractmethod
    async def dead_letter(self, id: str, destination: str | None = None) -> DeadLetter | None:
        """Return one, with its message; None if there is none."""

    @abstractmethod
    async def mark_replayed(self, id: str, replayed_as: str) -> None:
        """Note that the dead message `id` was published again as `replayed_as`."""

    @abstractmethod
    async def replay_delivery(self, id: str, destination: str, *, now_ms: int) -> bool:
        """Make a dead pair pending again, due now, with a new series of attempts (none made, none failed) and its
        old `webhook_id` and body; re-enables the destination. False if there is no such dead pair."""

    # -- housekeeping -----------------------------------------------------------------------------------

    @abstractmethod
    async def purge(self, *, accepted_before_ms: int, limit: int = 1000) -> list[str]:
        """Remove results, with their dead letters and deliveries, of messages accepted before then; returns
        their ids. A result with a pending pair stays until that pair is delivered or dead."""

    @abstractmethod
    async def counts(self) -> Counts:
        """Count what is held."""

    @abstractmethod
    async def report(self, report: Report) -> None:
        """Keep what an instance says of itself, over what it said before; need not be durable."""

    @abstractmethod
    async def reports(self, *, since_ms: int) -> list[Report]:
        """Return what instances said since then, sorted by instance."""

    @abstractmethod
    async def health(self) -> None:
        """Return if a commit would work now, else raise what it would raise."""
