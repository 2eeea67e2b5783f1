"""Loops over the regions of a plan's fields during and after exchanges, and checks of the exchanged arrays."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from statistics import median
from typing import Any, Literal, TypeAlias

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.plans.regions import (
    Cells,
    check_every,
    deep_regions,
    extra_work,
    overlap_regions,
    owned_cells,
)
from halox.plans.runner import Bound, Runner
from halox.runtime.arrays import Described
from halox.runtime.gpu.cuda import cupy
from halox.values import as_int, shown

Mode: TypeAlias = Literal["auto"] | bool

Read: TypeAlias = Sequence[tuple[Described, FieldLayout]]
"""Descriptions of some fields, with their layouts."""

Check: TypeAlias = Callable[[Read, bool], int]
"""Checks the fields of a new plan, with or without corners; returns the number of steps between exchanges."""

Find: TypeAlias = Callable[[tuple[object, ...]], tuple[Runner, Bound | None]]

_LOOPS = 10
"""Timed loops, half of them with overlap; the first loop of each half does not count."""


class Overlap:
    """Regions of an overlapped exchange, and the decision whether to overlap.

    With the mode "auto" the first loops are timed with and without overlap in turn, and the faster way is kept. Ranks
    decide alone: the messages are the same in both ways. On a GPU events are timed, and the host waits for no event.
    """

    def __init__(
        self,
        layout: FieldLayout,
        width: int | None,
        mode: Mode,
        device: int | None,
        others: Sequence[FieldLayout] = (),
        fixed: Sequence[int] = (),
    ) -> None:
        self._early, self._late = overlap_regions(layout, width, others, fixed)
        self._whole = owned_cells(layout)
        self._device = device
        self._is_on: bool | None = None if mode == "auto" else mode
        self._why = ""
        if not self._early:
            self._is_on, self._why = False, ", the block has no cells so far from its halo"
        elif not self._late:
            self._is_on = True
        self._marks: list[tuple[Any, Any]] = []  # of loops with overlap, and, in turn, without

    def loop(
        self, runner: Runner, bound: Bound | None, arrays: tuple[object, ...]
    ) -> Iterator[Cells]:
        """Exchange, and yield the regions; ``bound`` has the views of ``arrays`` that are not the plan's."""
        if self._is_on is None and not _is_captured(self._device):
            if len(self._marks) < _LOOPS:
                overlaps = len(self._marks) % 2 == 0
                return self._timed(self._run(overlaps, runner, bound, arrays))
            self._decide()
        return self._run(self._is_on is not False, runner, bound, arrays)

    def _run(
        self, overlaps: bool, runner: Runner, bound: Bound | None, arrays: tuple[object, ...]
    ) -> Iterator[Cells]:
        if not overlaps:
            runner.run(bound)
            yield self._whole
            return
        runner.start(bound, arrays)
        try:
            yield from self._early
        finally:  # also after `break` or an error in the body of the loop
            runner.finish()
        yield from self._late

    def _timed(self, loop: Iterator[Cells]) -> Iterator[Cells]:
        begin = self._mark()
        yield from loop
        self._marks.append((begin, self._mark()))

    def _mark(self) -> Any:
        """Return the time in seconds, or an event on the current stream of a GPU."""
        if self._device is None:
            return time.perf_counter()
        event = cupy().cuda.Event()
        event.record()
        return event

    def _decide(self) -> None:
        """Keep the way with the smaller median, unless the GPU has not reached all events yet."""
        if self._device is None:
            us = [1e6 * (end - begin) for begin, end in self._marks]
        elif all(end.done for _, end in self._marks):
            us = [1e3 * cupy().cuda.get_elapsed_time(*pair) for pair in self._marks]
        else:
            return
        on, off = median(us[2::2]), median(us[3::2])
        self._is_on, self._why = on <= off, f", {on:,.1f} us with and {off:,.1f} us without"

    def __str__(self) -> str:
        """Return the sizes of the regions, the decision and its reason."""
        state = {None: "on until both ways are timed", True: "on", False: "off"}[self._is_on]
        return (
            f"{_size(self._early)} cells during the exchange, {_size(self._late)} cells in {len(self._late)} region(s) "
            f"after it; {state}{self._why}"
        )


class Loops:
    """Loops over the cells of a plan's fields, and other arrays for its calls.

    ``every`` is the number of steps between exchanges, ``mode`` the option ``overlap`` of `halox.Grid.plan`. ``find``
    returns the plan of other arrays, and its argument; it makes the plan in the first call with them. The exchange
    leaves out the ``fixed`` grid axes.
    """

    def __init__(
        self,
        read: Read,
        every: int,
        mode: Mode,
        device: int | None,
        find: Find,
        fixed: tuple[int, ...] = (),
    ) -> None:
        self._layouts = [layout for _, layout in read]
        self._every, self._mode, self._device, self.find = every, mode, device, find
        self._fixed = fixed
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
            layout = self._layouts[number]
            known = Overlap(layout, distance, self._mode, self._device, others, self._fixed)
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
        """Return sentences about the loops for a report; ``exchange_us`` is the measured time of an exchange."""
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


def _size(regions: Sequence[Cells]) -> int:
    return sum(prod(map(int, cells.shape)) for cells in regions)
