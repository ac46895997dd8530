"""What the tests of this room share: fixture runtimes and batchers on a real loop."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.clock import Clock, SystemClock
from headrace.models.batcher import Batcher, BatchSettings
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.meter import BatchMeter
from headrace.models.predictor import Predictor
from headrace.models.runners import InlineRunner, Runner
from headrace.runtimes import Artifact, Runtime
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer
from headrace.telemetry.writer import LineWriter
from headrace.tensor import Datatype, InferRequest, RequestedOutput, Signature, Tensor, TensorSpec

Run = Callable[[Mapping[str, Tensor], Sequence[str]], dict[str, Tensor]]


def spec(name: str, *shape: int, datatype: Datatype = Datatype.FP32) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


ROWS_OF_3 = Signature((spec("x", -1, 3),), (spec("y", -1, 3),))


def echo(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
    return dict.fromkeys(outputs, inputs["x"])


class Scripted(Runtime):
    """A runtime that does what the test says, and keeps what it was given."""

    platform = "python"
    concurrent = True
    steady = True

    def __init__(self, run: Run = echo, signature: Signature = ROWS_OF_3) -> None:
        self.signature = signature
        self.calls: list[dict[str, Any]] = []
        self.closed = 0
        self._run = run

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> Scripted:
        return cls()

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        self.calls.append({name: tensor.array.tolist() for name, tensor in inputs.items()})
        return self._run(inputs, outputs)

    def close(self) -> None:
        self.closed += 1

    @property
    def sizes(self) -> list[int]:
        return [len(call["x"]) for call in self.calls]


class _Kept(LineWriter):
    """Keeps lines in memory: no thread, no file descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []

    def put(self, line: bytes, *, urgent: bool) -> None:
        self.kept.append(line)


class Told:
    """A log that a test can read, and metrics."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.metrics = Metrics(self.clock, instance="test")
        self._writer = _Kept()
        self.logs = Logs(self.clock, level="debug", writer=self._writer)
        atexit.unregister(self.logs.close)

    def log(self) -> str:
        return b"".join(self._writer.kept).decode()

    def counted(self, name: str, *labels: str) -> float:
        return self.metrics.counter(name)(*labels).value


def batcher(
    runtime: Runtime,
    runners: Sequence[Runner] | None = None,
    *,
    told: Told | None = None,
    tracer: Tracer | None = None,
    size_max: int = 8,
    waiting_rows_max: int = 100_000,
    waiting_bytes_max: int = 1 << 30,
    **others: Any,
) -> Batcher:
    told = told or Told()
    meter = BatchMeter(told.metrics, told.logs, told.clock, model="m", version="1", tracer=tracer)
    return Batcher(
        runtime,
        [InlineRunner()] if runners is None else runners,
        model="m",
        version="1",
        settings=BatchSettings(size_max, waiting_rows_max, waiting_bytes_max),
        clock=told.clock,
        meter=meter,
        **others,
    )


def request(
    rows: Any, *, model: str = "m", id: str | None = None, outputs: Sequence[str] | None = None, dtype: Any = np.float32
) -> InferRequest:
    return InferRequest(
        model=model,
        id=id,
        inputs={"x": Tensor.of(np.array(rows, dtype=dtype))},
        outputs=None if outputs is None else tuple(RequestedOutput(name) for name in outputs),
    )


def python_model(entry: str, name: str | None = None) -> Artifact:
    """Return one of the shipped fixture models, by name, or any other entry."""
    if ":" not in entry:
        return Artifact(name or entry, "1", "python", None, f"headrace.testing.models:{entry}")
    return Artifact(name or entry.rpartition(":")[2], "1", "python", None, entry)


def host(told: Told | None = None, **others: Any) -> ModelHost:
    told = told or Told()
    settings: dict[str, Any] = {"settings": ModelSettings(), "batch": BatchSettings(), **others}
    return ModelHost(clock=told.clock, metrics=told.metrics, logs=told.logs, **settings)


async def predictor(*artifacts: Artifact, told: Told | None = None, **others: Any) -> Predictor:
    hosting = host(told, **others)
    await hosting.load(artifacts)
    return Predictor(hosting)
