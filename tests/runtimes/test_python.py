"""Callables as models: what they are handed, what they may return, and what is told when they are wrong."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import InvalidValue, ModelFailed, ModelLoadFailed, OutOfMemory
from headrace.runtimes import Artifact, Runtime, WrongRows, load_runtime
from headrace.tensor import Datatype, Tensor

MODULE = "headrace_made_up_models"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType(MODULE)
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


@pytest.fixture
def load(module: types.ModuleType) -> Callable[..., Runtime]:
    def make(target: Any, name: str = "target") -> Runtime:
        setattr(module, name, target)
        return load_runtime(Artifact("m", "1", "python", None, f"{MODULE}:{name}"), threads=1)

    return make


def fp32(values: Any) -> Tensor:
    return Tensor.of(np.array(values, np.float32))


def declared(outputs: dict[str, str], call: Callable[[Any], Any], inputs: str = "FP32[-1,3]", **others: Any) -> Any:
    return headrace.model(inputs={"x": inputs}, outputs=outputs, **others)(call)


X = {"x": fp32([[1, 2, 3]])}


# -- declaring and loading -----------------------------------------------------------------------------------------


def test_the_signature_is_what_was_declared(load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "BYTES [ -1 ]", "z": "INT64[]"}, lambda inputs: inputs, "BF16[-1, 3,-1]"))
    assert runtime.signature.to_json() == {
        "inputs": [{"name": "x", "datatype": "BF16", "shape": [-1, 3, -1]}],
        "outputs": [
            {"name": "y", "datatype": "BYTES", "shape": [-1]},
            {"name": "z", "datatype": "INT64", "shape": []},
        ],
    }
    assert runtime.platform == "python"


@pytest.mark.parametrize("text", ["FP32", "FP33[-1]", "FP32[-2]", "FP32[a]", "[3]", "fp32[1]"])
def test_a_declaration_that_cannot_be_read_is_refused_where_it_stands(text: str) -> None:
    with pytest.raises(ValueError, match="'x'"):
        headrace.model(inputs={"x": text}, outputs={})


def test_a_class_keeps_state_and_is_closed_once(load: Callable[..., Runtime]) -> None:
    closed = []

    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, inputs: dict[str, Any]) -> Any:
            self.calls += 1
            return np.full(1, self.calls)

        def close(self) -> None:
            closed.append(self.calls)

    runtime = load(declared({"y": "INT64[-1]"}, Counter))
    for expected in (1, 2, 3):
        assert runtime.run(X, ["y"])["y"].array.tolist() == [expected]
    runtime.close()
    runtime.close()
    assert closed == [3]


def test_a_factory_is_called_once_and_what_it_makes_is_the_model(load: Callable[..., Runtime]) -> None:
    made = []

    def make() -> Callable[[Any], Any]:
        made.append(1)
        return lambda inputs: inputs["x"]

    runtime = load(declared({"y": "FP32[-1,3]"}, make, factory=True))
    runtime.run(X, ["y"])
    runtime.run(X, ["y"])
    assert made == [1]


@pytest.mark.parametrize("concurrent", [True, False])
def test_whether_threads_may_call_it_at_once_is_declared(concurrent: bool, load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "FP32[-1,3]"}, lambda inputs: inputs["x"], concurrent=concurrent))
    assert runtime.concurrent is concurrent


def refusal(load: Callable[..., Runtime], target: Any) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        load(target)
    assert caught.value.details["file"] == f"{MODULE}:target"
    return str(caught.value.details["reason"])


def test_what_declares_nothing_is_refused_with_what_to_do(load: Callable[..., Runtime]) -> None:
    assert "@headrace.model" in refusal(load, lambda inputs: inputs)
    assert "@headrace.model" in refusal(load, 7)


def test_a_constructor_that_raises_is_told_without_paths(load: Callable[..., Runtime]) -> None:
    class Broken:
        def __init__(self) -> None:
            raise FileNotFoundError("no weights in /home/somebody/secret/weights.bin")

        def __call__(self, inputs: Any) -> Any: ...

    reason = refusal(load, declared({"y": "FP32[-1]"}, Broken))
    assert reason == "FileNotFoundError: no weights in weights.bin"


def test_a_constructor_that_exits_does_not_take_the_process_along(load: Callable[..., Runtime]) -> None:
    def leave() -> None:
        sys.exit(3)

    assert refusal(load, declared({"y": "FP32[-1]"}, leave, factory=True)) == "SystemExit: 3"


def test_a_factory_that_makes_nothing_callable_is_refused(load: Callable[..., Runtime]) -> None:
    assert refusal(load, declared({"y": "FP32[-1]"}, lambda: 7, factory=True)) == "what it makes cannot be called"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("headrace_absent:x", "there is no module 'headrace_absent'"),
        ("headrace.testing.models:absent", "AttributeError"),
        ("", "ValueError"),
    ],
)
def test_an_entry_that_leads_nowhere_says_where_it_ended(entry: str, reason: str) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        load_runtime(Artifact("m", "1", "python", None, entry), threads=1)
    assert reason in caught.value.details["reason"]


# -- what it is handed ---------------------------------------------------------------------------------------------


def test_its_arrays_are_its_own_and_the_request_stays_as_it_was(load: Callable[..., Runtime]) -> None:
    def spoil(inputs: dict[str, Any]) -> Any:
        inputs["x"] *= 0
        return inputs.pop("x")

    runtime = load(declared({"y": "FP32[-1,3]"}, spoil))
    given = fp32([[1, 2, 3]])
    given.array.flags.writeable = False
    assert runtime.run({"x": given}, ["y"])["y"].array.tolist() == [[0, 0, 0]]
    assert given.array.tolist() == [[1, 2, 3]]


def test_an_answer_does_not_change_when_the_model_writes_into_its_buffer_again(load: Callable[..., Runtime]) -> None:
    buffer = np.zeros((1, 3), np.float32)

    def reuse(inputs: dict[str, Any]) -> Any:
        buffer[:] = inputs["x"]
        return buffer

    runtime = load(declared({"y": "FP32[-1,3]"}, reuse))
    first = runtime.run(X, ["y"])["y"]
    runtime.run({"x": fp32([[7, 8, 9]])}, ["y"])
    assert first.array.tolist() == [[1, 2, 3]]


# -- what it returns -----------------------------------------------------------------------------------------------

LABELS = ["crème", "猫🐈", "a\0b\0"]


@pytest.mark.parametrize(
    "returned",
    [
        np.array(LABELS[:2], dtype="<U8"),
        np.array([label.encode() for label in LABELS[:2]], dtype="S10"),
        np.array(LABELS, dtype=object),
        np.array([label.encode() for label in LABELS], dtype=object),
        LABELS,
        [label.encode() for label in LABELS],
    ],
    ids=["U", "S", "objects of text", "objects of bytes", "list of text", "list of bytes"],
)
def test_a6_labels_of_every_kind_become_the_same_bytes(returned: Any, load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "BYTES[-1]"}, lambda inputs: returned))
    count = len(returned)
    found = runtime.run({"x": fp32([[1, 2, 3]] * count)}, ["y"])["y"]
    assert found.datatype is Datatype.BYTES
    assert found.shape == (count,)
    assert found.array.tolist() == [label.encode() for label in LABELS[:count]]


@pytest.mark.parametrize(
    ("declares", "returned"),
    [
        ("FP32[-1,2]", [[1, 2.5]]),
        ("INT8[-1,2]", [[1, -128]]),
        ("UINT64[-1,1]", [[2**64 - 1]]),
        ("BOOL[-1,2]", [[True, False]]),
        ("BF16[-1,1]", [[0.5]]),
        ("FP32[-1,2]", np.zeros((2, 1), np.float32).T),
        ("FP32[-1,2]", np.zeros((1, 2), ">f4")),
    ],
)
def test_lists_and_odd_arrays_become_what_was_declared(
    declares: str, returned: Any, load: Callable[..., Runtime]
) -> None:
    found = load(declared({"y": declares}, lambda inputs: returned)).run(X, ["y"])["y"]
    assert str(found.datatype) == declares.partition("[")[0]
    assert found.array.tolist() == np.array(returned).tolist()
    assert found.array.flags.c_contiguous


def failure(load: Callable[..., Runtime], outputs: dict[str, str], returned: Any, rows: int = 1) -> ModelFailed:
    runtime = load(declared(outputs, lambda inputs: returned))
    with pytest.raises(ModelFailed) as caught:
        runtime.run({"x": fp32([[1, 2, 3]] * rows)}, list(outputs))
    return caught.value


@pytest.mark.parametrize(
    ("declares", "returned"),
    [
        ("FP32[-1]", np.zeros(1, np.float64)),
        ("INT64[-1]", np.zeros(1, np.int32)),
        ("INT64[-1]", [1.5]),
        ("INT64[-1]", [True]),
        ("BOOL[-1]", [1]),
        ("INT8[-1]", [300]),
        ("UINT8[-1]", [-1]),
        ("FP32[-1]", ["a"]),
        ("FP32[-1]", [[1, 2], [3]]),
        ("FP32[-1]", np.zeros(1, complex)),
        ("BYTES[-1]", [1]),
        ("BYTES[-1]", ["\ud800"]),
        ("BYTES[-1]", np.zeros(1, np.float32)),
        ("FP32[-1]", object()),
    ],
)
def test_a_wrong_datatype_names_the_output_and_nothing_is_rounded(
    declares: str, returned: Any, load: Callable[..., Runtime]
) -> None:
    error = failure(load, {"y": declares}, returned)
    assert error.details["output"] == "y"
    assert error.details["expected"] == declares.partition("[")[0]


def test_a_wrong_shape_names_the_output_and_both_shapes(load: Callable[..., Runtime]) -> None:
    error = failure(load, {"y": "FP32[-1,2]"}, np.zeros((1, 3), np.float32))
    assert error.details == {"output": "y", "expected": [-1, 2], "actual": [1, 3]}
    error = failure(load, {"y": "FP32[-1,2]"}, np.zeros(2, np.float32))
    assert error.details["actual"] == [2]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a13_a_wrong_number_of_rows_is_never_passed_on(rows: int, load: Callable[..., Runtime]) -> None:
    error = failure(load, {"y": "FP32[-1]"}, np.zeros(rows, np.float32), rows=2)
    assert isinstance(error, WrongRows)
    assert error.details == {"output": "y", "expected": [2], "actual": [rows]}


def test_outputs_are_matched_by_name(load: Callable[..., Runtime]) -> None:
    two = {"y": "FP32[-1]", "z": "FP32[-1]"}
    one = np.zeros(1, np.float32)
    assert failure(load, two, {"y": one}).details["output"] == "z"
    assert failure(load, two, {"y": one, "z": None}).details["output"] == "z"
    assert failure(load, two, {"y": one, "z": one, "typo": one}).details["output"] == "typo"
    assert failure(load, two, one).details["expected"] == ["y", "z"]
    assert failure(load, {"y": "FP32[-1]"}, None).details["output"] == "y"


# -- when it fails -------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        raise error

    return call


def test_an_exception_is_told_by_type_and_a_short_text_and_keeps_its_cause(load: Callable[..., Runtime]) -> None:
    cause = ValueError("bad value in /home/somebody/secret/model.py " + "x" * 5000)
    runtime = load(declared({"y": "FP32[-1]"}, raising(cause)))
    with pytest.raises(ModelFailed) as caught:
        runtime.run(X, ["y"])
    assert caught.value.message.startswith("ValueError: bad value in model.py x")
    assert len(caught.value.message) < 250
    assert caught.value.__cause__ is cause


def test_a_model_that_exits_is_a_model_that_failed(load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "FP32[-1]"}, raising(SystemExit(1))))
    with pytest.raises(ModelFailed, match="SystemExit: 1"):
        runtime.run(X, ["y"])


def test_a_value_that_the_model_calls_unfit_is_the_callers_fault(load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "FP32[-1]"}, raising(InvalidValue("too cold", details={"input": "x"}))))
    with pytest.raises(InvalidValue, match="too cold"):
        runtime.run(X, ["y"])


def test_out_of_memory_says_what_numpy_could_not_make(load: Callable[..., Runtime]) -> None:
    runtime = load(declared({"y": "FP32[-1]"}, lambda inputs: np.empty((1 << 40, 1 << 10), np.float32)))
    with pytest.raises(OutOfMemory) as caught:
        runtime.run(X, ["y"])
    assert caught.value.details["allocated"] == 1 << 52
    assert caught.value.details["tensor"] == f"float32[{1 << 40}, {1 << 10}]"
    runtime = load(declared({"y": "FP32[-1]"}, raising(MemoryError())))
    with pytest.raises(OutOfMemory):
        runtime.run(X, ["y"])
