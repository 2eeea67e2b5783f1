"""`halox.Loop` on the host, and how ranks agree on a loop that a simulated GPU repeats."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from halox.plans.device_loop import Loop
from halox.runtime.gpu import pools, streams, while_graph
from tests.mpi.bad_input import Table, check_error

pytestmark = pytest.mark.usually(1, 2)

CELLS = 12
World = MPI.Intracomm


def make_grid(comm: World, **options: Any) -> halox.Grid:
    return halox.Grid((CELLS, 5), halo=1, comm=comm, device="cpu", **options)


class Counter:
    """Steps that count, and set the flag after ``end`` steps."""

    def __init__(self, end: int) -> None:
        self.steps, self.end = 0, end
        self.until: Any = np.zeros((), bool)

    def __call__(self) -> None:
        self.steps += 1
        self.until[...] = self.steps >= self.end


@pytest.mark.parametrize("dtype", ["?", "u1", "i8"])
def test_numbers_of_steps(dtype: str, comm: World) -> None:
    with make_grid(comm) as grid:
        for every, end, known in (
            (1, 1, 1),
            (3, 7, 9),
            (3, 9, 9),
            (3, 40, 30),
            (30, 1, 30),
        ):
            counter = Counter(end)
            counter.until = np.zeros((1, 1), dtype)
            loop = grid.loop(counter, until=counter.until, most=30, every=every)
            assert (loop(), counter.steps) == (known, known)
            counter.end += known
            assert (loop(), counter.steps) == (known, 2 * known)
        assert loop.why_host == "the grid has NumPy arrays"
        with pytest.raises(StateError):
            copy.copy(loop)


def test_jacobi_to_a_tolerance(comm: World) -> None:
    """Steps and values of NumPy on the whole grid."""
    whole = np.random.default_rng(2).random((CELLS, 5))
    with make_grid(comm) as grid:
        u, change = grid.scatter(whole if comm.rank == 0 else None), grid.zeros()
        norm, until = np.zeros(()), np.zeros((), bool)

        def step() -> None:
            grid.exchange(u)
            new = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
            grid.interior(change)[...] = new - grid.interior(u)
            grid.interior(u)[...] = new
            np.less(grid.norm(change, out=norm), 0.05, out=until)

        steps, size = grid.loop(step, until=until)(), np.inf
        for _ in range(steps):
            assert size >= 0.05
            old = np.pad(whole, 1)
            new = (old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]) / 4
            size, whole = float(np.linalg.norm(new - whole)), new
        assert 1 < steps < 100 and size < 0.05
        np.testing.assert_allclose(grid.interior(u), whole[grid.owned], rtol=1e-12)


def with_loop(**options: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with make_grid(comm) as grid:
            step = options.pop("step", print)
            grid.loop(step, **{"until": np.zeros((), bool)} | options)

    return call


def on_one_rank(name: str, value: object) -> Callable[[World], None]:
    return lambda comm: with_loop(**{name: value} if comm.rank == 0 else {})(comm)


def flags_that_differ(comm: World) -> None:
    with make_grid(comm) as grid:
        counter = Counter(2 + comm.rank)
        grid.loop(counter, until=counter.until)()


BAD: Table = {
    "loop: a step that is no function": (with_loop(step=None), HaloxError, "step"),
    "loop: a flag that is no array": (with_loop(until=False), FieldError, "until"),
    "loop: a flag of two elements": (with_loop(until=np.zeros(2, bool)), FieldError, "until"),
    "loop: a flag of a float": (with_loop(until=np.zeros(())), FieldError, "until"),
    "loop: no steps": (with_loop(most=0), HaloxError, "most"),
    "loop: no steps between looks": (with_loop(every=0), HaloxError, "every"),
    "loop: half a step": (with_loop(every=0.5), HaloxError, "every"),
    "loop: a limit that is not a multiple": (with_loop(most=100, every=30), HaloxError, "most"),
    "loop: a limit below a round": (with_loop(most=10, every=30), HaloxError, "most"),
    "loop: a bad flag on one rank": (on_one_rank("until", np.zeros(2, bool)), FieldError, "until"),
    "loop: limits differ >1": (on_one_rank("most", 7), MismatchError, "most"),
    "loop: flags differ >1": (flags_that_differ, MismatchError, "steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_error_on_all_ranks(name: str, comm: World) -> None:
    check_error(BAD, name, comm)


def test_a_closed_grid(comm: World) -> None:
    with make_grid(comm) as grid:
        loop = grid.loop(print, until=np.zeros((), bool))
    with pytest.raises(ClosedError):
        loop()


def test_an_error_of_the_step_is_raised_as_it_is(comm: World) -> None:
    with make_grid(comm) as grid:
        counter = Counter(3)

        def step() -> None:
            counter()
            if counter.steps == 2:
                raise ZeroDivisionError("of the step")

        loop = grid.loop(step, until=counter.until)
        with pytest.raises(ZeroDivisionError, match="of the step"):
            loop()
        assert loop() == 1  # the grid can be used


def test_an_interrupt_of_a_step(comm: World) -> None:
    # Python leaves SIGINT ignored if it was when pytest started, as in a background job of a script.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with make_grid(comm) as grid:
            loop = grid.loop(lambda: signal.raise_signal(signal.SIGINT), until=np.zeros((), bool))
            with pytest.raises(KeyboardInterrupt):
                loop()
    finally:
        signal.signal(signal.SIGINT, before)


class Flag:
    """A flag in the memory of a GPU; address 0 is not looked up."""

    def __init__(self) -> None:
        self.value = False
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (1,),
            "typestr": "|b1",
            "data": (0, False),
        }

    def __bool__(self) -> bool:
        return self.value

    def __setitem__(self, key: object, value: bool) -> None:
        self.value = value


class Gpu:
    """A GPU whose graphs are calls: a round is called in place of its launches, until the flag is set."""

    def __init__(self) -> None:
        self.flag = Flag()
        self.graphs, self.failures = 0, 0
        self.has_graphs, self.capturing = True, False
        self.error: Exception | None = None  # of the next graphs

    def graph(self, work: Callable[[], None], _: object) -> Any:
        self.graphs += 1
        if self.error is not None:
            raise self.error

        def run(rounds: int, most: int, has_failed: Callable[[], bool]) -> int:
            while rounds < most and not has_failed():
                work()
                rounds += 1
                if self.flag:
                    break
            return rounds

        return SimpleNamespace(run=run)

    def loop(
        self, grid: halox.Grid, end: int, step: Any = None, *, every: int = 1
    ) -> tuple[Counter, halox.Loop]:
        """Return a counter and a loop of its steps, or of a step, at most 24."""
        counter = Counter(end)
        counter.until = self.flag
        return counter, Loop(grid.domain.context, 0, step or counter, self.flag, 24, every)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(while_graph, "WhileGraph", found.graph)
    monkeypatch.setattr(while_graph, "has_while_graphs", lambda: found.has_graphs)
    monkeypatch.setattr(streams, "is_capturing", lambda stream=None: found.capturing)
    monkeypatch.setattr(pools, "count_failures", lambda: found.failures)
    return found


@pytest.mark.parametrize(("every", "end", "known"), [(1, 1, 1), (1, 9, 9), (4, 9, 12), (4, 99, 24)])
def test_a_gpu_goes_on_after_the_first_round(
    every: int, end: int, known: int, gpu: Gpu, comm: World
) -> None:
    with make_grid(comm) as grid:
        counter, loop = gpu.loop(grid, end, every=every)
        for call in range(3):
            counter.steps = 0
            assert (loop(), counter.steps) == (known, known)
            assert gpu.graphs == (known > every), call
        assert loop.why_host == ""


@pytest.mark.parametrize("why", ["the staged path needs the host", "CUDA 12.4"])
def test_one_rank_that_needs_the_host(why: str, gpu: Gpu, comm: World) -> None:
    """All ranks then call their steps, and the reason is the same on all."""
    with make_grid(comm) as grid:
        counter, loop = gpu.loop(grid, 9)
        if comm.rank == comm.size - 1:
            gpu.error, gpu.has_graphs = StateError(why), why != "CUDA 12.4"
        for _ in range(2):
            counter.steps = 0
            assert (loop(), counter.steps) == (9, 9)
        assert why in loop.why_host and gpu.graphs == gpu.has_graphs


def test_steps_that_a_graph_cannot_contain(gpu: Gpu, comm: World) -> None:
    """One error on all ranks, after which the grid can be used."""
    with make_grid(comm) as grid:
        _, loop = gpu.loop(grid, 9)
        if comm.rank == 0:
            gpu.error = RuntimeError("cudaErrorStreamCaptureUnsupported")
        for _ in range(2):
            with pytest.raises(StateError, match="CaptureUnsupported"):
                loop()
        assert grid.sum(grid.ones()) == CELLS * 5


def test_paths_that_a_loop_on_a_gpu_refuses() -> None:
    streams.loops.append(object())
    try:
        with pytest.raises(StateError):
            streams.refuse_loop("the nccl path")
    finally:
        streams.loops.pop()
    streams.refuse_loop("the nccl path")


def test_flags_that_differ_after_the_first_round(gpu: Gpu, comm: World) -> None:
    if comm.size == 1:
        return
    with make_grid(comm) as grid:
        _, loop = gpu.loop(grid, 1 if comm.rank else 9)
        with pytest.raises(MismatchError):
            loop()


@pytest.mark.parametrize("is_in_loop", [True, False])
def test_a_failure_on_the_gpu(is_in_loop: bool, gpu: Gpu, comm: World) -> None:
    """It ends the loop; the failed call raises its error. An old failure of another call does not end it."""
    with make_grid(comm) as grid:
        gpu.failures = 1

        def step() -> None:
            if counter.steps > 4 and is_in_loop:
                raise ExchangeTimeoutError("an exchange has failed")
            counter()
            gpu.failures = 1 + (counter.steps > 4)

        counter, loop = gpu.loop(grid, 4, step)
        assert loop() == 4
        counter.steps, counter.end = 0, 9
        kind = ExchangeTimeoutError if is_in_loop else StateError
        with pytest.raises(kind, match="has failed"):
            loop()
        assert counter.steps == 5 + (not is_in_loop)


def test_a_loop_in_a_capture(gpu: Gpu, comm: World) -> None:
    with make_grid(comm) as grid:
        counter, loop = gpu.loop(grid, 9)
        gpu.capturing = True
        with pytest.raises(StateError):
            loop()
        assert not counter.steps


def test_flags_on_another_device(gpu: Gpu, comm: World) -> None:
    with make_grid(comm) as grid:
        with pytest.raises(DeviceError, match="until"):
            grid.loop(print, until=gpu.flag)
        with pytest.raises(DeviceError, match="until"):
            Loop(grid.domain.context, 0, print, np.zeros((), bool), 1, 1)


@pytest.mark.parametrize("exchanges", [False, True])
def test_an_error_of_one_rank_in_a_step(exchanges: bool, comm: World) -> None:
    """Other ranks raise it too, in the exchange in which they wait or at the end of the loop, without a time-out."""
    with halox.Grid(4 * comm.size, comm=comm, device="cpu") as grid:
        u, flag, last = grid.zeros(), np.zeros((), bool), comm.size - 1

        def step() -> None:
            if comm.rank == last:
                raise ZeroDivisionError("of the step")
            if exchanges:
                grid.exchange(u)

        loop = grid.loop(step, flag, most=1)
        with pytest.raises((ZeroDivisionError, HaloxError)) as raised:
            loop()
        assert isinstance(raised.value, ZeroDivisionError) == (comm.rank == last)
        assert not isinstance(raised.value, ExchangeTimeoutError)
