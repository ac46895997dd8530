"""Tensor data in JSON: exact integers, ranges checked, nothing coerced, every refusal with its place.

Rules that hold on every wire: NaN and Infinity are `null` in JSON that we write (the count still equals the
shape) and keep their bits in the binary form; a `null` in what we read is refused. FP16 and BF16 are numbers.
BYTES are strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Meta, Raw

from headrace.errors import HeadraceError, InvalidJson, InvalidValue
from headrace.tensor.bulk import BULK_BYTES_MIN, read_bulk
from headrace.tensor.datatypes import DIMENSIONS_MAX, FLOATS, Array, Datatype, Tensor, clip, size_of
from headrace.tensor.refusals import (
    bounds,
    literal_of,
    refuse_count,
    refuse_declared,
    refuse_nesting,
    refuse_value,
)

__all__ = ["tensor_from_json", "tensor_in_object", "tensor_to_json", "widened"]

#: Above these a number would round to Infinity: half a step beyond the largest finite value.
_LIMITS = {Datatype.FP16: 65520.0, Datatype.FP32: 2.0**128 - 2.0**103, Datatype.BF16: 2.0**128 - 2.0**119 - 2.0**103}

_OPENING = re.compile(rb"[\[ \t\r\n]*")
_PATH = re.compile(r" - at `\$((?:\[\d+\])*)`$")
#: Written as words or strings; long data of these is no burden.
_WORDS = frozenset({Datatype.BOOL, Datatype.BYTES})
_NAN = float("nan")


def tensor_from_json(
    name: str,
    datatype: Datatype,
    shape: Sequence[int] | None,
    data: Any,
    *,
    kind: str = "input",
    null_is_nan: bool = False,
) -> Tensor:
    """Read flat row-major or nested JSON data, given as decoded values or as JSON text (`bytes` or `Raw`).

    With `shape` None the nesting is the shape. Raises InvalidValue (a value that is not of the datatype or is
    out of its range), ShapeMismatch (count or nesting) or InvalidJson; each names the input.
    `null_is_nan` is for reading answers back.
    """
    text = isinstance(data, Raw | bytes)
    depth = _depth_of_text(data) if text else _depth_of_values(data)
    declared = None if shape is None else tuple(shape)
    if declared is not None and size_of(declared, datatype) is None:
        refuse_declared(name, declared, kind)
    if depth > DIMENSIONS_MAX:
        refuse_nesting(name, kind, "data is nested too deeply", f"at most {DIMENSIONS_MAX} levels", "more")
    nullable = null_is_nan and datatype in FLOATS
    if type(data) is Raw and depth and not nullable and datatype not in _WORDS and len(data) >= BULK_BYTES_MIN:
        one = _decoder(datatype, 1, False)
        return Tensor(datatype, read_bulk(name, datatype, declared, data, depth, one, kind))
    try:
        if text:
            values = _decoder(datatype, depth, nullable).decode(data)
        else:
            values = msgspec.convert(data, _type(datatype, depth, nullable))
    except msgspec.ValidationError as error:
        _explain(name, datatype, data, depth, str(error), kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"{kind} {clip(name)!r}: the data is not valid JSON") from error
    return _tensor_of(name, datatype, declared, values, depth, kind, nullable)


def _tensor_of(
    name: str, datatype: Datatype, declared: tuple[int, ...] | None, values: Any, depth: int, kind: str, nullable: bool
) -> Tensor:
    """Return decoded values of the right types as a tensor, if their nesting is even and their count right."""
    received, flat = _flatten(name, values, depth, kind)
    if nullable:
        flat = [_NAN if value is None else value for value in flat]
    if declared is None:
        declared = received
    elif received != declared and not _fits(received, declared, len(flat), datatype):
        refuse_count(name, declared, received, len(flat), kind)
    return Tensor(datatype, _array(name, datatype, flat, kind).reshape(declared))


def tensor_in_object(name: str, datatype: Datatype, rank: int, member: bytes) -> Callable[[bytes], Tensor | None]:
    """Return a reader of `{"<member>": <nested data of that rank>, …}` that does it in one pass.

    It returns None for whatever is not the usual case, bad input included: what is wrong with it, the careful way
    (`tensor_from_json`) says. Bytes must be ASCII.
    """
    if datatype in _WORDS:
        return lambda body: None
    fields = [("found", _type(datatype, rank, False))]
    body_of = msgspec.defstruct("Body", fields, rename={"found": member.decode()})
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(body_of).decode

    def read(body: bytes) -> Tensor | None:
        if len(body) >= BULK_BYTES_MIN:
            return None
        try:
            tensor = _tensor_of(name, datatype, None, decode(body).found, rank, "input", False)
        except (msgspec.DecodeError, RecursionError, HeadraceError):
            return None
        # Empty lists do not show how deep they were meant to be.
        return tensor if tensor.array.size else None

    return read


def widened(array: Array) -> Array:
    """Return BF16 as float32, bit for bit; a cast would warn of signalling NaN."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def tensor_to_json(tensor: Tensor, *, flat: bool = False, name: str = "", kind: str = "output") -> Any:
    """Return nested (or flat row-major) lists; NaN and Infinity become None.

    Raises InvalidValue, saying that the binary form is needed, for BYTES that are not UTF-8.
    """
    array = tensor.array
    if tensor.datatype is Datatype.BYTES:
        array = _as_text(name, array, kind)
    elif tensor.datatype in FLOATS:
        if tensor.datatype is Datatype.BF16:
            array = widened(array)
        finite = np.isfinite(array)
        if not finite.all():
            array = array.astype(object)
            array[~finite] = None
    return array.ravel().tolist() if flat else array.tolist()


