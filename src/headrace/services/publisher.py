"""The publisher: makes messages durable, all that come in one turn of the event loop in one call.

What is uncertain is published again under the same id, a bounded number of times: a broker that has it says so.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from headrace.brokers.base import Broker, Receipt
from headrace.clock import Clock
from headrace.errors import BrokerUnavailable, HeadraceError, Internal
from headrace.message import Message
from headrace.services.crashpoints import crash_point
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics

__all__ = ["Publisher"]

_PAUSE_S_FIRST = 0.02
_PAUSE_S_MAX = 1.0

_Waiting = list[tuple[Message, "asyncio.Future[Receipt]"]]


class Publisher:
    """Publishes for everybody who is accepting just now."""

    def __init__(self, broker: Broker, *, attempts_max: int, clock: Clock, metrics: Metrics, logs: Logs) -> None:
        """Prepare."""
        self._broker, self._attempts_max, self._clock, self._logs = broker, attempts_max, clock, logs
        self._duration_s = metrics.histogram("headrace_publish_duration_seconds")()
        self._waiting: defaultdict[str, _Waiting] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_published = crash_point("published")

    def publish(self, topic: str, message: Message) -> asyncio.Future[Receipt]:
        """Return the future of a receipt: the message is durable, once it is there.

        It raises Overloaded, TooLarge, StorageFull or BrokerUnavailable. Cancelling it changes nothing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting[topic].append((message, future))
        return future

    async def close(self) -> None:
        """Return when everything that was handed in has its outcome."""
        while self._tasks or self._waiting:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    def _flush(self) -> None:
        batches, self._waiting = self._waiting, defaultdict(list)
        for topic, batch in batches.items():
            task = asyncio.create_task(self._send(topic, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, topic: str, batch: _Waiting) -> None:
        pause_s = _PAUSE_S_FIRST
        try:
            for attempt in range(1, self._attempts_max + 1):
                batch = await self._try(topic, batch, last=attempt == self._attempts_max)
                if not batch:
                    return
                await self._clock.sleep(pause_s)
                pause_s = min(_PAUSE_S_MAX, 2 * pause_s)
        finally:
            # Nobody may wait for ever, whatever went wrong above.
            for _, future in batch:
                _fail(future, BrokerUnavailable("It is not known whether the request was accepted"))

    async def _try(self, topic: str, batch: _Waiting, *, last: bool) -> _Waiting:
        """Publish once; return what is uncertain and shall be tried again."""
        began_s = self._clock.monotonic_s()
        outcomes: list[Receipt | HeadraceError]
        try:
            outcomes = await self._broker.publish(topic, [message for message, _ in batch])
        except HeadraceError as error:
            outcomes = [error] * len(batch)
        except Exception as error:
            self._logs.say("loop_failed", loop="publish", error=error)
            outcomes = [Internal()] * len(batch)
        took_s = self._clock.monotonic_s() - began_s
        stored = sum(isinstance(outcome, Receipt) for outcome in outcomes)
        if stored:
            self._at_published(stored)
            self._duration_s.observe(took_s, stored)
        uncertain: _Waiting = []
        for (message, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Receipt):
                if not future.done():
                    future.set_result(outcome)
            elif not last and isinstance(outcome, BrokerUnavailable) and outcome.details.get("outcome") == "unknown":
                uncertain.append((message, future))
            else:
                # Each gets its own: raising adds to an exception's traceback.
                _fail(future, type(outcome)(outcome.message, details=outcome.details))
        return uncertain


def _fail(future: asyncio.Future[Receipt], error: HeadraceError) -> None:
    if not future.done():
        future.set_exception(error)
        # Whoever waited may have gone; that is no error of its own.
        future.exception()
