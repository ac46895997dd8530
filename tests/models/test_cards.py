"""Cards: written whole or not at all, believed only for the files they were made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest, ModelLoadFailed
from headrace.message import ErrorRecord
from headrace.models.cards import Card, CardBook
from headrace.models.digests import digest_of, stamps_of
from headrace.models.registry import resolve
from headrace.runtimes import Artifact
from models.kit import ROWS_OF_3
from runtimes import onnx_files


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    onnx_files.save(onnx_files.linear(), tmp_path / "echo" / "1" / "model.onnx")
    (found,) = resolve(["echo"], tmp_path).artifacts
    return found


def card_of(artifact: Artifact, **others: object) -> Card:
    values: dict[str, object] = {
        "name": artifact.name,
        "version": artifact.version,
        "runtime": artifact.runtime,
        "platform": "onnx_onnxv1",
        "signature": ROWS_OF_3,
        "digest": digest_of(artifact),
        "files": stamps_of(artifact),
        "entry": artifact.entry,
        "created_at_ms": 1_800_000_000_000,
        **others,
    }
    return Card(**values)  # type: ignore[arg-type]


def test_what_was_written_is_read_by_another_process(artifact: Artifact, tmp_path: Path) -> None:
    writer, reader = CardBook(tmp_path / "data"), CardBook(tmp_path / "data")
    assert not reader.refresh()
    card = card_of(artifact)
    assert writer.write(card)
    assert reader.refresh()
    assert reader.cards() == {("echo", "1"): card}
    assert reader.current(artifact) == card
    assert (tmp_path / "data" / "cards" / "echo" / "1.json").is_file()


def test_an_equal_card_is_not_written_again_and_nobody_is_woken(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path)
    assert book.write(card_of(artifact))
    book.refresh()
    same = book.cards()
    assert not book.write(card_of(artifact))
    assert not book.refresh()
    assert book.cards() is same


def test_a_failed_load_keeps_its_reason(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path)
    details = {"file": "1/model.onnx", "reason": "the file is empty", "expected": ["model.onnx"]}
    record = ErrorRecord(code="model_load_failed", message="it is empty", details=details)
    book.write(card_of(artifact, signature=None, error=record))
    book.refresh()
    card = book.current(artifact)
    assert card is not None and card.signature is None and card.reason == "it is empty"
    with pytest.raises(ModelLoadFailed, match="it is empty") as caught:
        card.raise_for_error()
    assert caught.value.details == details


def test_a_good_card_raises_nothing(artifact: Artifact) -> None:
    card_of(artifact).raise_for_error()
    assert card_of(artifact).reason == ""


def test_changes_and_removals_are_seen(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path)
    book.write(card_of(artifact))
    book.refresh()
    book.write(card_of(artifact, platform="other"))
    assert book.refresh()
    assert book.cards()["echo", "1"].platform == "other"
    book.remove("echo", "1")
    book.remove("echo", "1")
    assert book.refresh()
    assert not book.cards()


def test_a_card_of_other_files_is_not_believed(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact))
    book.refresh()
    assert artifact.path is not None
    onnx_files.save(onnx_files.linear(seed=9), artifact.path)
    assert book.current(artifact) is None
    assert book.digest(artifact) == digest_of(artifact)


def test_a_card_is_believed_where_only_the_times_differ(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact))
    book.refresh()
    assert artifact.path is not None
    artifact.path.touch()
    assert book.current(artifact) is not None


def test_the_digest_of_unchanged_files_is_not_computed_again(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact))
    book.refresh()
    monkeypatch.setattr("headrace.models.cards.digest_of", lambda artifact: pytest.fail("it was read"))
    assert book.digest(artifact) == card_of(artifact).digest
    assert book.current(artifact) is not None


def test_a_card_of_another_runtime_or_entry_is_not_believed(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact, runtime="python", entry="a:b"))
    book.refresh()
    assert book.current(artifact) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not a card"),
        (b'{"schema": 1}', "it is not a card"),
        (b'{"schema": 99, "unheard": "of"}', "it was written by a newer version"),
        (b"\xff\xfe", "it is not a card"),
    ],
)
def test_a_card_that_cannot_be_read_is_passed_over_with_a_reason(
    content: bytes, reason: str, artifact: Artifact, tmp_path: Path
) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact))
    book.refresh()
    bad = tmp_path / "data" / "cards" / "bad"
    bad.mkdir()
    (bad / "1.json").write_bytes(content)
    book.refresh()
    assert list(book.cards()) == [("echo", "1")]
    assert reason in book.refused["bad/1.json"]


def test_a_card_under_anothers_name_is_passed_over(artifact: Artifact, tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    book.write(card_of(artifact))
    path = tmp_path / "data" / "cards" / "echo" / "1.json"
    (path.parent / "2.json").write_bytes(path.read_bytes())
    book.refresh()
    assert list(book.cards()) == [("echo", "1")]
    assert "echo/2.json" in book.refused


@pytest.mark.parametrize(("name", "version"), [("../x", "1"), ("x", "../1"), ("a/b", "1"), ("", "1"), ("x", "")])
def test_a23_a_card_is_never_written_outside_its_folder(name: str, version: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        CardBook(tmp_path / "data").write(Card(name=name, version=version, runtime="onnx"))
    assert not list(tmp_path.iterdir())


def test_a_writer_that_dies_leaves_the_old_card(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = CardBook(tmp_path / "data")
    old = card_of(artifact)
    book.write(old)

    def die(fd: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("headrace.models.cards.os.fsync", die)
    with pytest.raises(OSError, match="full"):
        book.write(card_of(artifact, platform="x" * 100_000))
    book.refresh()
    assert book.cards() == {("echo", "1"): old}
    assert [path.name for path in (tmp_path / "data" / "cards" / "echo").iterdir()] == ["1.json"]


def test_the_file_is_json_that_people_can_read(artifact: Artifact, tmp_path: Path) -> None:
    CardBook(tmp_path).write(card_of(artifact))
    text = (tmp_path / "cards" / "echo" / "1.json").read_text()
    assert json.loads(text)["signature"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert text.count("\n") > 10


def test_cards_are_read_without_any_ml_library() -> None:
    code = "import sys, headrace.models.cards; assert not {'onnxruntime', 'torch', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
