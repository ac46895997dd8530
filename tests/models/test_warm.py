"""What the first runs of a version prove, and what they leave open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from headrace.clock import SystemClock
from headrace.errors import InvalidValue, ModelFailed, ModelLoadFailed, OutOfMemory
from headrace.models.warm import Warm, warm_up
from headrace.runtimes import Artifact, Runtime, load_runtime
from headrace.tensor import Datatype, Signature, Tensor
from models.kit import Scripted, echo, spec
from runtimes import onnx_files

DATA = Path(__file__).parents[1] / "data"


def artifact(path: Path = Path("m.onnx")) -> Artifact:
    return Artifact("m", "1", "onnx", path.absolute())


def warm(runtime: Runtime, size_max: int = 64, fast_s: float = 0.0) -> Warm:
    return warm_up(runtime, artifact(), size_max=size_max, fast_s=fast_s, clock=SystemClock())


def loaded(model: Any, folder: Path) -> Runtime:
    return load_runtime(artifact(onnx_files.save(model, folder / "m.onnx")), threads=1)


def computes(change: Callable[[Any], Any]) -> Callable[[Mapping[str, Tensor], Sequence[str]], dict[str, Tensor]]:
    return lambda inputs, outputs: {"y": Tensor.of(change(inputs["x"].array))}


def signature(*inner: int, datatype: Datatype = Datatype.FP32) -> Signature:
    return Signature((spec("x", -1, *inner, datatype=datatype),), (spec("y", -1, *inner, datatype=datatype),))


# -- whether rows may run together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["iris_logreg", "digits_mlp"])
def test_a_real_model_is_proved_to_batch_and_is_measured(name: str) -> None:
    runtime = load_runtime(artifact(DATA / f"{name}.onnx"), threads=1)
    found = warm(runtime, fast_s=1.0)
    assert found.batchable and not found.note
    assert found.row_s is not None and found.batch_s is not None
    assert 0 < found.row_s < 10


@pytest.mark.parametrize("datatype", Datatype, ids=str)
def test_every_datatype_can_be_made_up(datatype: Datatype) -> None:
    runtime = Scripted(signature=signature(2, datatype=datatype))
    assert warm(runtime).batchable


def test_a_model_whose_rows_depend_on_each_other_is_denied(tmp_path: Path) -> None:
    found = warm(loaded(onnx_files.softmax_over_rows(), tmp_path))
    assert not found.batchable
    assert found.note == "output 'y' of a row depends on the row beside it"


def test_a_model_with_a_batch_of_one_built_in_is_denied(tmp_path: Path) -> None:
    found = warm(loaded(onnx_files.batch_of_one_built_in(), tmp_path))
    assert not found.batchable
    assert "two rows cannot run together" in found.note


def test_a_model_that_returns_too_few_rows_for_two_is_denied() -> None:
    found = warm(Scripted(computes(lambda x: x[:1])))
    assert not found.batchable
    assert found.note == "output 'y' has shape [1, 3] for two rows"


def test_rounding_that_depends_on_the_batch_is_not_dependence() -> None:
    found = warm(Scripted(computes(lambda x: x * np.float32(1 + 1e-5 * len(x)) + 1)))
    assert found.batchable


def test_nan_beside_nan_is_alike() -> None:
    assert warm(Scripted(computes(lambda x: x * np.nan))).batchable


def test_a_model_that_only_takes_zeros_is_proved_with_two_rows_of_them() -> None:
    def call(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        if inputs["x"].array.any():
            raise InvalidValue("not zero")
        return {"y": inputs["x"]} if inputs["x"].rows == 1 else {"y": Tensor.of(inputs["x"].array[:1])}

    assert not warm(Scripted(call)).batchable


def test_where_nothing_is_batched_nothing_is_proved() -> None:
    runtime = Scripted()
    warm(runtime, size_max=1)
    assert set(runtime.sizes) == {1}


def test_a_label_that_is_declared_fixed_and_follows_the_rows_is_opened(tmp_path: Path) -> None:
    runtime = loaded(onnx_files.label_declared_as_one(), tmp_path)
    assert not runtime.signature.batchable
    found = warm(runtime)
    assert runtime.signature.outputs[0].shape == (-1,)
    assert runtime.signature.batchable and found.batchable


def test_an_output_that_really_is_fixed_stays_so() -> None:
    fixed = Signature((spec("x", -1, 3),), (spec("y", 1, 3),))
    runtime = Scripted(computes(lambda x: x[:1]), fixed)
    assert not warm(runtime).batchable
    assert runtime.signature == fixed


# -- what a failure means ------------------------------------------------------------------------------------------


def refuses(error: Exception, unless: Callable[[Any], bool] = lambda x: False) -> Any:
    def call(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        if not unless(inputs["x"].array):
            raise error
        return echo(inputs, outputs)

    return call


def test_a_model_that_cannot_run_on_zeros_of_a_fixed_shape_has_failed_to_load() -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        warm(Scripted(refuses(ModelFailed("it broke", details={"output": "y"}))))
    assert caught.value.details == {"file": "m.onnx", "reason": "its first run failed: it broke", "output": "y"}


def test_out_of_memory_is_a_failed_load_whatever_was_made_up() -> None:
    with pytest.raises(ModelLoadFailed, match="its first run failed"):
        warm(Scripted(refuses(OutOfMemory()), signature(-1)))


def test_a_model_that_calls_the_made_up_values_unfit_goes_live_unproved() -> None:
    found = warm(Scripted(refuses(InvalidValue("too small"))))
    assert found.batchable and found.row_s is None
    assert found.note == "it could not be tried with made-up inputs: too small"


def test_a_model_that_needs_a_larger_size_is_tried_with_one() -> None:
    runtime = Scripted(refuses(ModelFailed("too small"), lambda x: x.shape[1] >= 8), signature(-1))
    found = warm(runtime)
    assert found.batchable and not found.note
    assert np.array(runtime.calls[-1]["x"]).shape[1] == 8


@pytest.mark.parametrize("made_up", [signature(-1), signature(datatype=Datatype.BYTES)], ids=["sizes", "text"])
def test_a_model_that_fails_on_guesses_goes_live_unproved(made_up: Signature) -> None:
    found = warm(Scripted(refuses(ModelFailed("no")), made_up))
    assert found.batchable and "could not be tried" in found.note


def test_a_model_without_a_batch_dimension_is_run_as_it_is(tmp_path: Path) -> None:
    runtime = loaded(onnx_files.identity(TensorProto.INT64, []), tmp_path)
    assert not warm(runtime).batchable


# -- how fast ------------------------------------------------------------------------------------------------------


def test_a_slow_model_is_run_no_more_often_than_it_must() -> None:
    def call(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        threading.Event().wait(0.06)
        return echo(inputs, outputs)

    runtime = Scripted(call)
    found = warm(runtime, fast_s=0.0003)
    assert runtime.sizes == [1, 1, 2, 1]
    assert found.row_s is not None and found.row_s >= 0.06
    assert found.batch_s is None


class _Steps(SystemClock):
    """A clock that runs move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("cold_s", "row_s"), [(0.2, 0.001), (2.0, 2.0)])
