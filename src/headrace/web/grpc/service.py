"""The methods of `inference.GRPCInferenceService`: what HTTP's OIP routes do, and what Triton's clients call beside.

Sources: kserve/open-inference-protocol, inference_grpc.md; triton-inference-server/common, grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace import __version__
from headrace.errors import (
    Forbidden,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    RequestNotFound,
    VersionNotFound,
)
from headrace.services.door import ModelState
from headrace.web.call import through
from headrace.web.exchange import Answer, Exchange
from headrace.web.grpc.calls import Endpoint
from headrace.web.grpc.codec import answer_message, is_raw, read_request, set_parameter
from headrace.web.grpc.describe import config_of, index_of, metadata_of, statistics_of
from headrace.web.grpc.messages import INFERENCE, messages
from headrace.web.site import Site

__all__ = ["endpoints", "infer", "refuse_unknown"]

#: What is offered beyond the protocol's six methods, by Triton's names.
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters")


def endpoints() -> list[Endpoint]:
    """Return the methods that take one request."""
    methods = messages().methods(INFERENCE)
    return [
        Endpoint(methods["ServerLive"], _live, always=True),
        Endpoint(methods["ServerReady"], _ready, always=True),
        Endpoint(methods["ModelReady"], _model_ready),
        Endpoint(methods["ServerMetadata"], _server),
        Endpoint(methods["ModelMetadata"], _metadata),
        Endpoint(methods["ModelInfer"], infer, kind="inference"),
        Endpoint(methods["ModelConfig"], _config),
        Endpoint(methods["ModelStatistics"], _statistics),
        Endpoint(methods["RepositoryIndex"], _index),
        Endpoint(methods["RepositoryModelLoad"], _administer),
        Endpoint(methods["RepositoryModelUnload"], _administer),
    ]


async def infer(site: Site, exchange: Exchange, message: Any) -> Any:
    """Answer a ModelInferRequest through the door; an accepted one with its id and no outputs."""
    state = _named(site, exchange, message.model_name, message.model_version)
    request = read_request(message, state.name)
    answer = await through(site, exchange, request)
    if isinstance(answer, Answer):
        return _accepted(exchange, message)
    if answer.id is None:
        # As over HTTP: a copy, because equal requests may share one answer.
        answer = msgspec.structs.replace(answer, id=exchange.request_id)
    return answer_message(answer, raw=is_raw(message))


def refuse_unknown(path: str) -> MethodNotAllowed:
    """Return the error for a method that is not here; it says which are."""
    offered = sorted(messages().methods(INFERENCE))
    service, _, name = path.removeprefix("/").rpartition("/")
    if service != INFERENCE:
        return MethodNotAllowed("There is no such method here", details={"expected": messages().services})
    instead = ""
    if "SharedMemory" in name:
        instead = "; tensors travel in raw_input_contents"
    elif name in ("TraceSetting", "LogSettings"):
        instead = "; traces and logs are set when the service starts"
    return MethodNotAllowed(f"{name[:64]} is not offered{instead}", details={"expected": offered})


def _accepted(exchange: Exchange, message: Any) -> Any:
    exchange.status = 202
    response = messages()["inference.ModelInferResponse"](
        model_name=exchange.model, model_version=exchange.model_version, id=message.id or exchange.request_id
    )
    set_parameter(response.parameters["accepted"], True)
    set_parameter(response.parameters["location"], exchange.location)
    return response


def _named(site: Site, exchange: Exchange, name: str, version: str) -> ModelState:
    state = site.model(name, version or None)
    exchange.model, exchange.model_version = state.name, state.version
    return state


def _asked(site: Site, exchange: Exchange, message: Any) -> Sequence[ModelState]:
    """Return the versions that a request names: all of a model where it names no version, all where no model."""
    if message.version:
        return [_named(site, exchange, message.name, message.version)]
    if message.name:
        name = _named(site, exchange, message.name, "").name
        return [state for state in site.door.models() if state.name == name]
    return site.door.models()


async def _live(site: Site, exchange: Exchange, message: Any) -> Any:
    return messages()["inference.ServerLiveResponse"](live=True)


async def _ready(site: Site, exchange: Exchange, message: Any) -> Any:
    reasons = site.reasons_not_ready()
    if reasons:
        # No failure of the call; why it is so stands beside the answer.
        exchange.error = NotReady("The service is not ready", details={"reasons": reasons})
    return messages()["inference.ServerReadyResponse"](ready=not reasons)


async def _model_ready(site: Site, exchange: Exchange, message: Any) -> Any:
    ready = False
    try:
        state = _named(site, exchange, message.name, message.version)
        reasons = [state.reason or "loading"] if not state.ready else site.reasons_stopping()
        ready = not reasons
        if reasons:
            exchange.error = NotReady("The model is not ready", details={"reasons": reasons})
    except (ModelNotFound, VersionNotFound) as error:
        # Triton answers false for what it does not know, and its clients' users wait on that while models load.
        exchange.error = error
    return messages()["inference.ModelReadyResponse"](ready=ready)


async def _metadata(site: Site, exchange: Exchange, message: Any) -> Any:
    state = _named(site, exchange, message.name, message.version)
    versions = [other.version for other in site.door.models() if other.name == state.name]
    return metadata_of(state, versions)


async def _server(site: Site, exchange: Exchange, message: Any) -> Any:
    # Tools ask for statistics where they are listed, and give up where there are none then.
    extensions = _EXTENSIONS if site.statistics is None else (*_EXTENSIONS, "statistics")
    return messages()["inference.ServerMetadataResponse"](name="headrace", version=__version__, extensions=extensions)


async def _config(site: Site, exchange: Exchange, message: Any) -> Any:
    state = _named(site, exchange, message.name, message.version)
    return messages()["inference.ModelConfigResponse"](config=config_of(state, site.rows_max))


async def _statistics(site: Site, exchange: Exchange, message: Any) -> Any:
    if site.statistics is None:
        raise RequestNotFound("This process runs no models itself; /metrics has the numbers of those that do")
    response = messages()["inference.ModelStatisticsResponse"]()
    for state in _asked(site, exchange, message):
        found = site.statistics(state.name, state.version)
        if found is not None:
            response.model_stats.append(statistics_of(state.name, state.version, found))
    return response


async def _index(site: Site, exchange: Exchange, message: Any) -> Any:
    return index_of(site.door.models(), only_ready=message.ready)


async def _administer(site: Site, exchange: Exchange, message: Any) -> Any:
    raise Forbidden(
        "Models are loaded and unloaded on the admin listener (`--admin-port`, on loopback), not here",
        details={"listener": "admin", "setting": "admin_port"},
    )
