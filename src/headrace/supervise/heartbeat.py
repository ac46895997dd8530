"""The child's end: says that it is ready and alive, hears when to stop, and notices that nobody is left to say so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from headrace.clock import Clock

__all__ = ["INTERVAL_S", "STOP_SIGNALS", "VARIABLE", "Heartbeat", "stop_signals_heeded"]

#: The variable that names the inherited socket.
VARIABLE = "HEADRACE__SUPERVISOR"

#: How often a child says that its event loop turns.
INTERVAL_S = 0.5

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: A second signal within this belongs to the first: `timeout`, `make` and containers signal a process and its group.
_SAME_S = 0.5
#: How long an orphan may take to end in order before it ends itself.
_ORPHAN_S = 2.0
_TEMPORARY_FAILURE = 75


def stop_signals_heeded() -> list[signal.Signals]:
    """Return the signals that ask for a stop; not those that whoever started us ignores (`nohup`, `&`)."""
    return [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]


class Heartbeat:
    """The life of a service: when it has to stop, and if it has a supervisor, the signs of life it owes.

    With a supervisor, a SIGTERM or SIGINT only makes it ask: the supervisor knows the order in which things stop, and
    a terminal's Ctrl-C reaches everybody at once. Without one, the first signal asks for an orderly stop and the
    second one for haste.
    """

    def __init__(self, clock: Clock, environ: Mapping[str, str] | None = None) -> None:
        """Find out whether there is a supervisor; say nothing yet."""
        self._clock = clock
        self.stopping = asyncio.Event()
        #: What is not done by now will not be done: give back, close, end.
        self.hastened = asyncio.Event()
        #: Why it has to stop; "" while it has not.
        self.reason = ""
        #: Called with what the supervisor says, other than to stop.
        self.on_word: Callable[[dict[str, Any]], None] = _ignore
        # Taken away, so that what a model starts does not mistake itself for us.
        fd = os.environ.pop(VARIABLE, "") if environ is None else environ.get(VARIABLE, "")
        self._socket = None if not fd else socket.socket(fileno=int(fd))
        if self._socket is not None:
            # What a model starts must not keep this open: it would look as if we were alive.
            self._socket.set_inheritable(False)
        self._unsent = b""
        self._closed = False
        self._signalled_s = float("-inf")
        self._signals: list[signal.Signals] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def supervised(self) -> bool:
        """Return whether there is a supervisor."""
        return self._socket is not None

    async def __aenter__(self) -> Heartbeat:
        loop = asyncio.get_running_loop()
        self._signals = stop_signals_heeded()
        for each in self._signals:
            loop.add_signal_handler(each, self._on_signal, each)
        # The supervisor holds them back while a child starts, so that none comes before this.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._socket is not None:
            threading.Thread(target=self._listen, args=(loop,), name="supervisor", daemon=True).start()
            self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for each in self._signals:
            asyncio.get_running_loop().remove_signal_handler(each)
            # The end has begun; a signal now must not tear it.
            signal.signal(each, signal.SIG_IGN)
        if self._task is not None:
            self._task.cancel()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def ready(self, **facts: Any) -> None:
        """Say that the start is over: from now on a death is an accident, and is followed by a restart at once."""
        self.say(ready=facts)

    def failed(self, reason: str, *, final: bool) -> None:
        """Say in one line why this process is about to end; `final`: trying again would not help."""
        self.say(failed=reason, final=final)

    def say(self, **word: Any) -> None:
        """Tell the supervisor something; nothing without one."""
        self._send(json.dumps(word).encode() + b"\n")

    # -- sending ------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._send(b"\n")
            await self._clock.sleep(INTERVAL_S)

    def _send(self, data: bytes) -> None:
        if self._socket is None or self._closed:
            return
        if data == b"\n" and self._unsent:
            data = b""  # the supervisor does not read just now: words are kept for it, beats are not
        self._unsent += data
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has died; the listener is about to notice
        self._unsent = self._unsent[sent:]

    # -- hearing ------------------------------------------------------------------------------------------------

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._socket is not None
        buffer = b""
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._hear, json.loads(line))
        if self._closed:
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._hear, {"order": "haste", "reason": "the supervisor has died"})
        # A loop that hangs does not hear it; nobody would ever end this process.
        threading.Event().wait(_ORPHAN_S)
        os._exit(_TEMPORARY_FAILURE)

    def _hear(self, word: dict[str, Any]) -> None:
        order = word.get("order")
        if order is None:
            self.on_word(word)
            return
        self._stop(str(word.get("reason", order)), hasten=order == "haste")

    def _on_signal(self, which: signal.Signals) -> None:
        if self.supervised:
            self.say(asked=which.name)
            return
        now_s = self._clock.monotonic_s()
        if not self.stopping.is_set():
            self._signalled_s = now_s
            self._stop(which.name, hasten=False)
        elif now_s - self._signalled_s >= _SAME_S:
            self._stop(which.name, hasten=True)

    def _stop(self, reason: str, *, hasten: bool) -> None:
        self.reason = self.reason or reason
        self.stopping.set()
        if hasten:
            self.hastened.set()


def _ignore(word: dict[str, Any]) -> None:
    """Do nothing with what the supervisor says."""
