"""The tensorflow runtime: SavedModels and frozen graphs, told apart by what is in the file.

TensorFlow takes inputs of wrong lengths and answers; a signature that is checked before is what stands against that.
Its pool of threads is one for the whole process and gets its size from the first model that is loaded. Its outputs
come in no fixed order, so they are sorted by name here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, ModelFailed
from headrace.runtimes.base import SAVED_MODEL, Artifact, Runtime, load_failed, no_device, out_of_memory, plain
from headrace.runtimes.tensorflow_files import EXPECTED, kind_of
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

# Read when it is imported: stderr is ours; what matters comes as an exception.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

__all__ = ["TensorflowRuntime"]

_DATATYPES = {
    tf.bool: Datatype.BOOL,
    tf.uint8: Datatype.UINT8,
    tf.uint16: Datatype.UINT16,
    tf.uint32: Datatype.UINT32,
    tf.uint64: Datatype.UINT64,
    tf.int8: Datatype.INT8,
    tf.int16: Datatype.INT16,
    tf.int32: Datatype.INT32,
    tf.int64: Datatype.INT64,
    tf.float16: Datatype.FP16,
    tf.float32: Datatype.FP32,
    tf.float64: Datatype.FP64,
    tf.bfloat16: Datatype.BF16,
    tf.string: Datatype.BYTES,
}
_VARIABLES = {"Variable", "VariableV2", "VarHandleOp", "AutoReloadVariable"}
#: Operators that write into what outlives a run.
_WRITES = re.compile(
    r"Assign\w*|Resource\w*Apply\w*|Resource(Scatter|StridedSliceAssign)\w*|Scatter(Add|Sub|Mul|Div|Min|Max|Update)"
    r"|ScatterNd(Add|Sub|Update)|\w*Enqueue\w*|LookupTable(Insert|Remove|Import)\w*|Stack(Push|Pop)\w*"
)
#: Values depend on values here, and so does how long a run takes.
_BRANCHES = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase", "Switch", "LoopCond"}
_MEMORY = re.compile(r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)")
_NODE = re.compile(r"\[\[\{\{node ([^}]+)\}\}")
_FRAMES = re.compile(r"Graph execution error:\s*|Detected at node \S+ defined at.*?<stack traces unavailable>\s*", re.S)
_TAIL = re.compile(r"\s*\[\[\{\{node.*|\s*\[Op:[^\]]*\]\s*$", re.S)

Call = Callable[[dict[str, Any]], Mapping[str, Any]]


class TensorflowRuntime(Runtime):
    """A SavedModel's signature, or a frozen graph from its placeholders to its last nodes."""

    def __init__(self, kept: object, call: Call, signature: Signature, *, platform: str, device: str) -> None:
        self.platform = platform
        self.signature = signature
        self.device = device
        #: A signature alone does not hold its variables: without the object that it came from it fails.
        self._kept: object = kept
        self._call: Call | None = call
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._pid = os.getpid()

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> TensorflowRuntime:
        """Load a file. Raises ModelLoadFailed naming the file (relative), the reason and what was expected."""
        kind = kind_of(artifact)
        _pool(threads)
        device = _device(artifact)
        try:
            with _on(device):
                if kind == "saved_model":
                    kept, call, signature, graph = _saved_model(artifact)
                else:
                    kept, call, signature, graph = _frozen(artifact)
        except HeadraceError:
            raise
        except MemoryError as error:
            raise load_failed(artifact, "there is not enough memory to load it", EXPECTED) from error
        except Exception as error:  # its own errors, and a dozen of Python's
            raise load_failed(artifact, _unloadable(artifact, error), EXPECTED) from error
        operators = set(_operators(graph))
        stateful = sorted(operator for operator in operators if _WRITES.fullmatch(operator))
        if stateful and not artifact.given.stateful:
            reason = (
                f"it keeps state from one run to the next ({stateful[0]}), so that callers would get each other's; "
                'hand the state in and out as tensors, or say "stateful": true in its card to have it run one at a time'
            )
            raise load_failed(artifact, reason, EXPECTED)
        if stateful and signature.batchable:
            reason = "it keeps state, so rows of several callers cannot run together: fix its first dimensions"
            raise load_failed(artifact, reason, ["a card whose shapes begin with 1"])
        platform = "tensorflow_savedmodel" if kind == "saved_model" else "tensorflow_graphdef"
        runtime = cls(kept, call, signature, platform=platform, device=device)
        runtime.concurrent = not stateful
        runtime.steady = not operators & _BRANCHES
        return runtime

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Compute the named outputs. Raises ModelFailed or OutOfMemory (allocated, available, tensor)."""
        call = self._call
        if call is None:
            raise ModelFailed("the model is closed")
        if self._pid != os.getpid():
            # The threads of its pool did not come along; TensorFlow would wait for them for ever.
            raise ModelFailed("the model was loaded before a fork; load it in the process that runs it")
        try:
            with _on(self.device):
                found = call({name: tf.constant(tensor.array) for name, tensor in inputs.items()})
            return {name: self._tensor(name, found[name]) for name in outputs}
        except HeadraceError:
            raise
        except Exception as error:
            raise _failed(error) from error

    def close(self) -> None:
        """Free memory; the pool of threads stays. Idempotent."""
        self._call = None
        self._kept = None

    def _tensor(self, name: str, value: Any) -> Tensor:
        datatype = self._datatypes[name]
        array = value.numpy()
        if datatype is Datatype.BYTES and not isinstance(array, np.ndarray):
            array = np.array(array, dtype=object)  # a scalar comes as bytes
        return Tensor.of(array, datatype)


def _pool(threads: int) -> None:
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        pass  # another model came first; the pool is made once for the process


def _device(artifact: Artifact) -> str:
    asked = artifact.device
    # Asked first: `tf.device` takes any name and runs on the CPU where there is no such device.
    count = len(tf.config.list_physical_devices("GPU"))
    if asked == "cpu" or (asked == "auto" and not count):
        return "cpu"
    number = int(asked.partition(":")[2] or 0)
    if number >= count:
        hint = "" if tf.test.is_built_with_cuda() else "this TensorFlow is built without CUDA"
        raise no_device(artifact, ["cpu", *(f"cuda:{each}" for each in range(count))], hint)
    return f"cuda:{number}"


def _on(device: str) -> AbstractContextManager[Any]:
    if device != "cpu":
        place: AbstractContextManager[Any] = tf.device(f"/GPU:{device.partition(':')[2]}")
        return place
    # Where there is a GPU, the CPU has to be asked for.
    return tf.device("/CPU:0") if tf.config.list_physical_devices("GPU") else nullcontext()


def _saved_model(artifact: Artifact) -> tuple[object, Call, Signature, Any]:
    assert artifact.path is not None
    loaded = tf.saved_model.load(str(artifact.path.parent))
    names = sorted(loaded.signatures)
    name = "serving_default" if "serving_default" in names else names[0] if len(names) == 1 else None
    if name is None:
        reason = f"it has the signatures {names}; export it with one that is called serving_default"
        raise load_failed(artifact, reason, ["serving_default"])
    function = loaded.signatures[name]
    _, specs = function.structured_input_signature
    inputs = [(each, specs[each]) for each in sorted(specs)]
    outputs = [(each, function.structured_outputs[each]) for each in sorted(function.structured_outputs)]
    signature = _signature(artifact, inputs, outputs)

    def call(given: dict[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = function(**given)
        return found

    return loaded, call, signature, function.graph


def _frozen(artifact: Artifact) -> tuple[object, Call, Signature, Any]:
    assert artifact.path is not None
    definition = tf.compat.v1.GraphDef()
    definition.ParseFromString(artifact.path.read_bytes())
    variables = [node.name for node in definition.node if node.op in _VARIABLES]
    if variables:
        reason = f"it is not frozen: it has variables ({variables[0]}), whose values are elsewhere"
        raise load_failed(artifact, reason, EXPECTED)
    whole = tf.compat.v1.wrap_function(lambda: tf.compat.v1.import_graph_def(definition, name=""), [])
    given = artifact.given.signature
    if given is not None:
        feeds, fetches = given.input_names, given.output_names
    else:
        feeds = [f"{node.name}:0" for node in definition.node if node.op == "Placeholder"]
        fetches = _sinks(whole.graph, feeds)
    if not feeds or not fetches:
        raise load_failed(artifact, "it has no placeholder to feed, or nothing comes out of it", EXPECTED)
    tensors = {}
    for name in (*feeds, *fetches):
        try:
            tensors[name] = whole.graph.get_tensor_by_name(name)
        except (KeyError, ValueError) as error:
            legal = [*(f"{node.name}:0" for node in definition.node if node.op == "Placeholder"), "…"]
            raise load_failed(artifact, f"its card names {name!r}, which is not in the graph", legal) from error
    function = whole.prune([tensors[name] for name in feeds], [tensors[name] for name in fetches])
    signature = _signature(artifact, [(n, tensors[n]) for n in feeds], [(n, tensors[n]) for n in fetches])

    def call(inputs: dict[str, Any]) -> Mapping[str, Any]:
        return dict(zip(fetches, function(*(inputs[name] for name in feeds)), strict=True))

    return whole, call, signature, function.graph


def _sinks(graph: Any, feeds: Sequence[str]) -> list[str]:
    """Return the tensors of the nodes that no other node takes anything from, by name."""
    found = []
    for operation in graph.get_operations():
        used = operation._control_outputs or any(output.consumers() for output in operation.outputs)
        if not used and operation.type not in ("Const", "Placeholder", "PlaceholderWithDefault"):
            found += [output.name for output in operation.outputs]
    return sorted(found)


def _signature(artifact: Artifact, inputs: Sequence[tuple[str, Any]], outputs: Sequence[tuple[str, Any]]) -> Signature:
    """Return what the artifact says, or its card where it has one; both must name the same things."""
    given = artifact.given.signature
    said = {"input": dict(inputs), "output": dict(outputs)}
    if given is None:
        return Signature(
            tuple(_spec(artifact, "input", name, spec) for name, spec in inputs),
            tuple(_spec(artifact, "output", name, spec) for name, spec in outputs),
        )
    for kind, specs in (("input", given.inputs), ("output", given.outputs)):
        if kind == "input" and {spec.name for spec in specs} != set(said[kind]):
            reason = f"its card declares the inputs {given.input_names}, and it takes {sorted(said[kind])}"
            raise load_failed(artifact, reason, sorted(said[kind]))
        for spec in specs:
            own = said[kind].get(spec.name)
            if own is None or _DATATYPES.get(own.dtype) is not spec.datatype:
                has = f"{own.dtype.name}" if own is not None else f"only {sorted(said[kind])}"
                reason = f"its card declares the {kind} {spec.name!r} as {spec.datatype}, and it has {has}"
                raise load_failed(artifact, reason, sorted(said[kind]))
    return given


def _spec(artifact: Artifact, kind: str, name: str, spec: Any) -> TensorSpec:
    dtype, shape = getattr(spec, "dtype", None), getattr(spec, "shape", None)
    datatype = _DATATYPES.get(dtype)
    if datatype is None or not hasattr(shape, "rank"):
        reason = f"{kind} {name!r} is {getattr(dtype, 'name', type(spec).__name__)}, which is not a tensor we serve"
        raise load_failed(artifact, reason, EXPECTED)
    assert shape is not None
    if shape.rank is None:
        reason = f"{kind} {name!r} has no declared number of dimensions: give a signature in the card beside it"
        raise load_failed(artifact, reason, ['"shape": [-1, …]'])
    return TensorSpec(name, datatype, tuple(-1 if size is None else int(size) for size in shape))


def _operators(graph: Any) -> Iterator[str]:
    definition = graph.as_graph_def()
    for node in definition.node:
        yield node.op
    for function in definition.library.function:
        for node in function.node_def:
            yield node.op


def _unloadable(artifact: Artifact, error: Exception) -> str:
    assert artifact.path is not None
    if isinstance(error, IndexError) or "Read less bytes" in str(error):
        return "its variables are cut short"
    named = artifact.path.parent / "variables" / "variables.index"
    if artifact.path.name == SAVED_MODEL and (not named.is_file() or isinstance(error, FileNotFoundError)):
        return f"its variables are missing: {_why(error)}"
    return _why(error)


def _failed(error: Exception) -> HeadraceError:
    text = str(error)
    memory = _MEMORY.search(text)
    if memory is None:
        if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError) or "bad_alloc" in text:
            return out_of_memory(None, None)
        return ModelFailed(f"the model failed: {_why(error)}")
    shape = [int(size) for size in memory[1].split(",") if size]
    node = _NODE.search(text)
    try:
        itemsize = int(tf.as_dtype({"float": "float32", "double": "float64"}.get(memory[2], memory[2])).size)
    except TypeError:
        itemsize = 1
    return out_of_memory(math.prod(shape) * itemsize, f"{node[1]} {memory[2]}{shape}" if node else memory[2])


def _why(error: Exception) -> str:
    """Return TensorFlow's text in one line: the node and its complaint, without frames and paths."""
    text = str(error)
    node = _NODE.search(text)
    line = " ".join(_TAIL.sub("", _FRAMES.sub("", text)).replace(str(Path.cwd()), ".").split())
    line = line or type(error).__name__
    return plain(f"in node {node[1]}: {line}" if node else line, length_max=300)
