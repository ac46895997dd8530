"""One child process at a time in one place: how it is started, what it says, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.clock import Clock
from headrace.supervise.heartbeat import STOP_SIGNALS, VARIABLE

__all__ = ["Child", "Slot", "how_it_ended"]


@dataclass(frozen=True, slots=True)
class Child:
    """What runs in a slot."""

    #: The slot's name, stable over restarts: `inference-2`.
    name: str
    #: Children of one service stop together.
    service: str
    #: As a person with `ps` reads it.
    command: Sequence[str]
    #: Over the supervisor's own; read at every start, so it may be changed in between.
    environ: dict[str, str] = field(default_factory=dict)
    #: How long an orderly stop may take it.
    grace_s: float = 30.0


def how_it_ended(code: int) -> str:
    """Return a return code in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"


class Slot:
    """The place of one child; the same over its restarts."""

    def __init__(self, child: Child, clock: Clock, hear: Callable[[Slot, dict[str, Any]], None]) -> None:
        """Hold what to start; `hear` is called on the loop with everything that the child says, beats excepted, and
        with `started`."""
        self.child = child
        self._clock = clock
        self._hear = hear
        #: What the child said when it became ready; None before.
        self.facts: dict[str, Any] | None = None
        #: Why the child said that it ends.
        self.failure = ""
        self.failed_for_good = False
        #: We killed it ourselves.
        self.killed = False
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._heard_s = 0.0

    @property
    def pid(self) -> int:
        """Return the pid of the latest process; 0 before the first."""
        return self.process.pid if self.process is not None else 0

    @property
    def silent_s(self) -> float:
        """Return for how long nothing was heard; 0 while nothing runs."""
        return self._clock.monotonic_s() - self._heard_s if self._socket is not None else 0.0

    def forgive(self, silent_s: float) -> None:
        """Do not count this much of its silence."""
        self._heard_s = min(self._heard_s + silent_s, self._clock.monotonic_s())

    async def run(self) -> int:
        """Start the child and return its return code when it has ended. Raises OSError if it cannot be started."""
        loop = asyncio.get_running_loop()
        self.facts, self.failure, self.failed_for_good, self.killed = None, "", False, False
        self._buffer = b""
        self._heard_s = self._clock.monotonic_s()
        self.process, self._socket = self._start()
        loop.add_reader(self._socket, self._read)
        self._hear(self, {"started": self.process.pid})
        ended: asyncio.Future[int] = loop.create_future()
        threading.Thread(
            target=_await_end, args=(self.process, loop, ended), name=f"wait-{self.child.name}", daemon=True
        ).start()
        try:
            return await ended
        finally:
            self._read()  # its last words may still be in the pipe
            self._hang_up()

    def say(self, **word: Any) -> None:
        """Tell the child something."""
        if self._socket is not None:
            # A child that reads nothing has a full socket before long, and will be killed for its silence.
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps(word).encode() + b"\n")

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.process is not None and self.process.returncode is None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environ = {**os.environ, **self.child.environ, VARIABLE: str(theirs.fileno())}
        # Signals that come while the child starts wait until it can heed them. The mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = subprocess.Popen(
                self.child.command, env=environ, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return process, ours

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # It closed its end: it is ending, or something in it closed what it does not know. Its exit, or its
                # silence, says which.
                asyncio.get_running_loop().remove_reader(self._socket)
                return
            self._heard_s = self._clock.monotonic_s()
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                if line:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            word = json.loads(line)
        except ValueError:
            return
        if "ready" in word:
            self.facts = word["ready"]
        if "failed" in word:
            self.failure, self.failed_for_good = str(word["failed"]), bool(word.get("final"))
        self._hear(self, word)

    def _hang_up(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None


def _await_end(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
    code = process.wait()

    def tell() -> None:
        if not ended.done():
            ended.set_result(code)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tell)
