"""The tables of the SQLite topics, and what is done to them inside a transaction.

A topic is an append-only line of messages and a head. Claiming moves the head and writes a small row into `claims`, so
payloads are written once and a million waiting messages cost what a thousand cost. A row in `claims` is held (state 0)
or was given back (state 1); a held one whose deadline has passed is a suspect, to be claimed alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from headrace.brokers.base import Claim, Depth
from headrace.sqlite import Connection

__all__ = [
    "TABLES",
    "ack",
    "anything",
    "depth",
    "extend",
    "fingerprint_of",
    "numbers_of",
    "release",
    "suspects",
    "take_fresh",
    "take_suspect",
    "topic_of",
]

TABLES = """
CREATE TABLE IF NOT EXISTS topics(
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    head INTEGER NOT NULL DEFAULT 0, length INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS messages(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, topic INTEGER NOT NULL, id TEXT NOT NULL UNIQUE,
    published_ms INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS messages_line ON messages(topic, seq);
CREATE TABLE IF NOT EXISTS claims(
    seq INTEGER PRIMARY KEY, topic INTEGER NOT NULL, token TEXT NOT NULL, state INTEGER NOT NULL,
    due_ms INTEGER NOT NULL, is_alone INTEGER NOT NULL, company INTEGER NOT NULL, alone INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS claims_due ON claims(topic, state, due_ms);
CREATE TABLE IF NOT EXISTS accepted(
    id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, accepted_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS accepted_age ON accepted(accepted_ms);
"""


_FRESH = "SELECT seq, id, published_ms, size, body FROM messages WHERE topic = ? AND seq > ? ORDER BY seq LIMIT ?"
_GIVEN_BACK = """
SELECT m.seq, m.id, m.published_ms, m.size, m.body FROM claims c JOIN messages m ON m.seq = c.seq
WHERE c.topic = ? AND c.state = 1 AND c.due_ms <= ? AND c.company + c.alone = 0 ORDER BY c.seq LIMIT ?"""
# A suspect is one that was lost, or that was given back after it had been lost before.
_SUSPECTS = """
FROM claims c WHERE c.topic IN (SELECT value FROM json_each(?)) AND c.due_ms <= ?
AND (c.state = 0 OR (c.state = 1 AND c.company + c.alone > 0))"""
_CLAIM = """
INSERT INTO claims(seq, topic, token, state, due_ms, is_alone, company, alone) VALUES(?, ?, ?, 0, ?, 0, 1, 0)
ON CONFLICT(seq) DO UPDATE SET
    token = excluded.token, state = 0, due_ms = excluded.due_ms, is_alone = 0, company = company + 1"""
_CLAIM_ALONE = """
UPDATE claims SET token = ?, state = 0, due_ms = ?, is_alone = 1, alone = alone + 1 WHERE seq = ?
RETURNING company, alone"""


def topic_of(connection: Connection, name: str) -> tuple[int, int, int]:
    """Return number, length and bytes of a topic, made on first use."""
    sql = "SELECT number, length, bytes FROM topics WHERE name = ?"
    row = connection.execute(sql, (name,)).fetchone()
    if row is None:
        connection.execute("INSERT INTO topics(name) VALUES(?)", (name,))
        row = connection.execute(sql, (name,)).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


def fingerprint_of(connection: Connection, id: str) -> str | None:
    """Return what a keyed id was accepted with, if it was."""
    row = connection.execute("SELECT fingerprint FROM accepted WHERE id = ?", (id,)).fetchone()
    return row[0] if row else None


def numbers_of(connection: Connection, topics: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Return topic number → (name, head)."""
    sql = "SELECT number, name, head FROM topics WHERE name = ?"
    rows = [connection.execute(sql, (topic,)).fetchone() for topic in topics]
    return {row[0]: (row[1], row[2]) for row in rows if row is not None}


def anything(connection: Connection, topics: Sequence[str], now_ms: int, alone: bool) -> bool:
    """Return whether a claim would find something; reads only."""
    numbers = numbers_of(connection, topics)
    if alone:
        return suspects(connection, numbers, now_ms) > 0
    return any(
        connection.execute("SELECT 1 FROM messages WHERE topic = ? AND seq > ? LIMIT 1", (number, head)).fetchone()
        or connection.execute(_GIVEN_BACK, (number, now_ms, 1)).fetchone()
        for number, (_, head) in numbers.items()
    )


def suspects(connection: Connection, numbers: Collection[int], now_ms: int) -> int:
    """Count the messages that wait to be claimed alone."""
    found = connection.execute(f"SELECT count(*) {_SUSPECTS}", (json.dumps(list(numbers)), now_ms)).get
    return int(found)


def take_fresh(
    connection: Connection,
    numbers: dict[int, tuple[str, int]],
    prefix: str,
    now_ms: int,
    due_ms: int,
    count_max: int,
    bytes_max: int,
) -> list[tuple[Any, ...]]:
    """Claim messages that nobody has lost, oldest first over all topics."""
    candidates: list[tuple[Any, ...]] = []
    for number, (name, head) in numbers.items():
        given_back = connection.execute(_GIVEN_BACK, (number, now_ms, count_max)).fetchall()
        fresh = connection.execute(_FRESH, (number, head, count_max)).fetchall()
        candidates += [(*row, number, name) for row in (*given_back, *fresh)]
    candidates.sort()
    taken: list[tuple[Any, ...]] = []
    held, heads, bytes_taken = [], {}, 0
    for seq, id, published_ms, size, body, number, name in candidates[:count_max]:
        if taken and bytes_taken + size > bytes_max:
            break
        bytes_taken += size
        token = f"{prefix}.{seq}"
        held.append((seq, number, token, due_ms))
        taken.append((name, token, id, published_ms, body, 1, 0))
        if seq > numbers[number][1]:
            heads[number] = seq
    connection.executemany(_CLAIM, held)
    connection.executemany("UPDATE topics SET head = ? WHERE number = ?", [(seq, n) for n, seq in heads.items()])
    return taken


def take_suspect(
    connection: Connection, numbers: dict[int, tuple[str, int]], prefix: str, now_ms: int, due_ms: int
) -> list[tuple[Any, ...]]:
    """Claim the oldest suspect, counting the attempt as one taken alone."""
    parameters = (json.dumps(list(numbers)), now_ms)
    row = connection.execute(f"SELECT c.seq, c.topic {_SUSPECTS} ORDER BY c.seq LIMIT 1", parameters).fetchone()
    if row is None:
        return []
    seq, number = row
    token = f"{prefix}.{seq}"
    counts = connection.execute(_CLAIM_ALONE, (token, due_ms, seq)).fetchone()
    found = connection.execute("SELECT id, published_ms, body FROM messages WHERE seq = ?", (seq,)).fetchone()
    assert counts is not None and found is not None
    return [(numbers[number][0], token, *found, *counts)]


def extend(connection: Connection, claims: Sequence[Claim], due_ms: int) -> set[str]:
    """Move deadlines of claims that are still ours; return the tokens that are not."""
    sql = "UPDATE claims SET due_ms = ? WHERE seq = ? AND token = ? AND state = 0"
    lost = set()
    for claim in claims:
        connection.execute(sql, (due_ms, _seq(claim.token), claim.token))
        if connection.changes() == 0:
            lost.add(claim.token)
    return lost


def ack(connection: Connection, claims: Sequence[Claim]) -> set[str]:
    """Remove messages whose claims are still ours; return the tokens that are not."""
    tokens = [claim.token for claim in claims]
    # A token ends in its row, so the two lists together name exactly the rows that are still ours.
    rows: list[Any] = connection.execute(
        "DELETE FROM claims WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0"
        " AND token IN (SELECT value FROM json_each(?)) RETURNING seq, token",
        (json.dumps([_seq(token) for token in tokens]), json.dumps(tokens)),
    ).fetchall()
    gone: list[Any] = connection.execute(
        "DELETE FROM messages WHERE seq IN (SELECT value FROM json_each(?)) RETURNING topic, size",
        (json.dumps([seq for seq, _ in rows]),),
    ).fetchall()
    sizes: dict[int, tuple[int, int]] = {}
    for topic, size in gone:
        count, total = sizes.get(topic, (0, 0))
        sizes[topic] = (count + 1, total + size)
    connection.executemany(
        "UPDATE topics SET length = length - ?, bytes = bytes - ? WHERE number = ?",
        [(count, total, topic) for topic, (count, total) in sizes.items()],
    )
    return set(tokens) - {token for _, token in rows}


def release(connection: Connection, claims: Sequence[Claim], due_ms: int) -> set[str]:
    """Give messages back as if they had not been claimed; return the tokens that were not ours."""
    sql = (
        "UPDATE claims SET state = 1, due_ms = ?, company = company - (1 - is_alone), alone = alone - is_alone"
        " WHERE seq = ? AND token = ? AND state = 0"
    )
    lost = set()
    for claim in claims:
        connection.execute(sql, (due_ms, _seq(claim.token), claim.token))
        if connection.changes() == 0:
            lost.add(claim.token)
    return lost


def depth(connection: Connection, topic: str, now_ms: int) -> Depth:
    """Return the line of a topic."""
    row = connection.execute("SELECT number, head, length, bytes FROM topics WHERE name = ?", (topic,)).fetchone()
    if row is None:
        return Depth(0, 0, 0, 0)
    number, head, length, size = row
    held = "SELECT count(*) FROM claims WHERE topic = ? AND state = 0 AND due_ms > ?"
    claimed = int(connection.execute(held, (number, now_ms)).get)
    first = "SELECT published_ms FROM messages WHERE topic = ? AND seq > ? ORDER BY seq LIMIT 1"
    back = (
        "SELECT min(m.published_ms) FROM claims c JOIN messages m ON m.seq = c.seq"
        " WHERE c.topic = ? AND (c.state = 1 OR c.due_ms <= ?)"
    )
    ages = [connection.execute(first, (number, head)).get, connection.execute(back, (number, now_ms)).get]
    oldest_ms = min((age for age in ages if age is not None), default=now_ms)
    return Depth(length - claimed, claimed, size, max(0, now_ms - oldest_ms))


def _seq(token: str) -> int:
    return int(token.rpartition(".")[2])
