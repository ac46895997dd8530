"""What TensorFlow does not do for us: checks, order, formats told apart, state, and errors that say what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.errors import ModelFailed, ModelLoadFailed, OutOfMemory, ShapeMismatch
from headrace.runtimes import Artifact, Runtime, load_runtime
from headrace.tensor import Datatype, Tensor

tf = pytest.importorskip("tensorflow", reason="needs tensorflow: pip install 'headrace[tensorflow]'")

from runtimes import tensorflow_models  # noqa: E402
from runtimes.tensorflow_models import card, copy, freeze, save  # noqa: E402

DATA = Path(__file__).parents[1] / "data"
SAVED = DATA / "digits_sm" / "saved_model.pb"
FROZEN = DATA / "digits_frozen.pb"


def load(path: Path, *, threads: int = 1, device: str = "cpu") -> Runtime:
    return load_runtime(tensorflow_models.artifact(path), threads=threads, device=device)


def refusal(path: Path, **others: Any) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        load(path, **others)
    assert str(path.parent) not in f"{caught.value.message} {caught.value.details}"
    return caught.value


def tensor(values: object, dtype: Any = np.float32) -> Tensor:
    return Tensor.of(np.array(values, dtype=dtype))


def digits() -> tuple[Tensor, list[int]]:
    rows = json.loads((DATA / "digits_rows.json").read_text())
    return tensor(np.array(rows["pixels"]).reshape(-1, 8, 8, 1) / 16), rows["digits"]


def names(runtime: Runtime) -> tuple[list[str], list[str]]:
    return runtime.signature.input_names, runtime.signature.output_names


# -- what it takes and gives ---------------------------------------------------------------------------------------


def test_both_formats_answer_what_their_readme_says_and_the_same_as_each_other() -> None:
    saved, frozen = load(SAVED), load(FROZEN)
    assert (saved.platform, frozen.platform) == ("tensorflow_savedmodel", "tensorflow_graphdef")
    assert names(saved) == (["image"], ["output_0"])
    assert names(frozen) == (["image:0"], ["Identity:0"])
    for runtime in (saved, frozen):
        (taken,), (given,) = runtime.signature.inputs, runtime.signature.outputs
        assert (taken.datatype, taken.shape) == (Datatype.FP32, (-1, 8, 8, 1))
        assert (given.datatype, given.shape) == (Datatype.FP32, (-1, 10))
    images, right = digits()
    one = saved.run({"image": images}, ["output_0"])["output_0"].array
    other = frozen.run({"image:0": images}, ["Identity:0"])["Identity:0"].array
    expected = [0.0000089, 0.0000231, 0.9991388, 0.0005276, 0.0000002, 0.0000038, 0, 0.0001036, 0.0001883, 0.0000057]
    assert np.allclose(one[0], expected, atol=1e-4)
    assert np.allclose(one, other, atol=1e-6)
    twin = load_runtime(Artifact("m", "1", "onnx", DATA / "digits_mlp.onnx"), threads=1)
    pixels = Tensor.of((images.array * 16).reshape(-1, 64))
    labels = twin.run({"X": pixels}, ["label"])["label"].array
    # Two networks that learned the same digits: nearly always of one mind, and nearly always right.
    assert (one.argmax(1) == labels).sum() >= 54
    assert (one.argmax(1) == np.array(right)).sum() >= 55


def test_outputs_are_sorted_by_name_for_they_come_in_no_order(tmp_path: Path) -> None:
    def call(b: Any, a: Any) -> dict[str, Any]:
        return {"z": a - b, "m": a + b, "c": a * b}

    path = save(tmp_path / "sm", call, {"b": ([None], tf.float32), "a": ([None], tf.float32)})
    runtime = load(path)
    assert names(runtime) == (["a", "b"], ["c", "m", "z"])
    found = runtime.run({"b": tensor([1]), "a": tensor([5])}, ["z", "m", "c"])
    assert [found[name].array.tolist() for name in "zmc"] == [[4], [6], [5]]


VALUES = {
    tf.bool: np.array([[True, False, True]]),
    tf.uint8: np.array([[0, 1, 255]], np.uint8),
    tf.uint16: np.array([[0, 1, 65535]], np.uint16),
    tf.uint32: np.array([[0, 1, 2**32 - 1]], np.uint32),
    tf.uint64: np.array([[0, 1, 2**64 - 1]], np.uint64),
    tf.int8: np.array([[-128, 0, 127]], np.int8),
    tf.int16: np.array([[-32768, 0, 32767]], np.int16),
    tf.int32: np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    tf.int64: np.array([[-(2**63), 2**53 + 1, 2**63 - 1]], np.int64),
    tf.float16: np.array([[0.5, np.nan, np.inf]], np.float16),
    tf.float32: np.array([[0.1, np.nan, -np.inf]], np.float32),
    tf.float64: np.array([[0.1, -0.0, 1e308]], np.float64),
    tf.bfloat16: np.array([[0.5, np.nan, -3e38]], ml_dtypes.bfloat16),
    tf.string: np.array([["crème".encode(), "猫🐈".encode(), b"a\0b\0"]], object),
}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: str(kind.name))
def test_every_datatype_passes_through_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    def build() -> None:
        tf.identity(tf.compat.v1.placeholder(kind, [None, 3], name="x"), name="y")

    runtime = load(freeze(tmp_path / "m.pb", build))
    for rows in (0, 1, 3):
        given = Tensor.of(np.concatenate([VALUES[kind]] * rows) if rows else VALUES[kind][:0])
        found = runtime.run({"x:0": given}, ["y:0"])["y:0"]
        assert found == given and found.shape == (rows, 3)


def test_text_passes_through_a_saved_model_and_so_does_a_scalar_of_it(tmp_path: Path) -> None:
    def call(many: Any, one: Any) -> dict[str, Any]:
        return {"many": tf.strings.join([many, "!"]), "one": tf.identity(one)}

    runtime = load(save(tmp_path / "sm", call, {"many": ([None], tf.string), "one": ([], tf.string)}))
    found = runtime.run({"many": tensor([b"a\0", "猫"], object), "one": tensor(b"b\0", object)}, ["many", "one"])
    assert found["many"].array.tolist() == [b"a\0!", "猫!".encode()]
    assert found["one"] == tensor(b"b\0", object)


def test_an_unknown_number_of_dimensions_needs_a_card(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        return {"y": x * 2}

    path = save(tmp_path / "sm", call, {"x": (None, tf.float32)})
    assert "input 'x' has no declared number of dimensions: give a signature in the card" in refusal(path).message
    spec = {"datatype": "FP32", "shape": [-1, 2]}
    given = {"inputs": [{"name": "x", **spec}], "outputs": [{"name": "y", **spec}]}
    assert load(card(path, signature=given)).signature.to_json() == given
    for wrong, text in (
        ({**given, "inputs": [{"name": "z", **spec}]}, "declares the inputs ['z'], and it takes ['x']"),
        ({**given, "outputs": [{"name": "y", "datatype": "FP64", "shape": [-1]}]}, "'y' as FP64, and it has float32"),
        ({**given, "outputs": [{"name": "z", **spec}]}, "output 'z' as FP32, and it has only ['y']"),
    ):
        assert text in refusal(card(path, signature=wrong)).message


def test_a_card_may_name_other_tensors_of_a_frozen_graph(tmp_path: Path) -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
        hidden = tf.add(x, 1.0, name="hidden")
        tf.reduce_sum(hidden, axis=1, name="sum")
        tf.reduce_max(hidden, axis=1, name="max")

    path = freeze(tmp_path / "m.pb", build)
    assert names(load(path)) == (["x:0"], ["max:0", "sum:0"])
    inner = {
        "inputs": [{"name": "x:0", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "hidden:0", "datatype": "FP32", "shape": [-1, 2]}],
    }
    runtime = load(card(path, signature=inner))
    assert runtime.run({"x:0": tensor([[1, 2]])}, ["hidden:0"])["hidden:0"].array.tolist() == [[2, 3]]
    inner["outputs"][0]["name"] = "absent:0"
    assert "names 'absent:0', which is not in the graph" in refusal(card(path, signature=inner)).message


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.pb", "there is no such file"),
        ("folder.pb", "it is a folder without saved_model.pb"),
        ("empty.pb", "the file is empty"),
        ("text.pb", "neither a SavedModel nor a frozen graph"),
        ("lines.pb", "neither a SavedModel nor a frozen graph"),
        ("cut.pb", "it is cut short"),
        ("saved.pb", "it is the saved_model.pb of a SavedModel, which is a folder"),
        ("operator.pb", "Conv9D"),
        ("cut_graph/saved_model.pb", "it is cut short"),
        ("not_saved/saved_model.pb", "a SavedModel without a graph"),
        ("cut_variables/saved_model.pb", "its variables are cut short"),
        ("no_variables/saved_model.pb", "its variables are missing"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, text: str, tmp_path: Path) -> None:
    tensorflow_models.broken(tmp_path)
    error = refusal(tmp_path / name)
    assert text in error.message
    assert error.details["expected"] == ["a folder with saved_model.pb and variables/", "model.pb, a frozen graph"]


def test_a_frozen_graph_may_be_called_saved_model(tmp_path: Path) -> None:
    shutil.copy(FROZEN, tmp_path / "saved_model.pb")
    assert load(tmp_path / "saved_model.pb").platform == "tensorflow_graphdef"


def test_a_graph_with_variables_is_not_frozen(tmp_path: Path) -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        tf.add(x, tf.compat.v1.get_variable("weight", [], use_resource=True), name="y")

    assert "it is not frozen: it has variables (weight)" in refusal(freeze(tmp_path / "m.pb", build)).message


def test_several_signatures_and_none_that_is_the_default_are_refused(tmp_path: Path) -> None:
    module = tf.Module()
    module.call = tf.function(lambda x: {"y": x}).get_concrete_function(x=tf.TensorSpec([None], tf.float32, name="x"))
    tf.saved_model.save(module, str(tmp_path / "two"), signatures={"one": module.call, "two": module.call})
    assert "it has the signatures ['one', 'two']" in refusal(tmp_path / "two" / "saved_model.pb").message
    tf.saved_model.save(module, str(tmp_path / "one"), signatures={"only": module.call})
    assert names(load(tmp_path / "one" / "saved_model.pb")) == (["x"], ["y"])


def test_what_is_no_tensor_of_ours_is_refused(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.complex(x, x)}

    path = save(tmp_path / "sm", call, {"x": ([None], tf.float32)})
    assert "output 'y' is complex64, which is not a tensor we serve" in refusal(path).message


def test_a_model_that_keeps_state_is_refused_or_runs_one_at_a_time(tmp_path: Path) -> None:
    count = tf.Variable(0.0)

    def call(x: Any) -> dict[str, Any]:
        return {"y": x + count.assign_add(1.0)}

    path = save(tmp_path / "open", call, {"x": ([None], tf.float32)}, count=count)
    assert "it keeps state from one run to the next (AssignAddVariableOp)" in refusal(path).message
    assert "rows of several callers cannot run together" in refusal(card(path, stateful=True)).message
    path = save(tmp_path / "fixed", call, {"x": ([1], tf.float32)}, count=count)
    runtime = load(card(path, stateful=True))
    assert not runtime.concurrent and not runtime.signature.batchable
    assert [runtime.run({"x": tensor([0])}, ["y"])["y"].array[0] for _ in range(3)] == [1, 2, 3]


def test_variables_that_are_only_read_and_tables_are_no_state(tmp_path: Path) -> None:
    scale = tf.Variable(2.0)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1.0, 2.0])), -1.0
    )

    def call(x: Any) -> dict[str, Any]:
        return {"y": table.lookup(x) * scale}

    runtime = load(save(tmp_path / "sm", call, {"x": ([None], tf.string)}, scale=scale, table=table))
    assert runtime.concurrent and runtime.steady
    assert runtime.run({"x": tensor([b"a", b"b", b"c"], object)}, ["y"])["y"].array.tolist() == [2, 4, -2]


def test_the_signature_lives_as_long_as_the_runtime(tmp_path: Path) -> None:
    import gc

    runtime = load(SAVED)
    gc.collect()
    images, _ = digits()
    assert runtime.run({"image": images}, ["output_0"])["output_0"].shape == (60, 10)


# -- running -------------------------------------------------------------------------------------------------------


def test_a_wrong_length_which_tensorflow_would_answer_is_refused_before_it() -> None:
    runtime = load(SAVED)
    wrong = {"image": tensor(np.zeros((1, 9, 9, 1)))}
    with pytest.raises(ShapeMismatch):
        runtime.signature.check(wrong)


def test_out_of_memory_says_how_much_for_what_and_how_much_there_was(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.fill(x, 1.5)}

    runtime = load(save(tmp_path / "sm", call, {"x": ([1], tf.int64)}))
    with pytest.raises(OutOfMemory) as caught:
        runtime.run({"x": tensor([1 << 42], np.int64)}, ["y"])
    details = caught.value.details
    assert details["allocated"] == 4 << 42
    assert 0 < details["available"] < 4 << 42
    assert details["tensor"] == f"Fill float[{1 << 42}]"
    assert runtime.run({"x": tensor([2], np.int64)}, ["y"])["y"].array.tolist() == [1.5, 1.5]


def test_a_failure_names_the_node_and_nothing_of_this_machine(tmp_path: Path) -> None:
    runtime = load(tensorflow_models.reshape_each_row(tmp_path / "sm"))
    with pytest.raises(ModelFailed) as caught:
        runtime.run({"x": tensor([5], np.int64)}, ["y"])
    assert caught.value.message == (
        "the model failed: in node Reshape: Input to reshape is a tensor with 3 values, but the requested shape has 5"
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error(device: str, tmp_path: Path) -> None:
    path = copy(tmp_path / "sm")
    assert f"it shall run on {device}, and there is only cpu" in refusal(path, device=device).message
    assert f"it shall run on {device}" in refusal(card(path, device=device)).message
    assert load(card(path, device="cpu"), device=device).device == "cpu"


def test_four_threads_at_once_get_their_own_answers() -> None:
    runtime = load(FROZEN)
    images, _ = digits()
    expected = runtime.run({"image:0": images}, ["Identity:0"])["Identity:0"].array
    wrong: list[int] = []

    def call(start: int) -> None:
        for place in range(start, 60, 4):
            row = Tensor.of(images.array[place : place + 1])
            found = runtime.run({"image:0": row}, ["Identity:0"])["Identity:0"].array
            if not np.allclose(found[0], expected[place], atol=1e-5):
                wrong.append(place)

    threads = [threading.Thread(target=call, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_file_of_another_kind_is_refused_before_tensorflow_is_imported(tmp_path: Path) -> None:
    (tmp_path / "m.pb").write_bytes(b"hello")
    code = (
        "import sys; from pathlib import Path\n"
        "from headrace.runtimes import Artifact, load_runtime\n"
        f"try: load_runtime(Artifact('m', '1', 'tensorflow', Path({str(tmp_path / 'm.pb')!r})), threads=1)\n"
        "except Exception as error: assert 'neither a Saved' in str(error); assert 'tensorflow' not in sys.modules\n"
        "else: raise SystemExit('loaded')"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0
