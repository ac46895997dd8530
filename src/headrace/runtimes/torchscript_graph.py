"""What the graph of a TorchScript module tells before it is run, and what its errors say afterwards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.runtimes.base import Artifact, load_failed, plain

__all__ = ["Calling", "calling", "faults", "memory_wanted", "mutates", "quiet", "steady", "why"]

#: Operators whose input of that number says that they were exported in training mode.
_TRAINING = {
    "aten::dropout": 2,
    "aten::dropout_": 2,
    "aten::feature_dropout": 2,
    "aten::alpha_dropout": 2,
    "aten::batch_norm": 5,
}
#: Values depend on values here, and so does how long a run takes.
_BRANCHES = {"prim::If", "prim::Loop"}
_MEMORY = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA_MEMORY = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ENFORCE = re.compile(r"\[enforce fail at [^\]]*\][^:]*\. ")
_KIND = re.compile(r"^(?:(?:RuntimeError|torch\.jit\.Error): ?|builtins\.)")
_HERE = re.compile(r"^(\s*)(~+) <--- HERE")


@dataclass(frozen=True, slots=True)
class Calling:
    """How the inputs of a signature become the arguments of `forward`."""

    #: Inputs in the order in which they are handed over.
    names: Sequence[str]
    #: Whether they are handed over by these names, rather than in this order.
    by_name: bool
    #: How many tensors come back; None where only a run tells.
    outputs: int | None


@contextmanager
def quiet() -> Iterator[None]:
    """Let torch not tell, at every load, that TorchScript is deprecated: whoever serves it knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def calling(artifact: Artifact, module: Any, given: Sequence[str]) -> Calling:
    """Return how inputs with the given names are handed over: by name where all are names of arguments, else in order.

    Raises ModelLoadFailed where they cannot be, and where `forward` takes or returns anything but tensors.
    """
    schema = module.forward.schema
    arguments = schema.arguments[1:]  # without the module itself
    known = [argument.name for argument in arguments]
    needed = [argument for argument in arguments if not argument.has_default_value()]
    for argument in needed:
        if argument.type.kind() != "TensorType":
            reason = f"its argument {argument.name!r} is {argument.type}; wrap it so that it takes tensors alone"
            raise load_failed(artifact, reason, ["forward(Tensor, …)"])
    by_name = set(given) <= set(known) and {argument.name for argument in needed} <= set(given)
    if not by_name and not len(needed) <= len(given) <= len(known):
        reason = f"it takes {known}, and {list(given)} are declared beside it"
        raise load_failed(artifact, reason, known)
    return Calling(tuple(given), by_name, _returns(artifact, schema.returns[0].type))


def faults(module: Any) -> Iterator[str]:
    """Yield what makes a module unfit to be served: parts of it that were exported in training mode."""
    for node in _nodes(module.inlined_graph):
        place = _TRAINING.get(node.kind())
        if place is not None and node.inputsSize() > place and node.inputsAt(place).toIValue() is True:
            operator = node.kind().partition("::")[2]
            yield f"it was exported in training mode ({operator} is on); call .eval() on the module and export it again"


def mutates(module: Any, *, inputs: bool = False) -> set[str]:
    """Return whether a run writes into "state" (attributes or constants); with `inputs`, into an "input" too."""
    found = set()
    for node in _nodes(module.inlined_graph):
        if node.kind() == "prim::SetAttr":
            found.add("state")
        for value in _written(node):
            origin = _origin(value)
            if origin in ("prim::GetAttr", "prim::Constant"):
                found.add("state")
            elif inputs and origin != "fresh":
                found.add("input")
    return found


def steady(module: Any) -> bool:
    """Return whether how long a run takes depends on shapes alone: nothing branches."""
    return not any(node.kind() in _BRANCHES for node in _nodes(module.inlined_graph))


def memory_wanted(error: Exception) -> tuple[int | None, str | None] | None:
    """Return the bytes that could not be had, and for which operation; None where something else went wrong."""
    text = str(error)
    found = _MEMORY.search(text)
    if found:
        return int(found[1]), _operation(text)
    found = _CUDA_MEMORY.search(text)
    if found:
        return int(float(found[1]) * _UNITS[found[2]]), _operation(text)
    if isinstance(error, MemoryError) or "bad_alloc" in text or type(error).__name__ == "OutOfMemoryError":
        return None, _operation(text)
    return None


def why(error: Exception) -> str:
    """Return torch's text in one line: the operation and its complaint, without the exporter's source and paths."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "TorchScript" not in lines[0]:
        return plain(_ENFORCE.sub("", lines[0]), length_max=300)
    last = _ENFORCE.sub("", _KIND.sub("", lines[-1]))
    operation = _operation(str(error))
    if operation is None or operation.startswith("raise "):
        return plain(last, length_max=300)
    return plain(f"in {operation}: {last}", length_max=300)


def _operation(text: str) -> str | None:
    """Return the expression that torch points at, in the last frame that it shows."""
    lines = text.splitlines()
    for number in range(len(lines) - 1, 0, -1):
        mark = _HERE.match(lines[number])
        if mark:
            pointed = lines[number - 1][len(mark[1]) : mark.end(2)].strip()
            return plain(pointed, length_max=60) or None
    return None


def _returns(artifact: Artifact, kind: Any) -> int | None:
    if kind.kind() == "TensorType":
        return 1
    if kind.kind() == "TupleType" and all(part.kind() == "TensorType" for part in kind.elements()):
        return len(kind.elements())
    if kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
        return None
    if kind.kind() == "DictType" and (kind.getKeyType().kind(), kind.getValueType().kind()) == (
        "StringType",
        "TensorType",
    ):
        return None
    reason = f"it returns {kind}; wrap it so that it returns tensors, in a tuple, a list or a dict by name"
    raise load_failed(artifact, reason, ["Tensor", "Tuple[Tensor, …]", "List[Tensor]", "Dict[str, Tensor]"])


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _schema(node: Any) -> Any:
    text = node.schema()
    return None if text == "(no schema)" else torch._C.parse_schema(text)


def _written(node: Any) -> Iterator[Any]:
    """Yield the values that a node writes into."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return
    inputs = list(node.inputs())
    for argument, value in zip(schema.arguments, inputs, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value


def _origin(value: Any) -> str:
    """Return what a value is part of: the kind of node at its beginning, "fresh" where it is memory of this run."""
    for _ in range(1000):
        node = value.node()
        if node.kind() in ("prim::GetAttr", "prim::Constant", "prim::Param"):
            return str(node.kind())
        schema = _schema(node)
        if schema is None:
            return "unknown"
        if not any(result.alias_info is not None for result in schema.returns):
            return "fresh"
        aliased = [
            each
            for argument, each in zip(schema.arguments, node.inputs(), strict=False)
            if argument.alias_info is not None
        ]
        if not aliased:
            return "fresh"
        value = aliased[0]
    return "unknown"
