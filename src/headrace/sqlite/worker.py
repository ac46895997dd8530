"""A thread with a connection of its own, and the pieces of work that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw

from headrace.sqlite.connection import Connection, Failure, connect, is_broken, translate

__all__ = ["Operation", "Worker"]


class Operation:
    """One piece of work and who waits for it: a future of the event loop, or a thread."""

    __slots__ = ("_done", "_future", "error", "failure", "fn", "found", "rings")

    def __init__(
        self,
        fn: Callable[[Connection], Any],
        failure: Failure,
        future: asyncio.Future[Any] | None,
        rings: Sequence[str] = (),
    ) -> None:
        self.fn, self.failure, self.rings = fn, failure, rings
        self.found: Any = None
        self.error: BaseException | None = None
        self._future = future
        self._done = threading.Event() if future is None else None

    def wait(self) -> Any:
        """Block this thread until the outcome is there."""
        assert self._done is not None
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.found

    def tell_thread(self) -> bool:
        """Wake the thread that waits; return whether it is one."""
        if self._done is None:
            return False
        self._done.set()
        return True

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


def _resolve(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.resolve()


class Worker:
    """Works through operations in their order; reading is this, writing is more."""

    def __init__(self, path: Path, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self._loop = loop
        self._waiting: deque[Operation] = deque()
        self._wake = threading.Condition()
        self._closing = self._ended = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"sqlite-{name}", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Queue an operation; its outcome reaches whoever waits for it, come what may."""
        with self._wake:
            if not self._ended:
                self._waiting.append(operation)
                self._wake.notify()
                return
        self._fail([operation], OSError(f"{self.path.name} is closed"))
        self._settle([operation])

    def close(self) -> None:
        """Finish what was put, then end the thread; blocks."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._is_wanted():
            operations: list[Operation] = []
            try:
                self._turn(operations)
            except BaseException as error:
                # Whatever it was, nobody may wait for ever: not those in the transaction, and not those who would
                # wait for the next one only to hear the same.
                operations += self._take()
                self._fail(operations, error)
            self._settle(operations)
            with contextlib.suppress(apsw.Error, OSError):
                self._rest()
        self._close_connection()

    def _is_wanted(self) -> bool:
        """Wait for work; False when there is none and there will be none."""
        with self._wake:
            while not self._waiting:
                if self._closing:
                    self._ended = True
                    return False
                if not self._wake.wait(self._rest_s()):
                    return True
        return True

    def _take(self, count_max: int | None = None) -> list[Operation]:
        with self._wake:
            count = len(self._waiting) if count_max is None else min(count_max, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]

    def _turn(self, operations: list[Operation]) -> None:
        """Do what waits; `operations` is filled with it before it is done."""
        operations += self._take()
        if not operations:
            return
        connection = self._open()
        connection.execute("BEGIN")
        for operation in operations:
            self._one(connection, operation, operation.fn)
        connection.execute("COMMIT")

    def _rest_s(self) -> float | None:
        """Return after how long without work to take an empty turn; None for never."""
        return None

    def _rest(self) -> None:
        """Do what must not delay an answer."""

    def _one(self, connection: Connection, operation: Operation, fn: Callable[[Connection], Any]) -> None:
        try:
            operation.found = fn(connection)
            operation.error = None
        except apsw.Error as error:
            if is_broken(error):
                raise
            operation.error = translate(error, self.path, operation.failure)
        except Exception as error:
            operation.error = error

    def _fail(self, operations: Sequence[Operation], error: BaseException, *, is_unknown: bool = False) -> None:
        """Nobody's writes are durable, so everybody is told, whatever their own part did."""
        for operation in operations:
            operation.found = None
            if isinstance(error, apsw.Error | OSError):
                operation.error = translate(error, self.path, operation.failure, is_unknown=is_unknown)
            else:
                operation.error = error
        self._undo(error)

    def _undo(self, error: BaseException) -> None:
        connection = self._connection
        if connection is None:
            return
        with contextlib.suppress(apsw.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        if is_broken(error) or not isinstance(error, apsw.Error):
            self._close_connection()

    def _settle(self, operations: Sequence[Operation]) -> None:
        waiting = [operation for operation in operations if not operation.tell_thread()]
        if waiting:
            # One wake-up of the loop for all of them. It may be closed: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_resolve, waiting)

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self.path)
        return self._connection

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close()
