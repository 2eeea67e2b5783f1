"""Modes of a transform: extents, wave numbers, factors, and the modes that two resolutions have in common.

A field of n points along an axis has the modes 0, 1, ..., -2, -1 in the order of `numpy.fft`. Resolutions n < m have
the modes below n / 2 in common; they are the first and the last of either::

    n = 6          0  1  2 -3 -2 -1
    m = 9          0  1  2  3  4 -4 -3 -2 -1          the modes -3 and 3 of m are the one mode -3 of n

The Nyquist mode of an even n is a cosine, the half of which each of two modes of m carries. So padding gives both of
them one half, and truncation adds them: no field changes its values, and real fields stay real.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

NORMS = ("backward", "ortho", "forward")


def padded(n: int) -> int:
    """Return the points of the 3/2 rule along an axis of ``n`` points."""
    return 3 * n // 2


def kept(n: int) -> list[tuple[slice, slice]]:
    """Return where the modes of ``n`` points are among themselves, and among those of more points.

    Examples
    --------
    >>> kept(5)
    [(slice(0, 3, None), slice(0, 3, None)), (slice(3, 5, None), slice(-2, None, None))]
    """
    low, high = (n + 1) // 2, n // 2
    pieces = [(slice(0, low), slice(0, low))]
    if high:
        pieces.append((slice(low, n), slice(-high, None)))
    return pieces


def wavenumbers(n: int, *, half: bool) -> npt.NDArray[np.float64]:
    """Return the integer wave numbers of an axis of ``n`` points in the order of its coefficients.

    Examples
    --------
    >>> wavenumbers(4, half=False), wavenumbers(4, half=True)
    (array([ 0.,  1., -2., -1.]), array([0., 1., 2.]))
    """
    if half:
        return np.arange(n // 2 + 1, dtype="f8")
    found = np.arange(n, dtype="f8")
    found[(n + 1) // 2 :] -= n
    return found


def factor(norm: str, forward: bool, n: int, points: int) -> float:
    """Return the number by which a sum over exponentials is multiplied.

    ``n`` is the number of points of the spectral resolution, ``points`` that of the physical one, which is larger
    where the spectrum is padded; both along one axis, or over all axes together.

    Examples
    --------
    >>> factor("backward", True, 8, 12), factor("backward", False, 8, 12), factor("ortho", True, 4, 4)
    (0.6666666666666666, 0.125, 0.5)
    """
    scale = {"backward": float(n), "ortho": math.sqrt(n), "forward": 1.0}[norm]
    return scale / points if forward else 1 / scale
