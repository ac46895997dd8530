"""The consumer: claims, has claims handled, commits their results, and only then settles. No other file settles.

Three loops run beside each other, each with at most one call in flight: *claim* brings messages in while others
compute, *commit* writes whatever finished meanwhile in one transaction, *settle* acknowledges what is durable. On
the embedded engine the three calls often end up in one group commit.

What it holds to, whatever dies:

* A message is acknowledged after its result is durable, and never otherwise.
* Company is not guilt: a message whose claim was lost is claimed alone, when nothing else runs in this process, and
  only deaths while alone count towards its attempts.
* A store or broker that is away costs time: results are kept, claims are extended, nothing new is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from headrace.brokers.base import Broker, Claim
from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelFailed, StorageFull, StoreUnavailable
from headrace.services.crashpoints import crash_point
from headrace.services.handler import Handler
from headrace.services.intake import Intake, Taken
from headrace.services.keeper import Keeper
from headrace.services.lanes import Held, Tally
from headrace.services.outage import Outage
from headrace.services.outcomes import failed, unrun
from headrace.services.settings import InferenceSettings
from headrace.stores.base import Finished, Store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics

__all__ = ["Consumer"]

#: A transaction holds up every writer, so what goes into one is bounded.
_COMMIT_COUNT_MAX = 1000
_COMMIT_BYTES_MAX = 32 * 1024 * 1024
#: Long enough for a model that is being loaded not to be asked all the time, short enough to be back soon.
_RETURN_DELAY_MS = 1000
#: How long an orderly stop tries to settle after everything else is done.
_FLUSH_S = 5.0
#: The pause after a failure that nobody foresaw.
_PAUSE_S = 1.0


class Consumer:
    """Consumes the topics of one process."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        handler: Handler,
        topics: Callable[[], Sequence[str]],
        settings: InferenceSettings,
        *,
        ttl_s: float,
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        on_overrun: Callable[[], None] | None = None,
    ) -> None:
        """Prepare. `topics` is asked all the time: a topic is listed while its model can run.

        `ttl_s` is the retention: older messages are refused. `on_overrun` is called when a run took longer than
        `run_s_max`: its runner cannot be interrupted, so the process should end and another take its place.
        """
        self._broker, self._store, self._handler = broker, store, handler
        self._settings, self._ttl_ms, self._clock, self._logs = settings, int(ttl_s * 1000), clock, logs
        self._on_overrun = on_overrun
        self._tally = Tally(metrics, logs, clock)
        self._keeper = Keeper(
            broker.extend_blocking,
            clock,
            claim_s=settings.claim_s,
            run_s_max=settings.run_s_max,
            working_since=handler.working_since,
            on_lost=lambda tokens: self._on_loop(self._lose, tokens),
            on_overrun=lambda tokens: self._on_loop(self._overrun, tokens),
            on_error=lambda error: logs.say("loop_failed", loop="extend", error=error),
        )
        self._intake = Intake(broker, topics, settings, self._keeper, clock)
        self._broker_outage, self._store_outage = Outage("broker", clock, logs), Outage("store", clock, logs)
        self._held: dict[str, Held] = {}
        self._held_bytes = 0
        self._to_commit: list[Held] = []
        self._to_ack: list[Held] = []
        self._to_release: list[Held] = []
        self._commit_wanted, self._settle_wanted = asyncio.Event(), asyncio.Event()
        self._stopping = False
        self._stop_by_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_claimed, self._at_computed = crash_point("claimed"), crash_point("computed")
        self._at_committed, self._at_acked = crash_point("committed"), crash_point("acked")

    @property
    def held(self) -> int:
        """Return how many claims are held now."""
        return len(self._held)

    def ready(self) -> list[str]:
        """Return the reasons why messages are not being consumed; empty means that they are."""
        return [str(outage.error) for outage in (self._broker_outage, self._store_outage) if outage.lasts]

    async def run(self) -> None:
        """Consume until `stop` is called and what was claimed is finished or given back."""
        self._loop = asyncio.get_running_loop()
        self._keeper.start()
        loops = [asyncio.create_task(self._commit_loop()), asyncio.create_task(self._settle_loop())]
        try:
            await self._claim_loop()
            await self._drain()
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            self._intake.close()
            self._keeper.stop()

    def stop(self, grace_s: float) -> None:
        """Begin an orderly stop: claim no more, finish what can be finished within `grace_s`, give back the rest.

        A second call sets the time anew, from now.
        """
        self._stop_by_s = asyncio.get_running_loop().time() + grace_s
        self._stopping = True
        self._intake.close()

    # -- claiming -----------------------------------------------------------------------------------------

    async def _claim_loop(self) -> None:
        while not self._stopping:
            self._tally.came_round()
            try:
                taken = await self._intake.next(len(self._held), self._held_bytes, paused=self._store_outage.lasts)
                await self._take(taken)
                if taken.failure is not None:
                    raise taken.failure
                if taken.claim_ms:
                    self._broker_outage.over()
            except HeadraceError as error:
                await self._broker_outage.failed(error)
            except Exception as error:
                self._logs.say("loop_failed", loop="claim", error=error)
                await self._clock.sleep(_PAUSE_S)

    async def _take(self, taken: Taken) -> None:
        if not taken.claims:
            return
        self._at_claimed(len(taken.claims))
        self._keeper.hold(taken.claims, taken.asked_s, taken.claim_ms)
        new = [self._hold(claim, taken) for claim in taken.claims]
        if self._stopping:
            self._give_back(new, "stopping")
            return
        try:
            answered = await self._store.present([claim.message.id for claim in taken.claims])
        except HeadraceError as error:
            self._give_back(new, "the store is away")
            self._lose_store(error)
            return
        now_ms = self._clock.now_ms()
        to_run: list[Claim] = []
        for held in new:
            if held.claim.message.id in answered:
                # Cancelled, or answered by somebody who did not live to acknowledge it: there is nothing to run.
                held.lane.end(None)
                self._settle_later([held], self._to_ack)
                continue
            finished = unrun(held.claim, self._settings, now_ms, alone=held.alone, ttl_ms=self._ttl_ms)
            if finished is None:
                to_run.append(held.claim)
            else:
                self._done(held.claim, finished)
        try:
            self._handler.handle(to_run, self._done)
        except Exception as error:
            self._logs.say("loop_failed", loop="handle", error=error)
            for claim in to_run:
                self._done(claim, failed(claim, Internal(), self._clock.now_ms()))

    def _hold(self, claim: Claim, taken: Taken) -> Held:
        held = Held(claim, self._intake.lane(claim.topic), taken.asked_s, taken.alone)
        self._held[claim.token] = held
        self._held_bytes += held.size
        held.lane.begin()
        self._tally.claimed(held)
        return held

    # -- what becomes of a claim --------------------------------------------------------------------------

    def _done(self, claim: Claim, finished: Finished | None) -> None:
        held = self._held.get(claim.token)
        if held is None or held.finished is not None or held.settling:
            return
        # A suspect's time says nothing of the pace in company.
        held.lane.end(None if held.alone or finished is None else self._clock.monotonic_s() - held.since_s)
        if finished is None:
            self._release_later([held], "the model is not available")
            return
        held.finished = finished
        self._keeper.computed(claim.token)
        self._to_commit.append(held)
        self._commit_wanted.set()
        self._intake.changed.set()

    def _give_back(self, unrun: Sequence[Held], reason: str) -> None:
        for held in unrun:
            held.lane.end(None)
        self._release_later(unrun, reason)

    def _release_later(self, given: Sequence[Held], reason: str) -> None:
        for held in given:
            self._tally.released(held, reason)
        self._settle_later(given, self._to_release)

    def _settle_later(self, done: Sequence[Held], queue: list[Held]) -> None:
        """Queue claims to be settled; those that others have now are only forgotten."""
        # Not extended any more: an extension that crosses its own settling would look like a loss.
        self._keeper.let_go([held.claim.token for held in done])
        for held in done:
            held.settling = True
        ours = [held for held in done if not held.lost]
        if len(ours) < len(done):
            self._forget([held for held in done if held.lost])
        queue += ours
        self._settle_wanted.set()

    def _forget(self, gone: Sequence[Held]) -> None:
        for held in gone:
            if self._held.pop(held.claim.token, None) is not None:
                self._held_bytes -= held.size
                held.lane.held -= 1
                if held.alone:
                    self._intake.ran_suspect()
        self._tally.holds(len(self._held))
        self._intake.changed.set()

    # -- what the keeper says -------------------------------------------------------------------------------

    def _on_loop(self, call: Callable[[Collection[str]], None], tokens: Collection[str]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, tokens)

    def _lose(self, tokens: Collection[str]) -> None:
        """Note claims that others have now: their results are still committed, and the first writer wins."""
        for token in tokens:
            held = self._held.get(token)
            if held is not None and not held.lost:
                held.lost = True
                self._tally.lost(held, "it expired under us")

    def _overrun(self, tokens: Collection[str]) -> None:
        """Give up runs that take longer than `run_s_max`: who is alone failed, who has company is a suspect."""
        found = [self._held.get(token) for token in tokens]
        over = [held for held in found if held is not None and held.finished is None and not held.settling]
        for held in over:
            if not self._handler.drop(held.claim):
                self._give_back([held], "a run before it takes too long")
                continue
            self._tally.lost(held, "its run takes too long")
            if held.alone:
                details = {"run_s_max": self._settings.run_s_max}
                error = ModelFailed("The run took too long and was given up", details=details)
                self._done(held.claim, failed(held.claim, error, self._clock.now_ms()))
            else:
                # Somebody in this batch hangs and nobody knows who. The claims expire; then each is run alone.
                held.lane.end(None)
                held.lost = True
                self._settle_later([held], self._to_release)
        if over and self._on_overrun is not None:
            self._on_overrun()

    # -- committing -----------------------------------------------------------------------------------------

    def _lose_store(self, error: HeadraceError) -> None:
        self._store_outage.begin(error)
        # The commit loop watches for its return, also when it has nothing to commit.
        self._commit_wanted.set()

    async def _commit_loop(self) -> None:
        while True:
            await self._commit_wanted.wait()
            self._commit_wanted.clear()
            while self._to_commit or self._store_outage.lasts:
                await self._commit(self._next_batch())

    def _next_batch(self) -> list[Held]:
        count = size = 0
        for held in self._to_commit[:_COMMIT_COUNT_MAX]:
            size += held.written_bytes
            if count and size > _COMMIT_BYTES_MAX:
                break
            count += 1
        return self._to_commit[:count]

    async def _commit(self, batch: list[Held]) -> None:
        """Write a batch; where the store is away it stays where it is, and a pause has passed."""
        self._at_computed(len(batch))
        began_s = self._clock.monotonic_s()
        entries = [held.finished for held in batch if held.finished is not None]
        try:
            first = await self._store.commit(entries) if batch else []
            if not batch:
                await self._store.health()
        except (StoreUnavailable, StorageFull) as error:
            await self._store_outage.failed(error)
            return
        except HeadraceError as error:
            await self._commit_apart(batch, error)
            return
        except Exception as error:
            # Something in it cannot be written, and must not keep the rest from being written.
            self._logs.say("loop_failed", loop="commit", error=error)
            await self._commit_apart(batch, Internal())
            return
        self._store_outage.over()
        self._at_committed(len(batch))
        self._tally.committed(batch, first, self._clock.monotonic_s() - began_s)
        self._take_out(batch)
        self._settle_later(batch, self._to_ack)
        self._intake.changed.set()

    async def _commit_apart(self, batch: list[Held], error: HeadraceError) -> None:
        """The store refuses something in this batch: find out what, and write its failure instead."""
        if not batch:
            self._store_outage.over()
        elif len(batch) > 1:
            for held in batch:
                await self._commit([held])
        elif not batch[0].replaced:
            held = batch[0]
            held.finished, held.replaced = failed(held.claim, error, self._clock.now_ms()), True
        else:
            # Not even its failure can be written, which is no result. The claim expires, and that counts.
            self._logs.say("loop_failed", loop="commit", error=error)
            self._take_out(batch)
            batch[0].lost = True
            self._settle_later(batch, self._to_release)

    def _take_out(self, batch: list[Held]) -> None:
        gone = {held.claim.token for held in batch}
        self._to_commit = [held for held in self._to_commit if held.claim.token not in gone]

    # -- settling -------------------------------------------------------------------------------------------

    async def _settle_loop(self) -> None:
        while True:
            await self._settle_wanted.wait()
            self._settle_wanted.clear()
            while self._to_ack or self._to_release:
                try:
                    await self._settle()
                    self._broker_outage.over()
                except HeadraceError as error:
                    await self._broker_outage.failed(error)
                except Exception as error:
                    self._logs.say("loop_failed", loop="settle", error=error)
                    await self._clock.sleep(_PAUSE_S)

    async def _settle(self) -> None:
        acked = list(self._to_ack)
        if acked:
            await self._broker.ack([held.claim for held in acked])
            self._at_acked(len(acked))
            del self._to_ack[: len(acked)]
            self._forget(acked)
        released = list(self._to_release)
        if released:
            delay_ms = 0 if self._stopping else _RETURN_DELAY_MS
            await self._broker.release([held.claim for held in released], delay_ms=delay_ms)
            del self._to_release[: len(released)]
            self._forget(released)

    # -- the orderly stop -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        await self._until_empty()
        for held in [held for held in self._held.values() if not held.settling]:
            if held.finished is None:
                self._handler.drop(held.claim)
                held.lane.end(None)
            # A result that the store does not take is given back too: its message still stands for it.
            self._take_out([held])
            self._release_later([held], "stopping")
        self._stop_by_s = asyncio.get_running_loop().time() + _FLUSH_S
        await self._until_empty()

    async def _until_empty(self) -> None:
        while self._held:
            self._intake.changed.clear()
            try:
                async with asyncio.timeout_at(self._stop_by_s):
                    await self._intake.changed.wait()
            except TimeoutError:
                return
