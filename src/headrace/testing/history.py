"""What happened to a stack while it was being broken, and whether every promise held.

A `History` is filled from outside: by clients (what they sent, what they were told, what they read), by webhook
receivers, and, where adapters are wrapped, by what was committed and acknowledged in which order. After the faults
have ended and the line has drained, `check` compares it with what is there. It is set algebra over ids, so it is
exact and O(n). The numbers I1-I11 are the guarantees of docs/guarantees.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__all__ = ["Ending", "History", "Violation", "check"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that did not hold."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@dataclass(slots=True)
class Ending:
    """What is there after the drain, counted from store and broker themselves."""

    #: id → every result row found under it (more than one is a violation, so a list).
    results: Mapping[str, list[bytes]]
    #: Those of the ids whose result is a failure.
    failed: Collection[str] = ()
    waiting: int = 0
    claimed: int = 0
    #: (id, destination) pairs that were given up on, each with a reason.
    dead_deliveries: Mapping[tuple[str, str], str] = field(default_factory=dict)
    #: What was accepted according to the store and broker alone; None where there was no such count.
    accepted: int | None = None


@dataclass(slots=True)
class History:
    """Everything seen from outside, in the order in which it was seen."""

    #: Ids that were accepted: an answer carried a Location.
    accepted: set[str] = field(default_factory=set)
    #: Attempts whose outcome the client never learnt; each may or may not have a result.
    unknown: int = 0
    refused: int = 0
    #: (id, destination) pairs that clients asked for.
    wanted: set[tuple[str, str]] = field(default_factory=set)
    #: Ids that are meant to fail; any other failure means that a bad neighbour did harm.
    meant_to_fail: set[str] = field(default_factory=set)
    waiting_max: int = 0

    _ids_by_key: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    _reads: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _bodies: dict[tuple[str, str], Counter[bytes]] = field(default_factory=lambda: defaultdict(Counter))
    _forged: list[str] = field(default_factory=list)
    _committed: set[str] = field(default_factory=set)
    _early_acks: list[str] = field(default_factory=list)
    _starts_alone: Counter[str] = field(default_factory=Counter)

    def accept(self, id: str, *, key: str | None = None, request: str = "", destinations: Collection[str] = ()) -> None:
        """Note an accepted submission; `request` is any digest of what was asked under `key`."""
        self.accepted.add(id)
        self.wanted.update((id, destination) for destination in destinations)
        if key is not None:
            self._ids_by_key[key][request].add(id)

    def read(self, id: str, result: bytes) -> None:
        """Note that a client read a finished result."""
        self._reads[id].add(result)

    def receive(self, id: str, destination: str, body: bytes, *, valid: bool = True) -> None:
        """Note a request that a webhook receiver got, and whether its signature was valid."""
        self._bodies[id, destination][body] += 1
        if not valid:
            self._forged.append(id)

    def commit(self, id: str) -> None:
        """Note that a store said a result is durable (instrumented stores only)."""
        self._committed.add(id)

    def ack(self, id: str) -> None:
        """Note that a broker was told to remove a message (instrumented brokers only)."""
        if id not in self._committed:
            self._early_acks.append(id)

    def start(self, id: str, *, alone: bool) -> None:
        """Note that a model was started on a message (instrumented runtimes only)."""
        if alone:
            self._starts_alone[id] += 1

    @property
    def deliveries_repeated(self) -> int:
        """Return how many webhook requests were repeats; allowed, and good to know that they happened."""
        return sum(sum(bodies.values()) - 1 for bodies in self._bodies.values())


def check(
    history: History, ending: Ending, *, attempts_max: int = 3, queue_length_max: int | None = None
) -> list[Violation]:
    """Return every violation of I1-I11, each naming an id; an empty list means that every promise held."""
    return [
        *_results(history, ending),
        *_keys(history),
        *_order(history),
        *_deliveries(history, ending),
        *_attempts(history, attempts_max),
        *_isolation(history, ending),
        *_accounts(history, ending, queue_length_max),
    ]


def _some(ids: Collection[str]) -> str:
    names = sorted(ids)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _results(history: History, ending: Ending) -> list[Violation]:
    found = []
    lost = {id for id in history.accepted if not ending.results.get(id)}
    if lost:
        found.append(Violation("I1", f"{len(lost)} accepted without a result: {_some(lost)}"))
    doubled = {id for id, rows in ending.results.items() if len(rows) > 1}
    if doubled:
        found.append(Violation("I1", f"{len(doubled)} with more than one result: {_some(doubled)}"))
    invented = set(ending.results) - history.accepted
    if len(invented) > history.unknown:
        found.append(
            Violation(
                "I2",
                f"{len(invented)} results nobody was promised, {history.unknown} unknown: {_some(invented)}",
            )
        )
    changed = {id for id, seen in history._reads.items() if len(seen | set(ending.results.get(id, ()))) > 1}
    if changed:
        found.append(Violation("I3", f"{len(changed)} results changed after they were read: {_some(changed)}"))
    return found


def _keys(history: History) -> list[Violation]:
    found = []
    for key, by_request in history._ids_by_key.items():
        if len(by_request) > 1:
            found.append(Violation("I4", f"key {key!r} was accepted for {len(by_request)} different requests"))
        found += [
            Violation("I4", f"key {key!r} gave {len(ids)} ids for one request: {_some(ids)}")
            for ids in by_request.values()
            if len(ids) > 1
        ]
    return found


def _order(history: History) -> list[Violation]:
    early = history._early_acks
    return [Violation("I5", f"{len(early)} acknowledged before a result was durable: {_some(early)}")] if early else []


def _deliveries(history: History, ending: Ending) -> list[Violation]:
    found = []
    silent = {
        f"{id} -> {destination}"
        for id, destination in history.wanted
        if not history._bodies.get((id, destination)) and not ending.dead_deliveries.get((id, destination))
    }
    if silent:
        found.append(Violation("I6", f"{len(silent)} neither delivered nor dead: {_some(silent)}"))
    varied = {id for (id, _), bodies in history._bodies.items() if len(bodies) > 1}
    if varied:
        found.append(Violation("I6", f"{len(varied)} delivered with different bodies: {_some(varied)}"))
    if history._forged:
        found.append(Violation("I6", f"{len(history._forged)} without a valid signature: {_some(history._forged)}"))
    uncalled = {id for id, destination in history._bodies if (id, destination) not in history.wanted}
    if len(uncalled) > history.unknown:
        found.append(Violation("I6", f"{len(uncalled)} sent where nobody asked: {_some(uncalled)}"))
    return found


def _attempts(history: History, attempts_max: int) -> list[Violation]:
    over = {id for id, starts in history._starts_alone.items() if starts > attempts_max}
    return [Violation("I7", f"{len(over)} started alone more than {attempts_max} times: {_some(over)}")] if over else []


def _isolation(history: History, ending: Ending) -> list[Violation]:
    hurt = set(ending.failed) - history.meant_to_fail
    found = [Violation("I8", f"{len(hurt)} failed though nothing was wrong with them: {_some(hurt)}")] if hurt else []
    spared = (history.meant_to_fail & history.accepted) - set(ending.failed)
    answered = {id for id in spared if ending.results.get(id)}
    if answered:
        found.append(Violation("I8", f"{len(answered)} succeeded though they could not: {_some(answered)}"))
    return found


def _accounts(history: History, ending: Ending, queue_length_max: int | None) -> list[Violation]:
    found = []
    if ending.waiting or ending.claimed:
        found.append(Violation("I9", f"after the drain {ending.waiting} wait and {ending.claimed} are claimed"))
    if queue_length_max is not None and history.waiting_max > queue_length_max:
        found.append(Violation("I10", f"{history.waiting_max} waited where {queue_length_max} may"))
    if ending.accepted is not None:
        there = len(ending.results) + ending.waiting + ending.claimed
        if ending.accepted != there:
            found.append(Violation("I11", f"accepted {ending.accepted}, but results + waiting + claimed = {there}"))
    return found