def test_a_first_run_that_was_only_cold_is_not_taken_for_the_time_of_a_row(cold_s: float, row_s: float) -> None:
    clock = _Steps()

    def call(inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        clock.now_s += 0.001 if clock.now_s else cold_s
        return echo(inputs, outputs)

    found = warm_up(Scripted(call), artifact(), size_max=64, fast_s=0.0, clock=clock)
    assert found.row_s == pytest.approx(row_s)


# -- samples that lie beside it ------------------------------------------------------------------------------------


def beside(folder: Path, text: str, model: Any = None) -> tuple[Runtime, Artifact]:
    path = onnx_files.save(model if model is not None else onnx_files.identity(), folder / "m" / "1" / "model.onnx")
    (path.parent / "samples.json").write_text(text)
    versioned = Artifact("m", "1", "onnx", path, root=folder / "m")
    return load_runtime(versioned, threads=1), versioned


def sample(rows: str, shape: str, datatype: str = "FP32") -> str:
    return f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": {shape}, "data": {rows}}}]}}'


def warm_with(runtime: Runtime, versioned: Artifact) -> Warm:
    return warm_up(runtime, versioned, size_max=8, fast_s=1.0, clock=SystemClock())


@pytest.mark.parametrize(
    "text",
    [sample("[1, 2, 3, 4, 5, 6]", "[2, 3]"), f"[{sample('[1, 2, 3]', '[1, 3]')}, {sample('[4, 5, 6]', '[1, 3]')}]"],
)
def test_given_samples_are_run_instead_of_made_up_inputs(tmp_path: Path, text: str) -> None:
    runtime = Scripted()
    path = tmp_path / "m.samples.json"
    path.write_text(text)
    found = warm_up(runtime, artifact(tmp_path / "m.onnx"), size_max=8, fast_s=1.0, clock=SystemClock())
    assert found.batchable and not found.note and found.batch_s is not None
    rows = {tuple(row) for call in runtime.calls for row in call["x"]}
    assert rows == {(1, 2, 3), (4, 5, 6)}


def test_a_model_that_made_up_inputs_cannot_try_is_proved_by_a_sample(tmp_path: Path) -> None:
    model = onnx_files.reshape_each_row()
    path = onnx_files.save(model, tmp_path / "m" / "1" / "model.onnx")
    versioned = Artifact("m", "1", "onnx", path, root=tmp_path / "m")
    with pytest.raises(ModelLoadFailed, match="its first run failed"):
        warm_with(load_runtime(versioned, threads=1), versioned)
    runtime, versioned = beside(tmp_path, sample("[3, 3]", "[2]", "INT64"), model)
    assert warm_with(runtime, versioned).batchable


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "sample 1"),
        (sample("[1, 2]", "[1, 2]"), "sample 1: input 'x': expected shape"),
        (f"[{sample('[1, 2, 3]', '[1, 3]')}, 7]", "sample 2"),
        (sample("[]", "[0, 3]"), "hold no row"),
    ],
)
def test_a_sample_that_does_not_fit_is_a_reason_not_to_load(tmp_path: Path, text: str, reason: str) -> None:
    runtime, versioned = beside(tmp_path, text)
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        warm_with(runtime, versioned)
    assert str(tmp_path) not in f"{caught.value.message} {caught.value.details}"


def test_a_sample_on_which_it_fails_is_a_reason_not_to_load(tmp_path: Path) -> None:
    runtime, versioned = beside(tmp_path, sample("[5]", "[1]", "INT64"), onnx_files.reshape_each_row())
    with pytest.raises(ModelLoadFailed, match="its first run failed"):
        warm_with(runtime, versioned)
