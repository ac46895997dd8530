"""Rows of many requests in one run: who gets what, what happens when it fails, and who waits for whom."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    HeadraceError,
    Internal,
    InvalidValue,
    ModelFailed,
    ModelUnavailable,
    OutOfMemory,
    Overloaded,
)
from headrace.models.batcher import Batcher
from headrace.models.runners import InlineRunner, Runner, ThreadRunner
from headrace.runtimes import WrongRows
from headrace.telemetry.trace import Recorder, Tracer, new_trace
from headrace.tensor import Datatype, InferAnswer, Signature, Tensor
from models.kit import ROWS_OF_3, Scripted, Told, batcher, echo, request, spec

Inputs = Mapping[str, Tensor]


def got(answer: InferAnswer) -> Any:
    return answer.outputs["y"].array.tolist()


def row(value: float) -> list[float]:
    return [value, value, value]


class Gate:
    """A model that stands still inside `run` until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        self.entered.release()
        assert self.open.wait(30)
        return echo(inputs, outputs)

    async def inside(self) -> None:
        await asyncio.to_thread(self.entered.acquire, timeout=30)


def threads(count: int = 1) -> list[Runner]:
    return [ThreadRunner(asyncio.get_running_loop(), f"run-{number}") for number in range(count)]


# -- working -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inline", "thread"])
async def test_a_lone_request_runs_at_once_and_alone(kind: str) -> None:
    runtime = Scripted()
    line = batcher(runtime, threads() if kind == "thread" else None)
    answer = await line.submit(request([row(1)], id="mine"))
    assert (answer.model, answer.version, answer.id, got(answer)) == ("m", "1", "mine", [row(1)])
    assert runtime.sizes == [1]
    await line.close()


async def test_requests_of_one_turn_of_the_loop_run_together() -> None:
    runtime = Scripted()
    line = batcher(runtime, size_max=64)
    answers = await asyncio.gather(*(line.submit(request([row(n)])) for n in range(10)))
    assert runtime.sizes == [10]
    assert [got(answer) for answer in answers] == [[row(n)] for n in range(10)]


async def test_what_came_while_a_runner_was_busy_is_the_next_batch() -> None:
    gate = Gate()
    runtime = Scripted(gate)
    line = batcher(runtime, threads())
    first = line.submit(request([row(0)]))
    await gate.inside()
    others = [line.submit(request([row(n)])) for n in range(1, 6)]
    gate.open.set()
    await asyncio.gather(first, *others)
    assert runtime.sizes == [1, 5]
    assert first.queue_time_ms is not None and others[0].queue_time_ms is not None
    await line.close()


async def test_a_free_runner_never_waits_for_company() -> None:
    gate = Gate()
    runtime = Scripted(gate)
    line = batcher(runtime, threads(2))
    first = line.submit(request([row(0)]))
    await gate.inside()
    second = line.submit(request([row(1)]))
    await gate.inside()  # while the first is still inside
    gate.open.set()
    await asyncio.gather(first, second)
    assert runtime.sizes == [1, 1]
    await line.close()


async def test_rows_are_counted_not_requests() -> None:
    runtime = Scripted()
    line = batcher(runtime, size_max=8)
    sizes = [3, 3, 3, 2, 8, 1]
    await asyncio.gather(*(line.submit(request([row(0)] * size)) for size in sizes))
    assert runtime.sizes == [6, 5, 8, 1]


async def test_a_request_larger_than_a_batch_runs_alone_and_whole() -> None:
    runtime = Scripted()
    line = batcher(runtime, size_max=4)
    small, large, after = await asyncio.gather(
        *(line.submit(request([row(n)] * size)) for n, size in enumerate([1, 9, 1]))
    )
    assert runtime.sizes == [1, 9, 1]
    assert got(large) == [row(1)] * 9
    assert got(small) == [row(0)] and got(after) == [row(2)]


