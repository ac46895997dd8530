from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.errors import DeadlineExceeded, ModelNotFound, ShapeMismatch, VersionNotFound
from headrace.models.batcher import BatchSettings
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import resolve
from headrace.services.door import Call
from headrace.services.short import ShortRoad
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.tensor import InferAnswer, InferRequest, Tensor


class Served:
    """A short road with real models."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self.door = ShortRoad(Predictor(host))

    async def load(self, *specs: str) -> None:
        await self.host.load(resolve(specs, Path()).artifacts)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    clock = SystemClock()
    host = ModelHost(
        settings=ModelSettings(runner="thread"),
        batch=BatchSettings(),
        clock=clock,
        metrics=Metrics(clock, instance="t"),
        logs=Logs(clock, level="error"),
    )
    yield Served(host)
    await host.close(timeout_s=1)


SLOW = "slow=python:headrace.testing.models:slow"
ECHO = "echo=python:headrace.testing.models:echo"


def request(model: str, value: float = 0.0, columns: int = 3, version: str | None = None) -> InferRequest:
    import numpy as np

    x = np.full((1, columns), value, dtype=np.float32)
    return InferRequest(model=model, version=version, id="theirs", inputs={"x": Tensor.of(x)})


async def test_a_request_is_answered_at_once_with_its_version_and_queue_time(served: Served) -> None:
    await served.load(ECHO)
    call = Call("r")
    answer = await served.door.answer(request("echo", 2.0), call)
    assert isinstance(answer, InferAnswer)
    assert (answer.id, answer.version, answer.outputs["y"].array.tolist()) == ("theirs", "1", [[2.0, 2.0, 2.0]])
    assert (call.model_version, call.accepted_id) == ("1", None)
    assert call.queue_time_ms is not None
    assert served.door.requests is None


async def test_what_does_not_fit_is_refused(served: Served) -> None:
    await served.load(ECHO)
    with pytest.raises(ShapeMismatch):
        await served.door.answer(request("echo", columns=4), Call("r"))
    with pytest.raises(ModelNotFound):
        await served.door.answer(request("nobody"), Call("r"))
    with pytest.raises(VersionNotFound):
        await served.door.answer(request("echo", version="9"), Call("r"))


async def test_a_deadline_ends_the_wait(served: Served) -> None:
    await served.load(SLOW)
    with pytest.raises(DeadlineExceeded):
        await served.door.answer(request("slow", 0.5), Call("r", deadline_s=0.01))


async def test_A14_a_caller_that_has_gone_is_not_run(served: Served) -> None:
    await served.load(SLOW)
    running = asyncio.create_task(served.door.answer(request("slow", 0.2), Call("r")))
    while not served.door._predictor.progress().running_since_s:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(served.door.answer(request("slow", 60.0), Call("r")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert served.door._predictor.progress().waiting_rows == 0
    await running
    assert threading.active_count() < 50


async def test_models_are_listed_with_their_state_and_the_list_is_one_object_until_it_changes(served: Served) -> None:
    assert served.door.ready() == ["no model is loaded"]
    await served.load(ECHO, "broken=python:headrace.testing.models:nothing")
    first = served.door.models()
    found = [(state.name, state.version, state.ready) for state in first]
    assert found == [("broken", "1", False), ("echo", "1", True)]
    assert served.door.models() is first
    assert served.door.model("echo").signature is not None
    broken = served.door.model("broken")
    assert not broken.ready
    assert broken.reason
    assert broken.reason in "".join(served.door.ready())
    with pytest.raises(ModelNotFound):
        served.door.model("nobody")
    with pytest.raises(VersionNotFound):
        served.door.model("echo", "9")
    await served.load(SLOW)
    assert served.door.models() is not first
