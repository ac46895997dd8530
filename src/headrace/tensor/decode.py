"""Reading Open Inference Protocol requests and answers, as JSON and in binary form.

The binary form is JSON of `header_length` bytes followed by the bytes of each binary tensor, in the order of
the JSON. It is what HTTP and the topic carry. Every fault of a body is a typed error; none echoes more of the
body than one clipped value or name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
from msgspec import Raw

from headrace.errors import DuplicateInput, InvalidJson, InvalidRequest
from headrace.tensor.binary import tensor_from_bytes
from headrace.tensor.datatypes import Datatype, Tensor, clip, datatype_named
from headrace.tensor.infer import InferAnswer, InferRequest, RequestedOutput
from headrace.tensor.signature import Signature
from headrace.tensor.values import tensor_from_json

__all__ = ["ID_LENGTH_MAX", "checked_id", "decode_answer", "decode_request"]

#: A caller's own `id` may have this many printable characters.
ID_LENGTH_MAX = 128

_PARAMETER_DEPTH_MAX = 16
#: Small members stay text until their length is known: as objects they cost up to twenty times as much.
_MEMBER_BYTES_MAX = 1 << 20
_SHAPE_BYTES_MAX = 1 << 12
_ABSENT = Raw(b"null")


class _TensorParameters(msgspec.Struct):
    binary_data_size: int | None = None


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: Raw
    data: Raw = Raw(b"")
    parameters: _TensorParameters | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Tensor]
    id: str | None = None
    parameters: Raw = _ABSENT
    outputs: Raw = _ABSENT


class _Answer(msgspec.Struct):
    outputs: list[_Tensor]
    model_name: str = ""
    model_version: str | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


class _Name(msgspec.Struct):
    name: Any = None


class _Names(msgspec.Struct):
    inputs: list[_Name] = []
    outputs: list[_Name] = []


_REQUEST = msgspec.json.Decoder(_Request)
_ANSWER = msgspec.json.Decoder(_Answer)
_NAMES = msgspec.json.Decoder(_Names)
_SHAPE = msgspec.json.Decoder(list[int])
_PARAMETERS = msgspec.json.Decoder(dict[str, Any] | None)
_OUTPUTS = msgspec.json.Decoder(list[_Output] | None)


def decode_request(
    body: bytes,
    header_length: int | None = None,
    *,
    model: str = "",
    version: str | None = None,
    signature: Signature | None = None,
) -> InferRequest:
    """Read a request: JSON (`header_length` None), binary form, or (0) the bare bytes of an only input.

    The last needs `signature`. Inputs are checked against their own declaration here and against the model by
    `Signature.check`. Raises InvalidJson, InvalidRequest, DuplicateInput, ShapeMismatch, DtypeMismatch or
    InvalidValue; unknown members are ignored.
    """
    if header_length == 0:
        return _decode_bare(body, model, version, signature)
    wire = _parse(_REQUEST, body, header_length)
    request = InferRequest(
        model=model,
        version=version,
        id=checked_id(wire.id),
        inputs=_tensors(wire.inputs, body, header_length, "input"),
    )
    if wire.parameters is not _ABSENT:
        parameters = _member(wire.parameters, _PARAMETERS, "parameters") or {}
        request.parameters = _checked_parameters(parameters, "parameters")
        if "binary_data_output" in parameters:
            request.binary_default = _flag(parameters.pop("binary_data_output"), "binary_data_output")
    if wire.outputs is not _ABSENT:
        outputs = _member(wire.outputs, _OUTPUTS, "outputs")
        request.outputs = _requested(outputs) if outputs else None
    return request


def decode_answer(body: bytes, header_length: int | None = None) -> InferAnswer:
    """Read an answer in either form, as a client or from a stored result.

    A `null` in floating-point data is NaN here: it is what NaN and Infinity became on the way out.
    """
    wire = _parse(_ANSWER, body, header_length)
    return InferAnswer(
        model=wire.model_name,
        version=wire.model_version,
        id=wire.id,
        outputs=_tensors(wire.outputs, body, header_length, "output"),
        parameters=wire.parameters or {},
    )


def _parse(decoder: msgspec.json.Decoder[Any], body: bytes, header_length: int | None) -> Any:
    if header_length is None:
        head = body
    elif 0 <= header_length <= len(body):
        head = body[:header_length]
    else:
        raise InvalidRequest(
            "the JSON part cannot be longer than the body, nor its length negative",
            details={"expected": f"0 to {len(body)}", "actual": header_length},
        )
    try:
        # The decoder does not look into members that it skips; a body with bad bytes anywhere is refused.
        if not head.isascii():
            head.decode()
        return decoder.decode(head)
    except UnicodeDecodeError as error:
        raise InvalidJson("the body is not UTF-8", details={"position": error.start}) from error
    except RecursionError as error:
        raise InvalidJson("the body is nested too deeply") from error
    except msgspec.ValidationError as error:
        _refuse_form(head, str(error))
    except msgspec.DecodeError as error:
        raise InvalidJson(f"the body is not valid JSON: {_reason(error)}") from error


def _member(data: Raw, decoder: msgspec.json.Decoder[Any], name: str) -> Any:
    if len(data) > _MEMBER_BYTES_MAX:
        raise InvalidRequest(
            f"`{name}` is longer than {_MEMBER_BYTES_MAX} bytes",
            details={"member": name, "expected": _MEMBER_BYTES_MAX, "actual": len(data)},
        )
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`$", f"`$.{name}") if "`$" in str(error) else f"{error} - at `$.{name}`"
        raise InvalidRequest(reason, details={"reason": reason}) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"`{name}` is not valid JSON, or nested too deeply") from error


def _shape(wire: _Tensor, kind: str) -> list[int]:
    if len(wire.shape) > _SHAPE_BYTES_MAX:
        raise InvalidRequest(
            f"{kind} {clip(wire.name)!r}: the shape is longer than any tensor's",
            details={kind: clip(wire.name), "expected": "at most 32 dimensions", "actual": "many more"},
        )
    try:
        return _SHAPE.decode(wire.shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{kind} {clip(wire.name)!r}: the shape must be a list of whole numbers: {_reason(error)}",
            details={kind: clip(wire.name), "expected": "a list of whole numbers", "actual": _reason(error)},
        ) from error


def _tensors(wires: list[_Tensor], body: bytes, header_length: int | None, kind: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    at = len(body) if header_length is None else header_length
    view: memoryview | None = None
    for wire in wires:
        name = wire.name
        if name in found:
            raise DuplicateInput(f"{kind} {clip(name)!r} is given twice", details={kind: clip(name)})
        datatype = datatype_named(wire.datatype, of=name, kind=kind)
        shape = _shape(wire, kind)
        size = None if wire.parameters is None else wire.parameters.binary_data_size
        has_data = len(memoryview(wire.data)) > 0
        if has_data == (size is not None):
            _refuse_source(name, kind, has_data)
        if size is None:
            found[name] = tensor_from_json(name, datatype, shape, wire.data, kind=kind, null_is_nan=kind == "output")
            continue
        if size < 0 or at + size > len(body):
            _refuse_binary_size(name, kind, size, len(body) - at, header_length)
        view = memoryview(body) if view is None else view
        found[name] = tensor_from_bytes(name, datatype, shape, view[at : at + size], kind=kind)
        at += size
    if at != len(body):
        raise InvalidRequest(
            f"{len(body) - at} bytes are left over behind the last binary tensor",
            details={"expected": at, "actual": len(body)},
        )
    return found


def _decode_bare(body: bytes, model: str, version: str | None, signature: Signature | None) -> InferRequest:
    if signature is None or len(signature.inputs) != 1:
        raise InvalidRequest(
            "a body without JSON is only possible for a model with exactly one input",
            details={"expected": 1, "actual": None if signature is None else len(signature.inputs)},
        )
    spec = signature.inputs[0]
    shape = list(spec.shape)
    if spec.datatype is Datatype.BYTES:
        # The whole body is the one element; there is no length before it.
        if any(dimension not in (-1, 1) for dimension in shape):
            _refuse_bare(spec.name, shape)
        array = Tensor.of(np.array([body], dtype=object)).array.reshape([1] * len(shape))
        inputs = {spec.name: Tensor(Datatype.BYTES, array)}
        return InferRequest(model=model, version=version, inputs=inputs, binary_default=True)
    if shape.count(-1) > 1 and signature.batchable:
        shape[0] = 1
    if shape.count(-1) > 1:
        _refuse_bare(spec.name, shape)
    if -1 in shape:
        fixed = spec.datatype.itemsize or 1
        for dimension in shape:
            fixed *= dimension if dimension >= 0 else 1
        shape[shape.index(-1)] = len(body) // fixed if fixed else 0
    tensor = tensor_from_bytes(spec.name, spec.datatype, shape, body)
    return InferRequest(model=model, version=version, inputs={spec.name: tensor}, binary_default=True)


def _requested(wires: list[_Output]) -> tuple[RequestedOutput, ...]:
    found: dict[str, RequestedOutput] = {}
    for wire in wires:
        if wire.name in found:
            raise InvalidRequest(f"output {clip(wire.name)!r} is asked for twice", details={"output": clip(wire.name)})
        parameters = _checked_parameters(wire.parameters or {}, "parameters of an output")
        flag = parameters.pop("binary_data", None)
        binary = None if flag is None else _flag(flag, "binary_data")
        found[wire.name] = RequestedOutput(wire.name, binary, parameters)
    return tuple(found.values())


def checked_id(id: str | None) -> str | None:
    """Return a caller's own id, None for an empty one. Raises InvalidRequest for what no log line could hold."""
    if not id:
        return None
    if len(id) > ID_LENGTH_MAX or not id.isprintable():
        raise InvalidRequest(
            f"`id` must be 1 to {ID_LENGTH_MAX} printable characters",
            details={"expected": f"1 to {ID_LENGTH_MAX} printable characters", "actual": len(id)},
        )
    return id


