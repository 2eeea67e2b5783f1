"""A whole step of a solver on GPUs: exchange, stencil and residual, launched one by one and as a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from halox.grid import Grid
from halox.runtime.gpu.compiler import OPTIONS
from halox_bench.common.kernels import source
from halox_bench.ranks.clock import RanksClock, Stage, Timing

ONE_BY_ONE = "one by one"
AS_GRAPH = "as a graph"
READ_EACH = "one by one, the residual read by the host after each step"

PAIRS = 5
"""Pairs of steps in a graph: the fields change places at each."""

_TIMING = Timing(batches=7, batch_s=1e-2)
_TOLERANCE = 1e-9


def steps_us(comm: Any, stage: Stage, cells: int, timing: Timing = _TIMING) -> dict[str, float]:
    """Time a step on a periodic grid of cells^3, in all.

    Returns
    -------
    dict
        Microseconds of a step on the slowest rank: `ONE_BY_ONE`, `READ_EACH`, and `AS_GRAPH`.

    Raises
    ------
    RuntimeError
        If a residual is not that of the closed form: a wave along an axis shrinks by a factor a step.
    Exception
        What capturing raises where the steps cannot be captured.

    Notes
    -----
    Collective.
    """
    with (
        stage.current(),
        Grid((cells,) * 3, halo=1, periodic=True, comm=comm, device="gpu", corners=False) as grid,
    ):
        jacobi = Jacobi(grid, stage.xp)
        jacobi.pair()
        stage.settle()
        jacobi.start()
        jacobi.pair()
        jacobi.check()
        graph = stage.captured(jacobi.pair, PAIRS)
        jacobi.start()
        graph()
        jacobi.steps = 2 * PAIRS
        jacobi.check()
        times = RanksClock(comm, stage, timing).measure(
            {ONE_BY_ONE: jacobi.pair, READ_EACH: partial(jacobi.pair, read=True), AS_GRAPH: graph}
        )
        stage.settle()
        return {name: us / (2 * PAIRS if name == AS_GRAPH else 2) for name, us in times.items()}


class Jacobi:
    """The fields of a solver on a grid.

    Parameters
    ----------
    grid : Grid
        Of three equal axes, periodic, with a halo of 1.
    xp : module
        ``cupy``.

    Attributes
    ----------
    residual : array
        A value on the GPU: the Euclidean norm of the last step's change.
    steps : int
        Taken since the start.
    """

    def __init__(self, grid: Grid, xp: Any) -> None:
        self._grid, self._xp = grid, xp
        self._fields = grid.zeros("f8"), grid.zeros("f8")
        self._change = grid.zeros("f8")
        self.residual = xp.zeros((), "f8")
        self._launch = _launcher(xp, tuple(map(int, grid.rank_shape)))
        self.start()

    def start(self) -> None:
        """Put a wave along the last axis into the first field."""
        x = self._grid.indices()[-1]
        cells = self._grid.grid_shape[-1]
        self._grid.interior(self._fields[0])[...] = self._xp.cos(2 * np.pi * x / cells)
        self.steps = 0

    def pair(self, *, read: bool = False) -> None:
        """Take two steps, there and back between the fields; read the residual of each if asked."""
        for before, after in (self._fields, self._fields[::-1]):
            self._grid.exchange(before)
            self._launch(before, after, self._change)
            self._grid.norm(self._change, out=self.residual)
            if read:
                float(self.residual)
        self.steps += 2

    def check(self) -> None:
        """Compare the residual with what it must be.

        Raises
        ------
        RuntimeError
            If it is another.
        """
        cells = self._grid.grid_shape[-1]
        factor = (4 + 2 * np.cos(2 * np.pi / cells)) / 6
        right = (1 - factor) * factor ** (self.steps - 1) * np.sqrt(cells**3 / 2)
        found = float(self.residual)
        if not abs(found - right) <= _TOLERANCE * right:
            raise RuntimeError(
                f"the residual after {self.steps} steps is {found!r}, it must be {right!r}"
            )


def _launcher(xp: Any, shape: tuple[int, ...]) -> Callable[..., None]:
    kernel = xp.RawModule(code=source("jacobi", __package__), options=OPTIONS).get_function(
        "jacobi"
    )
    extents = [np.int32(n) for n in shape]
    rows, threads = shape[0] * shape[1], min(256, -(-shape[2] // 32) * 32)
    blocks = min(rows, 1 << 20)

    def launch(before: Any, after: Any, change: Any) -> None:
        kernel((blocks,), (threads,), (before, after, change, *extents))

    return launch
