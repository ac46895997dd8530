"""Webhooks: signed POSTs after Standard Webhooks 1.0.0 (https://www.standardwebhooks.com).

`webhook-id` and the body are the same for every attempt, timestamp and signature belong to the attempt. A 2xx is the
only success. What only sending needs (aiohttp, standardwebhooks) is loaded by whoever sends: ingest only checks, and
inference only reads the settings.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from headrace import __version__
from headrace.errors import InvalidRequest
from headrace.message import Dispatch
from headrace.settings import setting
from headrace.sinks.base import Outcome, Sink
from headrace.sinks.webhook_address import Policy

if TYPE_CHECKING:
    from standardwebhooks import Webhook

    from headrace.sinks.webhook_client import Client, LookUp

__all__ = ["WebhookSettings", "WebhookSink", "parse_retry_after", "secrets_of"]

_SECRET_PREFIX = "whsec_"
_SECRET_BYTES = range(24, 65)
_GONE = 410
_THROTTLED = frozenset({429, 502, 504})


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Where webhooks may go and how they are signed."""

    section: ClassVar[str] = "webhook"

    secret: str = setting(
        "",
        "Signing secrets, `whsec_` and base64 of 24 to 64 bytes; several, separated by spaces, all sign (rotation). "
        "Empty: one is made in the store, and `headrace check` shows it.",
        secret=True,
    )
    allow_private: bool = setting(False, "Whether webhooks may go to private, loopback and link-local addresses.")
    allow: tuple[str, ...] = setting(
        (), "Hosts (`a.internal`, `.internal`) and networks (`10.1.0.0/16`) that may be private."
    )
    only: tuple[str, ...] = setting((), "Hosts and networks that webhooks may go to at all; empty: any.")
    timeout_s: float = setting(15.0, "One attempt, from looking up the name to the answer.", min=0.1, max=300)
    connect_timeout_s: float = setting(5.0, "Connecting to one address.", min=0.1, max=300)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the secrets; their text is in none of it."""
        for number, secret in enumerate(self.secret.split(), 1):
            if not secret.startswith(_SECRET_PREFIX):
                yield "secret", f"secret {number} does not begin with {_SECRET_PREFIX}"
                continue
            try:
                size = len(base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True))
            except binascii.Error:
                yield "secret", f"secret {number} is not base64 after {_SECRET_PREFIX}"
                continue
            if size not in _SECRET_BYTES:
                yield "secret", f"secret {number} has {size} bytes, wanted 24 to 64"


def secrets_of(settings: WebhookSettings, made: bytes) -> tuple[str, ...]:
    """Return the signing secrets: those of the settings, else the one made of the store's secret `webhook`."""
    return tuple(settings.secret.split()) or (_SECRET_PREFIX + base64.b64encode(made).decode(),)


class WebhookSink(Sink):
    """Sends results to http and https destinations."""

    name = "webhook"
    schemes = ("http", "https")

    def __init__(
        self, settings: WebhookSettings, secrets: Sequence[str] = (), *, look_up: LookUp | None = None
    ) -> None:
        """Without `secrets` (see `secrets_of`) it can only check. `look_up` finds the addresses of a host."""
        self._settings = settings
        self.timeout_s = settings.timeout_s
        self._policy = Policy(allow_private=settings.allow_private, allow=settings.allow, only=settings.only)
        self._signers = _signers(secrets)
        self._look_up = look_up
        self._client: Client | None = None

    def check(self, destination: str) -> None:
        """Raise InvalidRequest, naming the rule, for what can never be sent to; a name is not looked up."""
        self._policy.target(destination)

    async def send(self, dispatch: Dispatch, *, now_ms: int) -> Outcome:
        """Post once."""
        from headrace.sinks.webhook_client import AddressRefused, Trouble

        try:
            target = self._policy.target(dispatch.destination)
        except InvalidRequest as error:
            return Outcome("refused", error=error.message)
        try:
            reply = await self._open().post(target.url, self._headers(dispatch, now_ms), dispatch.body)
        except AddressRefused as error:
            return Outcome("refused", error=f"that address is not sent to ({error})")
        except Trouble as error:
            return Outcome("retry", error=str(error), throttled=error.timed_out)
        if 200 <= reply.status < 300:
            return Outcome("delivered", reply.status)
        kind = "gone" if reply.status == _GONE else "retry"
        text = f"HTTP {reply.status}" + (", redirects are not followed" if 300 <= reply.status < 400 else "")
        return Outcome(
            kind,
            reply.status,
            text,
            retry_after_s=parse_retry_after(reply.retry_after, now_ms),
            throttled=reply.status in _THROTTLED,
        )

    async def close(self) -> None:
        """Close connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _open(self) -> Client:
        if self._client is None:
            from headrace.sinks.webhook_client import Client

            self._client = Client(
                self._policy,
                timeout_s=self._settings.timeout_s,
                connect_timeout_s=self._settings.connect_timeout_s,
                look_up=self._look_up,
            )
        return self._client

    def _headers(self, dispatch: Dispatch, now_ms: int) -> dict[str, str]:
        at = datetime.fromtimestamp(now_ms // 1000, UTC)
        text = dispatch.body.decode()
        headers = {
            "content-type": "application/json",
            "user-agent": f"headrace/{__version__}",
            "webhook-id": dispatch.webhook_id,
            "webhook-timestamp": str(now_ms // 1000),
            "webhook-signature": " ".join(signer.sign(dispatch.webhook_id, at, text) for signer in self._signers),
        }
        if dispatch.traceparent:
            headers["traceparent"] = dispatch.traceparent
        return headers


def _signers(secrets: Sequence[str]) -> list[Webhook]:
    if not secrets:
        return []
    from standardwebhooks import Webhook

    return [Webhook(secret) for secret in secrets]


def parse_retry_after(text: str | None, now_ms: int) -> float | None:
    """Return the seconds a Retry-After asks for, as seconds or as a date; None for anything else.

    RFC 9110 section 10.2.3; fractions are taken too, since receivers send them. Never negative, not clamped.
    """
    if not text or len(text) > 64:
        return None
    try:
        seconds = float(text)
    except ValueError:
        from email.utils import parsedate_to_datetime

        try:
            at = parsedate_to_datetime(text)
        except (ValueError, IndexError, OverflowError):
            return None
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        seconds = at.timestamp() - now_ms / 1000
    return max(0.0, seconds) if math.isfinite(seconds) else None
