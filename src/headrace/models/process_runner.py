"""A runner that is a process: what a model does to it, it does to nobody else.

The process is started anew, never forked: a fork of a process with threads may hang. One thread of ours (the keeper)
starts it, waits for its end, and starts it again; another one runs batches on it. What ran when it died fails at once
with `RunnerDied`, and nobody else is touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from headrace.errors import HeadraceError, Internal, ModelFailed, ModelLoadFailed, ModelUnavailable
from headrace.models.frames import VARIABLE, Answer, Begin, Failure, Ready, Region, Run, receive, send
from headrace.models.runners import ThreadRunner
from headrace.runtimes import Artifact, Runtime
from headrace.supervise.heartbeat import STOP_SIGNALS
from headrace.supervise.restarts import Restarts
from headrace.supervise.slot import how_it_ended
from headrace.supervise.supervisor import Say
from headrace.tensor import Signature, Tensor

__all__ = ["ProcessRunner", "RunnerDied"]

#: Times that a first start is tried: a single death may have come from outside.
_STARTS_MAX = 3
#: How long an orderly end may take a process; its model's `close()` is called in it.
_END_S = 5.0


class RunnerDied(ModelUnavailable):
    """The process that ran it died."""


class ProcessRunner:
    """Runs one batch after the other in a process of its own."""

    kind = "process"

    def __init__(
        self,
        begin: Begin,
        *,
        number: int,
        run_s_max: float,
        say: Say,
        changed: Callable[[ProcessRunner], None],
    ) -> None:
        """Start nothing yet. `changed` is called, on any thread, when it has died, is back, or is given up."""
        self.since_s: float | None = None
        self.begin = begin
        self.run_s_max = run_s_max
        #: What the process said when it was ready first.
        self.ready: Ready | None = None
        #: Why it does not run now; "" while it does.
        self.outage = "it is being started"
        #: Started again in vain too often.
        self.given_up = False
        self.restarts = 0
        self.runtime: Runtime | None = _Remote(self)
        self._number = number
        self._named = {"model": begin.name, "model_version": begin.version}
        self._say = say
        self._changed = changed
        self._child: _Child | None = None
        self._closing = threading.Event()
        self._thread: ThreadRunner | None = None

    @property
    def alive(self) -> bool:
        """Return whether a batch handed over now would be run."""
        return self._child is not None

    @property
    def pid(self) -> int | None:
        """Return its process; None while there is none."""
        child = self._child
        return child.process.pid if child is not None else None

    def open(self) -> Ready:
        """Start it and wait until it is warm; blocking. Raises ModelLoadFailed, OutOfMemory."""
        for attempt in range(1, _STARTS_MAX + 1):
            try:
                self._child = child = _Child(self.begin, self._number)
            except OSError as error:
                raise self._load_failed(f"its process cannot be started: {error.strerror or error}") from error
            except RunnerDied as error:
                if attempt == _STARTS_MAX or self._closing.is_set():
                    raise self._load_failed(f"the process that loaded it died ({error.details['reason']})") from error
                continue
            break
        self.ready, self.outage = child.ready, ""
        threading.Thread(target=self._keep, args=(child,), name=f"keep-{self.begin.name}", daemon=True).start()
        if self._closing.is_set():
            child.hang_up()
        return child.ready

    def serve(self, thread: ThreadRunner) -> None:
        """Take the thread from which batches are handed to the process."""
        self._thread = thread

    def start(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        """Hand over to the thread, which waits for it."""
        assert self._thread is not None
        self._thread.start(run, done)

    def stop(self) -> None:
        """Take nothing more, and let the process end after what it does now. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.stop()
        child = self._child
        if child is not None and self.since_s is None:
            child.hang_up()

    def close(self) -> None:
        """End the process: orderly for some seconds, then by force; blocking. Idempotent."""
        self.stop()
        child = self._child
        if child is not None:
            child.hang_up()
            try:
                child.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.process.wait()

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run once, on the calling thread.

        Raises RunnerDied, ModelFailed once it is closed, and what the model's runtime raises.
        """
        if self._closing.is_set():
            raise ModelFailed("the model is closed")
        child = self._child
        if child is None:
            raise self._died(self.outage)
        try:
            return child.run(inputs, outputs, self.run_s_max)
        except TimeoutError:
            reason = f"it ran for more than {self.run_s_max:g} seconds and was killed"
        except (EOFError, OSError):
            reason = "the process that ran it died"
        # Nothing is handed to it any more, from now on and not only when its keeper has woken up.
        if self._child is child:
            self._child, self.outage = None, reason
        child.kill()
        raise self._died(reason)

    # -- keeping it alive -----------------------------------------------------------------------------------------

    def _keep(self, child: _Child) -> None:
        restarts = Restarts()
        restarts.became_ready()
        while True:
            reason = how_it_ended(child.wait())
            child.close()
            self._child = None
            if self._closing.is_set():
                return
            by_hand = child.process.returncode == -signal.SIGKILL and not child.killed
            self._lost(child, reason)
            delay_s = restarts.died(was_ready=True, killed=by_hand)
            again = self._again(restarts, delay_s)
            if again is None:
                return
            restarts.became_ready()
            child = again

    def _again(self, restarts: Restarts, delay_s: float | None) -> _Child | None:
        while delay_s is not None and not self._closing.wait(delay_s):
            self.restarts += 1
            try:
                child = _Child(self.begin, self._number)
            except (HeadraceError, OSError) as error:
                reason = str(error)
                self.outage = f"its runner cannot be started again: {reason}"
                self._say("runner_died", **self._named, reason=reason)
                self._changed(self)
                delay_s = restarts.died(was_ready=False, killed="SIGKILL" in reason)
                continue
            self._child, self.outage = child, ""
            if self._closing.is_set():
                child.hang_up()
            self._say("runner_back", **self._named, pid=child.process.pid)
            self._changed(self)
            return child
        if delay_s is None:
            self.given_up = True
            self.outage = f"its runner keeps dying and was given up; last: {self.outage}"
            self._say("runner_given_up", **self._named, deaths=restarts.deaths + restarts.kills)
            self._changed(self)
        return None

    def _lost(self, child: _Child, reason: str) -> None:
        self.outage = f"its runner died ({reason}) and is being started again"
        if child.overran:
            reason = f"it ran for more than {self.run_s_max:g} seconds"
        self._say("runner_died", **self._named, reason=reason, pid=child.process.pid)
        self._changed(self)

    def _died(self, reason: str) -> RunnerDied:
        begin = self.begin
        return RunnerDied(
            f"model {begin.name!r} version {begin.version}: {reason}",
            details={"model": begin.name, "version": begin.version, "reason": reason},
        )

    def _load_failed(self, reason: str) -> ModelLoadFailed:
        artifact = self.begin.artifact
        return ModelLoadFailed(
            f"model {artifact.name!r} cannot be loaded: {artifact.shown}: {reason}",
            details={"file": artifact.shown, "reason": reason, "expected": []},
        )


class _Remote(Runtime):
    """What a batch runs instead of the runtime itself."""

    def __init__(self, runner: ProcessRunner) -> None:
        self._runner = runner

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> Runtime:
        raise NotImplementedError  # it is loaded there

    @property
    def _ready(self) -> Ready:
        assert self._runner.ready is not None
        return self._runner.ready

    @property
    def platform(self) -> str:  # type: ignore[override]
        return self._ready.platform

    @property
    def device(self) -> str:  # type: ignore[override]
        return self._ready.device

    @property
    def signature(self) -> Signature:  # type: ignore[override]
        return Signature.from_json(self._ready.signature)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        return self._runner.run(inputs, outputs)

    def close(self) -> None:
        self._runner.close()


class _Child:
    """One process, from its start to its end."""

    def __init__(self, begin: Begin, number: int) -> None:
        """Start it and wait until it is warm. Raises OSError, RunnerDied and what it says went wrong."""
        self.killed = self.overran = False
        #: Held while its regions are in use.
        self._using = threading.Lock()
        self._given, self._made = Region(), Region()
        self._line, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = _spawn(begin, number, (theirs.fileno(), lifeline, self._given.fd, self._made.fd))
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.ready = self._begin(begin)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str], timeout_s: float) -> dict[str, Tensor]:
        """Run once. Raises EOFError, OSError or TimeoutError where it died or hangs, and what the runtime raises."""
        with self._using:
            return self._run(inputs, outputs, timeout_s)

    def _run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str], timeout_s: float) -> dict[str, Tensor]:
        if self._given.fd < 0:
            raise EOFError
        placed = self._given.write(inputs)
        self._line.settimeout(timeout_s)
        try:
            send(self._line, Run(placed, list(outputs), self._given.size))
            said = receive(self._line)
        except TimeoutError:
            self.overran = True
            raise
        if isinstance(said, Failure):
            raise said.error()
        if not isinstance(said, Answer):
            raise Internal("a runner spoke out of turn")
        return self._made.read(said.outputs, said.size, copy=True)

    def wait(self) -> int:
        """Wait for its end; whoever waits for an answer of it is told."""
        code = self.process.wait()
        # What the model started may still hold the other end open, and then nobody would ever hear of the end.
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        return code

    def hang_up(self) -> None:
        """Let it end in order, after what it runs."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def close(self) -> None:
        """Free what was shared with it; it has ended."""
        with self._using:
            self._line.close()
            self._given.close()
            self._made.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _begin(self, begin: Begin) -> Ready:
        reason = ""
        try:
            send(self._line, begin)
            said = receive(self._line)
            if isinstance(said, Ready):
                return said
            failure: HeadraceError = said.error() if isinstance(said, Failure) else Internal()
        except (EOFError, OSError):
            reason = how_it_ended(self.process.wait())
            failure = RunnerDied(f"it died before it was ready: {reason}", details={"reason": reason})
        self.process.kill()
        self.process.wait()
        self.close()
        raise failure


def _spawn(begin: Begin, number: int, handles: tuple[int, ...]) -> subprocess.Popen[bytes]:
    environ = {**os.environ, VARIABLE: ",".join(map(str, handles))}
    # As a person with `ps` reads it.
    command = [sys.executable, "-m", "headrace", "runner", f"{begin.name}/{begin.version}", str(number)]
    # Signals that come while it starts wait until it can heed them. The mask is inherited.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # What a model prints must not land between the lines of our own output.
        return subprocess.Popen(command, env=environ, pass_fds=handles, stdin=subprocess.DEVNULL, stdout=2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
