"""Long numeric JSON data, read in pieces: memory stays near that of the body, whatever a caller sends.

Decoding a body of "0,0,0,…" at once makes a Python object of every two bytes, sixteen times the body. Here the
nesting is checked on the text alone (what is left without digits must be what the shape would be written as),
and then the numbers are decoded into the array a piece at a time.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import msgspec
import numpy as np
from msgspec import Raw

from headrace.tensor.datatypes import Array, Datatype
from headrace.tensor.refusals import (
    bounds,
    literal_of,
    refuse_count,
    refuse_nesting,
    refuse_value,
)

__all__ = ["BULK_BYTES_MIN", "read_bulk"]

#: Shorter data is decoded at once, which is simpler and as fast.
BULK_BYTES_MIN = 1 << 18
_PIECE_BYTES = 1 << 17

_NUMBERS = b"0123456789+-.eE \t\r\n"
_UNBRACKET = bytes.maketrans(b"[]", b"  ")
_NO_NUMBER = re.compile(rb"[^0-9+\-.eE,\[\] \t\r\n]")
_LITERAL = re.compile(rb'"[^"]*"?|[^,\]\s]+')
_INDEX = re.compile(r" - at `\$\[(\d+)\]`$")


def read_bulk(
    name: str,
    datatype: Datatype,
    declared: tuple[int, ...] | None,
    data: Raw,
    depth: int,
    decoder: msgspec.json.Decoder[list[Any]],
    kind: str,
) -> Array:
    """Return the array of well-formed JSON `data` that is `depth` lists deep; refuses like `tensor_from_json`.

    `decoder` reads a flat list of the datatype. Places in refusals are flat, as is their count.
    """
    text = bytes(data)
    skeleton = text.translate(None, _NUMBERS)
    if skeleton.translate(None, b"[],"):
        _refuse_foreign(name, datatype, text, kind)
    shape = declared
    if declared is None or depth != 1:
        shape = _shape_of(skeleton, depth)
        if shape is None:
            refuse_nesting(name, kind, "data is ragged", "lists of one length", "lists of several")
    assert shape is not None
    count = skeleton.count(b",") + 1
    if count != math.prod(shape) or (declared is not None and shape != declared):
        refuse_count(name, declared or shape, None if depth == 1 else shape, count, kind)
    flat = np.empty(count, dtype=datatype.numpy)
    text = text.translate(_UNBRACKET)
    done = at = 0
    while at <= len(text):
        end = text.find(b",", at + _PIECE_BYTES)
        end = len(text) if end < 0 else end
        values = _read_piece(name, datatype, text[at:end], done, decoder, kind)
        flat[done : done + len(values)] = values
        done += len(values)
        at = end + 1
    return flat.reshape(shape)


def _read_piece(
    name: str,
    datatype: Datatype,
    piece: bytes,
    done: int,
    decoder: msgspec.json.Decoder[list[Any]],
    kind: str,
) -> Array:
    text = b"[%b]" % piece
    try:
        values = decoder.decode(text)
        if len(values) != piece.count(b",") + 1:
            _refuse_empty(name, kind)
        return np.array(values, dtype=datatype.numpy)
    except OverflowError:
        low, high = bounds(datatype)
        index, value = next((i, v) for i, v in enumerate(values) if not low <= v <= high)
        refuse_value(name, datatype, literal_of(value), [done + index], kind)
    except msgspec.ValidationError as error:
        found = _INDEX.search(str(error))
        index = int(found.group(1)) if found else 0
        literal = literal_of(msgspec.json.decode(text, type=list[Raw])[index])
        refuse_value(name, datatype, literal, [done + index], kind)
    except msgspec.DecodeError:
        # The whole was well-formed, so a number that is not there is all that can be wrong.
        _refuse_empty(name, kind)


def _shape_of(skeleton: bytes, depth: int) -> tuple[int, ...] | None:
    """Return the shape whose brackets and commas these are, None where the lists are ragged."""
    shape: list[int] = []
    inner = 1
    for level in range(1, depth + 1):
        # Before the first place where `level` lists end together stands one whole list of that level.
        end = skeleton.find(b"]" * level)
        count = skeleton.count(b",", 0, max(end, 0)) + 1
        if end < 0 or count % inner:
            return None
        shape.insert(0, count // inner)
        inner = count
    written = b""
    for length in reversed(shape):
        written = b"[%b%b]" % ((written + b",") * (length - 1), written)
    return tuple(shape) if written == skeleton else None


def _refuse_empty(name: str, kind: str) -> NoReturn:
    refuse_nesting(name, kind, "data is ragged", "no empty list in data of this length", "an empty list")


def _refuse_foreign(name: str, datatype: Datatype, text: bytes, kind: str) -> NoReturn:
    found = _NO_NUMBER.search(text)
    assert found is not None
    start = found.start()
    literal = _LITERAL.match(text, start)
    refuse_value(name, datatype, literal_of(literal.group() if literal else b""), [text.count(b",", 0, start)], kind)
