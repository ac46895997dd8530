"""The predictor: the one door to models in this process, for both roads.

pick version → validate → batch → run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ModelNotFound, ModelUnavailable, VersionNotFound
from headrace.models.batch import Pending
from headrace.models.batcher import Progress
from headrace.models.host import Hosted, ModelHost
from headrace.models.registry import by_version, is_name
from headrace.telemetry.trace import TraceContext
from headrace.tensor import InferRequest, Signature

__all__ = ["Predictor", "VersionState"]


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version, as seen from outside this room."""

    name: str
    version: str
    #: The OIP platform; "" while unknown.
    platform: str
    #: None until it is known.
    signature: Signature | None
    ready: bool
    #: Why it is not ready; "" when it is.
    reason: str = ""
    #: When the newest of its files was written.
    updated_at_ms: int | None = None


class Predictor:
    """Answers requests with the versions of a host."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self._generation = -1
        self._states: tuple[VersionState, ...] = ()
        self._picks: dict[tuple[str, str | None], Hosted] = {}

    def submit(self, request: InferRequest, trace: TraceContext | None = None) -> Pending:
        """Check a request and line it up; the future answers it or raises. Cancel it to give up.

        Raises at once, before anything waits: ModelNotFound, VersionNotFound, ModelUnavailable (loading, failed to
        load, unloading), what `Signature.check` raises, and Overloaded with the time after which to try again.
        """
        batcher = self.pick(request.model, request.version).batcher
        if batcher is None:
            raise ModelUnavailable
        batcher.signature.check(request.inputs, request.output_names)
        return batcher.submit(request, trace)

    def pick(self, name: str, version: str | None = None) -> Hosted:
        """Return the version that answers; None picks the highest that is ready. Raises as `submit` does."""
        self._renew()
        hosted = self._picks.get((name, version))
        if hosted is not None:
            return hosted
        known = self.host.named(name)
        if not known:
            shown = f" {name!r}" if is_name(name) else ""
            names = sorted({model for model, _ in self.host.versions})
            raise ModelNotFound(f"there is no model{shown}; there are {names}", details={"expected": names})
        if version is None:
            hosted = next((found for found in known if found.serves), known[0])
        else:
            hosted = next((found for found in known if found.artifact.version == version), None)
        if hosted is None:
            versions = sorted((found.artifact.version for found in known), key=by_version)
            raise VersionNotFound(
                f"model {name!r} has no such version; it has {versions}",
                details={"model": name, "expected": versions},
            )
        if not hosted.serves:
            raise ModelUnavailable(
                f"model {name!r} version {hosted.artifact.version}: {hosted.reason}",
                details={"model": name, "version": hosted.artifact.version, "reason": hosted.reason},
            )
        self._picks[name, version] = hosted
        return hosted

    def models(self) -> Sequence[VersionState]:
        """Return every version, loading and failed ones too, by name and version; the same object until one changes."""
        self._renew()
        return self._states

    def ready(self) -> Sequence[str]:
        """Return the reasons for not being ready; empty means ready. No model at all is a reason.

        Ready means that every version was loaded (`model.require_all`), or else that none is loading and one is ready.
        """
        states = self.models()
        if not states:
            return ["no model is loaded"]
        waiting = [state for state in states if not state.ready]
        loading = any(hosted.state == "loading" for hosted in self.host.versions.values())
        if not self.host.settings.require_all and not loading and len(waiting) < len(states):
            return []
        missing = self.host.missing if self.host.settings.require_all else ()
        return [*missing, *(f"model {state.name!r} version {state.version}: {state.reason}" for state in waiting)]

    def progress(self) -> Progress:
        """Return whether work goes on, over all versions. May be called from any thread."""
        runs, waiting_rows, since = 0, 0, []
        for hosted in list(self.host.versions.values()):
            if hosted.batcher is not None:
                one = hosted.batcher.progress()
                runs += one.runs
                waiting_rows += one.waiting_rows
                if one.running_since_s is not None:
                    since.append(one.running_since_s)
        return Progress(runs, min(since, default=None), waiting_rows)

    async def close(self, *, timeout_s: float = 30.0) -> None:
        """Take nothing new, finish what was taken (for at most `timeout_s`), free the models."""
        await self.host.close(timeout_s=timeout_s)

    def _renew(self) -> None:
        if self._generation == self.host.generation:
            return
        self._generation = self.host.generation
        self._picks = {}
        order = sorted(self.host.versions.items(), key=lambda item: (item[0][0], by_version(item[0][1])))
        self._states = tuple(_state(hosted) for _, hosted in order)


def _state(hosted: Hosted) -> VersionState:
    card = hosted.card
    return VersionState(
        name=hosted.artifact.name,
        version=hosted.artifact.version,
        platform=card.platform if card is not None else "",
        signature=card.signature if card is not None else None,
        ready=hosted.ready,
        reason=hosted.reason,
        updated_at_ms=card.created_at_ms if card is not None else None,
    )
