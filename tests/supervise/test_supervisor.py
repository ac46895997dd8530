"""A supervisor and real children: they die, hang, refuse to start and refuse to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.clock import SystemClock
from headrace.supervise import Child, Supervisor
from headrace.supervise import supervisor as module
from supervise import family

FAMILY = Path(family.__file__)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    path = tmp_path / "diary"
    path.touch()
    return path


class Told:
    """What the supervisor logged and passed on."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.words: list[dict[str, Any]] = []

    def say(self, line: str, /, **fields: Any) -> None:
        self.lines.append((line, fields))

    def named(self, line: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.lines if name == line]


def supervise(told: Told, *, timeout_s: float = 30.0) -> Supervisor:
    return Supervisor(
        ("front", "runner", "back"),
        clock=SystemClock(),
        say=told.say,
        heartbeat_timeout_s=timeout_s,
        on_word=lambda child, word: told.words.append(word),
    )


async def until(happened: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < end, f"{timeout_s} s passed without: {what}"
        await asyncio.sleep(0.01)
    return found


def pids(told: Told, name: str) -> list[int]:
    return [fields["pid"] for fields in told.named("child_started") if fields["child"] == name]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# -- dying ------------------------------------------------------------------------------------------------------


async def test_a_child_that_is_killed_after_it_was_ready_is_replaced_at_once(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        for count in range(1, 4):
            await until(lambda: supervisor.ready("runner") == 1, "ready")
            os.kill(pids(told, "runner-1")[-1], signal.SIGKILL)
            await until(lambda count=count: len(pids(told, "runner-1")) > count, "another one")
        await until(lambda: supervisor.ready("runner") == 1, "ready again")
    assert [fields["delay_s"] for fields in told.named("child_restarting")] == [0.0, 0.0, 0.0]
    assert {fields["reason"] for fields in told.named("child_died")} == {"SIGKILL"}
    assert supervisor.restarts == {"runner": 3}
    assert not any(is_alive(pid) for pid in pids(told, "runner-1"))


async def test_a_child_that_dies_on_every_start_is_given_up_loudly(
    diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.supervise.restarts._PAUSE_S_MAX", 0.01)
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("broken", "runner-1", diary))
        await asyncio.wait_for(supervisor.run(), 30)
    assert supervisor.failure == "runner: exit code 3"
    assert told.named("child_given_up") == [{"child": "runner-1", "deaths": 10, "reason": "exit code 3"}]
    assert len(pids(told, "runner-1")) == 10


async def test_one_slot_given_up_leaves_its_siblings_to_serve(diary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.supervise.restarts._PAUSE_S_MAX", 0.01)
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        supervisor.start(family.make("broken", "runner-2", diary))
        await until(lambda: told.named("child_given_up"), "given up")
        assert supervisor.ready("runner") == 1
        assert not supervisor.stopping.is_set()
        assert supervisor.given_up("runner") == ["exit code 3"]


async def test_a_cause_that_will_not_heal_ends_everything_at_the_first_try(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        supervisor.start(family.make("refused", "front-1", diary))
        await asyncio.wait_for(supervisor.run(), 30)
    assert supervisor.failure == "front: the port is taken"
    assert len(pids(told, "front-1")) == 1
    assert not is_alive(pids(told, "runner-1")[0])


async def test_what_cannot_be_started_at_all_is_said_and_given_up(tmp_path: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(Child("runner-1", "runner", [str(tmp_path / "nothing")]))
        await asyncio.wait_for(supervisor.run(), 30)
    assert supervisor.failure == "runner: it cannot be started: No such file or directory"


async def test_a_child_that_runs_once_is_waited_for_and_not_started_again(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        assert await supervisor.run_once(family.make("brief", "before-1", diary)) == (0, "exit code 0")
        assert await supervisor.run_once(family.make("refused", "before-1", diary)) == (1, "the port is taken")
        assert not supervisor.stopping.is_set()
    assert len(pids(told, "before-1")) == 2


async def test_a_stop_ends_a_child_that_runs_once(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        once = asyncio.create_task(supervisor.run_once(family.make("good", "before-1", diary)))
        await until(lambda: told.named("child_ready"), "ready")
        supervisor.stop("enough")
        assert await asyncio.wait_for(once, 30) == (0, "exit code 0")


# -- hanging ----------------------------------------------------------------------------------------------------


async def test_a_stopped_process_is_killed_and_replaced(diary: Path) -> None:
    told = Told()
    async with supervise(told, timeout_s=2.0) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        await until(lambda: supervisor.ready("runner") == 1, "ready")
        os.kill(pids(told, "runner-1")[0], signal.SIGSTOP)
        await until(lambda: len(pids(told, "runner-1")) == 2, "another one")
        await until(lambda: supervisor.ready("runner") == 1, "ready again")
    assert told.named("child_hung")[0]["pid"] == pids(told, "runner-1")[0]
    assert supervisor.overdue == 0


async def test_a_process_whose_loop_hangs_is_killed_though_it_lives(diary: Path) -> None:
    told = Told()
    async with supervise(told, timeout_s=2.0) as supervisor:
        supervisor.start(family.make("hung", "runner-1", diary))
        await until(lambda: len(pids(told, "runner-1")) == 2, "another one")
        assert told.named("child_hung")
        supervisor.stop("enough")
        supervisor._hasten("enough")


async def test_the_silence_of_children_does_not_count_while_we_did_not_run_ourselves(diary: Path) -> None:
    told = Told()
    async with supervise(told, timeout_s=2.0) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        await until(lambda: supervisor.ready("runner") == 1, "ready")
        os.kill(pids(told, "runner-1")[0], signal.SIGSTOP)
        time.sleep(2.5)  # the whole process, loop and all, as Ctrl-Z would do it
        await asyncio.sleep(module._TICK_S * 2)
        assert not told.named("child_hung")
        os.kill(pids(told, "runner-1")[0], signal.SIGCONT)


# -- stopping ---------------------------------------------------------------------------------------------------


async def test_services_stop_in_order_each_when_the_one_before_is_gone(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        for name in ("back-1", "runner-1", "runner-2", "front-1"):
            supervisor.start(family.make("good", name, diary))
        await until(lambda: len(told.named("child_ready")) == 4, "all ready")
        supervisor.stop("SIGTERM")
    lines = diary.read_text().splitlines()[4:]
    names = [line.split()[0] for line in lines]
    assert names[:2] == ["front-1"] * 2
    assert set(names[2:6]) == {"runner-1", "runner-2"}
    assert names[6:] == ["back-1"] * 2
    assert lines[1] == "front-1 stopped SIGTERM"


async def test_what_stops_later_is_still_replaced_while_what_stops_first_is_finishing(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("stubborn", "front-1", diary))
        supervisor.start(family.make("good", "runner-1", diary))
        await until(lambda: len(told.named("child_ready")) == 2, "all ready")
        stopping = asyncio.create_task(supervisor._stop_in_order())
        await until(lambda: "front-1 asked" in diary.read_text(), "asked")
        os.kill(pids(told, "runner-1")[0], signal.SIGKILL)
        await until(lambda: len(told.named("child_ready")) == 3, "another runner")
        supervisor._hasten("enough")
        await stopping
    assert "front-1 hastened" in diary.read_text()


async def test_a_child_that_does_not_stop_in_its_time_is_killed_and_the_others_still_stop(
    diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MARGIN_S", 0.1)
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("deaf", "front-1", diary, grace_s=0.1))
        supervisor.start(family.make("good", "back-1", diary))
        await until(lambda: len(told.named("child_ready")) == 2, "all ready")
    assert supervisor.overdue == 1
    assert "back-1 stopped" in diary.read_text()


async def test_a_signal_to_one_child_alone_gets_it_replaced_in_order(diary: Path) -> None:
    told = Told()
    async with supervise(told) as supervisor:
        supervisor.start(family.make("good", "runner-1", diary))
        await until(lambda: supervisor.ready("runner") == 1, "ready")
        os.kill(pids(told, "runner-1")[0], signal.SIGTERM)
        await until(lambda: len(told.named("child_ready")) == 2, "another one")
    assert "runner-1 stopped SIGTERM" in diary.read_text()
    assert told.named("child_died")[0]["reason"] == "exit code 0"


# -- a real parent ----------------------------------------------------------------------------------------------


@pytest.fixture
def new_parent(diary: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def new(*roles: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(FAMILY), "parent", str(diary), *roles]
        made.append(subprocess.Popen(command, start_new_session=True))
        return made[-1]

    yield new
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


async def ready(diary: Path, count: int) -> list[int]:
    """Wait until so many children are ready; return the pids of all that were started."""
    await until(lambda: diary.read_text().count("child_ready") >= count, f"{count} ready")
    return [int(line.split()[2]) for line in diary.read_text().splitlines() if line.split()[1] == "started"]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_to_the_whole_group_still_stops_in_order(
    diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]], which: signal.Signals
) -> None:
    process = new_parent("good", "good", "good", "good")
    await ready(diary, 4)
    os.killpg(process.pid, which)
    assert await asyncio.to_thread(process.wait, 30) == 0
    stopped = [line.split()[0] for line in diary.read_text().splitlines() if " stopped " in line]
    assert (stopped[0], set(stopped[1:3]), stopped[3]) == ("front-0", {"runner-1", "runner-2"}, "back-3")
    assert diary.read_text().splitlines()[-1] == f"parent ends: {which.name}"


async def test_a_signal_to_the_whole_group_during_the_start_ends_all(
    diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = new_parent("good", "good", "good")
    await until(lambda: diary.read_text().count("child_started") == 3, "started")
    os.killpg(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_a_second_signal_hastens(diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = new_parent("stubborn", "good", "deaf")
    family_pids = await ready(diary, 3)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # the same wish: wrappers signal a process and its group
    await until(lambda: "front-0 asked" in diary.read_text(), "asked")
    await asyncio.sleep(module._SAME_S)
    assert "hastened" not in diary.read_text()
    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait, 30) == 1  # somebody had to be killed
    assert "front-0 hastened" in diary.read_text()
    assert not any(is_alive(pid) for pid in family_pids)


async def test_children_end_when_their_supervisor_is_killed_even_one_that_hangs(
    diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = new_parent("good", "hung", "good")
    family_pids = await ready(diary, 3)
    process.kill()
    process.wait(10)
    await until(lambda: not any(is_alive(pid) for pid in family_pids), "all gone")
    assert "front-0 stopped the supervisor has died" in diary.read_text()


async def test_children_stay_in_the_session_and_the_group_of_their_parent(
    diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = new_parent("good", "good", "good")
    for pid in await ready(diary, 3):
        assert os.getsid(pid) == os.getpgid(pid) == process.pid


async def test_children_inherit_nothing_of_each_other(
    diary: Path, new_parent: Callable[..., subprocess.Popen[bytes]]
) -> None:
    new_parent("good", "good", "good")
    sockets = []
    for pid in await ready(diary, 3):
        links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        sockets += [{link for link in links if link.startswith("socket:")}]
    assert all(sockets)
    assert not (sockets[0] & sockets[1] or sockets[0] & sockets[2] or sockets[1] & sockets[2])
