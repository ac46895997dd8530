"""Doorbells: a datagram to every process that has the same file open, saying what may be new.

A hint only. A lost datagram costs one poll interval, so nothing here is retried or confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["Doorbell"]

_numbers = itertools.count()
#: Names that fit in one datagram; more are said as "everything".
_BYTES_MAX = 512


class Doorbell:
    """One socket of this process, in a folder shared by all who have the file open."""

    def __init__(self, path: Path, heard: Callable[[set[str]], None]) -> None:
        """Bind; `heard` is called on the running loop with the names that were rung."""
        status = path.stat()
        # Socket paths are limited to about 100 bytes, so the folder is named by a digest, not by the file's path.
        digest = hashlib.blake2s(f"{status.st_dev}:{status.st_ino}".encode(), digest_size=8).hexdigest()
        self._folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{digest}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._own = f"{os.getpid()}-{next(_numbers)}"
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(FileNotFoundError):  # left by a process that had our pid before
            (self._folder / self._own).unlink()
        self._socket.bind(str(self._folder / self._own))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._listen)

    def ring(self, names: set[str]) -> None:
        """Tell the others; never waits."""
        data = "\n".join(sorted(names)).encode()
        data = data if len(data) <= _BYTES_MAX else b"*"
        try:
            others = os.listdir(self._folder)  # noqa: PTH208 - names are all that is needed, and this is a hot path
        except OSError:
            return
        for other in others:
            if other == self._own:
                continue
            address = str(self._folder / other)
            try:
                self._socket.sendto(data, address)
            except (ConnectionRefusedError, FileNotFoundError):
                with contextlib.suppress(OSError):  # its process is dead
                    Path(address).unlink()
            except OSError:
                pass  # its buffer is full: it has hints enough

    def close(self) -> None:
        """Unbind."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            (self._folder / self._own).unlink()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _listen(self) -> None:
        names: set[str] = set()
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                names.update(self._socket.recv(_BYTES_MAX).decode().split("\n"))
        if names:
            self._heard(names)
