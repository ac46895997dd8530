"""Runners: the places where a batch runs. One batch at a time each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from headrace.runtimes import Runtime

__all__ = ["InlineRunner", "Runner", "ThreadRunner"]


class Runner(Protocol):
    """Runs one thing after the other."""

    kind: str
    #: When what runs now began, in the clock's monotonic seconds; None while nothing does. Read from any thread.
    since_s: float | None

    @property
    def runtime(self) -> Runtime | None:
        """Return what batches run here instead of the version's own runtime; None: that one."""

    @property
    def alive(self) -> bool:
        """Return whether a batch handed over now would be run."""

    def start(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        """Call `run`, which does not raise, and then `done` on the event loop."""

    def stop(self) -> None:
        """Take nothing more. What runs now is not waited for. Idempotent."""


class InlineRunner:
    """Runs on the event loop itself: for models that take less time than a change of threads."""

    kind = "inline"
    runtime: Runtime | None = None
    alive = True

    def __init__(self) -> None:
        self.since_s: float | None = None

    def start(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        """Run now; `done` has been called when this returns."""
        run()
        done()

    def stop(self) -> None:
        """Do nothing: there is nothing to stop."""


class ThreadRunner:
    """Runs on a thread of its own, so that the event loop goes on meanwhile."""

    kind = "thread"
    runtime: Runtime | None = None
    alive = True

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.since_s: float | None = None
        self._loop = loop
        self._work: SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = SimpleQueue()
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._go, name=name, daemon=True)
        self._thread.start()

    def start(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        """Hand over to the thread, which waits for it."""
        self._work.put((run, done))

    def stop(self) -> None:
        """Let the thread end after what it does now."""
        self._work.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _go(self) -> None:
        while (work := self._work.get()) is not None:
            run, done = work
            run()
            try:
                self._loop.call_soon_threadsafe(done)
            except RuntimeError:
                return  # the loop is closed: nobody is left to be told
            # Else the last batch, tensors and all, would stay until the next one comes.
            del work, run, done
