"""A 7-point step on GPUs, with its exchange beside the interior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox_bench.common.kernels import source
from halox_bench.ranks.clock import RanksClock, Stage, Timing

STEP_CELLS = 512
_TIMING = Timing(batches=9, batch_s=5e-2)


def step_us(comm: Any, stage: Stage, cells: int = STEP_CELLS) -> float:
    """Time a 7-point step of cells^3 a rank; the interior is computed during the exchange.

    Raises
    ------
    RuntimeError
        If the result differs from the closed form: each wave shrinks by a factor.

    Notes
    -----
    Collective over ``comm``.
    """
    # With the exchange's priority the interior's blocks would run first.
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
        # Each of the three waves has its factor.
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
    """Return the interior, and the six remaining faces of one cell."""
    all_, inner = (1, cells + 1), (2, cells)
    first, last = (1, 2), (cells, cells + 1)
    return [
        (inner, inner, inner),
        *((side, all_, all_) for side in (first, last)),
        *((inner, side, all_) for side in (first, last)),
        *((inner, inner, side) for side in (first, last)),
    ]


def _computing(stage: Stage, u: Any, v: Any) -> Callable[[Box], None]:
    kernel = stage.xp.RawKernel(source("seven_point"), "seven_point")
    pitches = [np.int32(n) for n in u.shape[1:]]

    def compute(box: Box) -> None:
        (z0, z1), (y0, y1), (x0, x1) = box
        block = (64, 4, 1) if x1 - x0 > 1 else (1, 256, 1)
        blocks = (-(-(x1 - x0) // block[0]), -(-(y1 - y0) // block[1]), min(z1 - z0, 128))
        ranges = [np.int32(n) for n in (x0, x1, y0, y1, z0, z1)]
        kernel(blocks, block, (u, v, *pitches, *ranges))

    return compute
