"""Message and Result: what travels on a topic and what comes of it."""

from __future__ import annotations

import msgspec

__all__ = ["SCHEMA", "Dispatch", "ErrorRecord", "Message", "Result"]

#: Version of the encoded form. A reader refuses a newer one, with a reason, instead of guessing. New fields with
#: a default do not need a new version: a reader skips what it does not know.
SCHEMA = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request for a prediction, immutable."""

    id: str
    model: str
    #: The version asked for; None lets the rollout pick.
    version: str | None = None
    #: Digest of the signature that the payload was checked against.
    signature: str
    accepted_at_ms: int
    #: A message that has not been started by then is answered `deadline_exceeded`; None: retention only.
    expires_at_ms: int | None = None
    #: Where the result is sent, besides the store: URLs, in the order given, without duplicates.
    destinations: tuple[str, ...] = ()
    #: Correlation only, never identity.
    request_id: str = ""
    #: The OIP `id` of the request, echoed in its answer.
    client_id: str | None = None
    #: W3C trace context of the accepting request.
    traceparent: str | None = None
    tracestate: str | None = None
    #: Digest of what was asked (tensors, model, parameters, destinations); set only on keyed messages.
    fingerprint: str | None = None
    #: The dead letter that this message is a replay of.
    replay_of: str | None = None
    schema: int = SCHEMA
    #: OIP binary form: `header_length` bytes of JSON, then the tensors' raw bytes.
    header_length: int
    payload: bytes


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it is kept in a result: enough to raise it again."""

    code: str
    message: str
    details: dict[str, object] = {}


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer to a message, or the reason there is none; exactly one per message."""

    id: str
    model: str
    #: The version that answered; "" where none was reached.
    model_version: str
    accepted_at_ms: int
    finished_at_ms: int
    #: How often the message was handed out, the last time included.
    attempts: int
    request_id: str = ""
    client_id: str | None = None
    traceparent: str | None = None
    #: None means succeeded.
    error: ErrorRecord | None = None
    #: OIP binary form of the answer; empty where there is an error.
    header_length: int = 0
    payload: bytes = b""

    @property
    def succeeded(self) -> bool:
        """Return whether there is an answer."""
        return self.error is None


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claimed outbox row: one (result, destination) pair to be sent now."""

    id: str
    destination: str
    #: Sent as `webhook-id`; the same for every attempt and every replay.
    webhook_id: str
    body: bytes
    #: Attempts counted durably, this one included.
    attempt: int
    #: When this pair was first due; the schedule counts from here.
    created_at_ms: int
    token: str
    traceparent: str | None = None
    #: What the latest attempt whose outcome was written down ended in; None if there was none.
    last_status: int | None = None
    last_error: str | None = None
