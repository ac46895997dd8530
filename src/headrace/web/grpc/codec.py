"""Requests and answers of the protocol as messages, raw and typed.

Raw tensors are the bytes of `tensor/binary.py`, one entry for each tensor, in order. Typed contents have a field for
each kind of number, and none for FP16 and BF16. An answer has the form that its request had.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from headrace.errors import DuplicateInput, InvalidRequest, InvalidValue
from headrace.tensor import InferAnswer, InferRequest, RequestedOutput, Tensor, tensor_from_bytes, tensor_to_bytes
from headrace.tensor.datatypes import Datatype, clip, datatype_named, size_of
from headrace.tensor.decode import checked_id
from headrace.tensor.refusals import refuse_count, refuse_declared, refuse_value
from headrace.web.grpc.messages import messages

__all__ = ["answer_message", "is_raw", "read_request", "set_parameter"]

#: Extensions that would change what a tensor is or where it lies; none is offered.
_NOT_OFFERED = ("shared_memory_region", "classification")

_CONTENTS = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
#: How the field of a narrower datatype is read before its values are looked at.
_WIDE = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}


def is_raw(message: Any) -> bool:
    """Return whether the answer to a ModelInferRequest shall be raw: unless the request was typed."""
    return bool(message.raw_input_contents) or not any(tensor.HasField("contents") for tensor in message.inputs)


def read_request(message: Any, model: str) -> InferRequest:
    """Read a ModelInferRequest; inputs are checked against their own declaration, not against the model.

    Raises InvalidRequest, DuplicateInput, ShapeMismatch, DtypeMismatch or InvalidValue.
    """
    raw = list(message.raw_input_contents)
    if raw:
        _check_raw(message, len(raw))
    inputs: dict[str, Tensor] = {}
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        if name in inputs:
            raise DuplicateInput(f"input {clip(name)!r} is given twice", details={"input": clip(name)})
        _refuse_extensions(tensor, "input")
        datatype = datatype_named(tensor.datatype, of=name)
        shape = tuple(tensor.shape)
        if raw:
            inputs[name] = tensor_from_bytes(name, datatype, shape, raw[index])
        else:
            inputs[name] = _read_typed(name, datatype, shape, tensor.contents)
    parameters = _read_parameters(message.parameters)
    # Said for HTTP's sake; here the form of the request decides, and equal requests must be equal on both.
    parameters.pop("binary_data_output", None)
    return InferRequest(
        model=model,
        version=message.model_version or None,
        id=checked_id(message.id),
        inputs=inputs,
        outputs=_read_outputs(message.outputs),
        parameters=parameters,
    )


def answer_message(answer: InferAnswer, *, raw: bool) -> Any:
    """Return the ModelInferResponse. FP16 and BF16 have no typed form, so one of them makes all of it raw."""
    message = messages()["inference.ModelInferResponse"](
        model_name=answer.model, model_version=answer.version or "", id=answer.id or ""
    )
    for key, value in answer.parameters.items():
        set_parameter(message.parameters[key], value)
    raw = raw or any(tensor.datatype not in _CONTENTS for tensor in answer.outputs.values())
    for name, tensor in answer.outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
        if raw:
            message.raw_output_contents.append(tensor_to_bytes(tensor))
        else:
            getattr(output.contents, _CONTENTS[tensor.datatype]).extend(tensor.array.ravel().tolist())
    return message


def set_parameter(parameter: Any, value: Any) -> None:
    """Set an InferParameter to a value of whatever type; what has no type of its own there is written as text."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, int) and 0 <= value < 2**64:
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def _read_typed(name: str, datatype: Datatype, shape: tuple[int, ...], contents: Any) -> Tensor:
    wanted = _CONTENTS.get(datatype)
    given = {field.name: values for field, values in contents.ListFields()}
    if wanted is None:
        raise InvalidRequest(
            f"input {clip(name)!r}: {datatype} has no typed contents; send raw_input_contents",
            details={"input": clip(name), "expected": "raw_input_contents", "actual": sorted(given)},
        )
    count = size_of(shape, datatype)
    if count is None:
        refuse_declared(name, shape, "input")
    values = given.pop(wanted, ())
    if given:
        raise InvalidRequest(
            f"input {clip(name)!r}: {datatype} belongs in {wanted}, not in {', '.join(sorted(given))}",
            details={"input": clip(name), "expected": wanted, "actual": sorted(given)},
        )
    if len(values) != count:
        refuse_count(name, shape, None, len(values), "input")
    if datatype is Datatype.BYTES:
        array = np.empty(count, dtype=object)
        array[:] = list(values)
        return Tensor(datatype, array.reshape(shape))
    array = np.array(values, dtype=_WIDE.get(wanted, datatype.numpy))
    if array.dtype != datatype.numpy:
        narrow = array.astype(datatype.numpy)
        lost = np.flatnonzero(narrow != array)
        if lost.size:
            place = [int(each) for each in np.unravel_index(lost[0], shape)]
            refuse_value(name, datatype, str(array[lost[0]]), place, "input")
        array = narrow
    return Tensor(datatype, array.reshape(shape))


def _check_raw(message: Any, count: int) -> None:
    for tensor in message.inputs:
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            raise InvalidRequest(
                f"input {clip(tensor.name)!r} has contents of its own beside raw_input_contents; send one or the other",
                details={"input": clip(tensor.name), "expected": "raw or typed contents", "actual": "both"},
            )
    if count != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {count} entries for {len(message.inputs)} inputs",
            details={"input": "raw_input_contents", "expected": len(message.inputs), "actual": count},
        )


def _read_outputs(outputs: Any) -> tuple[RequestedOutput, ...] | None:
    found: dict[str, RequestedOutput] = {}
    for output in outputs:
        if output.name in found:
            raise InvalidRequest(
                f"output {clip(output.name)!r} is asked for twice", details={"output": clip(output.name)}
            )
        _refuse_extensions(output, "output")
        parameters = _read_parameters(output.parameters)
        parameters.pop("binary_data", None)
        found[output.name] = RequestedOutput(output.name, None, parameters)
    return tuple(found.values()) or None


def _read_parameters(parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A map has no order on the wire; sorted, two requests that are equal look equal everywhere.
    for key in sorted(parameters):
        choice = parameters[key].WhichOneof("parameter_choice")
        if choice is None:
            _refuse_parameter(key, "a value", "none")
        value = getattr(parameters[key], choice)
        if isinstance(value, float) and not math.isfinite(value):
            # It has no JSON form, and the topic carries parameters as JSON.
            _refuse_parameter(key, "a finite number", str(value))
        found[key] = value
    return found


def _refuse_parameter(key: str, expected: str, actual: str) -> NoReturn:
    raise InvalidValue(
        f"parameter {clip(key)!r}: expected {expected}, got {actual}",
        details={"parameter": clip(key), "expected": expected, "actual": actual},
    )


def _refuse_extensions(tensor: Any, kind: str) -> None:
    for name in _NOT_OFFERED:
        if name in tensor.parameters:
            raise InvalidRequest(
                f"{name} is not supported", details={kind: clip(tensor.name), "parameter": name, "expected": "none"}
            )
