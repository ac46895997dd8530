"""The datatypes of the Open Inference Protocol, and a tensor of one of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import DtypeMismatch, InvalidValue

__all__ = [
    "DIMENSIONS_MAX",
    "FLOATS",
    "Array",
    "Datatype",
    "Tensor",
    "clip",
    "datatype_named",
    "size_of",
]

Array = npt.NDArray[Any]

#: The most dimensions a tensor may have; what every runtime and numpy 1 can hold.
DIMENSIONS_MAX = 32

_BYTES_MAX = 2**63 - 1


class Datatype(enum.Enum):
    """A datatype by its name on the wire; `numpy` is how its values are held, `itemsize` is in bytes."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    #: Held as an object array of `bytes`.
    BYTES = "BYTES"

    # Plain attributes, not properties: they are read several times for every request.
    numpy: np.dtype[Any]
    #: None for BYTES, whose elements vary in length.
    itemsize: int | None

    def __str__(self) -> str:
        return str(self._value_)

    # Enum's own is written in Python, and members are keys on the hot path.
    __hash__ = object.__hash__


_NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": np.object_,
}
for _datatype in Datatype:
    _datatype.numpy = np.dtype(_NUMPY[_datatype.value])
    _datatype.itemsize = None if _datatype is Datatype.BYTES else _datatype.numpy.itemsize

#: The datatypes that hold NaN and Infinity.
FLOATS = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16})

_BY_NAME = {datatype.value: datatype for datatype in Datatype}
_BY_NUMPY: dict[np.dtype[Any], Datatype] = {
    datatype.numpy: datatype for datatype in Datatype if datatype is not Datatype.BYTES
}


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """Values of one datatype in a C-contiguous array, which may be read-only: nobody writes into it.

    `array.dtype` is `datatype.numpy`; a BYTES tensor is an object array of `bytes`. Two tensors are equal
    when datatype, shape and every bit agree (so NaN equals itself, and -0.0 is not 0.0).
    """

    datatype: Datatype
    array: Array

    @classmethod
    def of(cls, array: npt.ArrayLike, datatype: Datatype | None = None) -> Tensor:
        """Make a tensor of any numpy array: text and bytes (`U`, `S`, object) become BYTES.

        Raises DtypeMismatch for what has no datatype here (complex numbers, dates, mixed objects) and for
        what is not of `datatype` where that is given; nothing is ever converted in value.
        """
        try:
            found = np.asarray(array)
        except ValueError as error:
            raise DtypeMismatch("the values are not rectangular and have no shape") from error
        native = found.dtype.newbyteorder("=") if found.dtype.byteorder in "<>" else found.dtype
        known: Datatype | None = _BY_NUMPY.get(native)
        if known is None:
            known, found = Datatype.BYTES, _as_bytes(found)
        elif native != found.dtype:
            found = found.astype(native)
        if datatype is not None and datatype is not known:
            raise DtypeMismatch(
                f"expected {datatype}, got {known}", details={"expected": str(datatype), "actual": str(known)}
            )
        # Not `ascontiguousarray` for all: it would turn a scalar into a vector.
        return cls(known, found if found.flags.c_contiguous else np.ascontiguousarray(found))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the dimensions, () for a scalar."""
        return self.array.shape

    @property
    def rows(self) -> int:
        """Return the first dimension, or 1 for a scalar."""
        return self.array.shape[0] if self.array.ndim else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        if self.datatype is not other.datatype or self.array.shape != other.array.shape:
            return False
        if self.datatype is Datatype.BYTES:
            return bool(self.array.tolist() == other.array.tolist())
        return self.array.tobytes() == other.array.tobytes()

    __hash__ = None  # type: ignore[assignment]


def datatype_named(name: str, *, of: str, kind: str = "input") -> Datatype:
    """Return the datatype with that wire name; DtypeMismatch names the input and the legal ones."""
    found = _BY_NAME.get(name)
    if found is None:
        raise DtypeMismatch(
            f"{kind} {clip(of)!r}: there is no datatype {clip(name)!r}",
            details={kind: clip(of), "expected": list(_BY_NAME), "actual": clip(name)},
        )
    return found


def size_of(shape: Sequence[int], datatype: Datatype) -> int | None:
    """Return the number of elements of a declared shape; None if no tensor can have it.

    Nothing is allocated. Impossible: a negative dimension, more than DIMENSIONS_MAX of them, or more bytes
    than an address can reach (also where another dimension is 0).
    """
    if len(shape) > DIMENSIONS_MAX:
        return None
    count, reach = 1, datatype.itemsize or 8
    for dimension in shape:
        if dimension < 0:
            return None
        count *= dimension
        reach *= dimension or 1
    return None if reach > _BYTES_MAX else count


def clip(text: str, length_max: int = 64) -> str:
    """Shorten what a caller sent so that it can stand in an error."""
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def _as_bytes(found: Array) -> Array:
    """Return an object array of bytes for any array of text or bytes."""
    if found.dtype.kind not in "USOT":
        raise DtypeMismatch(
            f"numpy {found.dtype} has no datatype in the protocol",
            details={"expected": list(_BY_NAME), "actual": str(found.dtype)},
        )
    flat: list[bytes] = []
    for item in found.ravel().tolist():
        if isinstance(item, bytes):
            flat.append(bytes(item))
        elif isinstance(item, str):
            try:
                flat.append(item.encode())
            except UnicodeEncodeError as error:
                raise InvalidValue("a text holds half a surrogate pair and cannot be UTF-8") from error
        else:
            raise DtypeMismatch(
                f"an array of objects may hold text and bytes, not {type(item).__name__}",
                details={"expected": "BYTES", "actual": type(item).__name__},
            )
    held = np.empty(len(flat), dtype=object)
    held[:] = flat
    return held.reshape(found.shape)
