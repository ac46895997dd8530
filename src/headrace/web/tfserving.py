"""TensorFlow Serving's REST form, which KServe calls protocol v1: `:predict` by rows or by columns, and the state.

Source: tensorflow/serving, docs/api_rest.md. Errors are ours, as on every route; NaN and Infinity are null.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from headrace.errors import InvalidJson, InvalidRequest, InvalidValue
from headrace.services.door import ModelState
from headrace.tensor import (
    Datatype,
    InferAnswer,
    InferRequest,
    Signature,
    Tensor,
    TensorSpec,
    tensor_from_json,
    tensor_to_json,
)
from headrace.web.call import PARAMETERS, through
from headrace.web.exchange import Answer, Exchange
from headrace.web.headers import check_media_type
from headrace.web.health import not_ready_answer
from headrace.web.predict import refuse_names, signature_of
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["ROUTES", "columns_of", "rows_of"]

#: Every object of a request becomes one of Python's, many times as large as its text.
OBJECTS_MAX = 100_000
_NESTING_MAX = 32

_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_by_name = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class _Body(msgspec.Struct):
    instances: Raw = Raw(b"")
    inputs: Raw = Raw(b"")
    signature_name: str = ""


_decode_body = msgspec.json.Decoder(_Body).decode


async def _predict(site: Site, exchange: Exchange) -> Answer:
    state = site.named(exchange)
    check_media_type(exchange.headers, binary=False)
    body = _read(await exchange.body())
    signature = signature_of(state)
    by_row = bool(memoryview(body.instances))
    inputs = rows_of(body.instances, signature) if by_row else columns_of(body.inputs, signature)
    request = InferRequest(model=state.name, version=exchange.params.get("version"), inputs=inputs)
    answer = await through(site, exchange, request)
    if isinstance(answer, Answer):
        return answer
    return Answer(_encode({"predictions": _rows(answer)} if by_row else {"outputs": _columns(answer)}))


def _read(body: bytes) -> _Body:
    try:
        # The decoder does not look into what it skips; a body with bad bytes anywhere is refused.
        if not body.isascii():
            body.decode()
        found = _decode_body(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            'The body must be an object: {"instances": [...]} or {"inputs": ...}', details={"reason": str(error)}
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidJson("The body is not valid JSON") from error
    if bool(memoryview(found.instances)) == bool(memoryview(found.inputs)):
        raise InvalidRequest(
            "The body must have either `instances` (rows) or `inputs` (columns)",
            details={"expected": ["instances", "inputs"]},
        )
    if found.signature_name not in ("", "serving_default"):
        raise InvalidRequest(
            "A model has one signature here", details={"input": "signature_name", "expected": "serving_default"}
        )
    return found


# -- reading ------------------------------------------------------------------------------------------------


def rows_of(data: Raw, signature: Signature) -> dict[str, Tensor]:
    """Read `instances`: values for an only input, or objects with one value for each.

    Raises InvalidJson, InvalidRequest, MissingInput, UnknownInput and what tensors raise.
    """
    text = bytes(memoryview(data))
    if not text.startswith(b"[") or not text[1:].lstrip().startswith((b"{", b"]")):
        _check_list(text)
        return _only(data, signature)
    _check_objects(text)
    rows = _decoded(_decode_list, data, "instances")
    if not rows:
        raise InvalidRequest("`instances` is empty", details={"input": "instances"})
    if _is_binary(rows[0]):
        return _only(data, signature)
    names = signature.input_names
    values: dict[str, list[bytes]] = {name: [] for name in names}
    for row in rows:
        given = _decoded(_decode_by_name, row, "instances")
        if len(given) != len(names) or any(name not in given for name in names):
            refuse_names(given, signature)
        for name in names:
            values[name].append(bytes(memoryview(given[name])))
    return {spec.name: _tensor(spec, Raw(b"[%b]" % b",".join(values[spec.name]))) for spec in signature.inputs}


def columns_of(data: Raw, signature: Signature) -> dict[str, Tensor]:
    """Read `inputs`: the whole of an only input, or an object of them by name. Raises as `rows_of` does."""
    text = bytes(memoryview(data))
    if not text.startswith(b"{"):
        return _only(data, signature)
    _check_objects(text)
    given = _decoded(_decode_by_name, data, "inputs")
    if _is_binary(data) and "b64" not in signature.input_names:
        return _only(data, signature)
    if len(given) != len(signature.inputs) or any(spec.name not in given for spec in signature.inputs):
        refuse_names(given, signature)
    return {spec.name: _tensor(spec, given[spec.name]) for spec in signature.inputs}


def _check_list(text: bytes) -> None:
    if not text.startswith(b"["):
        raise InvalidRequest("`instances` must be a list", details={"input": "instances", "expected": "a list"})


def _check_objects(text: bytes) -> None:
    count = text.count(b"{")
    if count > OBJECTS_MAX:
        raise InvalidRequest(
            f"More than {OBJECTS_MAX} objects in one request; send plain lists by column, or binary tensors to /v2",
            details={"expected": f"at most {OBJECTS_MAX}", "actual": count},
        )


def _only(data: Raw, signature: Signature) -> dict[str, Tensor]:
    if len(signature.inputs) != 1:
        raise InvalidRequest(
            "The model has several inputs: name each",
            details={"expected": signature.input_names, "actual": "one value"},
        )
    return {signature.inputs[0].name: _tensor(signature.inputs[0], data)}


def _tensor(spec: TensorSpec, data: Raw) -> Tensor:
    text = bytes(memoryview(data))
    if spec.datatype is not Datatype.BYTES or b'"b64"' not in text:
        return tensor_from_json(spec.name, spec.datatype, None, data)
    _check_objects(text)
    values = _decoded(_decode_any, data, spec.name)
    shape: list[int] = []
    flat = [values]
    while flat and isinstance(flat[0], list):
        lengths = {len(value) if isinstance(value, list) else -1 for value in flat}
        if len(lengths) > 1 or len(shape) >= _NESTING_MAX:
            raise InvalidRequest(
                f"Input {spec.name!r} is ragged", details={"input": spec.name, "expected": "lists of one length"}
            )
        shape.append(lengths.pop())
        flat = [item for value in flat for item in value]
    array = np.empty(len(flat), dtype=object)
    array[:] = [_bytes(spec.name, value) for value in flat]
    return Tensor(Datatype.BYTES, array.reshape(shape))


def _bytes(name: str, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str):
            # binascii refuses what is no base64 where base64.b64decode would skip it.
            return binascii.a2b_base64(value["b64"], strict_mode=True)
    except (ValueError, UnicodeEncodeError):
        pass
    raise InvalidValue(
        f'Input {name!r}: a value must be a string or {{"b64": base64}}',
        details={"input": name, "expected": 'a string or {"b64": "…"}', "actual": type(value).__name__},
    )


def _is_binary(data: Raw) -> bool:
    text = bytes(memoryview(data)[:64])
    if not text.startswith(b"{") or b'"b64"' not in text:
        return False
    return list(_decoded(_decode_by_name, data, "b64")) == ["b64"]


def _decoded(decode: Any, data: Raw, name: str) -> Any:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{name}` mixes values and objects", details={"input": name[:64]}) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"`{name}` is not valid JSON, or nested too deeply") from error


# -- writing ------------------------------------------------------------------------------------------------


def _rows(answer: InferAnswer) -> list[Any]:
    outputs = answer.outputs
    lengths = {tensor.array.shape[:1] for tensor in outputs.values()}
    if len(lengths) != 1 or lengths == {()}:
        raise InvalidRequest(
            "The model's outputs cannot be cut into rows; send `inputs` (columns) instead of `instances`",
            details={"outputs": {name: list(tensor.shape) for name, tensor in outputs.items()}},
        )
    plain = {name: _plain(name, tensor) for name, tensor in outputs.items()}
    if len(plain) == 1:
        return list(plain.popitem()[1])
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def _columns(answer: InferAnswer) -> Any:
    plain = {name: _plain(name, tensor) for name, tensor in answer.outputs.items()}
    return plain.popitem()[1] if len(plain) == 1 else plain


def _plain(name: str, tensor: Tensor) -> Any:
    """Return nested lists; BYTES are base64 where their name ends in `_bytes`, and where they are no text."""
    if tensor.datatype is Datatype.BYTES and not name.endswith("_bytes"):
        try:
            return tensor_to_json(tensor, name=name)
        except InvalidValue:
            pass  # a caller of this route cannot ask for the binary form
    if tensor.datatype is not Datatype.BYTES:
        return tensor_to_json(tensor, name=name)
    coded = np.empty(tensor.array.size, dtype=object)
    coded[:] = [{"b64": base64.b64encode(item).decode()} for item in tensor.array.ravel().tolist()]
    return coded.reshape(tensor.shape).tolist()


# -- states -------------------------------------------------------------------------------------------------


def _version_status(state: ModelState) -> dict[str, Any]:
    return {
        "version": state.version,
        "state": "AVAILABLE" if state.ready else "START",
        "status": {"error_code": "OK" if state.ready else "UNAVAILABLE", "error_message": state.reason},
    }


async def _status(site: Site, exchange: Exchange) -> Answer:
    chosen = site.named(exchange)
    states = [chosen]
    if "version" not in exchange.params:
        states = [state for state in site.door.models() if state.name == chosen.name]
    reasons = [chosen.reason or "loading"] if not chosen.ready else site.reasons_stopping()
    body = {
        "name": chosen.name,
        "ready": not reasons,
        "model_version_status": [_version_status(state) for state in states],
    }
    if reasons:
        return not_ready_answer(site, exchange, body, reasons)
    return Answer(_encode(body))


async def _list(site: Site, exchange: Exchange) -> Answer:
    return Answer(_encode({"models": sorted({state.name for state in site.door.models()})}))


_MODEL = Parameter("model", "path", "The model's name.")
_VERSION = Parameter("version", "path", "One of its versions.")
_ANY: dict[str, Any] = {}
_REQUEST = {
    "type": "object",
    "properties": {
        "instances": {"type": "array", "description": "Rows: values, or objects by input name."},
        "inputs": {"description": "Columns: the whole of an only input, or an object by name."},
        "signature_name": {"enum": ["", "serving_default"]},
    },
}
_ANSWER = {"type": "object", "properties": {"predictions": {"type": "array"}, "outputs": _ANY}}
_STATUS = {
    "type": "object",
    "required": ["name", "ready", "model_version_status"],
    "properties": {
        "name": {"type": "string"},
        "ready": {"type": "boolean"},
        "model_version_status": {"type": "array", "items": {"type": "object"}},
    },
}


def _predict_doc(*names: Parameter) -> Doc:
    return Doc(
        "Predict, in TensorFlow Serving's form (KServe v1)",
        'Either `instances` or `inputs`. BYTES may be `{"b64": …}`, and come back so where the output\'s name ends in '
        "`_bytes` or its bytes are no text.",
        tag="inference",
        parameters=(*names, *PARAMETERS),
        body={"application/json": _REQUEST},
        body_example={"instances": [[0.1, 0.2, 0.3]]},
        answers={200: ("The outputs", "application/json", _ANSWER)},
        errors=(400, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507),
        long_road=True,
    )


def _status_doc(*names: Parameter) -> Doc:
    return Doc(
        "The state of a model, in TensorFlow Serving's and KServe's form",
        tag="models",
        parameters=names,
        answers={200: ("Available", "application/json", _STATUS)},
        errors=(404, 503),
    )


_VERSIONED = "/v1/models/{model}/versions/{version}"
ROUTES = (
    Route("POST", "/v1/models/{model}:predict", _predict, _predict_doc(_MODEL), kind="inference"),
    Route("POST", f"{_VERSIONED}:predict", _predict, _predict_doc(_MODEL, _VERSION), kind="inference"),
    Route("GET", "/v1/models/{model}", _status, _status_doc(_MODEL)),
    Route("GET", _VERSIONED, _status, _status_doc(_MODEL, _VERSION)),
    Route(
        "GET",
        "/v1/models",
        _list,
        Doc(
            "The names of all models",
            tag="models",
            answers={200: ("The names", "application/json", {"type": "object"})},
        ),
    ),
)
