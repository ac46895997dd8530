"""/metrics: this instance's numbers and its living siblings' in Prometheus' text form, told apart by `instance`.

A slot that is started again begins its counters at zero; here they go on from where they were, so that nobody sees
them fall, and a slot's history is one small entry however often it restarts (A26). What only living processes can
say (gauges) ends with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from headrace.clock import Clock
from headrace.telemetry.metrics import Metrics, Snapshot, decode_snapshot
from headrace.telemetry.names import METRICS, MetricRow

__all__ = ["CONTENT_TYPE", "FORGET_S", "LIVE_S", "Exposition"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

#: A sibling that has said nothing for so long counts as down: its gauges end, `headrace_up` is 0.
LIVE_S = 15.0

#: After so long its counters end too; that slot does not come back.
FORGET_S = 3600.0

_ROWS = {row.name: row for row in METRICS}
_Key = tuple[str, tuple[str, ...]]


class _Slot:
    """What is known of one instance: its latest snapshot, and what earlier incarnations had counted."""

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self.carried: dict[_Key, list[float]] = {}

    def take(self, snapshot: Snapshot) -> None:
        before = self.latest
        if before is not None and before.incarnation != snapshot.incarnation:
            for name, series in before.metrics.items():
                if _ROWS.get(name) and _ROWS[name].kind in ("counter", "histogram"):
                    for each in series:
                        key = (name, each.labels)
                        self.carried[key] = _sum(self.carried.get(key), each.numbers)
        self.latest = snapshot

    def numbers(self, name: str) -> Iterator[tuple[tuple[str, ...], list[float]]]:
        assert self.latest is not None
        seen = set()
        for each in self.latest.metrics.get(name, ()):
            seen.add(each.labels)
            yield each.labels, _sum(self.carried.get((name, each.labels)), each.numbers)
        for (carried_name, labels), numbers in self.carried.items():
            if carried_name == name and labels not in seen:
                yield labels, numbers


class Exposition:
    """Renders /metrics; ingest hands it its siblings' reports."""

    def __init__(self, own: Metrics, clock: Clock) -> None:
        self._own = own
        self._clock = clock
        self._slots: dict[str, _Slot] = {}

    def take(self, reports: Iterable[tuple[str, bytes]]) -> None:
        """Take (instance, snapshot bytes) of siblings; unreadable ones, and our own, are passed over."""
        for instance, body in reports:
            if instance == self._own.instance:
                continue
            try:
                snapshot = decode_snapshot(body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            slot = self._slots.setdefault(instance, _Slot())
            if slot.latest is None or snapshot.at_ms >= slot.latest.at_ms:
                slot.take(snapshot)

    def render(self) -> bytes:
        """Return the text, every series with its `instance`."""
        # Importing prometheus_client costs as much as all of our telemetry; only who renders pays for it.
        from prometheus_client.exposition import generate_latest

        now_ms = self._clock.now_ms()
        own = _Slot()
        own.take(self._own.snapshot())
        for name in [name for name, slot in self._slots.items() if _silent_s(slot, now_ms) > FORGET_S]:
            del self._slots[name]
        slots = {self._own.instance: own, **dict(sorted(self._slots.items()))}
        text: bytes = generate_latest(_Families(slots, now_ms))
        return text


class _Families:
    """What `generate_latest` needs of a registry."""

    def __init__(self, slots: dict[str, _Slot], now_ms: int) -> None:
        self._slots = slots
        self._now_ms = now_ms

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        makers: dict[str, Any] = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        for row in METRICS:
            family = makers.get(row.kind, GaugeMetricFamily)(row.name, row.doc, labels=("instance", *row.labels))
            for instance, slot in self._slots.items():
                for labels, value in self._values(row, slot):
                    family.add_metric((instance, *labels), **value)
            if family.samples:
                yield family

    def _values(self, row: MetricRow, slot: _Slot) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        assert slot.latest is not None
        silent_s = _silent_s(slot, self._now_ms)
        alive = silent_s <= LIVE_S
        if row.name == "headrace_up":
            yield (slot.latest.service,), {"value": float(alive)}
        elif row.kind == "counter":
            for labels, numbers in slot.numbers(row.name):
                yield labels, {"value": numbers[0]}
        elif row.kind == "histogram":
            for labels, numbers in slot.numbers(row.name):
                yield labels, _buckets(row, numbers)
        elif alive:
            older = silent_s if row.kind == "age" else 0.0
            for each in slot.latest.metrics.get(row.name, ()):
                yield each.labels, {"value": each.numbers[0] + older}


def _buckets(row: MetricRow, numbers: list[float]) -> dict[str, Any]:
    names = [*(repr(float(bound)) for bound in row.bounds), "+Inf"]
    running, buckets = 0.0, []
    for name, count in zip(names, numbers[1:], strict=True):
        running += count
        buckets.append((name, running))
    return {"buckets": buckets, "sum_value": numbers[0]}


def _sum(one: list[float] | None, other: list[float]) -> list[float]:
    # Another release may have had other bounds; what cannot be added begins again.
    if one is None or len(one) != len(other):
        return other
    return [a + b for a, b in zip(one, other, strict=True)]


def _silent_s(slot: _Slot, now_ms: int) -> float:
    assert slot.latest is not None
    return max(0.0, (now_ms - slot.latest.at_ms) / 1000)
