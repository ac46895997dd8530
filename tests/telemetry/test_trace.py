"""Traces: W3C headers, malformed ones ignored, spans with parents and links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.clock import ManualClock
from headrace.errors import ShapeMismatch
from headrace.telemetry.logs import Logs
from headrace.telemetry.trace import LogExporter, Recorder, TraceContext, Tracer, new_trace, parse_traceparent
from headrace.telemetry.writer import LineWriter

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [(f"00-{TRACE}-{SPAN}-01", 1), (f"00-{TRACE}-{SPAN}-00", 0), (f"cc-{TRACE}-{SPAN}-03-what-ever", 1)],
)
def test_a_legal_traceparent_is_read(header: str, flags: int) -> None:
    assert parse_traceparent(header, "a=b") == TraceContext(TRACE, SPAN, flags, "a=b")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n00",
        "\u0660\u0660" + f"-{TRACE}-{SPAN}-01",
        "0" * 100_000,
    ],
)
def test_a29_a_malformed_traceparent_is_as_if_it_were_not_there(header: str | None) -> None:
    assert parse_traceparent(header) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=b\r\nSet-Cookie: c", "ü=1", ""])
def test_a_malformed_tracestate_is_dropped_alone(state: str) -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, 1, None)


def test_a_child_stays_in_the_trace_and_the_header_goes_round() -> None:
    parent = new_trace(sampled=True)
    child = parent.child()
    assert (child.trace_id, child.flags) == (parent.trace_id, 1)
    assert child.span_id != parent.span_id
    assert parse_traceparent(child.traceparent) == child


async def test_a29_one_trace_goes_from_request_through_batch_to_webhook() -> None:
    clock, recorder = ManualClock(), Recorder()
    tracer = Tracer(clock, [recorder])
    with tracer.span("request_received", TraceContext(TRACE, SPAN, 1), route="/predict") as received:
        await clock.advance(0.5)
    others = [new_trace(), new_trace()]
    with tracer.span("inference_executed", links=[received.context, *others]) as ran:
        ran.set(rows=3)
    with pytest.raises(ShapeMismatch), tracer.span("response_sent", received.context, attempt=2) as sent:
        raise ShapeMismatch("secret text")
    first, second, third = recorder.records
    assert (first.trace_id, first.parent_id, first.duration_ms, first.error) == (TRACE, SPAN, 500, None)
    assert {trace_id for trace_id, _ in second.links} == {TRACE, *(other.trace_id for other in others)}
    assert (second.attributes, second.parent_id) == ({"rows": 3}, None)
    assert (third.trace_id, third.parent_id, third.error) == (TRACE, received.context.span_id, "shape_mismatch")
    assert sent.context.traceparent.startswith(f"00-{TRACE}-")
    assert recorder.named("response_sent") == [third]


def test_a_span_ends_once_and_costs_no_record_where_nobody_takes_it() -> None:
    recorder = Recorder()
    span = Tracer(ManualClock(), [recorder]).span("model_loaded")
    span.fail("out_of_memory")
    span.end()
    span.end()
    assert [record.error for record in recorder.records] == ["out_of_memory"]
    silent = Tracer(ManualClock())
    assert not silent.enabled
    with silent.span("model_loaded", TraceContext(TRACE, SPAN)) as span:
        assert span.context.trace_id == TRACE


def test_a_span_that_the_table_lacks_is_an_error_at_once() -> None:
    with pytest.raises(LookupError):
        Tracer(ManualClock()).span("coffee_made")


def test_spans_can_be_log_lines(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    logs = Logs(ManualClock(), level="debug", writer=LineWriter(fd))
    tracer = Tracer(ManualClock(), [LogExporter(logs)])
    with tracer.span("inference_executed", links=[TraceContext(TRACE, SPAN)], model="m") as span:
        pass
    logs.close()
    os.close(fd)
    line = json.loads((tmp_path / "log").read_text())
    assert (line["span"], line["trace_id"], line["model"]) == ("inference_executed", span.context.trace_id, "m")
    assert line["links"] == [f"{TRACE}-{SPAN}"]
