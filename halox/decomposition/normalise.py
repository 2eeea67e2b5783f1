"""What users may write for halos, periodicity and shapes, brought to one form each.

Every function takes the forms the user's contract allows, returns plain tuples of Python
integers or booleans, and raises ``DecompositionError`` naming the argument, what was given,
what is expected and how to write it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from halox.errors import DecompositionError
from halox.values import LARGEST, as_bool, as_int, as_list, shown

Halo: TypeAlias = tuple[tuple[int, int], ...]
"""Normalised halo widths: ``(low, high)`` per grid axis."""

MAX_AXES = 4


def normalise_halo(halo: object, ndim: int) -> Halo:
    """Halo widths as ``(low, high)`` per grid axis.

    Parameters
    ----------
    halo : int or sequence
        One width for every side; or one entry per axis, each a width for both sides or a pair
        ``(low, high)``. With two axes a flat ``(a, b)`` means one width per axis.
    ndim : int
        Number of grid axes.

    Returns
    -------
    tuple of (int, int)
        ``(low, high)`` per grid axis, in cells.

    Raises
    ------
    DecompositionError
        If a width is not an integer (``True`` and ``False`` are not).
        If a width is negative.
        If the number of entries is not ``ndim``, or a pair does not have two.

    Notes
    -----
    Not collective; touches no device.

    Examples
    --------
    >>> normalise_halo(1, 2)
    ((1, 1), (1, 1))
    >>> normalise_halo((1, 2), 2)
    ((1, 1), (2, 2))
    >>> normalise_halo(((0, 1), 2), 2)
    ((0, 1), (2, 2))
    """
    entries = as_list(halo)
    if entries is None:
        width = _width(halo, "halo", halo)
        return ((width, width),) * ndim
    if len(entries) != ndim:
        pair = ndim == 1 and len(entries) == 2
        remedy = f"write (({', '.join(map(shown, entries))}),)" if pair else _per_axis_remedy(ndim)
        raise DecompositionError(
            f"halo: expected one entry per grid axis ({ndim}), got {len(entries)} in {shown(halo)}; "
            f"{remedy}"
        )
    widths = []
    for axis, entry in enumerate(entries):
        name = f"halo[{axis}]"
        sides = as_list(entry)
        if sides is None:
            width = _width(entry, name, halo)
            widths.append((width, width))
            continue
        if len(sides) != 2:
            raise DecompositionError(
                f"{name}: expected a width or a pair (low, high), got {shown(entry)}; "
                f"write for example {name} = (1, 1)"
            )
        low, high = (_width(side, f"{name}[{i}]", halo) for i, side in enumerate(sides))
        widths.append((low, high))
    return tuple(widths)


def normalise_periodic(periodic: object, ndim: int) -> tuple[bool, ...]:
    """Periodicity as one boolean per grid axis.

    Parameters
    ----------
    periodic : bool or sequence of bool
        One for all axes, or one per axis.
    ndim : int
        Number of grid axes.

    Returns
    -------
    tuple of bool
        One per grid axis.

    Raises
    ------
    DecompositionError
        If an entry is not ``True`` or ``False``.
        If the number of entries is not ``ndim``.

    Notes
    -----
    Not collective; touches no device.

    Examples
    --------
    >>> normalise_periodic(True, 2)
    (True, True)
    >>> normalise_periodic([True, False], 2)
    (True, False)
    """
    entries = as_list(periodic)
    if entries is None:
        return (_boolean(periodic, "periodic"),) * ndim
    if len(entries) != ndim:
        raise DecompositionError(
            f"periodic: expected one entry per grid axis ({ndim}), got {len(entries)} in "
            f"{shown(periodic)}; {_per_axis_remedy(ndim)}"
        )
    return tuple(_boolean(entry, f"periodic[{axis}]") for axis, entry in enumerate(entries))


def normalise_grid_shape(grid_shape: object) -> tuple[int, ...]:
    """Shape of the global grid as a tuple of one to four positive integers.

    Parameters
    ----------
    grid_shape : int or sequence of int
        Cells per axis; an integer alone is one axis.

    Returns
    -------
    tuple of int
        Cells per axis.

    Raises
    ------
    DecompositionError
        If there are no axes, or more than four.
        If an entry is not an integer, or is less than one.

    Notes
    -----
    Not collective; touches no device.

    Examples
    --------
    >>> normalise_grid_shape([512, 512, 512])
    (512, 512, 512)
    >>> normalise_grid_shape(100)
    (100,)
    """
    entries = _entries(grid_shape)
    if not 1 <= len(entries) <= MAX_AXES:
        raise DecompositionError(
            f"grid_shape: expected 1 to {MAX_AXES} axes, got {len(entries)} in {shown(grid_shape)}; "
            "give further axes to the fields as component axes"
        )
    shape = tuple(
        _integer(entry, f"grid_shape[{axis}]", "a number of cells")
        for axis, entry in enumerate(entries)
    )
    for axis, cells in enumerate(shape):
        if cells < 1:
            raise DecompositionError(
                f"grid_shape[{axis}]: expected at least 1 cell, got {cells} in {shown(grid_shape)}; "
                "leave out an axis that has no cells"
            )
    return shape


def normalise_proc_shape(proc_shape: object, ndim: int) -> tuple[int, ...] | None:
    """Process grid as the user gave it: a tuple with 0 for each axis left free, or None.

    Parameters
    ----------
    proc_shape : None, int or sequence
        Ranks per axis; ``None`` or 0 for an axis that halox may choose. ``None`` alone leaves
        all axes free; an integer alone is allowed with one axis.
    ndim : int
        Number of grid axes.

    Returns
    -------
    tuple of int or None
        Ranks per axis, 0 where free; None when every axis is free.

    Raises
    ------
    DecompositionError
        If an entry is neither None nor an integer.
        If an entry is negative.
        If the number of entries is not ``ndim``.

    Notes
    -----
    Not collective; touches no device. Whether the entries multiply up to the number of ranks
    is checked by ``choose_proc_shape``.

    Examples
    --------
    >>> normalise_proc_shape((2, None, 0), 3)
    (2, 0, 0)
    >>> normalise_proc_shape((None, None), 2) is None
    True
    """
    if proc_shape is None:
        return None
    entries = _entries(proc_shape)
    if len(entries) != ndim:
        raise DecompositionError(
            f"proc_shape: expected one entry per grid axis ({ndim}), got {len(entries)} in "
            f"{shown(proc_shape)}; write 0 or None for an axis that halox may choose"
        )
    shape = tuple(
        0 if entry is None else _integer(entry, f"proc_shape[{axis}]", "a number of ranks")
        for axis, entry in enumerate(entries)
    )
    for axis, parts in enumerate(shape):
        if parts < 0:
            raise DecompositionError(
                f"proc_shape[{axis}]: expected a number of ranks, got {parts} in {shown(proc_shape)}; "
                "write 0 or None for an axis that halox may choose"
            )
    return shape if any(shape) else None


def normalise_blocks(
    blocks: object, grid_shape: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, ...]:
    """Cells of each part, per grid axis; None for an axis that is to be cut evenly.

    Parameters
    ----------
    blocks : None or sequence
        Per axis None, or the cells of each part; ``None`` alone cuts all axes evenly.
    grid_shape : tuple of int
        Cells per axis.

    Returns
    -------
    tuple
        One entry per axis.

    Raises
    ------
    DecompositionError
        If the number of entries is not that of the axes, or an entry is not a sequence.
        If a part is not an integer, or has less than one cell.
        If the parts of an axis do not add up to its cells.

    Notes
    -----
    Not collective; touches no device.

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
        parts = tuple(
            _integer(cells, f"{name}[{part}]", "a number of cells")
            for part, cells in enumerate(sizes)
        )
        if min(parts, default=0) < 1 or sum(parts) != grid_shape[axis]:
            raise DecompositionError(
                f"{name}: expected parts of at least 1 cell that add up to "
                f"{grid_shape[axis]}, as grid_shape={grid_shape} has it, got {shown(parts)} with the "
                f"sum {sum(parts)}"
            )
        cuts.append(parts)
    return tuple(cuts)


