"""Loops that a GPU repeats, on one rank: exact numbers of steps, temporaries, failures, and steps that it cannot."""

from __future__ import annotations

import signal
import time
from threading import Timer

import numpy as np
import pytest

import halox
from halox.errors import ExchangeTimeoutError, StateError
from halox.runtime.gpu.pools import FailureWord
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu

CELLS = (40, 70)
FOREVER = 1 << 40


def make_grid() -> halox.Grid:
    return halox.Grid(CELLS, halo=1, periodic=True, comm=MPI.COMM_SELF, device="gpu")


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u4", "i8"])
@pytest.mark.parametrize(("every", "most"), [(1, 50), (4, 48)])
def test_numbers_of_steps(every: int, most: int, dtype: str) -> None:
    with make_grid() as grid:
        steps, stop, end = cupy.zeros((), "i8"), cupy.zeros(1, dtype), cupy.zeros((), "i8")

        def step() -> None:
            cupy.add(steps, 1, out=steps)
            stop[...] = steps >= end

        loop = grid.loop(step, until=stop, most=most, every=every)
        for count in (1, 2, 5, 17, 49, 1000, 3):
            steps[...] = 0
            end[...] = count
            known = min(-(-count // every) * every, most)
            assert (loop(), int(steps)) == (known, known)
        assert loop.why_host == ""


def test_jacobi_with_temporaries() -> None:
    """The step allocates, and other arrays are made between two calls; NumPy makes the same steps."""
    random = np.random.default_rng(5)
    with make_grid() as grid:
        u, change = grid.zeros(), grid.zeros()
        norm, stop = cupy.zeros(()), cupy.zeros((), bool)
        plan = grid.plan(u)

        def step() -> None:
            plan()
            old = grid.interior(u)
            new = old / 2 + (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 8
            grid.interior(change)[...] = new - old
            old[...] = new
            grid.norm(change, out=norm)
            cupy.less(norm, 0.5, out=stop)

        loop = grid.loop(step, until=stop, most=4000)
        for _ in range(3):
            whole = random.random(CELLS)
            grid.interior(u)[...] = cupy.asarray(whole)
            others = [cupy.full(CELLS, 7.0) for _ in range(8)]
            steps = loop()
            for known in range(1, steps + 1):
                around = [np.roll(whole, side, axis) for axis in (0, 1) for side in (1, -1)]
                new = whole / 2 + (around[0] + around[1] + around[2] + around[3]) / 8
                is_over = np.linalg.norm(new - whole) < 0.5
                whole = new
                assert is_over == (known == steps)
            np.testing.assert_allclose(grid.interior(u).get(), whole, rtol=1e-12)
            assert all((other == 7).all() for other in others)
        assert loop.why_host == ""


def test_a_step_that_waits_for_the_gpu() -> None:
    with make_grid() as grid:
        x, stop = cupy.ones(()), cupy.zeros((), bool)

        def step() -> None:
            cupy.add(x, 1, out=x)
            float(x)

        loop = grid.loop(step, until=stop)
        for _ in range(2):
            with pytest.raises(StateError):
                loop()
        assert float(x) > 1  # the streams can be used


def test_a_failure_ends_the_loop() -> None:
    """The step after it raises the error, as a failed plan does."""
    failure = FailureWord(cupy.cuda.Device().id)
    with make_grid() as grid:
        steps, stop = cupy.zeros((), "i8"), cupy.zeros((), bool)

        def step() -> None:
            if failure.words[0]:
                failure.was_raised = True
                raise ExchangeTimeoutError("rank 0 has waited")
            cupy.add(steps, 1, out=steps)

        loop = grid.loop(step, until=stop, most=FOREVER)
        timer = Timer(0.2, lambda: failure.words.__setitem__(0, 1))
        timer.start()
        with pytest.raises(ExchangeTimeoutError):
            loop()
        timer.join()
        failure.close(Exception)
        assert 1 < int(steps) < FOREVER


def test_an_interrupt_ends_the_loop() -> None:
    with make_grid() as grid:
        steps, stop = cupy.zeros((), "i8"), cupy.zeros((), bool)
        loop = grid.loop(lambda: cupy.add(steps, 1, out=steps), until=stop, most=FOREVER)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                loop()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        ended = int(steps)
        time.sleep(0.01)
        assert 1 < ended == int(steps)
