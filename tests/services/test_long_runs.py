from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.brokers import open_broker
from headrace.clock import SystemClock
from services.kit import ENGINES, FunctionRuntime, Hands, road, until

QUICK = {"claim_s": 0.4, "run_s_max": 60.0}


class Contender:
    """Another process on the same topic, as far as that can be had in this one: its own thread, loop and hands."""

    def __init__(self, folder: Path, begin: threading.Event) -> None:
        self._begin = begin
        self.stolen: list[str] = []
        self.looks = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._steal()))

    async def _steal(self) -> None:
        broker = open_broker(f"sqlite:///{self._folder}/headrace.db", clock=SystemClock())
        await broker.open()
        self._begin.wait()
        while not self._ended.is_set():
            for alone in (True, False):
                got = await broker.claim(["neg"], count_max=10, bytes_max=1 << 20, claim_ms=60_000, alone=alone)
                self.stolen += [claim.message.id for claim in got.claims]
            self.looks += 1
            await asyncio.sleep(0.05)
        await broker.close()

    def __enter__(self) -> Contender:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("thread", [False, True], ids=["inline", "thread"])
async def test_A30_work_of_four_claim_times_runs_once_also_where_it_blocks_the_loop(
    thread: bool, tmp_path: Path
) -> None:
    async with road("sqlite", tmp_path, inference=QUICK) as here:
        began = threading.Event()

        def slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            began.set()
            threading.Event().wait(4 * QUICK["claim_s"])
            return x

        runtime = FunctionRuntime(slow)
        with Contender(tmp_path, began) as contender:
            id = await here.submit(1.0)
            here.inference(runtime, thread=thread)
            result = await here.result(id)
            await here.drained()
        assert contender.looks > 3
        assert contender.stolen == []
        assert (result.succeeded, result.attempts, len(runtime.calls)) == (True, 1, 1)


@pytest.mark.parametrize("engine", ENGINES)
async def test_A30_a_run_beyond_its_limit_is_tried_alone_and_then_fails_with_a_reason(
    engine: str, tmp_path: Path
) -> None:
    """One of four hangs. Nobody knows who, so all are suspects; alone, the one that hangs fails."""
    async with road(engine, tmp_path, inference={"claim_s": 0.4, "run_s_max": 0.5}) as here:
        overruns: list[int] = []
        hands = Hands(here.clock)
        here.consumer(hands, on_overrun=lambda: overruns.append(1))
        # Some quick ones first, so that the process takes several at a time.
        for n in range(8):
            await here.submit(float(n))
        await until(lambda: _answer_all(hands) and len(hands.seen) >= 8, "eight answers")
        ids = [await here.submit(float(n)) for n in range(4)]
        await until(lambda: len(hands.claims) >= 2, "company")
        hanging = hands.claims[0].message.id

        async def work() -> bool:
            for claim in list(hands.claims):
                if claim.claims_alone and claim.message.id != hanging:
                    hands.answer(claim)
            return len(await here.store.present(ids)) == 4

        await until(work, "four results")
        results = await here.store.get(ids)
        assert [id for id in ids if not results[id].succeeded] == [hanging]
        error = results[hanging].error
        assert error is not None
        assert (error.code, error.details) == ("model_failed", {"run_s_max": 0.5})
        assert await here.store.dead_letter(hanging) is not None
        assert len(overruns) >= 2
        await here.drained()


def _answer_all(hands: Hands) -> bool:
    for claim in list(hands.claims):
        hands.answer(claim)
    return True


async def test_what_waits_behind_a_hanging_run_is_given_back_uncounted(tmp_path: Path) -> None:
    async with road("memory", tmp_path, inference={"claim_s": 0.4, "run_s_max": 0.5}) as here:
        hands = Hands(here.clock)
        hands.started = False
        id = await here.submit(1.0)
        here.consumer(hands)
        await until(lambda: len(hands.seen) >= 2, "a second claim", 30)
        assert [(claim.message.id, claim.attempt) for claim in hands.seen[:2]] == [(id, 1), (id, 1)]


async def test_A30_three_processes_share_slow_messages_and_run_each_once(tmp_path: Path) -> None:
    async with road("sqlite", tmp_path, inference=QUICK) as here:
        runtimes = []
        for _ in range(3):

            def slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                threading.Event().wait(2 * QUICK["claim_s"] * len(x))
                return x

            runtimes.append(FunctionRuntime(slow))
            here.inference(runtimes[-1], thread=True)
        ids = [await here.submit(float(n)) for n in range(6)]
        await here.drained()
        results = await here.store.get(ids)
        assert [results[id].attempts for id in ids] == [1] * 6
        assert sum(len(call) for runtime in runtimes for call in runtime.calls) == 6
        assert all(runtime.calls for runtime in runtimes), "a process that is busy leaves messages to others"
