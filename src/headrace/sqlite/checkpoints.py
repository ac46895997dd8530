"""When the WAL is copied back into the file: by the writer between commits, never by a commit itself."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from headrace.sqlite.connection import Connection, Patience

__all__ = ["Checkpoints"]

_PAGE_BYTES = 4096
#: Pages of WAL from which it is copied back: 16 MiB, some twenty milliseconds of work.
_DUE_PAGES = 4096
#: How long other writers may be held up for the last pages, or until readers have let go of the old ones.
_PATIENCE_S = 0.05


class Checkpoints:
    """The state of one writer's WAL, and what to do about it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pages = 0
        #: How long it was after our last commit; shorter now, it has begun anew.
        self._noted = 0
        self._due = _DUE_PAGES
        self._version: int | None = None
        #: Set when the disk was full: the WAL's room may be what is missing.
        self.must_shrink = False

    @property
    def wal_bytes(self) -> int:
        """Return how much of the WAL is in use, as of our last commit."""
        return self._pages * _PAGE_BYTES

    @property
    def is_due(self) -> bool:
        """Return whether it is time to copy the WAL back, though commits may be waiting."""
        return self._pages >= self._due

    @property
    def is_untidy(self) -> bool:
        """Return whether there is something to do for a writer that has nothing to do."""
        return self._pages > 0

    def note(self, pages: int) -> None:
        """Note how long the WAL is after a commit of ours; others may have written most of it."""
        if pages < self._noted:
            self._due = _DUE_PAGES
        self._pages = self._noted = pages
        self._version = None

    def opened(self, connection: Connection) -> None:
        """Shrink the WAL if the connection before this one met a full disk."""
        if self.must_shrink:
            self.must_shrink = False
            self._truncate(connection)

    def run(self, connection: Connection) -> None:
        """Copy back what can be copied without holding anybody up, then the few pages that came meanwhile.

        Without the second part the WAL would grow for ever under constant writing, because it begins anew only when
        all of it was copied. A reader that is in the middle of something keeps it from that: try again later.
        """
        self._due = self._pages + _DUE_PAGES
        if not self._fits(connection):
            return
        with _short_of_patience(connection):
            length, copied = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if copied < length:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
            self._pages = 0

    def idle(self, connection: Connection) -> None:
        """Empty the WAL when nobody has written for a while, or, too long as it is, try again."""
        version = int(connection.execute("PRAGMA data_version").get)
        if self._pages >= _DUE_PAGES:
            self.run(connection)
        elif version == self._version or self._version is None:
            # The first look only takes note; whoever wrote since then is active and tidies up after itself.
            if self._version is None:
                self._version = version
            else:
                self._truncate(connection)
        else:
            self._pages = 0
            self._version = None

    def _fits(self, connection: Connection) -> bool:
        """Return whether there is room for what the file grows by: half a checkpoint only eats what somebody freed."""
        grown = int(connection.execute("PRAGMA page_count").get) * _PAGE_BYTES
        return grown - self._path.stat().st_size <= shutil.disk_usage(self._path.parent).free

    def _truncate(self, connection: Connection) -> None:
        if self._fits(connection):
            self._empty(connection)
        self._pages = 0
        self._version = None

    def _empty(self, connection: Connection) -> None:
        with contextlib.suppress(apsw.BusyError, apsw.LockedError), _short_of_patience(connection):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


@contextmanager
def _short_of_patience(connection: Connection) -> Iterator[None]:
    connection.set_busy_handler(Patience(_PATIENCE_S))
    try:
        yield
    finally:
        connection.set_busy_handler(Patience())
