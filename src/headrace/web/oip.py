"""Open Inference Protocol v2 over HTTP: metadata, readiness, inference in JSON and binary, the model index.

Source: kserve/open-inference-protocol, inference_rest.md; the binary form is Triton's `binary_tensor_data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace import __version__
from headrace.errors import InvalidJson, InvalidRequest
from headrace.tensor import RequestedOutput, decode_request, encode_answer
from headrace.web.call import PARAMETERS, through
from headrace.web.exchange import Answer, Exchange
from headrace.web.headers import check_media_type
from headrace.web.health import not_ready_answer
from headrace.web.predict import signature_of
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["INDEX_ROUTE", "ROUTES"]

HEADER_LENGTH = b"inference-header-content-length"

#: Extensions that change an output, from Triton; /v2 does not list them.
_NOT_OFFERED = frozenset({"classification", "shared_memory_region"})

_encode = msgspec.json.Encoder().encode
_BINARY_TYPE = b"application/octet-stream"


class _Index(msgspec.Struct):
    ready: bool = False


_decode_index = msgspec.json.Decoder(_Index).decode


async def _infer(site: Site, exchange: Exchange) -> Answer:
    state = site.named(exchange)
    headers = exchange.headers
    check_media_type(headers, binary=True)
    body = await exchange.body()
    request = decode_request(
        body,
        _header_length(headers.get(HEADER_LENGTH)),
        model=state.name,
        version=exchange.params.get("version"),
        signature=signature_of(state),
    )
    if request.outputs is not None:
        _refuse_extensions(request.outputs)
    answer = await through(site, exchange, request)
    if isinstance(answer, Answer):
        return answer
    if answer.id is None:
        # Optional in the protocol, required by KServe's client. A copy: equal requests may share one answer.
        answer = msgspec.structs.replace(answer, id=exchange.request_id)
    encoded, header_length = encode_answer(answer, binary=request.binary)
    if header_length is None:
        return Answer(encoded)
    return Answer(encoded, content_type=_BINARY_TYPE, headers=((HEADER_LENGTH, b"%d" % header_length),))


def _refuse_extensions(outputs: Sequence[RequestedOutput]) -> None:
    """Refuse what we do not offer and whose absence would give the caller another answer than it asked for."""
    for output in outputs:
        for name in _NOT_OFFERED.intersection(output.parameters):
            raise InvalidRequest(f"{name} is not supported", details={"output": output.name[:64], "parameter": name})


def _header_length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 12:
        raise InvalidRequest(
            "Inference-Header-Content-Length is not a number of bytes",
            details={"header": "Inference-Header-Content-Length", "expected": "a number of bytes"},
        )
    return int(value)


async def _server(site: Site, exchange: Exchange) -> Answer:
    extensions = ["binary_tensor_data", "model_repository", "model_configuration", "parameters"]
    if site.statistics is not None:
        extensions.append("statistics")
    return Answer(_encode({"name": "headrace", "version": __version__, "extensions": extensions}))


async def _metadata(site: Site, exchange: Exchange) -> Answer:
    state = site.named(exchange)
    signature = signature_of(state)
    body: dict[str, Any] = {
        "name": state.name,
        "versions": [other.version for other in site.door.models() if other.name == state.name],
        "platform": state.platform,
        **signature.to_json(),
    }
    return Answer(_encode(body))


async def _model_ready(site: Site, exchange: Exchange) -> Answer:
    state = site.named(exchange)
    # The server's own stop makes every model not ready too, so that the two never disagree.
    reasons = [state.reason or "loading"] if not state.ready else site.reasons_stopping()
    if not reasons:
        return Answer(_encode({"name": state.name, "ready": True}))
    return not_ready_answer(site, exchange, {"name": state.name, "ready": False}, reasons)


async def _index(site: Site, exchange: Exchange) -> Answer:
    check_media_type(exchange.headers, binary=True)
    body = await exchange.body()
    try:
        wanted = _decode_index(body) if body.strip() else _Index()
    except msgspec.ValidationError as error:
        raise InvalidRequest('The body must be empty or {"ready": bool}', details={"reason": str(error)}) from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidJson("The body is not valid JSON") from error
    return Answer(
        _encode(
            [
                {
                    "name": state.name,
                    "version": state.version,
                    "state": "READY" if state.ready else "UNAVAILABLE",
                    "reason": state.reason,
                }
                for state in site.door.models()
                if state.ready or not wanted.ready
            ]
        )
    )


_STRING = {"type": "string"}
_TENSOR_SPEC = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": _STRING,
        "datatype": {"$ref": "#/components/schemas/Datatype"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
    },
}
_METADATA = {
    "type": "object",
    "required": ["name", "versions", "platform", "inputs", "outputs"],
    "properties": {
        "name": _STRING,
        "versions": {"type": "array", "items": _STRING},
        "platform": _STRING,
        "inputs": {"type": "array", "items": _TENSOR_SPEC},
        "outputs": {"type": "array", "items": _TENSOR_SPEC},
    },
}
_READY = {"type": "object", "properties": {"name": _STRING, "ready": {"type": "boolean"}}}
_INDEX = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "version", "state", "reason"],
        "properties": {
            "name": _STRING,
            "version": _STRING,
            "state": {"enum": ["READY", "UNAVAILABLE"]},
            "reason": _STRING,
        },
    },
}
_MODEL = Parameter("model", "path", "The model's name.")
_VERSION = Parameter("version", "path", "One of its versions.")
_LENGTH = Parameter(
    "Inference-Header-Content-Length",
    "header",
    "Length of the JSON part of a body with binary tensors; 0 for the bare bytes of an only input.",
    {"type": "integer", "minimum": 0},
)
_INFER_REQUEST = {"$ref": "#/components/schemas/InferRequest"}
_INFER_ANSWER = {"$ref": "#/components/schemas/InferAnswer"}
_BYTES = {"type": "string", "contentMediaType": "application/octet-stream"}


def _infer_doc(*names: Parameter) -> Doc:
    return Doc(
        "Infer",
        "In JSON, or with binary tensors behind the JSON. Outputs come in the form that each was asked for in "
        "(`binary_data`, `binary_data_output`); NaN and Infinity are null in JSON and exact in binary.",
        tag="inference",
        parameters=(*names, _LENGTH, *PARAMETERS),
        body={"application/json": _INFER_REQUEST, "application/octet-stream": _BYTES},
        body_example={"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0.1, 0.2, 0.3]}]},
        answers={200: ("The outputs", "application/json", _INFER_ANSWER)},
        errors=(400, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507),
        long_road=True,
    )


def _both(method: str, tail: str, handler: Any, doc: Any, *, kind: str = "") -> tuple[Route, Route]:
    return (
        Route(method, f"/v2/models/{{model}}{tail}", handler, doc(_MODEL), kind=kind),
        Route(method, f"/v2/models/{{model}}/versions/{{version}}{tail}", handler, doc(_MODEL, _VERSION), kind=kind),
    )


def _metadata_doc(*names: Parameter) -> Doc:
    return Doc(
        "A model's inputs, outputs and versions",
        tag="models",
        parameters=names,
        answers={200: ("The metadata", "application/json", _METADATA)},
        errors=(404, 503),
    )


def _ready_doc(*names: Parameter) -> Doc:
    return Doc(
        "Whether a model would answer now",
        tag="health",
        parameters=names,
        answers={200: ("Ready", "application/json", _READY)},
        errors=(404, 503),
    )


INDEX_ROUTE = Route(
    "POST",
    "/v2/repository/index",
    _index,
    Doc(
        "Every model version with its state",
        tag="models",
        body={"application/json": {"type": "object", "properties": {"ready": {"type": "boolean"}}}},
        answers={200: ("The index", "application/json", _INDEX)},
        errors=(400,),
    ),
)

ROUTES = (
    *_both("POST", "/infer", _infer, _infer_doc, kind="inference"),
    Route(
        "GET",
        "/v2",
        _server,
        Doc(
            "The server's name, version and extensions",
            tag="models",
            answers={
                200: ("The metadata", "application/json", {"type": "object"}),
            },
        ),
    ),
    *_both("GET", "", _metadata, _metadata_doc),
    *_both("GET", "/ready", _model_ready, _ready_doc),
    INDEX_ROUTE,
)
