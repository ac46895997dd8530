"""Tiny real processes for the tests of the supervisor: `python family.py ROLE NAME DIARY`, and a parent of such.

Each writes what happens to it into the diary, one line at a time, so that order can be read off.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

from headrace.clock import SystemClock
from headrace.supervise import Child, Heartbeat, Supervisor


def note(diary: str, line: str) -> None:
    with Path(diary).open("a") as file:
        file.write(line + "\n")


async def child(role: str, name: str, diary: str) -> int:
    heart = Heartbeat(SystemClock())
    async with heart:
        note(diary, f"{name} started {os.getpid()}")
        if role == "broken":
            return 3
        if role == "refused":
            heart.failed("the port is taken", final=True)
            return 1
        if role == "brief":
            return 0
        heart.ready(pid=os.getpid())
        if role == "hung":
            threading.Event().wait()
        await heart.stopping.wait()
        note(diary, f"{name} asked")
        if role == "stubborn":
            await heart.hastened.wait()
            note(diary, f"{name} hastened")
        if role == "deaf":
            threading.Event().wait()
    note(diary, f"{name} stopped {heart.reason}")
    return 0


def make(role: str, name: str, diary: Path, *, service: str | None = None, grace_s: float = 10.0) -> Child:
    command = [sys.executable, __file__, role, name, str(diary)]
    return Child(name, service or name.rpartition("-")[0], command, grace_s=grace_s)


async def parent(diary: str, roles: list[str]) -> int:
    """Supervise a front, some runners and a back until a signal comes."""

    def say(line: str, /, **fields: object) -> None:
        note(diary, f"parent {line} {fields.get('child', '')}".strip())

    supervisor = Supervisor(("front", "runner", "back"), clock=SystemClock(), say=say, heartbeat_timeout_s=30)
    async with supervisor:
        for number, role in enumerate(roles):
            place = "front" if number == 0 else "back" if number == len(roles) - 1 else "runner"
            supervisor.start(make(role, f"{place}-{number}", Path(diary)))
        await supervisor.run()
    note(diary, f"parent ends: {supervisor.reason}")
    return 1 if supervisor.failure or supervisor.overdue else 0


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        sys.exit(asyncio.run(parent(sys.argv[2], sys.argv[3:])))
    sys.exit(asyncio.run(child(*sys.argv[1:4])))
