from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import (
    BrokerUnavailable,
    Cancelled,
    Expired,
    HeadraceError,
    InvalidRequest,
    RequestNotFound,
    StoreUnavailable,
)
from headrace.message import keyed_id, new_id
from headrace.services.outcomes import refused
from headrace.services.results import Results
from headrace.services.retention import Retention
from services.faults import Around, Switch
from services.kit import ENGINES, FunctionRuntime, Road, road, until
from services.messages import message

engines = pytest.mark.parametrize("engine", ENGINES)
TTL_S = 100.0


def results(here: Road, **changes: Any) -> Results:
    given = {"broker": here.broker, "store": here.store} | changes
    return Results(given["broker"], given["store"], here.secret, here.result_settings, clock=here.clock, logs=here.logs)


async def finish(here: Road, *ids: str) -> None:
    """Give some ids a result, as another process would."""
    await here.store.commit([refused(message(id=id), Cancelled(), here.clock.now_ms()) for id in ids])


# -- the truth about ids ------------------------------------------------------------------------------------


@engines
async def test_an_accepted_id_is_pending_until_it_has_its_result(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        id = await here.submit(3.0)
        assert (await here.results.look(id, 0)).status == "pending"
        here.inference(FunctionRuntime())
        await here.drained()
        view = await here.results.look(id, 0)
        assert (view.status, view.model, view.model_version) == ("succeeded", "neg", "1")
        assert json.loads(view.body)["result"]["outputs"][0]["data"] == [6.0]


@engines
async def test_an_id_that_was_never_accepted_is_not_pending(engine: str, tmp_path: Path) -> None:
    """Made with our secret, so that only broker and store can tell: a publish that was refused leaves such ids."""
    async with road(engine, tmp_path) as here:
        with pytest.raises(RequestNotFound):
            await here.results.look(new_id(here.clock.now_ms(), here.secret), 0)
        # An id with a key is told to nobody before it is accepted: whoever has it, has it from an acceptance.
        with pytest.raises(Expired):
            await here.results.look(keyed_id("k", here.secret), 0)


@pytest.mark.parametrize("id", ["", "x", "0" * 32, "k" * 32, "../../etc/passwd", "0" * 31 + "\u0661"])
async def test_an_id_that_we_never_made_costs_no_look_at_all(id: str, tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        store = Switch(here.store, StoreUnavailable, "get")
        store.off = True
        with pytest.raises(RequestNotFound):
            await results(here, store=store).look(id, 0)


@engines
@pytest.mark.parametrize("key", [None, "k"])
async def test_an_id_whose_retention_is_over_is_expired_and_then_its_key_is_free(
    engine: str, key: str | None, tmp_path: Path
) -> None:
    async with road(engine, tmp_path, manual=True, ttl_s=TTL_S) as here:
        id = await here.submit(1.0, key=key)
        await finish(here, id)
        await _acknowledge(here)
        await here.advance(TTL_S + 1)
        await here.store.purge(accepted_before_ms=here.clock.now_ms() - int(TTL_S * 1000))
        with pytest.raises(Expired):
            await here.results.look(id, 0)
        await _retention(here).purge()
        with pytest.raises(Expired):
            await here.results.look(id, 0)
        assert await here.submit(2.0, key=key or "k") == (id if key else keyed_id("k", here.secret))


async def _acknowledge(here: Road) -> None:
    got = await here.broker.claim(["neg"], count_max=10, bytes_max=1 << 20, claim_ms=1000, alone=False)
    await here.broker.ack(got.claims)


def _retention(here: Road) -> Retention:
    return Retention(
        here.broker, here.store, here.result_settings, clock=here.clock, metrics=here.metrics, logs=here.logs
    )


async def test_an_id_that_is_answered_between_two_looks_is_found(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)

        async def find(ids: Any) -> set[str]:
            await finish(here, id)
            await _acknowledge(here)
            return await here.broker.find(ids)

        view = await results(here, broker=Around(here.broker, find=find)).look(id, 0)
        assert view.status == "failed"


@pytest.mark.parametrize(
    ("which", "error", "names"),
    [("store", StoreUnavailable, ("get",)), ("broker", BrokerUnavailable, ("find",))],
)
async def test_what_cannot_be_asked_is_an_error_and_never_pending_or_unknown(
    which: str, error: type[HeadraceError], names: tuple[str, ...], tmp_path: Path
) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)
        switch = Switch(getattr(here, which), error, *names)
        switch.off = True
        with pytest.raises(error):
            await results(here, **{which: switch}).look(id, 0)


async def test_on_an_engine_without_look_up_the_check_in_the_id_tells_pending_from_unknown(tmp_path: Path) -> None:
    async with road("memory", tmp_path, manual=True, ttl_s=TTL_S) as here:
        id = await here.submit(1.0)

        class Blind(Around):
            features = type(here.broker.features)(look_up=False, unique_publish=False, durable=True, shared=True)

        found = results(here, broker=Blind(here.broker))
        assert (await found.look(id, 0)).status == "pending"
        with pytest.raises(RequestNotFound):
            await found.look(new_id(here.clock.now_ms(), b"another secret".ljust(32)), 0)
        await here.advance(TTL_S + 1)
        with pytest.raises(Expired):
            await found.look(id, 0)


# -- waiting ------------------------------------------------------------------------------------------------


@engines
async def test_a_wait_ends_with_the_result(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        id = await here.submit(1.0)
        waiting = asyncio.create_task(here.results.look(id, 30))
        await until(lambda: here.results.feed.waiters, "a waiter")
        here.inference(FunctionRuntime())
        assert (await waiting).status == "succeeded"
        assert here.results.feed.waiters == 0


async def test_a_wait_that_is_over_says_pending_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        assert (await here.results.look(await here.submit(1.0), 0.01)).status == "pending"
        assert here.results.feed.waiters == 0


async def test_a_result_that_comes_before_the_feed_begins_is_not_missed(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)

        async def latest() -> str:
            await finish(here, id)
            return await here.store.latest()

        store = Around(here.store, latest=latest)
        found = results(here, store=store)
        assert (await found.look(id, 30)).status == "failed"
        await found.close()


async def test_a_result_that_comes_between_looking_and_listening_is_not_missed(tmp_path: Path) -> None:
    """The bell rings while the feed is reading, and never again: only listening before looking hears it."""
    async with road("memory", tmp_path) as here:
        first, second = await here.submit(1.0), await here.submit(2.0)
        rang = asyncio.Event()

        async def after(cursor: str, limit: int) -> Any:
            read = await here.store.after(cursor, limit)
            if not rang.is_set():
                rang.set()
                await finish(here, second)
            return read

        async def wait_results(timeout_s: float) -> None:
            await here.store.wait_results(3600)

        found = results(here, store=Around(here.store, after=after, wait_results=wait_results))
        await found.feed.open()
        coming = found.feed.join(second)
        unrelated = found.feed.join(first)
        async with asyncio.timeout(10):
            assert (await coming).id == second
        found.feed.leave(first, unrelated)
        await found.close()


async def test_many_who_wait_cost_one_reader(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        asked: dict[str, int] = {"after": 0, "get": 0}

        def counted(name: str) -> Any:
            async def call(*args: Any) -> Any:
                asked[name] += 1
                return await getattr(here.store, name)(*args)

            return call

        found = results(here, store=Around(here.store, after=counted("after"), get=counted("get")))
        ids = [await here.submit(float(n)) for n in range(300)]
        waiting = [asyncio.create_task(found.look(id, 30)) for id in ids]
        await until(lambda: found.feed.waiters == 300, "three hundred waiters")
        before = dict(asked)
        for id in ids:
            await finish(here, id)
        views = await asyncio.gather(*waiting)
        assert {view.status for view in views} == {"failed"}
        assert asked["get"] == before["get"], "nobody polls for himself"
        assert asked["after"] - before["after"] <= 300
        await found.close()


async def test_a_feed_that_is_cut_off_makes_no_finished_request_look_pending(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)
        store = Switch(here.store, StoreUnavailable, "after", "get")
        found = results(here, store=store)
        waiting = asyncio.create_task(found.look(id, 0.2))
        await until(lambda: found.feed.waiters, "a waiter")
        store.off = True
        await finish(here, id)
        with pytest.raises(StoreUnavailable):
            await waiting
        store.off = False
        await found.close()


async def test_the_feed_goes_on_after_an_outage(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)
        store = Switch(here.store, StoreUnavailable, "after")
        found = results(here, store=store)
        waiting = asyncio.create_task(found.look(id, 30))
        await until(lambda: found.feed.waiters, "a waiter")
        store.off = True
        await finish(here, id)
        await until(lambda: store.refused >= 2, "an outage")
        store.off = False
        assert (await waiting).status == "failed"
        await found.close()


# -- cancelling ---------------------------------------------------------------------------------------------


@engines
async def test_a_cancel_is_the_result_if_it_comes_first_and_tells_the_destinations(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        id = await here.submit(1.0, destinations=("https://a/",))
        view = await here.results.cancel(id)
        shown = json.loads(view.body)
        assert (view.status, view.model, shown["error"]["code"]) == ("failed", "neg", "cancelled")
        assert [delivery["destination"] for delivery in shown["deliveries"]] == ["https://a/"]
        assert (await here.results.cancel(id)).body == view.body


@engines
async def test_a_cancel_that_comes_second_changes_nothing(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        id = await here.submit(1.0)
        here.inference(FunctionRuntime())
        await here.drained()
        assert (await here.results.cancel(id)).status == "succeeded"


async def test_a_cancel_that_loses_the_race_shows_the_winner(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        id = await here.submit(1.0)
        runtime = FunctionRuntime()

        async def commit(finished: Any) -> list[bool]:
            here.inference(runtime)
            await here.result(id)
            first: list[bool] = await here.store.commit(finished)
            return first

        view = await results(here, store=Around(here.store, commit=commit)).cancel(id)
        assert view.status == "succeeded"


async def test_an_unknown_id_cannot_be_cancelled(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        with pytest.raises(RequestNotFound):
            await here.results.cancel(new_id(here.clock.now_ms(), here.secret))
        assert (await here.store.counts()).failed == 0


# -- pulling ------------------------------------------------------------------------------------------------


@engines
async def test_the_pull_route_gives_every_result_once_in_commit_order(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        ids = [await here.submit(float(n)) for n in range(25)]
        for id in reversed(ids):
            await finish(here, id)
        seen, cursor = [], ""
        while True:
            views, cursor = await here.results.pull(cursor, 10)
            if not views:
                break
            seen += [view.id for view in views]
        assert seen == ids[::-1]


@engines
async def test_a_cursor_that_we_never_gave_is_refused(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        with pytest.raises(InvalidRequest):
            await here.results.pull("nonsense", 10)


# -- retention ----------------------------------------------------------------------------------------------


@engines
async def test_results_leave_when_their_time_is_over_and_not_before(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path, manual=True, ttl_s=TTL_S) as here:
        old = await here.submit(1.0)
        await here.advance(60)
        young = await here.submit(2.0)
        here.inference(FunctionRuntime())
        await here.drained()
        await here.advance(TTL_S - 59)
        assert await _retention(here).purge() == 1
        assert await here.store.present([old, young]) == {young}


async def test_a_result_with_a_delivery_to_come_stays_and_so_does_its_key(tmp_path: Path) -> None:
    async with road("memory", tmp_path, manual=True, ttl_s=TTL_S) as here:
        id = await here.submit(1.0, key="k", destinations=("https://a/",))
        here.inference(FunctionRuntime())
        await here.drained()
        await here.advance(TTL_S + 1)
        assert await _retention(here).purge() == 0
        assert set(await here.broker.fingerprints([id])) == {id}
        (dispatch,) = await here.store.claim_due(now_ms=here.clock.now_ms(), claim_ms=1000, count_max=1)
        await here.store.delivered([(dispatch, 200)])
        assert await _retention(here).purge() == 1
        assert await here.broker.fingerprints([id]) == {}


async def test_the_loop_goes_on_after_an_outage(tmp_path: Path) -> None:
    async with road("memory", tmp_path, manual=True, ttl_s=TTL_S) as here:
        store = Switch(here.store, StoreUnavailable, "purge")
        store.off = True
        loop = Retention(
            here.broker, store, here.result_settings, clock=here.clock, metrics=here.metrics, logs=here.logs
        )
        running = asyncio.create_task(loop.run())
        await here.advance(here.result_settings.purge_interval_s * 2)
        assert store.refused >= 2
        store.off = False
        id = await here.submit(1.0)
        await finish(here, id)
        await here.store.purge(accepted_before_ms=0)
        await here.advance(TTL_S + here.result_settings.purge_interval_s * 2)
        assert await here.store.present([id]) == set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
