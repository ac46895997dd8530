"""The ingest service: the listener of the long road, and the housekeeping that one process does for all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.assembly.inference import find_models
from headrace.assembly.instance import BOUND, ORPHANS, CannotStart, Instance, beside, engines, first_of
from headrace.brokers import Broker
from headrace.errors import HeadraceError
from headrace.models.batch import BatchSettings
from headrace.models.cards import CardBook
from headrace.models.host import ModelSettings
from headrace.services.catalog import Catalog
from headrace.services.ingest import Ingest
from headrace.services.results import Results
from headrace.services.retention import Retention
from headrace.services.settings import IngestSettings, ResultSettings
from headrace.settings import RootSettings
from headrace.sinks import open_sinks
from headrace.sinks.webhook import WebhookSettings
from headrace.stores import Store
from headrace.supervise import Heartbeat
from headrace.telemetry.exposition import FORGET_S, Exposition
from headrace.web.app import App, create_app
from headrace.web.grpc import grpc_listener
from headrace.web.server import CannotListen, Listener
from headrace.web.settings import WebSettings

__all__ = ["ingest", "listen", "stop_listening"]

#: How long what an `up` that was killed left behind may hold the port; it ends itself after two seconds at most.
_ORPHANS_S = 5.0
_BIND_PAUSE_S = 0.1
#: How often the readiness is looked at.
_TELL_S = 0.1


async def ingest(instance: Instance) -> int:
    """Run until told to stop; return the exit code."""
    settings, clock, logs, metrics = instance.settings, instance.clock, instance.logs, instance.metrics
    async with engines(settings, clock) as (broker, store):
        door = await _door(instance, broker, store)
        app = create_app(
            door,
            settings[WebSettings],
            metrics,
            logs,
            clock,
            tracer=instance.tracer,
            scrape=_scrape(instance, store),
            rows_max=settings[BatchSettings].size_max,
        )
        metrics.watch_disk(settings[RootSettings].data)
        retention = Retention(broker, store, settings[ResultSettings], clock=clock, metrics=metrics, logs=logs)
        instance.life.on_word = lambda word: _hear(instance, door, word)
        # Before anybody can ask: a model that is there must not be answered 404.
        await door.watch.look()
        listener = Listener(app, settings[RootSettings].host, settings[RootSettings].port)
        await listen(instance, listener)
        async with beside(door.run(), retention.run(), _tell_readiness(instance, app)):
            await first_of(instance.life.stopping.wait(), listener.stopped())
            logs.say("stopping", service=instance.service, reason=instance.life.reason or "the listener ended")
            await stop_listening(listener, instance.life)
            await door.close()
    return 0 if instance.life.stopping.is_set() else 1


async def listen(instance: Instance, listener: Listener) -> tuple[str, str]:
    """Bind and serve, gRPC too where the settings say so, and tell; return both URLs, "" without gRPC.

    Raises CannotStart naming address and port.
    """
    port = instance.settings[RootSettings].grpc_port
    facts: dict[str, Any] = {}
    grpc = ""
    if port is not None:
        try:
            other = grpc_listener(listener.app, listener.host, port)
        except CannotListen as error:
            raise CannotStart(str(error), final=True) from error
        # First: whoever reaches one of them finds the other there.
        await _start(instance, other.start)
        listener.companion = other
        grpc = f"grpc://{_shown(listener.host)}:{other.port}"
        facts = {"grpc": grpc, "grpc_port": other.port}
    try:
        await _start(instance, listener.start)
    except CannotStart:
        if listener.companion is not None:
            await listener.companion.end()
        raise
    address = f"http://{_shown(listener.host)}:{listener.port}"
    for each in (address, grpc):
        if each:
            instance.logs.say("listening", address=each)
    instance.life.ready(url=address, port=listener.port, **facts)
    return address, grpc


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _start(instance: Instance, start: Callable[[], Awaitable[None]]) -> None:
    until_s = instance.clock.monotonic_s() + (_ORPHANS_S if os.environ.get(ORPHANS) else 0.0)
    while True:
        try:
            return await start()
        except CannotListen as error:
            # The ingest of an `up` that was killed is gone a moment later.
            if instance.clock.monotonic_s() >= until_s or instance.life.stopping.is_set():
                raise CannotStart(str(error), final=BOUND not in os.environ) from error
            await instance.clock.sleep(_BIND_PAUSE_S)


async def stop_listening(listener: Listener, life: Heartbeat) -> None:
    """Stop in order; a second signal ends what is still in progress."""
    stopping = asyncio.create_task(listener.stop())
    await first_of(stopping, life.hastened.wait())
    if not stopping.done():
        listener.app.site.refusing = True
        listener.app.cancel_all()
    await stopping


class _Door(Ingest):
    """The door, with what a supervisor knows of the rest of the stack."""

    #: Why nobody would run what is accepted; "" where somebody would, or nobody has said.
    unserved = ""

    def ready(self) -> list[str]:
        """Return the reasons for not being ready."""
        return [*super().ready(), *([self.unserved] if self.unserved else [])]


async def _door(instance: Instance, broker: Broker, store: Store) -> _Door:
    settings, clock, logs = instance.settings, instance.clock, instance.logs
    secret = await store.secret("ids")
    required = await asyncio.to_thread(find_models, instance) if instance.models else None
    door = _Door(
        broker,
        store,
        Catalog(CardBook(settings[RootSettings].data), required, require_all=settings[ModelSettings].require_all),
        Results(broker, store, secret, settings[ResultSettings], clock=clock, logs=logs),
        secret,
        settings[IngestSettings],
        check_destination=open_sinks(settings[WebhookSettings]).check,
        clock=clock,
        metrics=instance.metrics,
        logs=logs,
        tracer=instance.tracer,
    )
    if instance.life.supervised:
        door.unserved = "no inference process is ready yet"
    return door


async def _tell_readiness(instance: Instance, app: App) -> None:
    """Log when it turns ready, or no more, and tell the supervisor."""
    told: list[str] | None = None
    while True:
        reasons = app.site.reasons_not_ready()
        if reasons != told:
            instance.life.say(reasons=reasons)
            if not reasons:
                instance.logs.say("ready", service=instance.service)
            elif not told:
                instance.logs.say("not_ready", service=instance.service, reasons=reasons)
            told = reasons
        await instance.clock.sleep(_TELL_S)


def _scrape(instance: Instance, store: Store) -> Callable[[], Awaitable[bytes]]:
    """Return what renders /metrics: our numbers and those that the other processes told the store."""
    metrics, clock = instance.metrics, instance.clock
    exposition = Exposition(metrics, clock)
    pending, dead = metrics.gauge("headrace_outbox_pending")(), metrics.gauge("headrace_outbox_dead")()
    dropped = metrics.counter("headrace_log_lines_dropped_total")()

    async def scrape() -> bytes:
        dropped.value = instance.logs.dropped
        try:
            reports = await store.reports(since_ms=clock.now_ms() - int(FORGET_S * 1000))
            exposition.take((report.instance, report.body) for report in reports)
            counts = await store.counts()
            pending.set(counts.outbox_pending)
            dead.set(counts.outbox_dead)
        except HeadraceError:
            pass  # our own numbers say that the store is away
        return exposition.render()

    return scrape


def _hear(instance: Instance, door: _Door, word: dict[str, Any]) -> None:
    """Take what the supervisor says."""
    if "unserved" in word:
        door.unserved = str(word["unserved"])
    for service, count in dict(word.get("restarts", {})).items():
        instance.metrics.counter("headrace_restarts_total")(str(service)).value = float(count)
