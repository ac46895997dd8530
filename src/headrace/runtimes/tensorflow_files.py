"""Which of TensorFlow's two formats a `.pb` is; found out from its first bytes, without TensorFlow.

Both are protocol buffers. Their fields (tensorflow/core/protobuf/saved_model.proto and framework/graph.proto):
SavedModel 1 schema version (a number), 2 graphs; GraphDef 1 nodes (messages), 2 library, 3 and 4 versions.
"""

from __future__ import annotations

from typing import Literal

from headrace.errors import ModelLoadFailed
from headrace.runtimes.base import SAVED_MODEL, Artifact, load_failed

__all__ = ["EXPECTED", "kind_of", "look"]

#: What a refusal says was expected.
EXPECTED = (f"a folder with {SAVED_MODEL} and variables/", "model.pb, a frozen graph")

_NUMBER, _MESSAGE = 0, 2
_FIELDS: dict[Literal["saved_model", "frozen"], dict[int, int]] = {
    "saved_model": {1: _NUMBER, 2: _MESSAGE},
    "frozen": {1: _MESSAGE, 2: _MESSAGE, 3: _NUMBER, 4: _MESSAGE, 5: _MESSAGE},
}


class _Cut(Exception):
    """The bytes end in the middle of a field."""


def look(artifact: Artifact) -> None:
    """Refuse what is neither format. Raises ModelLoadFailed with the reason."""
    kind_of(artifact)


def kind_of(artifact: Artifact) -> Literal["saved_model", "frozen"]:
    """Return the format of an artifact's file, whose end is looked at too: one that is cut short is refused.

    Raises ModelLoadFailed, also for a SavedModel's file outside of its folder.
    """
    path = artifact.path
    assert path is not None
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise _refused(artifact, "there is no such file") from error
    except IsADirectoryError as error:
        raise _refused(artifact, f"it is a folder without {SAVED_MODEL}") from error
    except OSError as error:
        raise _refused(artifact, f"it cannot be read: {error.strerror}") from error
    if not content:
        raise _refused(artifact, "the file is empty")
    for kind, fields in _FIELDS.items():
        try:
            seen = _walk(content, fields)
        except _Cut as error:
            raise _refused(artifact, f"it is cut short: the {kind.replace('_', ' ')} ends in the middle") from error
        if not seen:
            continue
        if kind == "saved_model" and path.name != SAVED_MODEL:
            raise _refused(artifact, f"it is the {SAVED_MODEL} of a SavedModel, which is a folder: give the folder")
        if kind == "saved_model" and 2 not in seen:
            raise _refused(artifact, "it is a SavedModel without a graph, or cut short")
        return kind
    raise _refused(artifact, "it is neither a SavedModel nor a frozen graph")


def _walk(content: bytes, fields: dict[int, int]) -> set[int]:
    """Return which fields stand at the top; none where one of them is not of `fields`."""
    seen: set[int] = set()
    place = 0
    while place < len(content):
        try:
            tag, place = _varint(content, place)
            if fields.get(tag >> 3) != tag & 7:
                return set()
            length, place = _varint(content, place)
        except _Cut:
            if not seen:
                return set()
            raise
        if tag & 7 == _MESSAGE:
            place += length
            if place > len(content):
                # The very first field says nothing yet: any text is a tag and a length that is too long.
                if not seen and (content[0] != 0x0A or not _is_node(content)):
                    return set()
                raise _Cut
        seen.add(tag >> 3)
    return seen


def _is_node(content: bytes) -> bool:
    """Return whether the first field is a NodeDef that begins with its name, as every one does."""
    _, place = _varint(content, 1)
    return content[place : place + 1] == b"\x0a"


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            raise _Cut
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _Cut


def _refused(artifact: Artifact, reason: str) -> ModelLoadFailed:
    return load_failed(artifact, reason, EXPECTED)
