"""The keeper: a thread that extends claims while their work goes on, whatever the event loop is doing.

It stands outside of the loop because a model that runs inline blocks the loop for as long as it computes. What no
thread can outlive is code that holds the interpreter's lock: there the keeper wakes late, learns by how much, and
from then on claims are taken for longer than that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.brokers.base import Claim
from headrace.clock import Clock
from headrace.errors import HeadraceError

__all__ = ["Extend", "Keeper"]

#: Beats in one claim time. A claim is extended when a third of it has passed, so at least two more beats can
#: fail before it is lost.
_BEATS = 4
#: Claims are this many times as long as the longest silence seen lately.
_MARGIN = 3
#: What one beat leaves of a silence that is not seen again.
_FADE = 0.9


class Extend(Protocol):
    """`Broker.extend_blocking`."""

    def __call__(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Extend; return the tokens that are lost."""
        ...


class _Kept:
    __slots__ = ("claim", "expires_s", "overrun", "since_s")

    def __init__(self, claim: Claim, since_s: float, expires_s: float) -> None:
        self.claim = claim
        #: When the work began; None once it is done and the claim only waits for its commit.
        self.since_s: float | None = since_s
        self.expires_s = expires_s
        self.overrun = False


class Keeper:
    """Keeps claims alive. `hold`, `computed` and `let_go` are cheap and are called on the loop."""

    def __init__(
        self,
        extend: Extend,
        clock: Clock,
        *,
        claim_s: float,
        run_s_max: float,
        working_since: Callable[[Claim], float | None],
        on_lost: Callable[[set[str]], None],
        on_overrun: Callable[[list[str]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Prepare; the callbacks are called on the keeper's thread.

        `working_since` says since when the run of a claim goes on, or, while it waits, the runs before it: a claim
        is extended while runs begin and end, however long its own turn is in coming.
        """
        self._working_since = working_since
        self._extend = extend
        self._clock = clock
        self._claim_s = claim_s
        self._run_s_max = run_s_max
        self._on_lost = on_lost
        self._on_overrun = on_overrun
        self._on_error = on_error
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._silence_s = 0.0
        self._thread: threading.Thread | None = None

    @property
    def claim_ms(self) -> int:
        """Return for how long to claim now: the setting, or longer where this process falls silent for long."""
        return int(1000 * min(max(self._claim_s, _MARGIN * self._silence_s), max(self._claim_s, self._run_s_max)))

    def start(self) -> None:
        """Begin to beat."""
        self._thread = threading.Thread(target=self._run, name="claim-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; claims are extended no more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=self._claim_s)

    def hold(self, claims: Sequence[Claim], asked_s: float, claim_ms: int) -> None:
        """Take care of new claims that were asked for at `asked_s` (their time has run since then)."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            for claim in claims:
                self._kept[claim.token] = _Kept(claim, now_s, asked_s + claim_ms / 1000)

    def computed(self, token: str) -> None:
        """Note that the work is done: from now on the claim is kept until `let_go`, without a limit."""
        with self._lock:
            kept = self._kept.get(token)
            if kept is not None:
                kept.since_s = None

    def let_go(self, tokens: Sequence[str]) -> None:
        """Forget claims that are settled or lost."""
        with self._lock:
            for token in tokens:
                self._kept.pop(token, None)

    def beat(self) -> None:
        """Look at every claim once: extend what goes on, report what runs for too long or is lost."""
        now_s = self._clock.monotonic_s()
        claim_ms = self.claim_ms
        due: list[Claim] = []
        overrun: list[str] = []
        with self._lock:
            for token, kept in self._kept.items():
                if kept.overrun:
                    continue
                if self._is_stuck(kept, now_s):
                    kept.overrun = True
                    overrun.append(token)
                elif kept.expires_s - now_s < claim_ms / 1000 * 2 / 3:
                    due.append(kept.claim)
        if overrun:
            self._on_overrun(overrun)
        if due:
            self._keep(due, now_s, claim_ms)

    def _is_stuck(self, kept: _Kept, now_s: float) -> bool:
        if kept.since_s is None or now_s - kept.since_s <= self._run_s_max:
            return False
        since_s = self._working_since(kept.claim)
        return since_s is None or now_s - since_s > self._run_s_max

    def _keep(self, due: list[Claim], now_s: float, claim_ms: int) -> None:
        try:
            lost = self._extend(due, claim_ms)
        except HeadraceError as error:
            # The broker is away. The claims live on until their time is over; the next beat tries again.
            self._on_error(error)
            return
        with self._lock:
            for claim in due:
                kept = self._kept.get(claim.token)
                if kept is None:
                    # Settled while we extended: the broker calls that lost, and it is no loss.
                    lost.discard(claim.token)
                elif claim.token in lost:
                    del self._kept[claim.token]
                else:
                    kept.expires_s = now_s + claim_ms / 1000
        if lost:
            self._on_lost(lost)

    def _run(self) -> None:
        interval_s = self._claim_s / _BEATS
        asleep_s = self._clock.monotonic_s()
        while not self._ended.wait(interval_s):
            silence_s = self._clock.monotonic_s() - asleep_s - interval_s
            self._silence_s = max(self._silence_s * _FADE, silence_s if silence_s > interval_s else 0.0)
            try:
                self.beat()
            except Exception as error:
                # A keeper that dies in silence would cost every claim; its next beat may well work.
                self._on_error(error)
            asleep_s = self._clock.monotonic_s()
