"""Normalisation of arguments for halos, periodicity, shapes and axes.

Every function accepts the forms that the public API allows and returns plain Python integers and
booleans, in tuples. A wrong argument raises ``DecompositionError``, or ``FieldError`` for axes. The error names
the argument, the given value, the allowed values and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from halox.errors import DecompositionError, FieldError
from halox.values import LARGEST, as_entries, as_int, as_list, check_bool, shown

Halo: TypeAlias = tuple[tuple[int, int], ...]
"""Normalised halo widths: ``(low, high)`` per grid axis."""

HaloLike: TypeAlias = int | Sequence[int | Sequence[int]]
"""Halo as users write it: one width, one width per axis, or ``(low, high)`` per axis."""

MAX_AXES = 4


def normalise_halo(halo: object, ndim: int) -> Halo:
    """Halo widths in cells as ``(low, high)`` per grid axis.

    ``halo`` is one width for every side, or one entry per axis: a width for both sides, or a pair
    ``(low, high)``. With two axes a flat ``(a, b)`` means one width per axis. ``True`` and ``False`` are not
    accepted as widths.

    Examples
    --------
    >>> normalise_halo(1, 2), normalise_halo((1, 2), 2)
    (((1, 1), (1, 1)), ((1, 1), (2, 2)))
    >>> normalise_halo(((0, 1), 2), 2)
    ((0, 1), (2, 2))
    """
    entries = as_list(halo)
    if entries is None:
        width = _width(halo, "halo")
        return ((width, width),) * ndim
    if len(entries) != ndim:
        pair = ndim == 1 and len(entries) == 2
        remedy = f"write (({', '.join(map(shown, entries))}),)" if pair else _per_axis_remedy(ndim)
        raise _wrong_number("halo", ndim, entries, halo, remedy)
    widths = []
    for axis, entry in enumerate(entries):
        name = f"halo[{axis}]"
        sides = as_list(entry)
        if sides is None:
            width = _width(entry, name)
            widths.append((width, width))
            continue
        if len(sides) != 2:
            raise DecompositionError(
                f"{name}: expected a width or a pair (low, high), got {shown(entry)}; "
                f"write for example {name} = (1, 1)"
            )
        low, high = (_width(side, f"{name}[{i}]") for i, side in enumerate(sides))
        widths.append((low, high))
    return tuple(widths)


def normalise_periodic(periodic: object, ndim: int) -> tuple[bool, ...]:
    """Periodicity as one boolean per grid axis; ``periodic`` is one boolean, or one per axis.

    The integers 0 and 1, as in the periods of MPI, count as booleans.

    Examples
    --------
    >>> normalise_periodic(True, 2), normalise_periodic((1, 0), 2)
    ((True, True), (True, False))
    """
    entries = as_list(periodic)
    if entries is None:
        return (_boolean(periodic, "periodic"),) * ndim
    if len(entries) != ndim:
        raise _wrong_number("periodic", ndim, entries, periodic, _per_axis_remedy(ndim))
    return tuple(_boolean(entry, f"periodic[{axis}]") for axis, entry in enumerate(entries))


def normalise_grid_shape(grid_shape: object) -> tuple[int, ...]:
    """Shape of the global grid, one to four positive integers; a plain integer is a grid with one axis.

    Examples
    --------
    >>> normalise_grid_shape([512, 512, 512]), normalise_grid_shape(100)
    ((512, 512, 512), (100,))
    """
    entries = as_entries(grid_shape)
    if not 1 <= len(entries) <= MAX_AXES:
        raise DecompositionError(
            f"grid_shape: expected 1 to {MAX_AXES} axes, got {len(entries)} in {shown(grid_shape)}; "
            "give further axes to the fields as component axes"
        )
    return _integers("grid_shape", entries, "a number of cells", least=1)


def normalise_proc_shape(proc_shape: object, ndim: int) -> tuple[int, ...] | None:
    """Process grid with 0 for each axis that halox may choose, or None if halox may choose all axes.

    ``None`` or 0 is an axis that halox may choose. With one axis, a plain integer is allowed.
    ``proc_shapes`` compares the product with the number of ranks.

    Examples
    --------
    >>> normalise_proc_shape((2, None, 0), 3)
    (2, 0, 0)
    >>> normalise_proc_shape((None, None), 2) is None
    True
    """
    if proc_shape is None:
        return None
    remedy = "write 0 or None for an axis that halox may choose"
    entries = as_entries(proc_shape)
    if len(entries) != ndim:
        raise _wrong_number("proc_shape", ndim, entries, proc_shape, remedy)
    given = [0 if entry is None else entry for entry in entries]
    shape = _integers("proc_shape", given, "a number of ranks")
    return shape if any(shape) else None


def normalise_blocks(
    blocks: object, grid_shape: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, ...]:
    """Cells of each part, per grid axis; None for an axis to be cut evenly.

    Examples
    --------
    >>> normalise_blocks([None, (4, 6)], (8, 10))
    (None, (4, 6))
    """
    ndim = len(grid_shape)
    if blocks is None:
        return (None,) * ndim
    remedy = "write per axis None or the cells of each part, for example [None, (4, 6)]"
    entries = as_list(blocks)
    if entries is None or len(entries) != ndim:
        raise DecompositionError(
            f"blocks: expected one entry per grid axis ({ndim}), got {shown(blocks)}; {remedy}"
        )
    cuts: list[tuple[int, ...] | None] = []
    for axis, entry in enumerate(entries):
        name = f"blocks[{axis}]"
        if entry is None:
            cuts.append(None)
            continue
        sizes = as_list(entry)
        if sizes is None:
            raise DecompositionError(
                f"{name}: expected None or cells, got {shown(entry)}; {remedy}"
            )
        parts = _integers(name, sizes, "a number of cells", least=1)
        if sum(parts) != grid_shape[axis]:
            raise DecompositionError(
                f"{name}: expected parts that add up to {grid_shape[axis]}, as grid_shape={grid_shape} has it, got "
                f"{shown(parts)} with the sum {sum(parts)}"
            )
        cuts.append(parts)
    return tuple(cuts)


def _integers(name: str, values: list[Any], meaning: str, least: int = 0) -> tuple[int, ...]:
    if {*map(type, values)} == {int} and least <= min(values) and max(values) <= LARGEST:
        return tuple(values)
    return tuple(_integer(value, f"{name}[{i}]", meaning, least) for i, value in enumerate(values))


def _integer(value: object, name: str, meaning: str, least: int = 0, most: int = LARGEST) -> int:
    number = as_int(value)
    if number is None:
        raise DecompositionError(
            f"{name}: expected {meaning} as an integer, got {shown(value)} of type "
            f"{type(value).__name__}; write a plain int"
        )
    if not least <= number <= most:
        below = f"2**{(most + 1).bit_length() - 1}"
        raise DecompositionError(
            f"{name}: expected {meaning}, at least {least} and below {below}, got {shown(number)}"
        )
    return number


def _width(value: object, name: str) -> int:
    return _integer(value, name, "a halo width in cells", most=2**31 - 1)


def _boolean(value: object, name: str) -> bool:
    number = as_int(value)
    if number in (0, 1):
        return bool(number)
    return check_bool(name, value, DecompositionError, "; write one boolean, or one per grid axis")


def _wrong_number(
    name: str, ndim: int, entries: list[object], given: object, remedy: str
) -> DecompositionError:
    return DecompositionError(
        f"{name}: expected one entry per grid axis ({ndim}), got {len(entries)} in {shown(given)}; "
        f"{remedy}"
    )


def _per_axis_remedy(ndim: int) -> str:
    return "write one for all axes, or " + ("one" if ndim == 1 else f"{ndim}, one per axis")


def axis_number(given: object, dims: Sequence[str], name: str = "axis") -> int:
    """Return the number of a grid axis given by its number or by its name in ``dims``; raises `FieldError`.

    Examples
    --------
    >>> axis_number("y", ("x", "y")), axis_number(-2, ("x", "y"))
    (1, 0)
    """
    ndim, number = len(dims), as_int(given)
    if isinstance(given, str) and given in dims:
        number = dims.index(given)
    if number is None or not -ndim <= number < ndim:
        names = ", ".join(map(repr, dims))
        raise FieldError(
            f"{name}: the grid axes are {names}, or 0 to {ndim - 1}, got {shown(given)}"
        )
    return number % ndim


def other_axes(given: object, dims: Sequence[str]) -> tuple[int, ...]:
    """Return the grid axes that an argument ``axes``, one or several axes, does not name; raises `FieldError`."""
    named = {axis_number(one, dims, "axes") for one in as_entries(given)}
    if not named:
        raise FieldError(f"axes: give at least one grid axis, got {shown(given)}")
    return tuple(axis for axis in range(len(dims)) if axis not in named)
