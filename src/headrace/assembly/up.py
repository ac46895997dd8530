"""`up`: the long road on this machine. Prepares the models, then looks after one process for each service."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.assembly.inference import SKIP
from headrace.assembly.instance import CannotStart, broker_of, run_loop, store_of
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


@contextlib.contextmanager
def hold_data(data: Path) -> Iterator[None]:
    """Hold the data folder against a second `up`. Raises CannotStart."""
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
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def run_up(
    settings: Settings,
    models: Sequence[str],
    *,
    strict: bool,
    config: str | None,
    announce: Callable[[str, Prepared], None],
) -> int:
    """Run the stack until it has stopped; return the exit code. Raises CannotStart.

    `announce` is called once, with the URL and what was prepared, when requests will be answered.
    """
    root = settings[RootSettings]
    clock = SystemClock()
    for engine, kind in ((broker_of(settings, clock), "broker"), (store_of(settings, clock), "store")):
        shared = getattr(getattr(engine, "features", None), "shared", True)
        if not shared or (kind == "store" and root.store_url.startswith("memory:")):
            raise CannotStart(f"{kind}: `up` runs several processes, which cannot share memory://; use sqlite:///FILE")
    logs = Logs(clock, level=root.log_level, service="up")
    try:
        with hold_data(Path(root.data)):
            return run_loop(_Up(settings, models, strict, config, announce, clock, logs).run())
    finally:
        logs.close()


class _Up:
    def __init__(
        self,
        settings: Settings,
        models: Sequence[str],
        strict: bool,
        config: str | None,
        announce: Callable[[str, Prepared], None],
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
        self._url = ""
        self._prepared = Prepared()
        self._announced = False

    async def run(self) -> int:
        supervisor = self._supervisor
        # Before any model is loaded, because a port that is taken is a mistake to be told at once.
        self._environ["HEADRACE_PORT"] = str(await self._free_port())
        async with supervisor:
            self._prepared = await self._preparation.run(supervisor)
            if not supervisor.stopping.is_set():
                self._check()
                self._start()
                await supervisor.run()
            self._logs.say("stopping", service="up", reason=supervisor.reason)
        self._logs.say("stopped", service="up")
        if supervisor.failure:
            raise CannotStart(supervisor.failure)
        return 1 if supervisor.overdue else 0

    # -- before the services --------------------------------------------------------------------------------

    async def _free_port(self) -> int:
        """Return the port that ingest will bind. Raises CannotStart naming address and port."""
        from headrace.web.server import CannotListen, probe

        until_s = self._clock.monotonic_s() + 2.0
        while True:
            try:
                return probe(self._root.host, self._root.port)
            except CannotListen as error:
                # An ingest whose `up` was killed is gone a moment later.
                if self._clock.monotonic_s() >= until_s:
                    raise CannotStart(str(error)) from error
            await self._clock.sleep(0.1)

    def _check(self) -> None:
        broken = self._prepared.broken
        if broken and (self._strict or not self._prepared.good):
            raise CannotStart("; ".join(broken.values()))
        if not self._prepared.good:
            raise CannotStart("there is no model to serve")

    # -- the services -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        settings = self._settings
        web = settings[WebSettings]
        for number in range(self._root.workers):
            child = self._child("inference", f"inference-{number}", settings[InferenceSettings].grace_s + 5.0)
            child.environ[SKIP] = ",".join(self._prepared.skip)
            self._supervisor.start(child)
        delivery = self._child("delivery", "delivery-0", settings[DeliverySettings].grace_s, models=())
        self._supervisor.start(delivery)
        self._supervisor.start(self._child("ingest", "ingest-0", web.drain_s + web.grace_s))

    def _child(self, service: str, name: str, grace_s: float, models: Sequence[str] | None = None) -> Child:
        return child_of(service, name, self._models if models is None else models, self._environ, grace_s)

    def _hear(self, child: Child, word: dict[str, Any]) -> None:
        self._preparation.hear(word)
        if child.service == "ingest" and "ready" in word:
            self._url = str(word["ready"]["url"])

    def _changed(self) -> None:
        self._supervisor.tell("ingest", restarts=self._supervisor.restarts)
        ready = all(self._supervisor.ready(service) for service in ORDER)
        if ready and not self._announced and not self._supervisor.stopping.is_set():
            self._announced = True
            self._logs.say("ready", service="up")
            self._announce(self._url, self._prepared)
