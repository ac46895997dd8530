"""The rules every connection follows, and what SQLite's errors mean to us."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import apsw

from headrace.errors import BrokerUnavailable, HeadraceError, StorageFull, StoreUnavailable

__all__ = [
    "BUSY_S",
    "Connection",
    "Failure",
    "Patience",
    "check_filesystem",
    "check_sqlite",
    "connect",
    "create",
    "is_broken",
    "run_saved",
    "translate",
    "translated",
]

Connection: TypeAlias = apsw.Connection

#: What an engine failure is called by the adapter that met it.
Failure: TypeAlias = type[BrokerUnavailable] | type[StoreUnavailable]

#: How long a commit waits for other processes before it fails; everybody's transactions last milliseconds, so a
#: longer wait means that someone is stuck inside one.
BUSY_S = 5.0
_FREE_BYTES_MIN = 1 << 20
#: What is left of a WAL on disk after it was copied back.
_WAL_BYTES_KEPT = 64 << 20
#: File systems whose locks or shared memory do not carry a WAL between processes.
_REMOTE = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs afpfs ceph lustre gfs2 ocfs2 webdav"
    " fuse.sshfs fuse.glusterfs fuse.s3fs fuse.gcsfuse fuse.rclone fuse.juicefs fuse.ceph fuse.davfs".split()
)


def check_sqlite() -> list[str]:
    """Return what is wrong with the SQLite library itself; empty means fit.

    Versions before 3.51.3 can lose commits when a WAL is reset while it is checkpointed (two back-ports excepted):
    https://www.sqlite.org/releaselog/3_51_3.html
    """
    text = apsw.sqlite_lib_version()
    major, minor, patch = (int(part) for part in (text + ".0.0").split(".")[:3])
    version = (major, minor, patch)
    faults = []
    fixed = version >= (3, 51, 3) or ((3, 50, 7) <= version < (3, 51)) or ((3, 44, 6) <= version < (3, 45))
    if not fixed:
        faults.append(f"SQLite {text} can lose commits when its WAL is reset; install apsw>=3.51.3")
    options = set(apsw.compile_options)
    if "OMIT_WAL" in options:
        faults.append("this SQLite was built without WAL; install apsw from PyPI")
    if "THREADSAFE=0" in options:
        faults.append("this SQLite was built without threads; install apsw from PyPI")
    return faults


def check_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> list[str]:
    """Return what is wrong with the place of the file; empty means fit or unknown (where `mounts` is no file)."""
    try:
        rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    except OSError:
        return []
    where = os.path.realpath(path)
    best = (0, "")
    for point, kind in rows:
        # Blanks in a name are written in octal. Of two mounts on one point the later one is seen.
        point = point.replace("\\040", " ")
        if (where == point or where.startswith(point.rstrip("/") + "/")) and len(point) >= best[0]:
            best = (len(point), kind)
    kind = best[1]
    if kind not in _REMOTE:
        return []
    return [f"{path.name} lies on {kind}, where processes cannot share a WAL safely; use a local disk"]


class Patience:
    """A busy handler that polls briefly and gives up at a deadline.

    SQLite's own sleeps up to 100 ms between tries; our transactions last about one, so it would sleep through most
    of its turns.
    """

    def __init__(self, limit_s: float = BUSY_S) -> None:
        self.limit_s = limit_s
        self._pause = threading.Event()
        self._waited_s = 0.0

    def __call__(self, tries: int) -> bool:
        """Wait a little; return whether to try again."""
        if tries == 0:
            self._waited_s = 0.0
        if self._waited_s >= self.limit_s:
            return False
        pause_s = 0.0003 if tries < 50 else 0.001 if tries < 500 else 0.005
        self._pause.wait(pause_s)
        # Summed and not measured: a process that was stopped meanwhile has not had its turns.
        self._waited_s += pause_s
        return True


def create(path: Path) -> None:
    """Make the file where there is none, for its owner only; SQLite gives the WAL the same permissions."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def connect(path: Path, patience: Patience | None = None) -> Connection:
    """Open a connection with our rules; WAL and FULL are read back, because builds differ in what they ignore.

    The file must be there: one that vanished under us is never made again, empty.
    """
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=256)
    connection.set_busy_handler(patience or Patience())
    mode = connection.execute("PRAGMA journal_mode=WAL").get
    if mode != "wal":
        raise apsw.CantOpenError(f"journal mode is {mode}, not wal")
    connection.execute("PRAGMA synchronous=FULL")
    if connection.execute("PRAGMA synchronous").get != 2:
        raise apsw.CantOpenError("synchronous is not FULL")
    # fsync does not reach the platter on macOS without this.
    connection.execute("PRAGMA fullfsync=ON; PRAGMA checkpoint_fullfsync=ON")
    connection.execute(f"PRAGMA wal_autocheckpoint=0; PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")
    connection.execute("PRAGMA cache_size=-16000; PRAGMA foreign_keys=OFF; PRAGMA temp_store=MEMORY")
    return connection


def is_broken(error: BaseException) -> bool:
    """Return whether the connection, and whatever is in its transaction, is lost with this error."""
    return isinstance(error, apsw.IOError | apsw.FullError | apsw.CorruptError | apsw.NotADBError | apsw.CantOpenError)


def translate(error: Exception, path: Path, failure: Failure, *, is_unknown: bool = False) -> HeadraceError:
    """Return our error for SQLite's or the system's, saying what to do.

    `is_unknown`: a commit failed in such a way that it may yet be found on disk after a crash.
    """
    details = {"outcome": "unknown"} if is_unknown else None
    name = path.name
    if isinstance(error, OSError):
        return failure(f"{name}: {error.strerror or error}; check its folder", details=details)
    if isinstance(error, apsw.FullError) or (isinstance(error, apsw.IOError | apsw.CantOpenError) and _is_full(path)):
        return StorageFull(f"The disk of {name} is full; free some space, nothing else is needed", details=details)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return failure(f"{name} has been locked by another process for {BUSY_S:g} s; find who holds it")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return failure(f"{name} is damaged or no database: {error}; restore it, or point --data elsewhere")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError):
        return failure(f"{name} cannot be written: {error}; check its owner and mount")
    if isinstance(error, apsw.CantOpenError):
        return failure(f"{name} cannot be opened: {error}; check that it exists and can be written")
    return failure(f"{name}: {type(error).__name__}: {error}", details=details)


def _is_full(path: Path) -> bool:
    # Where the shared memory or the WAL cannot grow, SQLite says "I/O error"; the disk itself says why.
    try:
        return shutil.disk_usage(path.parent).free < _FREE_BYTES_MIN
    except OSError:
        return False


@contextmanager
def translated(path: Path, failure: Failure) -> Iterator[None]:
    """Turn the exceptions of the engine and of the system into ours."""
    try:
        yield
    except (apsw.Error, OSError) as error:
        raise translate(error, path, failure) from error


def run_saved(connection: Connection, fn: Callable[[Connection], object]) -> object:
    """Run `fn` so that its failure undoes only its own writes."""
    connection.execute("SAVEPOINT op")
    try:
        found = fn(connection)
    except BaseException as error:
        # A full disk has undone the transaction already, and whoever runs it must hear of that, not of this.
        if not is_broken(error):
            connection.execute("ROLLBACK TO op; RELEASE op")
        raise
    connection.execute("RELEASE op")
    return found
