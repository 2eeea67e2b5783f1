"""Whole steps on GPUs: a transpose between pencils, and a 7-point step on ever more GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox.transpose import Transpose
from halox_bench.common.kernels import source
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from halox_bench.ranks.methods import paths_taken

PENCIL_SHAPE = (1024, 1024, 512)
STEP_CELLS = 512
_TIMING = Timing(batches=9, batch_s=5e-2)


def transpose_us(comm: Any, stage: Stage, shape: tuple[int, ...] = PENCIL_SHAPE) -> dict[str, Any]:
    """Time a transpose of complex128 from pencils cut along one axis to pencils cut along the next.

    Returns
    -------
    dict
        ``us``, ``bytes_each_way`` to other ranks, ``path``.

    Raises
    ------
    RuntimeError
        If a cell arrives wrong.

    Notes
    -----
    Collective.
    """
    size = comm.size
    with (
        stage.current(),
        Grid(shape, halo=0, proc_shape=(size, 1, 1), comm=comm, device="gpu") as a,
        Grid(shape, halo=0, proc_shape=(1, size, 1), comm=comm, device="gpu") as b,
        Transpose(a, b) as transpose,
    ):
        u, v = a.zeros("c16"), b.zeros("c16")
        u[...] = _numbers(a)
        plan = transpose.plan(u, v)
        plan()
        right = bool((v == _numbers(b)).all())
        if not comm.allreduce(right, load_mpi().LAND):
            raise RuntimeError("a transposed cell is wrong")
        found = RanksClock(comm, stage, _TIMING).measure({"transpose": plan})
        sent = [row for row in plan.explain().rows if row.direction == "send"]
        far = [row for row in sent if row.peer != comm.rank]
        return {
            "us": found["transpose"],
            "bytes_each_way": sum(row.nbytes for row in far),
            "path": paths_taken(far),
        }


def _numbers(grid: Grid) -> Any:
    x, y, z = grid.indices()
    return x * 1e6 + y * 1e3 + z + 0j


def step_us(comm: Any, stage: Stage, cells: int = STEP_CELLS) -> float:
    """Time a 7-point step of cells^3 a rank, its exchange under way while the interior is computed.

    Raises
    ------
    RuntimeError
        If the result is not that of the closed form: cells that are linear in their indices keep their values.

    Notes
    -----
    Collective over ``comm``.
    """
    # At one priority with the exchange, the interior's blocks would go first.
    stage = Stage(stage.device, urgent=False)
    dims = tuple(load_mpi().Compute_dims(comm.size, 3))
    shape = tuple(cells * n for n in dims)
    with (
        stage.current(),
        Grid(
            shape, halo=1, periodic=True, proc_shape=dims, comm=comm, device="gpu", corners=False
        ) as grid,
    ):
        u, v = grid.zeros("f8"), grid.zeros("f8")
        wave = sum(
            stage.xp.cos(2 * np.pi * index / n)
            for index, n in zip(grid.indices(), shape, strict=True)
        )
        grid.interior(u)[...] = wave
        plan, boxes = grid.plan(u), _boxes(cells)
        compute = _computing(stage, u, v)

        def step() -> None:
            plan.start()
            compute(boxes[0])
            plan.finish()
            for box in boxes[1:]:
                compute(box)

        step()
        # Each of the three waves shrinks by a factor of its own.
        wanted = sum(
            stage.xp.cos(2 * np.pi * index / n) * (4 + 2 * np.cos(2 * np.pi / n)) / 6
            for index, n in zip(grid.indices(), shape, strict=True)
        )
        right = bool(stage.xp.allclose(grid.interior(v), wanted, rtol=0, atol=1e-12))
        if not comm.allreduce(right, load_mpi().LAND):
            raise RuntimeError("the step's result is wrong")
        return RanksClock(comm, stage, _TIMING).measure({"step": step})["step"]


Box = tuple[tuple[int, int], ...]


def _boxes(cells: int) -> list[Box]:
    """Return the interior, and the six faces of one cell that are left of the block."""
    all_, inner = (1, cells + 1), (2, cells)
    first, last = (1, 2), (cells, cells + 1)
    return [
        (inner, inner, inner),
        *((side, all_, all_) for side in (first, last)),
        *((inner, side, all_) for side in (first, last)),
        *((inner, inner, side) for side in (first, last)),
    ]


def _computing(stage: Stage, u: Any, v: Any) -> Callable[[Box], None]:
    kernel = stage.xp.RawKernel(source("seven_point", __package__), "seven_point")
    pitches = [np.int32(n) for n in u.shape[1:]]

    def compute(box: Box) -> None:
        (z0, z1), (y0, y1), (x0, x1) = box
        block = (64, 4, 1) if x1 - x0 > 1 else (1, 256, 1)
        blocks = (-(-(x1 - x0) // block[0]), -(-(y1 - y0) // block[1]), min(z1 - z0, 128))
        ranges = [np.int32(n) for n in (x0, x1, y0, y1, z0, z1)]
        kernel(blocks, block, (u, v, *pitches, *ranges))

    return compute
