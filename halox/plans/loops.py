"""Loops over the regions of a plan's fields during and after exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.plans.overlap import DeviceOverlap, Mode, Overlap
from halox.plans.regions import Cells, check_every, deep_regions
from halox.plans.runner import Bound, Runner
from halox.runtime.arrays import Described
from halox.values import as_int, shown

Read: TypeAlias = Sequence[tuple[Described, FieldLayout]]
"""Descriptions of some fields, with their layouts."""

Check: TypeAlias = Callable[[Read, bool], int]
"""Checks the fields of a new plan, with or without corners; returns the number of steps between exchanges."""

Find: TypeAlias = Callable[..., tuple[Runner, Bound | None]]
"""Receives other arrays of the plan's layouts and an `Operation`, by default an exchange."""


class Loops:
    """Loops over the cells of a plan's fields, and other arrays for its calls.

    ``every`` is the number of steps between exchanges, ``mode`` the option ``overlap`` of `halox.Grid.plan`. ``find``
    returns the plan of other arrays, and its argument; it makes the plan in the first call with them. The exchange
    leaves out the ``fixed`` grid axes. ``remote_us`` is the predicted time of the messages of other ranks on a GPU, 0
    if there are none.
    """

    def __init__(
        self,
        read: Read,
        every: int,
        mode: Mode,
        find: Find,
        fixed: tuple[int, ...] = (),
        remote_us: float = 0.0,
    ) -> None:
        self._read, self._layouts = read, [layout for _, layout in read]
        self._every, self._mode, self.find = every, mode, find
        self._fixed, self._remote_us = fixed, remote_us
        self._overlaps: dict[tuple[int | None, int], Overlap] = {}
        self._deep: dict[int, tuple[Cells, ...]] = {}

    def overlap(self, width: object, field: object) -> Overlap:
        """Return the overlap of a width, in cells or None, for a field."""
        number, distance = self._check_field(field), None if width is None else as_int(width)
        if width is not None and (distance is None or distance < 0):
            raise FieldError(
                f"width must be an int >= 0, the cells that a step reads on each side, got {shown(width)}"
            )
        known = self._overlaps.get((distance, number))
        if known is None:
            others = [one for n, one in enumerate(self._layouts) if n != number]
            described, layout = self._read[number]
            known = (
                Overlap(layout, distance, self._mode, others, self._fixed)
                if described.device is None
                else DeviceOverlap(
                    layout, distance, self._mode, others, self._fixed, described, self._remote_us
                )
            )
            self._overlaps[distance, number] = known
        return known

    def steps(self, field: object) -> tuple[Cells, ...]:
        """Return the regions of a field for the steps after an exchange."""
        number = self._check_field(field)
        known = self._deep.get(number)
        if known is None:
            known = self._deep[number] = deep_regions(self._layouts[number], self._every)
        return known

    def _check_field(self, field: object) -> int:
        number = as_int(field)
        if number is None or not 0 <= number < len(self._layouts):
            raise FieldError(
                f"field must be a number of the plan's {len(self._layouts)} field(s), from 0, got {shown(field)}"
            )
        return number

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the loops for a report."""
        return tuple(
            f"overlap of field {field}, width {'of the halo' if width is None else width}: {overlap}"
            for (width, field), overlap in self._overlaps.items()
        )


def check_options(every: object, overlap: object, read: Read, corners: bool) -> int:
    """Return the number of steps between exchanges; raise `FieldError` if it or the `Mode` ``overlap`` is invalid."""
    if not (isinstance(overlap, bool) or (isinstance(overlap, str) and overlap == "auto")):
        raise FieldError(f'overlap must be "auto", True or False, got {shown(overlap)}')
    return check_every(every, [layout for _, layout in read], corners)


def check_same_arrays(own: Read, read: Read, _: bool = True) -> int:
    """Raise `FieldError` unless arrays have the layouts, dtypes and strides of a plan's arrays; return 1."""
    needed, given = (
        [f"{layout.spec}, dtype={one.dtype}, strides={_steps(one)}" for one, layout in arrays]
        for arrays in (own, read)
    )
    if given != needed:
        raise FieldError(
            f"the plan exchanges {len(needed)} array(s) with {'; '.join(needed)}, and its call has {len(given)} with "
            f"{'; '.join(given)}; give such arrays, or make another plan by grid.plan"
        )
    return 1


def _steps(described: Described) -> tuple[int, ...]:
    """Return the strides of the axes with more than one element."""
    pairs = zip(described.strides, described.shape, strict=True)
    return tuple(stride for stride, extent in pairs if extent > 1)
