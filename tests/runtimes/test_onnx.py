"""What onnxruntime does not do for us: names, datatypes, text, data files, and errors that say what is wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace.errors import InvalidValue, ModelFailed, ModelLoadFailed, OutOfMemory, ShapeMismatch
from headrace.runtimes import RUNTIMES, Artifact, Row, Runtime, load_runtime
from headrace.tensor import Datatype, Tensor
from runtimes import onnx_files

DATA = Path(__file__).parents[1] / "data"


def load(path: Path, *, threads: int = 1, root: Path | None = None) -> Runtime:
    return load_runtime(Artifact("m", "1", "onnx", path, root=root or path.parent), threads=threads)


def refusal(path: Path, root: Path | None = None) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        load(path, root=root)
    return caught.value


def tensor(values: object, dtype: object = np.float32) -> Tensor:
    return Tensor.of(np.array(values, dtype=dtype))  # type: ignore[call-overload]


# -- what a model takes and gives ----------------------------------------------------------------------------------


def test_a_real_model_answers_what_its_readme_says() -> None:
    runtime = load(DATA / "iris_logreg.onnx")
    assert runtime.signature.to_json() == {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]},
        ],
    }
    found = runtime.run({"X": tensor([[5.1, 3.5, 1.4, 0.2], [5.8, 2.8, 5.1, 2.4]])}, ["label", "probabilities"])
    assert found["label"].array.tolist() == [0, 2]
    expected = [[0.98081559, 0.01918394, 0.0000005], [0.00014416, 0.03102647, 0.96882939]]
    assert np.allclose(found["probabilities"].array, expected, atol=1e-5)


def test_symbolic_and_open_dimensions_are_minus_one_and_fixed_ones_stay(tmp_path: Path) -> None:
    model = onnx_files.identity(dims=("batch", 3, "width", 7))
    assert load(onnx_files.save(model, tmp_path / "m.onnx")).signature.inputs[0].shape == (-1, 3, -1, 7)


VALUES = {
    TensorProto.BOOL: (Datatype.BOOL, np.array([[True, False, True]])),
    TensorProto.UINT8: (Datatype.UINT8, np.array([[0, 1, 255]], np.uint8)),
    TensorProto.UINT16: (Datatype.UINT16, np.array([[0, 1, 65535]], np.uint16)),
    TensorProto.UINT32: (Datatype.UINT32, np.array([[0, 1, 2**32 - 1]], np.uint32)),
    TensorProto.UINT64: (Datatype.UINT64, np.array([[0, 1, 2**64 - 1]], np.uint64)),
    TensorProto.INT8: (Datatype.INT8, np.array([[-128, 0, 127]], np.int8)),
    TensorProto.INT16: (Datatype.INT16, np.array([[-32768, 0, 32767]], np.int16)),
    TensorProto.INT32: (Datatype.INT32, np.array([[-(2**31), 0, 2**31 - 1]], np.int32)),
    TensorProto.INT64: (Datatype.INT64, np.array([[-(2**63), 2**53 + 1, 2**63 - 1]], np.int64)),
    TensorProto.FLOAT16: (Datatype.FP16, np.array([[0.5, np.nan, np.inf]], np.float16)),
    TensorProto.FLOAT: (Datatype.FP32, np.array([[0.1, np.nan, -np.inf]], np.float32)),
    TensorProto.DOUBLE: (Datatype.FP64, np.array([[0.1, -0.0, 1e308]], np.float64)),
    TensorProto.BFLOAT16: (Datatype.BF16, np.array([[0.5, np.nan, -3e38]], ml_dtypes.bfloat16)),
    TensorProto.STRING: (Datatype.BYTES, np.array([["crème".encode(), "猫🐈".encode(), b"a\0b\0"]], object)),
}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: str(VALUES[kind][0]))
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_datatype_passes_through_bit_for_bit(kind: int, rows: int, tmp_path: Path) -> None:
    datatype, values = VALUES[kind]
    runtime = load(onnx_files.save(onnx_files.identity(kind), tmp_path / "m.onnx"))
    given = Tensor.of(np.concatenate([values] * rows) if rows else values[:0])
    assert runtime.signature.inputs[0].datatype is datatype
    found = runtime.run({"x": given}, ["y"])["y"]
    assert found == given
    assert found.shape == (rows, 3)


def test_scalars_are_allowed_in_and_out(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.identity(TensorProto.INT64, []), tmp_path / "m.onnx"))
    assert runtime.signature.inputs[0].shape == ()
    assert not runtime.signature.batchable
    found = runtime.run({"x": Tensor.of(np.array(16000))}, ["y"])["y"]
    assert found.shape == () and found.array.item() == 16000


def test_names_with_slashes_and_colons_are_names(tmp_path: Path) -> None:
    model = onnx_files.graph(
        [helper.make_node("Identity", ["gpu_0/data:0"], ["Identity:0"])],
        [onnx_files.value("gpu_0/data:0", TensorProto.FLOAT, ["N"])],
        [onnx_files.value("Identity:0", TensorProto.FLOAT, ["N"])],
    )
    runtime = load(onnx_files.save(model, tmp_path / "m.onnx"))
    assert runtime.run({"gpu_0/data:0": tensor([1])}, ["Identity:0"])["Identity:0"].array.tolist() == [1]


def test_bf16_beside_another_datatype(tmp_path: Path) -> None:
    model = onnx_files.graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16), helper.make_node("Identity", ["x"], ["z"])],
        [onnx_files.value("x", TensorProto.FLOAT, ["N"])],
        [onnx_files.value("y", TensorProto.BFLOAT16, ["N"]), onnx_files.value("z", TensorProto.FLOAT, ["N"])],
    )
    runtime = load(onnx_files.save(model, tmp_path / "m.onnx"))
    found = runtime.run({"x": tensor([0.5, 2])}, ["z", "y"])
    assert found["y"] == Tensor.of(np.array([0.5, 2], ml_dtypes.bfloat16))
    assert found["z"] == tensor([0.5, 2])


def test_outputs_that_are_no_tensors_are_refused_with_a_way_out(tmp_path: Path) -> None:
    kind = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    )
    model = onnx_files.graph(
        [helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])],
        [onnx_files.value("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_value_info("y", kind)],
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    error = refusal(onnx_files.save(model, tmp_path / "m.onnx"))
    assert "output 'y' is seq(map(int64,tensor(float)))" in error.details["reason"]
    assert "zipmap" in error.details["reason"]


# -- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty", b"", "the file is empty"),
        ("text", b"hello, I am not a model", "it is not an ONNX model, or it is cut short"),
        ("absent", None, "there is no such file"),
    ],
)
def test_a_file_that_is_no_model_is_named_with_the_reason(
    name: str, content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "echo" / "3" / f"{name}.onnx"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    error = refusal(path, tmp_path / "echo")
    assert error.details == {"file": f"3/{name}.onnx", "reason": reason, "expected": ["model.onnx"]}


def test_an_unknown_operator_is_named_and_the_places_in_onnxruntime_are_not(tmp_path: Path) -> None:
    model = onnx_files.identity()
    model.graph.node[0].op_type = "Nonsense"
    assert "No Op registered for Nonsense" in refusal(onnx_files.save(model, tmp_path / "m.onnx")).message
    model = onnx_files.graph([], [], [], opset=99)
    error = refusal(onnx_files.save(model, tmp_path / "m.onnx"))
    assert "Opset 99" in error.message
    assert "onnxruntime_src" not in error.message


def test_weights_in_a_file_beside_it_are_read_not_mapped(tmp_path: Path) -> None:
    path = onnx_files.with_data_file(tmp_path)
    runtime = load(path)
    before = runtime.run({"x": tensor([[1, 2, 3]])}, ["y"])
    data = tmp_path / "weights.bin"
    with data.open("r+b") as file:  # overwritten in place, then cut: a mapped file would end this process
        file.write(bytes(data.stat().st_size))
        file.truncate(0)
    assert runtime.run({"x": tensor([[1, 2, 3]])}, ["y"])["y"] == before["y"]


def test_a21_a_model_that_is_overwritten_in_place_stays_all_old(tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.linear(seed=1), tmp_path / "m.onnx")
    runtime = load(path)
    before = runtime.run({"x": tensor([[1, 2, 3]])}, ["y"])
    path.write_bytes(onnx_files.linear(seed=2).SerializeToString())
    assert runtime.run({"x": tensor([[1, 2, 3]])}, ["y"])["y"] == before["y"]
    assert load(path).run({"x": tensor([[1, 2, 3]])}, ["y"])["y"] != before["y"]


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    path = onnx_files.with_data_file(tmp_path / "m" / "1")
    (path.parent / "weights.bin").unlink()
    error = refusal(path, tmp_path / "m")
    assert error.details["file"] == "1/weights.bin"
    assert error.details["expected"] == ["weights.bin"]


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "a/../../b"])
def test_a23_a_data_file_outside_the_models_folder_is_never_opened(place: str, tmp_path: Path) -> None:
    path = onnx_files.with_data_file(tmp_path / "m")
    (tmp_path / "secret").write_bytes(bytes(48))
    model = onnx_files.linear()
    held = model.graph.initializer[0]
    held.ClearField("raw_data")
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value=place)
    error = refusal(onnx_files.save(model, path))
    assert error.details["reason"] == "it names a data file outside its folder"
    assert place not in error.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.identity(), tmp_path / "m.onnx")
    path.chmod(0)
    assert "Permission denied" in refusal(path).message


def test_an_extra_that_is_not_installed_is_an_error_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNTIMES, "onnx", Row("headrace_absent.module", "Absent", (".onnx",), "headrace[onnx]"))
    with pytest.raises(ModelLoadFailed, match=r"run: pip install 'headrace\[onnx\]'"):
        load(DATA / "iris_logreg.onnx")


def test_an_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelLoadFailed, match=r"no runtime 'caffe'; known are \['onnx', 'python', 'tensorflow', "):
        load_runtime(Artifact("m", "1", "caffe", None, "x"), threads=1)


def test_a_card_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.identity(dims=("N", 3)), tmp_path / "m.onnx")
    own = load(path).signature.to_json()
    (tmp_path / "m.card.json").write_text(json.dumps({"signature": own, "device": "cpu"}))
    assert load(path).signature.to_json() == own
    own["inputs"][0]["shape"] = [-1, 4]
    (tmp_path / "m.card.json").write_text(json.dumps({"signature": own}))
    assert "declares another signature than its own" in refusal(path).message


# -- devices -------------------------------------------------------------------------------------------------------


def test_a_gpu_without_a_gpu_build_is_an_error_with_the_line_to_type() -> None:
    artifact = Artifact("m", "1", "onnx", DATA / "iris_logreg.onnx", root=DATA)
    with pytest.raises(
        ModelLoadFailed, match=r"shall run on cuda:1, and there is only cpu; .*onnxruntime-gpu"
    ) as caught:
        load_runtime(artifact, threads=1, device="cuda:1")
    assert caught.value.details["expected"] == ["cpu"]


@pytest.mark.parametrize("how", ["silently", "loudly"])
def test_a_session_that_fell_back_to_the_cpu_is_an_error_unless_any_device_will_do(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, asked = onnxruntime.InferenceSession, []

    def session(content: bytes, options: object, *, providers: list[object], **others: object) -> object:
        asked.append(providers[0])
        if providers[0] != "CPUExecutionProvider":
            # What a GPU build does where CUDA does not come up: falls back, or raises where that is forbidden.
            assert others == {"enable_fallback": 0}
            if how == "loudly":
                raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")
        return real(content, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    artifact = Artifact("m", "1", "onnx", DATA / "iris_logreg.onnx", root=DATA)
    with pytest.raises(ModelLoadFailed, match=r"it shall run on cuda:1, and there is only cpu"):
        load_runtime(artifact, threads=1, device="cuda:1")
    assert asked[0] == ("CUDAExecutionProvider", {"device_id": "1"})
    assert load_runtime(artifact, threads=1, device="auto").device == "cpu"
    asked.clear()
    assert load_runtime(artifact, threads=1, device="cpu").device == "cpu"
    assert asked == ["CPUExecutionProvider"]
    assert capsys.readouterr().out == ""


# -- running -------------------------------------------------------------------------------------------------------


def test_out_of_memory_says_how_much_for_what_and_how_much_there_was(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.huge(), tmp_path / "m.onnx"))
    with pytest.raises(OutOfMemory) as caught:
        runtime.run({"x": tensor([1 << 42], np.int64)}, ["y"])
    details = caught.value.details
    assert details["allocated"] == 4 << 42
    assert 0 < details["available"] < 4 << 42
    assert details["tensor"] == "/inner/huge"
    assert runtime.run({"x": tensor([2], np.int64)}, ["y"])["y"].array.tolist() == [0, 0]


def test_a_failure_inside_the_graph_names_the_node_and_nothing_of_this_machine(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.reshape_each_row(), tmp_path / "m.onnx"))
    with pytest.raises(ModelFailed) as caught:
        runtime.run({"x": tensor([5], np.int64)}, ["y"])
    assert "Reshape node '/inner/Reshape'" in caught.value.message
    assert "onnxruntime_src" not in caught.value.message
    assert runtime.run({"x": tensor([3], np.int64)}, ["y"])["y"].array.tolist() == [3]


def test_two_inputs_that_disagree_in_a_shared_dimension_are_the_callers_fault(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.two_inputs_of_one_length(), tmp_path / "m.onnx"))
    with pytest.raises(ShapeMismatch) as caught:
        runtime.run({"ids": tensor([[1, 2, 3]], np.int64), "mask": tensor([[1, 1]], np.int64)}, ["y"])
    assert caught.value.details == {"input": "mask", "expected": {"seq": 3}, "actual": [1, 2]}


def test_bytes_that_are_no_text_are_the_callers_fault(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.identity(TensorProto.STRING), tmp_path / "m.onnx"))
    with pytest.raises(InvalidValue) as caught:
        runtime.run({"x": tensor([[b"\xff", b"a", b"b"]], object)}, ["y"])
    assert caught.value.details["input"] == "x"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a18_a_session_made_before_a_fork_refuses_instead_of_hanging(tmp_path: Path) -> None:
    runtime = load(onnx_files.save(onnx_files.linear(512, 512), tmp_path / "m.onnx"), threads=4)
    given = {"x": tensor(np.zeros((64, 512)))}
    runtime.run(given, ["y"])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "it ran"
        try:
            runtime.run(given, ["y"])
        except ModelFailed as error:
            text = error.message
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    timer = threading.Timer(30, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    timer.cancel()
    assert "loaded before a fork" in said


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a19_a_session_has_as_many_threads_as_it_was_given(threads: int, tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.linear(), tmp_path / "m.onnx")
    load(path).close()
    before = thread_count()
    runtime = load(path, threads=threads)
    assert thread_count() - before == threads - 1  # the thread that calls is one of them
    runtime.close()
    assert thread_count() == before
