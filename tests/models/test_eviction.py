"""Several models under a budget that they do not all fit into, and reloading them while they are asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.clock import ManualClock
from headrace.errors import ModelUnavailable
from headrace.models.host import Hosted, ModelSettings
from headrace.models.memory import resident_bytes
from headrace.models.predictor import Predictor
from headrace.runtimes import Artifact
from headrace.tensor import InferAnswer
from models.kit import Told, host, predictor, python_model, request
from runtimes import onnx_files

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
WIDTH = 3500
#: Bytes of the weights of one model.
SIZE = WIDTH * WIDTH * 4


def artifact(folder: Path, name: str, *, size: int = WIDTH, seed: int = 0) -> Artifact:
    path = folder / name / "1" / "model.onnx"
    return Artifact(name, "1", "onnx", onnx_files.save(onnx_files.linear(WIDTH, size, seed), path), root=folder / name)


def ones(name: str) -> Any:
    return request(np.ones((1, WIDTH)), model=name)


async def measured(one: Artifact, runner: str) -> int:
    """Return what one of them takes: more than its weights, which onnxruntime also keeps in another order."""
    probe = host(settings=ModelSettings(runner=runner), apart=True)
    for _ in range(2):  # the library itself comes with the first
        await probe.load([one])
    size = probe.versions[one.name, "1"].memory_bytes
    await probe.close()
    return size


async def door_to(*artifacts: Artifact, told: Told | None = None, room_for: float = 2.6, **settings: Any) -> Predictor:
    budget = int(room_for * await measured(artifacts[0], settings.get("runner", "auto")))
    hosting = host(told, settings=ModelSettings(memory_bytes_max=budget, **settings), apart=True)
    await hosting.load(artifacts)
    return Predictor(hosting)


def states(door: Predictor) -> dict[str, str]:
    return {name: hosted.state for (name, _), hosted in door.host.versions.items()}


def hosted_of(door: Predictor, name: str) -> Hosted:
    return door.host.versions[name, "1"]


@pytest.mark.parametrize("runner", ["thread", "process"])
async def test_three_models_in_room_for_two_all_answer_and_what_goes_gives_its_memory_back(
    tmp_path: Path, runner: str
) -> None:
    told = Told()
    door = await door_to(*(artifact(tmp_path, name) for name in "abc"), told=told, runner=runner)
    # Loading the third evicted the one that was loaded first; it counts as ready all the same.
    assert states(door) == {"a": "evicted", "b": "ready", "c": "ready"}
    assert not door.ready() and all(state.ready and state.signature for state in door.models())
    expected = {}
    for name in "abcabc":
        answer = await door.submit(ones(name))
        expected.setdefault(name, answer.outputs["y"])
        assert answer.outputs["y"] == expected[name]
        resident = [each for each in door.host.versions.values() if each.state == "ready"]
        assert len(resident) == 2 and sum(each.memory_bytes for each in resident) <= door.host.budget
    assert told.counted("headrace_model_evictions_total", "a", "1") >= 2
    assert told.metrics.gauge("headrace_model_memory_bytes")("a", "1").value == 0
    before = resident_bytes()
    assert await door.host.evict("b", "1")
    if runner == "thread":
        assert before - resident_bytes() > 0.7 * SIZE
    assert told.log().count('"event":"model_evicted"') >= 3
    await door.close()


async def test_a_model_that_fits_alone_is_measured_near_its_size_and_leaves_nothing_behind(tmp_path: Path) -> None:
    door = await door_to(artifact(tmp_path, "warm up"))
    await door.host.unload("warm up", "1")
    before = resident_bytes()
    await door.host.load([artifact(tmp_path, "a")])
    loaded = resident_bytes()
    assert loaded - before > 0.7 * SIZE
    assert SIZE <= hosted_of(door, "a").memory_bytes < 3 * SIZE
    await door.host.unload("a", "1")
    assert loaded - resident_bytes() > 0.7 * SIZE
    await door.close()


async def test_the_least_recently_used_goes_and_the_pinned_stays(tmp_path: Path) -> None:
    door = await door_to(*(artifact(tmp_path, name) for name in "ab"), room_for=3.6, pinned=("a",))
    await door.host.load([artifact(tmp_path, "c")])
    await door.submit(ones("b"))
    await door.host.load([artifact(tmp_path, "d")])
    assert states(door) == {"a": "ready", "b": "ready", "c": "evicted", "d": "ready"}
    assert not await door.host.evict("a", "1")
    await door.close()


async def test_what_fits_nowhere_is_refused_with_the_numbers_and_disturbs_nobody(tmp_path: Path) -> None:
    door = await door_to(*(artifact(tmp_path, name) for name in "ab"), pinned=("a", "b/1"))
    await door.host.load([artifact(tmp_path, "c")])
    assert states(door) == {"a": "ready", "b": "ready", "c": "failed"}
    assert f"of {door.host.budget} there are" in hosted_of(door, "c").reason
    await door.submit(ones("a"))
    await door.close()


async def test_many_requests_to_an_evicted_model_load_it_once(tmp_path: Path) -> None:
    told = Told()
    door = await door_to(artifact(tmp_path, "a"), told=told)
    await door.host.evict("a", "1")
    answers = await asyncio.gather(*(door.submit(ones("a")) for _ in range(50)))
    assert len({answer.outputs["y"].array.tobytes() for answer in answers}) == 1
    assert told.log().count('"event":"model_loaded"') == 2
    await door.close()


async def test_who_gives_up_on_an_evicted_model_leaves_and_it_is_loaded_all_the_same(tmp_path: Path) -> None:
    door = await door_to(artifact(tmp_path, "a"))
    await door.host.evict("a", "1")
    waiting = door.submit(ones("a"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await waiting
    assert door.progress().waiting_rows == 0
    await door.submit(ones("a"))
    await door.close()


async def test_an_evicted_model_that_cannot_come_back_says_why_and_comes_back_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.models.host._AGAIN_S", 0.05)
    door = await door_to(artifact(tmp_path, "a"))
    path = hosted_of(door, "a").artifact.path
    assert path is not None
    content = path.read_bytes()
    await door.host.evict("a", "1")
    path.write_bytes(b"")
    with pytest.raises(ModelUnavailable, match="the file is empty"):
        await door.submit(ones("a"))
    with pytest.raises(ModelUnavailable, match="the file is empty"):
        door.submit(ones("a"))  # at once: it was tried only now
    assert "cannot be loaded again" in door.ready()[0]
    path.write_bytes(content)

    async def asked() -> InferAnswer | None:
        with contextlib.suppress(ModelUnavailable):
            return await door.submit(ones("a"))
        await asyncio.sleep(0.01)
        return None

    async with asyncio.timeout(30):
        while await asked() is None:
            pass
    assert not door.ready()
    await door.close()


async def test_a_model_that_changed_on_disk_while_it_was_evicted_is_asked_anew(tmp_path: Path) -> None:
    door = await door_to(artifact(tmp_path, "a"))
    await door.host.evict("a", "1")
    artifact(tmp_path, "a", size=10)
    with pytest.raises(ModelUnavailable, match="takes something else"):
        await door.submit(ones("a"))
    answer = await door.submit(ones("a"))
    assert answer.outputs["y"].shape == (1, 10)
    await door.close()


async def test_unloading_an_evicted_model_tells_those_who_wait(tmp_path: Path) -> None:
    door = await door_to(artifact(tmp_path, "a"))
    await door.host.evict("a", "1")
    waiting = door.submit(ones("a"))
    await door.host.unload("a", "1")
    with pytest.raises(ModelUnavailable):
        await waiting
    assert not door.models()
    await door.close()


async def test_three_models_that_are_always_busy_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.models.host._TURN_S", 0.1)
    door = await door_to(*(artifact(tmp_path, name) for name in "abc"), runner="thread")
    served = dict.fromkeys("abc", 0)

    async def call(name: str) -> None:
        while min(served.values()) < 5:
            await door.submit(ones(name))
            served[name] += 1

    async with asyncio.timeout(90):
        await asyncio.gather(*(call(name) for name in "aabbcc"))
    await door.close()


async def test_what_idles_goes_only_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    told = Told(clock)
    door = await door_to(*(artifact(tmp_path, name) for name in "abc"), told=told, room_for=9, idle_ttl_s=600)
    keeping = asyncio.create_task(door.host.keep())
    await clock.advance(601)
    assert states(door) == dict.fromkeys("abc", "ready"), "there is room for all of them"
    answer = asyncio.ensure_future(door.submit(ones("b")))
    await answer
    # Somebody else in the container took what there was; it gets better after one eviction.
    tight = [True, True, True]
    monkeypatch.setattr("headrace.models.host.is_tight", lambda: bool(tight and tight.pop()))
    door.host._clock = clock
    await until(lambda: states(door)["a"] == "evicted" and states(door)["c"] == "evicted", clock)
    await clock.advance(20)
    assert states(door)["b"] == "ready", "it was asked for a moment ago"
    keeping.cancel()
    await door.close()


async def until(happened: Callable[[], bool], clock: ManualClock) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await clock.advance(5)
            await asyncio.sleep(0.01)


async def test_nobody_is_evicted_in_the_middle_of_a_run_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.models.host._EVICT_S", 0.05)
    door = await predictor(python_model("slow"))
    running = door.submit(request([[0.5]], model="slow"))
    while door.progress().running_since_s is None:
        await asyncio.sleep(0)
    evicting = asyncio.ensure_future(door.host.evict("slow", "1"))
    await asyncio.sleep(0)
    waiting = door.submit(request([[0.0]], model="slow"))
    assert await evicting is False
    assert hosted_of(door, "slow").state == "ready"
    assert (await running).outputs["y"].shape == (await waiting).outputs["y"].shape
    await door.submit(request([[0.0]], model="slow"))
    await door.close()


async def test_what_came_during_an_eviction_is_answered_after_it() -> None:
    told = Told()
    door = await predictor(python_model("slow"), told=told)
    running = door.submit(request([[0.2]], model="slow"))
    while door.progress().running_since_s is None:
        await asyncio.sleep(0)
    evicting = asyncio.ensure_future(door.host.evict("slow", "1"))
    waiting = [door.submit(request([[0.0]], model="slow")) for _ in range(5)]
    assert await evicting is True
    await asyncio.gather(running, *waiting)
    assert told.log().count('"event":"model_loaded"') == 2
    await door.close()


# -- reloading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_for", [10.0, 1.5])
async def test_reloading_under_load_fails_no_request_also_where_there_is_no_room_for_both(
    tmp_path: Path, room_for: float
) -> None:
    told = Told()
    door = await door_to(artifact(tmp_path, "a"), told=told, room_for=room_for, runner="thread")
    stop = asyncio.Event()
    seen: list[bytes] = []

    async def call() -> None:
        while not stop.is_set():
            answer = await door.submit(ones("a"))
            seen.append(answer.outputs["y"].array[0, :4].round(2).tobytes())

    callers = [asyncio.create_task(call()) for _ in range(4)]
    for seed in (1, 2, 3):
        await door.host.load([artifact(tmp_path, "a", seed=seed)])
    last = (await door.submit(ones("a"))).outputs["y"].array[0, :4].round(2).tobytes()
    stop.set()
    await asyncio.gather(*callers)
    assert len(set(seen) | {last}) >= 2 and seen[-1] == last
    evictions = told.counted("headrace_model_evictions_total", "a", "1")
    assert evictions == (0 if room_for == 10 else 3)
    await door.close()


async def test_a_reload_that_fails_where_there_is_no_room_for_both_ends_with_a_reason(tmp_path: Path) -> None:
    door = await door_to(artifact(tmp_path, "a"), room_for=1.5)
    good = artifact(tmp_path, "a")
    assert good.path is not None
    content = good.path.read_bytes()
    good.path.write_bytes(content[:-20] + b"?" * 20)
    await door.host.load([good])
    assert states(door) == {"a": "evicted"}
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        await door.submit(ones("a"))
    good.path.write_bytes(content)
    await door.host.load([good])
    await door.submit(ones("a"))
    assert not door.ready()
    await door.close()
