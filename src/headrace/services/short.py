"""The door of the short road: a predictor, and nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.errors import DeadlineExceeded, ModelUnavailable
from headrace.models.predictor import Predictor, VersionState
from headrace.services.door import Accepted, Call, ModelState
from headrace.telemetry.trace import parse_traceparent
from headrace.tensor import InferAnswer, InferRequest

__all__ = ["ShortRoad"]


class ShortRoad:
    """Answers requests at once (`door.Door`)."""

    def __init__(self, predictor: Predictor) -> None:
        """Put a predictor behind the door."""
        self._predictor = predictor
        self._seen: Sequence[VersionState] = ()
        self._states: tuple[ModelState, ...] = ()
        self._index: dict[tuple[str, str], ModelState] = {}

    @property
    def requests(self) -> None:
        """Return None: nothing is accepted for later."""
        return

    def models(self) -> Sequence[ModelState]:
        """Return every version; the same object until something changes."""
        seen = self._predictor.models()
        if seen is not self._seen:
            self._states = tuple(
                ModelState(s.name, s.version, s.platform, s.signature, s.ready, s.reason, s.updated_at_ms) for s in seen
            )
            self._index = {(state.name, state.version): state for state in self._states}
            self._seen = seen
        return self._states

    def model(self, name: str, version: str | None = None) -> ModelState:
        """Return a version, or the one that would be picked. Raises ModelNotFound, VersionNotFound."""
        states = self.models()
        found = None if version is None else self._index.get((name, version))
        if found is not None:
            return found
        try:
            hosted = self._predictor.pick(name, version)
        except ModelUnavailable:
            # Known and not ready: shown with its reason, the highest version where none was asked for.
            return next(state for state in reversed(states) if state.name == name)
        return self._index[name, hosted.artifact.version]

    def ready(self) -> Sequence[str]:
        """Return the reasons for not being ready; empty means ready."""
        return self._predictor.ready()

    async def answer(self, request: InferRequest, call: Call) -> InferAnswer | Accepted:
        """Run a request. Raises HeadraceError. Cancelling it drops what has not started."""
        pending = self._predictor.submit(request, parse_traceparent(call.traceparent, call.tracestate))
        call.model_version = pending.version
        try:
            if call.deadline_s is None:
                return await pending
            async with asyncio.timeout(call.deadline_s):
                return await pending
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            call.queue_time_ms = pending.queue_time_ms
