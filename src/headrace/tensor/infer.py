"""A decoded request and its answer: what the protocol says, without its bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.tensor.datatypes import Tensor

__all__ = ["InferAnswer", "InferRequest", "RequestedOutput"]


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that the caller named; `binary` None leaves the form to the request's default."""

    name: str
    binary: bool | None = None
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, kw_only=True, eq=False):
    """A decoded request; `outputs` None asks for all of them."""

    model: str = ""
    version: str | None = None
    id: str | None = None
    inputs: dict[str, Tensor]
    outputs: tuple[RequestedOutput, ...] | None = None
    #: As sent, but for `binary_data_output`, which is `binary_default`.
    parameters: dict[str, Any] = {}
    binary_default: bool | None = None

    @property
    def output_names(self) -> list[str] | None:
        """Return the names asked for, in order; None for all."""
        return None if self.outputs is None else [output.name for output in self.outputs]

    @property
    def binary(self) -> bool | frozenset[str]:
        """Return which outputs the caller wants in binary form, as `encode_answer` takes it."""
        default = bool(self.binary_default)
        if self.outputs is None:
            return default
        wanted = [o.name for o in self.outputs if (default if o.binary is None else o.binary)]
        return True if len(wanted) == len(self.outputs) else frozenset(wanted)


class InferAnswer(msgspec.Struct, kw_only=True, eq=False):
    """What a model answered; `outputs` are in the order asked for."""

    model: str
    version: str | None = None
    id: str | None = None
    outputs: dict[str, Tensor]
    parameters: dict[str, Any] = {}