# -- reading ------------------------------------------------------------------------------------------------


def _leaf(datatype: Datatype) -> Any:
    if datatype is Datatype.BYTES:
        return str
    if datatype is Datatype.BOOL:
        return bool
    if datatype in FLOATS:
        limit = _LIMITS.get(datatype)
        return float if limit is None else Annotated[float, Meta(gt=-limit, lt=limit)]
    # Whole numbers beyond 64 bits are not seen by these bounds; numpy refuses them.
    if datatype is Datatype.UINT64:
        return Annotated[int, Meta(ge=0)]
    low, high = bounds(datatype)
    return Annotated[int, Meta(ge=low, le=high)]


_LIST = msgspec.json.Decoder(list[Raw])
_TYPES: dict[tuple[Datatype, int, bool], Any] = {}
_DECODERS: dict[tuple[Datatype, int, bool], msgspec.json.Decoder[Any]] = {}


def _type(datatype: Datatype, depth: int, nullable: bool) -> Any:
    found = _TYPES.get((datatype, depth, nullable))
    if found is None:
        found = _leaf(datatype)
        if nullable:
            found = found | None
        for _ in range(depth):
            found = GenericAlias(list, (found,))
        _TYPES[datatype, depth, nullable] = found
    return found


def _decoder(datatype: Datatype, depth: int, nullable: bool) -> msgspec.json.Decoder[Any]:
    found = _DECODERS.get((datatype, depth, nullable))
    if found is None:
        found = msgspec.json.Decoder(_type(datatype, depth, nullable))
        _DECODERS[datatype, depth, nullable] = found
    return found


def _depth_of_text(data: Raw | bytes) -> int:
    opening = _OPENING.match(data)
    return opening.group().count(b"[") if opening else 0


def _depth_of_values(data: Any) -> int:
    depth = 0
    while isinstance(data, list | tuple) and depth <= DIMENSIONS_MAX:
        depth += 1
        if not data:
            break
        data = data[0]
    return depth


def _flatten(name: str, values: Any, depth: int, kind: str) -> tuple[tuple[int, ...], list[Any]]:
    if depth == 0:
        return (), [values]
    shape = [len(values)]
    for _ in range(depth - 1):
        lengths = {len(part) for part in values}
        if len(lengths) > 1:
            low, high = min(lengths), max(lengths)
            refuse_nesting(
                name, kind, "data is ragged", "lists of one length", f"lists of {low} and of {high} elements"
            )
        shape.append(lengths.pop() if lengths else 0)
        values = list(chain.from_iterable(values))
    return tuple(shape), values


def _fits(received: tuple[int, ...], declared: tuple[int, ...], count: int, datatype: Datatype) -> bool:
    """Flat data needs the right count; nested data cannot show what is below empty lists."""
    if len(received) == 1:
        return count == size_of(declared, datatype)
    return count == 0 and 0 in received and declared[: len(received)] == received


def _array(name: str, datatype: Datatype, flat: list[Any], kind: str) -> Array:
    if datatype is Datatype.BYTES:
        held = np.empty(len(flat), dtype=object)
        try:
            held[:] = [text.encode() for text in flat]
        except UnicodeEncodeError as error:
            raise InvalidValue(
                f"{kind} {clip(name)!r}: a string holds half a surrogate pair and cannot be UTF-8",
                details={kind: clip(name), "expected": "BYTES"},
            ) from error
        return held
    try:
        return np.array(flat, dtype=datatype.numpy)
    except OverflowError:
        low, high = bounds(datatype)
        place, value = next((i, v) for i, v in enumerate(flat) if not low <= v <= high)
        refuse_value(name, datatype, literal_of(value), [place], kind)


# -- refusing -----------------------------------------------------------------------------------------------


def _explain(name: str, datatype: Datatype, data: Any, depth: int, reason: str, kind: str) -> NoReturn:
    """Find the value that was refused by the path in the decoder's message."""
    found = _PATH.search(reason)
    place = [int(index) for index in re.findall(r"\d+", found.group(1))] if found else []
    try:
        for index in place:
            data = _LIST.decode(data)[index] if isinstance(data, Raw | bytes) else data[index]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"{kind} {clip(name)!r}: the data is not valid JSON, or nested too deeply") from error
    literal = literal_of(data)
    above = len(place) < depth and literal not in ("null", "an object")
    if above or literal == "a list":
        refuse_nesting(
            name, kind, "data is ragged", f"values nested {depth} deep", f"{literal} at {place or 'the top'}"
        )
    refuse_value(name, datatype, literal, place, kind)


# -- writing ------------------------------------------------------------------------------------------------


def _as_text(name: str, array: Array, kind: str) -> Array:
    held = np.empty(array.size, dtype=object)
    try:
        held[:] = [item.decode() for item in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"{kind} {clip(name)!r} holds bytes that are not UTF-8; ask for it in binary form (binary_data)",
            details={kind: clip(name), "expected": "UTF-8 text", "actual": "other bytes"},
        ) from error
    return held.reshape(array.shape)
