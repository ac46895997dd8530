"""Which artifacts a list of MODEL words means; no ML library is imported and nothing is loaded.

A MODEL is `PATH`, `NAME=PATH`, `python:package.module:callable` or `NAME=python:…`. A path is a file (version 1) or a
folder `NAME/<version>/model.onnx`; a SavedModel is a folder itself, as a version or alone (version 1). Relative paths
start from the model path. What is wrong with one MODEL is a fault of that one; the others are found all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import ModelLoadFailed
from headrace.runtimes import RUNTIMES, SAVED_MODEL, Artifact

__all__ = ["NAME", "Fault", "Ignored", "Resolution", "by_version", "is_name", "resolve"]

#: Model names and, as versions in URLs and file names, what else a caller may name.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

#: A version folder: a number without leading zeros, so that no two folders are the same version.
_VERSION = re.compile(r"[1-9][0-9]{0,17}|0")

#: What is often given and never taken, and what to give instead.
_WAYS_OUT = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "a pickle runs whatever code it carries; export to ONNX"),
    **dict.fromkeys((".keras", ".h5", ".hdf5"), "write a SavedModel with model.export(FOLDER), and give the folder"),
    ".pt2": "export it with torch.jit.trace or to ONNX",
}

#: A reference in an error is cut to this; whole paths of ours are never shown.
_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """A MODEL that cannot be served, and why."""

    spec: str
    #: Its name, where that much is known; "" otherwise.
    name: str
    error: ModelLoadFailed


@dataclass(frozen=True, slots=True)
class Ignored:
    """An entry of a model's folder that is not a version, and why."""

    model: str
    entry: str
    reason: str


@dataclass(slots=True)
class Resolution:
    """What a list of MODEL words means; artifacts have no digest yet."""

    artifacts: list[Artifact] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)


def is_name(text: str) -> bool:
    """Return whether a model may have this name (no separator, no leading dot, at most 128 characters)."""
    return NAME.fullmatch(text) is not None


def by_version(version: str) -> tuple[int, int, str]:
    """Return a sort key: numbers as numbers, before anything else."""
    return (0, int(version), "") if _VERSION.fullmatch(version) else (1, 0, version)


def resolve(specs: Sequence[str], model_path: Path = Path(), *, links: bool = False) -> Resolution:
    """Find the artifacts, ordered as given and by version; every fault and every ignored entry is told.

    `links` allows links that lead out of a model's folder.
    """
    found = Resolution()
    for spec in specs:
        try:
            _resolve_one(spec, model_path, found, links)
        except ModelLoadFailed as error:
            found.faults.append(Fault(spec, _name_of(spec), error))
    seen: set[tuple[str, str]] = set()
    kept: list[Artifact] = []
    for artifact in found.artifacts:
        key = (artifact.name, artifact.version)
        if key in seen:
            reason = f"version {artifact.version} of {artifact.name!r} is given twice; name one of them NAME=PATH"
            found.faults.append(Fault(artifact.shown, artifact.name, _failed(artifact.name, artifact.shown, reason)))
        else:
            kept.append(artifact)
        seen.add(key)
    found.artifacts = kept
    return found


def _split(spec: str) -> tuple[str | None, str]:
    name, equals, place = spec.partition("=")
    # A path may hold an equals sign after its first step; a name never holds a slash or a colon.
    if equals and "/" not in name and ":" not in name:
        return name, place
    return None, spec


def _name_of(spec: str) -> str:
    name, _ = _split(spec)
    return name if name is not None and is_name(name) else ""


def _resolve_one(spec: str, model_path: Path, found: Resolution, links: bool) -> None:
    name, place = _split(spec)
    if name is not None and not is_name(name):
        raise _bad_name(name)
    if not place or "\0" in place:
        raise _failed(name or "", _shown(place), "a MODEL is PATH, NAME=PATH or python:package.module:callable")
    if place.startswith("python:"):
        found.artifacts.append(_python(name, place.removeprefix("python:"), model_path))
        return
    if "://" in place:
        raise _failed(name or "", "", "a registry URL cannot be served yet; give a file or a folder")
    path = model_path / place
    if path.is_dir():
        _resolve_folder(name, path, found, links)
    elif path.is_file():
        found.artifacts.append(_file(name or path.stem, "1", path, path.parent))
    else:
        raise _failed(name or "", path.name, "there is no such file or folder", _expected())


