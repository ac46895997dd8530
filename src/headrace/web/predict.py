"""POST /predict: the plain form, `{"data": …}` in and `{"prediction": …}` out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import msgspec
from msgspec import Raw

from headrace.errors import InvalidJson, InvalidRequest, MissingInput, ModelUnavailable, UnknownInput
from headrace.services.door import ModelState
from headrace.tensor import (
    InferAnswer,
    InferRequest,
    Signature,
    Tensor,
    tensor_from_json,
    tensor_in_object,
    tensor_to_json,
)
from headrace.web.call import PARAMETERS, through
from headrace.web.exchange import Answer, Exchange
from headrace.web.headers import check_media_type
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["ROUTES", "inputs_of", "prediction_of", "refuse_names", "signature_of"]

#: How much of a caller's own names an error repeats.
NAMES_SHOWN_MAX = 8
NAME_LENGTH_SHOWN_MAX = 64


class _Body(msgspec.Struct):
    """Keys that are not known are ignored, as the Open Inference Protocol does."""

    data: Raw = Raw(b"")
    inputs: Raw = Raw(b"")


class _Prediction(msgspec.Struct):
    prediction: Any
    model: str
    model_version: str
    request_id: str


Reader = Callable[[bytes], Tensor | None]

#: Digest of a signature → its reader.
_READERS: dict[str, Reader] = {}
READERS_MAX = 256

_decode_body = msgspec.json.Decoder(_Body).decode
_decode_by_name = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


async def _predict(site: Site, exchange: Exchange) -> Answer:
    name = exchange.params.get("model")
    state = site.the_model() if name is None else site.model(name)
    exchange.model, exchange.model_version = state.name, state.version
    check_media_type(exchange.headers, binary=False)
    body = await exchange.body()
    inputs = inputs_of(body, signature_of(state))
    answer = await through(site, exchange, InferRequest(model=state.name, inputs=inputs))
    if isinstance(answer, Answer):
        return answer
    shown = _Prediction(prediction_of(answer), answer.model, exchange.model_version, exchange.request_id)
    return Answer(_encode(shown))


def signature_of(state: ModelState) -> Signature:
    """Return what a version takes. Raises ModelUnavailable while nobody knows."""
    if state.signature is None:
        raise ModelUnavailable(
            f"The model {state.name} cannot answer now",
            details={"model": state.name, "version": state.version, "reason": state.reason},
        )
    return state.signature


def inputs_of(body: bytes, signature: Signature) -> dict[str, Tensor]:
    """Read `{"data": …}`. Raises InvalidJson, InvalidRequest, MissingInput, UnknownInput and what tensors raise."""
    read = _READERS.get(signature.digest) or _reader_of(signature)
    tensor = read(body) if body.isascii() else None
    if tensor is not None:
        return {signature.inputs[0].name: tensor}
    return _read_inputs(_read_data(body), signature)


def _reader_of(signature: Signature) -> Reader:
    """Return (and keep) what reads the usual body of a model with one input in one pass."""
    if len(_READERS) >= READERS_MAX:
        _READERS.clear()
    read: Reader = lambda body: None  # noqa: E731
    if len(signature.inputs) == 1:
        (spec,) = signature.inputs
        read = tensor_in_object(spec.name, spec.datatype, len(spec.shape), b"data")
    _READERS[signature.digest] = read
    return read


def prediction_of(answer: InferAnswer) -> Any:
    """Return the outputs as nested lists; an object by name where there are several."""
    outputs = answer.outputs
    if len(outputs) == 1:
        ((name, only),) = outputs.items()
        return tensor_to_json(only, name=name)
    return {name: tensor_to_json(tensor, name=name) for name, tensor in outputs.items()}


def _read_data(body: bytes) -> Raw:
    """Return the text under `data`, unread. Raises InvalidJson, InvalidRequest."""
    try:
        # The decoder does not look into what it skips; a body with bad bytes anywhere is refused.
        if not body.isascii():
            body.decode()
        found = _decode_body(body)
    except UnicodeDecodeError as error:
        raise InvalidJson("The body is not UTF-8", details={"position": error.start}) from error
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            'The body must be an object: {"data": [...]}', details={"input": "body", "reason": str(error)}
        ) from error
    except msgspec.DecodeError as error:
        raise InvalidJson("The body is not valid JSON", details={"reason": _reason(error)}) from error
    if not memoryview(found.data):
        given_inputs = bool(memoryview(found.inputs))
        raise InvalidRequest(
            "/predict takes `data`, not `inputs`; `inputs` belongs to /v2/models/{model}/infer"
            if given_inputs
            else 'The body has no `data`: send {"data": [...]}',
            details={"input": "body", "expected": "data", "actual": "inputs" if given_inputs else "neither"},
        )
    return found.data


def _read_inputs(data: Raw, signature: Signature) -> dict[str, Tensor]:
    specs = signature.inputs
    if bytes(memoryview(data)[:1]) != b"{":
        if len(specs) != 1:
            raise InvalidRequest(
                "The model has several inputs: `data` must be an object with one member for each",
                details={"input": "data", "expected": signature.input_names, "actual": "one value"},
            )
        (spec,) = specs
        return {spec.name: tensor_from_json(spec.name, spec.datatype, None, data)}
    try:
        given = _decode_by_name(data)
    except msgspec.DecodeError as error:
        raise InvalidJson("`data` is not valid JSON", details={"reason": _reason(error)}) from error
    if len(given) != len(specs) or any(spec.name not in given for spec in specs):
        refuse_names(given, signature)
    return {spec.name: tensor_from_json(spec.name, spec.datatype, None, given[spec.name]) for spec in specs}


def refuse_names(given: Collection[str], signature: Signature) -> NoReturn:
    """Raise UnknownInput or MissingInput for names that are not the model's."""
    legal = signature.input_names
    unknown = [name[:NAME_LENGTH_SHOWN_MAX] for name in given if name not in legal]
    if unknown:
        raise UnknownInput(
            f"The model has no input {unknown[0]!r}",
            details={"input": unknown[0], "expected": legal, "actual": unknown[:NAMES_SHOWN_MAX]},
        )
    missing = next(name for name in legal if name not in given)
    raise MissingInput(
        f"Input {missing!r} is missing", details={"input": missing, "expected": legal, "actual": list(given)}
    )


