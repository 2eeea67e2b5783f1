"""Weights of a grid's cells: checks on all ranks, and balanced blocks by rank 0, which alone needs them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.decomposition.balance import Balance, balanced
from halox.decomposition.normalise import normalise_proc_shape
from halox.decomposition.procgrid import proc_shapes
from halox.domain.options import GridOptions
from halox.errors import DecompositionError
from halox.values import check_unmasked, shown


def read_weights(options: GridOptions, grid_shape: tuple[int, ...]) -> tuple[object, str]:
    """Return a function or an array, and a text that is the same on ranks with equal arrays.

    Raises `DecompositionError` for other objects.
    """
    if options["blocks"] is not None:
        raise DecompositionError("weights: they determine the blocks; leave out blocks=")
    if callable(options["weights"]):
        return options["weights"], "a function"
    array = _as_array(options["weights"], grid_shape)
    checksum = zlib.crc32(np.ascontiguousarray(array).data)
    return array, f"{array.dtype} numbers of shape {array.shape} with checksum {checksum:08x}"


def balanced_by_weights(
    weights: Any, even: FieldLayout, proc_shape: Any, unit: int, block_cells: int
) -> Balance:
    """Return balanced blocks for the grid of a field in even blocks, by weights of `read_weights`.

    ``unit`` and ``block_cells`` are as in `proc_shapes`. Raises `DecompositionError` for invalid weights,
    and if a function raises.
    """
    grid, ndim = even.decomposition, even.decomposition.ndim
    array = _as_array(weights, grid.grid_shape) if callable(weights) else weights
    wrong = np.argwhere(~((array >= 0) & np.isfinite(array))).tolist()
    if wrong or not array.any():
        got = f"{array[*wrong[0]]} at {tuple(wrong[0])}" if wrong else "only 0"
        raise DecompositionError(f"weights: expected finite numbers >= 0, some above 0, got {got}")
    given = normalise_proc_shape(proc_shape, ndim) or (0,) * ndim
    units = (*(1,) * (ndim - 1), unit)
    found = proc_shapes(
        *(grid.ranks, grid.grid_shape, even.spec.halo, grid.periodic, given, (None,) * ndim, units),
        block_cells,
    )
    return balanced(array, *found)


def _as_array(weights: Any, grid_shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        if callable(weights):
            weights = weights(*np.ix_(*map(np.arange, grid_shape)))
        array = np.asarray(weights)
    except Exception as error:
        raise DecompositionError(f"weights: {type(error).__name__}: {error}") from error
    check_unmasked(weights, "weights")
    fits = [extent in (1, n) for extent, n in zip(array.shape, grid_shape, strict=False)]
    if array.dtype.kind not in "biuf" or array.ndim != len(grid_shape) or not all(fits):
        raise DecompositionError(
            f"weights: expected numbers of shape {grid_shape}, or 1 along an axis without influence, got {array.dtype} "
            f"of shape {shown(array.shape)}"
        )
    return array