def _python(name: str | None, entry: str, model_path: Path) -> Artifact:
    module, colon, target = entry.partition(":")
    parts = [*module.split("."), *target.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise _failed(
            name or "", _shown(entry), "expected python:package.module:callable", ["python:package.module:callable"]
        )
    name = name or parts[-1]
    if not is_name(name):
        raise _bad_name(name)
    return Artifact(name, "1", "python", None, entry, root=model_path.absolute())


def _resolve_folder(name: str | None, folder: Path, found: Resolution, links: bool) -> None:
    folder = folder.absolute()
    # `echo/1` itself: one version of `echo`.
    if _VERSION.fullmatch(folder.name) and _model_files(folder):
        found.artifacts.append(_version(name or folder.parent.name, folder, folder.parent, links))
        return
    name = name or folder.resolve().name
    if not is_name(name):
        raise _bad_name(name)
    if (folder / SAVED_MODEL).is_file():
        _check_links(name, folder, folder.parent, folder, links)
        found.artifacts.append(_file(name, "1", folder / SAVED_MODEL, folder.parent))
        return
    versions: list[Path] = []
    for entry in sorted(folder.iterdir()):
        reason = _not_a_version(entry)
        if reason:
            found.ignored.append(Ignored(name, entry.name, reason))
        else:
            versions.append(entry)
    if not versions:
        raise _failed(name, folder.name, "it holds no version: folders named 1, 2, … with a model in each", _expected())
    for entry in sorted(versions, key=lambda version: by_version(version.name)):
        try:
            found.artifacts.append(_version(name, entry, folder, links))
        except ModelLoadFailed as error:
            found.faults.append(Fault(f"{name}/{entry.name}", name, error))


def _not_a_version(entry: Path) -> str:
    """Return why an entry is passed over, "" if it is a version."""
    if not _VERSION.fullmatch(entry.name):
        return "its name is not a version number (digits without leading zeros)"
    if not entry.exists():
        return "it is a link that leads nowhere"
    return "" if entry.is_dir() else "it is a file; a version is a folder"


def _version(name: str, folder: Path, root: Path, links: bool) -> Artifact:
    if not is_name(name):
        raise _bad_name(name)
    shown = folder.name
    _check_links(name, folder, root, root, links)
    files = _model_files(folder)
    named = [file for file in files if file.stem == "model"]
    if len(named) == 1:
        files = named
    if len(files) != 1:
        held = sorted(entry.name for entry in folder.iterdir())[:10]
        raise _failed(
            name,
            shown,
            "it holds more than one model" if files else f"it holds no model, but {held}",
            [f"{shown}/{file}" for file in _expected()],
        )
    return _file(name, folder.name, files[0], root)


def _check_links(name: str, folder: Path, root: Path, within: Path, links: bool) -> None:
    inside = within.resolve()
    outside = next((f for f in folder.rglob("*") if not f.resolve().is_relative_to(inside)), None)
    if outside is not None and not links:
        reason = "it is a link that leads out of the model's folder, which `model.links` does not allow"
        raise _failed(name, str(outside.relative_to(root)), reason)


def _model_files(folder: Path) -> list[Path]:
    """Return the models in a version folder, a SavedModel by the file that makes it one: it has other `.pb` beside."""
    endings = [ending for row in RUNTIMES.values() for ending in row.endings]
    if (folder / SAVED_MODEL).is_file():
        endings = [ending for ending in endings if ending != ".pb"]
    files = [file for file in folder.iterdir() if file.suffix in endings and file.is_file()]
    inner = [entry / SAVED_MODEL for entry in (folder, *folder.iterdir()) if (entry / SAVED_MODEL).is_file()]
    return sorted(files + inner)


def _file(name: str, version: str, path: Path, root: Path) -> Artifact:
    if not is_name(name):
        raise _bad_name(name)
    for runtime, row in RUNTIMES.items():
        if path.suffix in row.endings:
            artifact = Artifact(name, version, runtime, path.absolute())
            return replace(artifact, root=root.absolute())
    endings = sorted(ending for row in RUNTIMES.values() for ending in row.endings)
    way_out = f"; {_WAYS_OUT[path.suffix]}" if path.suffix in _WAYS_OUT else ""
    reason = f"no runtime takes {path.suffix or 'such'} files; known are {endings}{way_out}"
    raise _failed(name, path.name, reason, _expected())


def _expected() -> list[str]:
    return [*(f"model{row.endings[0]}" for row in RUNTIMES.values() if row.endings), SAVED_MODEL]


def _shown(text: str) -> str:
    return text[:_SHOWN_MAX] if "/" not in text and text.isprintable() else ""


def _bad_name(name: str) -> ModelLoadFailed:
    # Not echoed: it may be a path, or 5,000 characters of anything.
    return _failed(
        "",
        "",
        "a model's name is letters, digits, '.', '_' and '-', begins with a letter or digit, "
        f"and has at most 128 characters; this one has {len(name)}. Name it NAME=PATH",
    )


def _failed(name: str, file: str, reason: str, expected: Sequence[str] = ()) -> ModelLoadFailed:
    subject = f"model {name!r}" if name else "the model"
    place = f"{file}: " if file else ""
    return ModelLoadFailed(
        f"{subject} cannot be found: {place}{reason}",
        details={"file": file, "reason": reason, "expected": list(expected)},
    )
