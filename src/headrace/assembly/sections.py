"""All sections of settings there are, and how a command finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.models.batcher import BatchSettings
from headrace.models.host import ModelSettings
from headrace.services.delivery_settings import DeliverySettings
from headrace.services.settings import InferenceSettings, IngestSettings, ResultSettings
from headrace.settings import Fault, RootSettings, Settings, SettingsError, load
from headrace.sinks.webhook import WebhookSettings
from headrace.supervise import HeartbeatSettings
from headrace.web.settings import WebSettings

__all__ = ["SECTIONS", "load_settings"]

#: In the order in which the documentation shows them.
SECTIONS: tuple[type[Any], ...] = (
    RootSettings,
    WebSettings,
    IngestSettings,
    ResultSettings,
    ModelSettings,
    BatchSettings,
    InferenceSettings,
    DeliverySettings,
    WebhookSettings,
    HeartbeatSettings,
)


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    file: Path | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings in force. Raises SettingsError with all faults at once."""
    settings = load(SECTIONS, flags=flags, environ=os.environ if environ is None else environ, file=file)
    heartbeat_s, claim_s = settings[HeartbeatSettings].timeout_s, settings[InferenceSettings].claim_s
    if heartbeat_s <= claim_s:
        # A process that is only slow keeps its claims for as long; killing it sooner would run its messages twice.
        key = "heartbeat.timeout_s"
        wanted = f"wanted more than inference.claim_s, {claim_s:g}"
        raise SettingsError([Fault(key, settings.source(key), f"{heartbeat_s:g}", wanted)])
    return settings
