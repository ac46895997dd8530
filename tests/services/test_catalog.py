from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ModelLoadFailed, ModelNotFound, VersionNotFound
from headrace.message import ErrorRecord
from headrace.models.cards import Card, CardBook
from headrace.models.digests import digest_of, stamps_of
from headrace.models.registry import Fault, Resolution
from headrace.runtimes.base import Artifact
from headrace.services.catalog import Catalog
from headrace.tensor import Datatype, Signature, TensorSpec

SIGNATURE = Signature((TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (-1,)),))


def card(name: str = "m", version: str = "1", *, loaded: bool = True) -> Card:
    return Card(
        name=name,
        version=version,
        runtime="python",
        platform="python" if loaded else "",
        signature=SIGNATURE if loaded else None,
        error=None if loaded else ErrorRecord(code="model_load_failed", message="it has no head"),
        entry="headrace.testing.models:echo",
        digest=digest_of(artifact(name, version)),
        files=stamps_of(artifact(name, version)),
    )


def artifact(name: str = "m", version: str = "1") -> Artifact:
    return Artifact(name, version, "python", None, "headrace.testing.models:echo")


def catalog(
    folder: Path, *cards: Card, required: list[Artifact] | None = None, faults: tuple[Fault, ...] = ()
) -> Catalog:
    book = CardBook(folder)
    for each in cards:
        book.write(each)
    found = Catalog(book, None if required is None else Resolution(required, list(faults)))
    found.refresh()
    return found


def test_A24_no_model_at_all_is_not_ready(tmp_path: Path) -> None:
    assert catalog(tmp_path).reasons() == ["no model is loaded"]
    assert catalog(tmp_path, required=[]).reasons() == ["no model is loaded"]


def test_A24_every_required_model_needs_the_card_of_a_load_that_went_well(tmp_path: Path) -> None:
    found = catalog(tmp_path, required=[artifact()])
    assert found.reasons() == ["model 'm' version 1: it is not loaded yet"]
    assert not found.model("m").ready
    book = CardBook(tmp_path)
    book.write(card(loaded=False))
    found.refresh()
    assert found.reasons() == ["model 'm' version 1: it has no head"]
    book.write(card())
    found.refresh()
    assert found.reasons() == []
    assert found.model("m").ready


def test_one_model_that_cannot_be_found_makes_the_service_not_ready_unless_some_are_enough(tmp_path: Path) -> None:
    CardBook(tmp_path).write(card())
    resolution = Resolution([], [Fault("x=nowhere", "x", ModelLoadFailed("there is no such file"))])
    strict = Catalog(CardBook(tmp_path), resolution)
    strict.refresh()
    assert strict.reasons() == ["model 'x': there is no such file"]


def test_the_highest_version_that_is_ready_is_picked_and_numbers_are_numbers(tmp_path: Path) -> None:
    found = catalog(tmp_path, card(version="2"), card(version="10"), card(version="11", loaded=False))
    assert found.model("m").version == "10"
    assert found.model("m", "11").reason == "it has no head"
    assert [state.version for state in found.models()] == ["2", "10", "11"]


def test_unknown_names_and_versions_are_told_apart_and_paths_are_not_repeated(tmp_path: Path) -> None:
    found = catalog(tmp_path, card())
    with pytest.raises(VersionNotFound) as version:
        found.model("m", "7")
    assert version.value.details == {"model": "m", "expected": ["1"]}
    with pytest.raises(ModelNotFound) as model:
        found.model("../secret")
    assert "secret" not in model.value.message
    assert model.value.details == {"expected": ["m"]}


def test_the_list_is_the_same_object_until_a_card_changes(tmp_path: Path) -> None:
    found = catalog(tmp_path, card())
    before = found.models()
    assert not found.refresh()
    assert found.models() is before
    CardBook(tmp_path).write(card(version="2"))
    assert found.refresh()
    assert [state.version for state in found.models()] == ["1", "2"]
