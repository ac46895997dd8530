"""The tables of the SQLite store, and what is done to them inside a transaction."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from headrace.message import Dispatch, Result, encode_message, encode_result
from headrace.sqlite import Connection
from headrace.stores.base import Finished

__all__ = [
    "DEAD",
    "DELIVERED",
    "PENDING",
    "SCHEMA",
    "TABLES",
    "claim_due",
    "commit",
    "count",
    "deliver",
    "disable",
    "give_up",
    "number_of",
    "purge",
    "replay_delivery",
    "rows",
]

#: Version of these tables; a newer one is refused, an older one would be migrated here.
SCHEMA = 1

PENDING, DELIVERED, DEAD = 0, 1, 2

TABLES = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, accepted_ms INTEGER NOT NULL,
    succeeded INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS results_age ON results(accepted_ms);
CREATE TABLE IF NOT EXISTS destinations(
    number INTEGER PRIMARY KEY, url TEXT NOT NULL UNIQUE, disabled TEXT);
CREATE TABLE IF NOT EXISTS outbox(
    id TEXT NOT NULL, destination INTEGER NOT NULL, state INTEGER NOT NULL, next_ms INTEGER NOT NULL,
    attempts INTEGER NOT NULL, created_ms INTEGER NOT NULL, token TEXT, webhook_id TEXT NOT NULL, model TEXT NOT NULL,
    traceparent TEXT, last_status INTEGER, last_error TEXT, body BLOB NOT NULL, PRIMARY KEY(id, destination));
CREATE INDEX IF NOT EXISTS outbox_due ON outbox(destination, next_ms) WHERE state = 0;
CREATE TABLE IF NOT EXISTS dead(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, destination TEXT NOT NULL, model TEXT NOT NULL,
    code TEXT NOT NULL, reason TEXT NOT NULL, attempts INTEGER NOT NULL, dead_ms INTEGER NOT NULL, message BLOB,
    replayed_as TEXT, UNIQUE(id, destination));
CREATE TABLE IF NOT EXISTS reports(instance TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
"""

# Every destination that has a pending pair, found by hopping over the index, however many pairs each of them has.
_DESTINATIONS = """
WITH RECURSIVE hop(number) AS (
    SELECT min(destination) FROM outbox WHERE state = 0
    UNION ALL
    SELECT (SELECT min(destination) FROM outbox WHERE state = 0 AND destination > hop.number)
    FROM hop WHERE hop.number IS NOT NULL)
SELECT d.number, d.url FROM hop JOIN destinations d ON d.number = hop.number WHERE d.disabled IS NULL"""
_DUE = """
SELECT next_ms, id, webhook_id, body, attempts, created_ms, traceparent, last_status, last_error FROM outbox
WHERE destination = ? AND state = 0 AND next_ms <= ? ORDER BY next_ms LIMIT ?"""


def rows(connection: Connection, sql: str, *values: Any) -> list[Any]:
    """Return all rows of a query."""
    return connection.execute(sql, values).fetchall()


def count(connection: Connection, **changes: int) -> None:
    """Add to the counters, in the transaction of what is counted."""
    connection.executemany(
        "INSERT INTO counters(name, value) VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET value = value + excluded.value",
        [(name, change) for name, change in changes.items() if change],
    )


# -- results ----------------------------------------------------------------------------------------------


def commit(connection: Connection, finished: Sequence[Finished]) -> list[bool]:
    """Write results with their outbox and dead letters; the first result of an id wins."""
    firsts = []
    totals = {"succeeded": 0, "failed": 0, "dead": 0, "outbox_pending": 0, "outbox_dead": 0}
    for entry in finished:
        result = entry.result
        connection.execute(
            "INSERT INTO results(id, accepted_ms, succeeded, body) VALUES(?, ?, ?, ?) ON CONFLICT(id) DO NOTHING",
            (result.id, result.accepted_at_ms, result.succeeded, encode_result(result)),
        )
        is_first = connection.changes() == 1
        firsts.append(is_first)
        if not is_first:
            continue
        totals["succeeded" if result.succeeded else "failed"] += 1
        if entry.dead is not None:
            totals["dead"] += 1
            _bury_message(connection, entry)
        for destination, body in entry.outbox:
            is_pending = _queue(connection, result, destination, body, several=len(entry.outbox) > 1)
            totals["outbox_pending" if is_pending else "outbox_dead"] += 1
    count(connection, **totals)
    return firsts


