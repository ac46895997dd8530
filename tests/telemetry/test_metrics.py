"""Metrics: plain numbers, a bounded number of series, snapshots that add up over instances and restarts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.clock import ManualClock
from headrace.telemetry.exposition import FORGET_S, LIVE_S, Exposition
from headrace.telemetry.metrics import SERIES_MAX, Metrics, decode_snapshot
from headrace.telemetry.names import METRICS, OTHER

SAMPLES = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> SAMPLES:
    """Return what a Prometheus server would read."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text: bytes, name: str, **labels: str) -> float | None:
    return samples(text).get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_every_name_follows_the_rules_of_prometheus() -> None:
    assert len({row.name for row in METRICS}) == len(METRICS)
    for row in METRICS:
        assert re.fullmatch(r"headrace_[a-z_]+", row.name), row.name
        assert (row.kind == "counter") == row.name.endswith("_total"), row.name
        assert bool(row.bounds) == (row.kind == "histogram"), row.name
        assert list(row.bounds) == sorted(set(row.bounds)), row.name
        assert row.doc.endswith("."), row.name


def test_what_was_counted_is_what_is_scraped(clock: ManualClock) -> None:
    metrics = Metrics(clock, instance="ingest")
    metrics.counter("headrace_http_requests_total")("/predict", "POST", "200").add()
    metrics.counter("headrace_http_requests_total")("/predict", "POST", "200").add(2)
    metrics.gauge("headrace_topic_waiting")("m").set(7)
    histogram = metrics.histogram("headrace_batch_rows")("m")
    for rows in (1, 3, 3, 1000):
        histogram.observe(rows)
    histogram.observe(-5)
    text = Exposition(metrics, clock).render()
    labels = {"instance": "ingest", "route": "/predict", "method": "POST", "status": "200"}
    assert value(text, "headrace_http_requests_total", **labels) == 3
    assert value(text, "headrace_topic_waiting", instance="ingest", model="m") == 7
    bucket = {"instance": "ingest", "model": "m"}
    assert value(text, "headrace_batch_rows_bucket", **bucket, le="1.0") == 2
    assert value(text, "headrace_batch_rows_bucket", **bucket, le="4.0") == 4
    assert value(text, "headrace_batch_rows_bucket", **bucket, le="+Inf") == 5
    assert value(text, "headrace_batch_rows_sum", **bucket) == 1007
    assert value(text, "headrace_up", instance="ingest", service="ingest") == 1


def test_a_label_with_quotes_and_newlines_makes_no_second_line(clock: ManualClock) -> None:
    metrics = Metrics(clock, instance="ingest")
    metrics.counter("headrace_accepted_total")('a"\n\\b').add()
    text = Exposition(metrics, clock).render()
    assert value(text, "headrace_accepted_total", instance="ingest", model='a"\n\\b') == 1


def test_a27_strange_labels_make_no_series_without_end(clock: ManualClock) -> None:
    metrics = Metrics(clock, instance="ingest")
    requests = metrics.counter("headrace_http_requests_total")
    for number in range(1000):
        requests("", f"METHOD{number}", "404").add()
    assert set(requests.children) == {(OTHER, OTHER, "404")}
    accepted = metrics.counter("headrace_accepted_total")
    for number in range(3 * SERIES_MAX):
        accepted(f"model{number}").add()
    assert len(accepted.children) == SERIES_MAX + 1
    assert sum(child.value for child in accepted.children.values()) == 3 * SERIES_MAX
    assert accepted("model0").value == 1, "those that were there first keep their own"


def test_a_name_that_the_table_lacks_is_an_error_at_once(clock: ManualClock) -> None:
    metrics = Metrics(clock, instance="x")
    with pytest.raises(LookupError, match="no counter headrace_typo_total"):
        metrics.counter("headrace_typo_total")
    with pytest.raises(LookupError, match="no gauge"):
        metrics.gauge("headrace_accepted_total")
    with pytest.raises(TypeError, match="model"):
        metrics.counter("headrace_accepted_total")("m", "1")


async def test_an_age_grows_until_it_is_marked_and_goes_on_growing_for_a_silent_sibling() -> None:
    clock = ManualClock()
    own, other = Metrics(clock, instance="ingest"), Metrics(clock, instance="delivery")
    age = other.age("headrace_poll_age_seconds")("claims")
    await clock.advance(5)
    age.mark()
    await clock.advance(2)
    exposition = Exposition(own, clock)
    exposition.take([("delivery", other.encode())])
    await clock.advance(3)
    assert value(exposition.render(), "headrace_poll_age_seconds", instance="delivery", loop="claims") == 5


