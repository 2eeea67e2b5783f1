"""Modes of a transform: extents, wave numbers, factors, and the common modes of two resolutions.

A field of n points along an axis has the modes 0, 1, ..., -2, -1 in the order of `numpy.fft`. Two resolutions n < m
have the modes below n / 2 in common. These are the first and the last modes of either resolution::

    n = 6          0  1  2 -3 -2 -1
    m = 9          0  1  2  3  4 -4 -3 -2 -1          the modes -3 and 3 of m are the one mode -3 of n

The Nyquist mode of an even n is a cosine. In resolution m it is the sum of two modes, each with half of its amplitude.
So padding writes one half to each of the two modes, and truncation adds the two modes. This keeps the values of a
field, and real fields stay real.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

NORMS = ("backward", "ortho", "forward")


def padded(n: int) -> int:
    """Return the number of points by the 3/2 rule for an axis of ``n`` points."""
    return 3 * n // 2


def common_modes(n: int) -> list[tuple[slice, slice]]:
    """Return the slices of the modes of ``n`` points: in an array of these modes, and in an array of more modes.

    Examples
    --------
    >>> common_modes(5)
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
    numbers = np.arange(n, dtype="f8")
    numbers[(n + 1) // 2 :] -= n
    return numbers


def factor(norm: str, forward: bool, n: int, points: int) -> float:
    """Return the normalization factor of a sum over exponentials.

    ``n`` is the number of points of the spectral resolution, and ``points`` of the physical resolution, which is larger
    if the spectrum is padded. Both count along one axis, or over all axes together.

    Examples
    --------
    >>> factor("backward", True, 8, 12), factor("backward", False, 8, 12), factor("ortho", True, 4, 4)
    (0.6666666666666666, 0.125, 0.5)
    """
    scale = {"backward": float(n), "ortho": math.sqrt(n), "forward": 1.0}[norm]
    return scale / points if forward else 1 / scale
