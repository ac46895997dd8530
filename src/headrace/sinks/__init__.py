"""The sinks: how a result is sent. A new one takes a file, a row in `open_sinks` and a conformance class."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.message import Dispatch
from headrace.sinks.base import Outcome, Sink
from headrace.sinks.webhook import WebhookSettings, WebhookSink

__all__ = ["Sinks", "open_sinks"]


class Sinks:
    """Every sink there is, found by the scheme of a destination."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._by_scheme = {scheme: sink for sink in sinks for scheme in sink.schemes}

    @property
    def timeout_s(self) -> float:
        """Return how long the slowest of them may take to send once."""
        return max((sink.timeout_s for sink in self._sinks), default=0.0)

    def check(self, destination: str) -> None:
        """Raise InvalidRequest if `destination` can never be sent to; opens no connection."""
        sink = self._by_scheme.get(_scheme(destination))
        if sink is None:
            legal = ", ".join(f"{scheme}://" for scheme in sorted(self._by_scheme))
            raise InvalidRequest(
                f"Webhook-URL refused: wanted one of {legal}", details={"header": "Webhook-URL", "rule": "scheme"}
            )
        sink.check(destination)

    def name(self, destination: str) -> str:
        """Return the name of the sink that a destination belongs to; "" if there is none."""
        sink = self._by_scheme.get(_scheme(destination))
        return sink.name if sink is not None else ""

    async def send(self, dispatch: Dispatch, *, now_ms: int) -> Outcome:
        """Send once, as `Sink.send`; a destination that no sink is for is refused."""
        sink = self._by_scheme.get(_scheme(dispatch.destination))
        if sink is None:
            return Outcome("refused", error="there is no sink for that scheme")
        return await sink.send(dispatch, now_ms=now_ms)

    async def close(self) -> None:
        """Close every connection."""
        for sink in self._sinks:
            await sink.close()


def open_sinks(webhook: WebhookSettings, *, webhook_secrets: Sequence[str] = ()) -> Sinks:
    """Return the sinks; without secrets they can check destinations, which is all that ingest does."""
    return Sinks([WebhookSink(webhook, webhook_secrets)])


def _scheme(destination: str) -> str:
    return destination.partition(":")[0].lower()
