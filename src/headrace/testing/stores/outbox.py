"""The outbox: every (result, destination) is sent until it is delivered or dead, and holders come and go."""

from __future__ import annotations

import asyncio

from headrace.stores.base import Store
from headrace.testing.stores.bench import NOW_MS, Opened, StoreBench

__all__ = ["OutboxSuite"]

_A, _B = "http://a.example/hook", "http://b.example/hook"


class OutboxSuite(StoreBench):
    """What `claim_due` and its endings promise."""

    async def test_a_pair_is_due_as_soon_as_its_result_is_there(self, store: Store) -> None:
        """With the body that was frozen in the result's own transaction."""
        await store.commit([self.finished("a", _A)])
        dispatch = await self.one_due(store)
        assert (dispatch.id, dispatch.destination, dispatch.body) == ("a", _A, f"a for {_A}".encode())
        assert (dispatch.webhook_id, dispatch.attempt, dispatch.created_at_ms) == ("a", 1, NOW_MS)
        assert (await store.counts()).outbox_pending == 1

    async def test_a_held_pair_is_not_handed_out_until_its_claim_expires(self, store: Store) -> None:
        """And then its attempt was counted, although its holder never came back."""
        await store.commit([self.finished("a", _A)])
        first = await self.one_due(store)
        assert await self.due(store, now_ms=NOW_MS + self.claim_ms - 1) == []
        second = await self.one_due(store, now_ms=NOW_MS + self.claim_ms + 1)
        assert (second.attempt, second.webhook_id, second.body) == (2, first.webhook_id, first.body)
        assert second.token != first.token

    async def test_an_attempt_is_counted_before_it_is_made(self, opened: Opened) -> None:
        """Whoever looks sees it while the attempt is still under way."""
        store = await opened()
        await store.commit([self.finished("a", _A)])
        await self.one_due(store)
        assert [delivery.attempts for delivery in await store.deliveries("a")] == [1]

    async def test_two_holders_never_hold_one_pair(self, store: Store) -> None:
        """However many ask at once."""
        await store.commit([self.finished(f"id-{n}", _A) for n in range(30)])
        taken = await asyncio.gather(*(self.due(store, count_max=5) for _ in range(10)))
        ids = [dispatch.id for dispatches in taken for dispatch in dispatches]
        assert len(ids) == len(set(ids)) == 30

    async def test_the_oldest_due_goes_first_and_not_more_than_asked(self, store: Store) -> None:
        """Over all destinations."""
        for number, url in enumerate((_A, _B, _A)):
            await store.commit([self.finished(f"{number}", url, finished_at_ms=NOW_MS - 10 + number)])
        assert [dispatch.id for dispatch in await self.due(store, count_max=2)] == ["0", "1"]
        assert [dispatch.id for dispatch in await self.due(store)] == ["2"]

    async def test_a_busy_destination_hides_nobody(self, store: Store) -> None:
        """However many of its pairs are due before the others'."""
        await store.commit([self.finished(f"dead-{n}", _A, finished_at_ms=NOW_MS - 100) for n in range(50)])
        await store.commit([self.finished("alive", _B)])
        assert [dispatch.id for dispatch in await self.due(store, count_max=3, busy=[_A])] == ["alive"]

    async def test_a_delivered_pair_is_done(self, store: Store) -> None:
        """It shows its status and is never handed out again."""
        await store.commit([self.finished("a", _A)])
        await store.delivered([(await self.one_due(store), 204)])
        assert await self.due(store, now_ms=NOW_MS + 10 * self.claim_ms) == []
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.last_status, delivery.next_at_ms) == ("delivered", 204, None)
        assert (await store.counts()).outbox_pending == 0

    async def test_a_success_counts_though_its_claim_was_lost(self, store: Store) -> None:
        """The receiver has it; sending it again would help nobody."""
        await store.commit([self.finished("a", _A)])
        late = await self.one_due(store)
        await self.one_due(store, now_ms=NOW_MS + self.claim_ms + 1)
        await store.delivered([(late, 200)])
        assert await self.due(store, now_ms=NOW_MS + 10 * self.claim_ms) == []
        await store.delivered([(late, 200)])
        assert (await store.counts()).outbox_pending == 0

    async def test_a_failed_attempt_is_due_again_when_its_time_comes(self, store: Store) -> None:
        """Not before; and it says what happened."""
        await store.commit([self.finished("a", _A)])
        await store.retry(await self.one_due(store), next_at_ms=NOW_MS + 5_000, status=500, error="it answered 500")
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.next_at_ms, delivery.last_status) == ("pending", NOW_MS + 5_000, 500)
        assert delivery.last_error == "it answered 500"
        assert await self.due(store, now_ms=NOW_MS + 4_999) == []
        assert (await self.one_due(store, now_ms=NOW_MS + 5_000)).attempt == 2

    async def test_an_attempt_that_was_not_made_is_not_counted(self, store: Store) -> None:
        """A pair that is given back is due when it was said, and shows what its last attempt ended in."""
        await store.commit([self.finished("a", _A)])
        await store.give_back(await self.one_due(store), next_at_ms=NOW_MS + 10)
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.attempts, delivery.next_at_ms) == ("pending", 0, NOW_MS + 10)
        assert (delivery.last_status, delivery.last_error) == (None, None)
        assert await self.due(store, now_ms=NOW_MS + 9) == []
        first = await self.one_due(store, now_ms=NOW_MS + 10)
        assert (first.attempt, first.last_status, first.last_error) == (1, None, None)
        await store.retry(first, next_at_ms=NOW_MS + 20, status=500, error="it answered 500")
        await store.give_back(await self.one_due(store, now_ms=NOW_MS + 20), next_at_ms=NOW_MS + 30)
        again = await self.one_due(store, now_ms=NOW_MS + 30)
        assert (again.attempt, again.last_status, again.last_error) == (2, 500, "it answered 500")
        (delivery,) = await store.deliveries("a")
        assert (delivery.attempts, delivery.last_status, delivery.last_error) == (2, 500, "it answered 500")

    async def test_a_lost_holder_gives_nothing_back(self, store: Store) -> None:
        """Its attempt may have been made, so it stays counted; this bounds what kills its holder every time."""
        await store.commit([self.finished("a", _A)])
        late = await self.one_due(store)
        now_ms = NOW_MS + self.claim_ms + 1
        await self.one_due(store, now_ms=now_ms)
        await store.give_back(late, next_at_ms=now_ms)
        await store.give_back(late, next_at_ms=now_ms)
        assert await self.due(store, now_ms=now_ms + 1) == []
        assert (await self.one_due(store, now_ms=now_ms + self.claim_ms + 1)).attempt == 3

    async def test_a_pair_given_up_untried_counts_only_what_was_made(self, store: Store) -> None:
        """In its dead letter too; a replay begins anew."""
        await store.commit([self.finished("a", _A)])
        await store.retry(await self.one_due(store), next_at_ms=NOW_MS, status=500, error="it answered 500")
        holder = await self.one_due(store)
        await store.give_up(holder, now_ms=NOW_MS, status=500, code="undelivered", error="not tried", tried=False)
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.attempts, delivery.last_status) == ("dead", 1, 500)
        letter = await store.dead_letter("a", _A)
        assert letter is not None
        assert (letter.attempts, letter.reason) == (1, "not tried")
        assert await store.replay_delivery("a", _A, now_ms=NOW_MS)
        anew = await self.one_due(store)
        assert (anew.attempt, anew.last_status, anew.last_error) == (1, None, None)

    async def test_a_lost_holder_can_neither_postpone_nor_give_up(self, store: Store) -> None:
        """Somebody else is sending it now."""
        await store.commit([self.finished("a", _A)])
        late = await self.one_due(store)
        now_ms = NOW_MS + self.claim_ms + 1
        holder = await self.one_due(store, now_ms=now_ms)
        await store.retry(late, next_at_ms=now_ms + 10**9, status=500, error="late")
        await store.give_up(late, now_ms=now_ms, status=500, code="exhausted", error="late")
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.last_error) == ("pending", None)
        await store.give_up(holder, now_ms=now_ms, status=500, code="exhausted", error="in time")
        assert [delivery.state for delivery in await store.deliveries("a")] == ["dead"]

    async def test_each_destination_has_a_webhook_id_of_its_own_when_there_are_several(self, store: Store) -> None:
        """So that one receiver behind two URLs drops neither; each starts with the message's id."""
        await store.commit([self.finished("a", _A, _B)])
        dispatches = await self.due(store)
        assert sorted(dispatch.destination for dispatch in dispatches) == [_A, _B]
        names = {dispatch.webhook_id for dispatch in dispatches}
        assert len(names) == 2
        shown = await store.deliveries_of(["a", "b"])
        assert [delivery.destination for delivery in shown["a"]] == [_A, _B]
        assert set(shown) == {"a"}
        assert all(name.startswith("a") and "." not in name for name in names)

    async def test_a_destination_that_is_gone_takes_its_pending_pairs_along(self, store: Store) -> None:
        """And later ones at once; others are not touched."""
        await store.commit([self.finished("a", _A), self.finished("b", _A), self.finished("c", _B)])
        assert await store.disable(_A, now_ms=NOW_MS, reason="it answered 410") == 2
        await store.commit([self.finished("d", _A)])
        assert [dispatch.id for dispatch in await self.due(store)] == ["c"]
        letters, _ = await store.dead_letters()
        assert [(letter.id, letter.destination, letter.reason) for letter in letters] == [
            (id, _A, "it answered 410") for id in ("a", "b", "d")
        ]
        counts = await store.counts()
        assert (counts.outbox_pending, counts.outbox_dead) == (1, 3)

    async def test_an_enabled_destination_is_sent_to_again(self, store: Store) -> None:
        """What died meanwhile stays dead until it is replayed."""
        await store.disable(_A, now_ms=NOW_MS, reason="it answered 410")
        await store.enable(_A)
        await store.commit([self.finished("a", _A)])
        assert (await self.one_due(store)).id == "a"

    async def test_a_commit_with_pairs_wakes_those_who_wait_for_the_outbox(self, store: Store) -> None:
        """Long before their time is up."""
        waiting = asyncio.create_task(store.wait_outbox(1000))
        await asyncio.sleep(0)
        await store.commit([self.finished("a", _A)])
        await self.soon(waiting)
