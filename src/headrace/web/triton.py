"""What Triton's extensions add to the Open Inference Protocol: configuration, statistics, and the model repository.

Source: triton-inference-server/server, docs/protocol/extension_{model_configuration,statistics,model_repository}.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import Forbidden, RequestNotFound
from headrace.models.statistics import Statistics
from headrace.services.door import ModelState
from headrace.tensor import Datatype, TensorSpec
from headrace.web.exchange import Answer, Exchange
from headrace.web.predict import signature_of
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["ROUTES", "config_of", "statistics_of"]

_encode = msgspec.json.Encoder().encode


def config_of(state: ModelState, rows_max: int) -> dict[str, Any]:
    """Return a ModelConfig in its JSON form; `rows_max` is the most rows run together.

    As Triton has it, dims leave out the batch dimension where max_batch_size is above 0.
    """
    signature = signature_of(state)
    batchable = signature.batchable
    return {
        "name": state.name,
        "platform": state.platform,
        "backend": state.platform.partition("_")[0],
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": rows_max if batchable else 0,
        "input": [_config_tensor(spec, batchable) for spec in signature.inputs],
        "output": [_config_tensor(spec, batchable) for spec in signature.outputs],
        **({"dynamic_batching": {}} if batchable else {}),
    }


def _config_tensor(spec: TensorSpec, batchable: bool) -> dict[str, Any]:
    kind = "STRING" if spec.datatype is Datatype.BYTES else str(spec.datatype)
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape[batchable:])}


def statistics_of(name: str, version: str, found: Statistics) -> dict[str, Any]:
    """Return one entry of `model_stats`. Reading and writing tensors is not measured apart: those parts are 0."""

    def part(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    nothing = part(0, 0)
    return {
        "name": name,
        "version": version,
        "last_inference": found.last_ms,
        "inference_count": found.rows,
        "execution_count": found.executions,
        "inference_stats": {
            "success": part(found.succeeded, found.success_s),
            "fail": part(found.failed, found.fail_s),
            "queue": part(found.succeeded, found.queue_s),
            "compute_input": nothing,
            "compute_infer": part(found.succeeded, found.run_s),
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": nothing,
                "compute_infer": part(int(runs), run_s),
                "compute_output": nothing,
            }
            for rows, (runs, run_s) in sorted(found.sizes.items())
        ],
        "memory_usage": [],
    }


async def _config(site: Site, exchange: Exchange) -> Answer:
    return Answer(_encode(config_of(site.named(exchange), site.rows_max)))


async def _statistics(site: Site, exchange: Exchange) -> Answer:
    if site.statistics is None:
        raise RequestNotFound("This process runs no models itself; /metrics has the numbers of those that do")
    if "model" not in exchange.params:
        states = list(site.door.models())
    elif "version" in exchange.params:
        states = [site.named(exchange)]
    else:
        name = site.named(exchange).name
        states = [state for state in site.door.models() if state.name == name]
    entries = []
    for state in states:
        found = site.statistics(state.name, state.version)
        if found is not None:
            entries.append(statistics_of(state.name, state.version, found))
    return Answer(_encode({"model_stats": entries}))


async def _elsewhere(site: Site, exchange: Exchange) -> Answer:
    raise Forbidden(
        "Models are loaded and unloaded on the admin listener (`--admin-port`, on loopback), not here",
        details={"listener": "admin", "setting": "admin_port"},
    )


_MODEL = Parameter("model", "path", "The model's name.")
_VERSION = Parameter("version", "path", "One of its versions.")
_OBJECT = {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0}
_STATS = {
    "type": "object",
    "required": ["model_stats"],
    "properties": {
        "model_stats": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "version", "last_inference", "inference_count", "execution_count"],
                "properties": {
                    "name": {"type": "string"},
                    "version": {"type": "string"},
                    "last_inference": _COUNT | {"description": "Milliseconds since 1970; 0 before the first."},
                    "inference_count": _COUNT | {"description": "Rows answered."},
                    "execution_count": _COUNT | {"description": "Runs of the model."},
                    "inference_stats": _OBJECT,
                    "batch_stats": {"type": "array", "items": _OBJECT},
                    "memory_usage": {"type": "array", "items": _OBJECT},
                },
            },
        }
    },
}


def _doc(summary: str, schema: Any, *names: Parameter, description: str = "", errors: tuple[int, ...] = (404,)) -> Doc:
    return Doc(
        summary,
        description,
        tag="models",
        parameters=names,
        answers={200: ("OK", "application/json", schema)},
        errors=errors,
    )


def _elsewhere_doc(verb: str) -> Doc:
    return Doc(
        f"{verb} a model: not on this listener",
        "Always 403 here; the admin listener does it.",
        tag="models",
        parameters=(_MODEL,),
        errors=(403,),
    )


_COUNTED = "Since each version was loaded, in this process; `inference_count / execution_count` is the mean batch."
ROUTES = (
    Route(
        "GET",
        "/v2/models/{model}/config",
        _config,
        _doc("A model's configuration, in Triton's form", _OBJECT, _MODEL, errors=(404, 503)),
    ),
    Route(
        "GET",
        "/v2/models/{model}/versions/{version}/config",
        _config,
        _doc("A version's configuration, in Triton's form", _OBJECT, _MODEL, _VERSION, errors=(404, 503)),
    ),
    Route("GET", "/v2/models/stats", _statistics, _doc("What every version did", _STATS, description=_COUNTED)),
    Route(
        "GET",
        "/v2/models/{model}/stats",
        _statistics,
        _doc("What a model's versions did", _STATS, _MODEL, description=_COUNTED),
    ),
    Route(
        "GET",
        "/v2/models/{model}/versions/{version}/stats",
        _statistics,
        _doc("What one version did", _STATS, _MODEL, _VERSION, description=_COUNTED),
    ),
    Route("POST", "/v2/repository/models/{model}/load", _elsewhere, _elsewhere_doc("Load")),
    Route("POST", "/v2/repository/models/{model}/unload", _elsewhere, _elsewhere_doc("Unload")),
)
