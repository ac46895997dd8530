"""The writer: one thread, one connection, one commit for whatever waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from headrace.sqlite.connection import Connection, Failure, connect, is_broken, run_saved, translate

__all__ = ["Operation", "Worker", "Writer"]

#: Operations in one commit. An operation may itself hold hundreds of rows.
_COMMIT_OPERATIONS_MAX = 512
#: Pages of WAL (4 KiB each) from which it is copied back into the file, and from which writers are held up for it.
_CHECKPOINT_PAGES = 2_000
_RESTART_PAGES = 4_000


class Operation:
    """One piece of work and who waits for it: a future of an event loop, or a thread."""

    __slots__ = ("_done", "_future", "_loop", "error", "failure", "fn", "found")

    def __init__(self, fn: Callable[[Connection], Any], failure: Failure, future: asyncio.Future[Any] | None) -> None:
        self.fn, self.failure = fn, failure
        self.found: Any = None
        self.error: BaseException | None = None
        self._future = future
        self._loop = future.get_loop() if future is not None else None
        self._done = threading.Event() if future is None else None

    def wait(self) -> Any:
        """Block this thread until the outcome is there."""
        assert self._done is not None
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.found

    def settle(self, by_loop: dict[asyncio.AbstractEventLoop, list[Operation]]) -> None:
        """Tell the waiting thread, or put this into the bundle for its loop."""
        if self._done is not None:
            self._done.set()
        else:
            assert self._loop is not None
            by_loop.setdefault(self._loop, []).append(self)

    def resolve(self) -> None:
        """Answer the future; runs on its loop."""
        future = self._future
        assert future is not None
        if future.done():
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.found)


def _resolve(operations: list[Operation]) -> None:
    for operation in operations:
        operation.resolve()


class Worker:
    """A thread with a connection that works through operations; reading is this, writing is more."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._waiting: deque[Operation] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"sqlite-{name}", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Queue an operation; its outcome reaches whoever waits for it."""
        with self._wake:
            self._waiting.append(operation)
            self._wake.notify()

    def close(self) -> None:
        """Finish what was put, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if not self._waiting:
                    break
                count = min(len(self._waiting), _COMMIT_OPERATIONS_MAX)
                operations = [self._waiting.popleft() for _ in range(count)]
            try:
                self._work(operations)
            except BaseException as error:
                self._fail(operations, error)
            self._settle(operations)
            self._rest()
        self._close_connection()

    def _work(self, operations: list[Operation]) -> None:
        connection = self._open()
        connection.execute("BEGIN")
        try:
            for operation in operations:
                self._one(connection, operation, operation.fn)
        finally:
            connection.execute("COMMIT")

    def _rest(self) -> None:
        """Do what must not delay an answer."""

    def _one(self, connection: Connection, operation: Operation, fn: Callable[[Connection], Any]) -> None:
        try:
            operation.found = fn(connection)
        except apsw.Error as error:
            if is_broken(error):
                raise
            operation.error = translate(error, self.path, operation.failure)
        except Exception as error:
            operation.error = error

    def _fail(self, operations: list[Operation], error: BaseException) -> None:
        """Nobody's writes are durable, so everybody is told, whatever their own part did."""
        for operation in operations:
            if isinstance(error, apsw.Error):
                operation.error = translate(error, self.path, operation.failure)
            elif isinstance(error, OSError):
                operation.error = operation.failure(f"{self.path.name}: {error.strerror or error}; check its folder")
            else:
                operation.error = error
            operation.found = None
        self._undo(error)

    def _undo(self, error: BaseException) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(apsw.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        if is_broken(error) or not isinstance(error, apsw.Error):
            self._close_connection()

    def _settle(self, operations: list[Operation]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Operation]] = {}
        for operation in operations:
            operation.settle(by_loop)
        for loop, bundle in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, bundle)

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self.path)
        return self._connection

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close()


class Writer(Worker):
    """Commits whatever waits, together, and keeps the WAL short between commits."""

    def __init__(self, path: Path) -> None:
        self._pages = 0
        super().__init__(path, "writer")

    def _open(self) -> Connection:
        if self._connection is None:
            super()._open().set_wal_hook(self._note_pages)
        assert self._connection is not None
        return self._connection

    def _note_pages(self, _connection: Connection, _name: str, pages: int) -> int:
        self._pages = pages
        return apsw.SQLITE_OK

    def _work(self, operations: list[Operation]) -> None:
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        if len(operations) == 1:
            self._alone(connection, operations[0])
            return
        for operation in operations:
            self._one(connection, operation, partial(run_saved, fn=operation.fn))
        connection.execute("COMMIT")

    def _alone(self, connection: Connection, operation: Operation) -> None:
        """Commit a single operation; it needs no savepoint, the transaction itself is one."""
        self._one(connection, operation, operation.fn)
        connection.execute("COMMIT" if operation.error is None else "ROLLBACK")

    def _rest(self) -> None:
        connection = self._connection
        if connection is None or self._pages < _CHECKPOINT_PAGES:
            return
        # Passive copies what it can without holding anybody up. Under constant writing it never catches up and the
        # WAL would grow for ever, so a long one is finished off, which holds writers up for the few last pages.
        with contextlib.suppress(apsw.Error):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if self._pages >= _RESTART_PAGES:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        self._pages = 0

    def _close_connection(self) -> None:
        if self._connection is not None and self._closing:
            with contextlib.suppress(apsw.Error):
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        super()._close_connection()
