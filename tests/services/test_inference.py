from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelNotFound, ModelUnavailable, Overloaded
from headrace.services.inference import Inference
from headrace.services.rendering import answer_of
from headrace.tensor import Datatype, InferRequest, Signature, TensorSpec
from services.kit import ENGINES, FunctionRuntime, OneModel, Road, road, until
from services.messages import message

engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Road]:
    async with road("memory", tmp_path) as made:
        yield made


async def codes(here: Road, ids: list[str]) -> list[str]:
    found = await here.store.get(ids)
    return ["" if (error := found[id].error) is None else error.code for id in ids]


@engines
async def test_every_message_gets_its_own_answer(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        ids = await asyncio.gather(*(here.submit(float(n)) for n in range(300)))
        here.inference(FunctionRuntime())
        await here.drained()
        results = await here.store.get(ids)
        assert [answer_of(results[id]).outputs["y"].array.item() for id in ids] == [2.0 * n for n in range(300)]
        assert {(result.attempts, result.model_version) for result in results.values()} == {(1, "1")}


@engines
async def test_A12_one_bad_message_fails_and_those_in_its_batch_do_not(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        together: list[int] = []

        def neg(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            together.append(len(x))
            if (x < 0).any():
                raise ValueError("negative")
            return x

        here.inference(FunctionRuntime(neg), thread=True)
        ids = await asyncio.gather(*(here.submit(-1.0 if n % 50 == 17 else float(n)) for n in range(400)))
        await here.drained()
        assert max(together) > 1, "nothing was run together, so nothing was proved"
        assert [n for n, code in enumerate(await codes(here, ids)) if code] == [n for n in range(400) if n % 50 == 17]


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": b"\x80\x81\xff", "header_length": 3},
        {"payload": b"[" * 250_000 + b"]" * 250_000, "header_length": 500_000},
        {"payload": b"", "header_length": 0},
        {"payload": b'{"inputs":[]}', "header_length": 9_999},
    ],
    ids=["not text", "deep", "empty", "cut off"],
)
async def test_A31_a_payload_that_does_not_parse_fails_alone(here: Road, changes: dict[str, Any]) -> None:
    torn = message(now_ms=here.clock.now_ms(), **changes)
    await here.broker.publish("neg", [torn])
    good = await here.submit(1.0)
    here.inference(FunctionRuntime())
    await here.drained()
    bad_code, good_code = await codes(here, [torn.id, good])
    assert good_code == ""
    assert bad_code in {"invalid_json", "invalid_request", "missing_input"}


async def test_a_version_with_another_signature_checks_again_and_does_not_guess(here: Road) -> None:
    """The message was right when it was accepted; the version that is loaded now takes something else."""
    id = await here.submit(1.0)
    runtime = FunctionRuntime()
    runtime.signature = Signature(
        (TensorSpec("x", Datatype.FP32, (-1, 7)),), (TensorSpec("y", Datatype.FP32, (-1, 7)),)
    )
    here.inference(runtime)
    await here.drained()
    assert await codes(here, [id]) == ["shape_mismatch"]
    assert runtime.calls == []


class Refusing(OneModel):
    """A predictor that refuses as often as it is told to."""

    def __init__(self, here: Road, error: Exception, times: int) -> None:
        super().__init__(FunctionRuntime(), here.clock, here.metrics, here.logs)
        self.error, self.times, self.refused = error, times, 0

    def submit(self, request: InferRequest, trace: Any = None) -> Any:
        if self.refused < self.times:
            self.refused += 1
            raise self.error
        return super().submit(request, trace)


def handler(here: Road, predictor: Any) -> Inference:
    return Inference(predictor, clock=here.clock, logs=here.logs, tracer=here.tracer)


@pytest.mark.parametrize("error", [ModelUnavailable(), Overloaded()])
async def test_a_model_that_cannot_take_it_now_gets_it_again_uncounted(here: Road, error: Exception) -> None:
    predictor = Refusing(here, error, 1)
    here.consumer(handler(here, predictor))
    id = await here.submit(1.0)
    result = await here.result(id)
    assert (predictor.refused, result.succeeded, result.attempts) == (1, True, 1)


async def test_A31_a_message_for_a_deleted_model_fails_and_is_kept(here: Road) -> None:
    id = await here.submit(1.0)
    here.consumer(handler(here, Refusing(here, ModelNotFound(), 99)))
    await here.drained()
    assert await codes(here, [id]) == ["model_not_found"]
    letter = await here.store.dead_letter(id)
    assert letter is not None
    assert letter.message is not None


async def test_a_fault_of_ours_is_internal_and_opaque(here: Road) -> None:
    id = await here.submit(1.0)
    here.consumer(handler(here, Refusing(here, ZeroDivisionError("secret"), 99)))
    result = await here.result(id)
    assert result.error is not None
    assert (result.error.code, "secret" in result.error.message) == ("internal", False)


async def test_what_is_dropped_before_it_starts_is_never_run(here: Road) -> None:
    """An orderly stop with no time at all: what waits in the batcher leaves it and goes back to the topic."""
    runtime = FunctionRuntime()
    consumer = here.inference(runtime)
    seen: list[int] = []
    here.consumer  # noqa: B018
    await here.submit(1.0)
    await until(lambda: consumer.held or runtime.calls, "a claim")
    await here.stop(consumer, grace_s=0)
    await here.drained() if runtime.calls else None
    depth = await here.broker.depth("neg")
    assert depth.claimed == 0
    assert depth.waiting + len(runtime.calls) >= 1
    assert seen == []
