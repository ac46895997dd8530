"""OpenAPI 3.1, made from the route table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace import __version__
from headrace.tensor import Datatype
from headrace.web.errors import documented_rows
from headrace.web.routes import Doc, Parameter, Route

__all__ = ["describe"]

_ERROR = {"$ref": "#/components/schemas/Error"}
_ID_HEADERS = {
    "X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"},
    "X-Model-Version": {"$ref": "#/components/headers/X-Model-Version"},
}
_LOCATION = {"Location": {"$ref": "#/components/headers/Location"}}
_TAGS = {
    "inference": "Asking models",
    "requests": "What became of accepted requests (with a queue)",
    "models": "What is served",
    "health": "How it goes",
    "service": "The service itself",
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document; its paths, parameters and statuses are those that the dispatcher knows."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "Machine-learning models behind two roads: synchronous, and queued with exactly one "
            "result. Every error is the same object; its codes are a closed list.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "webhooks": {kind: {"post": _webhook(kind)} for kind in ("result.succeeded", "result.failed")},
        "components": {
            "schemas": _schemas(),
            "headers": {
                "X-Request-Id": {"description": "Correlates answer, log and trace.", "schema": {"type": "string"}},
                "X-Model-Version": {
                    "description": "The version that answered or was asked; `-` where there is no one version.",
                    "schema": {"type": "string"},
                },
                "Location": {
                    "description": "Where the result will be; an answer with it means accepted.",
                    "schema": {"type": "string"},
                },
                "Retry-After": {"description": "Computed, in seconds.", "schema": {"type": "integer"}},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    doc = route.doc
    name = route.template.strip("/").replace("{", "").replace("}", "").replace(".", "_").replace("/", "_")
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{name}",
        "summary": doc.summary,
        "tags": [doc.tag],
        "responses": _responses(doc),
    }
    if doc.description:
        operation["description"] = doc.description
    if doc.parameters:
        operation["parameters"] = [_parameter(parameter) for parameter in doc.parameters]
    if doc.body:
        content: dict[str, Any] = {kind: {"schema": dict(schema)} for kind, schema in doc.body.items()}
        if doc.body_example is not None:
            content["application/json"]["example"] = doc.body_example
        operation["requestBody"] = {"content": content}
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.description,
        "schema": dict(parameter.schema),
    }


def _responses(doc: Doc) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, (description, content_type, schema) in doc.answers.items():
        headers = _ID_HEADERS | (_LOCATION if doc.long_road else {})
        responses[str(status)] = {"description": description, "headers": headers}
        if content_type:
            responses[str(status)]["content"] = {content_type: {"schema": dict(schema)}}
    if doc.long_road:
        responses["202"] = {
            "description": "Accepted: exactly one result will be at `Location`",
            "headers": _ID_HEADERS | _LOCATION,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Accepted"}}},
        }
    for status in doc.errors:
        codes = [code for code, http, *_ in documented_rows() if http == status]
        entry = responses.setdefault(
            str(status),
            {
                "description": ", ".join(codes) or "invalid_request: the body did not arrive in time",
                "headers": dict(_ID_HEADERS),
                "content": {"application/json": {"schema": _ERROR}},
            },
        )
        if status in (429, 503):
            entry["headers"] = entry["headers"] | {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}
        if status == 504 and doc.long_road:
            entry["headers"] = entry["headers"] | _LOCATION
    responses["default"] = {
        "description": "Any other error",
        "content": {"application/json": {"schema": _ERROR}},
    }
    return responses


def _webhook(kind: str) -> dict[str, Any]:
    header = {"in": "header", "required": True, "schema": {"type": "string"}}
    return {
        "operationId": kind.replace(".", "_"),
        "summary": f"Sent to every Webhook-URL of a request ({kind})",
        "description": "Standard Webhooks. The same id and the same bytes at every attempt; any 2xx ends them.",
        "parameters": [
            header | {"name": "webhook-id", "description": "The message's id, the same at every attempt."},
            header | {"name": "webhook-timestamp", "description": "Seconds since 1970, of this attempt."},
            header | {"name": "webhook-signature", "description": "`v1,` and the base64 HMAC-SHA256."},
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["type", "timestamp", "data"],
                        "properties": {
                            "type": {"const": kind},
                            "timestamp": {"type": "string", "format": "date-time"},
                            "data": {"$ref": "#/components/schemas/Request"},
                        },
                    }
                }
            },
        },
        "responses": {"2XX": {"description": "Received"}, "410": {"description": "Never send here again"}},
    }


def _schemas() -> dict[str, Any]:
    string = {"type": "string"}
    parameters = {"type": "object", "additionalProperties": True}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": string,
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"$ref": "#/components/schemas/Datatype"},
            "parameters": parameters,
            "data": {"type": "array", "description": "Flat row-major, or nested."},
        },
    }
    output = {"type": "object", "required": ["name"], "properties": {"name": string, "parameters": parameters}}
    return {
        "Datatype": {"enum": [str(datatype) for datatype in Datatype]},
        "Tensor": tensor,
        "InferRequest": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": string,
                "parameters": parameters,
                "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
                "outputs": {"type": "array", "items": output},
            },
        },
        "InferAnswer": {
            "type": "object",
            "required": ["model_name", "outputs"],
            "properties": {
                "model_name": string,
                "model_version": string,
                "id": string,
                "parameters": parameters,
                "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            },
        },
        "Accepted": {
            "type": "object",
            "required": ["id", "status", "model"],
            "properties": {"id": string, "status": {"const": "accepted"}, "model": string},
        },
        "Request": {
            "type": "object",
            "required": ["id", "status", "model", "model_version", "result", "error", "deliveries"],
            "properties": {
                "id": string,
                "status": {"enum": ["pending", "succeeded", "failed"]},
                "model": {"type": ["string", "null"], "description": "null where only the topic knows it."},
                "model_version": {"type": ["string", "null"]},
                "result": {"oneOf": [{"$ref": "#/components/schemas/InferAnswer"}, {"type": "null"}]},
                "error": {"oneOf": [_ERROR, {"type": "null"}]},
                "deliveries": {"type": "array", "items": {"type": "object"}},
            },
        },
        "Error": {
            "type": "object",
            "required": ["error", "code", "details", "request_id", "status"],
            "properties": {
                "error": string,
                "code": {"enum": [code for code, *_ in documented_rows()]},
                "details": {"type": "object"},
                "request_id": string,
                "status": {"type": "integer"},
            },
        },
    }
