"""What other processes do to one file: `python children.py ROLE PATH ARGUMENT...`, a line of output for each fact."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
from pathlib import Path

from headrace.brokers import Receipt, open_broker
from headrace.clock import SystemClock
from headrace.message import Message, Result, keyed_id, new_id
from headrace.sqlite import database
from headrace.stores import open_store
from headrace.stores.base import Finished

SECRET = b"s" * 32
CLOCK = SystemClock()
SIZE = 3000
DESTINATIONS = ("http://a", "http://b")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def content(id: str, size: int = SIZE) -> bytes:
    """Return bytes that only this id has, so that half of them, or another's, would be seen."""
    return (b"{}" + id.encode() * (size // len(id) + 1))[:size]


def message(id: str = "", *, size: int = SIZE, **changes: object) -> Message:
    now_ms = CLOCK.now_ms()
    id = id or new_id(now_ms, SECRET)
    given = {"id": id, "model": "m", "signature": "", "accepted_at_ms": now_ms, "header_length": 2}
    return Message(**(given | {"payload": content(id, size)} | changes))


def keyed(key: str) -> Message:
    return message(keyed_id(key, SECRET), fingerprint="f" * 64)


def finished(id: str, writer: str = "") -> Finished:
    now_ms = CLOCK.now_ms()
    result = Result(
        id=id,
        model="m",
        model_version="1",
        accepted_at_ms=now_ms,
        finished_at_ms=now_ms,
        attempts=1,
        request_id=writer,
        header_length=2,
        payload=content(id),
    )
    return Finished(result, [(url, content(id)) for url in DESTINATIONS])


async def hammer(path: Path, name: str, count: int) -> None:
    """Publish, claim and acknowledge until the topic is empty, and commit ids that all the others commit too."""
    broker = open_broker(f"sqlite:///{path}", clock=CLOCK)
    store = open_store(f"sqlite:///{path}", clock=CLOCK)
    await broker.open()
    await store.open()
    acked: list[str] = []
    wins: list[str] = []

    async def publish() -> list[str]:
        ids = []
        for _ in range(count):
            (outcome,) = await broker.publish("m", [message()])
            assert isinstance(outcome, Receipt), outcome
            ids.append(outcome.id)
        return ids

    async def consume(publishing: asyncio.Task[list[str]]) -> None:
        while True:
            is_last = publishing.done()
            got = await broker.claim(["m"], count_max=7, bytes_max=1 << 20, claim_ms=600_000, alone=False)
            lost = await broker.ack(got.claims) if got.claims else set()
            acked.extend(claim.message.id for claim in got.claims if claim.token not in lost)
            if not got.claims and is_last:
                return
            if not got.claims:
                await broker.wait(["m"], 0.05)

    async def commit() -> None:
        ids = [f"id-{number}" for number in range(count)]
        random.Random(name).shuffle(ids)
        for start in range(0, count, 5):
            part = ids[start : start + 5]
            firsts = await store.commit([finished(id, name) for id in part])
            wins.extend(id for id, is_first in zip(part, firsts, strict=True) if is_first)

    publishing = asyncio.create_task(publish())
    await asyncio.gather(publishing, consume(publishing), commit())
    await broker.close()
    await store.close()
    say(published=publishing.result(), acked=acked, wins=wins)


async def write(path: Path, name: str) -> None:
    """Publish and commit for ever, saying what was promised as soon as it was."""
    broker = open_broker(f"sqlite:///{path}", clock=CLOCK)
    store = open_store(f"sqlite:///{path}", clock=CLOCK)
    await broker.open()
    await store.open()

    async def publish(lane: int) -> None:
        for number in range(1_000_000):
            outcomes = await broker.publish("m", [keyed(f"{name}-{lane}-{number}-{part}") for part in range(3)])
            assert all(isinstance(outcome, Receipt) for outcome in outcomes), outcomes
            say(published=[outcome.id for outcome in outcomes if isinstance(outcome, Receipt)])

    async def commit(lane: int) -> None:
        for number in range(1_000_000):
            ids = [f"{name}-{lane}-{number}-{part}" for part in range(3)]
            assert all(await store.commit([finished(id) for id in ids]))
            say(committed=ids)

    await asyncio.gather(*(publish(lane) for lane in range(4)), *(commit(lane) for lane in range(4)))


async def wait(path: Path, poll_s: float) -> None:
    """Say when a topic that was empty has something to claim, looking by itself only every `poll_s`."""
    database._POLL_S = poll_s
    broker = open_broker(f"sqlite:///{path}", clock=CLOCK)
    await broker.open()
    waiting = asyncio.create_task(broker.wait(["m"], 600))
    await asyncio.sleep(0)
    say(waits=True)
    await waiting
    got = await broker.claim(["m"], count_max=1, bytes_max=1 << 20, claim_ms=60_000, alone=False)
    say(claimed=[claim.message.id for claim in got.claims])
    await broker.close()


def lock(path: Path) -> None:
    """Hold the write lock until something comes on standard input."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    say(locked=True)
    sys.stdin.readline()
    connection.execute("ROLLBACK")
    connection.close()
    say(locked=False)


def main() -> None:
    role, path, *rest = sys.argv[1:]
    match role:
        case "hammer":
            asyncio.run(hammer(Path(path), rest[0], int(rest[1])))
        case "write":
            asyncio.run(write(Path(path), rest[0]))
        case "wait":
            asyncio.run(wait(Path(path), float(rest[0])))
        case "lock":
            lock(Path(path))


if __name__ == "__main__":
    main()
