"""Small TorchScript files. torch is imported where it is used: most of the suite runs without it."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.runtimes import Artifact

Spec = Sequence[object]


@contextmanager
def quiet() -> Iterator[None]:
    """Exporting is deprecated, which is not the matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def artifact(path: Path) -> Artifact:
    return Artifact("m", "1", "torchscript", path, root=path.parent)


def scripted(source: type, **attributes: Any) -> Any:
    """Return the scripted form of a module class, which must be written in a file."""
    with quiet():
        import torch

        module = source()
        for name, value in attributes.items():
            setattr(module, name, value)
        return torch.jit.script(module.eval())


def save(module: Any, path: Path, *names: str, **card: Any) -> Path:
    """Save a module; with names, a card of FP32 [-1,3] tensors by them, the last of which is the output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with quiet():
        module.save(str(path))
    if names:
        specs = [{"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in names]
        card = {"signature": {"inputs": specs[:-1], "outputs": specs[-1:]}, **card}
    if card:
        path.with_suffix(".card.json").write_text(json.dumps(card))
    return path


def signature(inputs: dict[str, Spec], outputs: dict[str, Spec]) -> dict[str, Any]:
    """Return a card's signature: name → (datatype, dimension, …)."""

    def specs(of: dict[str, Spec]) -> list[dict[str, object]]:
        return [{"name": name, "datatype": spec[0], "shape": list(spec[1:])} for name, spec in of.items()]

    return {"inputs": specs(inputs), "outputs": specs(outputs)}


def reshape_each_row() -> Any:
    """Return a module that answers its input, and fails inside its graph where a value is below zero."""
    from runtimes import torch_modules

    return scripted(torch_modules.Picky)


def digits(folder: Path) -> Path:
    """Save the network of `digits_mlp.onnx`, weight for weight, as TorchScript."""
    import onnx
    import torch
    from onnx import numpy_helper

    model = onnx.load(Path(__file__).parents[1] / "data" / "digits_mlp.onnx")
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    scaler = {each.name: np.array(each.floats, np.float32) for each in model.graph.node[0].attribute}

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.from_numpy(scaler["offset"]))
            self.register_buffer("scale", torch.from_numpy(scaler["scale"]))

        def forward(self, pixels: Any) -> Any:
            return (pixels - self.offset) * self.scale

    net = torch.nn.Sequential(
        Scale(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10), torch.nn.Softmax(1)
    ).eval()
    with torch.no_grad():
        for layer, weight, bias in ((net[1], "coefficient", "intercepts"), (net[3], "coefficient1", "intercepts1")):
            layer.weight.copy_(torch.from_numpy(weights[weight].T.copy()))
            layer.bias.copy_(torch.from_numpy(weights[bias].ravel().copy()))
    with quiet():
        module = torch.jit.trace(net, torch.zeros(2, 64))
    path = save(module, folder / "digits.pt")
    np.savez(path.with_suffix(".example.npz"), X=np.zeros((1, 64), np.float32))
    return path


def broken(folder: Path) -> list[Path]:
    """Write files that cannot be loaded, each in another way."""
    import torch

    whole = save(reshape_each_row(), folder / "whole.pt", "x", "y").read_bytes()
    linear = torch.nn.Linear(3, 2)
    state, module, old = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with quiet():
        torch.save(linear.state_dict(), state)
        torch.save(linear, module)
        torch.save(linear.state_dict(), old, _use_new_zipfile_serialization=False)
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "hello")
    contents = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "text": b"hello",
        "zip": other.getvalue(),
        "state": state.getvalue(),
        "module": module.getvalue(),
        "old": old.getvalue(),
        "pickle": pickle.dumps({"a": 1}),
        "garbled": whole.replace(b"class Picky", b"klass Picky"),
    }
    for name, content in contents.items():
        (folder / f"{name}.pt").write_bytes(content)
    (folder / "folder.pt").mkdir()
    save(reshape_each_row(), folder / "bare.pt")
    return [folder / f"{name}.pt" for name in ("absent", "folder", "bare", *contents)]
