"""Whole lines to a file descriptor, from a thread of its own."""

from __future__ import annotations

import os
import stat
import threading
from collections import deque

__all__ = ["LINES_MAX", "LineWriter"]

#: Lines that may wait; beyond them new ones are dropped and counted, since a log must never take the memory.
LINES_MAX = 50_000

#: How long lines are collected before they are written together; urgent ones are not.
_COLLECT_S = 0.25
_CLOSE_S = 3.0

# Several processes share one stderr. POSIX keeps writes to a pipe whole up to PIPE_BUF, which is at least 512 and
# 4096 on Linux; longer ones may interleave with another process's.
_PIPE_BYTES_MAX = 4096
_FILE_BYTES_MAX = 256 * 1024


class LineWriter:
    """Queues lines without waiting and writes them in order."""

    def __init__(self, fd: int = 2) -> None:
        """Write to `fd`, which is neither owned nor closed."""
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._scheduled = False
        self._closed = False
        self._thread: threading.Thread | None = None
        #: Lines that were dropped: nobody read, or the disk was full.
        self.dropped = 0

    def put(self, line: bytes, *, urgent: bool) -> None:
        """Queue a line that ends in a newline; from any thread, never waits."""
        if len(self._lines) >= LINES_MAX:
            self.dropped += 1
            return
        self._lines.append(line)
        if urgent:
            self._urgent.set()
        if not self._scheduled:
            self._scheduled = True
            if self._closed:
                self.flush()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headrace-log", daemon=True)
                self._thread.start()
            self._wake.set()

    def flush(self) -> None:
        """Write what is queued; waits as long as the reader does."""
        with self._writing:
            size_max = _PIPE_BYTES_MAX if _is_pipe(self._fd) else _FILE_BYTES_MAX
            self._scheduled = False
            chunk: list[bytes] = []
            size = 0
            while self._lines:
                line = self._lines.popleft()
                if chunk and size + len(line) > size_max:
                    self._write(chunk)
                    chunk, size = [], 0
                chunk.append(line)
                size += len(line)
            if chunk:
                self._write(chunk)

    def close(self) -> None:
        """Write what is queued, but wait no longer than some seconds for a reader that does not read."""
        thread, self._closed = self._thread, True
        if thread is None:
            self.flush()
            return
        self._urgent.set()
        self._wake.set()
        thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self._urgent.wait(_COLLECT_S)
            self._urgent.clear()
            self.flush()
        self.flush()

    def _write(self, chunk: list[bytes]) -> None:
        rest = memoryview(b"".join(chunk))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Somebody made the terminal non-blocking; it is theirs, so we wait instead of changing it.
                threading.Event().wait(0.01)
            except OSError:
                self.dropped += len(chunk)
                return


def _is_pipe(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
