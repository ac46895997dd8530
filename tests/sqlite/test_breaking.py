"""One file, many processes, and everything that goes wrong with them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import apsw
import pytest

from headrace.brokers import Broker, Claim, Receipt, open_broker
from headrace.brokers.sqlite import SqliteBroker
from headrace.errors import BrokerUnavailable, HeadraceError, StorageFull, StoreUnavailable
from headrace.message import Result
from headrace.sqlite import Connection
from headrace.stores import Finished, Store, open_store
from headrace.stores.sqlite import SqliteStore
from sqlite.children import CLOCK, DESTINATIONS, content, finished, message
from sqlite.conftest import Start, heard

SOON_S = 60


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[SqliteBroker]:
    made = open_broker(f"sqlite:///{tmp_path}/t.db", clock=CLOCK)
    assert isinstance(made, SqliteBroker)
    await made.open()
    yield made
    await made.close()


def sound(connection: Connection) -> list[object]:
    """Return what is wrong inside the file, and where its parts disagree."""
    looks = (
        "SELECT * FROM pragma_integrity_check WHERE integrity_check != 'ok'",
        "SELECT number FROM topics t WHERE length != (SELECT count(*) FROM messages m WHERE m.topic = t.number)",
        "SELECT number FROM topics t WHERE bytes != (SELECT coalesce(sum(size), 0) FROM messages WHERE topic = number)",
        "SELECT id FROM messages WHERE length(body) != size",
        "SELECT seq FROM claims WHERE seq NOT IN (SELECT seq FROM messages)",
    )
    return [row for look in looks for row in connection.execute(look)]


def ids_of(outcomes: Sequence[Receipt | HeadraceError]) -> set[str]:
    return {outcome.id for outcome in outcomes if isinstance(outcome, Receipt)}


# -- many processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_processes_hammer_one_file_and_each_message_is_settled_once(tmp_path: Path, start: Start) -> None:
    children = [start("hammer", tmp_path / "t.db", name, 60) for name in "abcdefgh"]
    facts = [heard(child) for child in children]
    assert [child.wait() for child in children] == [0] * 8
    published = [id for fact in facts for id in fact["published"]]
    assert len(set(published)) == 8 * 60
    assert Counter(id for fact in facts for id in fact["acked"]) == Counter(published)
    wins = Counter(id for fact in facts for id in fact["wins"])
    assert wins == Counter(f"id-{number}" for number in range(60))


@pytest.mark.slow
async def test_what_was_promised_outlives_kill_9_in_the_middle_of_commits(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "t.db"
    published: set[str] = set()
    committed: set[str] = set()
    for life in range(5):
        child = start("write", path, f"life{life}")
        facts = [heard(child) for _ in range(60 + 7 * life)]
        child.send_signal(signal.SIGKILL)
        said, _ = child.communicate()
        assert child.returncode == -signal.SIGKILL
        # The last line may be cut; what is not a whole line was heard by nobody.
        facts += [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]
        published.update(id for fact in facts for id in fact.get("published", ()))
        committed.update(id for fact in facts for id in fact.get("committed", ()))
    await everything_is_there(path, published, committed)


async def everything_is_there(path: Path, published: set[str], committed: set[str]) -> None:
    broker = open_broker(f"sqlite:///{path}", clock=CLOCK)
    store = open_store(f"sqlite:///{path}", clock=CLOCK)
    assert isinstance(broker, SqliteBroker)
    await broker.open()
    await store.open()
    try:
        assert published
        assert await broker.find(published) == published
        for id in published:
            read = await broker.read(id)
            assert read is not None
            assert read.payload == content(id)
        assert committed
        assert await store.present(committed) == committed
        page, _ = await store.after("", 100_000)
        deliveries = await store.deliveries_of([result.id for result in page])
        for result in page:
            assert result.payload == content(result.id)
            assert [pair.destination for pair in deliveries[result.id]] == list(DESTINATIONS)
        counts = await store.counts()
        assert (counts.succeeded, counts.outbox_pending) == (len(page), 2 * len(page))
        assert await broker._db.read(sound, BrokerUnavailable) == []
        # A keyed message and its fingerprint are written together or not at all.
        both = "SELECT id FROM messages EXCEPT SELECT id FROM accepted"
        assert await broker._db.read(lambda c: c.execute(both).fetchall(), BrokerUnavailable) == []
        assert len({id.rpartition("-")[0] for id in committed}) * 3 <= len(page), "a commit is whole or not there"
        assert len(page) % 3 == 0
    finally:
        await broker.close()
        await store.close()


@pytest.mark.parametrize("poll_s", [600.0, 0.03], ids=["by the bell alone", "by looking alone"])
async def test_a_publish_wakes_another_process(
    broker: SqliteBroker, tmp_path: Path, start: Start, poll_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if poll_s < 1:
        monkeypatch.setattr("headrace.sqlite.doorbell.Doorbell.ring", lambda self, names: None)
    child = start("wait", tmp_path / "t.db", poll_s)
    assert await asyncio.to_thread(heard, child) == {"waits": True}
    sent = message()
    await broker.publish("m", [sent])
    assert await asyncio.wait_for(asyncio.to_thread(heard, child), SOON_S) == {"claimed": [sent.id]}


async def test_a_file_locked_by_another_process_is_unavailable_after_a_while_and_then_works(
    broker: SqliteBroker, tmp_path: Path, start: Start
) -> None:
    before = message()
    await broker.publish("m", [before])
    child = start("lock", tmp_path / "t.db")
    assert await asyncio.to_thread(heard, child) == {"locked": True}
    refused = message()
    (outcome,) = await asyncio.wait_for(broker.publish("m", [refused]), SOON_S)
    assert isinstance(outcome, BrokerUnavailable)
    assert "locked by another process" in outcome.message
    # Looking needs no lock.
    assert await broker.find([before.id, refused.id]) == {before.id}
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert await asyncio.to_thread(heard, child) == {"locked": False}
    after = message()
    assert ids_of(await broker.publish("m", [after])) == {after.id}
    assert await broker.find([before.id, refused.id, after.id]) == {before.id, after.id}


# -- a full disk -------------------------------------------------------------------------------------------


async def fill(broker: Broker, size: int) -> tuple[set[str], list[HeadraceError]]:
    """Publish until five in a row were refused."""
    accepted: set[str] = set()
    refusals: list[HeadraceError] = []
    while len(refusals) < 5:
        (outcome,) = await broker.publish("m", [message(size=size)])
        if isinstance(outcome, Receipt):
            accepted.add(outcome.id)
        else:
            refusals.append(outcome)
        assert len(accepted) < 10_000, "the disk never became full"
    return accepted, refusals


async def test_a_full_disk_refuses_loses_nothing_and_recovers_by_itself(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1536 * 1024))
    url = f"sqlite:///{small_disk}/t.db"
    broker, store = open_broker(url, clock=CLOCK), open_store(url, clock=CLOCK)
    assert isinstance(broker, SqliteBroker)
    await broker.open()
    await store.open()
    try:
        accepted, refusals = await fill(broker, 20_000)
        assert accepted
        assert {type(refusal) for refusal in refusals} == {StorageFull}
        with pytest.raises(StorageFull):
            await broker.health()
        with pytest.raises(StorageFull):
            await store.health()
        with pytest.raises(StorageFull):
            await store.commit([finished(f"id-{number}") for number in range(500)])
        assert (await store.counts()).succeeded == 0
        assert await broker.find(accepted) == accepted
        ballast.unlink()
        more = message(size=20_000)
        assert ids_of(await broker.publish("m", [more])) == {more.id}
        assert await store.commit([finished("id-0")]) == [True]
        await broker.health()
        everything = accepted | {more.id}
        seen: set[str] = set()
        while len(seen) < len(everything):
            got = await broker.claim(["m"], count_max=20, bytes_max=1 << 20, claim_ms=60_000, alone=False)
            assert got.claims, "what was accepted is gone"
            for claim in got.claims:
                assert claim.message.payload == content(claim.message.id, 20_000)
            assert await broker.ack(got.claims) == set()
            seen |= {claim.message.id for claim in got.claims}
        assert seen == everything
        assert await broker._db.read(sound, BrokerUnavailable) == []
    finally:
        await broker.close()
        await store.close()


async def test_on_a_full_disk_nothing_is_handed_out_whose_count_could_not_be_kept(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1024 * 1024))
    broker = open_broker(f"sqlite:///{small_disk}/t.db", clock=CLOCK)
    await broker.open()
    try:
        accepted = (await fill(broker, 20_000))[0] | (await fill(broker, 50))[0]
        handed: list[Claim] = []
        refused = 0
        while refused < 3:
            try:
                got = await broker.claim(["m"], count_max=1, bytes_max=1, claim_ms=600_000, alone=False)
            except StorageFull:
                refused += 1
            else:
                assert got.claims, "all was claimed and the disk was never full"
                handed += got.claims
        ballast.unlink()
        handed += (await broker.claim(["m"], count_max=1000, bytes_max=1 << 30, claim_ms=600_000, alone=False)).claims
        assert Counter(claim.message.id for claim in handed) == Counter(accepted)
        assert {claim.attempt for claim in handed} == {1}
        assert await broker.ack(handed) == set()
    finally:
        await broker.close()


async def test_a_file_that_is_filled_by_another_process_is_whole_when_it_is_opened_again(
    small_disk: Path, start: Start
) -> None:
    child = start("write", small_disk / "t.db", "full")
    published: set[str] = set()
    committed: set[str] = set()
    said, _ = await asyncio.to_thread(child.communicate)
    assert child.returncode == 1, "it stops when it is refused"
    for line in said.splitlines():
        published.update(json.loads(line).get("published", ()))
        committed.update(json.loads(line).get("committed", ()))
    # Its last transactions are in the WAL, and opening needs room for the shared memory.
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    await everything_is_there(small_disk / "t.db", published, committed)


# -- the WAL and its commits ---------------------------------------------------------------------------------


async def test_the_wal_stays_short_under_constant_writing(broker: SqliteBroker, tmp_path: Path) -> None:
    wal = tmp_path / "t.db-wal"
    longest = written = 0
    size = 1 << 20

    async def publisher() -> None:
        nonlocal longest, written
        while written < 200 << 20:
            written += size
            sent = message(size=size)
            assert ids_of(await broker.publish("m", [sent])) == {sent.id}
            got = await broker.claim(["m"], count_max=1, bytes_max=1, claim_ms=60_000, alone=False)
            assert await broker.ack(got.claims) == set()
            longest = max(longest, wal.stat().st_size)

    await asyncio.gather(*(publisher() for _ in range(4)))
    assert longest < 48 << 20
    assert written > 2 * longest


async def test_publishes_at_once_share_commits(broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[int] = []
    monkeypatch.setattr("headrace.sqlite.checkpoints.Checkpoints.note", lambda self, pages: commits.append(pages))
    messages = [message() for _ in range(400)]
    outcomes = await asyncio.gather(*(broker.publish("m", [sent]) for sent in messages))
    assert {id for outcome in outcomes for id in ids_of(outcome)} == {sent.id for sent in messages}
    assert 1 <= len(commits) <= 40
    commits.clear()
    for _ in range(5):
        await broker.publish("m", [message()])
    assert len(commits) == 5, "the count itself counts"


async def test_an_operation_that_fails_fails_alone(broker: SqliteBroker) -> None:
    """Its own writes are undone, and those in the same commit are not."""
    database = broker._db
    await database.write(lambda c: c.execute("CREATE TABLE t(x INTEGER PRIMARY KEY)").fetchall(), BrokerUnavailable)

    def good(number: int) -> object:
        return database.write(lambda c: c.execute("INSERT INTO t VALUES(?)", (number,)).fetchall(), BrokerUnavailable)

    def bad(connection: Connection) -> None:
        connection.execute("INSERT INTO t VALUES(1000)")
        raise ZeroDivisionError

    def doubled(connection: Connection) -> None:
        connection.execute("INSERT INTO t VALUES(2000)")
        connection.execute("INSERT INTO t VALUES(2000)")

    waited = [good(number) for number in range(20)]
    waited[7:7] = [database.write(bad, BrokerUnavailable), database.write(doubled, BrokerUnavailable)]
    found = await asyncio.gather(*waited, return_exceptions=True)  # type: ignore[call-overload]
    assert [type(one) for one in found if isinstance(one, Exception)] == [ZeroDivisionError, BrokerUnavailable]
    rows = await database.read(lambda c: c.execute("SELECT x FROM t ORDER BY x").fetchall(), BrokerUnavailable)
    assert [x for (x,) in rows] == list(range(20))


async def test_tables_of_a_newer_version_are_refused_and_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    store = open_store(url, clock=CLOCK)
    assert isinstance(store, SqliteStore)
    await store.open()
    await store.commit([finished("a")])
    newer = "UPDATE meta SET value = CAST('99' AS BLOB) WHERE name = 'schema'"
    await store._db.write(lambda c: c.execute(newer).fetchall(), StoreUnavailable)
    await store.close()
    again: Store = open_store(url, clock=CLOCK)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"tables of version 99.*upgrade headrace"):
            await again.open()
    with pytest.raises(StoreUnavailable):
        await again.commit([finished("b")])


async def test_a_stored_result_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/headrace.db", clock=CLOCK)
    await store.open()
    ids = [f"{number:032d}" for number in range(3)]
    await store.commit([Finished(result_of(id)) for id in ids])
    connection = apsw.Connection(str(tmp_path / "headrace.db"))
    connection.execute("UPDATE results SET body = substr(body, 1, 20) WHERE id = ?", (ids[1],))
    connection.close()
    page, _ = await store.after("", 10)
    assert [(result.id, result.error and result.error.code) for result in page] == [
        (ids[0], None),
        (ids[1], "internal"),
        (ids[2], None),
    ]
    assert (await store.get(ids))[ids[1]].error is not None
    await store.close()


def result_of(id: str) -> Result:
    return Result(id=id, model="m", model_version="1", accepted_at_ms=1, finished_at_ms=2, attempts=1, payload=b"{}")
