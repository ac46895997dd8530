"""What one version has done since it was loaded, as Triton's statistics extension counts it."""

from __future__ import annotations

__all__ = ["Statistics"]

#: Batch sizes counted one by one; a caller may choose any size, so that the list must end somewhere.
SIZES_MAX = 256


class Statistics:
    """Counts of one version, written and read on the event loop; times are in seconds, each summed over requests.

    Source: triton-inference-server/server, docs/protocol/extension_statistics.md.
    """

    __slots__ = (
        "executions",
        "fail_s",
        "failed",
        "last_ms",
        "queue_s",
        "rows",
        "run_s",
        "sizes",
        "succeeded",
        "success_s",
    )

    def __init__(self) -> None:
        """Begin with nothing."""
        #: Requests answered and refused after they were lined up, with their time from line-up to answer.
        self.succeeded = self.failed = 0
        self.success_s = self.fail_s = 0.0
        #: How long the answered ones waited, and how long their batches ran.
        self.queue_s = self.run_s = 0.0
        #: Rows answered, and runs of the model that answered anybody.
        self.rows = self.executions = 0
        #: When the last run ended (wall clock); 0 before the first.
        self.last_ms = 0
        #: rows of a batch → [runs, seconds].
        self.sizes: dict[int, list[float]] = {}

    def answered(self, requests: int, rows: int, queue_s: float, run_s: float, now_ms: int) -> None:
        """Count a run that answered all its requests; `queue_s` is the sum of their waits."""
        self.succeeded += requests
        self.queue_s += queue_s
        self.run_s += run_s * requests
        self.success_s += queue_s + run_s * requests
        self.rows += rows
        self.executions += 1
        self.last_ms = now_ms
        size = self.sizes.get(rows)
        if size is None:
            if len(self.sizes) >= SIZES_MAX:
                return
            size = self.sizes[rows] = [0, 0.0]
        size[0] += 1
        size[1] += run_s

    def refused(self, requests: int, queue_s: float, run_s: float) -> None:
        """Count requests whose run failed."""
        self.failed += requests
        self.fail_s += queue_s + run_s * requests
