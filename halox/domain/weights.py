"""Weights of a grid's cells: checks on all ranks, and balanced blocks by rank 0, which alone needs them."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.decomposition import Decomposition, Halo
from halox.decomposition.balance import Balance, balanced
from halox.decomposition.procgrid import workable_proc_shapes
from halox.errors import DecompositionError
from halox.values import check_unmasked, shown


def weights_text(weights: object, grid_shape: tuple[int, ...]) -> str | None:
    """Return a text that is the same on ranks with equal arrays; raises `DecompositionError` for other objects."""
    if weights is None:
        return None
    if callable(weights):
        return "a function"
    array = _as_array(weights, grid_shape)
    checksum = zlib.crc32(np.ascontiguousarray(array).data)
    return f"{array.dtype} numbers of shape {array.shape} with checksum {checksum:08x}"


def balanced_by_weights(
    weights: object,
    decomposition: Decomposition,
    halo: Halo,
    given: tuple[int, ...],
    checkerboard: bool,
    block_cells: int,
) -> Balance:
    """Return balanced blocks on a process grid that agrees with ``given``; ``decomposition`` is the even division."""
    shape, ndim = decomposition.grid_shape, decomposition.ndim
    if callable(weights):
        try:
            weights = weights(*np.ix_(*map(np.arange, shape)))
        except Exception as error:
            raise DecompositionError(
                f"weights: the function raised {type(error).__name__}: {error}"
            ) from error
    array = _as_array(weights, shape)
    if not 0 <= array.min() <= array.max() < math.inf:
        at = tuple(np.argwhere(~((array >= 0) & (array < math.inf)))[0].tolist())
        raise DecompositionError(
            f"weights: expected finite numbers of at least 0, got {array[at]} at {at}"
        )
    if array.max() == 0:
        raise DecompositionError("weights: all are 0; give some cells a weight, or leave it out")
    units = (*(1,) * (ndim - 1), 2 if checkerboard else 1)
    axes, proc_shapes = workable_proc_shapes(
        *(decomposition.ranks, shape, halo, decomposition.periodic, given, (None,) * ndim, units)
    )
    return balanced(array, axes, proc_shapes, decomposition.proc_shape, block_cells)


def _as_array(weights: object, grid_shape: tuple[int, ...]) -> npt.NDArray[Any]:
    check_unmasked(weights, "weights")
    try:
        array = np.asarray(weights)
    except Exception as error:
        raise DecompositionError(f"weights: NumPy cannot read the array: {error}") from error
    fits = [extent in (1, n) for extent, n in zip(array.shape, grid_shape, strict=False)]
    if array.dtype.kind not in "biuf" or array.ndim != len(grid_shape) or not all(fits):
        raise DecompositionError(
            f"weights: expected numbers of shape {grid_shape}, or 1 along an axis without influence, got {array.dtype} "
            f"of shape {shown(array.shape)}"
        )
    return array
