"""The files beside an artifact in which its owner says what the artifact itself does not.

`model.card.json` beside `model.pt` (in the folder, for a SavedModel):

    {"signature": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}], "outputs": […]},
     "device": "cuda:0", "stateful": false}

`model.example.json` (a request of the Open Inference Protocol) or `model.example.npz` (numpy arrays by name) is one
example input. All of them are optional. Nothing is unpickled: an npz that holds Python objects is refused.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import HeadraceError
from headrace.runtimes.base import SAVED_MODEL, Artifact, GivenCard, load_failed
from headrace.tensor import Signature, Tensor, decode_request

__all__ = ["DEVICE", "card_files", "read_card"]

#: How a device is named.
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")

_CARD_EXAMPLE = """{"signature": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}], "outputs": […]}}"""


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    signature: dict[str, Any] | None = None
    device: str = ""
    stateful: bool = False


def card_files(path: Path) -> list[Path]:
    """Return where the card and the examples of an artifact may stand, in the order card, JSON, npz."""
    stem = "model" if path.name == SAVED_MODEL else path.stem
    return [path.parent / f"{stem}{ending}" for ending in (".card.json", ".example.json", ".example.npz")]


def read_card(artifact: Artifact) -> GivenCard:
    """Read what stands beside an artifact; an empty card where nothing does. Raises ModelLoadFailed."""
    if artifact.path is None:
        return GivenCard()
    card, as_json, as_npz = card_files(artifact.path)
    form = _Form()
    signature = None
    content = _content(artifact, card)
    if content is not None:
        try:
            form = msgspec.json.decode(content, type=_Form)
            signature = Signature.from_json(form.signature) if form.signature is not None else None
        except (msgspec.MsgspecError, HeadraceError) as error:
            raise load_failed(artifact, f"{card.name} is not a card: {error}", [_CARD_EXAMPLE]) from error
        if form.device and not DEVICE.fullmatch(form.device):
            reason = f"{card.name} names the device {form.device[:40]!r}"
            raise load_failed(artifact, reason, ["auto", "cpu", "cuda", "cuda:0"])
    return GivenCard(signature, _example(artifact, as_json, as_npz), form.device, form.stateful)


def _example(artifact: Artifact, as_json: Path, as_npz: Path) -> Mapping[str, Tensor] | None:
    content = _content(artifact, as_json)
    if content is not None:
        try:
            return decode_request(content).inputs
        except HeadraceError as error:
            reason = f"{as_json.name} is not a request: {error}"
            expected = ['{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}']
            raise load_failed(artifact, reason, expected) from error
    if not as_npz.is_file():
        return None
    try:
        with np.load(as_npz, allow_pickle=False) as arrays:
            return {name: Tensor.of(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, HeadraceError) as error:
        reason = f"{as_npz.name} is not a file of plain arrays: {error}"
        raise load_failed(artifact, reason, [f"{as_npz.name}, written by numpy.savez(…, x=array)"]) from error


def _content(artifact: Artifact, file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise load_failed(artifact, f"{file.name} cannot be read: {error.strerror}", [file.name]) from error