def _reason(error: msgspec.DecodeError) -> str:
    # Half a surrogate pair is reported as truncation; say only what is certain.
    return "it ends too early or holds a broken escape" if "truncated" in str(error) else str(error)[:120]


_DATA = {
    "description": "The input with its batch dimension, as nested lists; with several inputs an object by name.",
    "type": ["array", "object", "number", "string", "boolean"],
}
_REQUEST = {"type": "object", "required": ["data"], "properties": {"data": _DATA}}
_RESPONSE = {
    "type": "object",
    "required": ["prediction", "model", "model_version", "request_id"],
    "properties": {
        "prediction": {
            "description": "The output as nested lists; with several outputs an object by name. NaN and "
            "Infinity are null.",
        },
        "model": {"type": "string"},
        "model_version": {"type": "string"},
        "request_id": {"type": "string"},
    },
}


def _doc(summary: str, description: str, *first: Parameter) -> Doc:
    return Doc(
        summary,
        description,
        tag="inference",
        parameters=(*first, *PARAMETERS),
        body={"application/json": _REQUEST},
        body_example={"data": [[0.1, 0.2, 0.3]]},
        answers={200: ("The prediction", "application/json", _RESPONSE)},
        errors=(400, 408, 413, 415, 422, 429, 500, 503, 504, 507),
        long_road=True,
    )


ROUTES = (
    Route(
        "POST",
        "/predict",
        _predict,
        _doc(
            "Predict, with the only model",
            "The input always has its batch dimension. Where several models are served, 400 names them.",
        ),
        kind="inference",
    ),
    Route(
        "POST",
        "/predict/{model}",
        _predict,
        _doc("Predict, with a named model", "", Parameter("model", "path", "The model's name.")),
        kind="inference",
    ),
)
