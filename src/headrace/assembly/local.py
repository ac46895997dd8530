"""One request to one model in this process: no listener, no topic."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np

from headrace.assembly.inference import find_models, host_of
from headrace.assembly.instance import CannotStart, Instance
from headrace.errors import InvalidRequest
from headrace.models.predictor import Predictor
from headrace.tensor import InferRequest, Signature, Tensor, answer_object, decode_request
from headrace.web.predict import inputs_of, prediction_of

__all__ = ["NPY_MAGIC", "Local", "is_plain", "read_array", "request_of"]

NPY_MAGIC = b"\x93NUMPY"


class _Form(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")


class Local:
    """Answers one body; after `main` has run, `answer` holds what is to be shown."""

    def __init__(self, body: bytes) -> None:
        """Hold the request: OIP JSON, `{"data": …}`, or an array as numpy saves it."""
        self._body = body
        self.answer: dict[str, Any] = {}

    async def main(self, instance: Instance) -> int:
        """Load the model, run the request. Raises HeadraceError, CannotStart."""
        found = find_models(instance)
        if found.faults:
            raise CannotStart(found.faults[0].error.message)
        # The highest version, as everywhere.
        artifact = found.artifacts[-1]
        host = host_of(instance, None)
        hosted = (await host.load([artifact]))[artifact.name, artifact.version]
        if hosted.error is not None or hosted.card is None or hosted.card.signature is None:
            raise CannotStart(hosted.reason)
        request = request_of(self._body, artifact.name, hosted.card.signature)
        answer = await Predictor(host).submit(request)
        if is_plain(self._body):
            self.answer = {
                "prediction": prediction_of(answer),
                "model": answer.model,
                "model_version": artifact.version,
            }
        else:
            self.answer = answer_object(answer)
        await host.close(timeout_s=1.0)
        return 0


def is_plain(body: bytes) -> bool:
    """Return whether a body is of the form `{"data": …}`."""
    try:
        return bool(memoryview(msgspec.json.decode(body, type=_Form).data))
    except msgspec.DecodeError:
        return False


def request_of(body: bytes, model: str, signature: Signature) -> InferRequest:
    """Read a request in any of the three forms. Raises HeadraceError."""
    if body.startswith(NPY_MAGIC):
        return InferRequest(model=model, inputs=read_array(body, signature))
    if is_plain(body):
        return InferRequest(model=model, inputs=inputs_of(body, signature))
    return decode_request(body, None, model=model, signature=signature)


def read_array(body: bytes, signature: Signature) -> dict[str, Tensor]:
    """Read a `.npy` file as the model's only input. Raises InvalidRequest, DtypeMismatch."""
    if len(signature.inputs) != 1:
        raise InvalidRequest(
            "A .npy file holds one array and the model has several inputs",
            details={"expected": signature.input_names, "actual": "one array"},
        )
    (spec,) = signature.inputs
    try:
        array = np.load(io.BytesIO(body), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InvalidRequest(f"The .npy file cannot be read: {error}") from error
    # Python's and numpy's defaults are wider than what models take; narrowing what is exact is no guess.
    wanted = spec.datatype.numpy
    if array.dtype != wanted and wanted != np.dtype(object):
        narrowed = array.astype(wanted)
        if (
            np.array_equal(narrowed.astype(array.dtype), array, equal_nan=array.dtype.kind == "f")
            or array.dtype.kind == wanted.kind == "f"
        ):
            array = narrowed
    return {spec.name: Tensor.of(array)}
