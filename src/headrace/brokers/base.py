"""The broker port: a topic holds accepted messages until each is acknowledged.

The comments here are the contract; `headrace.testing.BrokerSuite` checks every line of it. Adapters are
opened, used and closed on one event loop, but for `extend_blocking`. No other method blocks the loop; every method
either returns or raises a `HeadraceError` (`BrokerUnavailable`, `StorageFull`, `Overloaded`, `TooLarge`); foreign
exceptions never escape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.message import Message

__all__ = ["Broker", "Claim", "Claims", "Depth", "Features", "Receipt"]


@dataclass(frozen=True, slots=True)
class Features:
    """What an engine can do; a lack is declared here and documented, never faked."""

    #: `find` answers for certain whether an id is waiting or claimed.
    look_up: bool
    #: A keyed id is refused for ever (until `forget`), also after its message was acknowledged.
    unique_publish: bool
    #: An accepted message survives the death of every process (not only of ours).
    durable: bool
    #: Several processes may share one topic.
    shared: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """The broker's word that a message is durable."""

    id: str
    #: True if this id was there before; then nothing was stored now.
    already_present: bool = False
    #: For a keyed message that was there before: the fingerprint it came with.
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """Our hold on one message until `deadline_ms` (wall clock of the broker) or until it is settled."""

    message: Message
    topic: str
    #: Opaque, new for every claim. Only the newest token of a message can extend, ack or release it.
    token: str
    deadline_ms: int
    #: Durable count, this claim included: claims taken in company and lost, and claims taken alone.
    claims_company: int
    claims_alone: int

    @property
    def attempt(self) -> int:
        """Return how often this message was handed out, this time included."""
        return self.claims_company + self.claims_alone


@dataclass(frozen=True, slots=True)
class Claims:
    """What one call of `claim` got."""

    claims: Sequence[Claim]
    #: Messages that were claimed before, lost, and now wait to be claimed alone.
    suspects_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Depth:
    """The line of one topic; `waiting + claimed` is what an autoscaler should look at."""

    waiting: int
    claimed: int
    bytes: int
    #: Age of the oldest message that nobody holds; 0 when none waits.
    oldest_age_ms: int


class Broker(ABC):
    """A set of topics on one engine."""

    features: Features

    @abstractmethod
    async def open(self) -> None:
        """Connect; make what is missing. Idempotent. Raises BrokerUnavailable, saying what to do."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the engine. What was not settled comes back when its claim expires."""

    @abstractmethod
    async def publish(self, topic: str, messages: Sequence[Message]) -> list[Receipt | HeadraceError]:
        """Make messages durable; one outcome per message, in order. Never raises for a single message.

        A Receipt is returned only when the message would survive the loss of power (for engines that declare
        `durable`). Errors: Overloaded (the topic's length or bytes limit; nothing stored), TooLarge,
        StorageFull, BrokerUnavailable (`details["outcome"]` is "unknown" where it may be stored; the caller
        may only try again with the same id). An id that is already in the topic, or a keyed id that was
        accepted before, is answered with `already_present`. Wakes `wait`.
        """

    @abstractmethod
    async def claim(
        self, topics: Sequence[str], *, count_max: int, bytes_max: int, claim_ms: int, alone: bool
    ) -> Claims:
        """Take hold of waiting messages, oldest first; returns at once, maybe with nothing.

        The attempt is counted durably before the claim is returned: a process that dies at any later point
        has left its count behind. `alone=False` hands out only messages that nobody has lost yet, up to
        `count_max` and `bytes_max` (always at least one message). `alone=True` hands out at most one message,
        one whose earlier claim expired without being settled. A message whose bytes cannot be read is handed
        out like any other, as a Message whose `payload` is as found and whose `model` is "": the consumer
        gives it up, the broker never drops it.
        """

    @abstractmethod
    async def wait(self, topics: Sequence[str], timeout_s: float) -> None:
        """Return when one of the topics may have something to claim, at the latest after `timeout_s`.

        A hint: it may return early, and a lost hint costs at most the adapter's poll interval.
        """

    @abstractmethod
    async def extend(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Move deadlines to now + claim_ms. Returns the tokens that are lost (expired and handed out again,
        or settled); a token whose deadline passed but that nobody else took yet is still ours."""

    @abstractmethod
    def extend_blocking(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        """Do what `extend` does, from another thread than the loop's, and return when it is done.

        The one method that may be called from any thread: a model that runs inline blocks the loop for as long
        as it computes, and its claims must live on. So it may use nothing that needs the loop to turn.
        """

    @abstractmethod
    async def ack(self, claims: Sequence[Claim]) -> set[str]:
        """Remove messages for good, durably. Returns the tokens that were lost: they changed nothing."""

    @abstractmethod
    async def release(self, claims: Sequence[Claim], *, delay_ms: int = 0) -> set[str]:
        """Give messages back as if they had not been claimed: the attempt is not counted. Returns lost tokens.

        For an orderly stop, or when a dependency is down; never for a message that may have killed us.
        """

    @abstractmethod
    async def find(self, ids: Collection[str]) -> set[str]:
        """Return those of `ids` that are accepted and not acknowledged. Only with `features.look_up`."""

    @abstractmethod
    async def read(self, id: str) -> Message | None:
        """Return a message that is accepted and not acknowledged, without claiming it; None if there is no such
        one or its bytes cannot be read. Only with `features.look_up`. For a cancel, which must know the model
        and the destinations."""

    @abstractmethod
    async def forget(self, ids: Collection[str], accepted_before_ms: int) -> None:
        """Drop the memory of keyed ids: of `ids`, and of all accepted before `accepted_before_ms` that are
        no longer in a topic. Called after their results are purged."""

    @abstractmethod
    async def fingerprints(self, ids: Collection[str]) -> dict[str, str]:
        """Return the fingerprints of those keyed ids that were accepted (and not forgotten)."""

    @abstractmethod
    async def depth(self, topic: str) -> Depth:
        """Return the line of a topic; an unknown topic is empty. Raises rather than answer a false 0."""

    @abstractmethod
    async def health(self) -> None:
        """Return if a publish would work now, else raise what it would raise."""
