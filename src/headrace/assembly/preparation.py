"""The parent's side of the preparation: has every version loaded once in a child, and reads the cards."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.assembly.inference import SKIP
from headrace.assembly.instance import INSTANCE, CannotStart
from headrace.message import ErrorRecord
from headrace.models.cards import Card, CardBook
from headrace.models.digests import stamps_of
from headrace.models.host import ModelSettings
from headrace.models.registry import Resolution, resolve
from headrace.runtimes import Artifact
from headrace.settings import RootSettings, Settings
from headrace.supervise import Child, Supervisor

__all__ = ["Preparation", "Prepared", "child_of"]

_GRACE_S = 5.0

#: Times that a version may take the process that loads it with it. A single SIGKILL may have come from outside.
_DEATHS_MAX = 3


@dataclass(slots=True)
class Prepared:
    """What the preparation found: versions that loaded, and why others did not."""

    good: list[Artifact] = field(default_factory=list)
    #: Shown name → reason.
    broken: dict[str, str] = field(default_factory=dict)
    #: `name/version` of those that inference shall not try again.
    skip: list[str] = field(default_factory=list)


def child_of(service: str, name: str, models: Sequence[str], environ: Mapping[str, str], grace_s: float) -> Child:
    """Return a service as a child of this process; a person with `ps` reads what it is."""
    command = [sys.executable, "-m", "headrace", service, *models]
    return Child(name, service, command, {**environ, INSTANCE: name}, grace_s)


class Preparation:
    """One pass over the models."""

    def __init__(self, settings: Settings, models: Sequence[str], environ: Mapping[str, str]) -> None:
        """`environ` is what children get over our own environment; it says where the cards are written."""
        self._settings, self._models, self._environ = settings, models, environ
        self._loading = ""
        self._seen: set[str] = set()
        self._found: Resolution | None = None
        self._book = CardBook(settings[RootSettings].data)

    def hear(self, word: dict[str, Any]) -> None:
        """Take what the child says."""
        if "loading" in word:
            self._loading = str(word["loading"])
        if "loaded" in word:
            self._seen.add(str(word["loaded"]))

    async def begin(self) -> None:
        """Find the models and take away the cards of earlier loads: nothing is ready before it was loaded anew."""
        settings = self._settings
        found = self._found = await asyncio.to_thread(
            resolve,
            self._models,
            Path(settings[RootSettings].model_path),
            links=settings[ModelSettings].links,
        )
        for artifact in found.artifacts:
            await asyncio.to_thread(self._book.remove, artifact.name, artifact.version)

    async def run(self, supervisor: Supervisor) -> Prepared:
        """Have every version loaded once, whatever it does to its process. Raises CannotStart."""
        if self._found is None:
            await self.begin()
        assert self._found is not None
        by_key = {f"{each.name}/{each.version}": each for each in self._found.artifacts}
        deaths: dict[str, int] = {}
        number = 0
        while len(self._seen) < len(by_key):
            number, self._loading = number + 1, ""
            child = child_of("prepare", f"prepare-{number}", self._models, self._environ, _GRACE_S)
            child.environ[SKIP] = ",".join(sorted(self._seen))
            code, reason = await supervisor.run_once(child)
            if supervisor.stopping.is_set():
                return Prepared()
            if code == 0:
                break
            artifact = by_key.get(self._loading)
            deaths[self._loading] = deaths.get(self._loading, 0) + 1
            if artifact is None and deaths[self._loading] >= _DEATHS_MAX:
                raise CannotStart(f"the models cannot be loaded: {reason}")
            if artifact is not None and deaths[self._loading] >= _DEATHS_MAX:
                await asyncio.to_thread(self._book.write, _broken_card(self._book, artifact, reason))
                self._seen.add(self._loading)
        return await asyncio.to_thread(_read_cards, self._book, self._found)


def _read_cards(book: CardBook, found: Resolution) -> Prepared:
    prepared = Prepared()
    book.refresh()
    for artifact in found.artifacts:
        key = f"{artifact.name}/{artifact.version}"
        card = book.current(artifact)
        if card is not None and card.error is None:
            prepared.good.append(artifact)
        else:
            prepared.broken[key] = card.reason if card is not None else f"{key}: its card cannot be written"
            prepared.skip.append(key)
    for fault in found.faults:
        prepared.broken[fault.name or fault.spec] = fault.error.message
    return prepared


def _broken_card(book: CardBook, artifact: Artifact, reason: str) -> Card:
    message = f"model {artifact.name!r} cannot be loaded: the process that loaded it died ({reason})"
    try:
        stamps, digest = stamps_of(artifact), book.digest(artifact)
    except OSError:
        stamps, digest = (), ""
    details: dict[str, object] = {"file": artifact.shown, "reason": reason, "expected": []}
    return Card(
        name=artifact.name,
        version=artifact.version,
        runtime=artifact.runtime,
        digest=digest,
        files=stamps,
        entry=artifact.entry,
        error=ErrorRecord(code="model_load_failed", message=message, details=details),
    )
