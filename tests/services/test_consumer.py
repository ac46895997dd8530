from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.brokers.base import Claim
from headrace.errors import BrokerUnavailable, StorageFull, StoreUnavailable, TooLarge
from headrace.services.rendering import answer_of
from headrace.stores.base import Finished
from headrace.testing.history import Ending, History, check
from services.faults import Around, Switch, watched
from services.kit import ENGINES, FunctionRuntime, Hands, Road, road, until
from services.messages import message

engines = pytest.mark.parametrize("engine", ENGINES)


async def ending(here: Road, ids: Sequence[str]) -> Ending:
    """Return what store and broker say is there now."""
    found = await here.store.get(ids)
    depth, counts = await here.broker.depth("neg"), await here.store.counts()
    return Ending(
        {id: [result.payload or (result.error.code.encode() if result.error else b"")] for id, result in found.items()},
        failed=[id for id, result in found.items() if not result.succeeded],
        waiting=depth.waiting,
        claimed=depth.claimed,
        accepted=counts.succeeded + counts.failed + depth.waiting + depth.claimed,
    )


# -- a result first, then the acknowledgement --------------------------------------------------------------


@engines
async def test_A33_a_message_is_acknowledged_after_its_result_is_durable(engine: str, tmp_path: Path) -> None:
    history = History()
    async with road(engine, tmp_path) as here:
        ids = [await here.submit(float(n)) for n in range(50)]
        history.accepted.update(ids)
        broker, store = watched(here.broker, here.store, history)
        here.inference(FunctionRuntime(), broker=broker, store=store)
        await here.drained()
        assert check(history, await ending(here, ids)) == []


@engines
@pytest.mark.parametrize("error", [StoreUnavailable, StorageFull])
async def test_A33_while_the_store_is_away_nothing_is_acknowledged_and_nothing_is_lost(
    engine: str, error: type[Exception], tmp_path: Path
) -> None:
    async with road(engine, tmp_path) as here:
        runtime = FunctionRuntime()
        store = Switch(here.store, error, "commit", "health")
        store.off = True
        ids = [await here.submit(float(n)) for n in range(20)]
        consumer = here.inference(runtime, store=store)
        await until(lambda: store.refused >= 3, "three refused commits")
        depth = await here.broker.depth("neg")
        assert depth.waiting + depth.claimed == 20
        assert consumer.ready() != []
        computed = len(runtime.calls)
        store.off = False
        await here.drained()
        assert len(await here.store.present(ids)) == 20
        assert consumer.ready() == []
        assert sum(len(call) for call in runtime.calls) == 20, "what was computed was kept, not computed again"
        assert computed >= 1


async def test_claims_live_on_while_their_results_wait_for_the_store(tmp_path: Path) -> None:
    async with road("memory", tmp_path, inference={"claim_s": 0.2, "run_s_max": 0.2}) as here:
        store = Switch(here.store, StoreUnavailable, "commit", "health")
        store.off = True
        id = await here.submit(1.0)
        here.inference(FunctionRuntime(), store=store)
        await until(lambda: store.refused >= 6, "an outage much longer than a claim")
        taken = await here.broker.claim(["neg"], count_max=1, bytes_max=1000, claim_ms=1000, alone=True)
        assert list(taken.claims) == []
        store.off = False
        assert (await here.result(id)).attempts == 1


