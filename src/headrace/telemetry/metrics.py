"""One process's metrics: plain numbers, cheap enough for the hot path, and their snapshot as bytes.

`names.METRICS` lists them all. Whoever counts often asks for the child once and keeps it:

    self._claims = metrics.counter("headrace_claims_total")     # once
    self._claims(model).add()                                   # per message; with a fixed label, keep the child

Adding is not locked: a child belongs to one thread, in practice to the event loop's. A runner's thread hands its
measurement back with its answer and the loop counts it.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headrace import __version__
from headrace.clock import Clock
from headrace.telemetry.names import CHOICES, METRICS, OTHER, Kind, MetricRow

__all__ = [
    "SERIES_MAX",
    "Age",
    "Counter",
    "Family",
    "Gauge",
    "Histogram",
    "Metrics",
    "Series",
    "Snapshot",
    "decode_snapshot",
]

#: Series that one metric may have in one process; later label values count as "other". Models and versions that
#: are really there stay far below it, so it holds back only what a stranger could make up.
SERIES_MAX = 1000

_ROWS: dict[str, MetricRow] = {row.name: row for row in METRICS}


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, count: float = 1) -> None:
        """Count; never negative."""
        self.value += count


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("read", "value")

    def __init__(self) -> None:
        self.value: float = 0
        #: Called on every scrape where set; it must be quick and must not raise.
        self.read: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Say what it is now."""
        self.value = value

    def add(self, count: float = 1) -> None:
        """Change it by `count`, which may be negative."""
        self.value += count


