"""What is written for a message that is done: its result, the bodies for its destinations, its dead letter."""

from __future__ import annotations

from headrace.brokers.base import Claim
from headrace.errors import DeadlineExceeded, Expired, HeadraceError, InvalidRequest, ModelFailed
from headrace.message import Message, Result
from headrace.services.rendering import record_of, webhook_body
from headrace.services.settings import InferenceSettings
from headrace.stores.base import Finished
from headrace.tensor import InferAnswer, encode_answer

__all__ = ["failed", "refused", "succeeded", "unrun"]

#: These count as ours once a message was accepted: the model was there then, so it is kept as a dead letter.
_LOST_SINCE = frozenset({"model_not_found", "version_not_found"})


def succeeded(claim: Claim, answer: InferAnswer, now_ms: int) -> Finished:
    """Return what is written for an answer. Raises what encoding it raises."""
    message = claim.message
    payload, header_length = encode_answer(answer, binary=True)
    result = Result(
        id=message.id,
        model=message.model,
        model_version=answer.version or "",
        accepted_at_ms=message.accepted_at_ms,
        finished_at_ms=now_ms,
        attempts=claim.attempt,
        request_id=message.request_id,
        client_id=message.client_id,
        traceparent=message.traceparent,
        header_length=header_length or 0,
        payload=payload,
    )
    return Finished(result, _outbox(message, result, answer))


def failed(claim: Claim, error: HeadraceError, now_ms: int, *, version: str = "", dead: bool | None = None) -> Finished:
    """Return what is written for a failure; where it is our fault (or `dead` says so) the message is kept too."""
    message = claim.message
    if dead is None:
        dead = error.fault == "ours" or error.code in _LOST_SINCE
    result = _failure(message, error, now_ms, attempts=claim.attempt, version=version, model=claim.topic)
    return Finished(result, _outbox(message, result, None), dead=message if dead else None)


def refused(message: Message, error: HeadraceError, now_ms: int) -> Finished:
    """Return what is written for a message that nobody claimed: a cancelled one."""
    result = _failure(message, error, now_ms, attempts=0, version="", model=message.model)
    return Finished(result, _outbox(message, result, None))


def unrun(claim: Claim, settings: InferenceSettings, now_ms: int, *, alone: bool, ttl_ms: int) -> Finished | None:
    """Return what is written for a message that must not be run; None for one that may be."""
    message = claim.message
    if not message.model:
        return failed(claim, InvalidRequest("The message cannot be read"), now_ms, dead=True)
    if message.accepted_at_ms < now_ms - ttl_ms:
        return failed(claim, Expired(), now_ms)
    if message.expires_at_ms is not None and message.expires_at_ms <= now_ms:
        return failed(claim, DeadlineExceeded("The deadline passed before the request was run"), now_ms)
    # The counts include this claim, which has not died yet.
    deaths_alone = claim.claims_alone - (1 if alone else 0)
    deaths_company = claim.claims_company - (0 if alone else 1)
    if deaths_alone < settings.attempts_max and deaths_company < settings.company_attempts_max:
        return None
    details = {"attempts": deaths_alone + deaths_company, "attempts_alone": deaths_alone}
    text = "No attempt to run this request came to an end: whoever ran it died, or was too slow to keep its claim"
    return failed(claim, ModelFailed(text, details=details), now_ms)


def _failure(message: Message, error: HeadraceError, now_ms: int, *, attempts: int, version: str, model: str) -> Result:
    return Result(
        id=message.id,
        # A message that cannot be read has no model; its topic is named after it.
        model=message.model or model,
        model_version=version,
        # Nor does it know when it was accepted. Retention must not begin in 1970.
        accepted_at_ms=message.accepted_at_ms or now_ms,
        finished_at_ms=now_ms,
        attempts=attempts,
        request_id=message.request_id,
        client_id=message.client_id,
        traceparent=message.traceparent,
        error=record_of(error),
    )


def _outbox(message: Message, result: Result, answer: InferAnswer | None) -> list[tuple[str, bytes]]:
    if not message.destinations:
        return []
    body = webhook_body(result, answer)
    return [(destination, body) for destination in message.destinations]
