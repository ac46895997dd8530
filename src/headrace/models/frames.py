"""What a runner's process and its parent say to each other: small frames on a socket, tensors in shared memory.

A frame is its length in four bytes, little-endian, and msgpack of one of the structs below; nothing is ever unpickled.
Each side writes tensors into a region of its own, at places that the frame names, and reads the other's: one copy on
the way in, and on the way out one into the region and one out of it, because an answer outlives the run. BYTES are
encoded as on the wire. Between two runs nobody holds anything of a region, so that it may grow and shrink.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import BY_CODE, HeadraceError, Internal
from headrace.runtimes import Artifact, WrongRows
from headrace.tensor import Datatype, Tensor, tensor_from_bytes, tensor_to_bytes

__all__ = [
    "VARIABLE",
    "Answer",
    "Begin",
    "Failure",
    "Placed",
    "Ready",
    "Region",
    "RemoteTrace",
    "Run",
    "failure_of",
    "receive",
    "send",
]

#: Names what a runner's process inherits: the socket, the pipe that its parent's end closes, and the two regions.
VARIABLE = "HEADRACE__RUNNER"

_LENGTH = struct.Struct("<I")
#: A cache line; also more than any element needs.
_ALIGNED = 64
_SIZE_MIN = 1 << 16
#: A region that is this many times larger than what it holds is cut, down to no less than `_KEPT`.
_SLACK = 8
_KEPT = 1 << 24


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in a region; `size` is in bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    """Load this and warm it up (parent to child, once)."""

    name: str
    version: str
    runtime: str
    path: str | None
    entry: str | None
    digest: str
    root: str | None
    threads: int
    device: str
    size_max: int
    fast_s: float

    @classmethod
    def of(cls, artifact: Artifact, *, threads: int, device: str, size_max: int, fast_s: float) -> Begin:
        """Return the frame for an artifact."""
        return cls(
            name=artifact.name,
            version=artifact.version,
            runtime=artifact.runtime,
            # Absolute: the child may be started from elsewhere one day.
            path=None if artifact.path is None else str(artifact.path.absolute()),
            entry=artifact.entry,
            digest=artifact.digest,
            root=None if artifact.root is None else str(artifact.root.absolute()),
            threads=threads,
            device=device,
            size_max=size_max,
            fast_s=fast_s,
        )

    @property
    def artifact(self) -> Artifact:
        """Return the artifact that it names."""
        return Artifact(
            self.name,
            self.version,
            self.runtime,
            None if self.path is None else Path(self.path),
            self.entry,
            self.digest,
            None if self.root is None else Path(self.root),
        )


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """It is loaded and warm (child to parent, once); what the first runs showed, as `Warm` has it."""

    platform: str
    device: str
    signature: dict[str, Any]
    concurrent: bool
    batchable: bool
    row_s: float | None
    batch_s: float | None
    note: str


class Run(msgspec.Struct, tag="run"):
    """Run once with what lies in the parent's region of `size` bytes (parent to child)."""

    inputs: list[Placed]
    outputs: Sequence[str]
    size: int


class Answer(msgspec.Struct, tag="answer"):
    """What a run gave, in the child's region of `size` bytes (child to parent)."""

    outputs: list[Placed]
    size: int


class Failure(msgspec.Struct, tag="failure"):
    """An error instead of `Ready` or `Answer` (child to parent); `trace` is for the log alone."""

    code: str
    message: str
    details: dict[str, Any]
    trace: str
    wrong_rows: bool = False

    def error(self) -> HeadraceError:
        """Return the error as it was raised there."""
        kind = WrongRows if self.wrong_rows else BY_CODE.get(self.code, Internal)
        found = kind(self.message, details=self.details)
        found.__cause__ = RemoteTrace(self.trace) if self.trace else None
        return found


class RemoteTrace(Exception):
    """The traceback of an error in a runner's process, as text."""

    def __str__(self) -> str:
        return f"in the runner's process:\n{self.args[0]}"


Frame = Begin | Ready | Run | Answer | Failure

_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def failure_of(error: HeadraceError, trace: str) -> Failure:
    """Return the frame that says what went wrong."""
    return Failure(error.code, error.message, dict(error.details), trace, isinstance(error, WrongRows))


def send(line: socket.socket, frame: Frame) -> None:
    """Send one frame. Raises OSError."""
    body = _encode(frame)
    line.sendall(_LENGTH.pack(len(body)) + body)


def receive(line: socket.socket) -> Frame:
    """Wait for one frame. Raises EOFError where the other side is gone, TimeoutError after the socket's timeout."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _decode(_exactly(line, length))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = line.recv(size - len(data))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        data = data + part if data else part
    return data


class Region:
    """Memory that two processes share, through a file that has no name. One writes, the other reads."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a new one, or open what was inherited as `fd`, which is ours to close from now on."""
        self.fd = _nameless() if fd is None else fd
        self._map: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Return how much of it is mapped here, in bytes."""
        return 0 if self._map is None else len(self._map)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def write(self, tensors: Mapping[str, Tensor]) -> list[Placed]:
        """Lay tensors into it, in place of what was there; it grows and shrinks as needed. Raises MemoryError."""
        parts: list[tuple[Tensor, bytes | None]] = []
        placed: list[Placed] = []
        end = 0
        for name, tensor in tensors.items():
            encoded = tensor_to_bytes(tensor) if tensor.datatype is Datatype.BYTES else None
            size = tensor.array.nbytes if encoded is None else len(encoded)
            parts.append((tensor, encoded))
            placed.append(Placed(name, str(tensor.datatype), tensor.shape, end, size))
            end += -(-size // _ALIGNED) * _ALIGNED
        self._fit(end)
        assert self._map is not None
        for (tensor, encoded), place in zip(parts, placed, strict=True):
            if not place.size:
                continue
            target = np.frombuffer(self._map, np.uint8, place.size, place.offset)
            if encoded is None:
                target[:] = tensor.array.reshape(-1).view(np.uint8)
            else:
                target[:] = np.frombuffer(encoded, np.uint8)
        return placed

    def read(self, placed: Sequence[Placed], size: int, *, copy: bool) -> dict[str, Tensor]:
        """Return the tensors that the other side laid into its `size` bytes: copies, or read-only views.

        Raises Internal for places that cannot be.
        """
        if size != self.size:
            self._map = None  # whoever held a view has dropped it by now
            self._map = mmap.mmap(self.fd, size)
        view = memoryview(self._map or b"").toreadonly()
        found: dict[str, Tensor] = {}
        for place in placed:
            if not 0 <= place.offset <= place.offset + place.size <= size:
                raise Internal("a runner named a place outside its memory")
            part = view[place.offset : place.offset + place.size]
            try:
                tensor = tensor_from_bytes(place.name, Datatype(place.datatype), place.shape, part)
            except (HeadraceError, ValueError) as error:
                raise Internal("a runner sent a tensor that is none") from error
            if copy and tensor.datatype is not Datatype.BYTES:
                tensor = Tensor(tensor.datatype, tensor.array.copy())
            found[place.name] = tensor
        return found

    def _fit(self, wanted: int) -> None:
        size = self.size
        if self._map is not None and wanted <= size and (size <= _KEPT or size <= _SLACK * wanted):
            return
        size = max(_SIZE_MIN, 1 << (wanted - 1).bit_length() if wanted else 0)
        self._map = None
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            raise MemoryError(f"{size} bytes of shared memory are not to be had") from error


def _nameless() -> int:
    make = getattr(os, "memfd_create", None)
    if make is not None:
        return int(make("headrace", os.MFD_CLOEXEC))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
