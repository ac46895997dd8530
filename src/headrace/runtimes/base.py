"""The runtime port: one loaded artifact that turns named tensors into named tensors.

The comments are the contract; `headrace.testing.RuntimeSuite` checks them. A runtime is called from one thread at
a time unless it declares `concurrent`. It may assume that inputs passed `Signature.check`; it translates every
exception of its library into `ModelLoadFailed`, `ModelFailed` or `OutOfMemory`.
"""

from __future__ import annotations

import re
import resource
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.errors import ModelFailed, ModelLoadFailed, OutOfMemory, text_of
from headrace.tensor import Signature, Tensor

__all__ = [
    "SAVED_MODEL",
    "Artifact",
    "GivenCard",
    "Runtime",
    "WrongRows",
    "load_failed",
    "no_device",
    "out_of_memory",
    "plain",
]

#: The file that makes a folder a SavedModel of TensorFlow.
SAVED_MODEL = "saved_model.pb"

#: Two steps of an absolute path or more; a single `/x` is more often a division or a node's name.
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":,;()<>]+/)+([^\s/'\":,;()<>]*)")


@dataclass(frozen=True, slots=True)
class GivenCard:
    """What its owner says of an artifact, in files beside it: what the artifact itself cannot say."""

    #: What it takes and gives, for formats that do not say it, or do not say all of it.
    signature: Signature | None = None
    #: Inputs that it can be run with, by name, in the order in which it takes them.
    example: Mapping[str, Tensor] | None = None
    #: Where it runs; "" where the card says nothing and the setting holds.
    device: str = ""
    #: Whether a model that keeps state from one run to the next is served all the same.
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class Artifact:
    """What to load: a file or directory, or `module:callable` for the python runtime."""

    name: str
    version: str
    runtime: str
    #: None for the python runtime.
    path: Path | None
    #: `package.module:callable` for the python runtime.
    entry: str | None = None
    #: Digest of the files (python: of the source file): with name and version it says which weights these are.
    digest: str = ""
    #: Where the file names in errors start, and outside which nothing is read; None: the folder of `path`. For
    #: python, the folder in which modules are looked for first.
    root: Path | None = None
    #: Where it shall run: `auto`, `cpu`, `cuda` or `cuda:N`.
    device: str = "auto"
    #: What the files beside it say of it.
    given: GivenCard = field(default=GivenCard(), compare=False, repr=False)

    @property
    def shown(self) -> str:
        """Return the file as errors may name it: relative to the model's root; the entry for python."""
        if self.path is None:
            return self.entry or self.name
        return str(self.path.relative_to(self.root)) if self.root else self.path.name


class WrongRows(ModelFailed):
    """The model returned another number of rows than it was given, so nobody can say whose are whose."""


class Runtime(ABC):
    """A loaded model."""

    #: Names the OIP `platform`, e.g. `onnx_onnxv1`.
    platform: str
    #: What the model takes and gives, read from the artifact.
    signature: Signature
    #: True if `run` may be called from several threads at once.
    concurrent: bool = False
    #: True if how long `run` takes depends on shapes alone, so that what was measured at warm-up holds.
    steady: bool = False
    #: Where it runs: `cpu` or `cuda:N`.
    device: str = "cpu"

    @classmethod
    @abstractmethod
    def load(cls, artifact: Artifact, *, threads: int) -> Runtime:
        """Load an artifact. Raises ModelLoadFailed naming the file (relative), the reason and what was expected.

        A device that was asked for and is not there is such a failure, never a silent CPU.
        """

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Compute the named outputs. Raises ModelFailed or OutOfMemory (allocated, available, tensor)."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and threads. Idempotent."""


def plain(said: object, *, length_max: int = 200) -> str:
    """Return a foreign message as a caller may read it: one line, short, absolute paths cut to their last part."""
    line = _PATH.sub(r"\1", " ".join(text_of(said).split()))
    return line if len(line) <= length_max else line[: length_max - 1] + "…"


def load_failed(artifact: Artifact, reason: str, expected: Sequence[str]) -> ModelLoadFailed:
    """Return the error that says which file cannot be loaded, why, and what was expected."""
    reason = plain(reason, length_max=300)
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {artifact.shown}: {reason}",
        details={"file": artifact.shown, "reason": reason, "expected": list(expected)},
    )


def no_device(artifact: Artifact, there: Sequence[str], why: str = "") -> ModelLoadFailed:
    """Return the error for a device that was asked for and is not `there`."""
    hint = f"; {why}" if why else ""
    reason = f"it shall run on {artifact.device}, and there is only {', '.join(there)}{hint}"
    return load_failed(artifact, reason, there)


def out_of_memory(allocated: int | None, tensor: str | None, *, available: int | None = None) -> OutOfMemory:
    """Return the error that says how much was asked for, how much this process could have had, and for what.

    `available` is that of the device; None is the machine's memory, which is measured here.
    """
    return OutOfMemory(
        f"{allocated if allocated is not None else 'more'} bytes were needed and not to be had",
        details={
            "allocated": allocated,
            "available": _memory_available() if available is None else available,
            "tensor": tensor,
        },
    )


def _memory_available() -> int:
    """Return the least of what the machine, the container and the process's own limit leave."""
    found = [int(psutil.virtual_memory().available)]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text()
        found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no container, or "max"
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        found.append(limit_bytes - int(psutil.Process().memory_info().vms))
    return max(0, min(found))
