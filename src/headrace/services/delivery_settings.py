"""The settings of delivery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from headrace.services.schedule import STANDARD_S
from headrace.settings import setting

__all__ = ["DeliverySettings"]


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """When and how many results are sent."""

    section: ClassVar[str] = "delivery"

    schedule_s: tuple[float, ...] = setting(
        STANDARD_S, "Delay before each attempt, from the end of the one before; after the last it is dead.", min=0
    )
    jitter: float = setting(0.2, "Share by which each delay is spread.", min=0, max=1)
    throttle_s: float = setting(30.0, "Least delay after a timeout, 429, 502 or 504 without Retry-After.", min=0)
    concurrency_max: int = setting(512, "Attempts at once.", min=1, max=10_000)
    host_concurrency_max: int = setting(16, "Attempts at once to one host and port.", min=1, max=1000)
    claim_count_max: int = setting(64, "Pairs claimed at once.", min=1, max=10_000)
    hold_s: float = setting(5.0, "How long a claimed pair may wait for a slot of its host.", min=0.1, max=3600)
    poll_s: float = setting(1.0, "How often the outbox is looked at without being told to.", min=0.01, max=60)
    grace_s: float = setting(10.0, "How long an orderly stop lets attempts finish.", min=0, max=3600)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what one field alone cannot tell."""
        if not self.schedule_s:
            yield "schedule_s", "wanted at least one delay"
