"""`up`: the long road on this machine. Prepares the models, then looks after one process for each service."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.assembly.inference import SKIP
from headrace.assembly.instance import BOUND, ORPHANS, CannotStart, engines, run_loop
from headrace.assembly.preparation import Preparation, Prepared, child_of
from headrace.clock import Clock, SystemClock
from headrace.services.delivery_settings import DeliverySettings
from headrace.services.settings import InferenceSettings
from headrace.settings import RootSettings, Settings
from headrace.supervise import Child, HeartbeatSettings, Supervisor
from headrace.telemetry.logs import Logs
from headrace.web.settings import WebSettings

__all__ = ["ORDER", "hold_data", "run_up"]

#: The order in which services stop: first nothing new comes in, then what is claimed is finished, then it is sent.
ORDER = ("ingest", "inference", "delivery")

#: For how long no inference process may be ready before ingest says that it is not either.
_UNSERVED_S = 3.0


@contextlib.contextmanager
def hold_data(data: Path) -> Iterator[bool]:
    """Hold the data folder against a second `up`; say whether the one before was killed. Raises CannotStart."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        fd = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotStart(f"the data folder {data} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise CannotStart(
                f"another `headrace up` (pid {holder or 'unknown'}) uses the data folder {data}; "
                "stop it, or give this one another folder with --data"
            ) from error
        was_killed = os.fstat(fd).st_size > 0
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield was_killed
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def run_up(
    settings: Settings,
    models: Sequence[str],
    *,
    strict: bool,
    config: str | None,
    announce: Callable[[str, str, Prepared, Sequence[str]], None],
) -> int:
    """Run the stack until it has stopped; return the exit code. Raises CannotStart.

    `announce` is called once, when requests will be answered, with the URL, gRPC's or "", what was prepared, and the
    reasons why it is not ready all the same.
    """
    root = settings[RootSettings]
    clock = SystemClock()
    for kind, url in (("broker", root.broker_url), ("store", root.store_url)):
        if url.startswith("memory:"):
            raise CannotStart(f"{kind}: `up` runs several processes, which cannot share memory://; use sqlite:///FILE")
    logs = Logs(clock, level=root.log_level, service="up")
    try:
        with hold_data(Path(root.data)) as was_killed:
            up = _Up(settings, models, strict, config, announce, clock, logs)
            try:
                return run_loop(up.run(was_killed))
            except CannotStart as error:
                failure = error
        raise failure
    finally:
        logs.close()


