"""The inference service: loads models, claims messages for those that are ready, and makes results of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from headrace.assembly.instance import CannotStart, Instance, beside, engines, first_of, report_for_ever
from headrace.brokers import Broker
from headrace.models.batcher import BatchSettings
from headrace.models.cards import CardBook
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import Resolution, resolve
from headrace.runtimes import Artifact
from headrace.services.consumer import Consumer
from headrace.services.inference import Inference
from headrace.services.settings import InferenceSettings, ResultSettings
from headrace.settings import RootSettings
from headrace.stores import Store

__all__ = ["SKIP", "find_models", "host_of", "inference"]

#: Tells a child which versions (`name/version`, separated by commas) its parent found to be broken.
SKIP = "HEADRACE__SKIP"

#: How long an overrun process may take to give back what it holds, before another takes its place.
_OVERRUN_GRACE_S = 5.0

#: How long to wait before a version that failed to load is tried again: this, twice as long, and so on.
_LOAD_PAUSE_S_FIRST = 1.0
_LOAD_PAUSE_S_MAX = 60.0


def find_models(instance: Instance) -> Resolution:
    """Return what the MODEL words mean; faults and ignored entries are logged."""
    settings = instance.settings
    found = resolve(instance.models, Path(settings[RootSettings].model_path), links=settings[ModelSettings].links)
    for fault in found.faults:
        instance.logs.say("model_load_failed", model=fault.name, model_version="", error=fault.error.message)
    for ignored in found.ignored:
        instance.logs.say("card_refused", card=f"{ignored.model}/{ignored.entry}", reason=ignored.reason)
    return found


def host_of(
    instance: Instance, book: CardBook | None, settings: ModelSettings | None = None, *, apart: bool = False
) -> ModelHost:
    """Return the host of this process, without models.

    `apart` allows runners that are processes. On the long road there are none: an inference process is one already,
    and only where a message's death is the process's are its attempts counted.
    """
    return ModelHost(
        settings=settings or instance.settings[ModelSettings],
        batch=instance.settings[BatchSettings],
        clock=instance.clock,
        metrics=instance.metrics,
        logs=instance.logs,
        tracer=instance.tracer,
        workers=instance.settings[RootSettings].workers,
        book=book,
        apart=apart,
    )


async def inference(instance: Instance) -> int:
    """Run until told to stop; return the exit code."""
    skipped = set(os.environ.get(SKIP, "").split(","))
    found = find_models(instance)
    artifacts = [each for each in found.artifacts if f"{each.name}/{each.version}" not in skipped]
    host = host_of(instance, CardBook(instance.settings[RootSettings].data))
    async with engines(instance.settings, instance.clock) as (broker, store):
        if not await _load(instance, host, artifacts, found):
            return 0
        return await _consume(instance, host, broker, store)


async def _load(instance: Instance, host: ModelHost, artifacts: list[Artifact], found: Resolution) -> bool:
    """Load all; False where a stop came first. Raises CannotStart where nothing is left to run."""
    loading = asyncio.create_task(host.load(artifacts))
    await first_of(loading, instance.life.stopping.wait())
    if not loading.done():
        return False
    failed = [hosted for hosted in loading.result().values() if not hosted.serves]
    reasons = [fault.error.message for fault in found.faults] + [hosted.reason for hosted in failed]
    if len(failed) == len(artifacts) or (instance.strict and reasons):
        raise CannotStart("; ".join(reasons) or "there is no model to run")
    return True


async def _consume(instance: Instance, host: ModelHost, broker: Broker, store: Store) -> int:
    settings, life, logs = instance.settings, instance.life, instance.logs
    predictor = Predictor(host)
    overrun = asyncio.Event()
    topics = _Topics(host)
    consumer = Consumer(
        broker,
        store,
        Inference(predictor, clock=instance.clock, logs=logs, tracer=instance.tracer),
        topics,
        settings[InferenceSettings],
        ttl_s=settings[ResultSettings].ttl_s,
        clock=instance.clock,
        metrics=instance.metrics,
        logs=logs,
        on_overrun=overrun.set,
    )
    running = asyncio.create_task(consumer.run())
    async with beside(report_for_ever(instance, store), _load_again(instance, host), host.keep()):
        logs.say("ready", service=instance.service)
        life.ready(models=topics())
        await first_of(running, life.stopping.wait(), overrun.wait())
        reason = life.reason or ("a run took too long" if overrun.is_set() else "the consumer ended")
        logs.say("stopping", service=instance.service, reason=reason)
        consumer.stop(_OVERRUN_GRACE_S if overrun.is_set() else settings[InferenceSettings].grace_s)
        await first_of(running, life.hastened.wait())
        if not running.done():
            consumer.stop(0)
        await running
    if not overrun.is_set():
        await predictor.close(timeout_s=1.0)
    return 0 if life.stopping.is_set() and not overrun.is_set() else 1


class _Topics:
    """Says which topics to claim from: those of models that can run here."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._generation = -1
        self._names: list[str] = []

    def __call__(self) -> list[str]:
        # Asked before every claim.
        if self._generation != self._host.generation:
            self._generation = self._host.generation
            versions = self._host.versions.items()
            self._names = sorted({name for (name, _), hosted in versions if hosted.serves})
        return self._names


async def _load_again(instance: Instance, host: ModelHost) -> None:
    """Try versions again that failed to load while others did; what was wrong may have been mended."""
    pause_s = _LOAD_PAUSE_S_FIRST
    while failed := [hosted.artifact for hosted in host.versions.values() if hosted.state == "failed"]:
        await instance.clock.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOAD_PAUSE_S_MAX)
        await host.load(failed)