def test_a_gauge_can_be_read_when_it_is_scraped(clock: ManualClock, tmp_path: object) -> None:
    metrics = Metrics(clock, instance="ingest")
    metrics.watch_disk(str(tmp_path))
    assert (value(Exposition(metrics, clock).render(), "headrace_disk_free_bytes", instance="ingest") or 0) > 0
    assert (value(Exposition(metrics, clock).render(), "headrace_resident_memory_bytes", instance="ingest") or 0) > 1e6


def test_what_has_no_labels_is_zero_before_the_first_time(clock: ManualClock) -> None:
    text = Exposition(Metrics(clock, instance="i"), clock).render()
    assert value(text, "headrace_log_lines_dropped_total", instance="i") == 0


def test_siblings_are_told_apart_by_their_instance(clock: ManualClock) -> None:
    own = Metrics(clock, instance="ingest")
    exposition = Exposition(own, clock)
    for slot, count in (("inference-1", 3), ("inference-2", 4)):
        sibling = Metrics(clock, instance=slot, service="inference")
        sibling.counter("headrace_results_total")("m", "succeeded").add(count)
        exposition.take([(slot, sibling.encode())])
    text = exposition.render()
    for slot, count in (("inference-1", 3), ("inference-2", 4)):
        assert value(text, "headrace_results_total", instance=slot, model="m", outcome="succeeded") == count
        assert value(text, "headrace_up", instance=slot, service="inference") == 1


async def test_a26_gauges_end_with_their_process_and_counters_do_not_fall() -> None:
    clock = ManualClock()
    exposition = Exposition(Metrics(clock, instance="ingest"), clock)
    sibling = Metrics(clock, instance="inference-1", service="inference")
    sibling.gauge("headrace_model_ready")("m", "1").set(1)
    sibling.counter("headrace_results_total")("m", "succeeded").add(5)
    exposition.take([("inference-1", sibling.encode())])
    await clock.advance(LIVE_S + 1)
    text = exposition.render()
    assert value(text, "headrace_model_ready", instance="inference-1", model="m", version="1") is None
    assert value(text, "headrace_results_total", instance="inference-1", model="m", outcome="succeeded") == 5
    assert value(text, "headrace_up", instance="inference-1", service="inference") == 0
    await clock.advance(FORGET_S)
    assert b"inference-1" not in exposition.render()


def test_a26_two_hundred_restarts_leave_one_slot_whose_counters_go_on(clock: ManualClock) -> None:
    exposition = Exposition(Metrics(clock, instance="ingest"), clock)
    sizes = set()
    for restart in range(1, 201):
        sibling = Metrics(clock, instance="inference-1", service="inference")
        for count in (1, 2):
            sibling.counter("headrace_results_total")("m", "succeeded").add()
            sibling.histogram("headrace_batch_rows")("m").observe(1)
            exposition.take([("inference-1", sibling.encode())])
            text = exposition.render()
            labels = {"instance": "inference-1", "model": "m"}
            expected = 2 * (restart - 1) + count
            assert value(text, "headrace_results_total", outcome="succeeded", **labels) == expected
            assert value(text, "headrace_batch_rows_count", **labels) == expected
        sizes.add(len(samples(text)))
    assert len(sizes) == 1


def test_a_counter_that_a_restarted_slot_has_not_used_again_is_still_there(clock: ManualClock) -> None:
    exposition = Exposition(Metrics(clock, instance="ingest"), clock)
    first = Metrics(clock, instance="inference-1", service="inference")
    first.counter("headrace_claims_lost_total")("m").add()
    exposition.take([("inference-1", first.encode())])
    exposition.take([("inference-1", Metrics(clock, instance="inference-1", service="inference").encode())])
    assert value(exposition.render(), "headrace_claims_lost_total", instance="inference-1", model="m") == 1


def test_a_report_that_cannot_be_read_is_passed_over(clock: ManualClock) -> None:
    own = Metrics(clock, instance="ingest")
    exposition = Exposition(own, clock)
    exposition.take([("x", b""), ("y", b"\x93\x01"), ("ingest", own.encode())])
    assert {dict(labels).get("instance") for _, labels in samples(exposition.render())} == {"ingest"}


def test_a_snapshot_survives_its_bytes(clock: ManualClock) -> None:
    metrics = Metrics(clock, instance="delivery")
    metrics.counter("headrace_accepted_total")("ü").add(1 << 60)
    snapshot = decode_snapshot(metrics.encode())
    assert (snapshot.instance, snapshot.service, snapshot.at_ms) == ("delivery", "delivery", clock.now_ms())
    assert snapshot.metrics["headrace_accepted_total"][0].labels == ("ü",)


def test_counting_does_not_import_what_only_a_scrape_needs() -> None:
    code = (
        "import sys, headrace.telemetry.logs, headrace.telemetry.trace\n"
        "from headrace.telemetry.metrics import Metrics\n"
        "from headrace.clock import SystemClock\n"
        "Metrics(SystemClock(), instance='x').encode()\n"
        "assert not {'prometheus_client', 'aiohttp', 'httptools', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
