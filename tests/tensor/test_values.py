"""JSON data of tensors: what is taken exactly, what is refused, and with which words."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidJson, InvalidValue, ShapeMismatch
from headrace.tensor import Datatype, Tensor, tensor_from_json, tensor_to_json
from tensor.tensors import FLOATS, is_finite, tensors

INTS = [d for d in Datatype if d.value.lstrip("U").startswith("INT")]


def both(name: str, datatype: Datatype, shape: Any, data: Any) -> Tensor:
    """Read decoded values and JSON text; the two must agree, in what they give and in what they refuse."""
    text = json.dumps(data).encode()
    try:
        tensor = tensor_from_json(name, datatype, shape, data)
    except HeadraceError as error:
        with pytest.raises(type(error)) as caught:
            tensor_from_json(name, datatype, shape, text)
        # Numbers are told as they were written, which differs between the two only in spelling.
        assert caught.value.details.get("index") == error.details.get("index")
        raise
    assert tensor_from_json(name, datatype, shape, text) == tensor
    assert tensor_from_json(name, datatype, shape, msgspec.Raw(text)) == tensor
    return tensor


# -- round trips --------------------------------------------------------------------------------------------


@given(tensors(finite=True, text=True))
def test_what_is_written_is_read_back_bit_for_bit(tensor: Tensor) -> None:
    for flat in (True, False):
        written = json.dumps(tensor_to_json(tensor, flat=flat), allow_nan=False).encode()
        assert tensor_from_json("x", tensor.datatype, tensor.shape, written) == tensor


@given(tensors(finite=True, text=True))
def test_the_shape_is_told_from_the_nesting(tensor: Tensor) -> None:
    if 0 not in tensor.shape:
        assert both("x", tensor.datatype, None, tensor_to_json(tensor)) == tensor


@given(tensors(text=True))
def test_nan_and_infinity_become_null_and_the_count_still_fits(tensor: Tensor) -> None:
    flat = tensor_to_json(tensor, flat=True)
    assert len(flat) == math.prod(tensor.shape)
    json.dumps(flat, allow_nan=False)
    if tensor.datatype in FLOATS:
        finite = is_finite(tensor).ravel().tolist()
        assert [value is not None for value in flat] == finite


@pytest.mark.parametrize("datatype", FLOATS)
def test_null_is_read_as_nan_only_in_answers(datatype: Datatype) -> None:
    tensor = tensor_from_json("y", datatype, [2], b"[null, 1]", kind="output", null_is_nan=True)
    assert np.isnan(tensor.array.astype(np.float64)).tolist() == [True, False]
    with pytest.raises(InvalidValue):
        both("x", datatype, [2], [None, 1])


# -- exact numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", INTS)
def test_the_whole_range_of_a_whole_number_is_exact_and_ends_there(datatype: Datatype) -> None:
    low, high = int(np.iinfo(datatype.numpy).min), int(np.iinfo(datatype.numpy).max)
    assert tensor_to_json(both("x", datatype, [2], [low, high])) == [low, high]
    for bad in (low - 1, high + 1, 10**30, -(10**30)):
        with pytest.raises(InvalidValue) as caught:
            both("x", datatype, [2], [0, bad])
        assert caught.value.details == {
            "input": "x",
            "expected": str(datatype),
            "actual": str(bad),
            "index": [1],
        }


def test_digits_beyond_double_precision_survive() -> None:
    values = [9007199254740993, -9223372036854775808]
    assert tensor_to_json(both("x", Datatype.INT64, [2], values)) == values
    assert tensor_to_json(both("x", Datatype.UINT64, [1], [18446744073709551615])) == [18446744073709551615]


@pytest.mark.parametrize(
    ("datatype", "value", "literal"),
    [
        (Datatype.INT64, 1.5, "1.5"),
        (Datatype.INT64, 1.0, "1.0"),
        (Datatype.INT64, True, "true"),
        (Datatype.INT64, "7", '"7"'),
        (Datatype.INT64, None, "null"),
        (Datatype.UINT64, -1, "-1"),
        (Datatype.INT8, 300, "300"),
        (Datatype.FP32, "1.0", '"1.0"'),
        (Datatype.FP32, True, "true"),
        (Datatype.FP32, None, "null"),
        (Datatype.FP32, {"a": 1}, "an object"),
        (Datatype.BOOL, 1, "1"),
        (Datatype.BOOL, "true", '"true"'),
        (Datatype.BYTES, 1, "1"),
        (Datatype.BYTES, None, "null"),
    ],
)
def test_nothing_is_coerced(datatype: Datatype, value: Any, literal: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        both("temperature", datatype, [1], [value])
    assert caught.value.details["input"] == "temperature"
    assert caught.value.details["expected"] == str(datatype)
    assert caught.value.details["actual"] == literal
    for part in ("temperature", literal, str(datatype)):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("datatype", "fits", "bursts"),
    [
        (Datatype.FP16, 65519.99, 65520.0),
        (Datatype.FP32, 3.4028235677973362e38, 3.4028235677973366e38),
        (Datatype.BF16, 3.3895313892515355e38, 3.3961775292304957e38),
    ],
)
def test_a_number_that_would_become_infinite_is_refused(datatype: Datatype, fits: float, bursts: float) -> None:
    assert is_finite(both("x", datatype, [2], [fits, -fits])).all()
    for bad in (bursts, -bursts):
        with pytest.raises(InvalidValue):
            both("x", datatype, [1], [bad])


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(FLOATS))
def test_a_finite_number_is_taken_as_finite_or_refused(value: float, datatype: Datatype) -> None:
    try:
        tensor = tensor_from_json("x", datatype, [1], [value])
    except InvalidValue:
        return
    assert is_finite(tensor).all()


@pytest.mark.parametrize("literal", [b"1e999", b"-1e999", b"1" * 400])
def test_a_number_beyond_double_range_is_named(literal: bytes) -> None:
    with pytest.raises(InvalidValue) as caught:
        tensor_from_json("x", Datatype.FP64, [2], b"[1, " + literal + b"]")
    assert caught.value.details["index"] == [1]
    assert str(caught.value.details["actual"])[:5] == literal[:5].decode()


@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"1,", b"01", b"+1", b"'a'"])
def test_what_strict_json_lacks_is_not_json(token: bytes) -> None:
    with pytest.raises(InvalidJson):
        tensor_from_json("x", Datatype.FP32, [1], b"[" + token + b"]")


def test_whole_numbers_are_numbers_for_floats() -> None:
    assert both("x", Datatype.FP32, [3], [1, 2, -3]).array.tolist() == [1.0, 2.0, -3.0]


# -- shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "declared", "received"),
    [
        (Datatype.BYTES, [1], ["alpha", "beta"], 1, 2),
        (Datatype.BYTES, [2], ["alpha"], 2, 1),
        (Datatype.FP32, [2, 3], [[1, 2], [3, 4], [5, 6]], 6, 6),
        (Datatype.FP32, [2, 2], [1, 2, 3], 4, 3),
        (Datatype.FP32, [], [], 1, 0),
        (Datatype.FP32, [2], 1, 2, 1),
        (Datatype.FP32, [1, 2, 3], [[1, 2, 3], [4, 5, 6]], 6, 6),
        (Datatype.FP32, [0], [1], 0, 1),
        (Datatype.FP32, [2, 0], [[1], [2]], 0, 2),
        (Datatype.FP32, [3, 0], [[], []], 0, 0),
    ],
)
def test_a_count_or_nesting_other_than_declared_is_refused(
    datatype: Datatype, shape: list[int], data: Any, declared: int, received: int
) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        both("x", datatype, shape, data)
    assert caught.value.details["declared_count"] == declared
    assert caught.value.details["received_count"] == received
    assert str(declared) in caught.value.message
    assert str(received) in caught.value.message


@pytest.mark.parametrize(
    "data",
    [[[1, 2], [3]], [[1, 2], 3], [1, [2, 3]], [[1], [[2]]], [[[1], [2]], [[3]]], [[], [1]], [[1, 2], "ab"]],
)
@pytest.mark.parametrize("shape", [[2, 2], None])
def test_ragged_data_is_refused(data: Any, shape: list[int] | None) -> None:
    with pytest.raises(ShapeMismatch, match="ragged"):
        both("x", Datatype.FP32, shape, data)


@pytest.mark.parametrize(
    "shape",
    [[-1, 3], [0, -3], [4611686018427387904, 4], [2**63], [0, 2**62, 4], [1] * 33, [1] * 300, [-1] * 300],
)
def test_an_impossible_shape_is_refused_without_allocating(shape: list[int]) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        both("x", Datatype.FP32, shape, [1.0, 2.0, 3.0])
    assert caught.value.details["input"] == "x"
    assert "x" in caught.value.message


def test_a_huge_possible_shape_is_refused_by_its_count() -> None:
    with pytest.raises(ShapeMismatch) as caught:
        both("x", Datatype.FP32, [2**40, 2**10], [1.0])
    assert caught.value.details["declared_count"] == 2**50


def test_a_scalar_comes_bare_or_as_a_list_of_one() -> None:
    assert both("x", Datatype.INT64, [], 16000) == both("x", Datatype.INT64, [], [16000])
    assert both("x", Datatype.INT64, None, 5).shape == ()


def test_flat_data_takes_the_declared_shape() -> None:
    assert both("x", Datatype.INT32, [2, 3], [1, 2, 3, 4, 5, 6]).array.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_empty_lists_stand_for_the_dimensions_below_them() -> None:
    assert both("x", Datatype.FP32, [2, 0, 3], [[], []]).shape == (2, 0, 3)
    assert both("x", Datatype.FP32, [0, 3], []).shape == (0, 3)
    assert both("x", Datatype.FP32, None, [[], []]).shape == (2, 0)


# -- hostile ------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_deep_nesting_is_refused_as_text_and_as_values() -> None:
    for bomb in (b"[" * 250_000 + b"]" * 250_000, b"[" * 250_000, b"[1," + b"[" * 250_000):
        with pytest.raises((ShapeMismatch, InvalidJson)):
            tensor_from_json("x", Datatype.FP32, [1], bomb)
    for value in (nested(100_000), [1, nested(100_000)]):
        with pytest.raises(ShapeMismatch):
            tensor_from_json("x", Datatype.FP32, [1], value)
        # Taken apart by hand: the interpreter would unwind it recursively.
        while value:
            value = value.pop()


def test_bytes_that_are_not_text_and_half_characters_are_refused() -> None:
    with pytest.raises(InvalidJson):
        tensor_from_json("x", Datatype.BYTES, [1], b'["\xff"]')
    with pytest.raises(InvalidJson):
        tensor_from_json("x", Datatype.BYTES, [1], b'["\\ud800"]')
    with pytest.raises(InvalidValue):
        tensor_from_json("x", Datatype.BYTES, [1], ["\ud800"])


def test_a_refusal_tells_no_more_than_a_clipped_value() -> None:
    secret = "s" * 10_000
    with pytest.raises(InvalidValue) as caught:
        both(secret, Datatype.INT64, [1], [secret])
    assert len(json.dumps(caught.value.details)) + len(caught.value.message) < 600


@pytest.mark.parametrize("value", [object(), {1, 2}, b"raw", np.float32(1)])
def test_values_that_are_not_json_are_refused(value: object) -> None:
    with pytest.raises(InvalidValue):
        tensor_from_json("x", Datatype.FP32, [1], [value])


def test_output_bytes_that_are_no_text_need_the_binary_form() -> None:
    with pytest.raises(InvalidValue) as caught:
        tensor_to_json(Tensor.of(np.array([b"\xff"], dtype=object)), name="label")
    assert caught.value.details["output"] == "label"
    assert "binary" in caught.value.message
