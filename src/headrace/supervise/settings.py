"""When a child counts as hung."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.settings import setting

__all__ = ["HeartbeatSettings"]


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How long a child may be silent."""

    section: ClassVar[str] = "heartbeat"

    timeout_s: float = setting(
        30.0,
        "A process of `up` whose event loop has not turned for so long is killed and started again; more than "
        "`inference.claim_s`, and more than any model holds the interpreter's lock.",
        min=1,
        max=3600,
    )
