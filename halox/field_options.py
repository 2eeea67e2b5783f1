"""What users say of a field when they allocate or declare it."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.decomposition import FieldSpec, normalise_halo
from halox.errors import FieldError

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
    extents = (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(n, int | np.integer) and n > 0 for n in extents):
        raise FieldError(f"{name} must be an int or ints > 0, got {value!r}")
    return tuple(map(int, extents))


def _staggering(value: Any, ndim: int) -> tuple[bool, ...]:
    axes = (value,) if isinstance(value, int) and not isinstance(value, bool) else tuple(value)
    if not all(
        isinstance(a, int | np.integer) and not isinstance(a, bool) and -ndim <= a < ndim
        for a in axes
    ):
        raise FieldError(f"staggered must name grid axes, 0 to {ndim - 1}, got {value!r}")
    chosen = {int(a) % ndim for a in axes}
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
    except TypeError as error:
        raise FieldError(f"dtype: {dtype!r} is not a dtype that NumPy knows") from error
    if found.hasobject or found.itemsize == 0:
        raise FieldError(
            f"dtype {found} has no fixed size of 1 byte or more; use a fixed-size dtype"
        )
    return found
