"""The real consumer under the history checker: silent on healthy adapters, and right about each broken one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.brokers.base import Claim
from headrace.brokers.sqlite import SqliteBroker
from headrace.message import Result
from headrace.stores.base import Finished, Store
from headrace.stores.memory import MemoryStore
from headrace.testing import ForgetfulBroker, LastWriterStore
from headrace.testing.history import Ending, History, Violation, check
from services.faults import Around, watched
from services.kit import FunctionRuntime, Hands, Road, road, until


def frozen(result: Result) -> bytes:
    return json.dumps([result.id, result.finished_at_ms, result.payload.hex(), str(result.error)]).encode()


async def rows(store: Store) -> tuple[dict[str, list[bytes]], set[str]]:
    """Read every row there is, as the pull route does, and the ids that failed."""
    found: dict[str, list[bytes]] = {}
    failed: set[str] = set()
    page, cursor = await store.after("", 7)
    while page:
        for result in page:
            found.setdefault(result.id, []).append(frozen(result))
            if not result.succeeded:
                failed.add(result.id)
        page, cursor = await store.after(cursor, 7)
    return found, failed


async def violations(here: Road, history: History) -> list[Violation]:
    results, failed = await rows(here.store)
    depth, counts = await here.broker.depth("neg"), await here.store.counts()
    ending = Ending(
        results,
        failed=failed,
        waiting=depth.waiting,
        claimed=depth.claimed,
        accepted=counts.succeeded + counts.failed + depth.waiting + depth.claimed,
    )
    return check(history, ending, attempts_max=here.settings.attempts_max)


def kinds(found: Sequence[Violation]) -> set[str]:
    return {violation.invariant for violation in found}


# -- acknowledged too early --------------------------------------------------------------------------------


class Hasty:
    """A broker and a store that together turn commit-then-ack around: whoever commits is acknowledged first."""

    def __init__(self, broker: Any, store: Any, *, dies: bool) -> None:
        self.inner_broker, self.inner_store, self.dies = broker, store, dies
        self.claims: dict[str, Claim] = {}
        self.dead = asyncio.Event()
        self.broker = Around(broker, claim=self.claim)
        self.store = Around(store, commit=self.commit)

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        got = await self.inner_broker.claim(*args, **kwargs)
        self.claims |= {claim.message.id: claim for claim in got.claims}
        return got

    async def commit(self, finished: Sequence[Finished]) -> list[bool]:
        await self.inner_broker.ack([self.claims[entry.result.id] for entry in finished])
        if self.dies:
            self.dead.set()
            await asyncio.Event().wait()
        firsts: list[bool] = await self.inner_store.commit(finished)
        return firsts


async def test_an_ack_before_the_commit_is_seen_though_nothing_was_lost(tmp_path: Path) -> None:
    history = History()
    async with road("memory", tmp_path) as here:
        ids = [await here.submit(float(n)) for n in range(20)]
        history.accepted.update(ids)
        hasty = Hasty(*watched(here.broker, here.store, history), dies=False)
        here.inference(FunctionRuntime(), broker=hasty.broker, store=hasty.store)
        await until(lambda: _all_there(here, ids), "every result")
        found = await violations(here, history)
        assert kinds(found) == {"I5"}


async def test_an_ack_before_the_commit_loses_what_was_in_hand_when_the_process_dies(tmp_path: Path) -> None:
    history = History()
    async with road("memory", tmp_path) as here:
        ids = [await here.submit(float(n)) for n in range(20)]
        history.accepted.update(ids)
        hasty = Hasty(*watched(here.broker, here.store, history), dies=True)
        consumer = here.inference(FunctionRuntime(), broker=hasty.broker, store=hasty.store)
        await asyncio.wait_for(hasty.dead.wait(), 20)
        await here.kill(consumer)
        here.inference(FunctionRuntime())
        # What was claimed and not acknowledged would come back in time; what was acknowledged never does.
        gone = set(history._early_acks)
        assert gone
        history.accepted.intersection_update(gone)
        found = await violations(here, history)
        assert {"I1", "I5"} <= kinds(found)


async def _all_there(here: Road, ids: Sequence[str]) -> bool:
    return len(await here.store.present(ids)) == len(ids)


# -- two results of one message -----------------------------------------------------------------------------


async def two_lives(here: Road, history: History) -> None:
    """A zombie finishes past its claim: the heir's result was read before the zombie commits its own."""
    id = await here.submit(1.0)
    history.accepted.add(id)
    broker, store = watched(here.broker, here.store, history)
    zombie = Hands(here.clock)
    frozen_broker = Around(broker, extend_blocking=lambda claims, claim_ms: set())
    here.consumer(zombie, broker=frozen_broker, store=store)
    await until(lambda: zombie.claims, "the zombie's claim")
    await here.advance(here.settings.claim_s + 1)
    heir = Hands(here.clock)
    here.consumer(heir, broker=broker, store=store)
    await until(lambda: heir.claims, "the heir's claim")
    heir.answer(heir.claims[0], 1.0)
    history.read(id, frozen(await here.result(id)))
    await here.drained()
    zombie.answer(zombie.claims[0], 2.0)
    await until(lambda: zombie_is_done(here), "the zombie's commit")
    await here.advance(1)
    history.read(id, frozen(await here.result(id)))