def _checked_parameters(parameters: dict[str, Any], what: str) -> dict[str, Any]:
    """Bound what is kept as sent: its depth, and whole numbers to 64 bits, which is what gRPC can say."""
    layer: list[Any] = [parameters]
    for _ in range(_PARAMETER_DEPTH_MAX):
        below: list[Any] = []
        for value in layer:
            below.extend(value.values() if type(value) is dict else value)
        for value in below:
            if type(value) is int and not -(2**63) <= value < 2**64:
                raise InvalidRequest(f"`{what}` holds a whole number beyond 64 bits")
        layer = [value for value in below if type(value) in (dict, list)]
        if not layer:
            return parameters
    raise InvalidRequest(f"`{what}` is nested deeper than {_PARAMETER_DEPTH_MAX}")


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(
            f"parameter `{name}` must be true or false",
            details={"parameter": name, "expected": "bool", "actual": type(value).__name__},
        )
    return value


# -- refusing -----------------------------------------------------------------------------------------------

_PLACE = re.compile(r" - at `\$\.(inputs|outputs)\[(\d+)\]")


def _refuse_form(head: bytes, reason: str) -> NoReturn:
    """Raise InvalidRequest, naming the input that the decoder's message only counts."""
    details: dict[str, Any] = {"reason": reason}
    named = ""
    found = _PLACE.search(reason)
    if found:
        kind, index = found.group(1), int(found.group(2))
        try:
            name = getattr(_NAMES.decode(head), kind)[index].name
        except (msgspec.MsgspecError, RecursionError, IndexError):
            name = None
        if isinstance(name, str):
            details[kind[:-1]] = clip(name)
            named = f"{kind[:-1]} {clip(name)!r}: "
    raise InvalidRequest(f"{named}{reason}", details=details)


def _reason(error: Exception) -> str:
    # A lone surrogate escape is reported as truncation; say only what is certain.
    text = str(error)
    return "it ends too early or holds a broken escape" if "truncated" in text else clip(text, 120)


def _refuse_source(name: str, kind: str, has_data: bool) -> NoReturn:
    what = "both `data` and `binary_data_size`" if has_data else "neither `data` nor `binary_data_size`"
    raise InvalidRequest(
        f"{kind} {clip(name)!r} has {what}",
        details={kind: clip(name), "expected": "either `data` or `binary_data_size`", "actual": what},
    )


def _refuse_binary_size(name: str, kind: str, size: int, left: int, header_length: int | None) -> NoReturn:
    hint = "; the header Inference-Header-Content-Length is missing" if header_length is None else ""
    raise InvalidRequest(
        f"{kind} {clip(name)!r}: {size} binary bytes declared, {left} received{hint}",
        details={kind: clip(name), "expected": size, "actual": left},
    )


def _refuse_bare(name: str, shape: Sequence[int]) -> NoReturn:
    raise InvalidRequest(
        f"the shape of input {clip(name)!r} cannot be told from the size of a body without JSON",
        details={"input": clip(name), "expected": "at most one variable dimension", "actual": list(shape)},
    )