class _Up:
    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        strict: bool,
        config: str | None,
        announce: Callable[[str, str, Prepared, Sequence[str]], None],
        clock: Clock,
        logs: Logs,
    ) -> None:
        self._settings, self._models, self._strict, self._announce = settings, tuple(models), strict, announce
        self._clock, self._logs = clock, logs
        self._root = settings[RootSettings]
        self._environ = {**settings.environ()}
        if config:
            # A child reads the same file, not the one that happens to lie in the working directory.
            self._environ["HEADRACE_CONFIG"] = config
        self._supervisor = Supervisor(
            ORDER,
            clock=clock,
            say=logs.say,
            heartbeat_timeout_s=settings[HeartbeatSettings].timeout_s,
            on_word=self._hear,
            on_change=self._changed,
        )
        self._preparation = Preparation(settings, self._models, self._environ)
        self._prepared: Prepared | None = None
        self._url = self._grpc = ""
        #: What ingest said of itself; None before it spoke.
        self._reasons: list[str] | None = None
        self._announced = False
        self._unserved: asyncio.TimerHandle | None = None
        self._ingest: Child

    async def run(self, was_killed: bool) -> int:
        supervisor = self._supervisor
        # What is wrong with them is told here, once and at once, and not by every child in turn.
        async with engines(self._settings, self._clock) as (broker, store):
            await broker.health()
            await store.health()
        await self._preparation.begin()
        async with supervisor:
            # First of all: it is live, and not ready, while models load; and it says whether the port is free.
            web = self._settings[WebSettings]
            self._ingest = self._child("ingest", "ingest-0", web.drain_s + web.grace_s)
            if was_killed:
                self._ingest.environ[ORPHANS] = "1"
            supervisor.start(self._ingest)
            # It runs no models: what an earlier `up` left in the outbox can go out at once.
            delivery_s = self._settings[DeliverySettings].grace_s
            supervisor.start(self._child("delivery", "delivery-0", delivery_s, models=()))
            prepared = await self._preparation.run(supervisor)
            if not supervisor.stopping.is_set():
                self._check(prepared)
                self._prepared = prepared
                self._start(prepared)
                await supervisor.run()
            self._logs.say("stopping", service="up", reason=supervisor.reason)
        self._logs.say("stopped", service="up")
        if supervisor.failure:
            raise CannotStart(supervisor.failure)
        return 1 if supervisor.overdue else 0

    def _check(self, prepared: Prepared) -> None:
        if not prepared.good or (prepared.broken and self._strict):
            raise CannotStart("; ".join(prepared.broken.values()) or "there is no model to serve")

    def _start(self, prepared: Prepared) -> None:
        settings = self._settings
        for number in range(self._root.workers):
            child = self._child("inference", f"inference-{number}", settings[InferenceSettings].grace_s + 5.0)
            child.environ[SKIP] = ",".join(prepared.skip)
            self._supervisor.start(child)

    def _child(self, service: str, name: str, grace_s: float, models: Sequence[str] | None = None) -> Child:
        return child_of(service, name, self._models if models is None else models, self._environ, grace_s)

    # -- what is told -------------------------------------------------------------------------------------------

    def _hear(self, child: Child, word: dict[str, Any]) -> None:
        self._preparation.hear(word)
        if child.service != "ingest":
            return
        if "ready" in word:
            self._url = str(word["ready"]["url"])
            # Wherever it is started again, it is found at the same place, and a port that somebody has taken
            # meanwhile is waited for.
            self._ingest.environ["HEADRACE_PORT"] = str(word["ready"]["port"])
            if "grpc" in word["ready"]:
                self._grpc = str(word["ready"]["grpc"])
                self._ingest.environ["HEADRACE_GRPC_PORT"] = str(word["ready"]["grpc_port"])
            self._ingest.environ.update({BOUND: "1", ORPHANS: ""})
        if "reasons" in word:
            self._reasons = [str(reason) for reason in word["reasons"]]
            self._announce_once()

    def _changed(self) -> None:
        supervisor = self._supervisor
        served = supervisor.ready("inference") > 0
        supervisor.tell("ingest", restarts=supervisor.restarts, **({"unserved": ""} if served else {}))
        if served and self._unserved is not None:
            self._unserved.cancel()
            self._unserved = None
        elif not served and self._unserved is None:
            # A process that died is back before long, and what was accepted meanwhile waits; that is no outage.
            self._unserved = asyncio.get_running_loop().call_later(_UNSERVED_S, self._tell_unserved)
        self._announce_once()

    def _tell_unserved(self) -> None:
        last = self._supervisor.last_death("inference")
        reason = "no inference process is ready" + (f"; the last one died: {last}" if last else "")
        self._supervisor.tell("ingest", unserved=reason)
        self._unserved = None

    def _announce_once(self) -> None:
        supervisor, prepared = self._supervisor, self._prepared
        if self._announced or prepared is None or self._reasons is None or supervisor.stopping.is_set():
            return
        # What is broken stays a reason not to be ready, if the settings want it so; the rest is served.
        known = list(prepared.broken.values())
        if all(any(broken in reason for broken in known) for reason in self._reasons) and all(
            supervisor.ready(service) for service in ORDER
        ):
            self._announced = True
            if self._reasons:
                self._logs.say("not_ready", service="up", reasons=self._reasons)
            else:
                self._logs.say("ready", service="up")
            self._announce(self._url, self._grpc, prepared, self._reasons)
