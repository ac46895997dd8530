"""`headrace check`: looks at everything a start depends on, and tells all faults at once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.assembly.child import ONLY, QUIET
from headrace.assembly.instance import CannotStart, broker_of, run_loop, store_of
from headrace.assembly.preparation import Preparation
from headrace.assembly.sections import SECTIONS, load_settings
from headrace.clock import SystemClock
from headrace.errors import HeadraceError
from headrace.settings import RootSettings, Settings, SettingsError, load
from headrace.sinks.webhook import WebhookSettings, secrets_of
from headrace.sqlite import check_filesystem, check_sqlite
from headrace.stores import Store
from headrace.supervise import HeartbeatSettings, Supervisor
from headrace.web.grpc import grpc_fault

__all__ = ["Finding", "check_all"]

_FREE_BYTES_LOW = 1 << 30
_FREE_BYTES_MIN = 64 << 20
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "warning", "fault"]
    text: str


def check_all(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: str | None,
    models: Sequence[str],
    *,
    show_secret: bool = False,
) -> list[Finding]:
    """Look at everything; one fault hides no other."""
    settings, findings = _settings(flags, environ, file)
    findings += _grpc(settings)
    findings += _sqlite(settings)
    findings += _disk(settings)

    async def rest() -> int:
        findings.extend(await _engines(settings, show_secret))
        if models:
            findings.extend(await _models(settings, models))
        return 0

    run_loop(rest())
    return findings


def _settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None) -> tuple[Settings, list[Finding]]:
    try:
        settings = load_settings(flags, environ=environ, file=file)
    except SettingsError as error:
        found = [Finding("settings", "fault", str(fault)) for fault in error.faults]
        # What is right is used to look at the rest.
        wrong = {fault.key for fault in error.faults} | {fault.source for fault in error.faults}
        good_flags = {key: value for key, value in flags.items() if key not in wrong}
        good_environ = {name: value for name, value in environ.items() if name not in wrong}
        for source in (file, "/dev/null"):
            try:
                return load(SECTIONS, flags=good_flags, environ=good_environ, file=source), found
            except SettingsError:
                continue
        return load(SECTIONS, file="/dev/null"), found
    count = sum(source != "default" for _, _, source in settings.values())
    return settings, [Finding("settings", "ok", f"{count} set, the others are defaults")]


def _grpc(settings: Settings) -> list[Finding]:
    if settings[RootSettings].grpc_port is None:
        return []
    fault = grpc_fault()
    return [Finding("grpc", "fault", fault) if fault else Finding("grpc", "ok", "its libraries are installed")]


def _sqlite(settings: Settings) -> list[Finding]:
    root = settings[RootSettings]
    if not any(url.startswith("sqlite:") for url in (root.broker_url, root.store_url)):
        return []
    faults = [*check_sqlite(), *check_filesystem(Path(root.data).absolute() / "headrace.db")]
    return [Finding("sqlite", "fault", fault) for fault in faults] or [
        Finding("sqlite", "ok", "its version and its file system are fit")
    ]


def _disk(settings: Settings) -> list[Finding]:
    folder = Path(settings[RootSettings].data).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Finding("disk", "fault", f"{folder}: {error.strerror}")]
    shown = f"{free / (1 << 20):,.0f} MiB free at {folder}"
    state: Literal["ok", "warning", "fault"] = "ok"
    if free < _FREE_BYTES_LOW:
        state = "fault" if free < _FREE_BYTES_MIN else "warning"
    return [Finding("disk", state, shown)]


async def _engines(settings: Settings, show_secret: bool) -> list[Finding]:
    clock = SystemClock()
    found: list[Finding] = []
    for what, make in (("broker", broker_of), ("store", store_of)):
        try:
            engine = make(settings, clock)
            async with asyncio.timeout(_PATIENCE_S):
                await engine.open()
                try:
                    await engine.health()
                    found.append(Finding(what, "ok", "it can be written"))
                    if isinstance(engine, Store):
                        found.append(_secret(settings, await engine.secret("webhook"), show_secret))
                    elif not engine.features.durable:
                        found.append(Finding(what, "warning", "it acknowledges before anything is durable"))
                finally:
                    await engine.close()
        except TimeoutError:
            found.append(Finding(what, "fault", f"no answer within {_PATIENCE_S:g} seconds"))
        except (CannotStart, HeadraceError) as error:
            found.append(Finding(what, "fault", str(error).removeprefix(f"{what}: ")))
    return found


def _secret(settings: Settings, made: bytes, show_secret: bool) -> Finding:
    webhook = settings[WebhookSettings]
    where = "HEADRACE_WEBHOOK_SECRET or the file" if webhook.secret else "made in the store"
    if show_secret:
        return Finding("webhook secret", "ok", " ".join(secrets_of(webhook, made)))
    return Finding("webhook secret", "ok", f"{where}; `headrace check --show-secret` prints it")


async def _models(settings: Settings, models: Sequence[str]) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        # The cards of a stack that runs are its own.
        environ = {**settings.environ(), "HEADRACE_DATA": folder, "HEADRACE_CONFIG": "/dev/null"}
        aside = load(SECTIONS, environ=environ)
        # What is wrong in our own environment has been told, and must not keep a model from being looked at.
        preparation = Preparation(aside, models, {**environ, QUIET: "1", ONLY: ",".join(environ)})
        supervisor = Supervisor(
            (),
            clock=SystemClock(),
            say=lambda line, /, **fields: None,
            heartbeat_timeout_s=settings[HeartbeatSettings].timeout_s,
            on_word=lambda child, word: preparation.hear(word),
        )
        try:
            async with supervisor:
                prepared = await preparation.run(supervisor)
        except CannotStart as error:
            return [Finding("models", "fault", str(error))]
    good = [Finding("model", "ok", f"{each.name} version {each.version} loads") for each in prepared.good]
    return good + [Finding("model", "fault", reason) for reason in prepared.broken.values()]
