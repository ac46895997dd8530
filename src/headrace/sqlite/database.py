"""One open file: its writer, its reader, and how to wait for news."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import apsw

from headrace.clock import Clock
from headrace.sqlite.connection import Connection, Failure, check_filesystem, check_sqlite, connect, create, translated
from headrace.sqlite.doorbell import Doorbell
from headrace.sqlite.worker import Operation, Worker
from headrace.sqlite.writer import Writer

__all__ = ["Database", "open_database"]

T = TypeVar("T")

#: How often a waiter looks for itself whether another process has committed.
_POLL_S = 0.03

_open: dict[tuple[Path, int], Database] = {}
_lock = threading.Lock()


def open_database(path: Path, clock: Clock, failure: Failure) -> Database:
    """Return the open file; broker and store on one path share it, and so their commits. Close it once for each call.

    Raises `failure` with what to do where the library or the place is unfit. What is wrong with the file itself is
    raised by the first `write` (making the tables, as a rule), which waits for locks without blocking the loop.
    """
    path = Path(os.path.realpath(path))
    for fault in (*check_sqlite(), *check_filesystem(path)):
        raise failure(fault)
    key = (path, id(asyncio.get_running_loop()))
    with _lock, translated(path, failure):
        database = _open.get(key)
        if database is None:
            database = _open[key] = Database(path, clock, key)
        database.users += 1
        return database


class Database:
    """A file that is open in this process and on this event loop."""

    def __init__(self, path: Path, clock: Clock, key: tuple[Path, int]) -> None:
        self.path, self.clock, self.users = path, clock, 0
        self._key = key
        create(path)
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(path, self._loop, self._ring_from_thread)
        self._reader = Worker(path, "reader", self._loop)
        self._near: Connection | None = None
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._version = 0
        self._poll: asyncio.TimerHandle | None = None
        self._bell = Doorbell(path, self._heard)
        self._rung: set[str] = set()

    async def write(self, fn: Callable[[Connection], T], failure: Failure) -> T:
        """Run `fn` inside the next commit; return when that commit is on disk.

        `fn` runs on the writer's thread inside a transaction shared with others: it must be quick and touch nothing
        but the connection. If it raises, only its own writes are undone. If the commit fails, it raises `failure`
        or StorageFull and nothing was written. Cancelling the call does not undo the write.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._writer.put(Operation(fn, failure, future))
        return await future

    def write_blocking(self, fn: Callable[[Connection], T], failure: Failure) -> T:
        """Do what `write` does, from any thread."""
        operation = Operation(fn, failure, None)
        self._writer.put(operation)
        found: T = operation.wait()
        return found

    async def read(self, fn: Callable[[Connection], T], failure: Failure) -> T:
        """Run `fn` in a read transaction on the reader's thread."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._reader.put(Operation(fn, failure, future))
        return await future

    def query(self, fn: Callable[[Connection], T], failure: Failure) -> T:
        """Run a point look-up here and now, on the loop's own connection; readers never wait for writers."""
        with translated(self.path, failure):
            if self._near is None:
                self._near = connect(self.path)
            try:
                return fn(self._near)
            except apsw.IOError:
                self._close_near()
                raise

    def ring(self, name: str) -> None:
        """Say that there may be something new under this name, here and in other processes."""
        self._wake((name,))
        if not self._rung:
            self._loop.call_soon(self._ring_others)
        self._rung.add(name)

    async def wait(self, names: Collection[str], timeout_s: float) -> None:
        """Return when one of the names was rung or anybody committed, at the latest after `timeout_s`."""
        if timeout_s <= 0:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        for name in names:
            self._waiters.setdefault(name, set()).add(future)
        if self._poll is None:
            self._version = self._data_version()
            self._poll = self._loop.call_later(_POLL_S, self._look)
        timer = self._loop.call_later(timeout_s, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            for name in names:
                waiters = self._waiters.get(name)
                if waiters is not None:
                    waiters.discard(future)
                    if not waiters:
                        del self._waiters[name]

    async def close(self) -> None:
        """Let go; the last one to do so ends the threads, after what was put is written."""
        with _lock:
            self.users -= 1
            if self.users:
                return
            _open.pop(self._key, None)
        if self._poll is not None:
            self._poll.cancel()
        for name in list(self._waiters):
            self._wake((name,))
        self._bell.close()
        self._close_near()
        # The threads finish what was put, which may take as long as a locked file keeps them waiting.
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._writer.close)

    # -- news -------------------------------------------------------------------------------------------

    def _heard(self, names: set[str]) -> None:
        self._wake(list(self._waiters) if "*" in names else names)

    def _wake(self, names: Collection[str]) -> None:
        for name in names:
            for future in self._waiters.get(name, ()):
                _finish(future)

    def _ring_from_thread(self, names: set[str]) -> None:
        for name in names:
            self._loop.call_soon_threadsafe(self.ring, name)

    def _ring_others(self) -> None:
        names, self._rung = self._rung, set()
        self._bell.ring(names)

    def _look(self) -> None:
        self._poll = None
        if not self._waiters:
            return
        version = self._data_version()
        if version != self._version:
            self._version = version
            self._wake(list(self._waiters))
        self._poll = self._loop.call_later(_POLL_S, self._look)

    def _data_version(self) -> int:
        # Changes whenever another connection commits, those of other processes included; microseconds.
        try:
            if self._near is None:
                self._near = connect(self.path)
            return int(self._near.execute("PRAGMA data_version").get)
        except (apsw.Error, OSError):
            self._close_near()
            return -1  # differs from what was: waiters look for themselves, and hear the error there

    def _close_near(self) -> None:
        connection, self._near = self._near, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