async def test_an_empty_request_runs_alone() -> None:
    runtime = Scripted()
    line = batcher(runtime)
    empty, full = await asyncio.gather(line.submit(request(np.zeros((0, 3)))), line.submit(request([row(1)])))
    assert empty.outputs["y"].shape == (0, 3)
    assert got(full) == [row(1)]
    assert sorted(runtime.sizes) == [0, 1]


async def test_other_inner_shapes_and_other_outputs_run_apart() -> None:
    runtime = Scripted(signature=Signature((spec("x", -1, -1),), (spec("y", -1, -1), spec("z", -1, -1))))
    line = batcher(runtime, size_max=64)
    wide, narrow = [[1.0, 2.0]], [[1.0]]
    answers = await asyncio.gather(
        line.submit(request(wide)),
        line.submit(request(narrow)),
        line.submit(request(wide, outputs=["y"])),
        line.submit(request(narrow)),
        line.submit(request(wide, outputs=["z", "y"])),
        line.submit(request(wide)),
    )
    assert sorted(runtime.sizes) == [1, 1, 2, 2]
    assert [list(answer.outputs) for answer in answers] == [
        ["y", "z"],
        ["y", "z"],
        ["y"],
        ["y", "z"],
        ["z", "y"],
        ["y", "z"],
    ]
    assert answers[5].outputs["z"].array.tolist() == wide


async def test_a_model_without_a_batch_dimension_runs_one_request_at_a_time() -> None:
    runtime = Scripted(signature=Signature((spec("x", 2, 3),), (spec("y", 2, 3),)))
    line = batcher(runtime, size_max=64)
    answers = await asyncio.gather(*(line.submit(request([row(n), row(n)])) for n in range(5)))
    assert runtime.sizes == [2] * 5
    assert [got(answer) for answer in answers] == [[row(n), row(n)] for n in range(5)]


async def test_a_model_that_was_denied_batching_runs_one_request_at_a_time() -> None:
    runtime = Scripted()
    line = batcher(runtime, batchable=False)
    await asyncio.gather(*(line.submit(request([row(n)] * 2)) for n in range(3)))
    assert runtime.sizes == [2, 2, 2]


async def test_the_oldest_goes_first_whatever_it_may_run_with() -> None:
    gate = Gate()
    runtime = Scripted(gate, signature=Signature((spec("x", -1, -1),), (spec("y", -1, -1),)))
    line = batcher(runtime, threads(), size_max=2)
    first = line.submit(request([[0.0]]))
    await gate.inside()
    widths = [1, 2, 1, 1, 3, 2]
    waiting = [line.submit(request([[float(n)] * width])) for n, width in enumerate(widths)]
    gate.open.set()
    await asyncio.gather(first, *waiting)
    starts = [call["x"][0][0] for call in runtime.calls[1:]]
    assert starts == [0, 1, 3, 4]
    await line.close()


async def test_an_inline_model_leaves_the_loop_a_turn_between_batches() -> None:
    line = batcher(Scripted(), size_max=1)
    waiting = [line.submit(request([row(n)])) for n in range(3)]
    seen = []

    def look() -> None:
        seen.append(sum(pending.done() for pending in waiting))
        if seen[-1] < 3:
            asyncio.get_running_loop().call_soon(look)

    asyncio.get_running_loop().call_soon(look)
    await asyncio.gather(*waiting)
    assert seen[0] == 1


async def test_an_inline_model_that_turns_out_slow_moves_to_a_thread() -> None:
    waits = iter([0.0, 0.06, 0.0])

    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        threading.Event().wait(next(waits))
        return echo(inputs, outputs)

    line = batcher(Scripted(run), [InlineRunner()])
    kinds = []
    for n in range(3):
        assert got(await line.submit(request([row(n)]))) == [row(n)]
        kinds.append(line.runner)
    assert kinds == ["inline", "thread", "thread"]
    await line.close()


