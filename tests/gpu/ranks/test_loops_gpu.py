"""Loops on GPUs among ranks: the GPU repeats steps on paths that need no host; on other paths the host calls them."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from halox.errors import ExchangeTimeoutError
from tests.gpu.ranks.paths import BY_HOST, COPIES, NCCL, PEER, along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.ranks.stepping import Stepper  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


@pytest.mark.parametrize(("every", "exchanges"), [(1, 1), (1, 2), (5, 3)])
@along(PEER)
def test_steps_repeated_by_the_gpu(
    way: Way, every: int, exchanges: int, comm: MPI.Intracomm
) -> None:
    """After an odd number of exchanges, rounds begin in either slot of the buffers."""
    assert agree(steps_until_a_sum(way, every, exchanges, comm) == "", comm)


@along([*NCCL, *BY_HOST, *COPIES])
def test_steps_called_by_the_host(way: Way, comm: MPI.Intracomm) -> None:
    assert agree("cannot be captured" in steps_until_a_sum(way, 5, 1, comm), comm)


def steps_until_a_sum(way: Way, every: int, exchanges: int, comm: MPI.Intracomm) -> str:
    """Check every halo of every step, and the numbers of steps; return why the host calls the steps."""
    with way.box(comm) as grid:
        stepper = Stepper(grid)
        plan = grid.plan(stepper.u)
        assert way.check_taken(plan, comm)
        total, stop = cupy.zeros((), "f8"), cupy.zeros((), bool)
        one, end = grid.ones(), cupy.zeros((), "f8")
        steps = cupy.zeros((), "f8")

        def step() -> None:
            for _ in range(exchanges):
                stepper.advance()
                plan()
                stepper.check()
            grid.sum(one, out=total)
            cupy.add(steps, total, out=steps)
            cupy.greater_equal(steps, end, out=stop)

        cells = grid.grid_shape[0] * grid.grid_shape[1] * grid.grid_shape[2]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cupy.cuda.runtime.deviceSynchronize()
            loop = grid.loop(step, until=stop, every=every)
            made = 0
            for count in (1, 7, 100):
                steps[...] = 0
                end[...] = count * cells
                rounded = -(-count // every) * every
                assert agree(loop() == rounded, comm), loop
                made += rounded
                assert agree(stepper.found() == (made * exchanges, 0), comm), stepper.found()
            stream.synchronize()
        return loop.why_host


@pytest.mark.ranks(2)
@along(PEER[:1])
def test_a_rank_that_ends_alone(
    way: Way, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flag differs. The other rank waits for it on the GPU until the time limit, and both raise an error."""
    monkeypatch.setenv("HALOX_TIMEOUT", "2")
    own = comm.Dup()
    with way.box(own) as grid:
        stepper = Stepper(grid)
        plan, stop = grid.plan(stepper.u), cupy.zeros(1, bool)
        ends = comm.rank == 1

        def step() -> None:
            plan()
            if ends:
                cupy.greater_equal(stepper.step, 20, out=stop)
            cupy.add(stepper.step, 1, out=stepper.step)

        loop = grid.loop(step, until=stop, most=1_000_000_000)
        with pytest.raises(ExchangeTimeoutError):
            loop()
        comm.Barrier()
    own.Free()
