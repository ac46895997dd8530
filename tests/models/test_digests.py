"""Which files an artifact is, and whether they are the same ones."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from headrace.models.digests import created_at_ms, digest_of, files_of, stamps_of
from headrace.models.registry import resolve
from headrace.runtimes import Artifact
from runtimes import onnx_files


def artifact(spec: str, root: Path) -> Artifact:
    (found,) = resolve([spec], root).artifacts
    return found


def test_a_lone_files_digest_is_what_sha256sum_says(tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.linear(), tmp_path / "m.onnx")
    assert digest_of(artifact("m.onnx", tmp_path)) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_version_folder_is_everything_in_it(tmp_path: Path) -> None:
    onnx_files.with_data_file(tmp_path / "m" / "1", data="weights.bin")
    (tmp_path / "m" / "1" / "labels").mkdir()
    (tmp_path / "m" / "1" / "labels" / "en.txt").write_text("cat")
    one = artifact("m", tmp_path)
    assert list(files_of(one)) == ["labels/en.txt", "model.onnx", "weights.bin"]
    before = digest_of(one)
    (tmp_path / "m" / "1" / "labels" / "en.txt").write_text("dog")
    changed = digest_of(one)
    (tmp_path / "m" / "1" / "labels" / "en.txt").rename(tmp_path / "m" / "1" / "labels" / "de.txt")
    assert len({before, changed, digest_of(one)}) == 3


def test_a_bare_file_takes_its_data_file_along_and_no_neighbours(tmp_path: Path) -> None:
    onnx_files.with_data_file(tmp_path, "m.onnx", data="m.onnx.data")
    (tmp_path / "other.onnx").write_bytes(b"x")
    assert list(files_of(artifact("m.onnx", tmp_path))) == ["m.onnx", "m.onnx.data"]


def test_a_bare_file_takes_its_card_and_example_along(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"x")
    before = digest_of(artifact("m.pt", tmp_path))
    for name in ("m.card.json", "m.example.npz", "model.card.json", "m.json"):
        (tmp_path / name).write_text("{}")
    one = artifact("m.pt", tmp_path)
    assert list(files_of(one)) == ["m.pt", "m.card.json", "m.example.npz"]
    assert digest_of(one) != before  # what it takes and gives is part of what it is


def test_a_saved_model_is_everything_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "m" / "variables").mkdir(parents=True)
    for name in ("saved_model.pb", "variables/variables.index", "model.card.json"):
        (tmp_path / "m" / name).write_text("x")
    assert list(files_of(artifact("m", tmp_path))) == ["model.card.json", "saved_model.pb", "variables/variables.index"]


def test_a_callable_is_its_source_file_and_finding_it_imports_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made_up_package" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "made_up_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text("x = 1")
    one = artifact("python:made_up_package.inner.models:x", tmp_path)
    assert list(files_of(one)) == ["models.py"]
    assert digest_of(one) == hashlib.sha256(b"x = 1").hexdigest()
    assert "made_up_package" not in sys.modules


def test_a_callable_without_a_source_has_no_digest(tmp_path: Path) -> None:
    for module in ("sys", "made_up_absent", "made_up.absent"):
        one = artifact(f"python:{module}:x", tmp_path)
        assert (stamps_of(one), digest_of(one)) == ((), "")
        assert created_at_ms(stamps_of(one)) is None


def test_a_stamp_changes_with_the_content_even_where_the_time_is_set_back(tmp_path: Path) -> None:
    path = onnx_files.save(onnx_files.linear(), tmp_path / "m.onnx")
    one = artifact("m.onnx", tmp_path)
    before, stat = stamps_of(one), path.stat()
    assert stamps_of(one) == before
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert stamps_of(one) != before
    assert stamps_of(one)[0].mtime_ns == before[0].mtime_ns
    assert created_at_ms(before) == stat.st_mtime_ns // 1_000_000
