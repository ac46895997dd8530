"""A long road in one process: adapters of every engine, a model made of a function, and consumers to be killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.brokers import Broker, open_broker
from headrace.brokers.base import Claim
from headrace.clock import Clock, ManualClock, SystemClock
from headrace.errors import HeadraceError
from headrace.message import Result
from headrace.models.batch import Pending
from headrace.models.batcher import Batcher, BatchSettings, Progress
from headrace.models.cards import Card, CardBook
from headrace.models.meter import BatchMeter
from headrace.models.runners import InlineRunner, ThreadRunner
from headrace.runtimes.base import Artifact, Runtime
from headrace.services.catalog import Catalog
from headrace.services.consumer import Consumer
from headrace.services.door import Accepted, Call
from headrace.services.handler import Done
from headrace.services.inference import Inference, InferenceSettings
from headrace.services.ingest import Ingest, IngestSettings
from headrace.services.outcomes import succeeded
from headrace.services.results import Results, ResultSettings
from headrace.stores import Store, open_store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Recorder, TraceContext, Tracer
from headrace.tensor import Datatype, InferAnswer, InferRequest, Signature, Tensor, TensorSpec
from services.messages import request

ENGINES = ("memory", "sqlite")
SIGNATURE = Signature((TensorSpec("x", Datatype.FP32, (-1, 1)),), (TensorSpec("y", Datatype.FP32, (-1, 1)),))

Function = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x * 2


class FunctionRuntime(Runtime):
    """FP32 [-1, 1] in, the same shape out, by a function of the whole batch."""

    platform = "python"
    signature = SIGNATURE

    def __init__(self, function: Function = double) -> None:
        self.function = function
        self.calls: list[list[float]] = []

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> FunctionRuntime:
        return cls()

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        x = inputs["x"].array
        self.calls.append(x.ravel().tolist())
        return {"y": Tensor.of(self.function(x))}

    def close(self) -> None:
        """Nothing is held."""


class OneModel:
    """A predictor of one model."""

    def __init__(self, runtime: Runtime, clock: Clock, metrics: Metrics, logs: Logs, *, thread: bool = False) -> None:
        runner = ThreadRunner(asyncio.get_running_loop(), "run-neg") if thread else InlineRunner()
        meter = BatchMeter(metrics, logs, clock, model="neg", version="1")
        self.batcher = Batcher(
            runtime,
            [runner],
            model="neg",
            version="1",
            settings=BatchSettings(),
            clock=clock,
            meter=meter,
            inline_for_good=not thread,
        )
        self.signature = runtime.signature

    def submit(self, request: InferRequest, trace: TraceContext | None = None) -> Pending:
        self.signature.check(request.inputs, request.output_names)
        return self.batcher.submit(request, trace)

    def progress(self) -> Progress:
        return self.batcher.progress()


class Hands:
    """A handler that does nothing until it is told to."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.claims: list[Claim] = []
        self.seen: list[Claim] = []
        self.started = True
        self._done: dict[str, Done] = {}

    def handle(self, claims: Sequence[Claim], done: Done) -> None:
        for claim in claims:
            self.seen.append(claim)
            self.claims.append(claim)
            self._done[claim.token] = done

    def drop(self, claim: Claim) -> bool:
        self.claims.remove(claim)
        return self.started

    def working_since(self, claim: Claim) -> float | None:
        return None

    def answer(self, claim: Claim, value: float = 1.0) -> None:
        """Finish a claim."""
        self.claims.remove(claim)
        outputs = {"y": Tensor.of(np.array([[value]], dtype=np.float32))}
        answer = InferAnswer(model="neg", version="1", outputs=outputs)
        self._done[claim.token](claim, succeeded(claim, answer, self.clock.now_ms()))

    def refuse(self, claim: Claim) -> None:
        """Say that the claim cannot be run now."""
        self.claims.remove(claim)
        self._done[claim.token](claim, None)