def _bury_message(connection: Connection, entry: Finished) -> None:
    result, message = entry.result, entry.dead
    assert result.error is not None and message is not None
    connection.execute(
        "INSERT INTO dead(id, destination, model, code, reason, attempts, dead_ms, message)"
        " VALUES(?, '', ?, ?, ?, ?, ?, ?)",
        (
            result.id,
            result.model,
            result.error.code,
            result.error.message,
            result.attempts,
            result.finished_at_ms,
            encode_message(message),
        ),
    )


def _queue(connection: Connection, result: Result, url: str, body: bytes, *, several: bool) -> bool:
    """Add one pair; a destination that is gone makes it a dead letter at once. Returns whether it is pending."""
    number, disabled = _destination(connection, url)
    # With several destinations each pair needs an id of its own, or a receiver behind two URLs would drop one.
    webhook_id = f"{result.id}_{number}" if several else result.id
    state = PENDING if disabled is None else DEAD
    connection.execute(
        "INSERT INTO outbox(id, destination, state, next_ms, attempts, created_ms, webhook_id, model, traceparent,"
        " body, last_error) VALUES(?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?)",
        (
            result.id,
            number,
            state,
            result.finished_at_ms,
            result.finished_at_ms,
            webhook_id,
            result.model,
            result.traceparent,
            body,
            disabled,
        ),
    )
    if disabled is not None:
        _bury_pair(connection, result.id, number, code="disabled", reason=disabled, now_ms=result.finished_at_ms)
    return disabled is None


def _destination(connection: Connection, url: str) -> tuple[int, str | None]:
    sql = "SELECT number, disabled FROM destinations WHERE url = ?"
    found = rows(connection, sql, url)
    if not found:
        connection.execute("INSERT INTO destinations(url) VALUES(?)", (url,))
        found = rows(connection, sql, url)
    number, disabled = found[0]
    return number, disabled


def _bury_pair(connection: Connection, id: str, number: int, *, code: str, reason: str, now_ms: int) -> None:
    connection.execute(
        "INSERT INTO dead(id, destination, model, code, reason, attempts, dead_ms)"
        " SELECT o.id, d.url, o.model, ?, ?, o.attempts, ? FROM outbox o"
        " JOIN destinations d ON d.number = o.destination"
        " WHERE o.id = ? AND o.destination = ? ON CONFLICT(id, destination) DO NOTHING",
        (code, reason, now_ms, id, number),
    )


# -- outbox -----------------------------------------------------------------------------------------------


def claim_due(
    connection: Connection, now_ms: int, until_ms: int, count_max: int, busy: Collection[str], prefix: str
) -> list[Dispatch]:
    """Claim due pairs, oldest due first, none of a busy destination; the attempt is counted here."""
    candidates = []
    for number, url in rows(connection, _DESTINATIONS):
        if url not in busy:
            candidates += [(*row, number, url) for row in rows(connection, _DUE, number, now_ms, count_max)]
    candidates.sort(key=lambda row: (row[0], row[1]))
    dispatches = []
    for position, row in enumerate(candidates[:count_max]):
        _, id, webhook_id, body, attempts, created_ms, traceparent, last_status, last_error, number, url = row
        # The number in the token finds the row again.
        token = f"{prefix}.{position}.{number}"
        # A claimed pair is due again when its claim ends, so that one index answers both questions.
        connection.execute(
            "UPDATE outbox SET token = ?, next_ms = ?, attempts = attempts + 1 WHERE id = ? AND destination = ?",
            (token, until_ms, id, number),
        )
        dispatches.append(
            Dispatch(
                id=id,
                destination=url,
                webhook_id=webhook_id,
                body=body,
                attempt=attempts + 1,
                created_at_ms=created_ms,
                token=token,
                traceparent=traceparent,
                last_status=last_status,
                last_error=last_error,
            )
        )
    return dispatches


def number_of(dispatch: Dispatch) -> int:
    """Return the destination's number, which its token ends in."""
    return int(dispatch.token.rpartition(".")[2])


