"""The log: one JSON object a line on stderr, from a closed list of lines.

`names.LINES` lists them with what they mean. No line holds a payload, a secret or a destination's query; whatever
a stranger sent is escaped, cut, and stays on its one line (A28).

Lines are queued and written by a thread, so that neither a slow terminal nor a full pipe holds up the event loop,
and an access line costs about a microsecond. An orderly exit writes every line; a SIGKILL loses the last quarter of a
second of them, but of warnings and errors next to nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.clock import Clock
from headrace.telemetry.names import LEVELS, LINES
from headrace.telemetry.writer import LineWriter

__all__ = ["Logs"]

_TEXT_CHARS_MAX = 2000
_ITEMS_MAX = 50
_LEVEL_OF = {row.name: row.level for row in LINES}

# Every character that a terminal or a naive line splitter could take for a command is ASCII control (JSON escapes
# those), DEL, C1 or a Unicode line separator. The latter three are left by the fast encoder, so a line that is not
# plain ASCII goes through the slow one.
_encode = msgspec.json.Encoder().encode


class _RequestLine(msgspec.Struct, gc=False):
    timestamp: str
    level: str
    event: str
    service: str
    instance: str
    request_id: str
    model: str
    model_version: str
    input_size: int
    latency_ms: float
    queue_time_ms: float | None
    status: int
    error: str | None
    method: str
    route: str
    trace_id: str | None


class Logs:
    """One process's log."""

    def __init__(
        self,
        clock: Clock,
        *,
        level: str = "info",
        service: str = "",
        instance: str = "",
        writer: LineWriter | None = None,
    ) -> None:
        """Log to `writer`, by default to stderr; lines below `level` cost a comparison and are dropped."""
        self._clock = clock
        self._level = LEVELS[level]
        self._service = service
        self._instance = instance or service
        self._writer = writer or LineWriter()
        self._requests = self._level <= LEVELS[_LEVEL_OF["request"]]
        self._second = -1
        self._second_text = ""
        self._handler: _LibraryHandler | None = None
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Return how many lines were dropped because nobody read them."""
        return self._writer.dropped

    def enabled(self, level: str) -> bool:
        """Return whether lines of this level are written."""
        return self._level <= LEVELS[level]

    def say(self, line: str, /, **fields: Any) -> None:
        """Log one line of the table at its level. `error=` may be an exception.

        Values are numbers, text, None, and lists or mappings of those; anything else is named by its type, bytes by
        their number.
        """
        level = _LEVEL_OF.get(line, "error")
        if LEVELS[level] >= self._level:
            self._put(line, level, fields)

    def request(
        self,
        *,
        request_id: str,
        model: str,
        model_version: str,
        input_size: int,
        latency_ms: float,
        queue_time_ms: float | None,
        status: int,
        error: str | None,
        method: str,
        route: str,
        trace_id: str | None = None,
    ) -> None:
        """Log the line that every request gets; `error` is the code and `route` the template."""
        if not self._requests:
            return
        record = _RequestLine(
            self._timestamp(),
            "info",
            "request",
            self._service,
            self._instance,
            request_id,
            model,
            model_version,
            input_size,
            round(latency_ms, 3),
            None if queue_time_ms is None else round(queue_time_ms, 3),
            status,
            error,
            method,
            route,
            trace_id,
        )
        self._writer.put(_one_line(record), urgent=False)

    def adopt_libraries(self, level: int = logging.WARNING) -> None:
        """Let what libraries log through `logging` come out here, as lines named `library`."""
        self._handler = _LibraryHandler(self)
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        root.setLevel(level)

    def flush(self) -> None:
        """Write everything that is queued, now."""
        self._writer.flush()

    def close(self) -> None:
        """Write everything that is queued, for at most some seconds, and stop."""
        atexit.unregister(self.close)
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler = None
        if self._writer.dropped:
            self._put("lines_dropped", "error", {"lines": self._writer.dropped})
        self._writer.close()

    def _put(self, line: str, level: str, fields: Mapping[str, Any]) -> None:
        record: dict[str, Any] = {
            "timestamp": self._timestamp(),
            "level": level,
            "event": line,
            "service": self._service,
            "instance": self._instance,
        }
        for name, value in fields.items():
            if isinstance(value, BaseException):
                record[name] = _clean(f"{type(value).__name__}: {value}")
                if level == "error":
                    record["traceback"] = _trace(value)
            else:
                record[name] = _clean(value)
        self._writer.put(_one_line(record), urgent=LEVELS[level] >= LEVELS["warning"])

    def _timestamp(self) -> str:
        second, ms = divmod(self._clock.now_ms(), 1000)
        if second != self._second:
            self._second_text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
            self._second = second
        return f"{self._second_text}{ms:03d}Z"


def _one_line(record: object) -> bytes:
    try:
        line = _encode(record)
    except (UnicodeEncodeError, msgspec.ValidationError):
        line = b"\xff"
    if not line.isascii():
        line = json.dumps(msgspec.to_builtins(record), ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return line.replace(b"\x7f", b"\\u007f") + b"\n"


def _clean(value: Any, depth: int = 3) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARS_MAX else f"{value[:_TEXT_CHARS_MAX]}… ({len(value)} characters)"
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if depth and isinstance(value, Mapping):
        return {str(name): _clean(part, depth - 1) for name, part in list(value.items())[:_ITEMS_MAX]}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_clean(part, depth - 1) for part in list(value)[:_ITEMS_MAX]]
    return f"<{type(value).__name__}>"


def _trace(error: BaseException) -> str:
    whole = "".join(traceback.format_exception(error)).strip()
    # The end says what happened; the middle of a deep recursion says nothing.
    return whole if len(whole) <= 2 * _TEXT_CHARS_MAX else f"{whole[:500]}\n…\n{whole[-_TEXT_CHARS_MAX:]}"


class _LibraryHandler(logging.Handler):
    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        fields: dict[str, Any] = {"logger": record.name, "text": text}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = record.exc_info[1]
        level = (
            "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        )
        if self._logs.enabled(level):
            self._logs._put("library", level, fields)
