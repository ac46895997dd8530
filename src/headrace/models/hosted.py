"""One version in a process, and the settings by which versions are loaded, run and evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from headrace.errors import HeadraceError
from headrace.models.batcher import Batcher
from headrace.models.cards import Card
from headrace.models.process_runner import ProcessRunner
from headrace.models.warm import Warm
from headrace.runtimes import DEVICE, Artifact, Runtime
from headrace.settings import setting

__all__ = ["RUNNERS", "Hosted", "ModelSettings"]

#: What `model.runner` may be.
RUNNERS = ("auto", "inline", "thread", "process")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How models are loaded and run."""

    section: ClassVar[str] = "model"

    threads: int = setting(
        0, "Threads that one run may use; 0: the CPU quota, divided among processes and models.", min=0, max=1024
    )
    device: str = setting(
        "auto",
        "Where models run: `auto` (a GPU if its runtime finds one), `cpu`, `cuda` or `cuda:N`; what is named must be "
        "there. The card beside a model goes before it.",
    )
    runner: str = setting(
        "auto",
        "Where models run; `auto` measures at warm-up. `process` counts for `serve` alone: `inference` is a process "
        "of its own already.",
        choices=RUNNERS,
    )
    processes: tuple[str, ...] = setting(
        (),
        "Models (`NAME` or `NAME/VERSION`) that run in processes of their own, whatever `runner` says; `serve` only.",
    )
    runners: int = setting(
        1,
        "Batches of one version that may run at a time: threads where its runtime allows it, else (`serve` only) "
        "processes.",
        min=1,
        max=256,
    )
    run_s_max: float = setting(
        300.0, "A runner's process that runs one batch for longer is killed and started again.", min=0.1
    )
    restart_wait_s: float = setting(
        5.0,
        "While a version's only runner is started again, requests wait for it so long at most; then, and until it is "
        "back, they are answered 503.",
        min=0,
    )
    require_all: bool = setting(True, "Whether one model that failed to load makes the service not ready.")
    links: bool = setting(False, "Whether links may lead out of a model's folder.")
    memory_bytes_max: int = setting(
        0,
        "Memory that the loaded versions of one host may take; 0: 80 % of what the container, or else the machine, "
        "has, divided among the inference processes.",
        min=0,
    )
    idle_ttl_s: float = setting(
        600.0, "A version unused for so long is evicted when memory is short; the next request loads it again.", min=0
    )
    pinned: tuple[str, ...] = setting((), "Models (`NAME` or `NAME/VERSION`) that are never evicted.")

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what one field alone cannot tell."""
        if not DEVICE.fullmatch(self.device):
            yield "device", "wanted auto, cpu, cuda or cuda:N"

    def names(self, listed: tuple[str, ...], artifact: Artifact) -> bool:
        """Return whether an artifact is among those listed."""
        return artifact.name in listed or f"{artifact.name}/{artifact.version}" in listed


@dataclass(slots=True, eq=False)
class Hosted:
    """One version in this process."""

    artifact: Artifact
    #: `evicted`: freed to make room, and loaded again by the next request, which waits in its batcher meanwhile.
    state: Literal["loading", "ready", "evicted", "failed", "unloaded"] = "loading"
    card: Card | None = None
    batcher: Batcher | None = None
    error: HeadraceError | None = None
    runtime: Runtime | None = field(default=None, repr=False)
    warm: Warm | None = None
    #: Its runners' processes; none where it runs in this one.
    crew: list[ProcessRunner] = field(default_factory=list, repr=False)
    #: Why none of its runners can run now; "" where one can.
    outage: str = ""
    pinned: bool = False
    #: Measured when it was loaded; 0 while it is not.
    memory_bytes: int = 0
    #: What it took when it was loaded last: so much is wanted for it again.
    wanted_bytes: int = 0
    loaded_s: float = 0.0

    @property
    def serves(self) -> bool:
        """Return whether a request to it is taken; it may have to wait until the version is loaded again."""
        return self.state in ("ready", "evicted")

    @property
    def ready(self) -> bool:
        """Return whether it counts as ready: an evicted version does, one without a living runner does not."""
        return self.serves and not self.outage

    @property
    def reason(self) -> str:
        """Return why it cannot answer, for people; "" when it is ready."""
        if self.serves:
            return self.outage
        return self.error.message if self.error is not None else f"it is {self.state}"

    @property
    def busy(self) -> bool:
        """Return whether somebody waits for it."""
        return self.batcher is not None and bool(self.batcher.running or self.batcher.waiting_rows)

    @property
    def used_s(self) -> float:
        """Return when it was last asked, in the clock's monotonic seconds; when it was loaded if it never was."""
        return max(self.loaded_s, self.batcher.used_s if self.batcher is not None else 0.0)
