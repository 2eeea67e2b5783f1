"""The operators on NumPy arrays.

Arrays are blocks of ``(z, y, x)`` points with one layer of ghosts around them, float64. Counted with
the ghosts, coarse point c coincides with fine point 2 c in each direction::

    coarse   0       1       2       3          of m = 2 points: 0 and 3 are ghosts
    fine     0   1   2   3   4   5              0 and 5 are ghosts

All operators work in pieces with temporaries that stay in the L2 cache of a core, so that the
arrays themselves are read and written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..common import Kernel
from .classes import Coefficients

Array = np.ndarray

PIECE = 24576
"""Points per piece. All temporaries together have about 1 MiB, the L2 cache of a core. With fewer
points the overhead of NumPy calls is noticeable."""


class HostKernels:
    """Factory of operators that are bound to their arrays: functions without arguments."""

    def stencil(self, source: Array, base: Array, out: Array, weights: Coefficients) -> Kernel:
        """Return ``out = base + S source`` with a 27-point operator S.

        Parameters
        ----------
        source : ndarray
            The operator reads its ghosts. Must not be ``out``.
        base, out : ndarray
            May be the same array. All three arrays are C-contiguous and have the same shape.
        weights : tuple of float

        Raises
        ------
        ValueError
            If an array is not C-contiguous, or ``source`` is ``out``.

        Notes
        -----
        NumPy is fastest on long lines. The operator therefore processes all points from the first
        interior point to the last as one line, which includes ghosts. The ghosts of ``out`` are
        finite but meaningless until an exchange fills them.
        """
        check_stencil(source, base, out)
        _, rows, row = source.shape
        plane = rows * row
        u, v, r = (array.reshape(-1) for array in (source, base, out))
        first, last = plane + row + 1, u.size - plane - row - 1
        piece = max(PIECE, row)
        vertical = np.empty(piece + 2 * row + 2)
        diagonals, faces, beside, scratch = (np.empty(piece + 2) for _ in range(4))
        centre, face, edge, corner = weights

        def run() -> None:
            for start in range(first, last, piece):
                n = min(piece, last - start)
                # z and y neighbours of these points, and of one more point on either side.
                w, d, f = vertical[: n + 2 * row + 2], diagonals[: n + 2], faces[: n + 2]
                low, wide = start - row - 1, n + 2 * row + 2
                np.add(u[low - plane : low - plane + wide], u[low + plane : low + plane + wide], w)
                np.add(w[: n + 2], w[2 * row :], d)
                np.add(u[low : low + n + 2], u[low + 2 * row : low + 2 * row + n + 2], f)
                np.add(f, w[row : row + n + 2], f)
                here = u[start - 1 : start + n + 1]
                # The contribution of the x neighbours, then of the point itself.
                p, s = beside[: n + 2], scratch[: n + 2]
                _combine(((face, here), (edge, f), (corner, d)), p, s)
                q = f[1:-1]
                _combine(((face, q), (centre, here[1:-1]), (edge, d[1:-1])), q, s[1:-1])
                np.add(q, p[:-2], q)
                np.add(q, p[2:], q)
                np.add(v[start : start + n], q, r[start : start + n])

        return run

    def restrict(self, fine: Array, coarse: Array) -> Kernel:
        """Return the 27-point average of ``fine`` around the interior points of ``coarse``.

        The weights 1/2, 1/4, 1/8, 1/16 are 1/16 of the product of (1, 2, 1) in each direction. The
        operator averages along one direction after the other, on fewer points each time.
        """
        planes, rows, columns = (extent - 2 for extent in coarse.shape)
        width = fine.shape[2]
        deep, high = _piece_shape(2 * width, rows, planes)
        sum_z = np.empty((deep, 2 * high + 1, width))
        sum_y = np.empty((deep, high, width))
        sum_x = np.empty((deep, high, columns))

        def run() -> None:
            for a, n in _pieces(1, planes + 1, deep):
                for b, k in _pieces(1, rows + 1, high):
                    z, y, x = sum_z[:n, : 2 * k + 1], sum_y[:n, :k], sum_x[:n, :k]
                    read = fine[2 * a - 1 : 2 * (a + n), 2 * b - 1 : 2 * (b + k)]
                    _one_two_one(read[:-2:2], read[1:-1:2], read[2::2], z)
                    _one_two_one(z[:, :-2:2], z[:, 1:-1:2], z[:, 2::2], y)
                    _one_two_one(y[..., 1:-2:2], y[..., 2:-1:2], y[..., 3::2], x)
                    np.multiply(x, 1 / 16, coarse[a : a + n, b : b + k, 1:-1])

        return run

    def prolong(self, coarse: Array, fine: Array, *, add: bool) -> Kernel:
        """Return the trilinear interpolation of ``coarse`` to ``fine``, or its addition there.

        The operator reads the ghosts of ``coarse`` and computes the ghosts of ``fine``, so that no
        exchange is needed.
        """
        # Between coarse points c and c + 1 are fine points 2 c and 2 c + 1.
        planes, rows, columns = (extent - 1 for extent in coarse.shape)
        width = 2 * columns
        deep, high = _piece_shape(2 * width, rows, planes)
        even = np.empty((deep + 1, high + 1, width))
        odd = np.empty((deep + 1, high, width))
        middle = np.empty((deep, high, width))

        def put(values: Array, target: Array) -> None:
            if add:
                np.add(target, values, target)
            else:
                target[...] = values

        def run() -> None:
            for a, n in _pieces(0, planes, deep):
                for b, k in _pieces(0, rows, high):
                    e, o, m = even[: n + 1, : k + 1], odd[: n + 1, :k], middle[:n, :k]
                    read = coarse[a : a + n + 1, b : b + k + 1]
                    e[..., ::2] = read[..., :-1]
                    _mean(read[..., :-1], read[..., 1:], e[..., 1::2])
                    _mean(e[:, :-1], e[:, 1:], o)
                    write = fine[2 * a : 2 * (a + n), 2 * b : 2 * (b + k)]
                    put(e[:-1, :-1], write[::2, ::2])
                    put(o[:-1], write[::2, 1::2])
                    put(_mean(e[:-1, :-1], e[1:, :-1], m), write[1::2, ::2])
                    put(_mean(o[:-1], o[1:], m), write[1::2, 1::2])

        return run


def check_stencil(source: Array, base: Array, out: Array) -> None:
    """Refuse arrays that the stencils on the host and on a GPU do not support.

    Raises
    ------
    ValueError
        If an array is not C-contiguous, or ``source`` is ``out``.
    """
    if not all(array.flags.c_contiguous for array in (source, base, out)):
        raise ValueError("the stencil needs C-contiguous arrays")
    if source is out:
        raise ValueError("the stencil reads neighbours: source and out must differ")


def _combine(terms: tuple[tuple[float, Array], ...], out: Array, scratch: Array) -> None:
    """Compute the sum of weight times array; ``out`` may be the first array."""
    written = False
    for weight, array in terms:
        if weight == 0:
            continue
        target = scratch if written else out
        np.multiply(array, weight, target)
        if written:
            np.add(out, scratch, out)
        written = True
    if not written:
        out.fill(0)


def _one_two_one(low: Array, here: Array, high: Array, out: Array) -> None:
    np.add(low, high, out)
    np.add(out, here, out)
    np.add(out, here, out)


def _mean(a: Array, b: Array, out: Array) -> Array:
    np.add(a, b, out)
    np.multiply(out, 0.5, out)
    return out


def _piece_shape(row: int, rows: int, planes: int) -> tuple[int, int]:
    """Return the planes and rows of a piece, for temporaries of ``row`` points per row."""
    high = max(1, min(rows, PIECE // row))
    deep = max(1, min(planes, PIECE // (row * high))) if high == rows else 1
    return deep, high


def _pieces(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a half-open range: first index and length of each piece."""
    for start in range(first, last, size):
        yield start, min(size, last - start)
