"""Dead letters: nothing that was given up on is forgotten, and all of it can be sent again."""

from __future__ import annotations

from headrace.stores.base import Store
from headrace.testing.stores.bench import NOW_MS, StoreBench

__all__ = ["LettersSuite"]

_A = "http://a.example/hook"


class LettersSuite(StoreBench):
    """What the dead letters and their replays promise."""

    async def test_a_dead_message_keeps_its_reason_and_its_payload(self, store: Store) -> None:
        """In the transaction of its failed result."""
        entry = self.dead("a", attempts=4)
        await store.commit([entry])
        letter = await store.dead_letter("a")
        assert letter is not None
        assert letter.message == entry.dead
        assert (letter.kind, letter.reason_code, letter.reason) == ("message", "model_failed", "It died three times")
        assert (letter.model, letter.attempts, letter.dead_at_ms) == ("fraud", 4, NOW_MS)
        assert not (await store.get(["a"]))["a"].succeeded
        assert (await store.counts()).dead == 1
        assert await store.dead_letter("b") is None
        assert await store.dead_letter("a", _A) is None

    async def test_a_dead_delivery_keeps_its_reason(self, store: Store) -> None:
        """And shows as dead among the deliveries of its result."""
        await store.commit([self.finished("a", _A)])
        dispatch = await self.one_due(store)
        await store.give_up(dispatch, now_ms=NOW_MS + 7, status=500, code="exhausted", error="it answered 500")
        letter = await store.dead_letter("a", _A)
        assert letter is not None
        assert (letter.kind, letter.destination, letter.message) == ("delivery", _A, None)
        assert (letter.reason_code, letter.reason, letter.dead_at_ms) == ("exhausted", "it answered 500", NOW_MS + 7)
        (delivery,) = await store.deliveries("a")
        assert (delivery.state, delivery.last_status, delivery.attempts) == ("dead", 500, 1)
        counts = await store.counts()
        assert (counts.outbox_pending, counts.outbox_dead) == (0, 1)

    async def test_dead_letters_are_listed_in_pages_oldest_first(self, store: Store) -> None:
        """Both kinds in one list; the cursor skips nothing that dies later."""
        await store.commit([self.dead("a"), self.finished("b", _A), self.dead("c")])
        dispatch = await self.one_due(store)
        await store.give_up(dispatch, now_ms=NOW_MS, status=None, code="refused", error="no")
        first, cursor = await store.dead_letters(limit=2)
        assert [(letter.kind, letter.id) for letter in first] == [("message", "a"), ("message", "c")]
        second, cursor = await store.dead_letters(after=cursor, limit=2)
        assert [(letter.kind, letter.id) for letter in second] == [("delivery", "b")]
        await store.commit([self.dead("d")])
        third, _ = await store.dead_letters(after=cursor, limit=2)
        assert [letter.id for letter in third] == ["d"]

    async def test_a_replay_of_a_message_is_noted(self, store: Store) -> None:
        """So that nobody replays it twice without knowing."""
        await store.commit([self.dead("a")])
        await store.mark_replayed("a", "new")
        letter = await store.dead_letter("a")
        assert letter is not None
        assert letter.replayed_as == "new"

    async def test_a_replayed_delivery_is_sent_as_it_was(self, store: Store) -> None:
        """Due at once, with a new series of attempts, the same id and the same body."""
        await store.commit([self.finished("a", _A)])
        before = await self.one_due(store)
        await store.give_up(before, now_ms=NOW_MS, status=None, code="refused", error="no")
        assert await store.replay_delivery("a", _A, now_ms=NOW_MS + 50)
        again = await self.one_due(store, now_ms=NOW_MS + 50)
        assert (again.webhook_id, again.body, again.attempt) == (before.webhook_id, before.body, 1)
        assert again.created_at_ms == NOW_MS + 50
        assert await store.dead_letter("a", _A) is None
        counts = await store.counts()
        assert (counts.outbox_pending, counts.outbox_dead) == (1, 0)

    async def test_a_replay_re_enables_its_destination(self, store: Store) -> None:
        """Whoever replays says that it is there again."""
        await store.commit([self.finished("a", _A)])
        await store.disable(_A, now_ms=NOW_MS, reason="it answered 410")
        assert await store.replay_delivery("a", _A, now_ms=NOW_MS)
        await store.commit([self.finished("b", _A)])
        assert sorted(dispatch.id for dispatch in await self.due(store)) == ["a", "b"]

    async def test_only_a_dead_pair_is_replayed(self, store: Store) -> None:
        """Not one that is pending, delivered, or was never there."""
        await store.commit([self.finished("a", _A)])
        assert not await store.replay_delivery("a", _A, now_ms=NOW_MS)
        await store.delivered([(await self.one_due(store), 200)])
        assert not await store.replay_delivery("a", _A, now_ms=NOW_MS)
        assert not await store.replay_delivery("b", _A, now_ms=NOW_MS)
