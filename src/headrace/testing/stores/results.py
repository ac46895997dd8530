"""Results: written once, read in the order of their commits, kept as long as they must be."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import InvalidRequest
from headrace.message import ErrorRecord
from headrace.stores.base import Report, Store
from headrace.testing.stores.bench import NOW_MS, Opened, StoreBench

__all__ = ["ResultsSuite"]


class ResultsSuite(StoreBench):
    """What `commit`, `get`, `after` and `purge` promise."""

    async def test_a_result_is_read_back_as_it_was_written(self, store: Store) -> None:
        """Succeeded and failed alike, every field of it."""
        error = ErrorRecord(code="shape_mismatch", message="Shape mismatch", details={"input": "x", "actual": [1, 2]})
        good = self.result("a", client_id="mine", traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01", attempts=7)
        bad = self.result("b", error=error, header_length=0, payload=b"")
        assert await store.commit([self.finished("a", **_fields(good)), self.finished("b", **_fields(bad))]) == [
            True,
            True,
        ]
        assert await store.get(["a", "b", "c"]) == {"a": good, "b": bad}
        assert await store.present(["a", "c"]) == {"a"}

    async def test_the_first_writer_wins_and_the_loser_changes_nothing(self, store: Store) -> None:
        """Nothing of the loser's entry is written: no result, no outbox row, no dead letter."""
        assert await store.commit([self.finished("a")]) == [True]
        before = await store.get(["a"])
        assert await store.commit([self.finished("a", "http://late", payload=b"{}other")]) == [False]
        assert await store.commit([self.dead("a")]) == [False]
        assert await store.get(["a"]) == before
        assert await self.due(store) == []
        assert (await store.dead_letters())[0] == []
        counts = await store.counts()
        assert (counts.succeeded, counts.failed, counts.dead, counts.outbox_pending) == (1, 0, 0, 0)

    async def test_two_entries_of_one_id_in_one_call_are_one_result(self, store: Store) -> None:
        """The first of them wins, and each entry gets its own answer."""
        entries = [self.finished("a", payload=b"{}1"), self.finished("b"), self.finished("a", payload=b"{}2")]
        assert await store.commit(entries) == [True, True, False]
        assert (await store.get(["a"]))["a"].payload == b"{}1"

    async def test_many_writers_of_one_id_make_one_result(self, opened: Opened) -> None:
        """Also when they hold handles of their own, as processes do."""
        store = await opened()
        entries = [[self.finished("a", payload=b"{}%d" % number)] for number in range(20)]
        answers = await asyncio.gather(*(store.commit(entry) for entry in entries))
        assert sorted(answer[0] for answer in answers) == [False] * 19 + [True]
        winner = entries[answers.index([True])][0].result
        assert (await store.get(["a"]))["a"] == winner

    async def test_committing_nothing_is_allowed(self, store: Store) -> None:
        """And answers nothing."""
        assert await store.commit([]) == []
        assert await store.get([]) == {}
        assert await store.present([]) == set()

    async def test_results_are_read_in_the_order_of_their_commits(self, store: Store) -> None:
        """Whatever their times say, in pages of any size."""
        ids = [f"id-{number:02}" for number in range(10)]
        for number, id in enumerate(ids):
            await store.commit([self.finished(id, finished_at_ms=NOW_MS - number, accepted_at_ms=NOW_MS - number)])
        for limit in (1, 3, 100):
            assert await self.read_all(store, limit) == ids

    async def test_a_cursor_goes_on_where_it_stood(self, store: Store) -> None:
        """At the end of the line it waits for what comes, and skips nothing."""
        await store.commit([self.finished("a")])
        page, cursor = await store.after("", 10)
        assert [found.id for found in page] == ["a"]
        assert await store.after(cursor, 10) == ([], cursor)
        assert await store.latest() == cursor
        await store.commit([self.finished("b"), self.finished("c")])
        page, _ = await store.after(cursor, 10)
        assert [found.id for found in page] == ["b", "c"]

    async def test_no_result_is_skipped_while_others_commit(self, store: Store) -> None:
        """A reader that follows along sees each one once."""
        ids = [f"id-{number:03}" for number in range(60)]
        seen: list[str] = []

        async def follow() -> None:
            cursor = ""
            while len(seen) < len(ids):
                page, cursor = await store.after(cursor, 7)
                seen.extend(found.id for found in page)
                await store.wait_results(0.05)

        follower = asyncio.create_task(follow())
        await asyncio.gather(*(store.commit([self.finished(id)]) for id in ids))
        await self.soon(follower)
        assert sorted(seen) == ids
        assert seen == await self.read_all(store)

    @pytest.mark.parametrize("cursor", ["nonsense", "-1", "999999", "1.5", "٣", "9" * 40])
    async def test_a_cursor_that_was_never_given_is_refused(self, store: Store, cursor: str) -> None:
        """It is the caller's mistake and is called so."""
        await store.commit([self.finished("a")])
        with pytest.raises(InvalidRequest):
            await store.after(cursor, 10)

    async def test_a_commit_wakes_those_who_wait_for_results(self, opened: Opened) -> None:
        """Long before their time is up."""
        store = await opened()
        waiting = asyncio.create_task(store.wait_results(1000))
        await asyncio.sleep(0)
        await store.commit([self.finished("a")])
        await self.soon(waiting)

    async def test_waiting_ends_by_itself(self, store: Store) -> None:
        """A hint may be lost, so nobody waits for ever."""
        await self.soon(store.wait_results(0.01))
        await self.soon(store.wait_outbox(0.01))

    async def test_a_secret_stays_the_same(self, opened: Opened) -> None:
        """For everybody who opens this store; another name has another."""
        store = await opened()
        first = await store.secret("ids")
        assert len(first) == 32
        assert await store.secret("ids") == first
        assert await store.secret("webhook") != first

    async def test_purging_removes_a_result_with_all_its_remains(self, store: Store) -> None:
        """And leaves those that are younger."""
        await store.commit([self.finished("old", "http://a"), self.dead("older", accepted_at_ms=NOW_MS - 5)])
        await store.commit([self.finished("young", accepted_at_ms=NOW_MS + 10)])
        dispatch = await self.one_due(store)
        await store.delivered([(dispatch, 200)])
        assert sorted(await store.purge(accepted_before_ms=NOW_MS + 1)) == ["old", "older"]
        assert await store.get(["old", "older"]) == {}
        assert await store.deliveries("old") == []
        assert (await store.dead_letters())[0] == []
        assert await self.read_all(store) == ["young"]
        counts = await store.counts()
        assert (counts.succeeded, counts.failed, counts.dead) == (1, 0, 0)

    async def test_nothing_is_purged_with_an_open_outbox_entry(self, store: Store) -> None:
        """Until it is delivered or dead."""
        await store.commit([self.finished("a", "http://a", "http://b")])
        assert await store.purge(accepted_before_ms=NOW_MS + 1) == []
        for dispatch in await self.due(store):
            assert await store.purge(accepted_before_ms=NOW_MS + 1) == []
            if dispatch.destination == "http://a":
                await store.delivered([(dispatch, 200)])
            else:
                await store.give_up(dispatch, now_ms=NOW_MS, status=None, code="refused", error="no")
        assert await store.purge(accepted_before_ms=NOW_MS + 1) == ["a"]

    async def test_purging_goes_in_steps(self, store: Store) -> None:
        """The oldest first, never more than `limit` at a time."""
        await store.commit([self.finished(f"{n}", accepted_at_ms=NOW_MS - n) for n in range(5)])
        assert await store.purge(accepted_before_ms=NOW_MS + 1, limit=2) == ["4", "3"]
        assert await store.purge(accepted_before_ms=NOW_MS + 1, limit=9) == ["2", "1", "0"]

    async def test_a_cursor_survives_a_purge(self, store: Store) -> None:
        """What it stood on may be gone; what comes next is not skipped."""
        await store.commit([self.finished("a")])
        cursor = await store.latest()
        await store.purge(accepted_before_ms=NOW_MS + 1)
        assert await store.latest() == cursor
        await store.commit([self.finished("b", accepted_at_ms=NOW_MS + 10)])
        page, _ = await store.after(cursor, 10)
        assert [found.id for found in page] == ["b"]

    async def test_the_latest_report_of_each_instance_is_kept(self, store: Store) -> None:
        """Older ones are overwritten, and those of long ago are not shown."""
        await store.report(Report("b", 10, b"old"))
        await store.report(Report("b", 20, b"new"))
        await store.report(Report("a", 5, b"gone"))
        assert await store.reports(since_ms=0) == [Report("a", 5, b"gone"), Report("b", 20, b"new")]
        assert await store.reports(since_ms=6) == [Report("b", 20, b"new")]

    async def test_an_open_store_is_healthy_and_opens_twice(self, store: Store) -> None:
        """Opening is idempotent."""
        await store.open()
        await store.health()


def _fields(result: object) -> dict[str, object]:
    return {name: getattr(result, name) for name in result.__struct_fields__ if name != "id"}  # type: ignore[attr-defined]
