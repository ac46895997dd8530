"""What becomes of a version whose runners die: who still can goes on, who waits has patience, then it says why not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headrace.errors import ModelUnavailable
from headrace.models.hosted import Hosted, ModelSettings
from headrace.models.process_runner import ProcessRunner
from headrace.telemetry.metrics import Metrics

__all__ = ["Outages"]


class Outages:
    """Watches over the runners' processes of all versions."""

    def __init__(self, settings: ModelSettings, metrics: Metrics, touch: Callable[[Hosted], None]) -> None:
        """`touch` is called, on the loop, with a version that turned ready or not ready."""
        self._settings = settings
        self._restarts = metrics.counter("headrace_runner_restarts_total")
        self._touch = touch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience: dict[Hosted, asyncio.TimerHandle] = {}

    def open(self) -> None:
        """Take note of the running loop."""
        self._loop = asyncio.get_running_loop()

    def changed(self, hosted: Hosted, runner: ProcessRunner) -> None:
        """Take note that a runner has died, is back or was given up; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._changed, hosted, runner)

    def _changed(self, hosted: Hosted, runner: ProcessRunner) -> None:
        batcher = hosted.batcher
        if batcher is None or runner not in hosted.crew or hosted.state not in ("ready", "evicted"):
            return
        if runner.alive:
            self._restarts(hosted.artifact.name).add()
            if hosted.outage:
                hosted.outage = ""
                self._forget(hosted)
                batcher.refuse(None)
                self._touch(hosted)
            batcher.back(runner)
        elif not batcher.lost(runner):
            began = not hosted.outage
            hosted.outage = runner.outage
            self._touch(hosted)
            if began and not runner.given_up:
                loop = asyncio.get_running_loop()
                self._patience[hosted] = loop.call_later(self._settings.restart_wait_s, self._lose_patience, hosted)
            else:  # it died again before it was ready
                self._lose_patience(hosted)

    def _lose_patience(self, hosted: Hosted) -> None:
        """Answer who waits, and whoever comes until a runner is back."""
        self._forget(hosted)
        batcher, artifact = hosted.batcher, hosted.artifact
        if batcher is None or not hosted.outage or not hosted.serves:
            return
        details = {"model": artifact.name, "version": artifact.version, "reason": hosted.outage}
        error = ModelUnavailable(
            f"model {artifact.name!r} version {artifact.version}: {hosted.outage}", details=details
        )
        batcher.refuse(error)
        batcher.dismiss(error)

    def _forget(self, hosted: Hosted) -> None:
        handle = self._patience.pop(hosted, None)
        if handle is not None:
            handle.cancel()
