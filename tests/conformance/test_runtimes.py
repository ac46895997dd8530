"""The shipped suite, on every runtime there is."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from headrace.models.frames import Begin
from headrace.models.process_runner import ProcessRunner
from headrace.runtimes import Artifact, Runtime
from headrace.tensor import Tensor
from headrace.testing.runtimes import RuntimeSuite
from runtimes import onnx_files, tensorflow_models, torch_models

DATA = Path(__file__).parents[1] / "data"


def _onnx(path: Path) -> Artifact:
    return Artifact("m", "1", "onnx", path, root=path.parent)


def _python(name: str) -> Artifact:
    return Artifact("m", "1", "python", None, f"headrace.testing.models:{name}")


class TestOnnx(RuntimeSuite):
    def artifact(self, folder: Path) -> Artifact:
        return _onnx(DATA / "digits_mlp.onnx")

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        values = [[rng.uniform(0, 16) for _ in range(64)] for _ in range(rows)]
        return {"X": Tensor.of(np.array(values, np.float32))}

    def broken(self, folder: Path) -> Sequence[Artifact]:
        whole = (DATA / "digits_mlp.onnx").read_bytes()
        for name, content in {"empty": b"", "cut": whole[: len(whole) // 2], "text": b"hello"}.items():
            (folder / f"{name}.onnx").write_bytes(content)
        (folder / "folder.onnx").mkdir()
        unknown = onnx_files.identity()
        unknown.graph.node[0].op_type = "Nonsense"
        onnx_files.save(unknown, folder / "operator.onnx")
        onnx_files.save(onnx_files.graph([], [], [], opset=99), folder / "opset.onnx")
        onnx_files.save(onnx_files.graph([], [], [], ir=99), folder / "ir.onnx")
        onnx_files.with_data_file(folder, "parted.onnx")
        (folder / "weights.bin").unlink()
        names = ["absent", "empty", "cut", "text", "folder", "operator", "opset", "ir", "parted"]
        return [_onnx(folder / f"{name}.onnx") for name in names]


class TestOnnxThatFails(TestOnnx):
    def artifact(self, folder: Path) -> Artifact:
        return _onnx(onnx_files.save(onnx_files.reshape_each_row(), folder / "m.onnx"))

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        # Its largest value must be 3, so a row is a row of 3 and the answers differ in nothing: rows are what counts.
        return {"x": Tensor.of(np.full(rows, 3, np.int64))}

    def failing(self) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.array([5], np.int64))}


class TestPython(RuntimeSuite):
    places = False

    def artifact(self, folder: Path) -> Artifact:
        return _python("neg")

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.array([[rng.random()] * 3 for _ in range(rows)], np.float32))}

    def failing(self) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.full((1, 3), -1, np.float32))}

    def broken(self, folder: Path) -> Sequence[Artifact]:
        entries = ["headrace.testing.models:absent", "headrace.testing.absent:x", "headrace.testing.models:Arrays", ":"]
        return [Artifact("m", "1", "python", None, entry) for entry in entries]


class TestPythonText(TestPython):
    def artifact(self, folder: Path) -> Artifact:
        return _python("text")

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.array([rng.randbytes(rng.randint(0, 9)) for _ in range(rows)], object))}

    def failing(self) -> None:
        return None


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: pip install 'headrace[torch]'")
class TestTorchscript(RuntimeSuite):
    def artifact(self, folder: Path) -> Artifact:
        return torch_models.artifact(torch_models.save(torch_models.reshape_each_row(), folder / "m.pt", "x", "y"))

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.array([[rng.random() for _ in range(3)] for _ in range(rows)], np.float32))}

    def failing(self) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.full((1, 3), -5, np.float32))}

    def broken(self, folder: Path) -> Sequence[Artifact]:
        return [torch_models.artifact(path) for path in torch_models.broken(folder)]


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow: pip install 'headrace[tensorflow]'")
class TestSavedModel(RuntimeSuite):
    def artifact(self, folder: Path) -> Artifact:
        return tensorflow_models.artifact(DATA / "digits_sm" / "saved_model.pb")

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        return {"image": Tensor.of(np.array([rng.random() for _ in range(rows * 64)], np.float32).reshape(-1, 8, 8, 1))}

    def broken(self, folder: Path) -> Sequence[Artifact]:
        return [tensorflow_models.artifact(path) for path in tensorflow_models.broken(folder)]


class TestSavedModelThatFails(TestSavedModel):
    def artifact(self, folder: Path) -> Artifact:
        shutil.rmtree(folder / "sm", ignore_errors=True)
        return tensorflow_models.artifact(tensorflow_models.reshape_each_row(folder / "sm"))

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        # Its largest value must be 3, so that every row can be reshaped.
        return {"x": Tensor.of(np.full(rows, 3, np.int64))}

    def failing(self) -> dict[str, Tensor]:
        return {"x": Tensor.of(np.array([5], np.int64))}


class TestFrozenGraph(TestSavedModel):
    def artifact(self, folder: Path) -> Artifact:
        return tensorflow_models.artifact(DATA / "digits_frozen.pb")

    def inputs(self, rows: int, rng: random.Random) -> dict[str, Tensor]:
        return {"image:0": super().inputs(rows, rng)["image"]}


class _InAProcess:
    """The same promises hold where the runtime is in a runner's process."""

    @pytest.fixture(autouse=True)
    def _apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(artifact: Artifact, *, threads: int, device: str = "auto") -> Runtime:
            begin = Begin.of(artifact, threads=threads, device=device, size_max=8, fast_s=0.0003)
            runner = ProcessRunner(
                begin, number=0, run_s_max=60, say=lambda line, /, **fields: None, changed=lambda runner: None
            )
            runner.open()
            assert runner.runtime is not None
            return runner.runtime

        monkeypatch.setattr("headrace.testing.runtimes.load_runtime", load)


class TestOnnxInAProcess(_InAProcess, TestOnnx):
    pass


class TestPythonInAProcess(_InAProcess, TestPython):
    pass


class TestPythonTextInAProcess(_InAProcess, TestPythonText):
    pass
