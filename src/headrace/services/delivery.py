"""Delivery: sends what is due in the outbox through the sinks, and writes down what became of it.

The store counts an attempt before it hands out a pair, so attempts are bounded even when every one of them kills us.
A pair is delivered, due again later, or dead with a reason; a claim whose outcome we could not write expires, and the
pair is sent again under its old `webhook-id`. What was claimed and then not sent was no attempt, and its count is given
back: it ends by its attempts, or when its schedule is over and there is still nobody to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random
from urllib.parse import urlsplit

import msgspec

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.message import Dispatch
from headrace.services.crashpoints import crash_point
from headrace.services.delivery_settings import DeliverySettings
from headrace.services.origins import Gate, Origin, Origins
from headrace.services.outage import Outage
from headrace.services.schedule import Schedule
from headrace.services.successes import Successes
from headrace.sinks import Sinks
from headrace.sinks.base import Outcome
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer, parse_traceparent

__all__ = ["Delivery"]

_CLAIM_MARGIN_S = 2.0
_NO_OUTCOME = "every attempt ended without an outcome"


class Delivery:
    """One process's share of the outbox."""

    def __init__(
        self,
        store: Store,
        sinks: Sinks,
        settings: DeliverySettings,
        *,
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        rng: Random,
        tracer: Tracer | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """Hold what is needed; `progress` is called whenever the loop comes round (a heartbeat)."""
        self._store = store
        self._sinks = sinks
        self._settings = settings
        self._clock = clock
        self._logs = logs
        self._rng = rng
        self._tracer = tracer or Tracer(clock)
        self._progress = progress or (lambda: None)
        self._schedule = Schedule(settings.schedule_s, settings.jitter, settings.throttle_s)
        self._whole_s = self._schedule.whole_s
        self._origins = Origins(clock, rng, slots=settings.host_concurrency_max, hold_s=settings.hold_s)
        self._outage = Outage("store", clock, logs)
        self._claim_ms = int(1000 * (settings.hold_s + sinks.timeout_s + _CLAIM_MARGIN_S))
        self._sent = crash_point("sent")

        self._sending: set[asyncio.Task[None]] = set()
        self._full = False
        self._doubted_s = float("-inf")
        self._successes = Successes(store, self._outage, clock=clock, logs=logs, pause_s=settings.poll_s)
        self._changed = asyncio.Event()
        self._stopping = False
        self._stopped = asyncio.Event()

        self._age = metrics.age("headrace_poll_age_seconds")("delivery")
        self._in_flight = metrics.gauge("headrace_deliveries_in_flight")()
        self._attempts = metrics.counter("headrace_delivery_attempts_total")
        self._durations = metrics.histogram("headrace_delivery_duration_seconds")
        self._delays = metrics.histogram("headrace_delivery_delay_seconds")
        self._dead = metrics.counter("headrace_dead_letters_total")

    async def run(self) -> None:
        """Deliver until `stop` is called; then finish what is being sent, within the grace, and return."""
        helpers = [asyncio.create_task(self._successes.run()), asyncio.create_task(self._listen())]
        try:
            while not self._stopping:
                try:
                    await self._round()
                except HeadraceError as error:
                    await self._outage.failed(error)
                except Exception as error:
                    self._logs.say("loop_failed", loop="delivery", error=error)
                    await self._clock.sleep(self._settings.poll_s)
            await self._finish()
        finally:
            # Cancelled, or out of grace: what is still being sent keeps its claim until that expires.
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            with contextlib.suppress(HeadraceError):
                await self._successes.flush()
            self._stopped.set()

    async def stop(self) -> None:
        """Claim nothing more, let `run` come to its end, and return then."""
        self._stopping = True
        self._changed.set()
        await self._stopped.wait()

    # -- claiming -----------------------------------------------------------------------------------------

    async def _round(self) -> None:
        """Claim once or twice, begin to send, and wait unless there may be more."""
        self._progress()
        self._age.mark()
        self._changed.clear()
        self._origins.forget_idle()
        count, busy, doubtful = self._plan()
        if count > 0:
            more = await self._claim(count, busy | doubtful)
            now_s = self._clock.monotonic_s()
            if doubtful and (not more or now_s - self._doubted_s >= self._settings.poll_s):
                self._doubted_s = now_s
                more = await self._claim(self._settings.claim_count_max, busy) or more
            if more:
                return
        await self._wait()

    async def _claim(self, count: int, busy: set[str]) -> bool:
        """Claim and take up to `count` pairs; return whether there may be more."""
        dispatches = await self._store.claim_due(
            now_ms=self._clock.now_ms(), claim_ms=self._claim_ms, count_max=count, busy=busy
        )
        self._outage.over()
        for dispatch in dispatches:
            self._take(dispatch)
        return len(dispatches) == count

    def _plan(self) -> tuple[int, set[str], set[str]]:
        """Return how many pairs to claim, and the destinations that are busy, and doubtful ones."""
        settings = self._settings
        count = min(settings.claim_count_max, settings.concurrency_max - len(self._sending))
        self._full = count <= 0
        return self._origins.plan(count)

    async def _wait(self) -> None:
        """Wait until a claim may bring something: a commit, a slot, a shut gate's time, or the poll."""
        wait_s = min(self._settings.poll_s, self._origins.opens_in_s())
        sleeping = asyncio.ensure_future(self._clock.sleep(wait_s))
        sleeping.add_done_callback(lambda slept: None if slept.cancelled() else self._changed.set())
        try:
            await self._changed.wait()
        finally:
            sleeping.cancel()

    async def _listen(self) -> None:
        """Note when the store says that a pair may have become due.

        One wait follows the other without a gap, so that a commit between a claim and a wait is not overheard.
        """
        while True:
            try:
                await self._store.wait_outbox(self._settings.poll_s)
                self._changed.set()
            except HeadraceError as error:
                await self._outage.failed(error)

    def _take(self, dispatch: Dispatch) -> None:
        """Send a claimed pair, hold it until its host has a slot, or put it off."""
        if self._schedule.used_up(dispatch.attempt):
            # Every attempt so far took us down before it could be written off.
            error = f"{dispatch.last_error}; then without an outcome" if dispatch.last_error else _NO_OUTCOME
            self._spawn(self._give_up(dispatch, Outcome("retry", dispatch.last_status, error), tried=False))
            return
        origin = self._origins.of(dispatch.destination)
        origin.take(dispatch)
        gate = self._stopped_by(origin, dispatch)
        if gate is not None:
            self._put_off(origin, dispatch, gate)
        elif origin.has_slot:
            self._begin(origin, dispatch)
        else:
            origin.held.append((dispatch, self._clock.monotonic_s()))

    def _age_s(self, dispatch: Dispatch) -> float:
        return max(0, self._clock.now_ms() - dispatch.created_at_ms) / 1000

    def _stopped_by(self, origin: Origin, dispatch: Dispatch) -> Gate | None:
        overdue = self._age_s(dispatch) >= self._whole_s
        return origin.stopped_by(dispatch.destination, overdue=overdue)

    def _is_over(self, dispatch: Dispatch, gate: Gate | None) -> bool:
        """Return whether a pair has nobody to wait for: its schedule is over, and since then its gate was tried and
        there was still no answer."""
        late_s = self._age_s(dispatch) - self._whole_s
        return gate is not None and gate.dead and gate.silent and late_s >= 0 and gate.tried_within(late_s)

    def _put_off(self, origin: Origin, dispatch: Dispatch, gate: Gate) -> None:
        """Give a pair back until its gate opens; behind a dead one, until the schedule's next time.

        It is given up untried only where nobody answers, and somebody found that out after its schedule was over.
        """
        if self._is_over(dispatch, gate):
            error = f"not tried: its {'host' if gate is origin.gate else 'URL'} does not answer"
            if dispatch.last_error:
                error = f"{dispatch.last_error}; later {error}"
            self._spawn(self._give_up(dispatch, Outcome("retry", dispatch.last_status, error), tried=False))
            return
        next_s = self._schedule.put_off_s(self._age_s(dispatch), self._rng) if gate.dead else None
        self._spawn(self._give_back(dispatch, next_s or gate.opens_in_s or self._settings.poll_s))

    # -- sending ------------------------------------------------------------------------------------------

    def _begin(self, origin: Origin, dispatch: Dispatch) -> None:
        origin.began(dispatch.destination)
        self._spawn(self._send(origin, dispatch))

    def _spawn(self, sending: Awaitable[None]) -> None:
        task = asyncio.ensure_future(sending)
        self._sending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logs.say("loop_failed", loop="send", error=error)

    async def _send(self, origin: Origin, dispatch: Dispatch) -> None:
        outcome = None
        self._in_flight.add(1)
        try:
            outcome = await self._attempt(origin, dispatch)
        finally:
            self._in_flight.add(-1)
            origin.ended(dispatch.destination)
            if not self._stopping:
                self._next_held(origin)
            # Only what the last plan left out can make another claim worth its write.
            if self._full or (origin.left_out and origin.room() > 0):
                self._changed.set()
        await self._settle(dispatch, outcome)

    async def _attempt(self, origin: Origin, dispatch: Dispatch) -> Outcome:
        started_s = self._clock.monotonic_s()
        with self._tracer.span("response_sent", parse_traceparent(dispatch.traceparent)) as span:
            span.set(id=dispatch.id, destination=_shown(dispatch.destination), attempt=dispatch.attempt)
            is_ours = False
            traced = msgspec.structs.replace(dispatch, traceparent=span.context.traceparent)
            try:
                outcome = await self._sinks.send(traced, now_ms=self._clock.now_ms())
            except Exception as error:
                # Sinks never raise for what a receiver does, so this is a defect of ours: it must not end the loop,
                # and is not held against the receiver.
                self._logs.say("loop_failed", loop="send", error=error)
                outcome = Outcome("retry", error="an internal error; its cause is in the log")
                is_ours = True
            if outcome.kind != "delivered":
                span.fail(outcome.kind)
        took_s = self._clock.monotonic_s() - started_s
        sink = self._sinks.name(dispatch.destination)
        self._attempts(sink, outcome.kind).add()
        self._durations(sink).observe(took_s)
        if not is_ours and origin.finished(dispatch.destination, outcome, took_s):
            self._changed.set()
        if outcome.kind == "delivered":
            self._delays(sink).observe((self._clock.now_ms() - dispatch.created_at_ms) / 1000)
            self._logs.say(
                "delivered",
                id=dispatch.id,
                destination=_shown(dispatch.destination),
                attempt=dispatch.attempt,
                status=outcome.status,
                latency_ms=round(took_s * 1000, 3),
            )
        return outcome

    def _next_held(self, origin: Origin) -> None:
        """Begin what waited for a slot; give back what waited too long, and put off what came to wait at a gate."""
        now_s = self._clock.monotonic_s()
        while origin.held:
            dispatch, since_s = origin.held[0]
            gate = self._stopped_by(origin, dispatch)
            if gate is not None:
                origin.held.popleft()
                self._put_off(origin, dispatch, gate)
            elif now_s - since_s > self._settings.hold_s:
                origin.held.popleft()
                self._spawn(self._give_back(dispatch))
            elif origin.has_slot:
                origin.held.popleft()
                self._begin(origin, dispatch)
            else:
                return

    # -- writing down -------------------------------------------------------------------------------------

    async def _settle(self, dispatch: Dispatch, outcome: Outcome) -> None:
        """Write down what became of a pair."""
        if outcome.kind == "delivered":
            self._sent(1)
            self._successes.add(dispatch, outcome.status or 0)
            return
        next_s = self._schedule.next_s(dispatch.attempt, outcome, self._rng) if outcome.kind == "retry" else None
        gate = self._stopped_by(self._origins.of(dispatch.destination), dispatch)
        if next_s is None or self._is_over(dispatch, gate):
            await self._give_up(dispatch, outcome)
            return
        next_at_ms = self._clock.now_ms() + int(next_s * 1000)
        self._logs.say(
            "delivery_failed",
            id=dispatch.id,
            destination=_shown(dispatch.destination),
            attempt=dispatch.attempt,
            status=outcome.status,
            error=outcome.error,
            next_in_s=round(next_s, 1),
        )
        await self._write(
            lambda: self._store.retry(dispatch, next_at_ms=next_at_ms, status=outcome.status, error=outcome.error)
        )

    async def _give_back(self, dispatch: Dispatch, wait_s: float = 0.0) -> None:
        next_at_ms = self._clock.now_ms() + int(wait_s * 1000)
        await self._write(lambda: self._store.give_back(dispatch, next_at_ms=next_at_ms))

    async def _give_up(self, dispatch: Dispatch, outcome: Outcome, *, tried: bool = True) -> None:
        code = {"gone": "gone", "refused": "refused"}.get(outcome.kind, "undelivered")
        shown = _shown(dispatch.destination)
        self._dead("delivery", code).add()
        self._logs.say(
            "delivery_dead",
            id=dispatch.id,
            destination=shown,
            attempt=dispatch.attempt if tried else dispatch.attempt - 1,
            status=outcome.status,
            code=code,
            error=outcome.error,
        )
        await self._write(
            lambda: self._store.give_up(
                dispatch,
                now_ms=self._clock.now_ms(),
                status=outcome.status,
                code=code,
                error=outcome.error,
                tried=tried,
            )
        )
        if outcome.kind == "gone":
            reason = f"it answered {outcome.status}"
            dead = await self._write(
                lambda: self._store.disable(dispatch.destination, now_ms=self._clock.now_ms(), reason=reason)
            )
            self._dead("delivery", code).add(dead or 0)
            self._logs.say("destination_disabled", destination=shown, dead=(dead or 0) + 1)

    async def _write(self, write: Callable[[], Awaitable[int | None]]) -> int | None:
        """Write until it is written, or our claim has expired and another attempt will."""
        until_s = self._clock.monotonic_s() + self._claim_ms / 1000
        while True:
            try:
                written = await write()
            except HeadraceError as error:
                if self._stopping or self._clock.monotonic_s() >= until_s:
                    return None
                await self._outage.failed(error)
            else:
                self._outage.over()
                return written

    async def _finish(self) -> None:
        """Let attempts end, within the grace; give back at once what has not begun."""
        for origin in self._origins:
            while origin.held:
                dispatch, _ = origin.held.popleft()
                self._spawn(self._give_back(dispatch))
        ending = asyncio.ensure_future(self._clock.sleep(self._settings.grace_s))
        while self._sending and not ending.done():
            await asyncio.wait({ending, *self._sending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


def _shown(destination: str) -> str:
    """Return a destination for the log: its query may hold a secret of the receiver's."""
    parts = urlsplit(destination)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
