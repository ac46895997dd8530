"""Writing Open Inference Protocol requests and answers, and the digest of what a request asks."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection
from typing import Any, cast

import msgspec
from msgspec import Raw

from headrace.errors import InvalidValue
from headrace.tensor.binary import tensor_to_bytes
from headrace.tensor.datatypes import Datatype, Tensor
from headrace.tensor.infer import InferAnswer, InferRequest, RequestedOutput
from headrace.tensor.values import tensor_to_json, widened

__all__ = ["answer_object", "digest_inputs", "encode_answer", "encode_request"]

#: Tensors start at multiples of this in what we write, so that reading needs no copy.
_ALIGNMENT = 16
#: So many numbers become Python objects at a time.
_PIECE = 1 << 16

_ENCODE = msgspec.json.Encoder().encode


def encode_request(request: InferRequest) -> tuple[bytes, int]:
    """Return the binary form and the length of its JSON part; model and version travel beside it.

    The JSON is padded with spaces so that the first tensor is aligned.
    """
    parts: list[bytes] = []
    head: dict[str, Any] = {} if request.id is None else {"id": request.id}
    parameters = request.parameters
    if request.binary_default is not None:
        parameters = {**parameters, "binary_data_output": request.binary_default}
    if parameters:
        head["parameters"] = parameters
    head["inputs"] = [_binary_tensor(name, tensor, parts) for name, tensor in request.inputs.items()]
    if request.outputs is not None:
        head["outputs"] = [_requested_object(output) for output in request.outputs]
    text = _ENCODE(head)
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([text, *parts]), len(text)


def encode_answer(answer: InferAnswer, *, binary: bool | Collection[str] = False) -> tuple[bytes, int | None]:
    """Return the answer and the length of its JSON part: None where all is JSON.

    `binary` is True, False or the names of the outputs wanted in binary form. NaN and Infinity are `null` in
    JSON. Raises InvalidValue, naming the output, for BYTES that are not UTF-8 and were asked for as JSON.
    """
    parts: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    mixed = False
    for name, tensor in answer.outputs.items():
        if binary is True or (binary is not False and name in binary):
            mixed = True
            outputs.append(_binary_tensor(name, tensor, parts))
        else:
            outputs.append(_json_tensor(name, tensor, _flat_data(name, tensor)))
    text = _ENCODE(_answer_head(answer, outputs))
    return (b"".join([text, *parts]), len(text)) if mixed else (text, None)


def answer_object(answer: InferAnswer) -> dict[str, Any]:
    """Return the answer as plain values for a bigger JSON object; never raises.

    Where a caller cannot ask for the binary form, BYTES that are not UTF-8 are base64 text and say so in
    `parameters`: `{"content_type": "base64"}`.
    """
    outputs = []
    for name, tensor in answer.outputs.items():
        try:
            outputs.append(_json_tensor(name, tensor, tensor_to_json(tensor, flat=True, name=name)))
        except InvalidValue:
            data = [base64.b64encode(item).decode() for item in tensor.array.ravel().tolist()]
            outputs.append(_json_tensor(name, tensor, data, {"content_type": "base64"}))
    return _answer_head(answer, outputs)


def digest_inputs(request: InferRequest) -> str:
    """Return 64 hex digits that are equal where decoded inputs, outputs asked for and parameters are.

    Bytes and route do not count: JSON and binary forms of equal tensors agree, the order of inputs and of
    parameters is free, and so is the form in which outputs are wanted. Every bit of a tensor counts.
    """
    hasher = hashlib.blake2b(digest_size=32)
    names = sorted(request.inputs)
    tensors = [request.inputs[name] for name in names]
    data = [tensor_to_bytes(tensor) for tensor in tensors]
    # The head frames what follows: sizes are in it, so no two requests share the bytes hashed.
    head = [
        [[n, str(t.datatype), t.shape, len(d)] for n, t, d in zip(names, tensors, data, strict=True)],
        None if request.outputs is None else [[output.name, output.parameters] for output in request.outputs],
        request.parameters,
    ]
    text = msgspec.json.encode(head, order="deterministic")
    hasher.update(len(text).to_bytes(8, "little"))
    hasher.update(text)
    for part in data:
        hasher.update(part)
    return hasher.hexdigest()


def _answer_head(answer: InferAnswer, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    head: dict[str, Any] = {"model_name": answer.model}
    if answer.version is not None:
        head["model_version"] = answer.version
    if answer.id is not None:
        head["id"] = answer.id
    if answer.parameters:
        head["parameters"] = answer.parameters
    head["outputs"] = outputs
    return head


def _flat_data(name: str, tensor: Tensor) -> Raw | list[Any]:
    """Return flat data for our encoder, which writes NaN and Infinity as null; long data piece by piece."""
    if tensor.datatype is Datatype.BYTES:
        return cast("list[Any]", tensor_to_json(tensor, flat=True, name=name))
    array = tensor.array.ravel()
    if tensor.datatype is Datatype.BF16:
        array = widened(array)
    if array.size <= _PIECE:
        return array.tolist()
    pieces = [_ENCODE(array[at : at + _PIECE].tolist())[1:-1] for at in range(0, array.size, _PIECE)]
    return Raw(b"[%b]" % b",".join(pieces))


def _json_tensor(
    name: str, tensor: Tensor, data: Raw | list[Any], parameters: dict[str, Any] | None = None
) -> dict[str, Any]:
    head: dict[str, Any] = {"name": name, "datatype": tensor.datatype.value, "shape": tensor.array.shape}
    if parameters:
        head["parameters"] = parameters
    head["data"] = data
    return head


def _binary_tensor(name: str, tensor: Tensor, parts: list[bytes]) -> dict[str, Any]:
    data = tensor_to_bytes(tensor)
    parts.append(data)
    return {
        "name": name,
        "datatype": tensor.datatype.value,
        "shape": tensor.array.shape,
        "parameters": {"binary_data_size": len(data)},
    }


def _requested_object(output: RequestedOutput) -> dict[str, Any]:
    parameters = output.parameters
    if output.binary is not None:
        parameters = {**parameters, "binary_data": output.binary}
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}
