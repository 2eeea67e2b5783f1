"""The nine-point operator: weights, and one Jacobi step on NumPy or CuPy arrays.

    new = centre * old + cardinal * (N + S + W + E) + diagonal * (NW + NE + SW + SE)

The NumPy and the CUDA kernel do the same operations on each point in the same order, without fused
multiply-add. Their results are therefore equal bit for bit, for any division of the plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..device import kernels

FLOPS_PER_POINT = 11
"""Operations by the original's count: three multiplications and eight additions."""

# A strip of rows of two fields and two temporaries should stay in the L2 cache of a core.
_STRIP_BYTES = 512 * 1024

# GPU kernel: threads along a row, and rows per thread.
_THREADS = 128
_ROWS_PER_THREAD = 16


@dataclass(frozen=True)
class Weights:
    """Weights of the centre, of the four cardinal and of the four diagonal neighbours."""

    centre: float
    cardinal: float
    diagonal: float

    @property
    def total(self) -> float:
        """Sum over all nine points: the growth of a constant field in a step."""
        return self.centre + 4 * self.cardinal + 4 * self.diagonal


EXACT_WEIGHTS = Weights(0.25, 0.15, 0.05)


def weights(*, exact: bool) -> Weights:
    """Return the weights: the original's, rounded to float32, or the exact ones.

    Examples
    --------
    >>> weights(exact=False).cardinal
    0.15000000596046448
    """
    if exact:
        return EXACT_WEIGHTS
    w = EXACT_WEIGHTS
    return Weights(*(float(np.float32(value)) for value in (w.centre, w.cardinal, w.diagonal)))


class Stencil:
    """One Jacobi step on a fixed part of arrays of one shape and dtype.

    Parameters
    ----------
    like : numpy.ndarray or cupy.ndarray
        Example of the arrays: C-contiguous, float32 or float64. Its memory (host or device)
        selects the kernel.
    rows, cols : tuple of int
        Half-open ranges of the points to compute; the array must have one more point on each side.
    weights : Weights
        Weights of the operator, rounded to the dtype.
    xp : module
        The array's module, ``grid.xp``.

    Notes
    -----
    Not collective. On a device the step is ordered with the current stream.
    """

    def __init__(
        self,
        like: Any,
        rows: tuple[int, int],
        cols: tuple[int, int],
        weights: Weights,
        xp: Any = np,
    ) -> None:
        self._rows, self._cols = rows, cols
        scalar = like.dtype.type
        self._weights = tuple(
            scalar(value) for value in (weights.centre, weights.cardinal, weights.diagonal)
        )
        if xp is np:
            width = cols[1] - cols[0]
            self._strip = max(1, _STRIP_BYTES // (4 * (width + 2) * like.itemsize))
            self._vertical = np.empty((self._strip, width + 2), like.dtype)
            self._pairs = np.empty((self._strip, width), like.dtype)
            self._step = self._step_numpy
        else:
            if not like.flags.c_contiguous:
                raise ValueError("the device kernel needs a C-contiguous array")
            self._function = _compiled(xp, like.dtype.str[1:])
            self._step = self._step_device

    def __call__(self, old: Any, new: Any) -> None:
        """Compute the new values of the part from ``old`` in ``new``; the rest of ``new`` is unchanged."""
        self._step(old, new)

    def _step_numpy(self, old: np.ndarray, new: np.ndarray) -> None:
        """Process the rows in strips; neighbouring columns share the sums of vertical neighbours."""
        centre, cardinal, diagonal = self._weights
        (top, bottom), (left, right) = self._rows, self._cols
        around, here = slice(left - 1, right + 1), slice(left, right)
        west, east = slice(left - 1, right - 1), slice(left + 1, right + 1)
        for start in range(top, bottom, self._strip):
            stop = min(start + self._strip, bottom)
            vertical = self._vertical[: stop - start]
            pairs = self._pairs[: stop - start]
            out = new[start:stop, here]
            np.add(old[start - 1 : stop - 1, around], old[start + 1 : stop + 1, around], vertical)
            np.add(vertical[:, :-2], vertical[:, 2:], pairs)
            np.multiply(pairs, diagonal, pairs)
            np.add(old[start:stop, west], old[start:stop, east], out)
            np.add(out, vertical[:, 1:-1], out)
            np.multiply(out, cardinal, out)
            np.add(out, pairs, out)
            np.multiply(old[start:stop, here], centre, pairs)
            np.add(out, pairs, out)

    def _step_device(self, old: Any, new: Any) -> None:
        (top, bottom), (left, right) = self._rows, self._cols
        blocks = (-(-(right - left) // _THREADS), -(-(bottom - top) // _ROWS_PER_THREAD))
        bounds = map(np.int32, (top, bottom, left, right))
        arguments = (old, new, np.int64(old.shape[1]), *bounds, *self._weights)
        self._function(blocks, (_THREADS,), arguments)


@cache
def _compiled(xp: Any, dtype: str) -> Any:
    """Compile ``stencil.cu`` for a dtype (``"f4"``, ``"f8"``) and return the kernel."""
    real = {"f4": "float", "f8": "double"}[dtype]
    options = ("-fmad=false", f"-DREAL={real}", f"-DROWS_PER_THREAD={_ROWS_PER_THREAD}")
    (function,) = kernels(xp, __package__, "stencil", ("stencil_step",), *options)
    return function
