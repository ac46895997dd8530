"""How bad tensor data is refused: one message and one set of details for each kind of fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
from msgspec import Raw

from headrace.errors import InvalidValue, ShapeMismatch
from headrace.tensor.datatypes import DIMENSIONS_MAX, FLOATS, Datatype, clip

__all__ = [
    "bounds",
    "literal_of",
    "refuse_count",
    "refuse_declared",
    "refuse_nesting",
    "refuse_size",
    "refuse_value",
]

_WANTED = {Datatype.BOOL: "true or false", Datatype.BYTES: "a string"}
_LITERAL_LENGTH_MAX = 40


def bounds(datatype: Datatype) -> tuple[int, int]:
    """Return the smallest and largest value of a whole-number datatype."""
    info = np.iinfo(datatype.numpy)
    return int(info.min), int(info.max)


def literal_of(value: Any) -> str:
    """Return a value as JSON writes it, clipped; lists and objects only by their kind."""
    if isinstance(value, Raw | bytes):
        text = bytes(memoryview(value)[: _LITERAL_LENGTH_MAX * 4 + 4]).strip().decode(errors="replace")
    elif isinstance(value, list | tuple | dict):
        text = "{" if isinstance(value, dict) else "["
    elif not isinstance(value, bool | int | float | str | None):
        return type(value).__name__
    else:
        try:
            text = msgspec.json.encode(value).decode()
        except UnicodeEncodeError:
            text = "a string with half a surrogate pair"
    if text.startswith("{"):
        return "an object"
    return "a list" if text.startswith("[") else clip(text, _LITERAL_LENGTH_MAX)


def refuse_value(name: str, datatype: Datatype, literal: str, place: Sequence[int], kind: str) -> NoReturn:
    """Raise InvalidValue for one value of the data; `place` is its index."""
    wanted = _WANTED.get(datatype)
    if wanted is None and datatype in FLOATS:
        wanted = "a finite number in range"
    elif wanted is None:
        wanted = "a whole number from {} to {}".format(*bounds(datatype))
    raise InvalidValue(
        f"{kind} {clip(name)!r}: {literal} is not {datatype} ({wanted})",
        details={kind: clip(name), "expected": str(datatype), "actual": literal, "index": list(place)},
    )


def refuse_nesting(name: str, kind: str, what: str, expected: str, actual: str) -> NoReturn:
    """Raise ShapeMismatch for lists that are no tensor."""
    raise ShapeMismatch(
        f"{kind} {clip(name)!r}: {what}; expected {expected}, got {actual}",
        details={kind: clip(name), "expected": expected, "actual": actual},
    )


def refuse_declared(name: str, shape: Sequence[int], kind: str) -> NoReturn:
    """Raise ShapeMismatch for a shape that `size_of` calls impossible."""
    few = len(shape) <= DIMENSIONS_MAX
    raise ShapeMismatch(
        f"{kind} {clip(name)!r}: no tensor has {f'shape {list(shape)}' if few else f'{len(shape)} dimensions'}",
        details={
            kind: clip(name),
            "expected": f"at most {DIMENSIONS_MAX} dimensions, none negative, and at most 2^63-1 bytes",
            "actual": list(shape) if few else f"{len(shape)} dimensions",
        },
    )


def refuse_count(
    name: str, declared: tuple[int, ...], received: tuple[int, ...] | None, count: int, kind: str
) -> NoReturn:
    """Raise ShapeMismatch for data of another count or nesting than its shape; `received` None: unknown."""
    wanted = math.prod(declared)
    shown = "" if received is None else f" with shape {list(received)}"
    raise ShapeMismatch(
        f"{kind} {clip(name)!r}: shape {list(declared)} declares a count of {wanted}, received {count}{shown}",
        details={
            kind: clip(name),
            "expected": list(declared),
            "actual": None if received is None else list(received),
            "declared_count": wanted,
            "received_count": count,
        },
    )


def refuse_size(
    name: str, shape: Sequence[int], datatype: Datatype, expected: int | str, actual: int, kind: str
) -> NoReturn:
    """Raise ShapeMismatch for binary data of another size than its shape."""
    raise ShapeMismatch(
        f"{kind} {clip(name)!r}: {datatype} of shape {list(shape)} takes {expected} bytes, received {actual}",
        details={kind: clip(name), "expected": expected, "actual": actual, "shape": list(shape)},
    )