def deliver(connection: Connection, dispatches: Sequence[tuple[Dispatch, int]]) -> None:
    """Record successes; the receiver has it, so a lost claim does not matter while the pair is pending."""
    done = 0
    for dispatch, status in dispatches:
        connection.execute(
            "UPDATE outbox SET state = 1, token = NULL, last_status = ?, last_error = NULL, body = x''"
            " WHERE id = ? AND destination = ? AND state = 0",
            (status, dispatch.id, number_of(dispatch)),
        )
        done += connection.changes()
    count(connection, outbox_pending=-done)


def give_up(
    connection: Connection,
    dispatch: Dispatch,
    now_ms: int,
    status: int | None,
    code: str,
    error: str,
    *,
    tried: bool,
) -> None:
    """Make a pair that is still ours a dead letter; an attempt that was not made is not counted."""
    number = number_of(dispatch)
    connection.execute(
        "UPDATE outbox SET state = 2, token = NULL, last_status = ?, last_error = ?, attempts = attempts - ?"
        " WHERE id = ? AND destination = ? AND token = ? AND state = 0",
        (status, error, 0 if tried else 1, dispatch.id, number, dispatch.token),
    )
    if connection.changes():
        _bury_pair(connection, dispatch.id, number, code=code, reason=error, now_ms=now_ms)
        count(connection, outbox_pending=-1, outbox_dead=1)


def disable(connection: Connection, url: str, now_ms: int, reason: str) -> int:
    """Mark a destination as gone and bury its pending pairs."""
    number, _ = _destination(connection, url)
    connection.execute("UPDATE destinations SET disabled = ? WHERE number = ?", (reason, number))
    gone = rows(connection, "SELECT id FROM outbox WHERE destination = ? AND state = 0", number)
    for (id,) in gone:
        _bury_pair(connection, id, number, code="disabled", reason=reason, now_ms=now_ms)
    connection.execute(
        "UPDATE outbox SET state = 2, token = NULL, last_error = ? WHERE destination = ? AND state = 0",
        (reason, number),
    )
    count(connection, outbox_pending=-len(gone), outbox_dead=len(gone))
    return len(gone)


def replay_delivery(connection: Connection, id: str, url: str, now_ms: int) -> bool:
    """Make a dead pair pending again with a new series of attempts."""
    number, _ = _destination(connection, url)
    connection.execute(
        "UPDATE outbox SET state = 0, next_ms = ?, created_ms = ?, attempts = 0, token = NULL, last_status = NULL,"
        " last_error = NULL WHERE id = ? AND destination = ? AND state = 2",
        (now_ms, now_ms, id, number),
    )
    if connection.changes() == 0:
        return False
    connection.execute("UPDATE destinations SET disabled = NULL WHERE number = ?", (number,))
    connection.execute("DELETE FROM dead WHERE id = ? AND destination = ?", (id, url))
    count(connection, outbox_pending=1, outbox_dead=-1)
    return True


# -- housekeeping -----------------------------------------------------------------------------------------


def purge(connection: Connection, accepted_before_ms: int, limit: int) -> list[str]:
    """Remove old results with all that hangs on them, but for those with a pair still to be sent."""
    found = rows(
        connection,
        "SELECT id, succeeded FROM results r WHERE accepted_ms < ?"
        " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = r.id AND o.state = 0) ORDER BY accepted_ms LIMIT ?",
        accepted_before_ms,
        limit,
    )
    ids = [id for id, _ in found]
    wanted = json.dumps(ids)
    inside = "IN (SELECT value FROM json_each(?))"
    pairs_dead = connection.execute(f"SELECT count(*) FROM outbox WHERE id {inside} AND state = 2", (wanted,)).get
    messages_dead = connection.execute(
        f"SELECT count(*) FROM dead WHERE id {inside} AND destination = ''", (wanted,)
    ).get
    for table in ("outbox", "dead", "results"):
        connection.execute(f"DELETE FROM {table} WHERE id {inside}", (wanted,))
    succeeded = sum(is_succeeded for _, is_succeeded in found)
    count(
        connection,
        succeeded=-succeeded,
        failed=succeeded - len(ids),
        dead=-int(messages_dead or 0),
        outbox_dead=-int(pairs_dead or 0),
    )
    return ids
