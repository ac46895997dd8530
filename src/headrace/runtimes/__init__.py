"""The libraries that run artifacts. To add one: a file, a row here, a conformance class."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

from headrace.errors import ModelLoadFailed
from headrace.runtimes.base import (
    SAVED_MODEL,
    Artifact,
    GivenCard,
    Runtime,
    WrongRows,
    load_failed,
    out_of_memory,
    plain,
)
from headrace.runtimes.beside import DEVICE, card_files, read_card

__all__ = [
    "DEVICE",
    "RUNTIMES",
    "SAVED_MODEL",
    "Artifact",
    "GivenCard",
    "Row",
    "Runtime",
    "WrongRows",
    "card_files",
    "load_runtime",
    "out_of_memory",
    "plain",
]


@dataclass(frozen=True, slots=True)
class Row:
    """Where a runtime lives and which files are its own."""

    module: str
    name: str
    #: Endings of its files; none for the python runtime, whose artifacts are no files.
    endings: tuple[str, ...]
    #: What has to be installed, as pip takes it; "" where nothing has to.
    requirement: str = ""
    #: A module whose `look(artifact)` refuses files of another kind without the library; "" where there is none.
    look: str = ""


RUNTIMES: dict[str, Row] = {
    "onnx": Row("headrace.runtimes.onnx", "OnnxRuntime", (".onnx",), "headrace[onnx]"),
    "python": Row("headrace.runtimes.python", "PythonRuntime", ()),
    "tensorflow": Row(
        "headrace.runtimes.tensorflow",
        "TensorflowRuntime",
        (".pb",),
        "headrace[tensorflow]",
        "headrace.runtimes.tensorflow_files",
    ),
    "torchscript": Row(
        "headrace.runtimes.torchscript",
        "TorchscriptRuntime",
        (".pt", ".pth", ".jit"),
        "headrace[torch]",
        "headrace.runtimes.torchscript_files",
    ),
}


def load_runtime(artifact: Artifact, *, threads: int, device: str = "auto") -> Runtime:
    """Load an artifact with the runtime that it names. Raises ModelLoadFailed, nothing else.

    `device` is where it runs unless the card beside it says another. The library is imported here, so that a process
    that runs no model (or another kind) does not pay for it, and only for a file that is of its kind at all.
    """
    row = RUNTIMES.get(artifact.runtime)
    if row is None:
        raise _refused(artifact, f"there is no runtime {artifact.runtime!r}; known are {sorted(RUNTIMES)}")
    given = read_card(artifact)
    artifact = replace(artifact, given=given, device=given.device or device)
    if row.look:
        importlib.import_module(row.look).look(artifact)
    try:
        runtime: type[Runtime] = getattr(importlib.import_module(row.module), row.name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if not row.requirement or missing == "headrace":
            raise
        raise _refused(
            artifact, f"{missing or row.name} is not installed; run: pip install '{row.requirement}'"
        ) from error
    loaded = runtime.load(artifact, threads=threads)
    if given.signature is not None and given.signature.digest != loaded.signature.digest:
        said = loaded.signature.to_json()
        loaded.close()
        raise load_failed(artifact, "the card beside it declares another signature than its own", [str(said)])
    return loaded


def _refused(artifact: Artifact, reason: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {reason}", details={"file": artifact.shown, "reason": reason}
    )
