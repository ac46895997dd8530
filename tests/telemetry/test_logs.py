"""The log: one line for each entry, nothing lost on an orderly exit, nothing forged."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.telemetry import writer as writer_module
from headrace.telemetry.logs import Logs
from headrace.telemetry.names import LINES
from headrace.telemetry.writer import LineWriter

SRC = Path(__file__).parents[2] / "src"
REQUEST: dict[str, Any] = {
    "request_id": "r",
    "model": "m",
    "model_version": "1",
    "input_size": 3,
    "latency_ms": 1.25,
    "queue_time_ms": None,
    "status": 200,
    "error": None,
    "method": "POST",
    "route": "/predict",
}


class Book:
    """A log into a file, and its lines."""

    def __init__(self, path: Path, level: str = "debug") -> None:
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.logs = Logs(ManualClock(), level=level, service="ingest", writer=LineWriter(self.fd))

    def lines(self) -> list[dict[str, Any]]:
        self.logs.flush()
        raw = self.path.read_bytes()
        assert raw == b"" or raw.endswith(b"\n")
        # As the crudest reader would split it, Unicode separators included.
        return [json.loads(line) for line in raw.decode().splitlines()]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    book = Book(tmp_path / "log")
    yield book
    book.logs.close()
    os.close(book.fd)


def test_a_request_line_has_every_field_that_is_promised(book: Book) -> None:
    book.logs.request(**REQUEST)
    (line,) = book.lines()
    promised = "timestamp request_id model model_version input_size latency_ms queue_time_ms status error"
    assert set(promised.split()) <= set(line)
    assert {name: line[name] for name in REQUEST} == REQUEST
    row = next(row for row in LINES if row.name == "request")
    assert set(line) - {"timestamp", "level", "event", "service", "instance"} == set(row.fields)
    assert line["timestamp"] == "2027-01-15T08:00:00.000Z"


@pytest.mark.parametrize(
    "text",
    [
        'ok\nERROR paid=true","level":"error',
        "a\r\nb",
        "\x1b[31mred\x1b[0m",
        "\u2028\u2029\x85\x9b\x7f\x00",
        '"\\',
        "\ud800 alone",
        "ünïcode 漢字 🎏",
        "x" * 100_000,
    ],
)
def test_a28_whatever_a_stranger_sends_stays_on_its_one_line(book: Book, text: str) -> None:
    book.logs.request(**{**REQUEST, "request_id": text[:5000], "model": text[:5000]})
    book.logs.say("claim_lost", id=text, model="m", reason=text)
    first, second = book.lines()
    assert first["request_id"] == text[:5000]
    assert second["id"][:2000] == text[:2000]
    assert len(second["id"]) < 2100
    raw = book.path.read_bytes()
    assert raw.isascii()
    assert not any(byte < 0x20 or byte == 0x7F for byte in raw.replace(b"\n", b""))


def test_no_line_holds_bytes_or_arrays(book: Book) -> None:
    import numpy

    book.logs.say("ready", service=b"payload", a=numpy.arange(9), b=[b"x", {"c": bytearray(3)}], d=1 << 80, e=object)
    (line,) = book.lines()
    assert line["service"] == "<7 bytes>"
    assert (line["a"], line["b"], line["d"], line["e"]) == (
        "<ndarray>",
        ["<1 bytes>", {"c": "<3 bytes>"}],
        "<int>",
        "<type>",
    )


def test_an_error_comes_with_its_trace_on_the_same_line(book: Book) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        book.logs.say("loop_failed", loop="claims", error=error)
        book.logs.say("batch_retried", model="m", requests=2, error=error)
    failed, warned = book.lines()
    assert failed["error"] == "ValueError: first\nsecond"
    assert "test_logs.py" in failed["traceback"]
    assert "traceback" not in warned


def test_lines_below_the_level_are_not_written(tmp_path: Path) -> None:
    book = Book(tmp_path / "log", level="warning")
    book.logs.request(**REQUEST)
    book.logs.say("ready", service="ingest")
    book.logs.say("claim_lost", id="1", model="m", reason="expired")
    assert [line["event"] for line in book.lines()] == ["claim_lost"]
    book.logs.close()
    os.close(book.fd)


def test_order_is_kept_between_access_lines_and_others(book: Book) -> None:
    for number in range(50):
        book.logs.request(**{**REQUEST, "input_size": number})
        book.logs.say("claim_lost", id=str(number), model="m", reason="expired")
    lines = book.lines()
    assert [line["input_size"] for line in lines[::2]] == list(range(50))
    assert [line["id"] for line in lines[1::2]] == [str(number) for number in range(50)]


def test_a_line_from_libraries_comes_out_as_ours(book: Book) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    book.logs.adopt_libraries()
    try:
        logging.getLogger("lib").info("no")
        logging.getLogger("lib").warning("a %s", "b\nc")
        logging.getLogger("lib").error("bad %d", "x", exc_info=KeyError("k"))
        (warning, error) = book.lines()
    finally:
        root.handlers[:], root.level = before, level
        root.setLevel(level)
    assert (warning["event"], warning["level"], warning["logger"], warning["text"]) == (
        "library",
        "warning",
        "lib",
        "a b\nc",
    )
    assert (error["text"], error["error"]) == ("bad %d", "KeyError: 'k'")


def test_an_orderly_exit_loses_no_line() -> None:
    code = (
        "from headrace.clock import SystemClock\n"
        "from headrace.telemetry.logs import Logs\n"
        "logs = Logs(SystemClock(), service='x')\n"
        "[logs.say('ready', service=str(n)) for n in range(5000)]\n"
        "raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 3
    assert [json.loads(line)["service"] for line in done.stderr.splitlines()] == [str(n) for n in range(5000)]


def test_lines_of_several_processes_into_one_pipe_are_never_torn() -> None:
    code = (
        "from headrace.clock import SystemClock\n"
        "from headrace.telemetry.logs import Logs\n"
        "logs = Logs(SystemClock(), service='x')\n"
        "for n in range(3000):\n"
        "    logs.say('ready', service='y' * (n % 1500))\n"
    )
    read, write = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", code], stderr=write) for _ in range(3)]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [process.wait() for process in writers] == [0, 0, 0]
    assert len(lines) == 9000
    assert all(json.loads(line)["event"] == "ready" for line in lines)


def test_a_reader_that_does_not_read_neither_stops_us_nor_takes_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LINES_MAX", 500)
    monkeypatch.setattr(writer_module, "_CLOSE_S", 0.2)
    read, write = os.pipe()
    before = set(threading.enumerate())
    logs = Logs(ManualClock(), writer=LineWriter(write))
    for _ in range(5000):
        logs.say("claim_lost", id="x" * 200, model="m", reason="r")
    assert logs.dropped > 0
    (thread,) = set(threading.enumerate()) - before
    logs.close()
    os.close(read)  # the writing thread ends with EPIPE
    thread.join(10)
    assert not thread.is_alive()
    os.close(write)


def test_a_closed_stderr_is_no_error() -> None:
    logs = Logs(ManualClock(), writer=LineWriter(987))
    logs.say("ready", service="x")
    logs.flush()
    logs.close()
    assert logs.dropped >= 1


def test_every_line_that_is_logged_is_in_the_table_with_its_fields() -> None:
    rows = {row.name: row for row in LINES}
    assert len(rows) == len(LINES)
    for path in sorted((SRC / "headrace").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "say"):
                continue
            if not node.args:
                continue  # the life's word to its supervisor is no log line
            # A name that is chosen is checked as far as it is written out.
            names = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            given = {keyword.arg for keyword in node.keywords}
            for name in names if not any(isinstance(part, ast.JoinedStr) for part in ast.walk(node.args[0])) else ():
                assert name in rows, f"{path}:{node.lineno}: {name} is not in telemetry/names.py"
                missing = set(rows[name].fields) - given if None not in given else set()
                assert not missing, f"{path}:{node.lineno}: {name} lacks {sorted(missing)}"