# -- ownership -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inline", "thread"])
async def test_a13_two_thousand_callers_each_get_exactly_their_own_rows(kind: str) -> None:
    runtime = Scripted()
    line = batcher(runtime, threads(3) if kind == "thread" else None, size_max=16)
    rng = random.Random(13)
    clients = [[row(n + part / 8) for part in range(rng.randint(1, 5))] for n in range(2000)]

    async def call(number: int) -> None:
        await asyncio.sleep(0 if number % 3 else rng.random() / 100)
        answer = await line.submit(request(clients[number], id=f"caller-{number}"))
        assert answer.id == f"caller-{number}"
        assert got(answer) == clients[number]
        assert answer.outputs["y"].shape == (len(clients[number]), 3)

    await asyncio.gather(*(call(number) for number in range(2000)))
    assert max(runtime.sizes) > 1, "nothing was batched, so nothing was tested"
    assert max(runtime.sizes) <= 16
    await line.close()


async def test_a13_a_wrong_number_of_rows_is_an_error_to_all_in_the_batch() -> None:
    def short(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {"y": Tensor.of(inputs["x"].array[:-1])}

    runtime = Scripted(short)
    line = batcher(runtime)
    waiting = [line.submit(request([row(n)])) for n in range(4)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [WrongRows] * 4
    assert all(isinstance(r, ModelFailed) and r.details["output"] == "y" for r in results)
    assert runtime.sizes == [4], "run again alone, the model would have given somebody a lucky answer"


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    widths=st.lists(st.integers(1, 2), min_size=30, max_size=30),
    bad=st.sets(st.integers(0, 29), max_size=4),
    gone=st.sets(st.integers(0, 29), max_size=4),
    size_max=st.integers(1, 12),
)
def test_every_caller_gets_its_own_rows_or_its_own_error(
    sizes: list[int], widths: list[int], bad: set[int], gone: set[int], size_max: int
) -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        if (inputs["x"].array < 0).any():
            raise ModelFailed("negative")
        return {"y": Tensor.of(inputs["x"].array * 2)}

    async def main() -> None:
        runtime = Scripted(run, Signature((spec("x", -1, -1),), (spec("y", -1, -1),)))
        line = batcher(runtime, size_max=size_max)
        rows = []
        for number, size in enumerate(sizes):
            value = -1.0 - number if number in bad else 1.0 + number
            rows.append(np.full((size, widths[number]), value, np.float32))
        waiting = [line.submit(request(given_rows)) for given_rows in rows]
        for number in gone & set(range(len(waiting))):
            waiting[number].cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        for number, (given_rows, result) in enumerate(zip(rows, results, strict=True)):
            if number in gone:
                assert isinstance(result, asyncio.CancelledError)
            elif number in bad and len(given_rows):
                assert isinstance(result, ModelFailed)
            else:
                assert isinstance(result, InferAnswer)
                assert result.outputs["y"].array.tolist() == (given_rows * 2).tolist()
                assert result.outputs["y"].shape == given_rows.shape
        assert max(runtime.sizes, default=0) <= max(size_max, *sizes)
        assert line.waiting_rows == line.running == 0

    asyncio.run(main())


async def test_inputs_of_every_datatype_are_joined_and_cut_apart_unchanged() -> None:
    kinds = list(Datatype)
    signature = Signature(
        tuple(spec(f"in-{d}", -1, 2, datatype=d) for d in kinds),
        tuple(spec(f"out-{d}", -1, 2, datatype=d) for d in kinds),
    )

    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {name: inputs[f"in-{name.removeprefix('out-')}"] for name in outputs}

    line = batcher(Scripted(run, signature))
    asked = []
    for n in range(3):
        asked.append(request([[0, 0]]))
        asked[-1].inputs = {
            f"in-{d}": Tensor.of(
                np.array([[b"a" * n, b"\0"]], object) if d is Datatype.BYTES else np.full((1, 2), n, d.numpy)
            )
            for d in kinds
        }
    answers = await asyncio.gather(*(line.submit(one) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        for d in kinds:
            assert answer.outputs[f"out-{d}"] == one.inputs[f"in-{d}"]


# -- failing -------------------------------------------------------------------------------------------------------


def refuse_negative(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
    if (inputs["x"].array < 0).any():
        raise ModelFailed("a value is negative")
    return echo(inputs, outputs)


@pytest.mark.parametrize("kind", ["inline", "thread"])
async def test_a12_a_bad_item_fails_alone_and_the_retry_is_counted(kind: str) -> None:
    told = Told()
    runtime = Scripted(refuse_negative)
    line = batcher(runtime, threads() if kind == "thread" else None, told=told)
    waiting = [line.submit(request([row(-1 if n == 3 else n)])) for n in range(8)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[3], ModelFailed)
    assert [got(r) for n, r in enumerate(results) if n != 3] == [[row(n)] for n in range(8) if n != 3]
    assert runtime.sizes == [8] + [1] * 8
    assert told.counted("headrace_batch_retries_total", "m") == 1
    assert told.counted("headrace_inferences_total", "m", "1", "succeeded") == 7
    assert told.counted("headrace_inferences_total", "m", "1", "model_failed") == 1
    assert '"event":"batch_retried"' in told.log()
    await line.close()


async def test_a12_a_value_that_the_model_calls_unfit_fails_alone_as_the_callers_fault() -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        if (inputs["x"].array < 0).any():
            raise InvalidValue("negative")
        return echo(inputs, outputs)

    told = Told()
    line = batcher(Scripted(run), told=told)
    waiting = [line.submit(request([row(n - 1)])) for n in range(3)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], InvalidValue)
    assert [got(r) for r in results[1:]] == [[row(0)], [row(1)]]
    assert "run_failed" not in told.log(), "a caller's fault is no line of ours"


async def test_a_batch_that_ran_out_of_memory_is_halved_and_the_next_ones_are_smaller() -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        if inputs["x"].rows > 3:
            raise OutOfMemory(details={"allocated": 1})
        return echo(inputs, outputs)

    runtime = Scripted(run)
    line = batcher(runtime, size_max=8)
    answers = await asyncio.gather(*(line.submit(request([row(n)])) for n in range(8)))
    assert [got(answer) for answer in answers] == [[row(n)] for n in range(8)]
    assert runtime.sizes == [8, 4, 4, 2, 2, 2, 2]
    runtime.calls.clear()
    await asyncio.gather(*(line.submit(request([row(n)])) for n in range(6)))
    assert runtime.sizes == [3, 3]


async def test_out_of_memory_alone_is_told_as_it_is() -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        raise OutOfMemory(details={"allocated": 7, "available": 3, "tensor": "t"})

    line = batcher(Scripted(run))
    with pytest.raises(OutOfMemory) as caught:
        await line.submit(request([row(0)]))
    assert caught.value.details == {"allocated": 7, "available": 3, "tensor": "t"}


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), SystemExit(3)])
@pytest.mark.parametrize("kind", ["inline", "thread"])
async def test_whatever_a_runtime_lets_slip_is_a_typed_error_and_the_line_goes_on(
    kind: str, error: BaseException
) -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        if inputs["x"].array[0, 0] == 1:
            raise error
        return echo(inputs, outputs)

    told = Told()
    line = batcher(Scripted(run), threads() if kind == "thread" else None, told=told)
    with pytest.raises(OutOfMemory if isinstance(error, MemoryError) else Internal) as caught:
        await line.submit(request([row(1)]))
    assert "a bug" not in str(caught.value)
    assert got(await line.submit(request([row(2)]))) == [row(2)]
    if not isinstance(error, MemoryError):
        assert type(error).__name__ in told.log(), "the cause belongs in the log"
    await line.close()


