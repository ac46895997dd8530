"""The runtime port: one loaded artifact that turns named tensors into named tensors.

The comments are the contract; `headrace.testing.RuntimeSuite` checks them. A runtime is called from one thread at
a time unless it declares `concurrent`. It may assume that inputs passed `Signature.check`; it translates every
exception of its library into `ModelLoadFailed`, `ModelFailed` or `OutOfMemory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.tensor import Signature, Tensor

__all__ = ["Artifact", "Runtime"]


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
    #: Digest of the files ("" for python): with name and version it says which weights these are.
    digest: str = ""


class Runtime(ABC):
    """A loaded model."""

    #: Names the OIP `platform`, e.g. `onnx_onnxv1`.
    platform: str
    #: What the model takes and gives, read from the artifact.
    signature: Signature
    #: True if `run` may be called from several threads at once.
    concurrent: bool = False

    @classmethod
    @abstractmethod
    def load(cls, artifact: Artifact, *, threads: int) -> Runtime:
        """Load an artifact. Raises ModelLoadFailed naming the file (relative), the reason and what was expected."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Compute the named outputs. Raises ModelFailed or OutOfMemory (allocated, available, tensor)."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and threads. Idempotent."""
