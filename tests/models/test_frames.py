"""What crosses between a runner's process and its parent: bit for bit, and nothing that was not sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.errors import Internal, InvalidValue, ModelFailed, OutOfMemory
from headrace.models.frames import Failure, Placed, Region, Run, failure_of, receive, send
from headrace.runtimes import WrongRows
from headrace.tensor import Tensor


@pytest.fixture
def both() -> Iterator[tuple[Region, Region]]:
    """One region, as the one who writes and the one who reads have it."""
    import os

    writer = Region()
    reader = Region(os.dup(writer.fd))
    yield writer, reader
    writer.close()
    reader.close()


ARRAYS: dict[str, Any] = {
    "floats": np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32),
    "halves": np.array([1, 2, 3], np.float16),
    "brain": np.array([[1.0, -2.5]], ml_dtypes.bfloat16),
    "bools": np.array([True, False, True]),
    "wide": np.array([2**64 - 1, 0], np.uint64),
    "scalar": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "text": np.array([[b"", b"\xff\0"], ["crème".encode(), b"x" * 5000]], object),
    "no text": np.zeros((0,), object),
}


@pytest.mark.parametrize("copy", [True, False])
def test_every_kind_of_tensor_crosses_bit_for_bit(both: tuple[Region, Region], copy: bool) -> None:
    writer, reader = both
    given = {name: Tensor.of(array) for name, array in ARRAYS.items()}
    placed = writer.write(given)
    assert reader.read(placed, writer.size, copy=copy) == given


def test_a_copy_outlives_the_next_run_and_a_view_cannot_be_written(both: tuple[Region, Region]) -> None:
    writer, reader = both
    first = Tensor.of(np.arange(5, dtype=np.float32))
    kept = reader.read(writer.write({"x": first}), writer.size, copy=True)["x"]
    placed = writer.write({"x": Tensor.of(np.full(5, 9, np.float32))})
    view = reader.read(placed, writer.size, copy=False)["x"]
    assert kept == first
    with pytest.raises(ValueError, match="read-only"):
        view.array[0] = 1


def test_a_region_grows_to_what_it_holds_and_shrinks_again(both: tuple[Region, Region]) -> None:
    writer, reader = both
    sizes = []
    for count in (10, 30_000_000, 10, 1000):
        tensor = Tensor.of(np.arange(count, dtype=np.uint8))
        found = reader.read(writer.write({"x": tensor}), writer.size, copy=True)["x"]
        assert found == tensor
        sizes.append(writer.size)
    assert sizes[1] >= 30_000_000 and sizes[2] < 1_000_000


@pytest.mark.parametrize(
    "place",
    [
        Placed("x", "FP32", (4,), 1 << 20, 16),
        Placed("x", "FP32", (4,), -16, 16),
        Placed("x", "FP32", (5,), 0, 16),
        Placed("x", "FP99", (4,), 0, 16),
        Placed("x", "FP32", (-4,), 0, 16),
        Placed("x", "BYTES", (4,), 0, 16),
    ],
)
def test_a_place_that_cannot_be_is_refused(both: tuple[Region, Region], place: Placed) -> None:
    writer, reader = both
    writer.write({"x": Tensor.of(np.full(4, 9, np.float32))})
    with pytest.raises(Internal):
        reader.read([place], writer.size, copy=True)


def test_frames_come_whole_and_in_order_and_the_end_is_an_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        send(one, Run([Placed("x", "FP32", (1, 3), 64, 12)], ["y"], 65536))
        send(one, Failure("internal", "x" * 100_000, {}, ""))
        first, second = receive(other), receive(other)
        assert first == Run([Placed("x", "FP32", (1, 3), 64, 12)], ["y"], 65536)
        assert isinstance(second, Failure) and len(second.message) == 100_000
        one.sendall(b"\x09\0")
        one.close()
        with pytest.raises(EOFError):
            receive(other)


@pytest.mark.parametrize(
    "error",
    [
        ModelFailed("broken", details={"output": "y", "actual": [1, 2]}),
        WrongRows("three rows"),
        OutOfMemory("none left", details={"allocated": 5, "available": 1, "tensor": None}),
        InvalidValue("not a word", details={"input": "x", "seen": np.int64(3)}),
    ],
)
def test_an_error_is_the_same_error_on_the_other_side(error: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        send(one, failure_of(error, "Traceback: in models.py"))
        said = receive(other)
    assert isinstance(said, Failure)
    found = said.error()
    assert type(found) is type(error) and found.message == error.message
    assert found.details == error.details
    assert "in models.py" in str(found.__cause__)
