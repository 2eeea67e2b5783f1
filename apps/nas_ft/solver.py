"""The problem on one rank: its fields, and the operations of a run on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import halox

from ..capture import captured
from ..common import Timer
from .classes import DECAY, ProblemClass, sample_points
from .device_kernels import DeviceKernels
from .host_kernels import HostKernels
from .initial import factors

PARTS = ("evolve", "inverse FFT", "checksum")
"""Names of the parts of an iteration."""


class Solver:
    """The problem on one rank, ready to run.

    Parameters
    ----------
    grid : halox.Grid
        The points of the class along z, y and x, without halo.
    problem : ProblemClass
    stream : cupy.cuda.Stream or None
        The current stream on a GPU.

    Notes
    -----
    Collective, as are all methods except `start` and `wait`.

    An iteration is three calls without decisions, so that it can be captured in a graph. Device memory therefore holds
    the number of the iteration, which selects the row for the sampled points. The rows of all iterations are summed at
    the end, so that no iteration waits for the host.
    """

    def __init__(self, grid: halox.Grid, problem: ProblemClass, stream: Any = None) -> None:
        self._grid, self._problem, self._stream = grid, problem, stream
        xp = grid.xp
        self._kernels = kernels = HostKernels() if grid.device == "cpu" else DeviceKernels(xp)
        # The forward transform, which runs once, scales. The inverse of each iteration need not scale, and a checksum
        # is a plain sum.
        self.fft = fft = halox.FFT(grid, norm="forward")
        self.u = grid.zeros("c16")
        self.spectrum = fft.grid.zeros("c16")

        nz, ny, nx = grid.rank_shape
        self._numbers = tuple(xp.empty(n, np.uint64) for n in (nz, ny, 2 * nx))
        self._initial = kernels.initial(self.u, self._numbers)
        self._decays = tuple(xp.empty(n) for n in fft.grid.rank_shape)
        self._step = xp.zeros(1, np.int64)
        offsets = xp.asarray(sampled(problem.shape, grid.owned))
        self._samples = xp.zeros((problem.iterations, len(offsets)), np.complex128)
        evolve = kernels.evolve(self.spectrum, self._decays, self._step)
        sample = kernels.sample(self.u, offsets, self._samples, self._step)
        self._iteration = tuple(zip(PARTS, (evolve, self._inverse, sample), strict=True))
        self._iterate: Callable[[], None] = self._do_iteration

    def start(self) -> None:
        """Set the factors of the evolution, and u to its initial values."""
        for found, waves in zip(self._decays, self.fft.wavenumbers(), strict=True):
            xp = self._grid.xp
            xp.multiply(waves.ravel(), waves.ravel(), out=found)
            xp.multiply(found, DECAY, out=found)
            xp.exp(found, out=found)
        for values, target in zip(
            factors(self._problem.shape, self._grid.owned), self._numbers, strict=True
        ):
            self._kernels.copy(values, target)
        self._initial()
        self._step.fill(0)

    def forward(self) -> None:
        """Transform the initial values."""
        self.fft.forward(self.u, out=self.spectrum)

    def iterate(self) -> None:
        """Run one iteration; at most ``problem.iterations`` calls may follow a `start`."""
        self._iterate()

    def capture(self) -> None:
        """Capture the iteration, which must have run before, and replay it from now on."""
        self._iterate = captured(self._do_iteration, self._stream)

    def iterate_stepwise(self, timer: Timer) -> dict[str, float]:
        """Run one iteration part by part without the graph; return the seconds of each part."""
        marks = [timer.mark()]
        for _, call in self._iteration:
            call()
            marks.append(timer.mark())
        return dict(zip(PARTS, timer.seconds(pairwise(marks)), strict=True))

    def checksums(self) -> np.ndarray:
        """Return the checksums of all iterations, complex128, on all ranks; wait for the GPU.

        Every rank sums its own points, and these sums are added in rank order.
        """
        of_ranks = self._grid.comm.allgather(self._kernels.sums(self._samples))
        total: np.ndarray = np.sum(of_ranks, axis=0)
        return total

    def wait(self) -> None:
        """Wait for the GPU to complete all work; local."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Close the transform; the grid belongs to the caller."""
        self.fft.close()

    def __enter__(self) -> Solver:
        """Return the solver."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the solver, unless an exception propagates: other ranks may not call `close` then."""
        if kind is None:
            self.close()

    def _inverse(self) -> None:
        self.fft.backward(self.spectrum, out=self.u)

    def _do_iteration(self) -> None:
        for _, call in self._iteration:
            call()


def sampled(shape: tuple[int, int, int], owned: tuple[slice, ...]) -> np.ndarray:
    """Return the linear indices, int64, of all points of a checksum that are in a contiguous block.

    Parameters
    ----------
    shape : tuple of int
        Points of the grid along z, y and x.
    owned : tuple of slice
        Ranges of the block along z, y and x.

    Examples
    --------
    >>> sampled((64, 64, 64), (slice(0, 64), slice(0, 64), slice(0, 2))).tolist()[:2]
    [647, 0]
    """
    points = sample_points(shape)
    starts, stops = (np.array([getattr(part, end) for part in owned]) for end in ("start", "stop"))
    mine = points[((points >= starts) & (points < stops)).all(axis=1)] - starts
    found: np.ndarray = np.ravel_multi_index(tuple(mine.T), tuple(stops - starts))
    return found.astype(np.int64)
