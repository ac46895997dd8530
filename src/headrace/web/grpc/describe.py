"""What a model is, as messages: metadata, Triton's configuration and statistics, and the index of all.

Configuration and statistics are made of the JSON forms that HTTP answers with, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from headrace.models.statistics import Statistics
from headrace.services.door import ModelState
from headrace.web import triton
from headrace.web.grpc.messages import messages
from headrace.web.predict import signature_of

__all__ = ["config_of", "index_of", "metadata_of", "statistics_of"]


def metadata_of(state: ModelState, versions: Sequence[str]) -> Any:
    """Return the ModelMetadataResponse of a version; -1 is any length. Raises ModelUnavailable."""
    signature = signature_of(state)
    message = messages()["inference.ModelMetadataResponse"](name=state.name, versions=versions, platform=state.platform)
    for specs, field in ((signature.inputs, message.inputs), (signature.outputs, message.outputs)):
        for spec in specs:
            field.add(name=spec.name, datatype=spec.datatype.value, shape=spec.shape)
    return message


def config_of(state: ModelState, rows_max: int) -> Any:
    """Return the ModelConfig of a version; `rows_max` is the most rows run together. Raises ModelUnavailable."""
    return _read("inference.ModelConfig", triton.config_of(state, rows_max))


def statistics_of(name: str, version: str, found: Statistics) -> Any:
    """Return the ModelStatistics of a version; every duration is there, at zero where nothing is measured."""
    return _read("inference.ModelStatistics", triton.statistics_of(name, version, found))


def index_of(states: Sequence[ModelState], *, only_ready: bool) -> Any:
    """Return the RepositoryIndexResponse: every version with its state, and why it is not ready."""
    message = messages()["inference.RepositoryIndexResponse"]()
    for state in states:
        if state.ready or not only_ready:
            message.models.add(
                name=state.name,
                version=state.version,
                state="READY" if state.ready else "UNAVAILABLE",
                reason=state.reason,
            )
    return message


def _read(name: str, form: dict[str, Any]) -> Any:
    # The JSON form may say more than the part of Triton's messages that is kept here.
    return json_format.ParseDict(form, messages()[name](), ignore_unknown_fields=True, descriptor_pool=messages().pool)
