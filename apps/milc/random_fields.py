"""Random fields that depend on a seed and on a site's number only, and not on the ranks.

Numbers are those of the counter-based generator Philox 4x64: its key is the seed and the number of a stream, its
counter the number of the site, so that any rank can begin anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_A_COUNT = 4
"""Numbers of 64 bits that the generator makes for each count."""

LINKS, SOURCE, TEST = 0, 1, 2
"""Streams of a run: the gauge field, the source, and vectors that the operator is tested with."""


def uniforms(
    shape: Sequence[int], owned: Sequence[slice], each: int, seed: int, stream: int
) -> np.ndarray:
    """Return ``each`` random numbers between -1 and 1 for every site of a block, float64.

    Parameters
    ----------
    shape : sequence of int
        Sites of the lattice along t, z, y and x.
    owned : sequence of slice
        The block, likewise.
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

    The first two rows are random numbers made orthonormal, and the third is the conjugate of their cross product.
    """
    found = uniforms(shape, owned, 12 * count, seed, stream)
    rows = found.view(np.complex128).reshape(*found.shape[:-1], count, 2, 3)
    matrices = np.empty((*rows.shape[:-2], 3, 3), np.complex128)
    a, b, c = (matrices[..., row, :] for row in range(3))
    a[...] = rows[..., 0, :] / _norms(rows[..., 0, :])
    b[...] = rows[..., 1, :]
    b -= (a.conj() * b).sum(axis=-1, keepdims=True) * a
    b /= _norms(b)
    c[...] = np.cross(a, b).conj()
    return matrices


def _norms(vectors: np.ndarray) -> np.ndarray:
    squares = vectors.real**2 + vectors.imag**2
    found: np.ndarray = np.sqrt(squares.sum(axis=-1, keepdims=True))
    return found
