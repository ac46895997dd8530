"""Compressed answers: gzip or deflate for whoever accepts it, where it is worth the work."""

from __future__ import annotations

import asyncio
import zlib

from headrace.web.exchange import Answer, Exchange

__all__ = ["COMPRESS_BYTES_MIN", "compressed", "pick_encoding"]

#: A shorter answer fits into one packet anyway.
COMPRESS_BYTES_MIN = 1400
#: Longer ones are compressed on a thread, so that they do not hold up the event loop.
_INLINE_MAX = 64 * 1024
#: What does not shrink here will not shrink: random floats cost a lot of time and give nothing.
_SAMPLE = 4096
_WORTH = 0.9
#: The fastest level: the next ones cost two to five times as much for a few per cent.
_LEVEL = 1
_VARY = (b"vary", b"accept-encoding")
#: RFC 9110 section 8.4.1: "deflate" is the zlib format.
_WINDOW = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}


def pick_encoding(accepted: bytes) -> bytes | None:
    """Return gzip or deflate, whichever is preferred, or None for neither (RFC 9110 section 12.5.3)."""
    weights: dict[bytes, float] = {}
    for part in accepted.lower().split(b",")[:32]:
        name, _, parameters = part.partition(b";")
        weights[name.strip()] = _weight(parameters)
    rest = weights.get(b"*", 0.0)
    best = max(_WINDOW, key=lambda name: weights.get(name, rest))
    return best if weights.get(best, rest) > 0 else None


def _weight(parameters: bytes) -> float:
    name, _, value = parameters.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        weight = float(value)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0


async def compressed(exchange: Exchange, answer: Answer) -> Answer:
    """Return the answer in a form that the caller accepts; lengths in its headers still count what is inside."""
    if answer.stream is not None or len(answer.body) < COMPRESS_BYTES_MIN:
        return answer
    encoding = pick_encoding(exchange.headers.get(b"accept-encoding", b""))
    answer.headers = (*answer.headers, _VARY)
    if encoding is None:
        return answer
    body = answer.body
    if len(body) > _INLINE_MAX:
        smaller = await asyncio.to_thread(_shrink, body, encoding)
    else:
        smaller = _shrink(body, encoding)
    if smaller is not None:
        answer.body = smaller
        answer.headers = (*answer.headers, (b"content-encoding", encoding))
    return answer


def _shrink(body: bytes, encoding: bytes) -> bytes | None:
    if len(body) > 2 * _SAMPLE:
        # From the middle: the JSON of a binary answer stands in front, and it always shrinks.
        start = len(body) // 2
        sample = body[start : start + _SAMPLE]
        if len(zlib.compress(sample, _LEVEL)) > _WORTH * len(sample):
            return None
    squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    smaller = squeeze.compress(body) + squeeze.flush()
    return smaller if len(smaller) < len(body) else None
