"""A runner's process: loads one version, warms it up, and runs what its parent lays into shared memory.

It ends when its parent does, whatever it runs just then: one thread does nothing but wait for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import traceback
from types import FrameType

from headrace.clock import SystemClock
from headrace.errors import HeadraceError, Internal
from headrace.models.frames import VARIABLE, Answer, Begin, Failure, Ready, Region, Run, failure_of, receive, send
from headrace.models.memory import give_back
from headrace.models.warm import make_findable, warm_up
from headrace.runtimes import Runtime, load_runtime, out_of_memory
from headrace.supervise.heartbeat import STOP_SIGNALS

__all__ = ["run_runner"]

#: The end of a traceback says what happened; a deep one may be longer than any log wants.
_TRACE_CHARS_MAX = 20_000


def run_runner() -> int:
    """Serve the parent until it has gone or hung up; return the exit code."""
    # Taken away, so that what a model starts does not mistake itself for us.
    handles = [int(part) for part in os.environ.pop(VARIABLE).split(",")]
    for fd in handles:
        os.set_inheritable(fd, False)
    line = socket.socket(fileno=handles[0])
    threading.Thread(target=_end_with, args=(handles[1],), name="parent", daemon=True).start()
    # A signal to the whole family is the parent's to heed: what it accepted is still to be finished here. Not
    # ignored but handled, so that what a model starts can be ended as usual.
    for each in STOP_SIGNALS:
        signal.signal(each, _heed_not)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    runtime = None
    with contextlib.suppress(EOFError, OSError):  # the parent has hung up
        begin = receive(line)
        assert isinstance(begin, Begin)
        runtime = _load(line, begin)
        if runtime is None:
            return 1
        _serve(line, runtime, Region(handles[2]), Region(handles[3]))
    if runtime is not None:
        with contextlib.suppress(HeadraceError):
            runtime.close()
    return 0


def _load(line: socket.socket, begin: Begin) -> Runtime | None:
    artifact = begin.artifact
    make_findable(artifact)
    try:
        runtime = load_runtime(artifact, threads=begin.threads, device=begin.device)
        warm = warm_up(runtime, artifact, size_max=begin.size_max, fast_s=begin.fast_s, clock=SystemClock())
    except BaseException as error:
        send(line, _failure(error))
        return None
    give_back()
    ready = Ready(
        platform=runtime.platform,
        device=runtime.device,
        signature=runtime.signature.to_json(),
        concurrent=runtime.concurrent,
        batchable=warm.batchable,
        row_s=warm.row_s,
        batch_s=warm.batch_s,
        note=warm.note,
    )
    send(line, ready)
    return runtime


def _serve(line: socket.socket, runtime: Runtime, given: Region, made: Region) -> None:
    while True:
        run = receive(line)
        assert isinstance(run, Run)
        send(line, _run(runtime, run, given, made))


def _run(runtime: Runtime, run: Run, given: Region, made: Region) -> Answer | Failure:
    try:
        inputs = given.read(run.inputs, run.size, copy=False)
        got = runtime.run(inputs, run.outputs)
        placed = made.write({name: got[name] for name in run.outputs if name in got})
        return Answer(placed, made.size)
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))[-_TRACE_CHARS_MAX:]
    # What is raised may hold half a surrogate pair, which no frame can carry.
    trace = text.encode("utf-8", "backslashreplace").decode()
    if isinstance(error, HeadraceError):
        return failure_of(error, trace)
    if isinstance(error, MemoryError):
        return failure_of(out_of_memory(None, None), trace)
    return failure_of(Internal(), trace)


def _heed_not(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal to stop."""


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)
