"""Long JSON data goes another way; it must give and refuse the same."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.errors import HeadraceError, InvalidValue, ShapeMismatch
from headrace.tensor import Datatype, tensor_from_json, values

MEBI = 1 << 20


@pytest.fixture
def _always_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BULK_BYTES_MIN", 0)
    monkeypatch.setattr("headrace.tensor.bulk._PIECE_BYTES", 7)


def outcome(datatype: Datatype, shape: Any, data: bytes | msgspec.Raw) -> Any:
    try:
        return tensor_from_json("x", datatype, shape, data)
    except HeadraceError as error:
        return type(error)


@pytest.mark.usefixtures("_always_bulk")
@given(
    array=npst.arrays(np.int64, npst.array_shapes(min_dims=1, max_dims=4, max_side=5)),
    indent=st.sampled_from([None, 1]),
    datatype=st.sampled_from([Datatype.INT64, Datatype.FP64, Datatype.INT8, Datatype.UINT64]),
    declare=st.sampled_from(["same", "none", "flat", "other"]),
)
def test_whole_arrays_are_read_and_refused_as_short_data_is(
    array: Any, indent: int | None, datatype: Datatype, declare: str
) -> None:
    data = array.ravel().tolist() if declare == "flat" else array.tolist()
    shape = {"same": array.shape, "none": None, "flat": array.shape, "other": (*array.shape, 2)}[declare]
    text = json.dumps(data, indent=indent).encode()
    bulk, short = outcome(datatype, shape, msgspec.Raw(text)), outcome(datatype, shape, text)
    # Where two things are wrong, which one is told first may differ.
    assert bulk == short or (isinstance(bulk, type) and isinstance(short, type))


ANYTHING = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@pytest.mark.usefixtures("_always_bulk")
@given(data=st.lists(ANYTHING, max_size=4), shape=st.sampled_from([None, (1,), (2,), (1, 1), (2, 2), (3,)]))
def test_any_json_list_is_taken_or_refused_as_short_data_is(data: Any, shape: Any) -> None:
    text = json.dumps(data).encode()
    short, bulk = outcome(Datatype.FP64, shape, text), outcome(Datatype.FP64, shape, msgspec.Raw(text))
    if isinstance(short, type) or isinstance(bulk, type):
        # Which of several faults is told first may differ; and long data may not hold empty lists.
        assert isinstance(bulk, type)
        assert isinstance(short, type) or 0 in short.shape
    else:
        assert bulk == short


@pytest.mark.parametrize(
    ("text", "error", "details"),
    [
        (b"[1,2,null,4]", InvalidValue, {"actual": "null", "index": [2]}),
        (b'[1,"7, [8]",3]', InvalidValue, {"actual": '"7, [8]"', "index": [1]}),
        (b"[1, true ,3]", InvalidValue, {"actual": "true", "index": [1]}),
        (b'[1,{"a":2},3]', InvalidValue, {"actual": "an object", "index": [1]}),
        (b"[1,2,3,4,5,6,7,8,9.5]", InvalidValue, {"actual": "9.5", "index": [8]}),
        (b"[1,2,3,4,5,6,7,8,300]", InvalidValue, {"actual": "300", "index": [8]}),
        (b"[1,2,3,4,5,6,7,1%b]" % (b"0" * 30), InvalidValue, {"actual": "1" + "0" * 30, "index": [7]}),
        (b"[[1,2],[3]]", ShapeMismatch, {"expected": "lists of one length"}),
        (b"[[1,2],3]", ShapeMismatch, {"expected": "lists of one length"}),
        (b"[[[1],[2]],[[3]]]", ShapeMismatch, {"expected": "lists of one length"}),
        (b"[[1],[]]", ShapeMismatch, {"actual": "an empty list"}),
        (b"[[1],[%b],[2]]" % (b" " * 20), ShapeMismatch, {"actual": "an empty list"}),
        (b"[%b]" % (b" " * 20), ShapeMismatch, {"actual": "an empty list"}),
        (b"[]", ShapeMismatch, {"actual": "an empty list"}),
    ],
)
@pytest.mark.usefixtures("_always_bulk")
def test_a_refusal_in_long_data_names_value_and_place(
    text: bytes, error: type[HeadraceError], details: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        tensor_from_json("x", Datatype.INT8, None, msgspec.Raw(text))
    assert caught.value.details.items() >= {"input": "x", **details}.items()


@pytest.mark.usefixtures("_always_bulk")
def test_long_data_of_another_count_is_refused_with_both_counts() -> None:
    with pytest.raises(ShapeMismatch) as caught:
        tensor_from_json("x", Datatype.FP32, (2, 2), msgspec.Raw(b"[1,2,3]"))
    assert (caught.value.details["declared_count"], caught.value.details["received_count"]) == (4, 3)
    with pytest.raises(ShapeMismatch) as caught:
        tensor_from_json("x", Datatype.FP32, (3, 2), msgspec.Raw(b"[[1,2,3],[4,5,6]]"))
    assert caught.value.details["actual"] == [2, 3]


@pytest.mark.parametrize(
    ("element", "outer"), [(b"0", b"%b"), (b"0", b"[%b]"), (b"[0]", b"%b")], ids=["flat", "row", "column"]
)
def test_reading_costs_a_few_times_the_body_however_short_its_numbers_are(element: bytes, outer: bytes) -> None:
    count = 4 * MEBI // (len(element) + 1)
    text = outer % (b"[%b]" % b",".join([element] * count))
    data = msgspec.Raw(text)
    tracemalloc.start()
    try:
        tensor = tensor_from_json("x", Datatype.FP32, None, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tensor.array.size == count
    # Decoded at once it is 32 bytes a number: 64 MiB for flat data, more with a list around each.
    assert peak < 8 * len(text)
