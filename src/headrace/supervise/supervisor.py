"""The parent: starts children, starts those again that die, kills those that hang, and stops all in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from headrace.clock import Clock
from headrace.supervise.heartbeat import stop_signals_heeded
from headrace.supervise.restarts import Restarts
from headrace.supervise.slot import Child, Slot, how_it_ended

__all__ = ["Say", "Supervisor"]

#: How much longer than its own grace a child may take to end.
_MARGIN_S = 5.0
#: How long everybody has after a second signal.
_HASTE_S = 3.0
#: A second signal within this belongs to the first: `timeout`, `make` and containers signal a process and its group.
_SAME_S = 0.5
#: How often heartbeats are looked at.
_TICK_S = 0.25


class Say(Protocol):
    """`Logs.say`."""

    def __call__(self, line: str, /, **fields: Any) -> None:
        """Log one line."""
        ...


class Supervisor:
    """Looks after the children of this process.

    Use it as a context: `start` and `run_once` inside, then `run`, which ends when a stop was asked for (SIGTERM,
    SIGINT, `stop`) or a service has lost its last child for good.
    """

    def __init__(
        self,
        order: Sequence[str],
        *,
        clock: Clock,
        say: Say,
        heartbeat_timeout_s: float,
        on_word: Callable[[Child, dict[str, Any]], None] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Look after nobody yet. `order` lists the services as they are stopped, each when the one before is gone.

        `on_word` is called with what children say, `on_change` whenever one became ready or died.
        """
        self._order = order
        self._clock = clock
        self._say = say
        self._timeout_s = heartbeat_timeout_s
        self._on_word = on_word or (lambda child, word: None)
        self._on_change = on_change or (lambda: None)
        self._slots: dict[str, Slot] = {}
        self._tasks: dict[str, asyncio.Task[int | None]] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._given_up: dict[str, str] = {}
        self._deaths: dict[str, str] = {}
        self._hastened = asyncio.Event()
        self._signalled_s = float("-inf")
        self._signals: list[signal.Signals] = []
        self._ticker: asyncio.Task[None] | None = None
        #: Set when the end has begun, and why.
        self.stopping = asyncio.Event()
        self.reason = ""
        #: Why a service was given up; "" while none was.
        self.failure = ""
        #: Children that had to be killed because they did not stop.
        self.overdue = 0
        #: Starts after a death, by service.
        self.restarts: dict[str, int] = {}

    async def __aenter__(self) -> Supervisor:
        loop = asyncio.get_running_loop()
        self._signals = stop_signals_heeded()
        for each in self._signals:
            loop.add_signal_handler(each, self._on_signal, each.name)
        self._ticker = asyncio.create_task(self._tick_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._begin_to_stop(str(error))
            self._hastened.set()
        await self._stop_in_order()
        for each in self._signals:
            asyncio.get_running_loop().remove_signal_handler(each)
            # Nothing is left to be stopped but this process, and it is about to end.
            signal.signal(each, signal.SIG_IGN)
        if self._ticker is not None:
            self._ticker.cancel()

    # -- children -----------------------------------------------------------------------------------------------

    def start(self, child: Child) -> None:
        """Start a child and keep it running."""
        self._add(child, self._keep)

    async def run_once(self, child: Child) -> tuple[int, str]:
        """Start a child, wait for its end, and return its code and what it said or what its death was."""
        task = self._add(child, self._run)
        await self._until({task}, self.stopping)
        slot = self._slots[child.name]
        if not task.done():
            await self._stop_service([slot])
        del self._slots[child.name]
        del self._tasks[child.name], self._leaving[child.name]
        code = task.result()
        assert code is not None
        return code, slot.failure or how_it_ended(code)

    def tell(self, service: str, **word: Any) -> None:
        """Say something to every child of a service."""
        for slot in self._of(service):
            slot.say(**word)

    def ready(self, service: str) -> int:
        """Return how many children of a service are ready now."""
        return sum(slot.facts is not None for slot in self._of(service))

    def given_up(self, service: str) -> list[str]:
        """Return why children of a service were given up, one reason for each."""
        return [self._given_up[slot.child.name] for slot in self._of(service) if slot.child.name in self._given_up]

    def last_death(self, service: str) -> str:
        """Return why the child of a service died that died last; "" while none has."""
        return self._deaths.get(service, "")

    # -- the end ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Return when the end has begun; leaving the context completes it."""
        await self.stopping.wait()

    def stop(self, reason: str) -> None:
        """Begin an orderly stop; a second call, half a second or more later, hastens it."""
        now_s = self._clock.monotonic_s()
        if not self.stopping.is_set():
            self._signalled_s = now_s
            self._begin_to_stop(reason)
        elif now_s - self._signalled_s >= _SAME_S:
            self._hasten(reason)

    def _on_signal(self, name: str) -> None:
        self.stop(name)

    def _begin_to_stop(self, reason: str) -> None:
        if not self.stopping.is_set():
            self.reason = reason
            self.stopping.set()

    def _hasten(self, reason: str) -> None:
        self._hastened.set()
        for name, slot in self._slots.items():
            self._leaving[name].set()
            slot.say(order="haste", reason=reason)

    async def _stop_in_order(self) -> None:
        self._begin_to_stop(self.reason or "nothing is left to do")
        known = {slot.child.service for slot in self._slots.values()}
        for service in [*self._order, *sorted(known.difference(self._order))]:
            await self._stop_service(self._of(service))

    async def _stop_service(self, slots: Sequence[Slot]) -> None:
        # Whoever comes later in the order is still looked after meanwhile: what is in progress here may need it.
        for slot in slots:
            self._leaving[slot.child.name].set()
            slot.say(order="haste" if self._hastened.is_set() else "stop", reason=self.reason)
        tasks = {self._tasks[slot.child.name] for slot in slots}
        left = {task for task in tasks if not task.done()}
        if left and not self._hastened.is_set():
            limit_s = max(slot.child.grace_s for slot in slots) + _MARGIN_S
            await self._until(left, self._hastened, limit_s)
            left = {task for task in tasks if not task.done()}
        if left and self._hastened.is_set():
            _, left = await asyncio.wait(left, timeout=_HASTE_S)
        for slot in slots:
            if self._tasks[slot.child.name] in left:
                self.overdue += 1
                self._say("child_hung", child=slot.child.name, pid=slot.pid, silent_s=round(slot.silent_s, 1))
                slot.kill()
        if left:
            await asyncio.wait(left)

    async def _until(
        self, tasks: set[asyncio.Task[int | None]], sooner: asyncio.Event, timeout_s: float | None = None
    ) -> None:
        """Return when all are done, at the latest after `timeout_s`, or when `sooner` is set."""
        done, other = asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(sooner.wait())
        both: set[asyncio.Task[Any]] = {done, other}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        other.cancel()

    # -- one slot -----------------------------------------------------------------------------------------------

    def _add(self, child: Child, how: Callable[[Slot], Any]) -> asyncio.Task[int | None]:
        slot = self._slots[child.name] = Slot(child, self._clock, self._hear)
        leaving = self._leaving[child.name] = asyncio.Event()
        if self.stopping.is_set():
            leaving.set()
        task: asyncio.Task[int | None] = asyncio.create_task(how(slot), name=child.name)
        self._tasks[child.name] = task
        return task

    async def _keep(self, slot: Slot) -> None:
        name, restarts = slot.child.name, Restarts()
        leaving = self._leaving[name]
        while not leaving.is_set():
            code = await self._run(slot)
            was_ready = slot.facts is not None
            slot.facts = None
            if leaving.is_set():
                return
            reason = self._deaths[slot.child.service] = slot.failure or how_it_ended(code)
            self._say("child_died", child=name, pid=slot.pid, reason=reason)
            if was_ready:
                restarts.became_ready()
            by_hand = code == -signal.SIGKILL and not slot.killed
            delay_s = None if slot.failed_for_good else restarts.died(was_ready=was_ready, killed=by_hand)
            if delay_s is None:
                self._give_up(slot, reason, restarts)
                return
            self.restarts[slot.child.service] = self.restarts.get(slot.child.service, 0) + 1
            self._say("child_restarting", child=name, delay_s=delay_s)
            self._on_change()
            if delay_s:
                try:
                    async with asyncio.timeout(delay_s):
                        await leaving.wait()
                except TimeoutError:
                    pass

    async def _run(self, slot: Slot) -> int:
        try:
            return await slot.run()
        except OSError as error:
            slot.failure, slot.failed_for_good = f"it cannot be started: {error.strerror or error}", True
            return 127

    def _give_up(self, slot: Slot, reason: str, restarts: Restarts) -> None:
        child = slot.child
        self._given_up[child.name] = reason
        self._say("child_given_up", child=child.name, deaths=restarts.deaths + restarts.kills, reason=reason)
        if all(other.child.name in self._given_up for other in self._of(child.service)):
            self.failure = self.failure or f"{child.service}: {reason}"
            self._begin_to_stop(self.failure)
        self._on_change()

    def _hear(self, slot: Slot, word: dict[str, Any]) -> None:
        if "started" in word:
            self._say("child_started", child=slot.child.name, pid=slot.pid)
            return
        if "ready" in word:
            self._say("child_ready", child=slot.child.name, pid=slot.pid)
        if "asked" in word:
            self._asked_to_stop(slot, str(word["asked"]))
            return
        self._on_word(slot.child, word)
        if "ready" in word:
            self._on_change()

    def _asked_to_stop(self, slot: Slot, name: str) -> None:
        """Decide what a signal to a child means: it was for all of us, or somebody wants to have this one anew."""
        process = slot.process

        def decide() -> None:
            if not self.stopping.is_set() and slot.process is process:
                slot.say(order="stop", reason=name)

        # Where it was for the whole group, our own has come or is about to.
        asyncio.get_running_loop().call_later(_SAME_S, decide)

    def _of(self, service: str) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.child.service == service]

    # -- heartbeats ---------------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            before_s = self._clock.monotonic_s()
            await self._clock.sleep(_TICK_S)
            self._tick(self._clock.monotonic_s() - before_s)

    def _tick(self, slept_s: float) -> None:
        for slot in self._slots.values():
            if slept_s > 4 * _TICK_S:
                # We were stopped, or starved, ourselves (Ctrl-Z stops the whole family), so that of this time their
                # silence says nothing.
                slot.forgive(slept_s)
            if slot.silent_s > self._timeout_s and not slot.killed:
                self._say("child_hung", child=slot.child.name, pid=slot.pid, silent_s=round(slot.silent_s, 1))
                slot.kill()
