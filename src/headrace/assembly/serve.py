"""The short road in one process: models behind a listener, no topic."""

from __future__ import annotations

import asyncio
import dataclasses

from headrace.assembly.inference import find_models, host_of
from headrace.assembly.ingest import listen, stop_listening
from headrace.assembly.instance import CannotStart, Instance, beside, first_of
from headrace.assembly.repository import HostRepository
from headrace.models.batch import BatchSettings
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import Resolution
from headrace.models.statistics import Statistics
from headrace.services.short import ShortRoad
from headrace.settings import RootSettings
from headrace.telemetry.metrics import Metrics
from headrace.web.admin import create_admin_app
from headrace.web.app import create_app
from headrace.web.server import CannotListen, Listener
from headrace.web.settings import WebSettings

__all__ = ["serve"]

#: Whoever may load models may run code here; so nobody from outside this machine.
ADMIN_HOST = "127.0.0.1"


async def serve(instance: Instance) -> int:
    """Run until told to stop; return the exit code."""
    settings, life = instance.settings, instance.life
    root, model = settings[RootSettings], settings[ModelSettings]
    # N runners behind one front: one batcher and one set of loaded versions.
    model = dataclasses.replace(model, runners=max(model.runners, root.workers))
    host = host_of(instance, None, model, apart=True)
    predictor = Predictor(host)
    door = ShortRoad(predictor)
    app = create_app(
        door,
        settings[WebSettings],
        instance.metrics,
        instance.logs,
        instance.clock,
        tracer=instance.tracer,
        statistics=lambda name, version: _statistics(host, name, version),
        rows_max=settings[BatchSettings].size_max,
    )
    listener = Listener(app, root.host, root.port)
    found = find_models(instance)
    host.missing = [fault.error.message for fault in found.faults]
    # Live, and not ready, while models load.
    url, grpc = await listen(instance, listener)
    admin = await _start_admin(instance, host, door)
    try:
        loading = asyncio.create_task(_load(instance, host, found))
        await first_of(loading, life.stopping.wait(), listener.stopped())
        if loading.done():
            loading.result()
            reasons = door.ready()
            if reasons:
                instance.logs.say("not_ready", service=instance.service, reasons=reasons)
            else:
                instance.logs.say("ready", service=instance.service)
            instance.announce(url, grpc, reasons)
            async with beside(host.keep()):
                await first_of(life.stopping.wait(), listener.stopped())
        instance.logs.say("stopping", service=instance.service, reason=life.reason or "the listener ended")
    finally:
        if admin is not None:
            await admin.stop()
        await stop_listening(listener, life)
    await predictor.close(timeout_s=1.0)
    return 0 if life.stopping.is_set() else 1


async def _load(instance: Instance, host: ModelHost, found: Resolution) -> None:
    await host.load(found.artifacts)
    failed = [hosted for hosted in host.versions.values() if not hosted.serves]
    reasons = [*host.missing, *(hosted.reason for hosted in failed)]
    if len(failed) == len(host.versions) or (instance.strict and reasons):
        raise CannotStart("; ".join(reasons) or "there is no model to serve")


def _statistics(host: ModelHost, name: str, version: str) -> Statistics | None:
    hosted = host.versions.get((name, version))
    return None if hosted is None or hosted.batcher is None else hosted.batcher.statistics


async def _start_admin(instance: Instance, host: ModelHost, door: ShortRoad) -> Listener | None:
    """Open the admin listener where one is asked for. Raises CannotStart."""
    port = instance.settings[RootSettings].admin_port
    if not port:
        return None
    repository = HostRepository(host, lambda: find_models(instance))
    web = instance.settings[WebSettings]
    # Counted apart: what administrators do is no part of the service's own numbers.
    metrics = Metrics(instance.clock, instance=instance.metrics.instance, service="admin")
    listener = Listener(
        create_admin_app(door, repository, web, metrics, instance.logs, instance.clock), ADMIN_HOST, port
    )
    try:
        await listener.start()
    except CannotListen as error:
        raise CannotStart(f"admin: {error}", final=True) from error
    instance.logs.say("listening", address=f"http://{ADMIN_HOST}:{listener.port}")
    return listener
