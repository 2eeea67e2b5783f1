"""Names of the dimensions of fields, in labelled arrays and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halox.errors import FieldError
from halox.values import as_list, shown

AXES = ("x", "y", "z", "t")
"""Default names of the grid axes."""

FACE = "_face"
"""Suffix of the name of a staggered axis."""


def axis_names(dims: object, ndim: int) -> tuple[str, ...]:
    """Return the user's names of the grid axes, or `AXES` for None; raises `FieldError`.

    Examples
    --------
    >>> axis_names(None, 2), axis_names(["lat", "lon"], 2)
    (('x', 'y'), ('lat', 'lon'))
    """
    given = as_list(AXES[:ndim] if dims is None else dims)
    names = [axis for axis in given or () if isinstance(axis, str)]
    if given is None or len(names) < len(given) or len(set(names)) != ndim or len(names) != ndim:
        raise FieldError(f"dims must name {ndim} grid axes, got {shown(dims)}")
    return tuple(names)


def with_faces(axes: Sequence[str], staggered: Iterable[bool]) -> list[str]:
    """Return the names of a field's grid dimensions: the axes, with `FACE` appended to the staggered axes.

    Examples
    --------
    >>> with_faces(("x", "y"), (False, True))
    ['x', 'y_face']
    """
    return [
        axis + FACE if is_staggered else axis
        for axis, is_staggered in zip(axes, staggered, strict=True)
    ]
