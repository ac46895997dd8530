"""The catalog: which models requests may name, read from the cards of those who loaded them. No ML library."""

from __future__ import annotations

from headrace.errors import ModelNotFound, VersionNotFound
from headrace.models.cards import Card, CardBook
from headrace.models.registry import Resolution, by_version, is_name
from headrace.services.door import ModelState

__all__ = ["Catalog"]


class Catalog:
    """The versions that are known, with their signatures and their readiness."""

    def __init__(self, book: CardBook, required: Resolution | None = None, *, require_all: bool = True) -> None:
        """Know nothing until the first `refresh`.

        `required` are the models that were asked for: each must have the card of a successful load of the files as
        they are now. None takes every card there is.
        """
        self._book, self._required, self._require_all = book, required, require_all
        self._states: tuple[ModelState, ...] = ()
        self._faults: tuple[str, ...] = ()
        self._index: dict[tuple[str, str | None], ModelState] = {}

    @property
    def refused(self) -> dict[str, str]:
        """Return the cards that cannot be read, with the reasons."""
        return self._book.refused

    def refresh(self) -> bool:
        """Look again; return whether anything changed. Reads files, so call it on a thread."""
        self._book.refresh()
        states = self._look()
        if states == self._states and self._index:
            return False
        index: dict[tuple[str, str | None], ModelState] = {}
        for state in states:
            index[state.name, state.version] = state
            # The highest version that is ready is picked, as the predictor does; else the highest.
            picked = index.get((state.name, None))
            if picked is None or state.ready or not picked.ready:
                index[state.name, None] = state
        # One assignment each: the event loop reads them while this runs on a thread.
        self._index, self._states = index, states
        return True

    def models(self) -> tuple[ModelState, ...]:
        """Return every version by name and version; the same object until something changes."""
        return self._states

    def model(self, name: str, version: str | None = None) -> ModelState:
        """Return a version, or the one that would be picked. Raises ModelNotFound, VersionNotFound."""
        found = self._index.get((name, version))
        if found is not None:
            return found
        versions = [state.version for state in self._states if state.name == name]
        if versions:
            raise VersionNotFound(
                f"model {name!r} has no such version; it has {versions}",
                details={"model": name, "expected": versions},
            )
        names = sorted({state.name for state in self._states})
        shown = f" {name!r}" if is_name(name) else ""
        raise ModelNotFound(f"there is no model{shown}; there are {names}", details={"expected": names})

    def names(self) -> list[str]:
        """Return the names of the models."""
        return sorted({state.name for state in self._states})

    def reasons(self) -> list[str]:
        """Return why the models are not ready; empty means that they are."""
        waiting = [state for state in self._states if not state.ready]
        reasons = [f"model {state.name!r} version {state.version}: {state.reason}" for state in waiting]
        reasons += self._faults
        if len(waiting) == len(self._states):
            # True also of no model at all: a list without entries must not be "all ready".
            return reasons or ["no model is loaded"]
        return reasons if self._require_all else []

    def _look(self) -> tuple[ModelState, ...]:
        if self._required is None:
            states = [_state(card) for card in self._book.cards().values()]
        else:
            states = []
            for artifact in self._required.artifacts:
                card = self._book.current(artifact)
                if card is None:
                    states.append(ModelState(artifact.name, artifact.version, "", None, False, "it is not loaded yet"))
                else:
                    states.append(_state(card))
            self._faults = tuple(
                f"model {fault.name!r}: {fault.error.message}" if fault.name else fault.error.message
                for fault in self._required.faults
            )
        return tuple(sorted(states, key=lambda state: (state.name, by_version(state.version))))


def _state(card: Card) -> ModelState:
    ready = card.signature is not None and card.error is None
    return ModelState(
        name=card.name,
        version=card.version,
        platform=card.platform,
        signature=card.signature,
        ready=ready,
        reason="" if ready else card.reason or "it did not load",
        updated_at_ms=card.created_at_ms,
    )