class Road:
    """Broker, store, door and consumers that share one clock."""

    def __init__(
        self, broker: Broker, store: Store, clock: Clock, folder: Path, secret: bytes, **settings: Any
    ) -> None:
        self.broker, self.store, self.clock, self.folder, self.secret = broker, store, clock, folder, secret
        self.metrics = Metrics(clock, instance="test")
        self.logs = Logs(clock, level="error")
        self.spans = Recorder()
        self.tracer = Tracer(clock, [self.spans])
        self.result_settings = ResultSettings(ttl_s=settings.get("ttl_s", 7 * 24 * 3600))
        self.settings = InferenceSettings(**settings.get("inference", {}))
        self.refused: dict[str, HeadraceError] = {}
        book = CardBook(folder)
        book.write(Card(name="neg", version="1", runtime="python", platform="python", signature=SIGNATURE))
        self.catalog = Catalog(book)
        self.catalog.refresh()
        self.results = Results(broker, store, secret, self.result_settings, clock=clock, logs=self.logs)
        self.door = Ingest(
            broker,
            store,
            self.catalog,
            self.results,
            secret,
            IngestSettings(**settings.get("ingest", {})),
            check_destination=self._check_destination,
            clock=clock,
            metrics=self.metrics,
            logs=self.logs,
            tracer=self.tracer,
        )
        self._running: dict[Consumer, asyncio.Task[None]] = {}

    def _check_destination(self, destination: str) -> None:
        if destination in self.refused:
            raise self.refused[destination]

    async def submit(self, *rows: float, **call: Any) -> str:
        """Accept a request for later; return its id."""
        found = await self.door.answer(request(*rows), Call("r", **({"wait_s": 0} | call)))
        assert isinstance(found, Accepted)
        return found.id

    def consumer(self, handler: Any, **changes: Any) -> Consumer:
        """Start a consumer."""
        given: dict[str, Any] = {"broker": self.broker, "store": self.store, "topics": lambda: ["neg"]}
        given |= changes
        consumer = Consumer(
            given["broker"],
            given["store"],
            handler,
            given["topics"],
            given.get("settings", self.settings),
            ttl_s=self.result_settings.ttl_s,
            clock=self.clock,
            metrics=self.metrics,
            logs=self.logs,
            on_overrun=given.get("on_overrun"),
        )
        self._running[consumer] = asyncio.create_task(consumer.run())
        return consumer

    def inference(self, runtime: Runtime, *, thread: bool = False, **changes: Any) -> Consumer:
        """Start a consumer whose messages are run by a model."""
        predictor = OneModel(runtime, self.clock, self.metrics, self.logs, thread=thread)
        handler = Inference(predictor, clock=self.clock, logs=self.logs, tracer=self.tracer)
        return self.consumer(handler, **changes)

    async def kill(self, consumer: Consumer) -> None:
        """End a consumer as SIGKILL does: nothing is settled, and the keeper extends no more."""
        task = self._running.pop(consumer)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stop(self, consumer: Consumer, grace_s: float = 5.0) -> None:
        """End a consumer in order."""
        consumer.stop(grace_s)
        await self._running.pop(consumer)

    async def result(self, id: str) -> Result:
        """Wait for the result of an id."""
        await until(lambda: self._has(id), "a result")
        return (await self.store.get([id]))[id]

    async def _has(self, id: str) -> bool:
        return id in await self.store.present([id])

    async def drained(self, topic: str = "neg") -> None:
        """Wait until nothing of a topic waits or is claimed."""

        async def empty() -> bool:
            depth = await self.broker.depth(topic)
            return depth.waiting + depth.claimed == 0

        await until(empty, "an empty topic")

    async def advance(self, seconds: float) -> None:
        """Let time pass on a manual clock."""
        assert isinstance(self.clock, ManualClock)
        await self.clock.advance(seconds)

    async def close(self) -> None:
        """Kill what still runs and close."""
        for consumer in list(self._running):
            await self.kill(consumer)
        await self.door.close()
        await self.broker.close()
        await self.store.close()


async def until(true: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    """Wait until something holds; a bound says what never came true."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = true()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


@contextlib.asynccontextmanager
async def road(engine: str, folder: Path, *, manual: bool = False, **settings: Any) -> AsyncIterator[Road]:
    """Make a road on an engine."""
    clock: Clock = ManualClock() if manual else SystemClock()
    url = "memory://" if engine == "memory" else f"sqlite:///{folder}/headrace.db"
    broker = open_broker(url, clock=clock, **settings.pop("broker", {}))
    store = open_store(url, clock=clock)
    await broker.open()
    await store.open()
    made = Road(broker, store, clock, folder, await store.secret("ids"), **settings)
    try:
        yield made
    finally:
        await made.close()
