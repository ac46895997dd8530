"""Cards: what a version takes and gives, in JSON beside the data, so that ingest needs no ML library.

Whoever loads a version writes its card, `{data}/cards/{name}/{version}.json`: the signature if it loaded, the reason
if it did not. A reader takes a card for true only if it belongs to the files as they are now.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.errors import BY_CODE, HeadraceError, InvalidRequest, ModelLoadFailed
from headrace.message import ErrorRecord
from headrace.models.digests import FileStamp, digest_of, stamps_of
from headrace.models.registry import is_name
from headrace.runtimes import Artifact
from headrace.tensor import Signature

__all__ = ["CARD_SCHEMA", "Card", "CardBook"]

#: Version of the file's form; a newer one is passed over, not guessed at.
CARD_SCHEMA = 1


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One version, as whoever loaded it last found it."""

    name: str
    version: str
    runtime: str
    #: The OIP platform; "" where it never loaded.
    platform: str = ""
    #: None where it did not load.
    signature: Signature | None = None
    #: Why it did not load.
    error: ErrorRecord | None = None
    #: SHA-256 of the files that were loaded; "" where there were none.
    digest: str = ""
    files: tuple[FileStamp, ...] = ()
    #: `module:callable` of the python runtime.
    entry: str | None = None
    #: When the newest file was written.
    created_at_ms: int | None = None
    trained_on: str | None = None
    schema: int = CARD_SCHEMA

    @property
    def reason(self) -> str:
        """Return why it did not load, for people; "" if it did."""
        return "" if self.error is None else self.error.message

    def raise_for_error(self) -> None:
        """Raise what kept it from loading; return if nothing did."""
        if self.error is not None:
            kind = BY_CODE.get(self.error.code, ModelLoadFailed)
            raise kind(self.error.message, details=self.error.details)


class CardBook:
    """The cards under a data folder. Blocking, but small: a handful of files."""

    def __init__(self, data: Path | str) -> None:
        self._folder = Path(data) / "cards"
        self._read: dict[Path, tuple[tuple[int, int, int], Card | None]] = {}
        self._cards: dict[tuple[str, str], Card] = {}
        self._digests: dict[tuple[str, str], tuple[tuple[FileStamp, ...], str]] = {}
        #: Card files that cannot be read: name relative to the folder → reason.
        self.refused: dict[str, str] = {}

    def cards(self) -> Mapping[tuple[str, str], Card]:
        """Return the cards by (name, version), as of the last `refresh`; the same object until one changes."""
        return self._cards

    def refresh(self) -> bool:
        """Look at the folder again; return whether a card came, went or changed. Unchanged files are not read."""
        seen: dict[Path, tuple[tuple[int, int, int], Card | None]] = {}
        refused: dict[str, str] = {}
        for path in sorted(self._folder.glob("*/*.json")):
            name, version = path.parent.name, path.stem
            if not is_name(name) or not is_name(version):
                continue
            try:
                stat = path.stat()
                key = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                old = self._read.get(path)
                seen[path] = old if old is not None and old[0] == key else (key, _decode(path.read_bytes()))
                card = seen[path][1]
                if card is not None and (card.name, card.version) != (name, version):
                    raise InvalidRequest(f"it is the card of {card.name} {card.version}")
            except FileNotFoundError:
                continue  # removed between the listing and now
            except (OSError, HeadraceError) as error:
                refused[f"{name}/{path.name}"] = error.strerror or "" if isinstance(error, OSError) else str(error)
        changed = seen != self._read
        self._read = seen
        self.refused = refused
        if changed:
            found = [card for path, (_, card) in seen.items() if card is not None]
            self._cards = {
                (card.name, card.version): card for card in found if f"{card.name}/{card.version}.json" not in refused
            }
        return changed

    def write(self, card: Card) -> bool:
        """Write a card, whole or not at all; return False where it already says the same. Raises OSError."""
        path = self._path(card.name, card.version)
        content = _encode(card)
        try:
            if path.read_bytes() == content:
                return False
        except OSError:
            pass  # not there, or unreadable: write it anew
        path.parent.mkdir(parents=True, exist_ok=True)
        # The process in the name: several may load the same version at once.
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def remove(self, name: str, version: str) -> None:
        """Remove a card; one that is not there is no error."""
        self._path(name, version).unlink(missing_ok=True)

    def current(self, artifact: Artifact) -> Card | None:
        """Return the card that belongs to the artifact as it is now, as of the last `refresh`; None if there is none.

        Where sizes and times agree nothing is read. Else the files are, so do not call it on an event loop.
        """
        card = self._cards.get((artifact.name, artifact.version))
        if card is None or card.runtime != artifact.runtime or card.entry != artifact.entry:
            return None
        stamps = stamps_of(artifact)
        if stamps == card.files or card.digest == self._digest(artifact, stamps):
            return card
        return None

    def digest(self, artifact: Artifact) -> str:
        """Return the artifact's digest, from its card where the files have not changed since. Raises OSError."""
        stamps = stamps_of(artifact)
        card = self._cards.get((artifact.name, artifact.version))
        if card is not None and card.files == stamps and card.runtime == artifact.runtime:
            return card.digest
        return self._digest(artifact, stamps)

    def _digest(self, artifact: Artifact, stamps: tuple[FileStamp, ...]) -> str:
        key = (artifact.name, artifact.version)
        known = self._digests.get(key)
        if known is None or known[0] != stamps:
            known = self._digests[key] = (stamps, digest_of(artifact))
        return known[1]

    def _path(self, name: str, version: str) -> Path:
        if not is_name(name) or not is_name(version):
            raise InvalidRequest("a card is named after a model and a version, without path parts")
        return self._folder / name / f"{version}.json"


def _encode(card: Card) -> bytes:
    value = {name: getattr(card, name) for name in Card.__struct_fields__}
    value["signature"] = card.signature.to_json() if card.signature is not None else None
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


class _Any(msgspec.Struct):
    """What every card has, also one that was written by a newer version."""

    schema: int


def _decode(content: bytes) -> Card:
    try:
        if msgspec.json.decode(content, type=_Any).schema > CARD_SCHEMA:
            raise InvalidRequest("it was written by a newer version")
        return msgspec.json.decode(content, type=Card)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"it is not a card: {error}") from error
