"""Tensor data as bytes: little-endian, row-major, no padding; BYTES elements follow their 32-bit length."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from headrace.errors import InvalidValue, TooLarge
from headrace.tensor.datatypes import Datatype, Tensor, clip, size_of
from headrace.tensor.refusals import refuse_declared, refuse_size

__all__ = ["tensor_from_bytes", "tensor_to_bytes"]

_LENGTH = struct.Struct("<I")
_ELEMENT_BYTES_MAX = 2**32 - 1


def tensor_from_bytes(
    name: str,
    datatype: Datatype,
    shape: Sequence[int],
    data: bytes | bytearray | memoryview,
    *,
    kind: str = "input",
) -> Tensor:
    """Read one tensor that fills `data`, without a copy where its bytes lie aligned (it is read-only then).

    Raises ShapeMismatch where the bytes are not those of this shape and InvalidValue for a BOOL other than 0
    or 1; each names the input. Nothing is allocated before the size is checked.
    """
    count = size_of(shape, datatype)
    if count is None:
        refuse_declared(name, shape, kind)
    if datatype is Datatype.BYTES:
        return _read_elements(name, tuple(shape), count, data, kind)
    size, wanted = len(data), count * datatype.numpy.itemsize
    if size != wanted:
        refuse_size(name, shape, datatype, wanted, size, kind)
    array = np.frombuffer(data, dtype=datatype.numpy).reshape(shape)
    if datatype is Datatype.BOOL and size and int(array.view(np.uint8).max()) > 1:
        raise InvalidValue(
            f"{kind} {clip(name)!r}: a byte other than 0 and 1 is not BOOL",
            details={kind: clip(name), "expected": "BOOL", "actual": str(int(array.view(np.uint8).max()))},
        )
    return Tensor(datatype, array if array.flags.aligned else array.copy())


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Return the tensor's bytes, bit for bit. Raises TooLarge for a BYTES element of 4 GiB or more."""
    if tensor.datatype is not Datatype.BYTES:
        return tensor.array.tobytes()
    parts: list[bytes] = []
    for item in tensor.array.ravel().tolist():
        if len(item) > _ELEMENT_BYTES_MAX:
            raise TooLarge("an element of a BYTES tensor is longer than its 32-bit length can say")
        parts.append(_LENGTH.pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def _read_elements(
    name: str, shape: tuple[int, ...], count: int, data: bytes | bytearray | memoryview, kind: str
) -> Tensor:
    size = len(data)
    if count * _LENGTH.size > size:
        refuse_size(name, shape, Datatype.BYTES, f"at least {count * _LENGTH.size}", size, kind)
    view = memoryview(data)
    held = np.empty(count, dtype=object)
    at = 0
    for index in range(count):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(view, at)[0] if start <= size else size + 1
        if at > size:
            refuse_size(name, shape, Datatype.BYTES, f"the {count} elements to end", size, kind)
        held[index] = bytes(view[start:at])
    if at != size:
        refuse_size(name, shape, Datatype.BYTES, at, size, kind)
    return Tensor(Datatype.BYTES, held.reshape(shape))
