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


@pytest.mark.parametrize(("every", "half_steps"), [(1, 1), (1, 2), (5, 3)])
@along([*PEER, *NCCL, *BY_HOST, *COPIES])
def test_steps_until_a_sum(way: Way, every: int, half_steps: int, comm: MPI.Intracomm) -> None:
    """Every halo of every step is checked; the flag comes from a reduction. An odd number of exchanges a round
    begins rounds in either slot of the buffers."""
    with way.box(comm) as grid:
        stepper = Stepper(grid)
        plan = grid.plan(stepper.u)
        assert way.check_taken(plan, comm)
        total, stop = cupy.zeros((), "f8"), cupy.zeros((), bool)
        one, end = grid.ones(), cupy.zeros((), "f8")
        steps = cupy.zeros((), "f8")

        def step() -> None:
            for _ in range(half_steps):
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
            for count in (1, 7, 300):
                steps[...] = 0
                end[...] = count * cells
                rounded = -(-count // every) * every
                assert agree(loop() == rounded, comm), loop
                made += rounded
                assert agree(stepper.found() == (made * half_steps, 0), comm), stepper.found()
            stream.synchronize()
        on_gpu = way.path.startswith("peer")
        assert agree(bool(loop.why_host) != on_gpu, comm), loop


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
        plan, stop = grid.plan(stepper.u), cupy.zeros((), bool)
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