class Age:
    """The seconds since something was last marked."""

    __slots__ = ("_clock", "_marked_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marked_s = clock.monotonic_s()

    def mark(self) -> None:
        """Say that it happened just now."""
        self._marked_s = self._clock.monotonic_s()

    @property
    def value(self) -> float:
        """Return the age in seconds."""
        return max(0.0, self._clock.monotonic_s() - self._marked_s)


class Histogram:
    """How often a value fell below each bound."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        #: Not cumulative; the last one is for what is above every bound.
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`; below zero (a clock that jumped) counts as zero."""
        if value < 0:
            value = 0.0
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


Child = TypeVar("Child", bound="Counter | Gauge | Age | Histogram")


class Family(Generic[Child]):
    """One metric with its children, one for each set of label values."""

    __slots__ = ("_choices", "_make", "children", "row")

    def __init__(self, row: MetricRow, make: Callable[[], Child]) -> None:
        self.row = row
        self.children: dict[tuple[str, ...], Child] = {}
        self._make = make
        self._choices = tuple(CHOICES.get(label) for label in row.labels)

    def __call__(self, *labels: str) -> Child:
        """Return the child for these label values, in the order of the table; always the same one."""
        child = self.children.get(labels)
        return child if child is not None else self._add(labels)

    def _add(self, labels: tuple[str, ...]) -> Child:
        if len(labels) != len(self._choices):
            raise TypeError(f"{self.row.name} has the labels {self.row.labels}")
        # A stranger must not be able to make series (A27): what is not a choice, or one too many, is "other".
        legal = tuple(
            (value or OTHER) if choices is None or value in choices else OTHER
            for value, choices in zip(labels, self._choices, strict=True)
        )
        if legal not in self.children and len(self.children) >= SERIES_MAX:
            legal = tuple(OTHER for _ in labels)
        if legal not in self.children:
            self.children[legal] = self._make()
        return self.children[legal]

    def forget(self, *labels: str) -> None:
        """Drop a child whose subject is gone (a model that was unloaded); its numbers go with it."""
        self.children.pop(labels, None)


class Series(msgspec.Struct, array_like=True, gc=False):
    """One child in a snapshot: (value,) or, for a histogram, (total, *counts)."""

    labels: tuple[str, ...]
    numbers: list[float]


class Snapshot(msgspec.Struct, kw_only=True):
    """One process's metrics at one moment."""

    #: The slot, e.g. `inference-2`: stable over restarts.
    instance: str
    service: str
    #: Differs after every start of the slot; a reader then knows that counters began again.
    incarnation: str
    at_ms: int
    metrics: dict[str, list[Series]]


_decoder = msgspec.msgpack.Decoder(Snapshot)


def decode_snapshot(body: bytes) -> Snapshot:
    """Read a sibling's snapshot. Raises ValueError if it is not one."""
    return _decoder.decode(body)


class Metrics:
    """Every metric of one process."""

    def __init__(self, clock: Clock, *, instance: str, service: str = "") -> None:
        """Begin at zero; `instance` is the slot's name, stable over restarts."""
        self.instance = instance
        self.service = service or instance
        self._clock = clock
        self._incarnation = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._started_ms = clock.now_ms()
        self._families: dict[str, Family[Any]] = {row.name: Family(row, _maker(row, clock)) for row in METRICS}
        for row in METRICS:
            # `rate` needs a zero before the first one (Prometheus' guide), so what has no labels begins at zero.
            if not row.labels and row.kind != "age":
                self._families[row.name]()
        self.gauge("headrace_build_info")(__version__, ".".join(map(str, sys.version_info[:3]))).set(1)
        self.gauge("headrace_start_time_seconds")().set(self._started_ms / 1000)

    def counter(self, name: str) -> Family[Counter]:
        """Return a counter by its whole name. Raises LookupError for one that the table lacks."""
        return self._family(name, "counter")

    def gauge(self, name: str) -> Family[Gauge]:
        """Return a gauge by its whole name. Raises LookupError for one that the table lacks."""
        return self._family(name, "gauge")

    def age(self, name: str) -> Family[Age]:
        """Return an age by its whole name. Raises LookupError for one that the table lacks."""
        return self._family(name, "age")

    def histogram(self, name: str) -> Family[Histogram]:
        """Return a histogram by its whole name. Raises LookupError for one that the table lacks."""
        return self._family(name, "histogram")

    def _family(self, name: str, kind: Kind) -> Family[Any]:
        row = _ROWS.get(name)
        if row is None or row.kind != kind:
            raise LookupError(f"there is no {kind} {name}; telemetry/names.py lists what there is")
        return self._families[name]

    def watch_disk(self, folder: str) -> None:
        """Report the free space of the file system that `folder` is on."""
        self.gauge("headrace_disk_free_bytes")().read = lambda: _free_bytes(folder)

    def snapshot(self) -> Snapshot:
        """Return all numbers as they are now."""
        self._measure_process()
        return Snapshot(
            instance=self.instance,
            service=self.service,
            incarnation=self._incarnation,
            at_ms=self._clock.now_ms(),
            metrics={name: list(_series(family)) for name, family in self._families.items() if family.children},
        )

    def encode(self) -> bytes:
        """Return the snapshot's bytes, as a sibling reads them with `decode_snapshot`."""
        return msgspec.msgpack.encode(self.snapshot())

    def _measure_process(self) -> None:
        used = os.times()
        self.counter("headrace_cpu_seconds_total")().value = used.user + used.system
        self.gauge("headrace_resident_memory_bytes")().set(_resident_bytes())
        self.gauge("headrace_open_files")().set(_open_files())


def _maker(row: MetricRow, clock: Clock) -> Callable[[], Counter | Gauge | Age | Histogram]:
    if row.kind == "histogram":
        return lambda: Histogram(row.bounds)
    if row.kind == "age":
        return lambda: Age(clock)
    return Counter if row.kind == "counter" else Gauge


def _series(family: Family[Any]) -> Iterator[Series]:
    for labels, child in list(family.children.items()):
        if isinstance(child, Histogram):
            yield Series(labels, [child.total, *child.counts])
        elif isinstance(child, Gauge) and child.read is not None:
            yield Series(labels, [float(child.read())])
        else:
            yield Series(labels, [float(child.value)])


def _free_bytes(folder: str) -> float:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0.0
    return float(found.f_bavail * found.f_frsize)


def _resident_bytes() -> float:
    try:
        return float(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)


def _open_files() -> float:
    try:
        return float(len(os.listdir("/dev/fd" if sys.platform == "darwin" else "/proc/self/fd")))  # noqa: PTH208
    except OSError:
        return 0.0
