"""Random fields that depend only on a seed and on the number of a site, not on the ranks.

They use the counter-based generator Philox 4x64. Its key is the seed and the number of a stream, and its counter is the
number of the site, so that a rank can start at any site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_A_COUNT = 4
"""64-bit numbers that the generator returns for each count."""

LINKS, SOURCE, TEST = 0, 1, 2
"""Streams of a run: the gauge field, the source, and vectors for checks of the operator."""


def uniforms(
    shape: Sequence[int], owned: Sequence[slice], each: int, seed: int, stream: int
) -> np.ndarray:
    """Return ``each`` random numbers between -1 and 1 for every site of a block, float64.

    Parameters
    ----------
    shape : sequence of int
        Sites of the lattice along t, z, y and x.
    owned : sequence of slice
        Ranges of the block along t, z, y and x.
    each : int
        A multiple of 4.
    seed, stream : int
        At least 0, below 2**64.

    Returns
    -------
    ndarray
        ``(t, z, y, x, each)``.
    """
    counts = each // _A_COUNT
    block = tuple(part.stop - part.start for part in owned)
    found = np.empty((*block[:3], block[3] * each))
    _, nz, ny, nx = shape
    for t, z, y in np.ndindex(*block[:3]):
        row = (owned[2].start + y) + ny * (owned[1].start + z + nz * (owned[0].start + t))
        first = owned[3].start + nx * row
        generator = np.random.Philox(
            key=np.array([seed, stream], np.uint64), counter=first * counts
        )
        found[t, z, y] = generator.random_raw(block[3] * each) >> np.uint64(11)
    found *= 2.0**-52
    found -= 1
    return found.reshape(*block, each)


def random_vectors(
    shape: Sequence[int], owned: Sequence[slice], seed: int, stream: int
) -> np.ndarray:
    """Return a random colour vector for every site of a block, ``(t, z, y, x, 3)`` complex128."""
    found = uniforms(shape, owned, 8, seed, stream)[..., :6]
    return np.ascontiguousarray(found).view(np.complex128)


def random_matrices(
    shape: Sequence[int], owned: Sequence[slice], count: int, seed: int, stream: int
) -> np.ndarray:
    """Return ``count`` random SU(3) matrices for every site of a block, ``(t, z, y, x, count, 3, 3)`` complex128.

    They are distributed by the Haar measure: see `special_unitary`.
    """
    numbers = uniforms(shape, owned, 12 * count, seed, stream)
    found: np.ndarray = special_unitary(numbers.reshape(*numbers.shape[:-1], count, 12))
    return found


def special_unitary(numbers: Any) -> Any:
    """Return SU(3) matrices ``(..., 3, 3)`` complex128 from random numbers between -1 and 1, ``(..., 12)``.

    The first row is a random unit vector. The second row is a second random unit vector, made orthogonal to the first.
    The third row is the conjugate of their cross product. The unit vectors are uniform on the sphere, so the matrices
    are distributed by the Haar measure.

    Notes
    -----
    NumPy or CuPy arrays. NumPy's sine and cosine are not used, since their bits may depend on the position in an array.
    """
    vectors = _unit_vectors(numbers.reshape(*numbers.shape[:-1], 2, 6))
    matrices = np.empty_like(vectors, shape=(*vectors.shape[:-2], 3, 3))
    a, b, c = (matrices[..., row, :] for row in range(3))
    a[...] = vectors[..., 0, :]
    b[...] = vectors[..., 1, :]
    b -= (a.conj() * b).sum(axis=-1, keepdims=True) * a
    b /= _norms(b)
    c[...] = np.cross(a, b).conj()
    return matrices


def _unit_vectors(numbers: Any) -> Any:
    """Return vectors ``(..., 3)`` uniform on the unit sphere of three complex dimensions, from ``(..., 6)`` numbers.

    Two random points divide the unit interval into three lengths, which are uniform on the simplex of sum 1. The
    lengths are the squared moduli of the components, and three further numbers are their phases. The last number is not
    used.
    """
    one, other = (1 + numbers[..., 0]) / 2, (1 + numbers[..., 1]) / 2
    low, high = np.minimum(one, other), np.maximum(one, other)
    squares = np.stack([low, high - low, 1 - high], axis=-1)
    cosines, sines = _cosines_and_sines(numbers[..., 2:5])
    found = cosines + 1j * sines
    found *= np.sqrt(squares)
    return found / _norms(found)


def _cosines_and_sines(turns: Any) -> tuple[Any, Any]:
    """Return the cosines and sines of pi times numbers between -1 and 1."""
    x = turns * (math.pi / 4)
    square = x * x
    cosines, sines = np.ones_like(x), np.ones_like(x)
    for n in range(16, 0, -2):
        cosines = 1 - cosines * square / (n * (n - 1))
        sines = 1 - sines * square / (n * (n + 1))
    sines *= x
    for _ in range(2):
        cosines, sines = cosines * cosines - sines * sines, 2 * cosines * sines
    return cosines, sines


def _norms(vectors: Any) -> Any:
    squares = vectors.real**2 + vectors.imag**2
    return np.sqrt(squares.sum(axis=-1, keepdims=True))
