"""What kind of file carries the ending of a TorchScript model; found out without torch and without unpickling."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePosixPath

from headrace.runtimes.base import Artifact, load_failed

__all__ = ["EXPECTED", "look"]

#: What a refusal says was expected.
EXPECTED = ("model.pt, written by torch.jit.trace(…).save() or torch.jit.script(…).save()",)

_WAY_OUT = (
    "loading it would run whatever code it carries, so it is never loaded; "
    "export it with torch.jit.trace(module.eval(), example).save(FILE) or to ONNX"
)
#: Beginnings of a pickle: protocols 2 to 5, as Python and as torch before 1.6 write them.
_PICKLE = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
#: Where a tar archive says that it is one; torch before 0.2 wrote pickles into one.
_TAR = slice(257, 262)


def look(artifact: Artifact) -> None:
    """Refuse what is not TorchScript. Raises ModelLoadFailed with the reason and the way out.

    A zip is TorchScript where it holds code and constants; torch.save writes zips too, of pickles alone.
    """
    path = artifact.path
    assert path is not None
    reason = _reason(path)
    if reason:
        raise load_failed(artifact, reason, EXPECTED)


def _reason(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(512)
        if not start:
            return "the file is empty"
        if not start.startswith(b"PK"):
            return _other(start)
        with zipfile.ZipFile(path) as archive:
            return _archive(archive.namelist())
    except FileNotFoundError:
        return "there is no such file"
    except IsADirectoryError:
        return "it is a folder, not a file"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (zipfile.BadZipFile, ValueError):
        return "it is cut short, or not a zip archive as TorchScript is"


def _archive(names: list[str]) -> str:
    # Every entry stands in one folder, whose name is whatever the file was called when it was written.
    inside = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in names}
    if "constants.pkl" in inside and any(name.startswith("code/") for name in inside):
        return ""
    if "archive_format" in inside:
        return "it is a torch.export archive (pt2), not TorchScript; export it with torch.jit.trace or to ONNX"
    if "data.pkl" in inside:
        return f"it is a pickle (written by torch.save), not TorchScript: {_WAY_OUT}"
    return "it is a zip archive, but not TorchScript"


def _other(start: bytes) -> str:
    if start.startswith(_PICKLE) or start[_TAR] == b"ustar":
        return f"it is a pickle (written by torch.save or pickle), not TorchScript: {_WAY_OUT}"
    return "it is neither TorchScript nor any other zip archive"
