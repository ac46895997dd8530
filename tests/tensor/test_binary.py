from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidValue, ShapeMismatch
from headrace.tensor import Datatype, Tensor, tensor_from_bytes, tensor_to_bytes
from tensor.tensors import tensors


@given(tensors(), st.integers(0, 8))
def test_every_bit_survives_wherever_the_bytes_lie(tensor: Tensor, offset: int) -> None:
    data = tensor_to_bytes(tensor)
    view = memoryview(b"#" * offset + data)[offset:]
    again = tensor_from_bytes("x", tensor.datatype, tensor.shape, view)
    assert again == tensor
    assert again.array.flags.aligned
    assert again.array.flags.c_contiguous


def test_the_bytes_are_those_of_the_protocol() -> None:
    assert tensor_to_bytes(Tensor.of(np.float32([1.5]))) == struct.pack("<f", 1.5)
    assert tensor_to_bytes(Tensor.of(np.array([True, False]))) == b"\1\0"
    assert tensor_to_bytes(Tensor.of(np.array([[1], [-2]], dtype=np.int16))) == struct.pack("<hh", 1, -2)
    assert tensor_to_bytes(Tensor.of(["a", "猫"])) == b"\1\0\0\0a\3\0\0\0" + "猫".encode()
    half = Tensor.of(np.array([1.5], dtype=Datatype.BF16.numpy))
    # BF16 is the upper half of a float32.
    assert tensor_to_bytes(half) == struct.pack("<f", 1.5)[2:]


@given(tensors(), st.binary(min_size=1, max_size=9))
def test_leftover_and_missing_bytes_are_refused(tensor: Tensor, more: bytes) -> None:
    data = tensor_to_bytes(tensor)
    for wrong in (data + more, data[:-1]):
        if wrong != data:
            with pytest.raises(ShapeMismatch) as caught:
                tensor_from_bytes("x", tensor.datatype, tensor.shape, wrong)
            assert caught.value.details["input"] == "x"


@pytest.mark.parametrize("shape", [(-1, 3), (0, -3), (2**62, 4), (2**63,), (0, 2**62, 4), (1,) * 300])
@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES])
def test_an_impossible_shape_is_refused(shape: tuple[int, ...], datatype: Datatype) -> None:
    with pytest.raises(ShapeMismatch):
        tensor_from_bytes("x", datatype, shape, b"\0" * 12)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES, Datatype.BOOL])
def test_a_shape_beyond_the_bytes_is_refused_before_anything_is_allocated(datatype: Datatype) -> None:
    with pytest.raises(ShapeMismatch):
        tensor_from_bytes("x", datatype, (2**40,), b"\0" * 12)


def test_a_byte_that_is_no_bool_is_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        tensor_from_bytes("flag", Datatype.BOOL, (3,), b"\0\1\2")
    assert caught.value.details == {"input": "flag", "expected": "BOOL", "actual": "2"}


@given(st.binary(max_size=40), st.integers(0, 6))
def test_arbitrary_bytes_are_elements_or_a_typed_error(data: bytes, count: int) -> None:
    try:
        tensor = tensor_from_bytes("x", Datatype.BYTES, (count,), data)
    except HeadraceError:
        return
    assert tensor_to_bytes(tensor) == data


def test_a_length_that_points_behind_the_end_is_refused() -> None:
    with pytest.raises(ShapeMismatch):
        tensor_from_bytes("x", Datatype.BYTES, (2,), b"\1\0\0\0a\xff\xff\xff\xff")


def test_aligned_bytes_are_not_copied() -> None:
    data = tensor_to_bytes(Tensor.of(np.arange(1000, dtype=np.float64)))
    assert not tensor_from_bytes("x", Datatype.FP64, (1000,), data).array.flags.owndata
