"""Results, dead letters and the outbox in one SQLite file: the embedded default.

What is done inside a transaction is in `sqlite_tables`. Writers are serial, so the order of the sequence is the order
of the commits, and a cursor is a number that nothing can slip in before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from headrace.clock import Clock
from headrace.errors import InvalidRequest, StorageFull, StoreUnavailable
from headrace.message import Dispatch, Result, decode_message, stored_result
from headrace.sqlite import Connection, Database, open_database
from headrace.stores import sqlite_tables as tables
from headrace.stores.base import Counts, DeadLetter, Delivery, Finished, Report, Store

__all__ = ["SqliteStore", "connect"]

_FREE_BYTES_MIN = 1 << 20
_STATES: dict[int, Any] = {tables.PENDING: "pending", tables.DELIVERED: "delivered", tables.DEAD: "dead"}
_DEAD_COLUMNS = "seq, id, destination, model, code, reason, attempts, dead_ms, replayed_as"


def connect(url: str, *, clock: Clock) -> SqliteStore:
    """Return the store of `sqlite:///relative/path` or `sqlite:////absolute/path`."""
    path = url.removeprefix("sqlite://").removeprefix("/")
    if not path:
        raise InvalidRequest(f"{url} names no file; expected sqlite:///path/to/file.db")
    return SqliteStore(Path(path), clock)


class SqliteStore(Store):
    """A store in a file that other processes have open too."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._database: Database | None = None

    @property
    def _db(self) -> Database:
        if self._database is None:
            raise StoreUnavailable("The store is not open")
        return self._database

    def _look(self, sql: str, *values: Any) -> list[Any]:
        return self._db.query(lambda c: tables.rows(c, sql, *values), StoreUnavailable)

    async def open(self) -> None:
        """Open the file and make its tables; tables of a newer version are refused."""
        if self._database is not None:
            return
        self._database = open_database(self._path, self._clock, StoreUnavailable)
        try:
            await self._database.write(_migrate, StoreUnavailable)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of the file."""
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    async def secret(self, name: str) -> bytes:
        """Return 32 random bytes, made by whoever asks first."""
        key = f"secret:{name}"
        sql = "SELECT value FROM meta WHERE name = ?"
        found = self._look(sql, key)
        if not found:
            made = os.urandom(32)
            insert = "INSERT INTO meta(name, value) VALUES(?, ?) ON CONFLICT(name) DO NOTHING"
            await self._db.write(lambda c: tables.rows(c, insert, key, made), StoreUnavailable)
            found = self._look(sql, key)
        return bytes(found[0][0])

    # -- results ----------------------------------------------------------------------------------------

    async def commit(self, finished: Sequence[Finished]) -> list[bool]:
        """Write results, outbox and dead letters; returns after the fsync."""
        firsts = await self._db.write(lambda c: tables.commit(c, finished), StoreUnavailable)
        self._db.ring("results")
        if any(entry.outbox for entry in finished):
            self._db.ring("outbox")
        return firsts

    async def get(self, ids: Collection[str]) -> dict[str, Result]:
        """Return the results that are there."""
        sql = "SELECT id, body FROM results WHERE id IN (SELECT value FROM json_each(?))"
        return {id: stored_result(id, body) for id, body in self._look(sql, json.dumps(list(ids)))}

    async def present(self, ids: Collection[str]) -> set[str]:
        """Return those that have a result."""
        sql = "SELECT id FROM results WHERE id IN (SELECT value FROM json_each(?))"
        return {id for (id,) in self._look(sql, json.dumps(list(ids)))}

    async def after(self, cursor: str, limit: int) -> tuple[list[Result], str]:
        """Return results after a cursor, which is the sequence of the last one read."""
        start = self._sequence(cursor)
        sql = "SELECT seq, id, body FROM results WHERE seq > ? ORDER BY seq LIMIT ?"
        # A page may be long: it is read beside the loop, not on it.
        found = await self._db.read(lambda c: tables.rows(c, sql, start, limit), StoreUnavailable)
        return [stored_result(id, body) for _, id, body in found], str(found[-1][0]) if found else str(start)

    async def latest(self) -> str:
        """Return the cursor after the newest result."""
        return str(self._newest("results"))

    def _newest(self, table: str) -> int:
        # Also right after the newest rows were purged.
        found = self._look("SELECT seq FROM sqlite_sequence WHERE name = ?", table)
        return int(found[0][0]) if found else 0

    def _sequence(self, cursor: str, table: str = "results") -> int:
        if cursor == "":
            return 0
        if cursor.isascii() and cursor.isdigit() and len(cursor) < 19 and int(cursor) <= self._newest(table):
            return int(cursor)
        raise InvalidRequest("This cursor was never handed out", details={"expected": "a `next` of an earlier answer"})

    async def wait_results(self, timeout_s: float) -> None:
        """Wait for a doorbell or anybody's commit."""
        await self._db.wait(("results",), timeout_s)

    # -- outbox -----------------------------------------------------------------------------------------

    async def claim_due(
        self, *, now_ms: int, claim_ms: int, count_max: int, busy: Collection[str] = ()
    ) -> list[Dispatch]:
        """Take hold of due pairs; the attempt is on disk before this returns."""
        # A look before the leap: an idle delivery must not hold the writers up.
        if not self._look("SELECT 1 FROM outbox WHERE state = 0 LIMIT 1"):
            return []
        prefix = os.urandom(9).hex()
        return await self._db.write(
            lambda c: tables.claim_due(c, now_ms, now_ms + claim_ms, count_max, busy, prefix), StoreUnavailable
        )

    async def delivered(self, dispatches: Sequence[tuple[Dispatch, int]]) -> None:
        """Record successes."""
        await self._db.write(lambda c: tables.deliver(c, dispatches), StoreUnavailable)

    async def retry(self, dispatch: Dispatch, *, next_at_ms: int, status: int | None, error: str) -> None:
        """Record a failed attempt."""
        sql = (
            "UPDATE outbox SET token = NULL, next_ms = ?, last_status = ?, last_error = ?"
            " WHERE id = ? AND destination = ? AND token = ? AND state = 0"
        )
        values = (next_at_ms, status, error, dispatch.id, tables.number_of(dispatch), dispatch.token)
        await self._db.write(lambda c: tables.rows(c, sql, *values), StoreUnavailable)

    async def give_back(self, dispatch: Dispatch, *, next_at_ms: int) -> None:
        """Undo a claim."""
        sql = (
            "UPDATE outbox SET token = NULL, next_ms = ?, attempts = attempts - 1"
            " WHERE id = ? AND destination = ? AND token = ? AND state = 0"
        )
        values = (next_at_ms, dispatch.id, tables.number_of(dispatch), dispatch.token)
        await self._db.write(lambda c: tables.rows(c, sql, *values), StoreUnavailable)

    async def give_up(
        self, dispatch: Dispatch, *, now_ms: int, status: int | None, code: str, error: str, tried: bool = True
    ) -> None:
        """Make the pair a dead letter."""
        await self._db.write(
            lambda c: tables.give_up(c, dispatch, now_ms, status, code, error, tried=tried), StoreUnavailable
        )

    async def disable(self, destination: str, *, now_ms: int, reason: str) -> int:
        """Mark a destination as gone."""
        return await self._db.write(lambda c: tables.disable(c, destination, now_ms, reason), StoreUnavailable)

    async def enable(self, destination: str) -> None:
        """Let a destination be sent to again."""
        sql = "UPDATE destinations SET disabled = NULL WHERE url = ?"
        await self._db.write(lambda c: tables.rows(c, sql, destination), StoreUnavailable)

    async def deliveries_of(self, ids: Collection[str]) -> dict[str, list[Delivery]]:
        """Return the pairs of results in one query, however many results a page has."""
        sql = (
            "SELECT o.id, d.url, o.state, o.attempts, o.next_ms, o.last_status, o.last_error FROM outbox o"
            " JOIN destinations d ON d.number = o.destination"
            " WHERE o.id IN (SELECT value FROM json_each(?)) ORDER BY d.url"
        )
        found: dict[str, list[Delivery]] = {}
        for id, url, state, attempts, next_ms, status, error in self._look(sql, json.dumps(list(ids))):
            next_at_ms = next_ms if state == tables.PENDING else None
            found.setdefault(id, []).append(Delivery(id, url, _STATES[state], attempts, next_at_ms, status, error))
        return found

    async def wait_outbox(self, timeout_s: float) -> None:
        """Wait for a doorbell or anybody's commit."""
        await self._db.wait(("outbox",), timeout_s)

    # -- dead letters -----------------------------------------------------------------------------------

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> tuple[list[DeadLetter], str]:
        """List dead letters, oldest first, without their messages."""
        start = self._sequence(after, "dead")
        found = self._look(f"SELECT {_DEAD_COLUMNS} FROM dead WHERE seq > ? ORDER BY seq LIMIT ?", start, limit)
        return [_dead_letter(row, None) for row in found], str(found[-1][0]) if found else str(start)

    async def dead_letter(self, id: str, destination: str | None = None) -> DeadLetter | None:
        """Return one, with its message."""
        sql = f"SELECT {_DEAD_COLUMNS}, message FROM dead WHERE id = ? AND destination = ?"
        found = self._look(sql, id, destination or "")
        return _dead_letter(found[0][:-1], found[0][-1]) if found else None

    async def mark_replayed(self, id: str, replayed_as: str) -> None:
        """Note the new id beside the dead message."""
        sql = "UPDATE dead SET replayed_as = ? WHERE id = ? AND destination = ''"
        await self._db.write(lambda c: tables.rows(c, sql, replayed_as, id), StoreUnavailable)

    async def replay_delivery(self, id: str, destination: str, *, now_ms: int) -> bool:
        """Make a dead pair pending again."""
        found = await self._db.write(lambda c: tables.replay_delivery(c, id, destination, now_ms), StoreUnavailable)
        self._db.ring("outbox")
        return found

    # -- housekeeping -----------------------------------------------------------------------------------

    async def purge(self, *, accepted_before_ms: int, limit: int = 1000) -> list[str]:
        """Remove what is older."""
        if not self._look("SELECT 1 FROM results WHERE accepted_ms < ? LIMIT 1", accepted_before_ms):
            return []
        return await self._db.write(lambda c: tables.purge(c, accepted_before_ms, limit), StoreUnavailable)

    async def counts(self) -> Counts:
        """Read the counters, which are kept in the transactions of what they count."""
        found = dict(self._look("SELECT name, value FROM counters"))
        return Counts(**{name: found.get(name, 0) for name in Counts.__dataclass_fields__})

    async def report(self, report: Report) -> None:
        """Keep what an instance says of itself."""
        sql = (
            "INSERT INTO reports(instance, at_ms, body) VALUES(?, ?, ?)"
            " ON CONFLICT(instance) DO UPDATE SET at_ms = excluded.at_ms, body = excluded.body"
        )
        values = (report.instance, report.at_ms, report.body)
        await self._db.write(lambda c: tables.rows(c, sql, *values), StoreUnavailable)

    async def reports(self, *, since_ms: int) -> list[Report]:
        """Return what instances said since then."""
        sql = "SELECT instance, at_ms, body FROM reports WHERE at_ms >= ? ORDER BY instance"
        return [Report(*row) for row in self._look(sql, since_ms)]

    async def health(self) -> None:
        """Take the write lock for a moment, and look at the disk."""
        await self._db.write(lambda c: None, StoreUnavailable)
        status = os.statvfs(self._path.parent)
        if status.f_bavail * status.f_frsize < _FREE_BYTES_MIN:
            raise StorageFull(f"The disk of {self._path.name} is full; free some space, nothing else is needed")


def _migrate(connection: Connection) -> None:
    connection.execute(tables.TABLES).fetchall()
    found = tables.rows(connection, "SELECT value FROM meta WHERE name = 'schema'")
    if not found:
        tables.rows(connection, "INSERT INTO meta(name, value) VALUES('schema', ?)", str(tables.SCHEMA).encode())
    elif int(found[0][0]) > tables.SCHEMA:
        raise StoreUnavailable(
            f"This store has tables of version {int(found[0][0])} and this headrace knows {tables.SCHEMA};"
            " upgrade headrace"
        )


def _dead_letter(row: Any, message: bytes | None) -> DeadLetter:
    _, id, destination, model, code, reason, attempts, dead_ms, replayed_as = row
    return DeadLetter(
        kind="delivery" if destination else "message",
        id=id,
        model=model,
        reason_code=code,
        reason=reason,
        attempts=attempts,
        dead_at_ms=dead_ms,
        destination=destination or None,
        message=decode_message(message) if message is not None else None,
        replayed_as=replayed_as,
    )
