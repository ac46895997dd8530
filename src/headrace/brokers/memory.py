"""Topics in this process's memory: real semantics, no durability. Tests and the simulation stand on it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from headrace.brokers.base import Broker, Claim, Claims, Depth, Features, Receipt
from headrace.clock import Clock
from headrace.errors import BrokerUnavailable, HeadraceError, InvalidRequest, Overloaded
from headrace.message import Message, decode_message, encode_message

__all__ = ["MemoryBroker", "connect"]


def connect(url: str, *, clock: Clock, length_max: int, bytes_max: int) -> MemoryBroker:
    """Return a broker of its own; `memory://` names nothing that could be shared."""
    return MemoryBroker(clock, length_max=length_max, bytes_max=bytes_max)


@dataclass(slots=True, eq=False)
class _Row:
    """One message in a topic: encoded, so that what cannot travel is found here too."""

    seq: int
    topic: str
    id: str
    published_ms: int
    body: bytes
    #: "" while nobody holds it.
    token: str = ""
    due_ms: int = 0
    is_alone: bool = False
    company: int = 0
    alone: int = 0


@dataclass(slots=True)
class _Topic:
    fresh: deque[_Row] = field(default_factory=deque)
    given_back: list[_Row] = field(default_factory=list)
    held: dict[str, _Row] = field(default_factory=dict)
    length: int = 0
    bytes: int = 0


class MemoryBroker(Broker):
    """A broker that forgets everything with its process."""

    features = Features(look_up=True, unique_publish=True, durable=False, shared=False)

    def __init__(self, clock: Clock, *, length_max: int = 1_000_000, bytes_max: int = 4 * 1024**3) -> None:
        self._clock, self._length_max, self._bytes_max = clock, length_max, bytes_max
        self._topics: dict[str, _Topic] = {}
        self._rows: dict[str, _Row] = {}
        self._accepted: dict[str, tuple[str, int]] = {}
        self._sequence = itertools.count(1)
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_open = False
        # Only for `extend_blocking`, which comes from another thread.
        self._lock = threading.Lock()

    async def open(self) -> None:
        """Start; what was published before a close is still there."""
        self._is_open = True

    async def close(self) -> None:
        """Stop, waking whoever waits."""
        self._is_open = False
        self._wake()

    async def publish(self, topic: str, messages: Sequence[Message]) -> list[Receipt | HeadraceError]:
        """Append to the topic."""
        with self._lock:
            found = [self._append(topic, message) for message in messages]
        self._wake()
        return found

    def _append(self, name: str, message: Message) -> Receipt | HeadraceError:
        if not self._is_open:
            return BrokerUnavailable("The broker is not open")
        if message.fingerprint is not None and message.id in self._accepted:
            return Receipt(message.id, already_present=True, fingerprint=self._accepted[message.id][0])
        if message.id in self._rows:
            return Receipt(message.id, already_present=True)
        topic, body = self._topics.setdefault(name, _Topic()), encode_message(message)
        if topic.length >= self._length_max:
            details = {"length": topic.length, "length_max": self._length_max}
            return Overloaded(f"The topic of {name} is full", details=details)
        if topic.bytes + len(body) > self._bytes_max:
            details = {"bytes": topic.bytes, "bytes_max": self._bytes_max}
            return Overloaded(f"The topic of {name} is full", details=details)
        row = _Row(next(self._sequence), name, message.id, self._clock.now_ms(), body)
        if message.fingerprint is not None:
            self._accepted[message.id] = (message.fingerprint, message.accepted_at_ms)
        topic.fresh.append(row)
        topic.length, topic.bytes = topic.length + 1, topic.bytes + len(body)
        self._rows[row.id] = row
        return Receipt(message.id)

    async def claim(
        self, topics: Sequence[str], *, count_max: int, bytes_max: int, claim_ms: int, alone: bool
    ) -> Claims:
        """Take hold of messages, oldest first over all topics."""
        self._check_open()
        now_ms = self._clock.now_ms()
        with self._lock:
            known = [self._topics[name] for name in topics if name in self._topics]
            suspects = sorted(_suspects(known, now_ms), key=lambda row: row.seq)
            if alone:
                rows = suspects[:1]
            else:
                rows = _fresh(known, now_ms, count_max, bytes_max)
            claims = [self._hold(row, now_ms + claim_ms, alone) for row in rows]
        return Claims(claims, len(suspects) - (len(rows) if alone else 0))

    def _hold(self, row: _Row, due_ms: int, alone: bool) -> Claim:
        topic = self._topics[row.topic]
        topic.held.pop(row.token, None)
        if row in topic.given_back:
            topic.given_back.remove(row)
        row.token, row.due_ms, row.is_alone = f"{next(self._sequence)}.{row.seq}", due_ms, alone
        row.company, row.alone = row.company + (not alone), row.alone + alone
        topic.held[row.token] = row
        try:
            message = decode_message(row.body)
        except InvalidRequest:
            message = Message(
                id=row.id, model="", signature="", accepted_at_ms=row.published_ms, header_length=0, payload=row.body
            )
        return Claim(message, row.topic, row.token, due_ms, row.company, row.alone)

    async def wait(self, topics: Sequence[str], timeout_s: float) -> None:
        """Wait for a publish or a release."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(future)

    async def extend(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Move deadlines to now + claim_ms."""
        return self.extend_blocking(claims, claim_ms)

    def extend_blocking(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Do what `extend` does, from any thread."""
        self._check_open()
        due_ms, lost = self._clock.now_ms() + claim_ms, set()
        with self._lock:
            for claim in claims:
                row = self._held(claim)
                if row is None:
                    lost.add(claim.token)
                else:
                    row.due_ms = due_ms
        return lost

    async def ack(self, claims: Sequence[Claim]) -> set[str]:
        """Remove messages for good."""
        self._check_open()
        lost = set()
        with self._lock:
            for claim in claims:
                row = self._held(claim)
                if row is None:
                    lost.add(claim.token)
                    continue
                topic = self._topics[row.topic]
                del topic.held[row.token], self._rows[row.id]
                topic.length, topic.bytes = topic.length - 1, topic.bytes - len(row.body)
        return lost

    async def release(self, claims: Sequence[Claim], *, delay_ms: int = 0) -> set[str]:
        """Give messages back uncounted."""
        self._check_open()
        due_ms, lost = self._clock.now_ms() + delay_ms, set()
        with self._lock:
            for claim in claims:
                row = self._held(claim)
                if row is None:
                    lost.add(claim.token)
                    continue
                topic = self._topics[row.topic]
                del topic.held[row.token]
                row.company, row.alone = row.company - (not row.is_alone), row.alone - row.is_alone
                row.token, row.due_ms = "", due_ms
                topic.given_back.append(row)
        self._wake()
        return lost

    async def find(self, ids: Collection[str]) -> set[str]:
        """Return those that are in a topic."""
        self._check_open()
        return {id for id in ids if id in self._rows}

    async def read(self, id: str) -> Message | None:
        """Return a message without claiming it."""
        self._check_open()
        row = self._rows.get(id)
        try:
            return decode_message(row.body) if row else None
        except InvalidRequest:
            return None

    async def forget(self, ids: Collection[str], accepted_before_ms: int) -> None:
        """Drop fingerprints whose retention is over."""
        self._check_open()
        for id, (_, accepted_ms) in list(self._accepted.items()):
            if id in ids or (accepted_ms < accepted_before_ms and id not in self._rows):
                del self._accepted[id]

    async def fingerprints(self, ids: Collection[str]) -> dict[str, str]:
        """Return what keyed ids were accepted with."""
        self._check_open()
        return {id: self._accepted[id][0] for id in ids if id in self._accepted}

    async def depth(self, topic: str) -> Depth:
        """Return the line of a topic."""
        self._check_open()
        found, now_ms = self._topics.get(topic), self._clock.now_ms()
        if found is None:
            return Depth(0, 0, 0, 0)
        held = [row for row in found.held.values() if row.due_ms > now_ms]
        free = [row for row in found.held.values() if row.due_ms <= now_ms] + found.given_back
        ages = [row.published_ms for row in (*free, *list(found.fresh)[:1])]
        oldest_ms = min(ages, default=now_ms)
        return Depth(found.length - len(held), len(held), found.bytes, max(0, now_ms - oldest_ms))

    async def health(self) -> None:
        """Return if open."""
        self._check_open()

    def _held(self, claim: Claim) -> _Row | None:
        topic = self._topics.get(claim.topic)
        return topic.held.get(claim.token) if topic else None

    def _check_open(self) -> None:
        if not self._is_open:
            raise BrokerUnavailable("The broker is not open")

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)


def _suspects(topics: Sequence[_Topic], now_ms: int) -> list[_Row]:
    lost = [row for topic in topics for row in topic.held.values() if row.due_ms <= now_ms]
    back = [row for topic in topics for row in topic.given_back if row.company + row.alone and row.due_ms <= now_ms]
    return lost + back


def _fresh(topics: Sequence[_Topic], now_ms: int, count_max: int, bytes_max: int) -> list[_Row]:
    candidates = []
    for topic in topics:
        candidates += [row for row in topic.given_back if not row.company + row.alone and row.due_ms <= now_ms]
        candidates += itertools.islice(topic.fresh, count_max)
    candidates.sort(key=lambda row: row.seq)
    taken: list[_Row] = []
    size = 0
    for row in candidates[:count_max]:
        if taken and size + len(row.body) > bytes_max:
            break
        size += len(row.body)
        taken.append(row)
    chosen = {row.seq for row in taken}
    for topic in topics:
        while topic.fresh and topic.fresh[0].seq in chosen:
            topic.fresh.popleft()
    return taken
