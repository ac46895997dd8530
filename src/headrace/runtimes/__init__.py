"""The libraries that run artifacts. To add one: a file, a row here, a conformance class."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from headrace.errors import ModelLoadFailed
from headrace.runtimes.base import Artifact, Runtime, WrongRows, out_of_memory, plain

__all__ = ["RUNTIMES", "Artifact", "Row", "Runtime", "WrongRows", "load_runtime", "out_of_memory", "plain"]


@dataclass(frozen=True, slots=True)
class Row:
    """Where a runtime lives and which files are its own."""

    module: str
    name: str
    #: Endings of its files; none for the python runtime, whose artifacts are no files.
    endings: tuple[str, ...]
    #: What has to be installed, as pip takes it; "" where nothing has to.
    requirement: str = ""


RUNTIMES: dict[str, Row] = {
    "onnx": Row("headrace.runtimes.onnx", "OnnxRuntime", (".onnx",), "headrace[onnx]"),
    "python": Row("headrace.runtimes.python", "PythonRuntime", ()),
}


def load_runtime(artifact: Artifact, *, threads: int) -> Runtime:
    """Load an artifact with the runtime that it names. Raises ModelLoadFailed, nothing else.

    The library is imported here, so that a process that runs no model (or another kind) does not pay for it.
    """
    row = RUNTIMES.get(artifact.runtime)
    if row is None:
        raise _refused(artifact, f"there is no runtime {artifact.runtime!r}; known are {sorted(RUNTIMES)}")
    try:
        runtime: type[Runtime] = getattr(importlib.import_module(row.module), row.name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if not row.requirement or missing == "headrace":
            raise
        raise _refused(
            artifact, f"{missing or row.name} is not installed; run: pip install '{row.requirement}'"
        ) from error
    return runtime.load(artifact, threads=threads)


def _refused(artifact: Artifact, reason: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {reason}", details={"file": artifact.shown, "reason": reason}
    )
