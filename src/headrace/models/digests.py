"""Which files an artifact is made of, and whether they are still the same ones."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec

from headrace.runtimes import Artifact, card_files

__all__ = ["FileStamp", "created_at_ms", "digest_of", "files_of", "size_of_files", "stamps_of"]

_CHUNK_BYTES = 1 << 20
#: What exporters append to a model's file name for the file of its larger tensors.
_COMPANIONS = (".data", "_data")


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """What a file looks like from outside: where it agrees, the content is not read again."""

    name: str
    size: int
    mtime_ns: int
    #: Changes also where a copy carries the old modification time along.
    ctime_ns: int


def files_of(artifact: Artifact) -> dict[str, Path]:
    """Return the files by their names relative to the artifact, sorted; nothing is read, nothing imported.

    A version folder or a SavedModel is all that is in it; a bare file is itself, its data files and its card; python
    is the source file.
    """
    path = artifact.path
    if path is None:
        source = _source_of((artifact.entry or "").partition(":")[0], artifact.root)
        return {source.name: source} if source is not None else {}
    folder = path.parent
    if artifact.root is not None and folder != artifact.root:
        found = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file for file in sorted(found)}
    beside = [folder / f"{path.name}{ending}" for ending in _COMPANIONS]
    return {file.name: file for file in (path, *beside, *card_files(path)) if file.is_file()}


def stamps_of(artifact: Artifact) -> tuple[FileStamp, ...]:
    """Return the stamps of its files; a file that goes away meanwhile is left out."""
    found = []
    for name, file in files_of(artifact).items():
        try:
            stat = file.stat()
        except OSError:
            continue
        found.append(FileStamp(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def size_of_files(artifact: Artifact) -> int:
    """Return the bytes of its files together."""
    return sum(stamp.size for stamp in stamps_of(artifact))


def digest_of(artifact: Artifact) -> str:
    """Return the SHA-256 over names, sizes and contents; of a lone file that of its content, as sha256sum prints it.

    Reads every byte, so not on an event loop. "" where there is no file; raises OSError.
    """
    files = files_of(artifact)
    if not files:
        return ""
    whole = hashlib.sha256()
    if len(files) == 1:
        _feed(whole, next(iter(files.values())))
        return whole.hexdigest()
    for name, file in files.items():
        part = hashlib.sha256()
        size = _feed(part, file)
        whole.update(f"{name}\0{size}\0{part.hexdigest()}\n".encode())
    return whole.hexdigest()


def created_at_ms(stamps: tuple[FileStamp, ...]) -> int | None:
    """Return when the newest file was written; None where there is no file."""
    return max((stamp.mtime_ns // 1_000_000 for stamp in stamps), default=None)


def _feed(digest: hashlib._Hash, file: Path) -> int:
    size = 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size


def _source_of(module: str, root: Path | None) -> Path | None:
    """Find a module's source as the import system would, without importing it or its parents."""
    path = None if root is None else [str(root), *sys.path]
    parts = module.split(".")
    spec = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path)
            if spec is not None:
                break
        if spec is None:
            return None
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    origin = Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
    return origin if origin is not None and origin.is_file() else None
