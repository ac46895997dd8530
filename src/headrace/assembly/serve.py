"""The short road in one process: models behind a listener, no topic."""

from __future__ import annotations

import asyncio
import dataclasses

from headrace.assembly.inference import find_models, host_of
from headrace.assembly.ingest import listen, stop_listening
from headrace.assembly.instance import CannotStart, Instance, beside, first_of
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import Resolution
from headrace.services.short import ShortRoad
from headrace.settings import RootSettings
from headrace.web.app import create_app
from headrace.web.server import Listener
from headrace.web.settings import WebSettings

__all__ = ["serve"]


async def serve(instance: Instance) -> int:
    """Run until told to stop; return the exit code."""
    settings, life = instance.settings, instance.life
    root, model = settings[RootSettings], settings[ModelSettings]
    # N runners behind one front: one batcher and one set of loaded versions.
    model = dataclasses.replace(model, runners=max(model.runners, root.workers))
    host = host_of(instance, None, model, apart=True)
    predictor = Predictor(host)
    app = create_app(
        ShortRoad(predictor),
        settings[WebSettings],
        instance.metrics,
        instance.logs,
        instance.clock,
        tracer=instance.tracer,
    )
    listener = Listener(app, root.host, root.port)
    found = find_models(instance)
    # Live, and not ready, while models load.
    url = await listen(instance, listener)
    try:
        loading = asyncio.create_task(_load(instance, host, found))
        await first_of(loading, life.stopping.wait(), listener.stopped())
        if loading.done():
            loading.result()
            instance.logs.say("ready", service=instance.service)
            instance.announce(url)
            async with beside(host.keep()):
                await first_of(life.stopping.wait(), listener.stopped())
        instance.logs.say("stopping", service=instance.service, reason=life.reason or "the listener ended")
    finally:
        await stop_listening(listener, life)
    await predictor.close(timeout_s=1.0)
    return 0 if life.stopping.is_set() else 1


async def _load(instance: Instance, host: ModelHost, found: Resolution) -> None:
    await host.load(found.artifacts)
    failed = [hosted for hosted in host.versions.values() if not hosted.serves]
    reasons = [fault.error.message for fault in found.faults] + [hosted.reason for hosted in failed]
    if len(failed) == len(host.versions) or (instance.strict and reasons):
        raise CannotStart("; ".join(reasons) or "there is no model to serve")
