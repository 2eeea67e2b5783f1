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
from halox.runtime.context import Context
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned
from halox.runtime.gpu.streams import stream_pointer
from halox.sampling.migration import MIGRATION, RULES, Migration, Rules, row_bytes

_BLOCKS, _THREADS = 32, 128  # for each multiprocessor, and for each block
_MOST_ARGUMENTS = 10  # of a kernel


class _Outbox:
    """Memory for particles that leave this rank, and the addresses of other ranks' memory.

    One for all particles of a grid, kept until the grid is closed: other ranks may still read from it when this rank
    deletes its particles.
    """

    def __init__(self, context: Context) -> None:
        self.memory: Any = cupy().empty(0, "u1")
        self.of_ranks: dict[int, int] = {}
        self.news: object = None  # for other ranks, until they have it


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
        self._counters = cp.zeros(2 * self._world.size + 5, "i8")
        self._arrays: Sequence[Any] = ()
        self._launches: dict[str, PreparedLaunch] = {}
        self._arena = domain.context.use_device(self._device)
        self._maps = domain.context.find_gpus().all_map
        self._outbox = domain.context.once(_Outbox)
        self._messages = pinned(0)

    def find(self, arrays: Sequence[Any], flips: Sequence[bool], n: int) -> tuple[Array, int]:
        """Count the particles that leave, as `Migration.find`."""
        cp, size = cupy(), self._world.size
        self._describe(arrays, flips)
        self._before, self._after, self._flips = n, n, flips
        self._list = cp.empty(n, "i8")
        self._counters.data.memset_async(0, self._counters.nbytes)
        self._launch("find", n, self._list, self._counters)
        counts, others = np.split(self._counters.get(), [size])
        _, lost, self._listed = others[:3].tolist()
        if lost:  # the host names the particle
            self._host.find([arrays[0].get()], [], n)
        self._left = self._listed - int(counts[self._world.rank])
        self._holes = cp.empty(self._left, "i8")
        counts[self._world.rank] = 0
        return counts, self._left

    def pack(self, arrays: Sequence[Any], counts: Array, incoming: Array) -> object:
        """Pack particles that leave, as `Migration.pack`; return the place and handles of memory that is new."""
        self._describe(arrays, self._flips)
        self._counts, self._incoming = counts, incoming
        self._sent, self._arrived = int(counts.sum()), int(incoming.sum())
        self._after = self._before - self._left + self._arrived
        nbytes, outbox = self._sent * self._width, self._outbox
        if nbytes > len(outbox.memory):
            outbox.memory = self._arena.array((nbytes * 3 // 2,), np.dtype("u1"))
            start = outbox.memory.data.ptr
            place = self._arena.locate(start, start + len(outbox.memory))
            if self._maps and place is not None:
                outbox.news = place, self._arena.handles([place])
        nbytes += self._arrived * self._width
        if not self._maps and nbytes > self._messages.nbytes:
            self._messages = pinned(nbytes * 3 // 2)
        if self._sent:
            self._launch("pack", self._list, self._counters, outbox.memory)
            cupy().cuda.get_current_stream().synchronize()
        return outbox.news

    def keep(self) -> None:
        """Settle particles that stay, as `Migration.keep`."""
        if self._listed:
            self._launch("keep", self._list, self._counters, self._after, self._holes)

    def swap(self, records: Sequence[Any], places: Array) -> None:
        """Store arrivals in place of those that leave, as `Migration.swap`."""
        outbox, width = self._outbox, self._width
        outbox.news = None
        if self._maps:
            for rank, record in enumerate(records):
                if record is not None and rank != self._world.rank:
                    self._arena.open(record[1])
                    outbox.of_ranks[rank] = self._arena.pointer(record[0])
            arrivals = [
                (outbox.of_ranks[rank] + int(places[rank]) * width, int(self._incoming[rank]))
                for rank in self._incoming.nonzero()[0].tolist()
            ]
        else:
            split, end = self._sent * width, (self._sent + self._arrived) * width
            messages = self._messages.array[:end].reshape(-1, width)
            sent, received = messages[: self._sent], messages[self._sent :]
            outbox.memory[:split].get(out=sent.reshape(-1))
            self._world.ranks.swap_rows(sent, received, self._counts, self._incoming, MIGRATION)
            arrivals = [(self._messages.device_pointer + split, self._arrived)]
        items, first = (self._before, self._after, self._left, self._counters, self._holes), 0
        for pointer, rows in [*arrivals, (0, self._before - self._after)]:
            if rows > 0:
                self._launch("place", pointer, first, rows, *items)
            first += rows
        if self._arrived:
            cupy().cuda.get_current_stream().synchronize()

    def _describe(self, arrays: Sequence[Any], flips: Sequence[bool]) -> None:
        """Prepare the launches for the rows of arrays."""
        if arrays is self._arrays:
            return
        signs = [  # the bytes of a number whose sign changes, or 0
            flip * array.dtype.itemsize >> (array.dtype.kind == "c")
            for array, flip in zip(arrays, flips, strict=True)
        ]
        word = gcd(8, *map(row_bytes, arrays), *signs)
        columns = [
            (array.data.ptr + start, width, start * self._axes // width if signed else self._axes)
            for array, number in zip(arrays, signs, strict=True)
            for width in [row_bytes(array)]
            for start in range(0, width, word)
            for signed in [number and (start + word) % number == 0]
        ]
        self._rows = cupy().asarray([len(columns), *chain(*columns)], "i8")
        self._width, blocks = len(columns) * word, _BLOCKS * multiprocessors(self._device)
        defines = ("AXES", str(self._axes)), ("WORD", ELEMENTS[f"u{word}"])
        for name in ("find", "pack", "keep", "place"):
            function = kernel("migrate", name, self._device, defines)
            args = [ctypes.c_int64() for _ in range(_MOST_ARGUMENTS)]
            launch = PreparedLaunch(function, blocks, _THREADS, args, device=self._device)
            self._launches[name] = launch
        self._arrays = arrays

    def _launch(self, function: str, *args: Any) -> None:
        """Launch a kernel; arguments are arrays and integers."""
        launch = self._launches[function]
        for held, value in zip(launch.args, (self._grid, self._rows, *args), strict=False):
            held.value = value if isinstance(value, int) else value.data.ptr
        launch.launch(stream_pointer())
