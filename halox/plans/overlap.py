"""One overlapped loop: its regions, whether it overlaps, and on a GPU its streams.

`Loops` makes an `Overlap`, or a `DeviceOverlap`, for each width and field of a plan; begin at `Overlap.loop`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from statistics import median
from typing import Literal, TypeAlias

from halox.decomposition import FieldLayout
from halox.plans.regions import Cells, overlap_regions, owned_cells
from halox.plans.runner import Bound, Runner
from halox.runtime.arrays import Described
from halox.runtime.gpu import pools
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.streams import is_capturing

Mode: TypeAlias = Literal["auto"] | bool

_LOOPS = 10
"""Timed loops, half of them with overlap; the first loop of each half does not count."""

RIM_CELLS = 32
"""On a GPU rims along the innermost axis are multiples of so many cells thick."""

GRAPH_US, HOST_US = 9.0, 40.0
"""Least time that overlap on a GPU must hide to pay for its rims: as branches of a CUDA graph, and as launches."""

INNERMOST_SHARE = 0.3
"""Part of a block's time that rims along the innermost axis cost, since they divide all rows."""

BYTES_PER_US = 4e6
"""Bytes that a fast GPU reads and writes in a microsecond; on slower GPUs the interior hides more than predicted."""


class Overlap:
    """Regions of an overlapped exchange, and the decision whether to overlap.

    With the mode "auto" the first loops are timed with and without overlap in turn, and the faster way is kept. Ranks
    decide alone: the messages are the same in both ways.
    """

    _undecided = "on until both ways are timed"

    def __init__(
        self,
        layout: FieldLayout,
        width: int | None,
        mode: Mode,
        others: Sequence[FieldLayout] = (),
        fixed: Sequence[int] = (),
        multiples: Sequence[int] = (),
    ) -> None:
        self._early, self._late = overlap_regions(layout, width, others, fixed, multiples)
        self._whole = owned_cells(layout)
        self._is_on: bool | None = None if mode == "auto" else mode
        self._why = ""
        if not self._early:
            self._is_on, self._why = False, ", the block has no cells so far from its halo"
        elif not self._late:
            self._is_on = True
        self._seconds: list[float] = []  # of loops with overlap, and, in turn, without

    def loop(
        self, runner: Runner, bound: Bound | None, arrays: tuple[object, ...]
    ) -> Iterator[Cells]:
        """Exchange, and yield the regions; ``bound`` has the views of ``arrays`` that are not the plan's."""
        if self._is_on is None:
            if len(self._seconds) < _LOOPS:
                overlaps = len(self._seconds) % 2 == 0
                return self._timed(self._run(overlaps, runner, bound, arrays))
            us = [1e6 * seconds for seconds in self._seconds]
            on, off = median(us[2::2]), median(us[3::2])
            self._is_on, self._why = on <= off, f", {on:,.1f} us with and {off:,.1f} us without"
        return self._run(self._is_on, runner, bound, arrays)

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
        begin = time.perf_counter()
        yield from loop
        self._seconds.append(time.perf_counter() - begin)

    def __str__(self) -> str:
        """Return the sizes of the regions, the decision and its reason."""
        state = {None: self._undecided, True: "on", False: "off"}[self._is_on]
        return (
            f"{_size(self._early)} cells during the exchange, {_size(self._late)} cells in {len(self._late)} region(s) "
            f"after it; {state}{self._why}"
        )


class DeviceOverlap(Overlap):
    """An overlapped exchange on a GPU, whose regions may run at the same time.

    Each rim has a stream, in a capture a branch of the graph. Copies within the rank precede the interior::

        caller's stream     start, copies | interior ............... | join
        exchange              | messages of other ranks |
        stream of each rim                              | finish | rim |

    Overlap hides the shorter one of messages and interior. The mode "auto" predicts whether this pays for the rims.
    """

    _undecided = "on in CUDA graphs"

    def __init__(
        self,
        layout: FieldLayout,
        width: int | None,
        mode: Mode,
        others: Sequence[FieldLayout],
        fixed: Sequence[int],
        described: Described,
        remote_us: float,
    ) -> None:
        """Take the longest predicted time of a message of another rank, 0 if there are none."""
        first = len(layout.spec.components_before)
        strides = described.strides[first : first + layout.spec.ndim]
        inner = strides.index(min(strides))
        multiples = [RIM_CELLS if axis == inner else 1 for axis in range(len(strides))]
        super().__init__(layout, width, mode, others, fixed, multiples)
        # At least one read and one write of each cell.
        block_us = 2 * prod(described.shape) * described.dtype.itemsize / BYTES_PER_US
        hidden_us = min(remote_us, block_us)
        if self._early and self._early[0].shape[inner] < self._whole.shape[inner]:
            hidden_us -= INNERMOST_SHARE * block_us
        if not remote_us:
            self._is_on, self._why = False, ", no other rank sends halo cells"
        elif self._is_on is None:
            self._why = f", {max(hidden_us, 0):,.1f} us can be hidden"
            if not GRAPH_US <= hidden_us < HOST_US:
                self._is_on = hidden_us >= HOST_US
        device = described.device
        assert device is not None
        streams = len(self._late) or 1 if self._is_on is not False else 0
        self._sides = [pools.SIDE_STREAMS.acquire(device) for _ in range(streams)]
        for side in self._sides:
            weakref.finalize(self, pools.SIDE_STREAMS.release, device, side).atexit = False

    def loop(
        self, runner: Runner, bound: Bound | None, arrays: tuple[object, ...]
    ) -> Iterator[Cells]:
        """Exchange, and yield the regions, each on the stream where the body is to launch its kernels."""
        is_on = is_capturing() if self._is_on is None else self._is_on
        return self._run(is_on, runner, bound, arrays)

    def _run(
        self, overlaps: bool, runner: Runner, bound: Bound | None, arrays: tuple[object, ...]
    ) -> Iterator[Cells]:
        if not overlaps:
            runner.run(bound)
            yield self._whole
            return
        current_stream = cupy().cuda.get_current_stream
        caller, (first, *others) = current_stream(), self._sides
        runner.start_copied(bound, arrays)
        first.follow(caller)
        try:
            yield from self._early
        finally:
            with first.stream:
                runner.finish()
            first.join(caller)  # for kernels that the body puts on the caller's stream by itself
        if current_stream().ptr != caller.ptr:
            # In regions of another loop, whose streams remain the current ones.
            for cells in self._late:
                first.join(current_stream())
                yield cells
            return
        for side in others:
            side.stream.wait_event(first.after)
        try:
            for side, cells in zip(self._sides, self._late, strict=False):
                with side.stream:
                    yield cells
        finally:
            for side in self._sides:
                side.join(caller)


def _size(regions: Sequence[Cells]) -> int:
    return sum(prod(map(int, cells.shape)) for cells in regions)
