"""RuntimeSuite: what a runtime promises, as tests. Subclass it in a test file and say what there is to load.

class TestOnnx(RuntimeSuite):
    def artifact(self, folder): ...
    def inputs(self, rows, rng): ...
    def broken(self, folder): ...
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, ModelFailed, ModelLoadFailed, OutOfMemory
from headrace.runtimes import Artifact, Runtime, load_runtime
from headrace.tensor import Tensor

__all__ = ["RuntimeSuite"]

Inputs = dict[str, Tensor]


class RuntimeSuite(ABC):
    """Every line of the contract in `runtimes/base.py`."""

    #: Whether it runs where it is told; False where the model itself decides that.
    places: bool = True

    @abstractmethod
    def artifact(self, folder: Path) -> Artifact:
        """Return an artifact that loads and whose rows are independent, made in `folder` if need be."""

    @abstractmethod
    def inputs(self, rows: int, rng: random.Random) -> Inputs:
        """Return inputs with that many rows, different every time."""

    @abstractmethod
    def broken(self, folder: Path) -> Sequence[Artifact]:
        """Return artifacts that cannot be loaded, each in another way."""

    def failing(self) -> Inputs | None:
        """Return inputs that pass the signature and on which the model fails; None if there are none."""
        return None

    @contextmanager
    def loaded(self, folder: Path) -> Iterator[Runtime]:
        """Load the artifact and close it afterwards."""
        runtime = load_runtime(self.artifact(folder), threads=1)
        try:
            yield runtime
        finally:
            runtime.close()

    def test_it_says_what_it_takes_and_gives(self, tmp_path: Path) -> None:
        """Platform and signature come from the artifact, the same every time, and fit the inputs."""
        with self.loaded(tmp_path) as one, self.loaded(tmp_path) as other:
            assert one.platform and one.platform == other.platform
            assert one.signature.outputs
            assert one.signature.digest == other.signature.digest
            one.signature.check(self.inputs(2, random.Random(1)))

    def test_it_returns_what_was_declared(self, tmp_path: Path) -> None:
        """Datatypes and ranks of the answers are those of the signature."""
        with self.loaded(tmp_path) as runtime:
            found = runtime.run(self.inputs(2, random.Random(1)), runtime.signature.output_names)
            for spec in runtime.signature.outputs:
                tensor = found[spec.name]
                assert tensor.datatype is spec.datatype
                assert tensor.array.ndim == len(spec.shape)
                assert tensor.array.flags.c_contiguous

    def test_it_returns_the_outputs_asked_for_and_no_others(self, tmp_path: Path) -> None:
        """Also one alone, and in another order."""
        with self.loaded(tmp_path) as runtime:
            names = runtime.signature.output_names
            inputs = self.inputs(1, random.Random(1))
            for asked in ([names[0]], [names[-1]], list(reversed(names))):
                assert sorted(runtime.run(inputs, asked)) == sorted(asked)

    def test_rows_together_are_rows_apart(self, tmp_path: Path) -> None:
        """A batch of different rows gives each row the answer it gets alone."""
        rng = random.Random(2)
        with self.loaded(tmp_path) as runtime:
            assert runtime.signature.batchable
            names = runtime.signature.output_names
            rows = [self.inputs(1, rng) for _ in range(5)]
            joined = {
                name: Tensor(tensor.datatype, np.concatenate([row[name].array for row in rows]))
                for name, tensor in rows[0].items()
            }
            together = runtime.run(joined, names)
            for place, row in enumerate(rows):
                alone = runtime.run(row, names)
                for name in names:
                    _assert_alike(together[name].array[place : place + 1], alone[name].array)

    def test_inputs_stay_as_they_are(self, tmp_path: Path) -> None:
        """Arrays that may not be written are welcome, and those that may are not written."""
        with self.loaded(tmp_path) as runtime:
            inputs = self.inputs(3, random.Random(3))
            before = {name: Tensor(tensor.datatype, tensor.array.copy()) for name, tensor in inputs.items()}
            runtime.run(inputs, runtime.signature.output_names)
            assert inputs == before
            for tensor in before.values():
                tensor.array.flags.writeable = False
            runtime.run(before, runtime.signature.output_names)

    def test_an_answer_is_not_changed_by_the_next_run(self, tmp_path: Path) -> None:
        """What was returned belongs to the caller."""
        rng = random.Random(4)
        with self.loaded(tmp_path) as runtime:
            names = runtime.signature.output_names
            first = runtime.run(self.inputs(2, rng), names)
            kept = {name: Tensor(tensor.datatype, tensor.array.copy()) for name, tensor in first.items()}
            runtime.run(self.inputs(2, rng), names)
            assert first == kept

    def test_threads_get_their_own_answers(self, tmp_path: Path) -> None:
        """Where it is declared concurrent, four threads at once are no different from one."""
        with self.loaded(tmp_path) as runtime:
            if not runtime.concurrent:
                return
            names = runtime.signature.output_names
            asked = [self.inputs(1 + n % 3, random.Random(n)) for n in range(40)]
            expected = [runtime.run(inputs, names) for inputs in asked]
            wrong: list[BaseException] = []

            def call(start: int) -> None:
                try:
                    for place in range(start, len(asked), 4):
                        found = runtime.run(asked[place], names)
                        for name in names:
                            _assert_alike(found[name].array, expected[place][name].array)
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=call, args=(start,)) for start in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong

    def test_after_a_failure_it_goes_on(self, tmp_path: Path) -> None:
        """A failure is one of ours, names nothing of this machine, and the next run is as good as any."""
        failing = self.failing()
        if failing is None:
            return
        with self.loaded(tmp_path) as runtime:
            names = runtime.signature.output_names
            good = self.inputs(1, random.Random(5))
            before = runtime.run(good, names)
            error = _raised(lambda: runtime.run(failing, names))
            assert isinstance(error, ModelFailed | OutOfMemory)
            _assert_says_nothing_of(tmp_path, error)
            after = runtime.run(good, names)
            for name in names:
                _assert_alike(after[name].array, before[name].array)

    def test_closing_is_idempotent_and_final(self, tmp_path: Path) -> None:
        """A closed runtime refuses to run instead of crashing."""
        runtime = load_runtime(self.artifact(tmp_path), threads=1)
        runtime.close()
        runtime.close()
        inputs = self.inputs(1, random.Random(6))
        assert isinstance(_raised(lambda: runtime.run(inputs, runtime.signature.output_names)), ModelFailed)

    def test_a_device_that_is_not_there_is_an_error_and_never_a_silent_cpu(self, tmp_path: Path) -> None:
        """The error says which device was asked for and which there are; the CPU is always there."""
        if not self.places:
            return
        artifact = self.artifact(tmp_path)
        error = _raised(lambda: load_runtime(artifact, threads=1, device="cuda:99"))
        assert isinstance(error, ModelLoadFailed)
        assert "cuda:99" in error.message
        assert error.details["expected"][0] == "cpu"
        assert error.details["file"]
        runtime = load_runtime(artifact, threads=1, device="cpu")
        assert runtime.device == "cpu"
        runtime.close()

    def test_what_cannot_be_loaded_says_why(self, tmp_path: Path) -> None:
        """The error names the file relative to the model, the reason and what was expected."""
        broken = self.broken(tmp_path)
        assert broken
        for artifact in broken:
            error = _raised(partial(load_runtime, artifact, threads=1))
            assert isinstance(error, ModelLoadFailed)
            assert error.details["reason"]
            assert error.details["expected"]
            assert error.details["file"]
            _assert_says_nothing_of(tmp_path, error)


def _raised(call: Callable[[], object]) -> HeadraceError:
    try:
        call()
    except HeadraceError as error:
        return error
    raise AssertionError("nothing was raised")


def _assert_says_nothing_of(folder: Path, error: HeadraceError) -> None:
    said = f"{error.message} {error.details}"
    assert str(folder) not in said
    assert str(Path.cwd()) not in said
    assert len(error.message) < 1000


def _assert_alike(one: Any, other: Any) -> None:
    assert one.shape == other.shape
    if one.dtype.kind in "fV":
        assert np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=1e-3, atol=1e-5, equal_nan=True)
    else:
        assert one.tolist() == other.tolist()
