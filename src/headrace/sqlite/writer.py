"""The writer: one thread, one connection, one commit for whatever waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import apsw

from headrace.sqlite.checkpoints import Checkpoints
from headrace.sqlite.connection import Connection, run_saved
from headrace.sqlite.worker import Operation, Worker

__all__ = ["Writer"]

#: Operations in one commit. An operation may itself hold hundreds of rows.
_COMMIT_OPERATIONS_MAX = 512
#: How often a transaction looks for newcomers before it commits: those who came while it waited for its turn, and
#: those who came while it worked.
_ROUNDS_MAX = 2
#: After how long without work the writer tidies up.
_IDLE_S = 1.0


class Writer(Worker):
    """Commits whatever waits, together, and keeps the WAL short between commits."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, ring: Callable[[set[str]], None]) -> None:
        """Start; `ring` is called on the thread with what the operations of a commit want rung."""
        self._checkpoints = Checkpoints(path)
        self._ring = ring
        self._identity: tuple[int, int] | None = None
        self._is_committing = False
        super().__init__(path, "writer", loop)

    @property
    def wal_bytes(self) -> int:
        """Return how much of the WAL is in use, as of our last commit."""
        return self._checkpoints.wal_bytes

    def _turn(self, operations: list[Operation]) -> None:
        self._is_committing = False
        if not self._waiting:
            if self._connection is not None:
                self._checkpoints.idle(self._connection)
            return
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        self._check_identity()
        try:
            for _ in range(_ROUNDS_MAX):
                # Taken only now, so that those who came while we waited for the lock need not wait for the next one.
                taken = self._take(_COMMIT_OPERATIONS_MAX - len(operations))
                operations += taken
                for operation in taken:
                    self._one(connection, operation, partial(run_saved, fn=operation.fn))
            self._is_committing = True
            connection.execute("COMMIT")
        except apsw.FullError as error:
            if len(operations) == 1:
                raise
            self._undo(error)
            self._apart(operations)

    def _apart(self, operations: Sequence[Operation]) -> None:
        """Commit one by one what does not fit together: what is small, or removes, may well fit alone."""
        for number, operation in enumerate(operations):
            self._is_committing = False
            try:
                connection = self._open()
                connection.execute("BEGIN IMMEDIATE")
                self._one(connection, operation, partial(run_saved, fn=operation.fn))
                self._is_committing = True
                connection.execute("COMMIT")
            except apsw.FullError as error:
                self._fail([operation], error)
            except BaseException as error:
                self._fail([operation], error)
                self._is_committing = False
                self._fail(operations[number + 1 :], error)
                return

    def _fail(self, operations: Sequence[Operation], error: BaseException, *, is_unknown: bool = False) -> None:
        # The commit record may have reached the file although its fsync failed; the next commit overwrites it, unless
        # the machine dies first.
        super()._fail(operations, error, is_unknown=self._is_committing and isinstance(error, apsw.IOError))

    def _settle(self, operations: Sequence[Operation]) -> None:
        super()._settle(operations)
        names = {name for operation in operations if operation.error is None for name in operation.rings}
        if names:
            self._ring(names)

    def _check_identity(self) -> None:
        """Refuse to write into a file that is not there any more: its commits would go nowhere."""
        status = os.stat(self.path)  # noqa: PTH116 - once for each commit
        if self._identity is None:
            self._identity = (status.st_dev, status.st_ino)
        elif self._identity != (status.st_dev, status.st_ino):
            raise OSError(0, "it was replaced while it was open; restart")

    def _open(self) -> Connection:
        if self._connection is None:
            connection = super()._open()
            connection.set_wal_hook(self._note_pages)
            self._checkpoints.opened(connection)
        assert self._connection is not None
        return self._connection

    def _note_pages(self, _connection: Connection, _name: str, pages: int) -> int:
        self._checkpoints.note(pages)
        return apsw.SQLITE_OK

    def _undo(self, error: BaseException) -> None:
        super()._undo(error)
        if isinstance(error, apsw.FullError):
            self._checkpoints.must_shrink = True

    def _rest_s(self) -> float | None:
        return _IDLE_S if self._checkpoints.is_untidy else None

    def _rest(self) -> None:
        if self._connection is not None and self._checkpoints.is_due:
            self._checkpoints.run(self._connection)

    def _close_connection(self) -> None:
        if self._connection is not None and self._closing:
            with contextlib.suppress(apsw.Error):
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        super()._close_connection()
