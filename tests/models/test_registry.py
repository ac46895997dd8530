"""What a list of MODEL words means, and which entries of a folder are versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.models.registry import by_version, is_name, resolve
from runtimes import onnx_files


def model(path: Path) -> Path:
    return onnx_files.save(onnx_files.identity(), path)


def versions(folder: Path, *names: str) -> None:
    for name in names:
        model(folder / name / "model.onnx")


def found(spec: str, root: Path) -> list[tuple[str, str, str, str]]:
    resolution = resolve([spec], root)
    assert not resolution.faults
    return [(a.name, a.version, a.runtime, a.shown) for a in resolution.artifacts]


def reason(spec: str, root: Path) -> str:
    resolution = resolve([spec], root)
    assert not resolution.artifacts
    (fault,) = resolution.faults
    assert str(root) not in f"{fault.error} {fault.error.details}"
    return fault.error.message


# -- MODEL ---------------------------------------------------------------------------------------------------------


def test_a_bare_file_is_version_1_named_after_itself(tmp_path: Path) -> None:
    model(tmp_path / "echo.v2.onnx")
    assert found("echo.v2.onnx", tmp_path) == [("echo.v2", "1", "onnx", "echo.v2.onnx")]
    assert found(str(tmp_path / "echo.v2.onnx"), Path("/")) == [("echo.v2", "1", "onnx", "echo.v2.onnx")]


def test_a_name_goes_before_an_equals_sign(tmp_path: Path) -> None:
    model(tmp_path / "a=b" / "model.onnx")
    assert found("echo=a=b/model.onnx", tmp_path) == [("echo", "1", "onnx", "model.onnx")]
    assert found("./a=b/model.onnx", tmp_path) == [("model", "1", "onnx", "model.onnx")]


def test_a_folder_holds_versions_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    versions(tmp_path / "echo", "2", "10", "1")
    assert found("echo", tmp_path) == [
        ("echo", "1", "onnx", "1/model.onnx"),
        ("echo", "2", "onnx", "2/model.onnx"),
        ("echo", "10", "onnx", "10/model.onnx"),
    ]
    assert [name for name, *_ in found("other=echo/", tmp_path)] == ["other"] * 3


def test_one_version_of_a_folder_can_be_named_alone(tmp_path: Path) -> None:
    versions(tmp_path / "echo", "1", "2")
    assert found("echo/2", tmp_path) == [("echo", "2", "onnx", "2/model.onnx")]


def test_a_version_may_hold_a_model_by_another_name_if_it_is_the_only_one(tmp_path: Path) -> None:
    model(tmp_path / "echo" / "1" / "weights.onnx")
    assert found("echo", tmp_path)[0][3] == "1/weights.onnx"
    model(tmp_path / "echo" / "1" / "more.onnx")
    assert "it holds more than one model" in reason("echo", tmp_path)
    model(tmp_path / "echo" / "1" / "model.onnx")
    assert found("echo", tmp_path)[0][3] == "1/model.onnx"


def test_a_callable_is_named_after_itself(tmp_path: Path) -> None:
    assert found("python:pkg.models:Classifier", tmp_path) == [("Classifier", "1", "python", "pkg.models:Classifier")]
    assert found("mine=python:pkg:make.it", tmp_path) == [("mine", "1", "python", "pkg:make.it")]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("absent.onnx", "absent.onnx: there is no such file or folder"),
        ("absent", "absent: there is no such file or folder"),
        ("mine=", "a MODEL is PATH, NAME=PATH or python:package.module:callable"),
        ("a\0b", "a MODEL is"),
        ("weights.bin", "no runtime takes .bin files; known are ['.jit', '.onnx', '.pb', '.pt', '.pth']"),
        ("empty", "it holds no version"),
        ("hollow", "it holds no model, but ['readme.txt']"),
        ("python:pkg", "expected python:package.module:callable"),
        ("python:pkg:a-b", "expected python:package.module:callable"),
        ("s3://bucket/models", "a registry URL cannot be served yet"),
    ],
)
def test_what_cannot_be_found_says_what_was_expected(spec: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "1").mkdir(parents=True)
    (tmp_path / "hollow" / "1" / "readme.txt").write_text("")
    assert text in reason(spec, tmp_path)


def test_a20_one_fault_hides_neither_the_others_nor_what_is_good(tmp_path: Path) -> None:
    versions(tmp_path / "good", "1", "2")
    (tmp_path / "good" / "3").mkdir()
    resolution = resolve(["absent", "good", "python:x:y", "mine=nope.onnx"], tmp_path)
    assert [(a.name, a.version) for a in resolution.artifacts] == [("good", "1"), ("good", "2"), ("y", "1")]
    assert [(fault.spec, fault.name) for fault in resolution.faults] == [
        ("absent", ""),
        ("good/3", "good"),
        ("mine=nope.onnx", "mine"),
    ]


def test_the_same_version_twice_is_a_fault(tmp_path: Path) -> None:
    model(tmp_path / "a" / "model.onnx")
    model(tmp_path / "b" / "model.onnx")
    resolution = resolve(["a/model.onnx", "b/model.onnx"], tmp_path)
    assert len(resolution.artifacts) == 1
    assert "is given twice; name one of them" in resolution.faults[0].error.message


# -- versions ------------------------------------------------------------------------------------------------------


def test_a22_entries_that_are_not_versions_are_ignored_each_with_a_reason(tmp_path: Path) -> None:
    echo = tmp_path / "echo"
    versions(echo, "1", "2", "10", "v3", "0.1", "010", ".11", "model", "2.bak", "٣", "1 ")
    (echo / "12").write_text("a file")
    (echo / "13").symlink_to("nowhere")
    resolution = resolve(["echo"], tmp_path)
    assert [a.version for a in resolution.artifacts] == ["1", "2", "10"]
    assert not resolution.faults
    reasons = {ignored.entry: ignored.reason for ignored in resolution.ignored}
    assert set(reasons) == {"v3", "0.1", "010", ".11", "model", "2.bak", "٣", "1 ", "12", "13"}
    assert len(resolution.ignored) == len(reasons)
    assert "leading zeros" in reasons["010"]
    assert "file" in reasons["12"]
    assert "nowhere" in reasons["13"]


def test_a22_versions_are_compared_as_numbers() -> None:
    assert sorted(["10", "2", "1", "0", "beta", "1.0"], key=by_version) == ["0", "1", "2", "10", "1.0", "beta"]


# -- names ---------------------------------------------------------------------------------------------------------

BAD = [
    "../secret",
    "..%2fsecret",
    "%2e%2e",
    "/etc",
    "a/../../b",
    "echo\0",
    "x" * 129,
    "x" * 5000,
    "",
    ".",
    "..",
    "-a",
    "é",
]


@pytest.mark.parametrize("name", BAD)
def test_a23_a_name_with_path_parts_is_no_name(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("name", ["a", "CON", "a.b-c_D9", "9", "x" * 128])
def test_a23_an_ordinary_name_is_one(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", [name for name in BAD if "/" not in name and name])
def test_a23_a_bad_name_is_refused_and_not_echoed(name: str, tmp_path: Path) -> None:
    model(tmp_path / "m.onnx")
    text = reason(f"{name}=m.onnx", tmp_path)
    assert "a model's name is letters" in text
    assert len(name) < 3 or name not in text


def test_a23_a_file_whose_name_is_no_model_name_asks_for_one(tmp_path: Path) -> None:
    model(tmp_path / "my model.onnx")
    assert "Name it NAME=PATH" in reason("my model.onnx", tmp_path)
    assert found("mine=my model.onnx", tmp_path)[0][0] == "mine"


def test_a23_a_link_out_of_the_models_folder_is_refused_unless_allowed(tmp_path: Path) -> None:
    secret = model(tmp_path / "secret" / "model.onnx")
    (tmp_path / "echo" / "1").mkdir(parents=True)
    (tmp_path / "echo" / "1" / "model.onnx").symlink_to(secret)
    (tmp_path / "echo" / "2").symlink_to(secret.parent)
    resolution = resolve(["echo"], tmp_path)
    assert not resolution.artifacts
    assert len(resolution.faults) == 2
    assert all("leads out of the model's folder" in fault.error.message for fault in resolution.faults)
    assert len(resolve(["echo"], tmp_path, links=True).artifacts) == 2


def test_a23_links_inside_the_models_folder_are_fine(tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap: `1` leads to `..data/1`, and `..data` to a folder with a date in its name.
    echo = tmp_path / "echo"
    versions(echo / "..2026", "1")
    (echo / "..data").symlink_to("..2026")
    (echo / "1").symlink_to("..data/1")
    assert [a.version for a in resolve(["echo"], tmp_path).artifacts] == ["1"]


# -- files of other kinds ------------------------------------------------------------------------------------------


def saved_model(folder: Path) -> Path:
    (folder / "variables").mkdir(parents=True)
    for name in ("saved_model.pb", "fingerprint.pb", "variables/variables.index"):
        (folder / name).write_bytes(b"x")
    return folder


def test_endings_say_which_runtime(tmp_path: Path) -> None:
    for name, runtime in {"a.pt": "torchscript", "b.pth": "torchscript", "c.jit": "torchscript"}.items():
        (tmp_path / name).write_bytes(b"x")
        assert found(name, tmp_path) == [(name[0], "1", runtime, name)]
    (tmp_path / "d.pb").write_bytes(b"x")
    assert found("d.pb", tmp_path) == [("d", "1", "tensorflow", "d.pb")]


def test_a_saved_model_is_a_folder_alone_as_a_version_or_in_one(tmp_path: Path) -> None:
    saved_model(tmp_path / "digits")
    assert found("digits", tmp_path) == [("digits", "1", "tensorflow", "digits/saved_model.pb")]
    assert found("other=digits", tmp_path) == [("other", "1", "tensorflow", "digits/saved_model.pb")]
    saved_model(tmp_path / "served" / "1")
    saved_model(tmp_path / "served" / "2" / "model.savedmodel")
    assert found("served", tmp_path) == [
        ("served", "1", "tensorflow", "1/saved_model.pb"),
        ("served", "2", "tensorflow", "2/model.savedmodel/saved_model.pb"),
    ]
    assert found("served/1", tmp_path) == [("served", "1", "tensorflow", "1/saved_model.pb")]


def test_a_link_out_of_a_saved_model_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "digits")
    (tmp_path / "digits" / "assets").symlink_to(tmp_path)
    assert "a link that leads out of the model's folder" in reason("digits", tmp_path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("m.pkl", "a pickle runs whatever code it carries; export to ONNX"),
        ("m.joblib", "a pickle runs whatever code it carries; export to ONNX"),
        ("m.keras", "model.export(FOLDER)"),
        ("m.pt2", "torch.jit.trace or to ONNX"),
    ],
)
def test_what_is_never_taken_says_what_to_give_instead(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    assert text in reason(file, tmp_path)
