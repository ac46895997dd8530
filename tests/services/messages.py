"""Messages and claims made by hand, for tests that need no broker."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.brokers.base import Claim
from headrace.message import Message, new_id
from headrace.tensor import InferRequest, Tensor, encode_request

SECRET = b"s" * 32
NOW_MS = 1_800_000_000_000


def request(*rows: float, model: str = "neg", **changes: Any) -> InferRequest:
    """Return a request of FP32 [-1, 1] rows for a model with the input `x`."""
    x = np.array([[row] for row in rows or (1.0,)], dtype=np.float32)
    return InferRequest(model=model, inputs={"x": Tensor.of(x)}, **changes)


def message(*rows: float, now_ms: int = NOW_MS, **changes: Any) -> Message:
    """Return a message as ingest makes it."""
    payload, header_length = encode_request(request(*rows))
    given: dict[str, Any] = {
        "id": new_id(now_ms, SECRET),
        "model": "neg",
        "signature": "",
        "accepted_at_ms": now_ms,
        "header_length": header_length,
        "payload": payload,
    }
    return Message(**(given | changes))


def claim(found: Message | None = None, *, token: str = "", company: int = 1, alone: int = 0) -> Claim:
    """Return a claim on a message, by default a first one in company."""
    found = found or message()
    return Claim(found, found.model or "neg", token or found.id, NOW_MS + 10_000, company, alone)
