"""Loops over the regions of a plan's fields during and after exchanges, and checks of the exchanged arrays."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.plans.overlap import DeviceOverlap, Mode, Overlap
from halox.plans.regions import Cells, check_every, deep_regions, extra_work
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

    def notes(self, exchange_us: float | None) -> tuple[str, ...]:
        """Return sentences about the loops for a report; ``exchange_us`` is its measured time."""
        notes = [
            f"overlap of field {field}, width {'of the halo' if width is None else width}: {overlap}"
            for (width, field), overlap in self._overlaps.items()
        ]
        layout, every = self._layouts[0], self._every
        if every > 1:
            more, saved = extra_work(layout, every, every), every - 1
            note = (
                f"every={every}: {every} steps save {saved} exchange(s) and do the work of {more:.2f} more steps; this "
                f"pays if an exchange takes over {more / saved:.1%} of a step"
            )
            if exchange_us and more:
                note += f", here if a step takes less than {exchange_us * saved / more:,.1f} us"
            notes.append(note)
        elif exchange_us and extra_work(layout, 2):
            limits = [(k, exchange_us * (k - 1) / extra_work(layout, k)) for k in (2, 3, 4)]
            pays = ", ".join(f"{us:,.1f} us (every={k})" for k, us in limits)
            notes.append(
                f"deep halos: if exchanges of halos {limits[0][0]} to {limits[-1][0]} times as wide take "
                f"{exchange_us:,.1f} us, too, they pay for steps of less than {pays}"
            )
        return tuple(notes)


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


class UnchangedCheck:
    """Warns once if a plan exchanges arrays whose cells are the same as in its last exchange.

    This happens if names of arrays were swapped: the plan still exchanges the arrays with which it was made.
    """

    def __init__(self, cells: Sequence[Any], device: int | None) -> None:
        self._cells, self._device = cells, device
        self._sums: list[int] = []

    def __call__(self) -> None:
        """Compare checksums of the cells, on a GPU of copies on the host; does nothing in a capture."""
        if not self._cells or _is_captured(self._device):
            return
        on_host = [part if self._device is None else part.get() for part in self._cells]
        before, self._sums = self._sums, [zlib.crc32(part.tobytes()) for part in on_host]
        if self._sums == before:
            self._cells = ()
            warnings.warn(
                "a plan exchanges arrays whose cells are the same as in its last exchange; if names of arrays were "
                "swapped, give the plan the present array: plan(u), plan.overlap(u) or plan.steps(u)",
                stacklevel=4,
            )


def _is_captured(device: int | None) -> bool:
    """Whether the current stream of a GPU is being captured; False for the host."""
    if device is None:
        return False
    from halox.runtime.gpu.streams import is_capturing

    return is_capturing(None)


def _steps(described: Described) -> tuple[int, ...]:
    """Return the strides of the axes with more than one element."""
    pairs = zip(described.strides, described.shape, strict=True)
    return tuple(stride for stride, extent in pairs if extent > 1)
