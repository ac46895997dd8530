"""Topics in one SQLite file: the embedded default. What is done inside a transaction is in `sqlite_line`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from headrace.brokers import sqlite_line as line
from headrace.brokers.base import Broker, Claim, Claims, Depth, Features, Receipt
from headrace.clock import Clock
from headrace.errors import BrokerUnavailable, HeadraceError, InvalidRequest, Overloaded, StorageFull, TooLarge
from headrace.message import Message, decode_message, encode_message
from headrace.sqlite import Connection, Database, open_database

__all__ = ["SqliteBroker", "connect"]

#: SQLite takes rows up to 1 GB; half of it leaves room for the copies a commit makes.
_MESSAGE_BYTES_MAX = 512 * 1024**2
_FREE_BYTES_MIN = 1 << 20


def connect(url: str, *, clock: Clock, length_max: int, bytes_max: int) -> SqliteBroker:
    """Return the broker of `sqlite:///relative/path` or `sqlite:////absolute/path`."""
    path = url.removeprefix("sqlite://").removeprefix("/")
    if not path:
        raise InvalidRequest(f"{url} names no file; expected sqlite:///path/to/file.db")
    return SqliteBroker(Path(path), clock, length_max=length_max, bytes_max=bytes_max)


class SqliteBroker(Broker):
    """Topics in a file that other processes have open too."""

    features = Features(look_up=True, unique_publish=True, durable=True, shared=True)

    def __init__(self, path: Path, clock: Clock, *, length_max: int, bytes_max: int) -> None:
        self._path, self._clock = path, clock
        self._length_max, self._bytes_max = length_max, bytes_max
        self._database: Database | None = None

    @property
    def _db(self) -> Database:
        if self._database is None:
            raise BrokerUnavailable("The broker is not open")
        return self._database

    async def open(self) -> None:
        """Open the file and make its tables."""
        if self._database is None:
            self._database = open_database(self._path, self._clock, BrokerUnavailable)
            await self._database.write(lambda c: c.execute(line.TABLES).fetchall(), BrokerUnavailable)

    async def close(self) -> None:
        """Let go of the file."""
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    # -- publishing -------------------------------------------------------------------------------------

    async def publish(self, topic: str, messages: Sequence[Message]) -> list[Receipt | HeadraceError]:
        """Append to the topic; the receipts come after the fsync."""
        now_ms = self._clock.now_ms()
        rows = [(message, encode_message(message)) for message in messages]
        try:
            found = await self._db.write(lambda c: self._append(c, topic, rows, now_ms), BrokerUnavailable)
        except (BrokerUnavailable, StorageFull) as error:
            return [error for _ in messages]
        self._db.ring(f"topic:{topic}")
        return found

    def _append(
        self, connection: Connection, topic: str, rows: Sequence[tuple[Message, bytes]], now_ms: int
    ) -> list[Receipt | HeadraceError]:
        number, length, size_all = line.topic_of(connection, topic)
        outcomes: list[Receipt | HeadraceError] = []
        added = added_bytes = 0
        for message, body in rows:
            if message.fingerprint is not None and (known := line.fingerprint_of(connection, message.id)) is not None:
                outcomes.append(Receipt(message.id, already_present=True, fingerprint=known))
                continue
            size = len(body)
            if (refusal := self._refusal(topic, length + added + 1, size_all + added_bytes, size)) is not None:
                present = connection.execute("SELECT 1 FROM messages WHERE id = ?", (message.id,)).fetchone()
                outcomes.append(Receipt(message.id, already_present=True) if present else refusal)
                continue
            connection.execute(
                "INSERT INTO messages(topic, id, published_ms, size, body) VALUES(?, ?, ?, ?, ?)"
                " ON CONFLICT(id) DO NOTHING",
                (number, message.id, now_ms, size, body),
            )
            if connection.changes() == 0:
                outcomes.append(Receipt(message.id, already_present=True))
                continue
            if message.fingerprint is not None:
                entry = (message.id, message.fingerprint, message.accepted_at_ms)
                connection.execute("INSERT INTO accepted(id, fingerprint, accepted_ms) VALUES(?, ?, ?)", entry)
            added, added_bytes = added + 1, added_bytes + size
            outcomes.append(Receipt(message.id))
        if added:
            connection.execute(
                "UPDATE topics SET length = length + ?, bytes = bytes + ? WHERE number = ?",
                (added, added_bytes, number),
            )
        return outcomes

    def _refusal(self, topic: str, length: int, size_all: int, size: int) -> HeadraceError | None:
        if size > _MESSAGE_BYTES_MAX:
            return TooLarge(details={"expected": _MESSAGE_BYTES_MAX, "actual": size})
        if length > self._length_max:
            return Overloaded(
                f"The topic of {topic} is full", details={"length": length - 1, "length_max": self._length_max}
            )
        if size_all + size > self._bytes_max:
            return Overloaded(
                f"The topic of {topic} is full", details={"bytes": size_all, "bytes_max": self._bytes_max}
            )
        return None

    # -- claiming ---------------------------------------------------------------------------------------

    async def claim(
        self, topics: Sequence[str], *, count_max: int, bytes_max: int, claim_ms: int, alone: bool
    ) -> Claims:
        """Take hold of messages; the attempt is on disk before this returns."""
        now_ms = self._clock.now_ms()
        due_ms = now_ms + claim_ms
        prefix = os.urandom(9).hex()

        def take(connection: Connection) -> tuple[list[tuple[Any, ...]], int]:
            numbers = line.numbers_of(connection, topics)
            if alone:
                rows = line.take_suspect(connection, numbers, prefix, now_ms, due_ms)
            else:
                rows = line.take_fresh(connection, numbers, prefix, now_ms, due_ms, count_max, bytes_max)
            return rows, line.suspects(connection, numbers, now_ms)

        # A look before the leap: an idle consumer must not hold the writers up.
        if not self._db.query(lambda c: line.anything(c, topics, now_ms, alone), BrokerUnavailable):
            waiting = self._db.query(lambda c: line.suspects(c, line.numbers_of(c, topics), now_ms), BrokerUnavailable)
            return Claims((), waiting)
        rows, suspects = await self._db.write(take, BrokerUnavailable)
        claims = [
            Claim(_message(id, published_ms, body), topic, token, due_ms, company, count_alone)
            for topic, token, id, published_ms, body, company, count_alone in rows
        ]
        return Claims(claims, suspects)

    async def wait(self, topics: Sequence[str], timeout_s: float) -> None:
        """Wait for a doorbell or anybody's commit."""
        await self._db.wait([f"topic:{topic}" for topic in topics], timeout_s)

    # -- settling ---------------------------------------------------------------------------------------

    async def extend(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Move deadlines to now + claim_ms."""
        due_ms = self._clock.now_ms() + claim_ms
        return await self._db.write(lambda c: line.extend(c, claims, due_ms), BrokerUnavailable)

    def extend_blocking(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Do what `extend` does, from any thread: the writer needs no loop."""
        due_ms = self._clock.now_ms() + claim_ms
        return self._db.write_blocking(lambda c: line.extend(c, claims, due_ms), BrokerUnavailable)

    async def ack(self, claims: Sequence[Claim]) -> set[str]:
        """Remove messages for good."""
        return await self._db.write(lambda c: line.ack(c, claims), BrokerUnavailable)

    async def release(self, claims: Sequence[Claim], *, delay_ms: int = 0) -> set[str]:
        """Give messages back uncounted."""
        due_ms = self._clock.now_ms() + delay_ms
        lost = await self._db.write(lambda c: line.release(c, claims, due_ms), BrokerUnavailable)
        for topic in {claim.topic for claim in claims}:
            self._db.ring(f"topic:{topic}")
        return lost

    # -- looking ----------------------------------------------------------------------------------------

    async def find(self, ids: Collection[str]) -> set[str]:
        """Return those that are in a topic."""
        wanted = json.dumps(list(ids))
        sql = "SELECT id FROM messages WHERE id IN (SELECT value FROM json_each(?))"
        rows: list[Any] = self._db.query(lambda c: c.execute(sql, (wanted,)).fetchall(), BrokerUnavailable)
        return {row[0] for row in rows}

    async def read(self, id: str) -> Message | None:
        """Return a message without claiming it."""
        sql = "SELECT body FROM messages WHERE id = ?"
        row = self._db.query(lambda c: c.execute(sql, (id,)).fetchone(), BrokerUnavailable)
        if row is None:
            return None
        try:
            return decode_message(row[0])
        except InvalidRequest:
            return None

    async def forget(self, ids: Collection[str], accepted_before_ms: int) -> None:
        """Drop fingerprints whose retention is over."""

        def drop(connection: Connection) -> None:
            if ids:
                wanted = json.dumps(list(ids))
                connection.execute("DELETE FROM accepted WHERE id IN (SELECT value FROM json_each(?))", (wanted,))
            connection.execute(
                "DELETE FROM accepted WHERE accepted_ms < ? AND id NOT IN (SELECT id FROM messages)",
                (accepted_before_ms,),
            )

        await self._db.write(drop, BrokerUnavailable)

    async def fingerprints(self, ids: Collection[str]) -> dict[str, str]:
        """Return what keyed ids were accepted with."""
        wanted = json.dumps(list(ids))
        sql = "SELECT id, fingerprint FROM accepted WHERE id IN (SELECT value FROM json_each(?))"
        rows: list[Any] = self._db.query(lambda c: c.execute(sql, (wanted,)).fetchall(), BrokerUnavailable)
        return dict(rows)

    async def depth(self, topic: str) -> Depth:
        """Return the line of a topic."""
        now_ms = self._clock.now_ms()
        return await self._db.read(lambda c: line.depth(c, topic, now_ms), BrokerUnavailable)

    async def health(self) -> None:
        """Take the write lock for a moment, and look at the disk."""
        await self._db.write(lambda c: None, BrokerUnavailable)
        status = os.statvfs(self._path.parent)
        if status.f_bavail * status.f_frsize < _FREE_BYTES_MIN:
            raise StorageFull(f"The disk of {self._path.name} is full; free some space, nothing else is needed")


def _message(id: str, published_ms: int, body: bytes) -> Message:
    try:
        return decode_message(body)
    except InvalidRequest:
        return Message(id=id, model="", signature="", accepted_at_ms=published_ms, header_length=0, payload=body)