async def test_a_missing_output_is_an_error_that_names_it() -> None:
    line = batcher(Scripted(lambda inputs, outputs: {}))
    with pytest.raises(ModelFailed) as caught:
        await line.submit(request([row(1)]))
    assert caught.value.details == {"output": "y"}


@pytest.mark.parametrize("broken", ["_start", "_tell"])
async def test_a_fault_of_the_batcher_itself_ends_with_those_it_concerns(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    line = batcher(Scripted(), told=told)
    right = getattr(line, broken)
    left = [RuntimeError("ours")]

    def wrong(*args: Any) -> Any:
        if left:
            raise left.pop()
        return right(*args)

    monkeypatch.setattr(line, broken, wrong)
    failed = await asyncio.gather(*(line.submit(request([row(n)])) for n in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [Internal] * 3
    assert got(await line.submit(request([row(4)]))) == [row(4)]
    assert '"event":"loop_failed"' in told.log()
    assert line.running == line.waiting_rows == 0


async def test_each_caller_gets_an_exception_of_its_own() -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        raise WrongRows("x", details={"output": "y"})

    line = batcher(Scripted(run))
    one, other = await asyncio.gather(*(line.submit(request([row(n)])) for n in range(2)), return_exceptions=True)
    assert isinstance(one, HeadraceError) and isinstance(other, HeadraceError)
    assert one is not other and one.details == other.details


# -- leaving and closing -------------------------------------------------------------------------------------------


async def test_a14_callers_that_left_are_not_run_and_the_line_goes_on() -> None:
    rng = random.Random(14)
    runtime = Scripted(lambda inputs, outputs: (threading.Event().wait(0.02), echo(inputs, outputs))[1])
    line = batcher(runtime, threads(), size_max=8)

    async def impatient() -> bool:
        try:
            async with asyncio.timeout(rng.random() / 4):
                await line.submit(request([row(0)]))
        except TimeoutError:
            return False
        return True

    answered = await asyncio.gather(*(impatient() for _ in range(500)))
    assert False in answered and True in answered
    ran = sum(runtime.sizes)
    assert ran < 500, "some of those who left were run all the same"
    answers = await asyncio.gather(*(line.submit(request([row(n)])) for n in range(50)))
    assert [got(answer) for answer in answers] == [[row(n)] for n in range(50)]
    assert line.waiting_rows == line.running == 0
    await line.close()


async def test_a14_a_batch_that_everybody_left_while_it_ran_blocks_nobody() -> None:
    gate = Gate()
    runtime = Scripted(gate)
    line = batcher(runtime, threads())
    leaving = [line.submit(request([row(n)])) for n in range(3)]
    await gate.inside()
    for pending in leaving:
        assert pending.cancel()
    waiting = line.submit(request([row(9)]))
    gone = line.submit(request([row(8)]))
    gone.cancel()
    assert line.waiting_rows == 1
    gate.open.set()
    assert got(await waiting) == [row(9)]
    assert runtime.calls[1:] == [{"x": [row(9)]}]
    assert line.running == line.waiting_rows == 0
    await line.close()


async def test_a14_a_retry_leaves_out_whoever_has_gone() -> None:
    gate = Gate()
    failing = [True]

    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        gate(inputs, outputs)
        if failing and failing.pop():
            raise ModelFailed("once")
        return echo(inputs, outputs)

    runtime = Scripted(run)
    line = batcher(runtime, threads())
    stays, leaves = line.submit(request([row(1)])), line.submit(request([row(2)]))
    await gate.inside()
    leaves.cancel()
    gate.open.set()
    assert got(await stays) == [row(1)]
    assert runtime.sizes == [2, 1]
    await line.close()


async def test_who_is_run_again_waits_again_and_does_not_look_as_if_one_run_went_on() -> None:
    seen: list[list[float | None]] = []

    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        seen.append([pending.queue_time_ms for pending in waiting])
        return refuse_negative(inputs, outputs)

    line = batcher(Scripted(run))
    waiting = [line.submit(request([row(value)])) for value in (-1, 1, 2)]
    await asyncio.gather(*waiting, return_exceptions=True)
    known = [[time is not None for time in times] for times in seen]
    assert known == [[True] * 3, [True, False, False], [True, True, False], [True] * 3]


async def test_a_thread_that_waits_keeps_nothing_of_its_last_batch() -> None:
    line = batcher(Scripted(lambda inputs, outputs: {"y": Tensor.of(inputs["x"].array * 2)}), threads())
    asked = request([row(1)])
    given, answer = weakref.ref(asked.inputs["x"].array), await line.submit(asked)
    del asked
    for _ in range(1000):  # the thread lets go just after it has told us
        gc.collect()
        if given() is None:
            break
        await asyncio.sleep(0.01)
    assert given() is None
    assert got(answer) == [row(2)]
    await line.close()


async def test_those_who_give_up_behind_a_hung_run_leave_nothing_behind() -> None:
    gate = Gate()
    line = batcher(Scripted(gate), threads())
    running = line.submit(request([row(0)]))
    await gate.inside()
    for _ in range(50):
        leaving = [line.submit(request([row(n)])) for n in range(20)]
        for pending in leaving:
            pending.cancel()
    del leaving, pending
    gc.collect()
    kept = sum(type(found).__name__ == "Pending" for found in gc.get_objects())
    assert kept < 200
    assert line.waiting_rows == 0
    gate.open.set()
    assert got(await running) == [row(0)]
    await line.close()


async def test_too_much_waiting_is_overloaded_with_a_time_computed_from_the_drain() -> None:
    gate = Gate()
    line = batcher(Scripted(gate), threads(), waiting_rows_max=4, row_s=0.5)
    running = line.submit(request([row(0)]))
    await gate.inside()
    waiting = [line.submit(request([row(n)] * 2)) for n in range(2)]
    with pytest.raises(Overloaded) as caught:
        line.submit(request([row(9)]))
    assert caught.value.retry_after_s == pytest.approx(4 * 0.5)
    assert caught.value.details["waiting_rows"] == caught.value.details["waiting_rows_max"] == 4
    waiting[0].cancel()
    room = line.submit(request([row(9)] * 2))  # whoever left makes room at once
    gate.open.set()
    await asyncio.gather(running, waiting[1], room)
    await line.close()


async def test_too_many_bytes_waiting_are_overloaded_too() -> None:
    gate = Gate()
    line = batcher(Scripted(gate), threads(), waiting_bytes_max=30)
    running = line.submit(request([row(0)]))
    await gate.inside()
    waiting = [line.submit(request([row(1)])) for _ in range(2)]
    with pytest.raises(Overloaded):
        line.submit(request([row(9)]))
    waiting.pop().cancel()
    waiting.append(line.submit(request([row(9)])))
    gate.open.set()
    await asyncio.gather(running, *waiting)
    waiting = [line.submit(request([row(1)])) for _ in range(2)]
    await asyncio.gather(*waiting)
    await line.close()


async def test_a_request_larger_than_the_whole_line_is_taken_when_nobody_waits() -> None:
    line = batcher(Scripted(), waiting_rows_max=4)
    assert got(await line.submit(request([row(1)] * 9))) == [row(1)] * 9


async def test_closing_finishes_what_was_taken_and_takes_nothing_new() -> None:
    gate = Gate()
    line = batcher(Scripted(gate), threads(), size_max=2)
    waiting = [line.submit(request([row(n)])) for n in range(5)]
    await gate.inside()
    closing = asyncio.ensure_future(line.close())
    await asyncio.sleep(0)
    with pytest.raises(ModelUnavailable):
        line.submit(request([row(9)]))
    gate.open.set()
    await closing
    assert [got(pending.result()) for pending in waiting] == [[row(n)] for n in range(5)]


async def test_closing_that_is_given_up_tells_everybody_who_is_left() -> None:
    gate = Gate()
    runner = ThreadRunner(asyncio.get_running_loop(), "run")
    line = batcher(Scripted(gate), [runner], size_max=2)
    waiting = [line.submit(request([row(n)])) for n in range(5)]
    await gate.inside()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await line.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [ModelUnavailable] * 5
    gate.open.set()
    assert await asyncio.to_thread(runner.join, 10)
    await asyncio.sleep(0)  # what the run came to is told to nobody, and breaks nothing
    assert line.running == line.waiting_rows == 0


async def test_closing_an_idle_line_returns_and_the_thread_ends() -> None:
    runner = ThreadRunner(asyncio.get_running_loop(), "run")
    line = batcher(Scripted(), [runner])
    await line.close()
    await line.close()
    assert await asyncio.to_thread(runner.join, 10)


async def test_closing_ends_when_the_last_who_waited_has_left() -> None:
    gate = Gate()
    line = batcher(Scripted(gate), threads())
    running = line.submit(request([row(0)]))
    await gate.inside()
    left = line.submit(request([row(1)]))
    closing = asyncio.ensure_future(line.close())
    await asyncio.sleep(0)
    gate.open.set()
    left.cancel()
    await asyncio.wait_for(closing, 10)
    assert running.done()


# -- telling -------------------------------------------------------------------------------------------------------


async def test_progress_says_since_when_the_oldest_run_goes_on() -> None:
    gate = Gate()
    told = Told()
    line = batcher(Scripted(gate), threads(2), told=told)
    assert line.progress().running_since_s is None
    before = told.clock.monotonic_s()
    first = line.submit(request([row(0)]))
    await gate.inside()
    second = line.submit(request([row(1)]))
    await gate.inside()
    third = line.submit(request([row(2)] * 2))
    progress = await asyncio.to_thread(line.progress)
    assert progress.running_since_s is not None
    assert before <= progress.running_since_s <= told.clock.monotonic_s()
    assert (progress.runs, progress.waiting_rows) == (0, 2)
    gate.open.set()
    await asyncio.gather(first, second, third)
    assert (line.progress().runs, line.progress().running_since_s) == (3, None)
    await line.close()


async def test_a_run_is_one_span_linked_to_each_request_in_it() -> None:
    recorder = Recorder()
    told = Told()
    line = batcher(Scripted(refuse_negative), told=told, tracer=Tracer(told.clock, [recorder]))
    traces = [new_trace(sampled=True) for _ in range(3)]
    await asyncio.gather(*(line.submit(request([row(1)]), trace) for trace in traces))
    with pytest.raises(ModelFailed):
        await line.submit(request([row(-1)]))
    good, bad = recorder.named("inference_executed")
    assert good.links == tuple((trace.trace_id, trace.span_id) for trace in traces)
    assert good.trace_id == traces[0].trace_id
    assert good.attributes["rows"] == 3
    assert (good.error, bad.error) == (None, "model_failed")


async def test_failures_are_logged_with_their_cause_but_not_each_of_a_thousand() -> None:
    def run(inputs: Inputs, outputs: Sequence[str]) -> dict[str, Tensor]:
        raise ModelFailed("short") from ZeroDivisionError("the cause")

    told = Told()
    line = batcher(Scripted(run, ROWS_OF_3), told=told)
    for _ in range(50):
        with pytest.raises(ModelFailed):
            await line.submit(request([row(1)]))
    log = told.log()
    assert log.count('"event":"run_failed"') == 1
    assert "the cause" in log
    assert told.counted("headrace_inferences_total", "m", "1", "model_failed") == 50


def test_a_batcher_belongs_to_a_loop() -> None:
    with pytest.raises(RuntimeError):
        batcher(Scripted())
    assert Batcher.__doc__
