"""Small SavedModels and graphs. TensorFlow is imported where it is used: most of the suite runs without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.runtimes import SAVED_MODEL, Artifact

DATA = Path(__file__).parents[1] / "data"


def artifact(path: Path) -> Artifact:
    root = path.parent.parent if path.name == SAVED_MODEL else path.parent
    return Artifact("m", "1", "tensorflow", path, root=root)


def card(path: Path, **card: Any) -> Path:
    name = "model" if path.name == SAVED_MODEL else path.stem
    (path.parent / f"{name}.card.json").write_text(json.dumps(card))
    return path


def save(folder: Path, call: Callable[..., Any], inputs: dict[str, tuple[Any, Any]], **others: Any) -> Path:
    """Save a function of named inputs, (shape, dtype) each, as the signature serving_default."""
    import tensorflow as tf

    module = tf.Module()
    for name, value in others.items():
        setattr(module, name, value)
    specs = {name: tf.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in inputs.items()}
    module.call = tf.function(call).get_concrete_function(**specs)
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.call})
    return folder / SAVED_MODEL


def reshape_each_row(folder: Path) -> Path:
    """Save what fails inside its graph unless its largest value is 3."""
    import tensorflow as tf

    def call(x: Any) -> dict[str, Any]:
        rows = tf.shape(x)[0]
        zeros = tf.zeros([rows, 3], tf.int64)
        return {"y": x + tf.reduce_sum(tf.reshape(zeros, tf.stack([tf.cast(rows, tf.int64), tf.reduce_max(x)])), 1)}

    return save(folder, call, {"x": ([None], tf.int64)})


def freeze(path: Path, build: Callable[[], None]) -> Path:
    """Write the graph that `build` makes, as it is."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        build()
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def copy(folder: Path) -> Path:
    """Return a copy of the real SavedModel that may be broken."""
    shutil.copytree(DATA / "digits_sm", folder)
    return folder / SAVED_MODEL


def broken(folder: Path) -> list[Path]:
    """Write models that cannot be loaded, each in another way."""
    graph, saved = (DATA / "digits_frozen.pb").read_bytes(), (DATA / "digits_sm" / SAVED_MODEL).read_bytes()
    contents = {
        "empty": b"",
        "text": b"hello",
        "lines": b"\nnode {\n}",
        "cut": graph[: len(graph) // 2],
        "saved": saved,
        "operator": graph.replace(b"Conv2D", b"Conv9D"),
    }
    for name, content in contents.items():
        (folder / f"{name}.pb").write_bytes(content)
    (folder / "folder.pb").mkdir()
    found = [folder / f"{name}.pb" for name in ("absent", "folder", *contents)]
    cut = copy(folder / "cut_graph")
    cut.write_bytes(saved[: len(saved) // 2])
    frozen = copy(folder / "not_saved")
    frozen.write_bytes(b"\x08\x01")
    values = copy(folder / "cut_variables")
    data = values.parent / "variables" / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:40_000])
    lost = copy(folder / "no_variables")
    shutil.rmtree(lost.parent / "variables")
    return [*found, cut, frozen, values, lost]
