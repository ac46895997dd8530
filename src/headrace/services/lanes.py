"""What a consumer holds: claims with what became of them, in one lane per topic."""

from __future__ import annotations

from headrace.brokers.base import Claim
from headrace.clock import Clock
from headrace.services.pace import Pace
from headrace.stores.base import Finished
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics

__all__ = ["Held", "Lane", "Tally"]


class Lane:
    """One topic of this process: how much of it is in the works."""

    def __init__(self, topic: str, hold_s: float, limit_max: int) -> None:
        """Begin empty and hopeful."""
        self.topic = topic
        self.pace = Pace(hold_s, limit_max)
        #: Claims whose handler is not done with them.
        self.running = 0
        #: All claims, those included that wait to be committed or settled.
        self.held = 0
        #: There may be something to claim.
        self.hopeful = True
        self._full = False
        self._ended = 0
        self._slowest_s = 0.0

    @property
    def room(self) -> int:
        """Return how many more to claim: what computes is bounded, and so is what waits to be settled."""
        limit = self.pace.limit
        return min(limit - self.running, 2 * limit - self.held)

    def claimed(self, count: int, asked: int) -> None:
        """Note what a claim brought, before `begin` is called for each."""
        self.hopeful = count > 0
        self._full = count >= asked and self.running + count >= self.pace.limit

    def begin(self) -> None:
        """Note one more claim."""
        self.running += 1
        self.held += 1

    def end(self, took_s: float | None) -> None:
        """Note that a handler is done with one; `took_s` None where that says nothing about its speed."""
        self.running -= 1
        if took_s is not None:
            self._ended += 1
            self._slowest_s = max(self._slowest_s, took_s)

    def end_round(self) -> None:
        """Let the pace learn from what ended since the last round."""
        if self._ended:
            self.pace.finished(self._ended, self._slowest_s, self._full)
            self._ended, self._slowest_s = 0, 0.0


class Held:
    """One claim in our hands."""

    __slots__ = ("alone", "claim", "finished", "lane", "lost", "replaced", "settling", "since_s", "size")

    def __init__(self, claim: Claim, lane: Lane, since_s: float, alone: bool) -> None:
        """Begin to hold a claim that was asked for at `since_s`."""
        self.claim = claim
        self.lane = lane
        self.since_s = since_s
        self.alone = alone
        self.size = len(claim.message.payload)
        #: Others have it now: its result is committed if it comes, but it is ours to settle no more.
        self.lost = False
        #: It waits to be acknowledged or released; nothing else may happen to it.
        self.settling = False
        self.finished: Finished | None = None
        #: The store refused its result, and `finished` is that failure.
        self.replaced = False

    @property
    def written_bytes(self) -> int:
        """Return about how many bytes its commit writes."""
        if self.finished is None:
            return 0
        dead = self.size if self.finished.dead is not None else 0
        return len(self.finished.result.payload) + sum(len(body) for _, body in self.finished.outbox) + dead


class Tally:
    """The consumer's metrics and log lines."""

    def __init__(self, metrics: Metrics, logs: Logs, clock: Clock) -> None:
        """Look up the metrics once."""
        self._logs, self._clock = logs, clock
        self._talks = logs.enabled("debug")
        self._claims = metrics.counter("headrace_claims_total")
        self._repeated = metrics.counter("headrace_claims_repeated_total")
        self._lost = metrics.counter("headrace_claims_lost_total")
        self._held = metrics.gauge("headrace_claims_held")()
        self._results = metrics.counter("headrace_results_total")
        self._second = metrics.counter("headrace_results_second_total")
        self._dead = metrics.counter("headrace_dead_letters_total")
        self._expired = metrics.counter("headrace_expired_total")
        self._commit_s = metrics.histogram("headrace_commit_duration_seconds")()
        self._end_to_end_s = metrics.histogram("headrace_end_to_end_seconds")
        self._round = metrics.age("headrace_poll_age_seconds")("claim")

    def came_round(self) -> None:
        """The claim loop is alive."""
        self._round.mark()

    def holds(self, count: int) -> None:
        """So many claims are held."""
        self._held.set(count)

    def claimed(self, held: Held) -> None:
        """A claim came in."""
        topic, attempt = held.claim.topic, held.claim.attempt
        self._claims(topic).add()
        if attempt > 1:
            self._repeated(topic).add()
        if held.alone:
            self._logs.say("claimed_alone", id=held.claim.message.id, model=topic, attempt=attempt)
        elif self._talks:
            self._logs.say("claimed", id=held.claim.message.id, model=topic, attempt=attempt)

    def lost(self, held: Held, reason: str) -> None:
        """A claim is ours no more."""
        self._lost(held.claim.topic).add()
        self._logs.say("claim_lost", id=held.claim.message.id, model=held.claim.topic, reason=reason)

    def released(self, held: Held, reason: str) -> None:
        """A claim is given back."""
        self._logs.say("released", id=held.claim.message.id, model=held.claim.topic, reason=reason)

    def expired(self, topic: str) -> None:
        """A message was too late to be run."""
        self._expired(topic).add()

    def committed(self, batch: list[Held], first: list[bool], took_s: float) -> None:
        """A batch is durable; `first` says for each whether this is *the* result."""
        if not batch:
            return
        self._commit_s.observe(took_s)
        now_ms = self._clock.now_ms()
        for held, is_first in zip(batch, first, strict=True):
            assert held.finished is not None
            result, topic = held.finished.result, held.claim.topic
            if not is_first:
                self._second(topic).add()
                self._logs.say("finished_second", id=result.id, model=topic)
                continue
            outcome = "succeeded" if result.error is None else result.error.code
            self._results(topic, outcome).add()
            self._end_to_end_s(topic).observe((now_ms - result.accepted_at_ms) / 1000)
            if held.finished.dead is not None and result.error is not None:
                self._dead("message", outcome).add()
                self._logs.say(
                    "dead_letter",
                    id=result.id,
                    model=topic,
                    code=outcome,
                    error=result.error.message,
                    attempt=result.attempts,
                )
            elif self._talks:
                self._logs.say("finished", id=result.id, model=topic, outcome=outcome, attempt=result.attempts)
