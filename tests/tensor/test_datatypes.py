from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from headrace.errors import DtypeMismatch, InvalidValue
from headrace.tensor import Datatype, Tensor


def test_every_datatype_of_the_protocol_has_its_size() -> None:
    sizes = {str(datatype): datatype.itemsize for datatype in Datatype}
    assert sizes == {
        "BOOL": 1,
        "UINT8": 1,
        "UINT16": 2,
        "UINT32": 4,
        "UINT64": 8,
        "INT8": 1,
        "INT16": 2,
        "INT32": 4,
        "INT64": 8,
        "FP16": 2,
        "FP32": 4,
        "FP64": 8,
        "BF16": 2,
        "BYTES": None,
    }
    assert Datatype.BF16.numpy == ml_dtypes.bfloat16
    assert Datatype("FP32") is Datatype.FP32


@pytest.mark.parametrize("datatype", [d for d in Datatype if d is not Datatype.BYTES])
def test_an_array_of_each_datatype_is_taken_as_it_is(datatype: Datatype) -> None:
    tensor = Tensor.of(np.zeros((2, 3), dtype=datatype.numpy))
    assert (tensor.datatype, tensor.shape, tensor.rows) == (datatype, (2, 3), 2)


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["crème", "猫🐈"]),
        np.array(["crème".encode(), "猫🐈".encode()]),
        np.array(["crème", "猫🐈"], dtype=object),
        np.array(["crème".encode(), "猫🐈".encode()], dtype=object),
        np.array(["crème", "猫🐈"], dtype=np.dtypes.StringDType()),
        ["crème", "猫🐈"],
    ],
    ids=["U", "S", "object of str", "object of bytes", "StringDType", "list"],
)
def test_text_in_any_numpy_form_becomes_the_same_bytes(labels: object) -> None:
    tensor = Tensor.of(labels)
    assert tensor.datatype is Datatype.BYTES
    assert tensor.array.dtype == object
    assert tensor.array.tolist() == ["crème".encode(), "猫🐈".encode()]


def test_a_label_keeps_its_embedded_nul() -> None:
    assert Tensor.of(np.array(["a\0b"])).array.tolist() == [b"a\0b"]
    assert Tensor.of(np.array([b"a\0b", b"a\0"], dtype=object)).array.tolist() == [b"a\0b", b"a\0"]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, dtype=complex),
        np.zeros(2, dtype="M8[s]"),
        np.array([1, "a"], dtype=object),
        np.array([None], dtype=object),
        np.zeros(2, dtype=[("a", "f4")]),
        [[1, 2], [3]],
    ],
    ids=["complex", "date", "mixed", "None", "record", "ragged"],
)
def test_what_has_no_datatype_is_refused(array: object) -> None:
    with pytest.raises(DtypeMismatch):
        Tensor.of(array)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidValue):
        Tensor.of(np.array(["\ud800"], dtype=object))


def test_another_datatype_than_the_wanted_one_is_refused_not_converted() -> None:
    with pytest.raises(DtypeMismatch) as caught:
        Tensor.of(np.zeros(2), Datatype.FP32)
    assert caught.value.details == {"expected": "FP32", "actual": "FP64"}
    assert Tensor.of(np.zeros(2, np.float32), Datatype.FP32).datatype is Datatype.FP32


def test_foreign_byte_order_and_strides_are_made_plain() -> None:
    tensor = Tensor.of(np.arange(6, dtype=">i4").reshape(2, 3).T)
    assert tensor.array.dtype == np.dtype("int32")
    assert tensor.array.flags.c_contiguous
    assert tensor.array.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_scalar_stays_a_scalar_of_one_row() -> None:
    tensor = Tensor.of(np.float32(1.5))
    assert (tensor.shape, tensor.rows) == ((), 1)


def test_equality_is_of_bits() -> None:
    nan = Tensor.of(np.array([np.nan, 0.0]))
    assert nan == Tensor.of(np.array([np.nan, 0.0]))
    assert nan != Tensor.of(np.array([np.nan, -0.0]))
    assert Tensor.of(np.zeros(4)) != Tensor.of(np.zeros((2, 2)))
    assert Tensor.of(np.zeros(4)) != Tensor.of(np.zeros(4, np.float32))
    assert Tensor.of(["a"]) == Tensor.of([b"a"])
    assert Tensor.of(["a"]) != Tensor.of(["b"])
    assert Tensor.of(["a"]) != "a"
