"""The one door: which version answers, what is refused before it waits, and what is ready when."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import (
    DtypeMismatch,
    MissingInput,
    ModelFailed,
    ModelNotFound,
    ModelUnavailable,
    ShapeMismatch,
    UnknownInput,
    UnknownOutput,
    VersionNotFound,
)
from headrace.models.batcher import BatchSettings
from headrace.models.cards import CardBook
from headrace.models.host import ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import resolve
from headrace.runtimes import Artifact
from headrace.telemetry.trace import Recorder, Tracer
from headrace.tensor import InferAnswer, Tensor
from models.kit import Told, host, predictor, python_model, request
from runtimes import onnx_files

DATA = Path(__file__).parents[1] / "data"


def got(answer: InferAnswer) -> Any:
    return answer.outputs["y"].array.tolist()


def onnx(folder: Path, version: str, seed: int = 0, name: str = "echo") -> Artifact:
    path = onnx_files.save(onnx_files.linear(seed=seed), folder / name / version / "model.onnx")
    return Artifact(name, version, "onnx", path, root=folder / name)


# -- devices -------------------------------------------------------------------------------------------------------


async def test_a_device_that_is_not_there_is_a_model_that_failed_to_load() -> None:
    (artifact,) = resolve([str(DATA / "iris_logreg.onnx")]).artifacts
    door = await predictor(artifact, settings=ModelSettings(device="cuda:99"))
    with pytest.raises(ModelUnavailable, match=r"it shall run on cuda:99, and there is only cpu"):
        door.pick("iris_logreg")


def test_a_device_has_a_name_that_we_know() -> None:
    for good in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"):
        assert list(ModelSettings(device=good).faults()) == []
    for bad in ("gpu", "cuda:", "cuda:-1", "CPU", ""):
        assert list(ModelSettings(device=bad).faults()) == [("device", "wanted auto, cpu, cuda or cuda:N")]


# -- answering -----------------------------------------------------------------------------------------------------


async def test_a_real_model_answers() -> None:
    (artifact,) = resolve([str(DATA / "iris_logreg.onnx")]).artifacts
    door = await predictor(artifact)
    asked = request([[5.8, 2.8, 5.1, 2.4]], model="iris_logreg", id="7")
    asked.inputs = {"X": asked.inputs["x"]}
    answer = await door.submit(asked)
    assert (answer.model, answer.version, answer.id) == ("iris_logreg", "1", "7")
    assert list(answer.outputs) == ["label", "probabilities"]
    assert answer.outputs["label"].array.tolist() == [2]
    await door.close()


FIXTURES: list[tuple[str, Any, Any]] = [
    ("echo", np.array([[1, 2, 3]], np.float32), [[1, 2, 3]]),
    ("echo64", np.array([2**53 + 1, -(2**63)]), [2**53 + 1, -(2**63)]),
    ("ids", np.array([2**64 - 1], np.uint64), [2**64 - 1]),
    ("text", np.array([b"a\0", b"\xff"], object), [b"a\0", b"\xff"]),
    ("label", np.array([[2, 1], [1, 2]], np.float32), ["crème".encode(), "猫🐈".encode()]),
    ("slow", np.array([[0.01]], np.float32), [[np.float32(0.01)]]),
    ("neg", np.array([[1, 2, 3]], np.float32), [[1, 2, 3]]),
    ("kill", np.array([[665.0]], np.float32), [[665]]),
]


@pytest.mark.parametrize(("name", "given", "expected"), FIXTURES, ids=[name for name, *_ in FIXTURES])
async def test_the_fixture_models_do_what_they_say(name: str, given: Any, expected: Any) -> None:
    door = await predictor(python_model(name))
    assert not door.ready()
    asked = request([[0]], model=name)
    asked.inputs = {"x": Tensor.of(given)}
    assert got(await door.submit(asked)) == expected
    await door.close()


async def test_a1_the_fixture_model_div_keeps_infinity_and_nan() -> None:
    door = await predictor(python_model("div"))
    answer = await door.submit(request([[1, 0, -1]], model="div"))
    values = answer.outputs["y"].array[0]
    assert (values[0], values[2]) == (np.inf, -np.inf) and np.isnan(values[1])
    await door.close()


async def test_a12_a_failing_python_model_fails_only_for_the_bad_caller() -> None:
    told = Told()
    door = await predictor(python_model("neg"), told=told)
    waiting = [door.submit(request([[-1 if n == 3 else n, 0, 0]], model="neg")) for n in range(8)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[3], ModelFailed) and "ValueError: a value is negative" in results[3].message
    assert [got(r) for n, r in enumerate(results) if n != 3] == [[[n, 0, 0]] for n in range(8) if n != 3]
    assert "models.py" in told.log(), "the traceback belongs in the log"
    await door.close()


@pytest.mark.parametrize("name", ["echo", "digits_mlp"])
async def test_a13_two_thousand_concurrent_callers_through_the_door(name: str) -> None:
    real = name == "digits_mlp"
    (artifact,) = resolve([str(DATA / f"{name}.onnx")]).artifacts if real else [python_model(name)]
    door = await predictor(artifact)
    rng = np.random.default_rng(13)
    width, key = (64, "X") if real else (3, "x")
    clients = [rng.uniform(0, 16, (int(rng.integers(1, 6)), width)).astype(np.float32) for _ in range(2000)]
    hosted = door.pick(name)
    assert hosted.runtime is not None
    output = "probabilities" if real else "y"
    expected = [hosted.runtime.run({key: Tensor.of(rows)}, [output])[output].array for rows in clients]

    async def call(number: int) -> None:
        asked = request(clients[number], model=name, id=str(number), outputs=[output])
        asked.inputs = {key: asked.inputs["x"]}
        answer = await door.submit(asked)
        assert answer.id == str(number)
        assert list(answer.outputs) == [output]
        assert np.allclose(answer.outputs[output].array, expected[number], atol=1e-6)

    await asyncio.gather(*(call(number) for number in range(2000)))
    await door.close()


async def test_a14_impatient_callers_of_a_slow_model_leave_no_trace() -> None:
    rng = random.Random(14)
    door = await predictor(python_model("slow"))

    async def impatient() -> None:
        try:
            async with asyncio.timeout(rng.random() / 4):
                await door.submit(request([[0.2]], model="slow"))
        except TimeoutError:
            pass

    await asyncio.gather(*(impatient() for _ in range(500)))
    answers = await asyncio.gather(*(door.submit(request([[0.0]], model="slow")) for _ in range(50)))
    assert [got(answer) for answer in answers] == [[[0.0]]] * 50
    assert door.progress().waiting_rows == 0 and door.progress().running_since_s is None
    await door.close()


# -- refusing ------------------------------------------------------------------------------------------------------


async def test_a5_names_datatypes_and_shapes_are_checked_before_anything_waits() -> None:
    door = await predictor(python_model("echo"))
    good = request([[1, 2, 3]], model="echo")

    def refused(kind: type[Exception], inputs: dict[str, Tensor], outputs: Sequence[str] | None = None) -> Any:
        asked = request([[1, 2, 3]], model="echo", outputs=outputs)
        asked.inputs = inputs
        with pytest.raises(kind) as caught:
            door.submit(asked)
        return caught.value.details  # type: ignore[attr-defined]

    x = good.inputs["x"]
    assert refused(MissingInput, {})["expected"] == ["x"]
    assert refused(UnknownInput, {"x": x, "z": x})["input"] == "z"
    assert refused(DtypeMismatch, {"x": Tensor.of(np.zeros((1, 3)))})["expected"] == "FP32"
    assert refused(ShapeMismatch, {"x": Tensor.of(np.zeros((1, 4), np.float32))})["actual"] == [1, 4]
    assert refused(ShapeMismatch, {"x": Tensor.of(np.zeros(3, np.float32))})["actual"] == [3]
    assert refused(UnknownOutput, {"x": x}, ["y", "scores_typo"])["expected"] == ["y"]
    assert door.progress().waiting_rows == 0
    await door.close()


async def test_unknown_models_and_versions_are_told_what_there_is(tmp_path: Path) -> None:
    door = await predictor(onnx(tmp_path, "2"), onnx(tmp_path, "10"))
    with pytest.raises(ModelNotFound) as caught:
        door.submit(request([[1, 2, 3]], model="absent"))
    assert caught.value.details == {"expected": ["echo"]}
    with pytest.raises(VersionNotFound) as missing:
        door.pick("echo", "3")
    assert missing.value.details == {"model": "echo", "expected": ["2", "10"]}
    await door.close()


@pytest.mark.parametrize("name", ["../secret", "..%2fsecret", "/etc", "echo\0", "x" * 5000])
async def test_a23_a_name_with_path_parts_is_not_found_and_not_echoed(name: str) -> None:
    door = await predictor(python_model("echo"))
    for call in (lambda: door.pick(name), lambda: door.pick("echo", name)):
        with pytest.raises((ModelNotFound, VersionNotFound)) as caught:
            call()
        assert name not in f"{caught.value.message}{caught.value.details}"
    await door.close()


# -- versions ------------------------------------------------------------------------------------------------------


async def test_the_highest_version_that_is_ready_answers_unless_one_is_named(tmp_path: Path) -> None:
    broken = onnx(tmp_path, "11")
    assert broken.path is not None
    broken.path.write_bytes(b"")
    door = await predictor(onnx(tmp_path, "2", seed=2), onnx(tmp_path, "10", seed=10), broken)
    asked = request([[1, 2, 3]], model="echo")
    assert (await door.submit(asked)).version == "10"
    asked.version = "2"
    assert (await door.submit(asked)).version == "2"
    asked.version = "11"
    with pytest.raises(ModelUnavailable, match="the file is empty"):
        door.submit(asked)
    await door.close()


async def test_loading_a_version_again_replaces_it_once_the_new_one_is_warm(tmp_path: Path) -> None:
    door = await predictor(onnx(tmp_path, "1", seed=1))
    asked = request([[1, 2, 3]], model="echo")
    old = door.pick("echo")
    before = await door.submit(asked)
    await door.host.load([onnx(tmp_path, "1", seed=2)])
    after = await door.submit(asked)
    assert after.outputs["y"] != before.outputs["y"]
    assert old.state == "unloaded"
    await door.close()


async def test_a20_a_later_failed_load_never_disturbs_what_serves(tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    door = await predictor(onnx(tmp_path, "1"), book=book)
    asked = request([[1, 2, 3]], model="echo")
    before = await door.submit(asked)
    bad = onnx(tmp_path, "1")
    assert bad.path is not None
    bad.path.write_bytes(b"")
    await door.host.load([bad, Artifact("other", "1", "onnx", tmp_path / "absent.onnx")])
    assert (await door.submit(asked)).outputs["y"] == before.outputs["y"]
    assert [state.ready for state in door.models()] == [True, False]
    book.refresh()
    assert book.cards()["echo", "1"].error is None
    await door.close()


async def test_an_unloaded_version_finishes_what_it_has_and_is_gone() -> None:
    door = await predictor(python_model("slow"), python_model("echo"))
    waiting = door.submit(request([[0.05]], model="slow"))
    await door.host.unload("slow", "1")
    assert got(await waiting) == [[np.float32(0.05)]]
    with pytest.raises(ModelNotFound):
        door.pick("slow")
    await door.host.unload("slow", "1")
    assert [state.name for state in door.models()] == ["echo"]
    await door.close()


# -- ready ---------------------------------------------------------------------------------------------------------


def broken_models(folder: Path) -> list[Artifact]:
    module = folder / "headrace_made_up_broken.py"
    module.write_text("raise RuntimeError('bad config')")
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "absent.onnx").unlink(missing_ok=True)
    return [
        Artifact("empty", "1", "onnx", folder / "empty.onnx"),
        Artifact("config", "1", "python", None, "headrace_made_up_broken:model", root=folder),
        Artifact("absent", "1", "onnx", folder / "absent.onnx"),
    ]


async def test_a20_two_good_models_serve_beside_three_broken_ones_that_say_why(tmp_path: Path) -> None:
    told = Told()
    door = await predictor(*broken_models(tmp_path), python_model("echo"), onnx(tmp_path, "1", name="x"), told=told)
    states = {state.name: state for state in door.models()}
    assert {name for name, state in states.items() if state.ready} == {"echo", "x"}
    assert "the file is empty" in states["empty"].reason
    assert "RuntimeError: bad config" in states["config"].reason
    assert "there is no such file" in states["absent"].reason
    assert all(str(tmp_path) not in state.reason for state in states.values())
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    for name in ("empty", "config", "absent"):
        with pytest.raises(ModelUnavailable) as caught:
            door.submit(request([[1, 2, 3]], model=name))
        assert caught.value.details["reason"] == states[name].reason
    assert told.log().count('"event":"model_load_failed"') == 3
    assert told.metrics.gauge("headrace_model_ready")("echo", "1").value == 1
    assert told.metrics.gauge("headrace_model_ready")("empty", "1").value == 0
    await door.close()
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("require_all", [True, False])
async def test_a20_whether_a_broken_model_makes_the_service_not_ready_is_a_setting(
    require_all: bool, tmp_path: Path
) -> None:
    settings = ModelSettings(require_all=require_all)
    broken = Artifact("absent", "1", "onnx", tmp_path / "absent.onnx")
    door = await predictor(broken, python_model("echo"), settings=settings)
    reasons = door.ready()
    assert bool(reasons) is require_all
    if require_all:
        assert len(reasons) == 1 and "'absent'" in reasons[0] and "no such file" in reasons[0]
    await door.close()


@pytest.mark.parametrize("require_all", [True, False])
async def test_a24_no_model_and_only_broken_ones_are_not_ready(require_all: bool, tmp_path: Path) -> None:
    settings = ModelSettings(require_all=require_all)
    empty = await predictor(settings=settings)
    assert empty.ready() == ["no model is loaded"]
    door = await predictor(Artifact("absent", "1", "onnx", tmp_path / "absent.onnx"), settings=settings)
    assert len(door.ready()) == 1


LOADING = threading.Event()
ENTERED = threading.Event()


@pytest.mark.parametrize("require_all", [True, False])
async def test_a24_a_model_that_is_loading_is_not_ready_and_says_so(
    require_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace_made_up_slow.py").write_text(
        "import models.test_predictor as test\ntest.ENTERED.set()\nassert test.LOADING.wait(30)\n"
        "from headrace.testing.models import echo\n"
    )
    import models.test_predictor as this

    this.LOADING.clear()
    this.ENTERED.clear()
    monkeypatch.delitem(sys.modules, "headrace_made_up_slow", raising=False)
    hosting = host(settings=ModelSettings(require_all=require_all))
    door = Predictor(hosting)
    slow = Artifact("slow", "1", "python", None, "headrace_made_up_slow:echo", root=tmp_path)
    loading = asyncio.ensure_future(hosting.load([python_model("echo"), slow]))
    assert await asyncio.to_thread(this.ENTERED.wait, 30)
    states = {state.name: state for state in door.models()}
    assert states["echo"].ready and not states["slow"].ready
    assert door.ready() == ["model 'slow' version 1: it is loading"]
    with pytest.raises(ModelUnavailable, match="it is loading"):
        door.submit(request([[1, 2, 3]], model="slow"))
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    this.LOADING.set()
    await loading
    assert not door.ready()
    await door.close()
    assert {reason.rpartition(" ")[2] for reason in door.ready()} == {"unloaded"}
    sys.path.remove(str(tmp_path))


async def test_the_same_list_of_models_is_returned_until_one_changes(tmp_path: Path) -> None:
    door = await predictor(python_model("echo"))
    first = door.models()
    assert door.models() is first
    assert first[0].platform == "python" and first[0].signature is not None
    assert first[0].updated_at_ms is not None
    await door.host.load([onnx(tmp_path, "1", name="another")])
    assert [state.name for state in door.models()] == ["another", "echo"]
    await door.close()


# -- hosting -------------------------------------------------------------------------------------------------------


async def test_a_card_is_written_before_a_version_is_ready(tmp_path: Path) -> None:
    book = CardBook(tmp_path / "data")
    good = onnx(tmp_path, "1")
    bad = Artifact("bad", "1", "onnx", tmp_path / "absent.onnx")
    door = await predictor(good, bad, python_model("echo", "py"), book=book)
    reader = CardBook(tmp_path / "data")
    reader.refresh()
    card = reader.current(good)
    assert card is not None and card.platform == "onnx_onnxv1"
    assert card.signature == door.pick("echo").card.signature  # type: ignore[union-attr]
    failed = reader.current(bad)
    assert failed is not None and "no such file" in failed.reason and failed.signature is None
    assert reader.current(python_model("echo", "py")) is not None
    await door.close()


async def test_tiny_models_run_inline_slow_and_python_ones_on_a_thread(tmp_path: Path) -> None:
    tiny = onnx(tmp_path, "1", name="tiny")
    heavy = Artifact("heavy", "1", "onnx", onnx_files.save(onnx_files.linear(1500, 3000), tmp_path / "heavy.onnx"))
    door = await predictor(tiny, heavy, python_model("echo"))
    kinds = {name: door.pick(name).batcher.runner for name in ("tiny", "heavy", "echo")}  # type: ignore[union-attr]
    assert kinds == {"tiny": "inline", "heavy": "thread", "echo": "thread"}
    await door.close()


@pytest.mark.parametrize("kind", ["inline", "thread"])
async def test_the_runner_can_be_set(kind: str) -> None:
    door = await predictor(python_model("echo"), settings=ModelSettings(runner=kind))
    assert door.pick("echo").batcher.runner == kind  # type: ignore[union-attr]
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    await door.close()


async def test_several_threads_run_only_what_allows_it(tmp_path: Path) -> None:
    (tmp_path / "headrace_made_up_lonely.py").write_text(
        "import headrace, threading\n"
        "inside = threading.Lock()\n"
        "@headrace.model(inputs={'x': 'FP32[-1,3]'}, outputs={'y': 'FP32[-1,3]'})\n"
        "def call(inputs):\n"
        "    assert inside.acquire(blocking=False), 'two at once'\n"
        "    threading.Event().wait(0.002)\n"
        "    inside.release()\n"
        "    return inputs['x']\n"
    )
    lonely = Artifact("lonely", "1", "python", None, "headrace_made_up_lonely:call", root=tmp_path)
    door = await predictor(lonely, settings=ModelSettings(runners=4), batch=BatchSettings(size_max=1))
    await asyncio.gather(*(door.submit(request([[1, 2, 3]], model="lonely")) for _ in range(20)))
    await door.close()
    sys.path.remove(str(tmp_path))


async def test_a19_threads_are_shared_among_models_and_the_numbers_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.models.host.cpu_quota", lambda: 8.0)
    told = Told()
    door = await predictor(onnx(tmp_path, "1", name="a"), onnx(tmp_path, "1", name="b"), told=told, workers=2)
    assert told.log().count('"threads":2') == 2
    await door.close()
    told = Told()
    door = await predictor(onnx(tmp_path, "1"), told=told, settings=ModelSettings(threads=3))
    assert '"threads":3' in told.log()
    await door.close()


async def test_loading_is_a_span_and_a_line() -> None:
    recorder, told = Recorder(), Told()
    door = await predictor(
        python_model("echo"), python_model("absent"), told=told, tracer=Tracer(told.clock, [recorder])
    )
    good, bad = recorder.named("model_loaded")
    assert (good.attributes["model"], good.error) == ("echo", None)
    assert (bad.attributes["model"], bad.error) == ("absent", "model_load_failed")
    assert '"event":"model_loaded"' in told.log()
    await door.close()


async def test_closing_is_bounded_by_its_timeout_and_tells_those_who_wait() -> None:
    door = await predictor(python_model("slow"))
    running = door.submit(request([[0.3]], model="slow"))
    while door.progress().running_since_s is None:
        await asyncio.sleep(0)
    waiting = door.submit(request([[0.0]], model="slow"))
    await door.close(timeout_s=0.01)
    for pending in (running, waiting):
        with pytest.raises(ModelUnavailable):
            await pending
    with pytest.raises(ModelUnavailable):
        door.submit(request([[0.0]], model="slow"))
