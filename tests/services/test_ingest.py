from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.brokers.base import Receipt
from headrace.errors import (
    BrokerUnavailable,
    DtypeMismatch,
    HeadraceError,
    IdempotencyConflict,
    InvalidRequest,
    MissingInput,
    ModelFailed,
    ModelNotFound,
    ModelUnavailable,
    Overloaded,
    ShapeMismatch,
    StorageFull,
    StoreUnavailable,
    UnknownOutput,
    VersionNotFound,
)
from headrace.message import Message, check_id
from headrace.models.cards import Card, CardBook
from headrace.services.catalog import Catalog
from headrace.services.door import Accepted, Call
from headrace.services.ingest import Ingest, IngestSettings
from headrace.services.results import Results
from headrace.tensor import InferAnswer, InferRequest, RequestedOutput, Tensor
from services.faults import Around, Switch
from services.kit import ENGINES, FunctionRuntime, Road, road, until
from services.messages import request

engines = pytest.mark.parametrize("engine", ENGINES)


def door(here: Road, **changes: Any) -> Ingest:
    """Return another ingest on the same road, with something changed."""
    given: dict[str, Any] = {"broker": here.broker, "store": here.store, "settings": IngestSettings()}
    given |= changes
    results = Results(
        given["broker"], given["store"], here.secret, here.result_settings, clock=here.clock, logs=here.logs
    )
    return Ingest(
        given["broker"],
        given["store"],
        here.catalog,
        results,
        here.secret,
        given["settings"],
        check_destination=lambda destination: None,
        clock=here.clock,
        metrics=here.metrics,
        logs=here.logs,
        tracer=here.tracer,
    )


def later(**changes: Any) -> Call:
    return Call("r", **({"wait_s": 0} | changes))


async def length(here: Road) -> int:
    depth = await here.broker.depth("neg")
    return depth.waiting + depth.claimed


async def the_message(here: Road) -> Message:
    """Claim what is on the topic, and return the one message."""
    got = await here.broker.claim(["neg"], count_max=10, bytes_max=1 << 20, claim_ms=60_000, alone=False)
    (claim,) = got.claims
    return claim.message


# -- accepting ------------------------------------------------------------------------------------------------


@engines
async def test_a_message_is_on_the_topic_with_everything_before_it_is_accepted(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        call = later(destinations=("https://a/",), deadline_s=5.0)
        accepted = await here.door.answer(request(1.0, 2.0, id="theirs"), call)
        assert accepted == Accepted(call.accepted_id or "", "neg")
        found = await the_message(here)
        assert check_id(found.id, here.secret) == "ours"
        assert (found.id, found.model, found.version) == (accepted.id, "neg", None)
        assert found.signature == here.catalog.model("neg").signature.digest  # type: ignore[union-attr]
        assert (found.destinations, found.request_id, found.client_id) == (("https://a/",), "r", "theirs")
        assert found.expires_at_ms == found.accepted_at_ms + 5000
        assert found.fingerprint is None


Bad = Callable[[], InferRequest]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: request(1.0, model="nobody"), ModelNotFound),
        (lambda: request(1.0, model="../secret"), ModelNotFound),
        (lambda: request(1.0, version="9"), VersionNotFound),
        (lambda: InferRequest(model="neg", inputs={}), MissingInput),
        (lambda: InferRequest(model="neg", inputs={"x": Tensor.of(np.zeros((1, 2), np.float32))}), ShapeMismatch),
        (lambda: InferRequest(model="neg", inputs={"x": Tensor.of(np.zeros((1, 1), np.float64))}), DtypeMismatch),
        (lambda: request(1.0, outputs=(RequestedOutput("typo"),)), UnknownOutput),
    ],
)
async def test_A23_what_does_not_fit_is_refused_before_anything_is_published(
    make: Bad, error: type[HeadraceError], tmp_path: Path
) -> None:
    async with road("memory", tmp_path) as here:
        call = later()
        with pytest.raises(error):
            await here.door.answer(make(), call)
        assert call.accepted_id is None
        assert await length(here) == 0
        assert here.metrics.counter("headrace_rejected_total")(error.code).value == 1


async def test_a_destination_that_can_never_be_sent_to_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        here.refused["http://10.0.0.1/"] = InvalidRequest("a private address")
        with pytest.raises(InvalidRequest):
            await here.door.answer(request(1.0), later(destinations=("https://a/", "http://10.0.0.1/")))
        assert await length(here) == 0


