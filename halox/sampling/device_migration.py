"""Migration of particles on a GPU, by the kernels of `halox/sampling/kernels/migrate.cu`.

Ranks that map one another's memory copy their arrivals from there; other ranks send messages from the host. A rank
waits for its GPU before other ranks may read, and before the ranks agree in the next migration, in which others write.
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
        cp, self._host, self._world = cupy(), Migration(domain, rules), domain.world
        cut, self._device = domain.decomposition, domain.device_id or 0
        axes = [
            (own.start, own.stop, axis.cells, *map(RULES.index, rule), axis.parts)
            for own, axis, rule in zip(domain.plain.owned, cut.axes, rules, strict=True)
        ]
        bounds = [*chain(*(axis.bounds[1:-1] for axis in cut.axes))]
        head = self._world.rank, self._world.size, len(bounds)
        self._axes = len(axes)
        self._grid = cp.asarray([*head, *chain(*axes), *bounds, *cut.placement.rank_of], "f8")
        self._numbers = pinned(8 * (self._world.size + 5)).array.view("i8")
        self._counters = cp.zeros(len(self._numbers), "i8")
        self._key, self._word = [(0, 0, 0)], ELEMENTS["u8"]
        arena = domain.context.use_device(self._device)
        self._arena = arena if domain.context.find_gpus().all_map else None
        self._outbox: Any = cp.empty(0, "u1")
        self._outboxes: dict[int, int] = {}  # addresses of other ranks' memory
        self._staging = np.empty(0, "u1")

    def find(self, arrays: Sequence[Any], flips: Sequence[bool]) -> tuple[Array, int]:
        """Count the particles that leave, as `Migration.find`."""
        positions, size = arrays[0], self._world.size
        self._before, self._list = len(positions), cupy().empty(len(positions), "i8")
        self._counters.data.memset_async(0, self._counters.nbytes)
        self._launch("find", self._before, positions, self._before, self._list, self._counters)
        self._counters.get(out=self._numbers)
        *numbers, lost, self._listed = self._numbers.tolist()
        if lost:  # the host names the particle
            self._host.find([positions.get()], [])
        self._left = self._listed - numbers[self._world.rank]
        counts = self._numbers[:size].copy()
        counts[self._world.rank] = 0
        return counts, self._left

    def keep(self, arrays: Sequence[Any], flips: Sequence[bool]) -> None:
        """Settle particles that stay, as `Migration.keep`."""
        if self._listed > self._left:
            columns = self._columns_of(arrays, flips)
            self._launch("keep", self._listed, *columns, self._list, self._listed)

    def pack(
        self, arrays: Sequence[Any], flips: Sequence[bool], counts: Array, incoming: Array
    ) -> object:
        """Pack particles that leave, as `Migration.pack`; return the place and handles of memory that is new."""
        cp, stream = cupy(), cupy().cuda.get_current_stream()
        self._counts, self._incoming = counts, incoming
        arrived, width = int(incoming.sum()), sum(map(row_bytes, arrays))
        self._after = self._before - self._left + arrived
        self._arrivals = cp.empty((arrived, width), "u1")
        self._columns = self._columns_of(arrays, flips)
        self._numbers[:] = 0
        self._numbers[: len(counts)] = counts.cumsum() - counts
        self._counters.set(self._numbers, stream)
        self._holes = cp.empty(self._left, "i8")
        self._tail = cp.zeros(max(0, self._before - self._after), "u1")
        self._sent, record = int(counts.sum()), None
        if self._arena is None and (self._sent + arrived) * width > len(self._staging):
            self._staging = pinned((self._sent + arrived) * width * 3 // 2).array
        if self._sent * width > len(self._outbox):
            size = self._sent * width * 3 // 2
            if self._arena is None:
                self._outbox = cp.empty(size, "u1")
            else:
                self._outbox = self._arena.array((size,), np.dtype("u1"))
                start = self._outbox.data.ptr
                place = self._arena.locate(start, start + size)
                assert place is not None
                record = place, self._arena.handles([place])
        if self._left:
            items = self._list, self._listed, self._after, self._counters, self._outbox
            self._launch("pack", self._listed, *self._columns, *items, self._holes, self._tail)
            stream.synchronize()
        return record

    def swap(self, records: Sequence[Any], places: Array) -> None:
        """Copy the arrivals from other ranks, as `Migration.swap`."""
        stream, runtime = cupy().cuda.get_current_stream(), cupy().cuda.runtime
        (_, width), target = self._arrivals.shape, self._arrivals.data.ptr
        if self._arena is None:
            rows = self._staging[: (self._sent + len(self._arrivals)) * width].reshape(-1, width)
            sent, received = rows[: self._sent], rows[self._sent :]
            self._outbox[: sent.size].get(out=sent.reshape(-1))
            self._world.ranks.swap_rows(sent, received, self._counts, self._incoming, MIGRATION)
            self._arrivals.set(received, stream)
            return
        for rank, record in enumerate(records):
            if record is not None and rank != self._world.rank:
                self._arena.open(record[1])
                self._outboxes[rank] = self._arena.pointer(record[0])
        for rank in np.flatnonzero(self._incoming).tolist():
            nbytes = int(self._incoming[rank]) * width
            source = self._outboxes[rank] + int(places[rank]) * width
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)
            target += nbytes

    def put(self) -> None:
        """Store arrivals in place of those that leave, as `Migration.put`."""
        arrived, moved = len(self._arrivals), max(0, self._before - self._after)
        items = self._arrivals, arrived, self._before, self._after, self._holes, self._left
        self._launch("place", arrived + moved, *self._columns, *items, self._tail, self._counters)

    def _columns_of(self, arrays: Sequence[Any], flips: Sequence[bool]) -> tuple[Any, int]:
        """Return the kernels' columns and their number; the last ones if arrays are the same."""
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
            self._table = cupy().asarray(np.array(columns, "i8"))
            self._key, self._word = key, ELEMENTS[f"u{word}"]
        return self._table, len(self._table)

    def _launch(self, function: str, items: int, *args: Any) -> None:
        """Launch a kernel for so many items; arguments are arrays and integers."""
        defines = ("AXES", str(self._axes)), ("WORD", self._word)
        if items:
            PreparedLaunch(
                kernel("migrate", function, self._device, defines),
                -(-items // (_THREADS * (_ROWS if function == "find" else 1))),
                _THREADS,
                [
                    ctypes.c_int64(value if isinstance(value, int) else value.data.ptr)
                    for value in (self._grid, *args)
                ],
                device=self._device,
            ).launch(stream_pointer())
