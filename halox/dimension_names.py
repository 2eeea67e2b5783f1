"""Names of the dimensions of fields, in labelled arrays and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halox.errors import FieldError
from halox.values import as_list, shown

AXES = ("x", "y", "z", "t")
"""Names of the grid axes by default."""

FACE = "_face"
"""Ending of the name of an axis along which a field is staggered."""


def axis_names(dims: object, ndim: int) -> tuple[str, ...]:
    """Return the names of the grid axes that a user gives, or `AXES` for None; raises `FieldError`.

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
    """Return the names of a field's dimensions along the grid axes, of which it is staggered along some.

    Examples
    --------
    >>> with_faces(("x", "y"), (False, True))
    ['x', 'y_face']
    """
    return [
        axis + FACE if is_staggered else axis
        for axis, is_staggered in zip(axes, staggered, strict=True)
    ]