async def test_requests_of_one_moment_are_published_together(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        sizes: list[int] = []

        async def publish(topic: str, messages: Sequence[Message]) -> Any:
            sizes.append(len(messages))
            return await here.broker.publish(topic, messages)

        here_door = door(here, broker=Around(here.broker, publish=publish))
        await asyncio.gather(*(here_door.answer(request(float(n)), later()) for n in range(40)))
        assert sizes == [40]


# -- waiting --------------------------------------------------------------------------------------------------


@engines
async def test_without_a_preference_the_caller_gets_the_answer(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        here.inference(FunctionRuntime())
        call = Call("r")
        answer = await here.door.answer(request(4.0, id="theirs"), call)
        assert isinstance(answer, InferAnswer)
        assert (answer.model, answer.version, answer.id) == ("neg", "1", "theirs")
        assert answer.outputs["y"].array.tolist() == [[8.0]]
        assert call.accepted_id is not None
        assert call.model_version == "1"
        assert call.queue_time_ms is not None


async def test_five_hundred_callers_that_wait_get_their_own_answers(tmp_path: Path) -> None:
    async with road("sqlite", tmp_path) as here:
        here.inference(FunctionRuntime())
        answers = await asyncio.gather(*(here.door.answer(request(float(n)), Call("r")) for n in range(500)))
        values = [answer.outputs["y"].array.item() for answer in answers if isinstance(answer, InferAnswer)]
        assert values == [2.0 * n for n in range(500)]


@pytest.mark.parametrize(("wait_s", "passed"), [(None, True), (0.01, False)])
async def test_a_wait_that_is_over_leaves_an_accepted_message(
    wait_s: float | None, passed: bool, tmp_path: Path
) -> None:
    async with road("memory", tmp_path, ingest={"wait_s": 0.01}) as here:
        call = Call("r", wait_s=wait_s)
        answer = await here.door.answer(request(1.0), call)
        assert answer == Accepted(call.accepted_id or "", "neg", deadline_passed=passed)
        assert await length(here) == 1


async def test_a_failure_of_the_model_is_raised_with_the_id_of_its_result(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:

        def fail(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            raise ModelFailed("no", details={"why": "x"})

        here.inference(FunctionRuntime(fail))
        call = Call("r")
        with pytest.raises(ModelFailed) as raised:
            await here.door.answer(request(1.0), call)
        assert (raised.value.message, raised.value.details) == ("no", {"why": "x"})
        assert call.accepted_id is not None
        assert (await here.results.look(call.accepted_id, 0)).status == "failed"


async def test_a_caller_that_goes_away_leaves_its_message_and_nothing_else(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        calling = asyncio.create_task(here.door.answer(request(1.0), Call("r")))

        async def accepted() -> bool:
            return await length(here) == 1

        await until(accepted, "acceptance")
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert here.results.feed.waiters == 0
        assert await length(here) == 1


async def test_a_caller_that_wants_to_wait_is_told_at_once_that_the_store_is_away(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        store = Switch(here.store, StoreUnavailable, "latest", "after", "get")
        store.off = True
        here_door, call = door(here, store=store), Call("r")
        with pytest.raises(StoreUnavailable):
            await here_door.answer(request(1.0), call)
        assert (call.accepted_id, await length(here)) == (None, 0)
        assert isinstance(await here_door.answer(request(1.0), later()), Accepted), "nobody waits, so it is not needed"


# -- refusing ---------------------------------------------------------------------------------------------------


@engines
async def test_a_full_line_is_refused_with_a_computed_time(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path, manual=True, broker={"length_max": 5}) as here:
        await here.door.watch.look()
        for n in range(5):
            await here.submit(float(n))
        # Nothing leaves for a while, then one message a second does.
        for _ in range(10):
            got = await here.broker.claim(["neg"], count_max=1, bytes_max=1 << 20, claim_ms=1000, alone=False)
            await here.broker.ack(got.claims)
            await here.submit(1.0)
            await here.advance(1)
            await here.door.watch.look()
        told = []
        for _ in range(4):
            with pytest.raises(Overloaded) as raised:
                await here.submit(9.0)
            told.append(raised.value.retry_after_s)
        assert told == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=0.5)
        assert await length(here) == 5


@pytest.mark.parametrize("error", [BrokerUnavailable, StorageFull])
async def test_A40_what_is_not_durable_is_never_accepted(error: type[HeadraceError], tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:

        async def publish(topic: str, messages: Sequence[Message]) -> list[HeadraceError]:
            return [error("no") for _ in messages]

        call = later(key="k")
        with pytest.raises(error):
            await door(here, broker=Around(here.broker, publish=publish)).answer(request(1.0), call)
        assert call.accepted_id is None
        # And it is not pinned: the same key is accepted once the broker is well.
        assert await here.submit(1.0, key="k")


@engines
async def test_an_outcome_that_is_unknown_is_found_out_under_the_same_id(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        tries: list[str] = []

        async def publish(topic: str, messages: Sequence[Message]) -> list[Receipt | HeadraceError]:
            outcomes = await here.broker.publish(topic, messages)
            tries.extend(found.id for found in messages)
            if len(tries) == 1:
                return [BrokerUnavailable(details={"outcome": "unknown"})]
            return outcomes

        accepted = await door(here, broker=Around(here.broker, publish=publish)).answer(request(1.0), later())
        assert isinstance(accepted, Accepted)
        assert tries == [accepted.id, accepted.id]
        assert await length(here) == 1


# -- keys -------------------------------------------------------------------------------------------------------


@engines
async def test_A38_fifty_at_once_with_one_key_are_one_message(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        doors = [door(here), door(here)]
        calls = [doors[n % 2].answer(request(1.0), later(key="k")) for n in range(50)]
        ids = {accepted.id for accepted in await asyncio.gather(*calls) if isinstance(accepted, Accepted)}
        assert len(ids) == 1
        assert await length(here) == 1
        assert here.metrics.counter("headrace_accepted_total")("neg").value == 1
        assert here.metrics.counter("headrace_repeated_keys_total")("neg").value == 49


@engines
async def test_A38_the_same_request_has_the_same_id_before_and_after_its_result(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        first = await here.submit(1.0, key="k")
        here.inference(FunctionRuntime())
        await here.drained()
        assert await here.submit(1.0, key="k") == first
        answer = await here.door.answer(request(1.0, id="second"), Call("r", key="k"))
        assert isinstance(answer, InferAnswer)
        assert (answer.id, answer.outputs["y"].array.item()) == ("second", 2.0)
        assert (await here.store.counts()).succeeded == 1


@engines
@pytest.mark.parametrize(
    ("other", "call"),
    [
        (lambda: request(2.0), {}),
        (lambda: request(1.0, parameters={"p": 1}), {}),
        (lambda: request(1.0), {"destinations": ("https://a/",)}),
    ],
    ids=["tensors", "parameters", "destinations"],
)
@pytest.mark.parametrize("answered", [False, True])
async def test_A38_another_request_under_the_key_is_refused(
    engine: str, other: Bad, call: dict[str, Any], answered: bool, tmp_path: Path
) -> None:
    async with road(engine, tmp_path) as here:
        first = await here.submit(1.0, key="k")
        if answered:
            here.inference(FunctionRuntime())
            await here.drained()
        second = later(key="k", **call)
        with pytest.raises(IdempotencyConflict):
            await here.door.answer(other(), second)
        assert second.accepted_id is None
        assert await here.submit(1.0, key="k") == first


async def test_A38_form_and_trace_of_a_request_do_not_matter_to_its_key(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        first = await here.submit(1.0, key="k")
        again = await here.door.answer(
            request(1.0, id="other", binary_default=True),
            later(key="k", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
        )
        assert isinstance(again, Accepted)
        assert again.id == first


@pytest.mark.parametrize("make", [lambda: InferRequest(model="neg", inputs={}), lambda: request(1.0, model="nobody")])
async def test_A38_a_refusal_is_not_pinned_to_the_key(make: Bad, tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        with pytest.raises(HeadraceError):
            await here.door.answer(make(), later(key="k"))
        assert await here.submit(1.0, key="k")


async def test_A38_a_key_that_outlived_its_result_is_a_new_message(tmp_path: Path) -> None:
    """A crash between the purge of a result and the forgetting of its key must not promise a result that is gone."""
    async with road("memory", tmp_path, manual=True, ttl_s=100.0) as here:
        first = await here.submit(1.0, key="k")
        here.inference(FunctionRuntime())
        await here.drained()
        await here.advance(101)
        await here.store.purge(accepted_before_ms=here.clock.now_ms() - 100_000)
        assert await here.submit(5.0, key="k") == first
        await here.drained()
        assert (await here.results.look(first, 0)).status == "succeeded"


async def test_A38_a_repeated_key_is_not_promised_anything_while_the_store_cannot_be_asked(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        await here.submit(1.0, key="k")
        store = Switch(here.store, StoreUnavailable, "get")
        store.off = True
        call = later(key="k")
        with pytest.raises(StoreUnavailable):
            await door(here, store=store).answer(request(1.0), call)
        assert call.accepted_id is None


# -- traces -----------------------------------------------------------------------------------------------------

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@engines
async def test_A29_one_trace_crosses_the_topic_and_comes_out_with_the_result(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        call = later(traceparent=PARENT, destinations=("https://a/",))
        await here.door.answer(request(1.0), call)
        here.inference(FunctionRuntime())
        await here.drained()
        (published,) = here.spans.named("message_published")
        (claimed,) = here.spans.named("message_claimed")
        assert published.trace_id == claimed.trace_id == PARENT.split("-")[1]
        assert published.parent_id == PARENT.split("-")[2]
        assert claimed.parent_id == published.span_id
        (dispatch,) = await here.store.claim_due(now_ms=here.clock.now_ms() + 1000, claim_ms=1000, count_max=1)
        assert dispatch.traceparent is not None
        assert dispatch.traceparent.split("-")[1] == PARENT.split("-")[1]


@pytest.mark.parametrize("broken", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", None])
async def test_A29_a_broken_trace_is_as_if_it_were_not_there(broken: str | None, tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        await here.door.answer(request(1.0), later(traceparent=broken))
        (published,) = here.spans.named("message_published")
        assert published.parent_id is None


# -- readiness ----------------------------------------------------------------------------------------------------


async def test_A24_ready_comes_with_the_first_good_card_and_goes_with_the_broker_and_the_store(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        broker = Switch(here.broker, BrokerUnavailable, "health")
        store = Switch(here.store, StoreUnavailable, "health")
        here_door = door(here, broker=broker, store=store)
        assert here_door.ready() == ["the service is starting"]
        await here_door.watch.look()
        assert here_door.ready() == []
        for switch, name in ((broker, "the broker"), (store, "the store")):
            switch.off = True
            await here_door.watch.look()
            assert [reason.split(":")[0] for reason in here_door.ready()] == [name]
            switch.off = False
            await here_door.watch.look()
            assert here_door.ready() == []


async def test_A24_a_model_that_did_not_load_is_known_not_ready_and_not_accepted_for(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        CardBook(here.folder).write(Card(name="bad", version="1", runtime="python"))
        await here.door.watch.look()
        assert here.door.ready() == ["model 'bad' version 1: it did not load"]
        assert not here.door.model("bad").ready
        with pytest.raises(ModelUnavailable):
            await here.door.answer(request(1.0, model="bad"), later())
        assert isinstance(await here.door.answer(request(1.0), later()), Accepted), "the others are served"


async def test_A24_no_card_at_all_is_not_ready(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        empty = tmp_path / "empty"
        here.catalog = Catalog(CardBook(empty))
        here_door = door(here)
        await here_door.watch.look()
        assert here_door.ready() == ["no model is loaded"]


async def test_the_list_of_models_is_one_object_until_it_changes(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        await here.door.watch.look()
        before = here.door.models()
        await here.door.watch.look()
        assert here.door.models() is before
        CardBook(here.folder).write(Card(name="new", version="1", runtime="python"))
        await here.door.watch.look()
        assert [state.name for state in here.door.models()] == ["neg", "new"]


@engines
async def test_the_watch_measures_the_line(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        await asyncio.gather(*(here.submit(float(n)) for n in range(7)))
        await here.broker.claim(["neg"], count_max=2, bytes_max=1 << 20, claim_ms=60_000, alone=False)
        await here.door.watch.look()
        shown = [here.metrics.gauge(f"headrace_topic_{name}")("neg").value for name in ("waiting", "claimed")]
        assert shown == [5, 2]
