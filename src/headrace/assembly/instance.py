"""One process of a service: its clock, log, metrics and life, and what all of them do alike."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import __version__
from headrace.brokers import Broker, open_broker
from headrace.clock import Clock, SystemClock
from headrace.errors import HeadraceError
from headrace.services.settings import IngestSettings
from headrace.settings import RootSettings, Settings
from headrace.stores import Report, Store, open_store
from headrace.supervise import Heartbeat, end_descendants
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import LogExporter, Tracer
from headrace.telemetry.writer import LineWriter

__all__ = [
    "BOUND",
    "INSTANCE",
    "ORPHANS",
    "CannotStart",
    "Instance",
    "beside",
    "broker_of",
    "engines",
    "first_of",
    "opened_store",
    "report_for_ever",
    "run_loop",
    "run_service",
    "store_of",
]

#: Tells a child the name of its slot.
INSTANCE = "HEADRACE__INSTANCE"

#: Tells an ingest that its port was ours before: if it is taken now, then by somebody who is about to go.
BOUND = "HEADRACE__BOUND"

#: Tells an ingest that an earlier `up` was killed, so that its processes may still be about to go.
ORPHANS = "HEADRACE__ORPHANS"

_REPORT_S = 1.0


def _say_nothing(url: str, grpc: str, reasons: Sequence[str]) -> None:
    """Tell nobody: the log and the supervisor know."""


class CannotStart(Exception):
    """A service cannot start; the message is one line for people. `final`: trying again would not help."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        self.final = final
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Instance:
    """What every service is given."""

    service: str
    settings: Settings
    #: The MODEL words, as given.
    models: tuple[str, ...]
    clock: Clock
    logs: Logs
    metrics: Metrics
    tracer: Tracer
    life: Heartbeat
    #: One model that cannot be loaded is a reason not to start.
    strict: bool = False
    #: Called with the URL, and gRPC's or "", when requests will be answered.
    announce: Callable[[str, str, Sequence[str]], None] = _say_nothing


def run_service(
    service: str,
    main: Callable[[Instance], Awaitable[int]],
    settings: Settings,
    models: Sequence[str] = (),
    *,
    strict: bool = False,
    quiet: bool = False,
    announce: Callable[[str, str, Sequence[str]], None] = _say_nothing,
) -> int:
    """Run a service on an event loop of its own until it has stopped; return its exit code. `quiet` logs nothing.

    Raises CannotStart, HeadraceError and OSError, unless there is a supervisor: then that is told, and the code is 1.
    """
    clock = SystemClock()
    root = settings[RootSettings]
    # Taken away, so that a `headrace` that a model starts does not mistake itself for us.
    name = os.environ.pop(INSTANCE, "") or f"{service}-{socket.gethostname()}-{os.getpid()}"
    writer = LineWriter(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)) if quiet else None
    logs = Logs(clock, level=root.log_level, service=service, instance=name, writer=writer)
    logs.adopt_libraries()
    metrics = Metrics(clock, instance=name, service=service)
    tracer = Tracer(clock, [LogExporter(logs)] if logs.enabled("debug") else [])

    async def whole() -> int:
        async with Heartbeat(clock) as life:
            instance = Instance(service, settings, tuple(models), clock, logs, metrics, tracer, life, strict, announce)
            logs.say("starting", service=service, version=__version__)
            logs.say("settings_loaded", settings={key: value for key, value, _ in settings.values()})
            try:
                code = await main(instance)
            except (CannotStart, HeadraceError, OSError) as error:
                if not life.supervised:
                    raise
                failure = _as_failure(error)
                life.failed(str(failure), final=failure.final)
                return 1
            logs.say("stopped", service=service)
            return code

    try:
        return run_loop(whole())
    finally:
        if left := end_descendants():
            logs.say("descendants_ended", service=service, processes=left)
        logs.close()


def _as_failure(error: Exception) -> CannotStart:
    if isinstance(error, CannotStart):
        return error
    if isinstance(error, OSError):
        return CannotStart(f"{error.filename or 'the system'}: {error.strerror or error}")
    return CannotStart(str(error))


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on a new event loop: uvloop's where it is installed."""
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def broker_of(settings: Settings, clock: Clock) -> Broker:
    """Return the broker that the settings name, not opened yet. Raises CannotStart."""
    ingest = settings[IngestSettings]
    try:
        return open_broker(
            settings[RootSettings].broker_url,
            clock=clock,
            length_max=ingest.queue_length_max,
            bytes_max=ingest.queue_bytes_max,
        )
    except HeadraceError as error:
        raise CannotStart(f"broker: {error}", final=True) from error


def store_of(settings: Settings, clock: Clock) -> Store:
    """Return the store that the settings name, not opened yet. Raises CannotStart."""
    try:
        return open_store(settings[RootSettings].store_url, clock=clock)
    except HeadraceError as error:
        raise CannotStart(f"store: {error}", final=True) from error


@contextlib.asynccontextmanager
async def engines(settings: Settings, clock: Clock) -> AsyncIterator[tuple[Broker, Store]]:
    """Open the broker and the store; close them at the end. Raises CannotStart."""
    broker = broker_of(settings, clock)
    try:
        await broker.open()
    except HeadraceError as error:
        raise CannotStart(f"broker: {error}") from error
    try:
        async with opened_store(settings, clock) as store:
            yield broker, store
    finally:
        await broker.close()


@contextlib.asynccontextmanager
async def opened_store(settings: Settings, clock: Clock) -> AsyncIterator[Store]:
    """Open the store; close it at the end. Raises CannotStart."""
    store = store_of(settings, clock)
    try:
        await store.open()
    except HeadraceError as error:
        raise CannotStart(f"store: {error}") from error
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def beside(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run loops in the background while the body runs."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Awaitable[Any]) -> None:
    """Return when the first of them is done; the others are cancelled, but for tasks and futures handed in."""
    own = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, future in zip(waits, own, strict=True):
            if future is not wait:
                future.cancel()


async def report_for_ever(instance: Instance, store: Store) -> None:
    """Tell the store every second how this process does; that is how ingest shows its numbers."""
    dropped = instance.metrics.counter("headrace_log_lines_dropped_total")()
    while True:
        dropped.value = instance.logs.dropped
        report = Report(instance.metrics.instance, instance.clock.now_ms(), instance.metrics.encode())
        try:
            await store.report(report)
        except HeadraceError:
            pass  # the store is away, which others say; these numbers will be told later
        except Exception as error:
            instance.logs.say("loop_failed", loop="report", error=error)
        await instance.clock.sleep(_REPORT_S)