@engines
async def test_a_store_that_is_away_before_the_run_costs_no_attempt(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        store = Switch(here.store, StoreUnavailable, "present", "health")
        store.off = True
        id = await here.submit(1.0)
        here.inference(FunctionRuntime(), store=store)
        await until(lambda: store.refused >= 3, "refused look-ups")
        store.off = False
        assert (await here.result(id)).attempts == 1


async def test_acknowledgements_that_fail_are_repeated(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        broker = Switch(here.broker, BrokerUnavailable, "ack")
        broker.off = True
        id = await here.submit(1.0)
        runtime = FunctionRuntime()
        here.inference(runtime, broker=broker)
        await here.result(id)
        await until(lambda: broker.refused >= 2, "refused acknowledgements")
        broker.off = False
        await here.drained()
        assert len(runtime.calls) == 1


@engines
async def test_A32_consuming_goes_on_when_the_broker_is_back(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        broker = Switch(here.broker, BrokerUnavailable, "claim", "wait", "ack")
        broker.off = True
        consumer = here.inference(FunctionRuntime(), broker=broker)
        await until(lambda: broker.refused >= 3, "an outage")
        assert consumer.ready() != []
        id = await here.submit(1.0)
        broker.off = False
        await here.result(id)
        await until(lambda: consumer.ready() == [], "readiness")


# -- one result of many runs ----------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("point", ["claimed", "computed", "committed"])
async def test_a_death_at_each_step_gives_exactly_one_result(engine: str, point: str, tmp_path: Path) -> None:
    """Killed with the call in flight; the next life finds whatever it left."""
    async with road(engine, tmp_path, manual=True) as here:
        ids = [await here.submit(float(n)) for n in range(10)]
        reached = asyncio.Event()
        runtime = FunctionRuntime()
        durable: list[float] = []

        async def die(*args: Any) -> Any:
            if point == "committed":
                await here.store.commit(*args)
                durable.extend(answer_of(entry.result).outputs["y"].array.item() / 2 for entry in args[0])
            reached.set()
            await asyncio.Event().wait()

        name = {"claimed": "present", "computed": "commit", "committed": "commit"}[point]
        first = here.inference(runtime, store=Around(here.store, **{name: die}))
        await reached.wait()
        await here.kill(first)
        await here.advance(here.settings.claim_s + 1)
        here.inference(runtime)
        await here.drained()
        results = await here.store.get(ids)
        assert [answer_of(results[id]).outputs["y"].array.item() for id in ids] == [2.0 * n for n in range(10)]
        assert (await here.store.counts()).succeeded == 10
        ran = [value for call in runtime.calls for value in call]
        assert (point == "committed") == bool(durable)
        assert all(ran.count(value) == 1 for value in durable), "what has a result is not run again"


@engines
async def test_a_zombie_that_finishes_after_its_heir_changes_nothing(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path, manual=True) as here:
        zombie, heir = Hands(here.clock), Hands(here.clock)
        id = await here.submit(1.0)
        here.consumer(zombie)
        await until(lambda: zombie.claims, "the first claim")
        await here.advance(here.settings.claim_s + 1)
        here.consumer(heir)
        await until(lambda: heir.claims, "the claim of the heir")
        heir.answer(heir.claims[0], 7.0)
        before = await here.result(id)
        await here.drained()
        zombie.answer(zombie.claims[0], 8.0)
        await until(lambda: here.metrics.counter("headrace_results_second_total")("neg").value == 1, "a second result")
        assert (await here.store.get([id]))[id] == before
        assert answer_of(before).outputs["y"].array.item() == 7.0
        assert (await here.store.counts()).succeeded == 1


async def test_two_processes_on_one_topic_make_one_result_each(tmp_path: Path) -> None:
    async with road("sqlite", tmp_path) as here:
        runtimes = [FunctionRuntime(), FunctionRuntime()]
        for runtime in runtimes:
            here.inference(runtime)
        ids = await asyncio.gather(*(here.submit(float(n)) for n in range(400)))
        await here.drained()
        assert len(await here.store.present(ids)) == 400
        assert sum(len(call) for runtime in runtimes for call in runtime.calls) == 400


@engines
async def test_a_cancelled_message_is_not_run(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        id = await here.submit(1.0)
        await here.results.cancel(id)
        runtime = FunctionRuntime()
        here.inference(runtime)
        await here.drained()
        assert runtime.calls == []
        result = (await here.store.get([id]))[id]
        assert result.error is not None
        assert result.error.code == "cancelled"


# -- company is not guilt -----------------------------------------------------------------------------------


class Deadly(Hands):
    """Answers everything at once, but for the killer: there the process dies."""

    def __init__(self, road: Road, killer: str) -> None:
        super().__init__(road.clock)
        self.killer = killer
        self.died = asyncio.Event()
        self.starts: list[tuple[str, bool]] = []

    def handle(self, claims: Sequence[Claim], done: Any) -> None:
        super().handle(claims, done)
        self.starts += [(claim.message.id, claim.claims_alone > 0) for claim in claims]
        if any(claim.message.id == self.killer for claim in claims):
            self.died.set()
            return
        for claim in claims:
            self.answer(claim)


async def lives(here: Road, killer: str, count_max: int) -> list[Deadly]:
    """Let processes live and die on a topic until it is empty."""
    found = []
    for _ in range(count_max):
        hands = Deadly(here, killer)
        found.append(hands)
        consumer = here.consumer(hands)
        drained = asyncio.create_task(here.drained())
        died = asyncio.create_task(hands.died.wait())
        # A process that has lived for a while lets suspects have their turn though there is fresh work.
        await here.advance(1)
        await asyncio.wait({drained, died}, return_when=asyncio.FIRST_COMPLETED)
        empty = drained.done()
        await here.kill(consumer)
        drained.cancel()
        died.cancel()
        if empty:
            return found
        await here.advance(here.settings.claim_s + 1)
    raise AssertionError("the topic never became empty")


@engines
async def test_A31_a_killer_message_is_given_up_after_three_deaths_alone_and_its_neighbours_live(
    engine: str, tmp_path: Path
) -> None:
    async with road(engine, tmp_path, manual=True) as here:
        ids = [await here.submit(float(n)) for n in range(21)]
        killer = ids[4]
        found = await lives(here, killer, 12)
        starts = [start for hands in found for start in hands.starts]
        assert starts.count((killer, True)) == here.settings.attempts_max
        assert starts.count((killer, False)) == 1
        results = await here.store.get(ids)
        assert len(results) == 21
        assert [id for id in ids if not results[id].succeeded] == [killer]
        error = results[killer].error
        assert error is not None
        assert (error.code, error.details["attempts_alone"]) == ("model_failed", 3)
        letter = await here.store.dead_letter(killer)
        assert letter is not None
        assert letter.message is not None
        assert letter.message.id == killer
        for id in ids:
            if id != killer:
                assert starts.count((id, True)) <= 1, "one death in company costs an innocent one more run"


@engines
async def test_suspects_run_when_nothing_else_does(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path, manual=True) as here:
        for n in range(8):
            await here.submit(float(n))
        first = Hands(here.clock)
        consumer = here.consumer(first)
        await until(lambda: first.claims, "claims")
        lost = {claim.message.id for claim in first.claims}
        await here.kill(consumer)
        await here.advance(here.settings.claim_s + 1)
        heir = Hands(here.clock)
        here.consumer(heir)
        together: list[set[str]] = []
        while not lost <= set().union(*together):
            if heir.claims:
                together.append({claim.message.id for claim in heir.claims})
                for claim in list(heir.claims):
                    heir.answer(claim)
            await here.advance(0.1)
        for ids in together:
            assert not ids & lost or len(ids) == 1


async def test_a_suspect_waits_until_the_process_is_empty_and_nothing_is_begun_meanwhile(tmp_path: Path) -> None:
    async with road("memory", tmp_path, manual=True) as here:
        lost = await here.submit(1.0)
        first = Hands(here.clock)
        consumer = here.consumer(first)
        await until(lambda: first.claims, "the first claim")
        await here.kill(consumer)
        heir = Hands(here.clock)
        here.consumer(heir)
        fresh = await here.submit(2.0)
        await until(lambda: heir.claims, "a fresh claim")
        await here.broker.extend(heir.claims, 60_000)
        await here.advance(here.settings.claim_s + 1)
        second = await here.submit(3.0)
        # The process is full until this one ends; then it sees that there is a suspect.
        heir.answer(heir.claims[0])
        await until(lambda: heir.claims, "one more fresh claim")
        third = await here.submit(4.0)
        await here.advance(1)
        assert [claim.message.id for claim in heir.seen] == [fresh, second]
        heir.answer(heir.claims[0])
        await until(lambda: heir.claims, "the suspect")
        assert [(claim.message.id, claim.claims_alone) for claim in heir.claims] == [(lost, 1)]
        heir.answer(heir.claims[0])
        await until(lambda: heir.claims, "what came last")
        assert [claim.message.id for claim in heir.claims] == [third]


# -- messages that are not run ------------------------------------------------------------------------------


@engines
async def test_A31_a_message_that_cannot_be_read_is_given_up_and_the_next_one_runs(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        torn = message(now_ms=here.clock.now_ms())
        good = await here.submit(1.0)

        async def claim(*args: Any, **kwargs: Any) -> Any:
            got = await here.broker.claim(*args, **kwargs)
            claims = [_unreadable(each) if each.message.id == torn.id else each for each in got.claims]
            return type(got)(claims, got.suspects_waiting)

        await here.broker.publish("neg", [torn])
        here.inference(FunctionRuntime(), broker=Around(here.broker, claim=claim))
        await here.drained()
        results = await here.store.get([torn.id, good])
        assert results[good].succeeded
        assert results[torn.id].error is not None
        assert results[torn.id].model == "neg"
        assert await here.store.dead_letter(torn.id) is not None


def _unreadable(claim: Claim) -> Claim:
    from dataclasses import replace

    import msgspec

    return replace(claim, message=msgspec.structs.replace(claim.message, model="", accepted_at_ms=0))


@engines
async def test_a_message_whose_deadline_passed_in_the_line_is_answered_unrun(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path, manual=True) as here:
        id = await here.submit(1.0, deadline_s=5)
        await here.advance(6)
        runtime = FunctionRuntime()
        here.inference(runtime)
        error = (await here.result(id)).error
        assert error is not None
        assert error.code == "deadline_exceeded"
        assert runtime.calls == []
        await here.drained()


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(TooLarge("The result is too large"), "too_large"), (UnicodeError("a fault of the store's own"), "internal")],
)
async def test_A34_a_result_that_the_store_refuses_fails_alone(refusal: Exception, code: str, tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        ids = [await here.submit(float(n)) for n in range(10)]

        async def commit(finished: Sequence[Finished]) -> list[bool]:
            if any(entry.result.id == ids[3] and entry.result.succeeded for entry in finished):
                raise refusal
            first: list[bool] = await here.store.commit(finished)
            return first

        here.inference(FunctionRuntime(), store=Around(here.store, commit=commit))
        await here.drained()
        results = await here.store.get(ids)
        assert [id for id in ids if not results[id].succeeded] == [ids[3]]
        error = results[ids[3]].error
        assert error is not None
        assert error.code == code


async def test_a_handler_that_breaks_fails_its_messages_and_not_the_loop(tmp_path: Path) -> None:
    class Broken(Hands):
        def handle(self, claims: Sequence[Claim], done: Any) -> None:
            raise ZeroDivisionError

    async with road("memory", tmp_path) as here:
        here.consumer(Broken(here.clock))
        for n in range(3):
            error = (await here.result(await here.submit(float(n)))).error
            assert error is not None
            assert error.code == "internal"


async def test_a_model_that_is_not_there_just_now_costs_no_attempt(tmp_path: Path) -> None:
    async with road("memory", tmp_path, manual=True) as here:
        id = await here.submit(1.0)
        hands = Hands(here.clock)
        here.consumer(hands)
        for _ in range(5):
            await until(lambda: hands.claims, "a claim")
            hands.refuse(hands.claims[0])
            await here.advance(1.5)
        await until(lambda: hands.claims, "a claim")
        hands.answer(hands.claims[0])
        assert (await here.result(id)).attempts == 1


# -- the accounts ---------------------------------------------------------------------------------------------


@engines
async def test_accepted_is_results_plus_waiting_plus_claimed(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        history = History()
        ids = [await here.submit(float(n)) for n in range(30)]
        history.accepted.update(ids)
        hands = Hands(here.clock)
        consumer = here.consumer(hands)
        for done in range(1, 6):
            await until(lambda: hands.claims, "a claim")
            hands.answer(hands.claims[0])

            async def settled(done: int = done) -> bool:
                counts, depth = await here.store.counts(), await here.broker.depth("neg")
                return counts.succeeded == done and depth.waiting + depth.claimed == 30 - done

            await until(settled, "accounts that add up again after each settled message")
        await here.stop(consumer, grace_s=0)
        here.inference(FunctionRuntime())
        await here.drained()
        assert check(history, await ending(here, ids)) == []