def normalise_ranks(ranks: object) -> int:
    """Return the number of ranks as a positive integer.

    Raises
    ------
    DecompositionError
        If ``ranks`` is not an integer, or is less than one.

    Examples
    --------
    >>> normalise_ranks(4)
    4
    """
    count = _integer(ranks, "ranks", "a number of ranks")
    if count < 1:
        raise DecompositionError(f"ranks: expected at least 1, got {count}")
    return count


def _entries(value: object) -> list[Any]:
    """Entries of a sequence; one that is none stands for itself."""
    found = as_list(value)
    return [value] if found is None else found


def _integer(value: object, name: str, meaning: str) -> int:
    number = as_int(value)
    if number is None:
        raise DecompositionError(
            f"{name}: expected {meaning} as an integer, got {shown(value)} of type "
            f"{type(value).__name__}; write a plain int"
        )
    if abs(number) > LARGEST:
        raise DecompositionError(f"{name}: expected {meaning} below 2**63, got {shown(number)}")
    return number


def _width(value: object, name: str, halo: object) -> int:
    width = _integer(value, name, "a halo width in cells")
    if width < 0:
        raise DecompositionError(
            f"{name}: expected a width of 0 or more cells, got {width} in halo={shown(halo)}; "
            "use 0 for a side without halo"
        )
    return width


def _boolean(value: object, name: str) -> bool:
    found = as_bool(value)
    if found is None:
        raise DecompositionError(
            f"{name}: expected True or False, got {shown(value)} of type {type(value).__name__}; "
            "write one boolean, or one per grid axis"
        )
    return found


def _per_axis_remedy(ndim: int) -> str:
    return "write one for all axes, or " + ("one" if ndim == 1 else f"{ndim}, one per axis")
