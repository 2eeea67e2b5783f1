"""Migration of particles on a GPU, by the kernels of `halox/sampling/kernels/migrate.cu`.

Ranks that map one another's memory read their arrivals there; other ranks send messages from the host. A rank waits for
its GPU before other ranks may read, and after it has read, so that they may write again in the next migration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from math import gcd
from typing import Any

import numpy as np

from halox.domain import Domain
from halox.reductions.operations import ELEMENTS
from halox.runtime.arrays import Array
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned
from halox.runtime.gpu.streams import stream_pointer
from halox.sampling.migration import MIGRATION, RULES, Migration, Rules, row_bytes

_THREADS, _ROWS = 256, 8


class DeviceMigration:
    """A migration of one rank's particles on a GPU, with the steps of `halox.sampling.migration.Migration`."""

    def __init__(self, domain: Domain, rules: Rules) -> None:
        cp, cut, self._world = cupy(), domain.decomposition, domain.world
        self._host, self._device = Migration(domain, rules), domain.device_id or 0
        axes = [
            (own.start, own.stop, axis.cells, *map(RULES.index, rule), axis.parts)
            for own, axis, rule in zip(domain.plain.owned, cut.axes, rules, strict=True)
        ]
        bounds = [*chain(*(axis.bounds[1:-1] for axis in cut.axes))]
        head = self._world.rank, self._world.size, len(bounds)
        self._grid = cp.asarray([*head, *chain(*axes), *bounds, *cut.placement.rank_of], "f8")
        self._axes = len(axes)
        self._numbers = pinned(8 * (self._world.size + 5)).array.view("i8")
        self._counters = cp.zeros(len(self._numbers), "i8")
        self._key: object = None
        self._arena = domain.context.use_device(self._device)
        self._maps = domain.context.find_gpus().all_map
        self._outbox: Any = cp.empty(0, "u1")
        self._outboxes: dict[int, int] = {}  # addresses of other ranks' memory
        self._news: object = None  # for other ranks, until they have it
        self._messages = pinned(0)

    def find(self, arrays: Sequence[Any], flips: Sequence[bool]) -> tuple[Array, int]:
        """Count the particles that leave, as `Migration.find`."""
        cp, positions = cupy(), arrays[0]
        self._before = self._after = len(positions)
        self._describe(arrays, flips)
        self._list = cp.empty(self._before, "i8")
        self._counters.data.memset_async(0, self._counters.nbytes)
        self._launch("find", self._before, positions, self._before, self._list, self._counters)
        self._counters.get(out=self._numbers)
        *numbers, lost, self._listed = self._numbers.tolist()
        if lost:  # the host names the particle
            self._host.find([positions.get()], [])
        self._left = self._listed - numbers[self._world.rank]
        self._holes = cp.empty(self._left, "i8")
        numbers[self._world.rank] = 0
        return np.array(numbers[: self._world.size]), self._left

    def pack(
        self, arrays: Sequence[Any], flips: Sequence[bool], counts: Array, incoming: Array
    ) -> object:
        """Pack particles that leave, as `Migration.pack`; return the place and handles of memory that is new."""
        self._describe(arrays, flips)
        self._counts, self._incoming = counts, incoming
        sent, arrived = int(counts.sum()), int(incoming.sum())
        self._after = self._before - self._left + arrived
        if sent * self._width > len(self._outbox):
            self._outbox = self._arena.array((sent * self._width * 3 // 2,), np.dtype("u1"))
            start = self._outbox.data.ptr
            place = self._arena.locate(start, start + len(self._outbox))
            if self._maps and place is not None:
                self._news = place, self._arena.handles([place])
        if not self._maps and (sent + arrived) * self._width > self._messages.nbytes:
            self._messages = pinned((sent + arrived) * self._width * 3 // 2)
        self._numbers[:] = 0
        self._numbers[: len(counts)] = counts.cumsum() - counts
        stream = cupy().cuda.get_current_stream()
        self._counters.set(self._numbers, stream)
        self._launch(
            "pack", self._listed, self._rows, self._list, self._listed, self._counters, self._outbox
        )
        stream.synchronize()
        return self._news

    def keep(self) -> None:
        """Settle particles that stay, as `Migration.keep`."""
        items = self._list, self._listed, self._after, self._counters, self._holes
        self._launch("keep", self._listed, self._rows, *items)

    def swap(self, records: Sequence[Any], places: Array) -> None:
        """Store arrivals in place of those that leave, as `Migration.swap`."""
        self._news, width, arrived = None, self._width, int(self._incoming.sum())
        if self._maps:
            for rank, record in enumerate(records):
                if record is not None and rank != self._world.rank:
                    self._arena.open(record[1])
                    self._outboxes[rank] = self._arena.pointer(record[0])
            arrivals = [
                (self._outboxes[rank] + int(places[rank]) * width, int(self._incoming[rank]))
                for rank in np.flatnonzero(self._incoming).tolist()
            ]
        else:
            split = int(self._counts.sum()) * width
            sent, received, _ = np.split(self._messages.array, [split, split + arrived * width])
            self._outbox[:split].get(out=sent)
            rows = sent.reshape(-1, width), received.reshape(-1, width)
            self._world.ranks.swap_rows(*rows, self._counts, self._incoming, MIGRATION)
            arrivals = [(self._messages.device_pointer + split, arrived)]
        items, first = (self._before, self._after, self._left, self._counters, self._holes), 0
        for pointer, rows in [*arrivals, (0, self._before - self._after)]:
            self._launch("place", rows, self._rows, pointer, first, rows, *items)
            first += rows
        if arrived:
            cupy().cuda.get_current_stream().synchronize()

    def _describe(self, arrays: Sequence[Any], flips: Sequence[bool]) -> None:
        """Describe the rows of arrays to the kernels."""
        key = [  # address, bytes of a particle, and bytes of a number whose sign changes
            (a.data.ptr, row_bytes(a), flip * a.dtype.itemsize >> (a.dtype.kind == "c"))
            for a, flip in zip(arrays, flips, strict=True)
        ]
        if key != self._key:
            word = gcd(8, *chain(*(sizes for _, *sizes in key)))
            columns = [
                (address + start, width, start * self._axes // width if is_sign else self._axes)
                for address, width, number in key
                for start in range(0, width, word)
                for is_sign in [number and (start + word) % number == 0]
            ]
            self._rows = cupy().asarray([len(columns), *chain(*columns)], "i8")
            self._width, self._word = len(columns) * word, ELEMENTS[f"u{word}"]
            self._key = key

    def _launch(self, function: str, items: int, *args: Any) -> None:
        """Launch a kernel for so many items; arguments are arrays and integers."""
        defines = ("AXES", str(self._axes)), ("WORD", self._word)
        numbers = [arg if isinstance(arg, int) else arg.data.ptr for arg in (self._grid, *args)]
        if items > 0:
            PreparedLaunch(
                kernel("migrate", function, self._device, defines),
                -(-items // (_THREADS * (_ROWS if function == "find" else 1))),
                _THREADS,
                [*map(ctypes.c_int64, numbers)],
                device=self._device,
            ).launch(stream_pointer())
