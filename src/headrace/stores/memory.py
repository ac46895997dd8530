"""Results, dead letters and the outbox in this process's memory: real semantics, no durability."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.clock import Clock
from headrace.errors import InvalidRequest, StoreUnavailable
from headrace.message import Dispatch, Message, Result, decode_message, decode_result, encode_message, encode_result
from headrace.stores.base import Counts, DeadLetter, Delivery, Finished, Report, Store

__all__ = ["MemoryStore", "connect"]


def connect(url: str, *, clock: Clock) -> MemoryStore:
    """Return a store of its own; `memory://` names nothing that could be shared."""
    return MemoryStore(clock)


@dataclass(slots=True)
class _Pair:
    """One (result, destination)."""

    id: str
    destination: str
    webhook_id: str
    body: bytes
    next_ms: int
    created_ms: int
    model: str
    traceparent: str | None
    state: Literal["pending", "delivered", "dead"] = "pending"
    attempts: int = 0
    token: str = ""
    last_status: int | None = None
    last_error: str | None = None


class MemoryStore(Store):
    """A store that forgets everything with its process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_open = False
        self._secrets: dict[str, bytes] = {}
        self._sequence = itertools.count(1)
        self._newest = 0
        #: id → (sequence, encoded result); encoded, so that what cannot be kept is found here too.
        self._results: dict[str, tuple[int, bytes]] = {}
        self._kept: dict[int, Result] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._disabled: dict[str, str] = {}
        self._dead: dict[tuple[str, str | None], tuple[int, DeadLetter, bytes | None]] = {}
        self._newest_dead = 0
        self._reports: dict[str, Report] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {"results": set(), "outbox": set()}

    async def open(self) -> None:
        """Start; what was committed before a close is still there."""
        self._is_open = True

    async def close(self) -> None:
        """Stop, waking whoever waits."""
        self._is_open = False
        self._wake("results")
        self._wake("outbox")

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("The store is not open")

    async def secret(self, name: str) -> bytes:
        """Return 32 random bytes."""
        self._check_open()
        return self._secrets.setdefault(name, secrets.token_bytes(32))

    # -- results ----------------------------------------------------------------------------------------

    async def commit(self, finished: Sequence[Finished]) -> list[bool]:
        """Write results, outbox and dead letters."""
        self._check_open()
        encoded = [encode_result(entry.result) for entry in finished]
        firsts = [self._commit_one(entry, body) for entry, body in zip(finished, encoded, strict=True)]
        self._wake("results")
        if any(entry.outbox for entry in finished):
            self._wake("outbox")
        return firsts

    def _commit_one(self, entry: Finished, body: bytes) -> bool:
        result = entry.result
        if result.id in self._results:
            return False
        self._newest = next(self._sequence)
        self._results[result.id] = (self._newest, body)
        self._kept[self._newest] = result
        if entry.dead is not None:
            assert result.error is not None
            self._bury(
                DeadLetter(
                    kind="message",
                    id=result.id,
                    model=result.model,
                    reason_code=result.error.code,
                    reason=result.error.message,
                    attempts=result.attempts,
                    dead_at_ms=result.finished_at_ms,
                ),
                entry.dead,
            )
        for number, (destination, frozen) in enumerate(entry.outbox):
            webhook_id = f"{result.id}_{number}" if len(entry.outbox) > 1 else result.id
            now_ms = result.finished_at_ms
            pair = _Pair(result.id, destination, webhook_id, frozen, now_ms, now_ms, result.model, result.traceparent)
            self._pairs[result.id, destination] = pair
            if destination in self._disabled:
                self._bury_pair(pair, code="disabled", reason=self._disabled[destination], now_ms=now_ms)
        return True

    async def get(self, ids: Collection[str]) -> dict[str, Result]:
        """Return the results that are there."""
        self._check_open()
        return {id: decode_result(self._results[id][1]) for id in ids if id in self._results}

    async def present(self, ids: Collection[str]) -> set[str]:
        """Return those that have a result."""
        self._check_open()
        return {id for id in ids if id in self._results}

    async def after(self, cursor: str, limit: int) -> tuple[list[Result], str]:
        """Return results after a cursor, which is the sequence of the last one read."""
        self._check_open()
        start = _start(cursor, self._newest)
        found = list(itertools.islice(((seq, kept) for seq, kept in self._kept.items() if seq > start), limit))
        return [kept for _, kept in found], str(found[-1][0]) if found else str(start)

    async def latest(self) -> str:
        """Return the cursor after the newest result."""
        self._check_open()
        return str(self._newest)

    async def wait_results(self, timeout_s: float) -> None:
        """Wait for a commit."""
        await self._wait("results", timeout_s)

    # -- outbox -----------------------------------------------------------------------------------------

    async def claim_due(
        self, *, now_ms: int, claim_ms: int, count_max: int, busy: Collection[str] = ()
    ) -> list[Dispatch]:
        """Take hold of due pairs."""
        self._check_open()
        due = [
            pair
            for pair in self._pairs.values()
            if pair.state == "pending"
            and pair.next_ms <= now_ms
            and pair.destination not in busy
            and pair.destination not in self._disabled
        ]
        due.sort(key=lambda pair: pair.next_ms)
        return [self._hold(pair, now_ms + claim_ms) for pair in due[:count_max]]

    def _hold(self, pair: _Pair, until_ms: int) -> Dispatch:
        pair.token, pair.next_ms, pair.attempts = secrets.token_hex(8), until_ms, pair.attempts + 1
        return Dispatch(
            id=pair.id,
            destination=pair.destination,
            webhook_id=pair.webhook_id,
            body=pair.body,
            attempt=pair.attempts,
            created_at_ms=pair.created_ms,
            token=pair.token,
            traceparent=pair.traceparent,
            last_status=pair.last_status,
            last_error=pair.last_error,
        )

    async def delivered(self, dispatches: Sequence[tuple[Dispatch, int]]) -> None:
        """Record successes."""
        self._check_open()
        for dispatch, status in dispatches:
            pair = self._pairs.get((dispatch.id, dispatch.destination))
            if pair is not None and pair.state == "pending":
                pair.state, pair.token, pair.last_status, pair.last_error = "delivered", "", status, None

    async def retry(self, dispatch: Dispatch, *, next_at_ms: int, status: int | None, error: str) -> None:
        """Record a failed attempt."""
        pair = self._held(dispatch)
        if pair is not None:
            pair.token, pair.next_ms, pair.last_status, pair.last_error = "", next_at_ms, status, error

    async def give_back(self, dispatch: Dispatch, *, next_at_ms: int) -> None:
        """Undo a claim."""
        pair = self._held(dispatch)
        if pair is not None:
            pair.token, pair.next_ms, pair.attempts = "", next_at_ms, pair.attempts - 1

    async def give_up(
        self, dispatch: Dispatch, *, now_ms: int, status: int | None, code: str, error: str, tried: bool = True
    ) -> None:
        """Make the pair a dead letter."""
        pair = self._held(dispatch)
        if pair is not None:
            pair.last_status, pair.attempts = status, pair.attempts - (not tried)
            self._bury_pair(pair, code=code, reason=error, now_ms=now_ms)

    async def disable(self, destination: str, *, now_ms: int, reason: str) -> int:
        """Mark a destination as gone."""
        self._check_open()
        self._disabled[destination] = reason
        gone = [p for p in self._pairs.values() if p.destination == destination and p.state == "pending"]
        for pair in gone:
            self._bury_pair(pair, code="disabled", reason=reason, now_ms=now_ms)
        return len(gone)

    async def enable(self, destination: str) -> None:
        """Let a destination be sent to again."""
        self._check_open()
        self._disabled.pop(destination, None)

    async def deliveries_of(self, ids: Collection[str]) -> dict[str, list[Delivery]]:
        """Return the pairs of results."""
        self._check_open()
        found: dict[str, list[Delivery]] = {}
        for pair in sorted(self._pairs.values(), key=lambda pair: pair.destination):
            if pair.id in ids:
                next_at_ms = pair.next_ms if pair.state == "pending" else None
                found.setdefault(pair.id, []).append(
                    Delivery(
                        pair.id,
                        pair.destination,
                        pair.state,
                        pair.attempts,
                        next_at_ms,
                        pair.last_status,
                        pair.last_error,
                    )
                )
        return found

    async def wait_outbox(self, timeout_s: float) -> None:
        """Wait for a commit with pairs, or a replay."""
        await self._wait("outbox", timeout_s)

    def _held(self, dispatch: Dispatch) -> _Pair | None:
        self._check_open()
        pair = self._pairs.get((dispatch.id, dispatch.destination))
        return pair if pair is not None and pair.token == dispatch.token and pair.state == "pending" else None

    # -- dead letters -----------------------------------------------------------------------------------

    def _bury(self, letter: DeadLetter, message: Message | None) -> None:
        self._newest_dead += 1
        body = encode_message(message) if message is not None else None
        self._dead[letter.id, letter.destination] = (self._newest_dead, letter, body)

    def _bury_pair(self, pair: _Pair, *, code: str, reason: str, now_ms: int) -> None:
        pair.state, pair.token, pair.last_error = "dead", "", reason
        letter = DeadLetter(
            kind="delivery",
            id=pair.id,
            model=pair.model,
            reason_code=code,
            reason=reason,
            attempts=pair.attempts,
            dead_at_ms=now_ms,
            destination=pair.destination,
        )
        self._bury(letter, None)

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> tuple[list[DeadLetter], str]:
        """List dead letters, oldest first, without their messages."""
        self._check_open()
        start = _start(after, self._newest_dead)
        found = sorted((seq, letter) for seq, letter, _ in self._dead.values() if seq > start)[:limit]
        return [letter for _, letter in found], str(found[-1][0]) if found else str(start)

    async def dead_letter(self, id: str, destination: str | None = None) -> DeadLetter | None:
        """Return one, with its message."""
        self._check_open()
        found = self._dead.get((id, destination))
        if found is None:
            return None
        _, letter, body = found
        return replace(letter, message=decode_message(body)) if body is not None else letter

    async def mark_replayed(self, id: str, replayed_as: str) -> None:
        """Note the new id beside the dead message."""
        self._check_open()
        if (id, None) in self._dead:
            seq, letter, body = self._dead[id, None]
            self._dead[id, None] = (seq, replace(letter, replayed_as=replayed_as), body)

    async def replay_delivery(self, id: str, destination: str, *, now_ms: int) -> bool:
        """Make a dead pair pending again."""
        self._check_open()
        pair = self._pairs.get((id, destination))
        if pair is None or pair.state != "dead":
            return False
        pair.state, pair.attempts, pair.next_ms, pair.created_ms = "pending", 0, now_ms, now_ms
        pair.last_status = pair.last_error = None
        self._disabled.pop(destination, None)
        self._dead.pop((id, destination), None)
        self._wake("outbox")
        return True

    # -- housekeeping -----------------------------------------------------------------------------------

    async def purge(self, *, accepted_before_ms: int, limit: int = 1000) -> list[str]:
        """Remove what is older."""
        self._check_open()
        pinned = {pair.id for pair in self._pairs.values() if pair.state == "pending"}
        old = [r for r in self._kept.values() if r.accepted_at_ms < accepted_before_ms and r.id not in pinned]
        old.sort(key=lambda result: result.accepted_at_ms)
        ids = [result.id for result in old[:limit]]
        for id in ids:
            del self._kept[self._results.pop(id)[0]]
            for key in [key for key in self._pairs if key[0] == id]:
                del self._pairs[key]
            for dead_key in [key for key in self._dead if key[0] == id]:
                del self._dead[dead_key]
        return ids

    async def counts(self) -> Counts:
        """Count what is held."""
        self._check_open()
        succeeded = sum(result.succeeded for result in self._kept.values())
        states = [pair.state for pair in self._pairs.values()]
        dead = sum(letter.kind == "message" for _, letter, _ in self._dead.values())
        return Counts(succeeded, len(self._kept) - succeeded, dead, states.count("pending"), states.count("dead"))

    async def report(self, report: Report) -> None:
        """Keep what an instance says of itself."""
        self._check_open()
        self._reports[report.instance] = report

    async def reports(self, *, since_ms: int) -> list[Report]:
        """Return what instances said since then."""
        self._check_open()
        return [report for _, report in sorted(self._reports.items()) if report.at_ms >= since_ms]

    async def health(self) -> None:
        """Return if open."""
        self._check_open()

    # -- news -------------------------------------------------------------------------------------------

    async def _wait(self, name: str, timeout_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[name].add(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            pass
        finally:
            self._waiters[name].discard(future)

    def _wake(self, name: str) -> None:
        for future in self._waiters[name]:
            if not future.done():
                future.set_result(None)


def _start(cursor: str, newest: int) -> int:
    if cursor == "":
        return 0
    if cursor.isascii() and cursor.isdigit() and len(cursor) < 19 and int(cursor) <= newest:
        return int(cursor)
    raise InvalidRequest("This cursor was never handed out", details={"expected": "a `next` of an earlier answer"})
