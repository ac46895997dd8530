"""What torch does not do for us: signatures, refusals of pickles, state, read-only inputs, and errors that say what."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.errors import DtypeMismatch, ModelFailed, ModelLoadFailed, OutOfMemory, ShapeMismatch
from headrace.runtimes import Artifact, Runtime, load_runtime
from headrace.tensor import Datatype, Tensor

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headrace[torch]'")

from runtimes import torch_models, torch_modules  # noqa: E402
from runtimes.torch_models import save, scripted, signature  # noqa: E402

DATA = Path(__file__).parents[1] / "data"


def load(path: Path, *, threads: int = 1, device: str = "cpu") -> Runtime:
    return load_runtime(torch_models.artifact(path), threads=threads, device=device)


def refusal(path: Path, **others: Any) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        load(path, **others)
    assert str(path.parent) not in f"{caught.value.message} {caught.value.details}"
    return caught.value


def tensor(values: object, dtype: Any = np.float32) -> Tensor:
    return Tensor.of(np.array(values, dtype=dtype))


ROWS = tensor([[1, 2, 3], [4, 5, 6]])


# -- what it takes and gives ---------------------------------------------------------------------------------------


def test_a_real_model_answers_as_its_onnx_twin_does_on_real_digits(tmp_path: Path) -> None:
    rows = json.loads((DATA / "digits_rows.json").read_text())
    pixels = tensor(rows["pixels"])
    runtime = load(torch_models.digits(tmp_path))
    twin = load_runtime(Artifact("m", "1", "onnx", DATA / "digits_mlp.onnx"), threads=1)
    found = runtime.run({"X": pixels}, ["output_0"])["output_0"].array
    expected = twin.run({"X": pixels}, ["label", "probabilities"])
    assert np.allclose(found, expected["probabilities"].array, atol=1e-5)
    assert found.argmax(1).tolist() == expected["label"].array.tolist()
    right = sum(int(label) == digit for label, digit in zip(found.argmax(1), rows["digits"], strict=True))
    assert right >= 55


def test_one_example_is_enough_and_opens_the_rows(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Pair), tmp_path / "m.pt")
    np.savez(tmp_path / "m.example.npz", x=np.ones((1, 3), np.float32))
    runtime = load(path)
    assert runtime.platform == "pytorch_torchscript"
    assert runtime.signature.to_json() == signature(
        {"x": ("FP32", -1, 3)}, {"output_0": ("FP32", -1), "output_1": ("INT64", -1)}
    )
    found = runtime.run({"x": ROWS}, ["output_1", "output_0"])
    assert found["output_0"].array.tolist() == [6, 15]
    assert found["output_1"].array.tolist() == [2, 2]


def test_an_example_may_be_a_request_of_the_protocol(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Named), tmp_path / "m.pt")
    request = {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
    (tmp_path / "m.example.json").write_text(json.dumps(request))
    assert load(path).signature.to_json() == signature(
        {"pixels": ("FP32", -1, 2)}, {"total": ("FP32", -1), "best": ("INT64", -1)}
    )


def test_rows_stay_fixed_where_twice_the_rows_are_not_twice_the_answers(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Mixes), tmp_path / "m.pt")
    np.savez(tmp_path / "m.example.npz", x=np.ones((2, 3), np.float32))
    assert load(path).signature.to_json() == signature({"x": ("FP32", 2, 3)}, {"output_0": ("FP32", 3)})


def test_a_card_goes_before_an_example_and_names_the_outputs(tmp_path: Path) -> None:
    card = signature({"in": ("FP32", -1, -1)}, {"sum": ("FP32", -1), "best": ("INT64", -1)})
    path = save(scripted(torch_modules.Pair), tmp_path / "m.pt", signature=card)
    np.savez(tmp_path / "m.example.npz", **{"in": np.ones((1, 5), np.float32)})
    runtime = load(path)
    assert runtime.signature.to_json() == card
    assert runtime.run({"in": ROWS}, ["best", "sum"])["sum"].array.tolist() == [6, 15]


def test_a_list_and_a_dict_are_outputs_by_place_and_by_name(tmp_path: Path) -> None:
    card = signature({"x": ("FP32", -1, 3)}, {"one": ("FP32", -1, 3), "two": ("FP32", -1, 3)})
    runtime = load(save(scripted(torch_modules.Listed), tmp_path / "list.pt", signature=card))
    assert runtime.run({"x": ROWS}, ["two"])["two"].array.tolist() == [[2, 4, 6], [8, 10, 12]]
    card = signature({"x": ("FP32", -1, 3)}, {"best": ("INT64", -1)})
    runtime = load(save(scripted(torch_modules.Named), tmp_path / "dict.pt", signature=card))
    assert runtime.run({"x": ROWS}, ["best"])["best"].array.tolist() == [2, 2]


@pytest.mark.parametrize("names", [("b", "a"), ("second", "first")])
def test_inputs_go_by_the_names_of_arguments_or_else_by_their_order(names: tuple[str, str], tmp_path: Path) -> None:
    path = save(scripted(torch_modules.TwoIn), tmp_path / "m.pt", *names, "y")
    one, two = tensor([[1, 1, 1]]), tensor([[5, 5, 5]])
    found = load(path).run({names[0]: one, names[1]: two}, ["y"])["y"].array
    # `a - b`: by name b is 1 and a is 5; by order the first is a.
    assert found.tolist() == ([[4, 4, 4]] if names == ("b", "a") else [[-4, -4, -4]])


def test_an_optional_tensor_may_be_declared_or_left_out(tmp_path: Path) -> None:
    alone = load(save(scripted(torch_modules.Optionally), tmp_path / "one.pt", "a", "y"))
    assert alone.run({"a": ROWS}, ["y"])["y"] == ROWS
    path = save(scripted(torch_modules.TwoIn), tmp_path / "two.pt", "a", "y")
    assert "it takes ['a', 'b'], and ['a'] are declared" in refusal(path).message


VALUES = {
    Datatype.BOOL: np.array([[True, False, True]]),
    Datatype.UINT8: np.array([[0, 1, 255]], np.uint8),
    Datatype.UINT16: np.array([[0, 1, 65535]], np.uint16),
    Datatype.UINT32: np.array([[0, 1, 2**32 - 1]], np.uint32),
    Datatype.UINT64: np.array([[0, 1, 2**64 - 1]], np.uint64),
    Datatype.INT8: np.array([[-128, 0, 127]], np.int8),
    Datatype.INT16: np.array([[-32768, 0, 32767]], np.int16),
    Datatype.INT32: np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    Datatype.INT64: np.array([[-(2**63), 2**53 + 1, 2**63 - 1]], np.int64),
    Datatype.FP16: np.array([[0.5, np.nan, np.inf]], np.float16),
    Datatype.FP32: np.array([[0.1, np.nan, -np.inf]], np.float32),
    Datatype.FP64: np.array([[0.1, -0.0, 1e308]], np.float64),
    Datatype.BF16: np.array([[0.5, np.nan, -3e38]], ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("datatype", VALUES, ids=str)
def test_every_datatype_passes_through_bit_for_bit(datatype: Datatype, tmp_path: Path) -> None:
    card = signature({"x": (str(datatype), -1, 3)}, {"y": (str(datatype), -1, 3)})
    runtime = load(save(scripted(torch_modules.Same), tmp_path / "m.pt", signature=card))
    for rows in (0, 1, 3):
        given = Tensor.of(np.concatenate([VALUES[datatype]] * rows) if rows else VALUES[datatype][:0])
        found = runtime.run({"x": given}, ["y"])["y"]
        assert found == given and found.shape == (rows, 3)


def test_text_is_refused_at_load_with_what_can_be_taken(tmp_path: Path) -> None:
    card = signature({"x": ("BYTES", -1)}, {"y": ("FP32", -1)})
    error = refusal(save(scripted(torch_modules.Same), tmp_path / "m.pt", signature=card))
    assert "TorchScript has no text" in error.message
    assert "FP32" in error.details["expected"] and "BYTES" not in error.details["expected"]


def test_scalars_go_in_and_out(tmp_path: Path) -> None:
    card = signature({"x": ("INT64",)}, {"y": ("INT64",)})
    runtime = load(save(scripted(torch_modules.Same), tmp_path / "m.pt", signature=card))
    assert runtime.run({"x": tensor(16000, np.int64)}, ["y"])["y"] == tensor(16000, np.int64)


def test_an_answer_that_is_a_view_is_made_contiguous(tmp_path: Path) -> None:
    found = load(save(scripted(torch_modules.Turned), tmp_path / "m.pt", "x", "y")).run({"x": ROWS}, ["y"])["y"]
    assert found == ROWS and found.array.flags.c_contiguous


# -- what is refused -----------------------------------------------------------------------------------------------


def test_without_a_card_or_an_example_it_is_refused_with_the_files_to_write(tmp_path: Path) -> None:
    error = refusal(save(scripted(torch_modules.Same), tmp_path / "net.v2.pt"))
    assert "neither datatypes nor shapes" in error.message
    assert error.details["expected"] == ["net.v2.card.json", "net.v2.example.npz", "net.v2.example.json"]


class _Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return (open, (self.mark, "w"))


@pytest.mark.parametrize("kind", ["torch", "torch_old", "pickle"])
@pytest.mark.parametrize("ending", [".pt", ".pth", ".jit"])
def test_a_pickle_is_refused_with_the_way_out_and_never_unpickled(kind: str, ending: str, tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    path = tmp_path / f"m{ending}"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(_Trap(mark)))
    else:
        torch.save(_Trap(mark), path, _use_new_zipfile_serialization=kind == "torch")
    np.savez(tmp_path / "m.example.npz", x=np.ones((1, 3), np.float32))
    error = refusal(path)
    assert "it is a pickle" in error.message and "torch.jit.trace" in error.message
    assert not mark.exists()


def test_an_example_that_holds_pickled_objects_is_refused(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt")
    mark = tmp_path / "unpickled"
    np.savez(tmp_path / "m.example.npz", x=np.array([_Trap(mark)], dtype=object))
    assert "m.example.npz is not a file of plain arrays" in refusal(path).message
    assert not mark.exists()


def test_a_torch_export_archive_is_told_from_torchscript(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        for name in ("archive/archive_format", "archive/models/model.json", "archive/data/weights/weight_0"):
            archive.writestr(name, "pt2")
    assert "torch.export archive" in refusal(tmp_path / "m.pt").message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent", "there is no such file"),
        ("folder", "it is a folder"),
        ("empty", "the file is empty"),
        ("cut", "cut short"),
        ("text", "neither TorchScript nor any other zip"),
        ("zip", "a zip archive, but not TorchScript"),
        ("state", "it is a pickle (written by torch.save)"),
        ("module", "it is a pickle (written by torch.save)"),
        ("old", "it is a pickle"),
        ("pickle", "it is a pickle"),
    ],
)
def test_what_is_not_torchscript_says_what_it_is(name: str, text: str, tmp_path: Path) -> None:
    torch_models.broken(tmp_path)
    assert text in refusal(tmp_path / f"{name}.pt").message


def test_a_file_of_another_kind_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(pickle.dumps({}))
    code = (
        "import sys; from pathlib import Path\n"
        "from headrace.runtimes import Artifact, load_runtime\n"
        f"try: load_runtime(Artifact('m', '1', 'torchscript', Path({str(tmp_path / 'm.pt')!r})), threads=1)\n"
        "except Exception as error: assert 'it is a pickle' in str(error); assert 'torch' not in sys.modules\n"
        "else: raise SystemExit('loaded')"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | _path()).returncode == 0


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(("module", "text"), [("Counted", "'times' is int"), ("Text", "it returns str")])
def test_what_takes_or_returns_anything_but_tensors_is_refused(module: str, text: str, tmp_path: Path) -> None:
    path = save(scripted(getattr(torch_modules, module)), tmp_path / "m.pt", "x", "y")
    assert text in refusal(path).message


def test_a_card_that_declares_another_number_of_outputs_is_refused(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Pair), tmp_path / "m.pt", "x", "y")
    assert "it returns 2 tensors, and its card declares 1" in refusal(path).message


@pytest.mark.parametrize(
    ("card", "text"),
    [
        ("{", "m.card.json is not a card"),
        ('{"singature": {}}', "unknown field `singature`"),
        ('{"signature": {"inputs": [{"name": "x", "datatype": "F32", "shape": [1]}], "outputs": []}}', "no datatype"),
        ('{"device": "tpu"}', "names the device 'tpu'"),
    ],
)
def test_a_card_that_says_nonsense_is_refused_and_not_passed_over(card: str, text: str, tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt")
    (tmp_path / "m.card.json").write_text(card)
    assert text in refusal(path).message


def test_an_example_that_does_not_run_says_why(tmp_path: Path) -> None:
    path = save(torch_models.reshape_each_row(), tmp_path / "m.pt")
    np.savez(tmp_path / "m.example.npz", x=np.full((1, 3), -1, np.float32))
    assert "it fails on its example: in x.reshape: shape '[1, 4]' is invalid" in refusal(path).message


def test_what_was_exported_in_training_mode_is_refused(tmp_path: Path) -> None:
    with torch_models.quiet():
        module = torch.jit.trace(torch.nn.Dropout(0.5), torch.ones(2, 3), check_trace=False)
    error = refusal(save(module, tmp_path / "m.pt", "x", "y"))
    assert "exported in training mode (dropout is on); call .eval()" in error.message


# -- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["Counts", "Remembers", "RemembersInALoop"])
def test_a_module_that_keeps_state_is_refused_with_the_way_out(module: str, tmp_path: Path) -> None:
    path = save(scripted(getattr(torch_modules, module)), tmp_path / "m.pt", "x", "y")
    message = refusal(path).message
    assert "it keeps state from one run to the next" in message and '"stateful": true in m.card.json' in message


def test_a_stateful_module_that_is_allowed_runs_one_at_a_time_and_no_rows_together(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Counts), tmp_path / "open.pt", "x", "y", stateful=True)
    assert "rows of several callers cannot run together" in refusal(path).message
    card = signature({"x": ("FP32", 1, 3)}, {"y": ("FP32", 1, 3)})
    runtime = load(save(scripted(torch_modules.Counts), tmp_path / "m.pt", signature=card, stateful=True))
    assert not runtime.concurrent and not runtime.signature.batchable
    given = tensor([[0, 0, 0]])
    assert [runtime.run({"x": given}, ["y"])["y"].array[0, 0] for _ in range(3)] == [1, 2, 3]


def test_stateless_modules_are_concurrent_and_steady_where_nothing_branches(tmp_path: Path) -> None:
    plain = load(save(scripted(torch_modules.Turned), tmp_path / "plain.pt", "x", "y"))
    branching = load(save(torch_models.reshape_each_row(), tmp_path / "branching.pt", "x", "y"))
    assert plain.concurrent and plain.steady
    assert branching.concurrent and not branching.steady


@pytest.mark.parametrize("module", ["Writes", "WritesThroughAView"])
def test_a_module_that_writes_into_its_input_does_not_write_into_the_request(module: str, tmp_path: Path) -> None:
    runtime = load(save(scripted(getattr(torch_modules, module)), tmp_path / "m.pt", "x", "y"))
    given = tensor([[1, 2, 3]])
    first = runtime.run({"x": given}, ["y"])["y"]
    assert given == tensor([[1, 2, 3]]) and first != given
    assert runtime.run({"x": given}, ["y"])["y"] == first


def test_batch_norm_and_dropout_in_evaluation_are_no_state(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout())
    with torch_models.quiet():
        module = torch.jit.script(net)  # in training mode: loading sets it right
    runtime = load(save(module, tmp_path / "m.pt", "x", "y"))
    assert runtime.concurrent
    expected = net.eval()(torch.from_numpy(ROWS.array.copy())).detach().numpy()
    for _ in range(3):
        assert np.allclose(runtime.run({"x": ROWS}, ["y"])["y"].array, expected, atol=1e-6)


# -- running -------------------------------------------------------------------------------------------------------


def test_out_of_memory_says_how_much_for_what_and_how_much_there_was(tmp_path: Path) -> None:
    card = signature({"x": ("INT64", 1)}, {"y": ("FP32", -1)})
    runtime = load(save(scripted(torch_modules.Greedy), tmp_path / "m.pt", signature=card))
    with pytest.raises(OutOfMemory) as caught:
        runtime.run({"x": tensor([1 << 42], np.int64)}, ["y"])
    details = caught.value.details
    assert details["allocated"] == 4 << 42
    assert 0 < details["available"] < 4 << 42
    assert details["tensor"] == "torch.zeros"
    assert runtime.run({"x": tensor([2], np.int64)}, ["y"])["y"].array.tolist() == [0, 0]


def test_a_cuda_out_of_memory_is_read_from_its_text() -> None:
    from headrace.runtimes.torchscript_graph import memory_wanted

    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB"
    assert memory_wanted(torch.OutOfMemoryError(text)) == (int(2.5 * 2**30), None)
    assert memory_wanted(RuntimeError("std::bad_alloc")) == (None, None)
    assert memory_wanted(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_a_failure_names_the_operation_and_nothing_of_the_exporters_machine(tmp_path: Path) -> None:
    runtime = load(save(torch_models.reshape_each_row(), tmp_path / "m.pt", "x", "y"))
    with pytest.raises(ModelFailed) as caught:
        runtime.run({"x": tensor([[-1, 0, 0]])}, ["y"])
    message = caught.value.message
    assert message == "the model failed: in x.reshape: shape '[1, 4]' is invalid for input of size 3"


def test_what_a_script_raises_is_told(tmp_path: Path) -> None:
    runtime = load(save(scripted(torch_modules.Raises), tmp_path / "m.pt", "x", "y"))
    with pytest.raises(ModelFailed, match=r"^the model failed: ValueError: a value is above five$"):
        runtime.run({"x": tensor([[9, 0, 0]])}, ["y"])
    assert runtime.run({"x": tensor([[1, 0, 0]])}, ["y"])["y"].array.tolist() == [[2, 0, 0]]


def test_wrong_names_shapes_and_datatypes_are_found_before_torch_is_asked(tmp_path: Path) -> None:
    checks = load(save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y")).signature.check
    with pytest.raises(ShapeMismatch):
        checks({"x": tensor([[1, 2, 3, 4]])})
    with pytest.raises(ShapeMismatch):
        checks({"x": tensor([1, 2, 3])})
    with pytest.raises(DtypeMismatch):
        checks({"x": tensor([[1, 2, 3]], np.float64)})


@pytest.mark.parametrize("card", [{"y": ("FP64", -1, 3)}, {"y": ("FP32", -1)}])
def test_an_answer_that_is_not_what_the_card_declares_is_a_failure_that_says_so(card: Any, tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt", signature=signature({"x": ("FP32", -1, 3)}, card))
    with pytest.raises(ModelFailed, match=r"output 'y' is FP32 \[2, 3\]; declared is ") as caught:
        load(path).run({"x": ROWS}, ["y"])
    assert caught.value.details["output"] == "y"


def test_an_answer_that_is_no_tensor_of_ours_is_a_failure_that_says_so(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Complex), tmp_path / "m.pt", "x", "y")
    with pytest.raises(ModelFailed, match=r"output 'y' is torch\.complex64"):
        load(path).run({"x": ROWS}, ["y"])


def test_a_dict_without_a_declared_output_is_a_failure_that_names_it(tmp_path: Path) -> None:
    card = signature({"x": ("FP32", -1, 3)}, {"absent": ("FP32", -1)})
    path = save(scripted(torch_modules.Named), tmp_path / "m.pt", signature=card)
    with pytest.raises(ModelFailed, match=r"no output 'absent'; it returned \['best', 'total'\]"):
        load(path).run({"x": ROWS}, ["absent"])


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error(device: str, tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y")
    assert f"it shall run on {device}, and there is only cpu" in refusal(path, device=device).message
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y", device=device)
    assert f"it shall run on {device}" in refusal(path, device="cpu").message  # the card goes before the setting
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y", device="cpu")
    assert load(path, device=device).device == "cpu"


def test_its_pool_has_the_threads_it_was_given_in_whatever_thread_it_runs(tmp_path: Path) -> None:
    runtime = load(save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y"), threads=3)
    torch.set_num_threads(1)
    seen: list[int] = []

    def run() -> None:
        runtime.run({"x": ROWS}, ["y"])
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    run()
    assert seen == [3, 3]
    torch.set_num_threads(1)


def test_the_faster_of_two_forms_answers_the_same(tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten()
    ).eval()
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch_models.quiet():
        path = save(torch.jit.trace(net, images), tmp_path / "m.pt")
    np.savez(tmp_path / "m.example.npz", x=images[:1].numpy())
    runtime = load(path)
    found = runtime.run({"x": Tensor.of(images.numpy())}, ["output_0"])["output_0"].array
    assert np.allclose(found, net(images).detach().numpy(), atol=1e-5)


def test_a_fork_of_a_loaded_model_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    path = save(scripted(torch_modules.Same), tmp_path / "m.pt", "x", "y")
    code = (
        "import os; from pathlib import Path; import numpy as np\n"
        "from headrace.errors import ModelFailed\n"
        "from headrace.runtimes import Artifact, load_runtime\n"
        "from headrace.tensor import Tensor\n"
        f"runtime = load_runtime(Artifact('m', '1', 'torchscript', Path({str(path)!r})), threads=2)\n"
        "if not os.fork():\n"
        "    try: runtime.run({'x': Tensor.of(np.ones((1, 3), np.float32))}, ['y'])\n"
        "    except ModelFailed as error: os._exit(7 if 'before a fork' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | _path(), timeout=100).returncode == 0


def test_a_file_overwritten_while_it_is_served_does_not_change_the_answers(tmp_path: Path) -> None:
    other = save(scripted(torch_modules.Raises), tmp_path / "other.pt").read_bytes()
    path = save(scripted(torch_modules.Turned), tmp_path / "m.pt", "x", "y")
    runtime = load(path)
    path.write_bytes(other)  # in place: the same inode
    assert runtime.run({"x": ROWS}, ["y"])["y"] == ROWS
    assert load(path).run({"x": tensor([[1, 2, 3]])}, ["y"])["y"] == tensor([[2, 4, 6]])
