"""What users say of a field when they allocate or declare it."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.decomposition import FieldSpec, normalise_halo
from halox.errors import FieldError
from halox.values import LARGEST, as_int, as_list, shown

MOST_AXES = 64
"""Axes that a NumPy array has at most."""

OPTIONS = ("components", "components_after", "halo", "staggered")


def field_spec(options: dict[str, Any], grid: FieldSpec) -> FieldSpec:
    """Return the layout that a field's options describe.

    Parameters
    ----------
    options : dict
        Some of `OPTIONS`.
    grid : FieldSpec
        A plain field of the grid, for what is not said.

    Raises
    ------
    FieldError
        If an option is unknown or malformed.
    DecompositionError
        If the halo is malformed.
    """
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise FieldError(f"unknown argument(s) {unknown}; a field takes {', '.join(OPTIONS)}")
    halo = options.get("halo")
    return FieldSpec(
        grid.halo if halo is None else normalise_halo(halo, grid.ndim),
        _extents(options.get("components", ()), "components"),
        _extents(options.get("components_after", ()), "components_after"),
        _staggering(options.get("staggered", ()), grid.ndim),
    )


def _extents(value: Any, name: str) -> tuple[int, ...]:
    given = as_list(value)
    extents = [as_int(n) for n in ([value] if given is None else given)]
    found = tuple(n for n in extents if n is not None and 0 < n <= LARGEST)
    if len(found) < len(extents):
        raise FieldError(f"{name} must be an int or ints > 0, got {shown(value)}")
    if len(found) > MOST_AXES:
        raise FieldError(f"{name} has {len(found)} axes, arrays have {MOST_AXES} at most")
    return found


def _staggering(value: Any, ndim: int) -> tuple[bool, ...]:
    given = as_list(value)
    axes = [as_int(axis) for axis in ([value] if given is None else given)]
    chosen = {axis % ndim for axis in axes if axis is not None and -ndim <= axis < ndim}
    if not all(axis is not None and -ndim <= axis < ndim for axis in axes):
        raise FieldError(f"staggered must name grid axes, 0 to {ndim - 1}, got {shown(value)}")
    return tuple(axis in chosen for axis in range(ndim))


def fixed_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of fixed size.

    Raises
    ------
    FieldError
        If it holds objects, has no size, or is no dtype.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except Exception as error:  # NumPy's of several kinds, and what an object raises
        raise FieldError(f"dtype: {shown(dtype)} is not a dtype that NumPy knows") from error
    if found.hasobject or found.itemsize == 0:
        raise FieldError(
            f"dtype {found} has no fixed size of 1 byte or more; use a fixed-size dtype"
        )
    return found
