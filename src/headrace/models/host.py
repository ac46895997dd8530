"""The host: loads versions, warms them, keeps them, and lets go of them. One broken model stops no other.

Loading happens on a thread of its own, one version at a time; a version is ready only after its first runs. Where all
of them do not fit into memory, those that were not asked for lately are evicted: freed, but still listed and ready.
The next request to one loads it again and waits meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelUnavailable
from headrace.models.batch import BatchSettings
from headrace.models.batcher import Batcher
from headrace.models.cards import CardBook
from headrace.models.digests import size_of_files
from headrace.models.eviction import in_the_way, no_room, victim
from headrace.models.host_meter import HostMeter, failed_card
from headrace.models.hosted import Hosted, ModelSettings
from headrace.models.loading import INLINE_ROW_S, Loader, free, on_a_thread
from headrace.models.memory import budget_of, held_by, is_tight, resident_bytes
from headrace.models.outages import Outages
from headrace.models.process_runner import ProcessRunner
from headrace.models.quota import cpu_quota, threads_for
from headrace.models.registry import by_version
from headrace.runtimes import Artifact, Runtime
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer

__all__ = ["INLINE_ROW_S", "Hosted", "ModelHost", "ModelSettings"]

#: How often it is looked whether memory is short.
_LOOK_S = 5.0
#: How long an eviction may wait for the runs of a version.
_EVICT_S = 30.0
#: Where everybody is busy, one of them has to go all the same, but it is served for so long first.
_TURN_S = 1.0
_STEP_S = 0.02
#: After a version could not be loaded again, its requests are refused for so long before the next try.
_AGAIN_S = 1.0


class ModelHost:
    """The versions of one process."""

    def __init__(
        self,
        *,
        settings: ModelSettings,
        batch: BatchSettings,
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        tracer: Tracer | None = None,
        workers: int = 1,
        book: CardBook | None = None,
        apart: bool = False,
    ) -> None:
        """Host nothing yet. `workers` processes share the CPU quota; each version's card is written to `book`.

        `apart` allows runners that are processes; the workers are then this host's, and all memory is too.
        """
        self.settings = settings
        self.versions: dict[tuple[str, str], Hosted] = {}
        #: Why what was asked for is not even listed: nothing that could be loaded was found.
        self.missing: Sequence[str] = ()
        #: Grows with every change of state, for whoever keeps a list of them.
        self.generation = 0
        #: Bytes that all versions together may take.
        self.budget = budget_of(settings.memory_bytes_max, processes=1 if apart else workers)
        self._clock = clock
        self._logs = logs
        self._meter = HostMeter(metrics, logs, tracer, book)
        self._workers = workers
        self._outages = Outages(settings, metrics, self._touch)
        self._loader = Loader(
            settings=settings,
            batch=batch,
            clock=clock,
            metrics=metrics,
            logs=logs,
            tracer=tracer,
            book=book,
            apart=apart,
            changed=self._outages.changed,
        )
        #: One load or eviction at a time: what each takes is measured, and two at once would need room for both.
        self._lock = asyncio.Lock()
        self._waking: set[Hosted] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Versions that are not listed, or not yet, and whose memory counts: new ones, and replaced ones that finish.
        self._beside: set[Hosted] = set()
        self._meter.budget(self.budget)

    def named(self, name: str) -> list[Hosted]:
        """Return the versions of a model, the highest first."""
        found = [hosted for (model, _), hosted in self.versions.items() if model == name]
        return sorted(found, key=lambda hosted: by_version(hosted.artifact.version), reverse=True)

    async def load(self, artifacts: Sequence[Artifact]) -> Mapping[tuple[str, str], Hosted]:
        """Load versions one after the other; return all that are hosted. A failure is a state, not an exception.

        Loading a version that is there already replaces it once the new one is warm; where there is no room for both,
        its requests wait meanwhile. No request fails of it.
        """
        self._outages.open()
        arriving = [Hosted(artifact) for artifact in artifacts]
        for hosted in arriving:
            known = self.versions.get((hosted.artifact.name, hosted.artifact.version))
            hosted.wanted_bytes = known.wanted_bytes if known is not None else 0
            hosted.pinned = self.settings.names(self.settings.pinned, hosted.artifact)
            self.versions.setdefault((hosted.artifact.name, hosted.artifact.version), hosted)
        self.generation += 1
        for hosted in arriving:
            async with self._lock:
                old = await self._load(hosted)
            if old is not None:
                self._beside.add(old)
                await self._let_go(old, 30.0)
                self._beside.discard(old)
        return self.versions

    async def unload(self, name: str, version: str, *, timeout_s: float = 30.0) -> None:
        """Let a version finish what it has, for at most `timeout_s`, and free it. Not being there is no error."""
        hosted = self.versions.pop((name, version), None)
        self.generation += 1
        if hosted is not None:
            await self._let_go(hosted, timeout_s)

    async def close(self, *, timeout_s: float = 30.0) -> None:
        """Let every version finish what it has, all at once, for at most `timeout_s`, and free them."""
        leaving = list(self.versions.values())
        self.generation += 1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._let_go(hosted, timeout_s) for hosted in leaving))

    async def keep(self) -> None:
        """Look after memory for ever: see `relieve`."""
        while True:
            await self._clock.sleep(_LOOK_S)
            try:
                await self.relieve()
            except Exception as error:
                self._logs.say("loop_failed", loop="memory", error=error)

    async def relieve(self) -> None:
        """While memory is short, evict what nobody asked for in `idle_ttl_s`, the least recently used first."""
        for hosted in list(self.versions.values()):
            if hosted.crew and hosted.state == "ready":
                pids = [runner.pid for runner in hosted.crew if runner.pid is not None]
                hosted.memory_bytes = await on_a_thread(partial(held_by, pids), "memory")
                self._meter.memory(hosted)
        async with self._lock:
            while in_the_way(self._resident(), 0, self.budget) > 0 or is_tight():
                now_s = self._clock.monotonic_s()
                chosen = victim(self.versions.values(), now_s, idle_s=self.settings.idle_ttl_s)
                if chosen is None or not await self._evict(chosen):
                    return

    async def evict(self, name: str, version: str) -> bool:
        """Free a version until it is asked for again; return whether that was done (it is ready, and not pinned)."""
        async with self._lock:
            hosted = self.versions.get((name, version))
            if hosted is None or hosted.state != "ready" or hosted.pinned:
                return False
            return await self._evict(hosted)

    # -- loading --------------------------------------------------------------------------------------------------

    async def _load(self, hosted: Hosted) -> Hosted | None:
        """Load one; return what it replaced, if anything."""
        artifact = hosted.artifact
        key = (artifact.name, artifact.version)
        began_s = self._clock.monotonic_s()
        error = await self._loaded(hosted)
        load_s = self._clock.monotonic_s() - began_s
        hosted.error = error
        old = self.versions.get(key)
        if error is not None and old is not None and old is not hosted and old.serves:
            hosted.state = "failed"
            self._meter.loaded(hosted, load_s, self._threads())
            return None  # a failed load never disturbs what serves
        if error is not None:
            hosted.card = failed_card(hosted, error)
        # Before it is ready: whoever sees a ready version finds its card.
        await self._meter.write_card(hosted)
        replaced = old if old is not hosted else None
        if error is None:
            line = None
            if replaced is not None and replaced.state == "evicted":
                # Who waits for the old one waits for the new one.
                line, replaced.batcher = replaced.batcher, None
            self._begin(hosted, line)
        hosted.state = "ready" if error is None else "failed"
        self.versions[key] = hosted
        self._touch(hosted)
        self._meter.loaded(hosted, load_s, self._threads())
        return replaced

    async def _loaded(self, hosted: Hosted) -> HeadraceError | None:
        """Make room and load; return what went wrong."""
        artifact = hosted.artifact
        span = self._meter.loading(hosted)
        error: HeadraceError | None = None
        try:
            wanted = hosted.wanted_bytes or await on_a_thread(lambda: size_of_files(artifact), "size")
            if not await self._make_room(wanted, hosted):
                raise no_room(artifact, wanted, self._resident(), self.budget)
            await on_a_thread(lambda: self._loader.load(hosted, self._threads()), f"load-{artifact.name}")
            await self._fit(hosted)
        except HeadraceError as failure:
            error = failure
        except Exception as failure:
            error = Internal()
            error.__cause__ = failure
        if span is not None:
            if error is not None:
                span.fail(error)
            span.end()
        return error

    async def _fit(self, hosted: Hosted) -> None:
        """See that what was loaded fits, now that it is known what it takes. Raises ModelLoadFailed."""
        hosted.wanted_bytes = hosted.memory_bytes
        self._beside.add(hosted)
        try:
            if not await self._make_room(0, hosted):
                runtime, crew = hosted.runtime, hosted.crew
                hosted.runtime, hosted.crew, hosted.memory_bytes = None, [], 0
                await self._free(hosted, runtime, crew)
                raise no_room(hosted.artifact, hosted.wanted_bytes, self._resident(), self.budget)
        finally:
            self._beside.discard(hosted)

    def _begin(self, hosted: Hosted, line: Batcher | None) -> None:
        self._loader.begin(hosted, line)
        self._meter.memory(hosted)
        for runner in hosted.crew:
            if not runner.alive:
                self._outages.changed(hosted, runner)

    def _threads(self) -> int:
        models = len({name for name, _ in self.versions})
        return self.settings.threads or threads_for(cpu_quota(), self._workers, models)

    # -- evicting, and loading again ------------------------------------------------------------------------------

    async def _make_room(self, wanted: int, spared: Hosted) -> bool:
        """Evict until `wanted` more bytes fit, but never `spared`; return whether they do now."""
        stuck: set[Hosted] = set()
        while in_the_way(self._resident(), wanted, self.budget) > 0:
            chosen = self._victim(spared, stuck)
            if chosen is not None and chosen.busy:
                for _ in range(round(_TURN_S / _STEP_S)):
                    await self._clock.sleep(_STEP_S)
                    chosen = self._victim(spared, stuck)
                    if chosen is None or not chosen.busy:
                        break
            if chosen is None:
                return False
            if not await self._evict(chosen):
                stuck.add(chosen)
        return True

    def _victim(self, spared: Hosted, stuck: set[Hosted]) -> Hosted | None:
        key = (spared.artifact.name, spared.artifact.version)
        others = [each for each in self.versions.values() if each is not spared and each not in stuck]
        found = victim(
            [each for each in others if (each.artifact.name, each.artifact.version) != key],
            self._clock.monotonic_s(),
            idle_s=None,
        )
        # The version that is to be replaced goes last, pinned or not: who asks for it waits for the new one.
        old = self.versions.get(key)
        replaced = old if old in others and old is not None and old.state == "ready" else None
        return found if found is not None else replaced

    async def _evict(self, hosted: Hosted) -> bool:
        """Let it finish what runs, and free it; who waits goes on waiting. Return whether that was done."""
        batcher = hosted.batcher
        assert batcher is not None
        idle_s = self._clock.monotonic_s() - hosted.used_s
        before = resident_bytes()
        hosted.state = "evicted"
        try:
            async with asyncio.timeout(_EVICT_S):
                await batcher.rest(lambda: self._wake(hosted))
        except TimeoutError:
            if hosted.state == "evicted":
                hosted.state = "ready"
            return False
        runtime, crew, freed = hosted.runtime, hosted.crew, hosted.memory_bytes
        hosted.runtime, hosted.crew, hosted.outage = None, [], ""
        await self._free(hosted, runtime, crew)
        del runtime
        hosted.memory_bytes = 0
        self._touch(hosted)
        self._meter.evicted(hosted, idle_s, freed, before, resident_bytes())
        return True

    def _wake(self, hosted: Hosted) -> None:
        """Begin to load an evicted version again, once however many ask for it."""
        if hosted not in self._waking:
            self._waking.add(hosted)
            self._spawn(self._load_again(hosted))

    async def _load_again(self, hosted: Hosted) -> None:
        try:
            async with self._lock:
                batcher = hosted.batcher
                if hosted.state != "evicted" or batcher is None:
                    return
                began_s, card = self._clock.monotonic_s(), hosted.card
                error = await self._loaded(hosted)
                if not hosted.serves:  # unloaded meanwhile
                    await self._free(hosted, hosted.runtime, hosted.crew)
                    return
                hosted.error = error
                if error is None:
                    hosted.outage = ""
                    self._begin(hosted, batcher)
                    hosted.state = "ready"
                else:
                    hosted.card = card  # else nobody would know any more what it takes
                    self._refuse_for_now(hosted, batcher, error)
                self._touch(hosted)
                self._meter.loaded(hosted, self._clock.monotonic_s() - began_s, self._threads())
        finally:
            self._waking.discard(hosted)

    def _refuse_for_now(self, hosted: Hosted, batcher: Batcher, error: HeadraceError) -> None:
        artifact = hosted.artifact
        hosted.outage = f"it was evicted and cannot be loaded again: {error.message}"
        details = {"model": artifact.name, "version": artifact.version, "reason": hosted.outage}
        failure = ModelUnavailable(
            f"model {artifact.name!r} version {artifact.version}: {hosted.outage}", details=details
        )
        batcher.refuse(failure)
        batcher.dismiss(failure)

        def let_in() -> None:
            if hosted.state == "evicted":
                batcher.refuse(None)

        asyncio.get_running_loop().call_later(_AGAIN_S, let_in)

    def _resident(self) -> list[Hosted]:
        return list({*self.versions.values(), *self._beside})

    # -- letting go -----------------------------------------------------------------------------------------------

    async def _let_go(self, hosted: Hosted, timeout_s: float) -> None:
        hosted.state = "unloaded"
        self.generation += 1
        artifact, batcher = hosted.artifact, hosted.batcher
        drained = True
        if batcher is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await batcher.close()
            except TimeoutError:
                drained = False
        runtime, crew = hosted.runtime, hosted.crew
        # A run in this process that does not end still uses it; then the process's end frees it.
        if crew or (runtime is not None and drained):
            await self._free(hosted, runtime, crew)
        hosted.memory_bytes = 0
        if self.versions.get((artifact.name, artifact.version)) in (None, hosted):
            self._meter.forget(hosted)
        self._meter.unloaded(hosted)

    async def _free(self, hosted: Hosted, runtime: Runtime | None, crew: list[ProcessRunner]) -> None:
        try:
            await on_a_thread(lambda: free(runtime, crew), "close")
        except HeadraceError as error:
            self._meter.failed_to_close(hosted, error)

    def _touch(self, hosted: Hosted) -> None:
        """Tell everybody who keeps a list that a version has changed."""
        self.generation += 1
        self._meter.ready(hosted)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
