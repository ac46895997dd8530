"""The limits of the HTTP listener."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from headrace.settings import setting

__all__ = ["WebSettings"]


@dataclasses.dataclass(frozen=True, slots=True)
class WebSettings:
    """What the HTTP listener takes, and how long it waits."""

    section: ClassVar[str] = "web"

    body_bytes_max: int = setting(
        64 * 1024 * 1024, "Largest body, before and after decompression; above it 413.", min=1024, max=1 << 31
    )
    bodies_bytes_max: int = setting(
        1024 * 1024 * 1024, "Memory for all long bodies at a time; above it 429.", min=1024, max=1 << 40
    )
    body_timeout_s: float = setting(
        30.0, "A body must be here by then, unless it makes steady progress; else 408.", min=0.1, max=3600
    )
    body_bytes_per_s_min: int = setting(
        16 * 1024, "The rate that counts as steady progress of a body.", min=1, max=1 << 30
    )
    head_bytes_max: int = setting(64 * 1024, "Largest request line with headers; above it 413.", min=1024, max=1 << 24)
    head_timeout_s: float = setting(
        10.0,
        "A connection that has not sent a whole request head by then, or does not read, is cut.",
        min=0.1,
        max=3600,
    )
    idle_timeout_s: int = setting(75, "An open connection without a request is closed after that.", min=1, max=3600)
    wait_s_max: float = setting(300.0, "Longest wait that `Prefer: wait=` and `?wait=` can ask for.", min=0, max=3600)
    drain_s: float = setting(
        0.0, "On a stop, how long requests are still served while ready is already 503.", min=0, max=600
    )
    grace_s: float = setting(25.0, "On a stop, how long requests in progress may take to finish.", min=0, max=3600)
    health_window_s: int = setting(
        60, "How far back /health looks; requests older than this do not count.", min=5, max=3600
    )

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what one field alone cannot tell."""
        if self.bodies_bytes_max < self.body_bytes_max:
            yield "bodies_bytes_max", "it must be at least web.body_bytes_max, or the longest body never fits"
