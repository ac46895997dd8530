"""The settings of the services on the long road."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from headrace.settings import setting

__all__ = ["InferenceSettings", "IngestSettings", "ResultSettings"]

_DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """How much is accepted, and how long a caller waits."""

    section: ClassVar[str] = "ingest"

    queue_length_max: int = setting(
        1_000_000, "Messages that one topic holds, waiting or claimed; the next is answered 429.", min=1
    )
    queue_bytes_max: int = setting(4 * 1024**3, "Bytes of payload that one topic holds.", min=1)
    wait_s: float = setting(
        30.0, "How long a caller without `Prefer` waits for the answer before 504 with a Location.", min=0, max=3600
    )
    publish_attempts: int = setting(
        5, "Times a message whose acceptance is uncertain is published (under one id) before 503.", min=1, max=100
    )


@dataclass(frozen=True, slots=True)
class ResultSettings:
    """How long results are kept."""

    section: ClassVar[str] = "result"

    ttl_s: float = setting(
        7 * _DAY_S, "Retention, counted from acceptance: result, key and remains leave together.", min=1
    )
    purge_interval_s: float = setting(60.0, "How often results whose retention is over are removed.", min=0.1)


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """How messages are claimed and for how long they may run."""

    section: ClassVar[str] = "inference"

    claim_s: float = setting(
        10.0,
        "How long a claim lasts without being extended: a dead process's messages come back after it.",
        min=0.2,
        max=3600,
    )
    hold_s: float = setting(
        0.1, "How long claimed messages may well wait for their run; at most a quarter of `claim_s`.", min=0.001
    )
    run_s_max: float = setting(300.0, "How long one run may take before it is given up.", min=0.1)
    claim_count_max: int = setting(1000, "Messages that one process holds at most.", min=1)
    claim_bytes_max: int = setting(256 * 1024**2, "Bytes of payload that one process holds at most.", min=1)
    attempts_max: int = setting(
        3, "Deaths of a process that ran one message alone, before the message is given up.", min=1, max=100
    )
    company_attempts_max: int = setting(
        20, "Deaths of a process that ran it among others, before a message is given up.", min=1, max=1000
    )
    grace_s: float = setting(30.0, "How long an orderly stop lets runs finish; the rest is given back.", min=0)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what one field alone cannot tell."""
        if self.run_s_max < self.claim_s:
            yield "run_s_max", f"wanted at least claim_s, {self.claim_s:g}: a run is allowed as long as a claim"
