"""What a model version takes and gives, and the check of a request against it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import msgspec

from headrace.errors import (
    DtypeMismatch,
    InvalidRequest,
    MissingInput,
    ShapeMismatch,
    UnknownInput,
    UnknownOutput,
)
from headrace.tensor.datatypes import Datatype, Tensor, clip, datatype_named

__all__ = ["Signature", "TensorSpec"]


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, datatype and shape of one input or output; -1 stands for any length, 0 included."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a version, in the order the model declares them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @cached_property
    def digest(self) -> str:
        """Return 32 hex digits that are equal exactly where names, order, datatypes and shapes are."""
        return hashlib.blake2b(msgspec.json.encode(self.to_json()), digest_size=16).hexdigest()

    @cached_property
    def batchable(self) -> bool:
        """Return whether rows of several requests may run together: every first dimension is -1."""
        specs = (*self.inputs, *self.outputs)
        return bool(self.inputs) and all(spec.shape[:1] == (-1,) for spec in specs)

    @cached_property
    def input_names(self) -> list[str]:
        """Return the legal input names."""
        return [spec.name for spec in self.inputs]

    @cached_property
    def output_names(self) -> list[str]:
        """Return the legal output names."""
        return [spec.name for spec in self.outputs]

    def to_json(self) -> dict[str, Any]:
        """Return the form that cards and model metadata carry."""
        return {
            "inputs": [_spec_to_json(s) for s in self.inputs],
            "outputs": [_spec_to_json(s) for s in self.outputs],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Read what `to_json` wrote; raises InvalidRequest saying what is wrong with it."""
        try:
            plain = msgspec.convert(value, _Plain)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"not a signature: {error}") from error
        return cls(_specs(plain.inputs, "input"), _specs(plain.outputs, "output"))

    def check(self, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> None:
        """Raise MissingInput, UnknownInput, DtypeMismatch, ShapeMismatch or UnknownOutput unless these fit.

        `details` hold the input (or output), what was expected and what came. Where the version is batchable,
        all inputs must have the same number of rows.
        """
        known = self._by_name
        if inputs.keys() != known.keys():
            self._refuse_names(inputs)
        for name, tensor in inputs.items():
            spec = known[name]
            if tensor.datatype is not spec.datatype:
                raise DtypeMismatch(
                    f"input {name!r}: expected {spec.datatype}, got {tensor.datatype}",
                    details={"input": name, "expected": str(spec.datatype), "actual": str(tensor.datatype)},
                )
            expected, actual = spec.shape, tensor.array.shape
            # Equal length first, then every fixed dimension; this runs for each input of each request.
            if len(expected) != len(actual):
                _refuse_shape(name, expected, actual)
            for want, got in zip(expected, actual, strict=True):
                if want not in (got, -1):
                    _refuse_shape(name, expected, actual)
        if len(inputs) > 1 and self.batchable:
            _check_rows(inputs)
        if outputs is not None:
            self._check_outputs(outputs)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.inputs}

    def _refuse_names(self, inputs: Mapping[str, Tensor]) -> NoReturn:
        known = self._by_name
        for name in inputs:
            if name not in known:
                raise UnknownInput(
                    f"there is no input {clip(name)!r}; the model has {self.input_names}",
                    details={"input": clip(name), "expected": self.input_names, "actual": clip(name)},
                )
        missing = next(spec for spec in self.inputs if spec.name not in inputs)
        raise MissingInput(
            f"input {missing.name!r} is missing; the model needs {self.input_names}",
            details={"input": missing.name, "expected": self.input_names, "actual": list(inputs)},
        )

    def _check_outputs(self, outputs: Sequence[str]) -> None:
        legal = self.output_names
        for name in outputs:
            if name not in legal:
                raise UnknownOutput(
                    f"there is no output {clip(name)!r}; the model has {legal}",
                    details={"output": clip(name), "expected": legal, "actual": clip(name)},
                )


class _PlainSpec(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]


class _Plain(msgspec.Struct):
    inputs: list[_PlainSpec]
    outputs: list[_PlainSpec]


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": str(spec.datatype), "shape": list(spec.shape)}


def _specs(plain: list[_PlainSpec], kind: str) -> tuple[TensorSpec, ...]:
    found: dict[str, TensorSpec] = {}
    for spec in plain:
        if spec.name in found:
            raise InvalidRequest(f"not a signature: {kind} {clip(spec.name)!r} is there twice")
        if any(dimension < -1 for dimension in spec.shape):
            raise InvalidRequest(f"not a signature: {kind} {clip(spec.name)!r} has a dimension below -1")
        datatype = datatype_named(spec.datatype, of=spec.name, kind=kind)
        found[spec.name] = TensorSpec(spec.name, datatype, spec.shape)
    return tuple(found.values())


def _refuse_shape(name: str, expected: tuple[int, ...], actual: tuple[int, ...]) -> NoReturn:
    raise ShapeMismatch(
        f"input {name!r}: expected shape {list(expected)}, got {list(actual)}",
        details={"input": name, "expected": list(expected), "actual": list(actual)},
    )


def _check_rows(inputs: Mapping[str, Tensor]) -> None:
    (first, tensor), *others = inputs.items()
    for name, other in others:
        if other.array.shape[0] != tensor.array.shape[0]:
            raise ShapeMismatch(
                f"input {name!r} has {other.rows} rows where input {first!r} has {tensor.rows}",
                details={
                    "input": name,
                    "expected": [tensor.rows, *other.shape[1:]],
                    "actual": list(other.shape),
                },
            )
