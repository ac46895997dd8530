"""TorchServe's inference API: POST or PUT /predictions/{model}, and /ping. Errors are ours, as on every route.

Source: pytorch/serve, docs/inference_api.md. A body is JSON, the bare bytes of an only input, or the field `data`
(or `body`) of a form; the answer is what the model returned, without anything around it.
"""

from __future__ import annotations

import re

import msgspec

from headrace.errors import InvalidJson, InvalidRequest, NotReady
from headrace.tensor import Datatype, InferRequest, Signature, Tensor, decode_request
from headrace.web.call import PARAMETERS, through
from headrace.web.errors import error_body
from headrace.web.exchange import Answer, Exchange
from headrace.web.predict import inputs_of, prediction_of, signature_of
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["ROUTES", "form_field"]

_decode_one = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FIELD = re.compile(
    rb'^content-disposition:[^\r\n]*[;\s]name="?(data|body)"?\s*(?:;|\r?$)', re.IGNORECASE | re.MULTILINE
)
_PART_TYPE = re.compile(rb"^content-type:\s*([^\s;]+)", re.IGNORECASE | re.MULTILINE)


async def _predictions(site: Site, exchange: Exchange) -> Answer:
    state = site.named(exchange)
    body = await exchange.body()
    inputs = _inputs(body, exchange.headers.get(b"content-type", b""), signature_of(state))
    request = InferRequest(model=state.name, version=exchange.params.get("version"), inputs=inputs)
    answer = await through(site, exchange, request)
    return answer if isinstance(answer, Answer) else Answer(_encode(prediction_of(answer)))


def _inputs(body: bytes, content_type: bytes, signature: Signature) -> dict[str, Tensor]:
    essence = content_type.lower().partition(b";")[0].strip()
    if essence == b"multipart/form-data":
        essence, body = form_field(body, content_type)
    if _is_json(body, essence, signature):
        return _json_inputs(body, signature)
    return decode_request(body, 0, signature=signature).inputs


def _is_json(body: bytes, essence: bytes, signature: Signature) -> bool:
    if essence == b"application/json" or essence.endswith(b"+json"):
        return True
    # curl sends what it is given as a form, and a file it uploads without any type; so the model decides.
    takes_bytes = len(signature.inputs) == 1 and signature.inputs[0].datatype is Datatype.BYTES
    unsaid = essence in (b"", b"application/x-www-form-urlencoded", b"text/plain")
    return unsaid and not takes_bytes and body.lstrip()[:1] in (b"[", b"{")


def _json_inputs(body: bytes, signature: Signature) -> dict[str, Tensor]:
    if body.lstrip()[:1] == b"{":
        return inputs_of(body, signature)
    try:
        # Exactly one value, so that nothing gets out of the frame around it.
        value = bytes(memoryview(_decode_one(body)))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson("The body is not valid JSON") from error
    # A bare value is put where /predict reads it: one reader, one set of rules.
    return inputs_of(b'{"data":%b}' % value, signature)


def form_field(body: bytes, content_type: bytes) -> tuple[bytes, bytes]:
    """Return type and content of the field `data` (or `body`) of a form (RFC 7578). Raises InvalidRequest."""
    found = _BOUNDARY.search(content_type)
    if found is not None:
        delimiter = b"\r\n--" + (found[1] or found[2])
        for part in (b"\r\n" + body).split(delimiter)[1:]:
            if part.startswith(b"--"):
                break
            head, gap, content = part.partition(b"\r\n\r\n")
            if gap and len(head) <= 4096 and _FIELD.search(head):
                kind = _PART_TYPE.search(head)
                return (kind[1].lower() if kind else b""), content
    raise InvalidRequest("The form has no field `data`", details={"input": "body", "expected": "data"})


async def _ping(site: Site, exchange: Exchange) -> Answer:
    reasons = site.reasons_not_ready()
    if not reasons:
        return Answer(b'{"status":"Healthy"}')
    error = NotReady(f"Not ready: {reasons[0]}", details={"reasons": reasons})
    exchange.error = error
    # The document's own word for its state wins over the number that the error body has there.
    body = msgspec.json.decode(error_body(error, exchange.request_id)) | {"status": "Unhealthy"}
    return Answer(_encode(body), status=503)


_MODEL = Parameter("model", "path", "The model's name.")
_VERSION = Parameter("version", "path", "One of its versions.")


def _doc(*names: Parameter) -> Doc:
    anything = {"type": "string", "contentMediaType": "application/octet-stream"}
    return Doc(
        "Predict, in TorchServe's form",
        "JSON as for /predict or bare, the bytes of an only input, or a form with the field `data`.",
        tag="inference",
        parameters=(*names, *PARAMETERS),
        body={"application/json": {}, "application/octet-stream": anything},
        body_example=[[0.1, 0.2, 0.3]],
        answers={200: ("What the model returned", "application/json", {})},
        errors=(400, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507),
        long_road=True,
    )


_HEALTH = {"type": "object", "properties": {"status": {"enum": ["Healthy", "Unhealthy"]}}}
ROUTES = (
    *(
        Route(method, "/predictions/{model}" + tail, _predictions, _doc(_MODEL, *names), kind="inference")
        for method in ("POST", "PUT")
        for tail, names in (("", ()), ("/{version}", (_VERSION,)))
    ),
    Route(
        "GET",
        "/ping",
        _ping,
        Doc(
            "Whether the service is healthy, in TorchServe's form",
            tag="health",
            answers={
                200: ("Healthy", "application/json", _HEALTH),
                503: ("Unhealthy", "application/json", _HEALTH),
            },
        ),
    ),
)