def zombie_is_done(here: Road) -> bool:
    return all(consumer.held == 0 for consumer in here._running)


@pytest.mark.parametrize(("kind", "expected"), [(MemoryStore, set()), (LastWriterStore, {"I1", "I3", "I11"})])
async def test_without_a_unique_key_a_zombie_changes_what_was_read(
    kind: type[MemoryStore], expected: set[str], tmp_path: Path
) -> None:
    history = History()
    async with road("memory", tmp_path, manual=True) as here:
        here.store = kind(here.clock)
        await here.store.open()
        await two_lives(here, history)
        assert kinds(await violations(here, history)) == expected


# -- attempts that nobody remembers -------------------------------------------------------------------------


class Fatal(Hands):
    """Every message kills its process; what was started is noted, as an instrumented runtime would."""

    def __init__(self, here: Road, history: History) -> None:
        super().__init__(here.clock)
        self.history = history

    def handle(self, claims: Sequence[Claim], done: Any) -> None:
        super().handle(claims, done)
        for claim in claims:
            self.history.start(claim.message.id, alone=claim.claims_alone > 0)


async def deaths(here: Road, history: History, kind: type[SqliteBroker], lives_max: int) -> int:
    """Let processes die of one message, each with a broker of its own; return how many it took until it was failed."""
    for number in range(lives_max):
        broker = kind(here.folder / "headrace.db", here.clock, length_max=100, bytes_max=1 << 30)
        await broker.open()
        hands = Fatal(here, history)
        consumer = here.consumer(hands, broker=broker)
        over = False
        while not (hands.claims or over):
            await here.advance(0.1)
            over = bool(await here.store.present(history.accepted))
        if over:
            await here.drained()
        await here.kill(consumer)
        await broker.close()
        if over:
            return number
        await here.advance(here.settings.claim_s + 1)
    return lives_max


@pytest.mark.parametrize(("kind", "expected"), [(SqliteBroker, set()), (ForgetfulBroker, {"I7"})])
async def test_attempts_in_memory_only_let_a_message_kill_for_ever(
    kind: type[SqliteBroker], expected: set[str], tmp_path: Path
) -> None:
    history = History()
    async with road("sqlite", tmp_path, manual=True) as here:
        id = await here.submit(1.0)
        history.accepted.add(id)
        history.meant_to_fail.add(id)
        taken = await deaths(here, history, kind, 8)
        found = kinds(await violations(here, history))
        assert found - {"I1", "I9"} == expected
        if not expected:
            assert (taken, found) == (here.settings.attempts_max + 1, set())
        else:
            assert taken == 8, "and it would go on"
