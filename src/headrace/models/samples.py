"""Requests that lie beside a model to warm it up with, where inputs made up from its signature would not do.

`samples.json` in a version's folder, `NAME.samples.json` beside a bare file `NAME.onnx`: one Open Inference Protocol
request in JSON, or a list of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.errors import HeadraceError, ModelLoadFailed
from headrace.runtimes import Artifact
from headrace.tensor import Signature, Tensor, decode_request

__all__ = ["samples_of"]

_COUNT_MAX = 100


def samples_of(artifact: Artifact, signature: Signature) -> list[dict[str, Tensor]]:
    """Return the inputs of each sample; none where there is no file. Raises ModelLoadFailed for one that is wrong."""
    path = _path_of(artifact)
    if path is None:
        return []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _wrong(artifact, path, f"it cannot be read: {error.strerror}") from error
    found = []
    for number, body in enumerate(_parts(content), 1):
        try:
            request = decode_request(body, None, model=artifact.name, signature=signature)
            signature.check(request.inputs)
        except HeadraceError as error:
            raise _wrong(artifact, path, f"sample {number}: {error.message}") from error
        found.append(request.inputs)
    return found


def _parts(content: bytes) -> list[bytes]:
    try:
        parts = msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return [content]  # one request; what else it may be is told when it is read
    return [bytes(part) for part in parts[:_COUNT_MAX]]


def _path_of(artifact: Artifact) -> Path | None:
    path = artifact.path
    if path is None:
        return None
    folder = path.parent
    if artifact.root is not None and folder != artifact.root:
        return folder / "samples.json"
    return folder / f"{path.stem}.samples.json"


def _wrong(artifact: Artifact, path: Path, reason: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {path.name}: {reason}",
        details={"file": path.name, "reason": reason, "expected": ["an Open Inference Protocol request, or a list"]},
    )
