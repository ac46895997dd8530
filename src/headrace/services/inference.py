"""Inference: a claimed message becomes a result, through the same predictor that the short road has.

One future with one callback per message, no task: thousands of messages a second pass through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from headrace.brokers.base import Claim
from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelUnavailable, Overloaded
from headrace.models.batch import Pending
from headrace.models.batcher import Progress
from headrace.services.handler import Done
from headrace.services.outcomes import failed, succeeded
from headrace.services.settings import InferenceSettings
from headrace.stores.base import Finished
from headrace.telemetry.logs import Logs
from headrace.telemetry.trace import Span, TraceContext, Tracer, parse_traceparent
from headrace.tensor import InferRequest, decode_request

__all__ = ["Inference", "InferenceSettings", "Predicts"]


class Predicts(Protocol):
    """What is needed of a `Predictor`."""

    def submit(self, request: InferRequest, trace: TraceContext | None = None) -> Pending:
        """Check a request and line it up; the future is its answer. Raises HeadraceError."""

    def progress(self) -> Progress:
        """Return whether work goes on; from any thread."""


class _Run:
    """One message on its way through the predictor."""

    __slots__ = ("done", "pending", "span")

    def __init__(self, done: Done, span: Span | None) -> None:
        self.done = done
        self.span = span
        self.pending: Pending | None = None


class Inference:
    """The consumer's handler."""

    def __init__(self, predictor: Predicts, *, clock: Clock, logs: Logs, tracer: Tracer) -> None:
        """Prepare."""
        self._predictor, self._clock, self._logs, self._tracer = predictor, clock, logs, tracer
        self._runs: dict[str, _Run] = {}

    def handle(self, claims: Sequence[Claim], done: Done) -> None:
        """Begin on all of them; `done` is called once for each, on the loop."""
        for claim in claims:
            message = claim.message
            trace = parse_traceparent(message.traceparent, message.tracestate)
            span = None
            if self._tracer.enabled:
                span = self._tracer.span("message_claimed", trace, id=message.id, attempt=claim.attempt)
                trace = span.context
            run = self._runs[claim.token] = _Run(done, span)
            try:
                # The predictor checks the request against the version that is loaded now. Where that is not the one
                # it was checked against when it was accepted, a misfit is an error here and never a guess.
                request = decode_request(
                    message.payload, message.header_length, model=message.model, version=message.version
                )
                run.pending = self._predictor.submit(request, trace)
            except Exception as error:
                self._end(claim, error)
            else:
                run.pending.add_done_callback(partial(self._answered, claim))

    def drop(self, claim: Claim) -> bool:
        """Forget a claim; what has not started is never run. Returns whether it had started."""
        run = self._runs.pop(claim.token, None)
        if run is None or run.pending is None:
            return False
        started = not run.pending.waiting
        run.pending.cancel()
        if run.span is not None:
            run.span.fail("dropped")
            run.span.end()
        return started

    def working_since(self, claim: Claim) -> float | None:
        """Return since when work on this claim goes on, or on those before it; from any thread."""
        run = self._runs.get(claim.token)
        if run is None or run.pending is None:
            return None
        pending = run.pending
        if pending.queue_time_ms is not None:
            return pending.since_s + pending.queue_time_ms / 1000
        running_since_s = self._predictor.progress().running_since_s
        # Nothing runs and yet it waits: then it has not moved since it came.
        return pending.since_s if running_since_s is None else running_since_s

    def _answered(self, claim: Claim, pending: Pending) -> None:
        if claim.token not in self._runs:
            return  # dropped
        if pending.cancelled():
            self._end(claim, ModelUnavailable())
            return
        error = pending.exception()
        if error is not None:
            self._end(claim, error, pending)
            return
        try:
            finished = succeeded(claim, pending.result(), self._clock.now_ms())
        except Exception as fault:
            self._end(claim, fault, pending)
        else:
            self._report(claim, finished, None)

    def _end(self, claim: Claim, error: BaseException, pending: Pending | None = None) -> None:
        if isinstance(error, Overloaded | ModelUnavailable):
            # It was not run: the model is being loaded or replaced, or its line is full. Its time will come.
            self._report(claim, None, error.code)
            return
        if not isinstance(error, HeadraceError):
            self._logs.say("run_failed", model=claim.topic, model_version="", error=error)
            error = Internal()
        version = pending.version if pending is not None else ""
        self._report(claim, failed(claim, error, self._clock.now_ms(), version=version), error.code)

    def _report(self, claim: Claim, finished: Finished | None, code: str | None) -> None:
        run = self._runs.pop(claim.token)
        if run.span is not None:
            if code is not None:
                run.span.fail(code)
            run.span.end()
        run.done(claim, finished)
