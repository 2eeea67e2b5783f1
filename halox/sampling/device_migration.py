"""Migration of particles on a GPU, by the three kernels of `halox/sampling/kernels/migrate.cu`.

Ranks that map one another's memory copy their arrivals from there; other ranks send messages from the host. A rank
waits for its GPU before other ranks may read, and after its copies, so that they may write again in the next migration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from math import gcd, prod
from typing import Any

import numpy as np

from halox.domain import Domain
from halox.reductions.operations import ELEMENTS
from halox.runtime.arrays import Array
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.streams import stream_pointer
from halox.sampling.migration import RULES, Migration, Rules, row_bytes, swap_rows

_THREADS, _ROWS = 256, 8


class DeviceMigration:
    """A migration of one rank's particles on a GPU, with the steps of `halox.sampling.migration.Migration`."""

    def __init__(self, domain: Domain, rules: Rules) -> None:
        self._host, self._world = Migration(domain, rules), domain.world
        cut, self._device = domain.decomposition, domain.device_id or 0
        bounds = [*chain(*(axis.bounds[1:-1] for axis in cut.axes))]
        self._tables = cupy().asarray(bounds, "f8"), cupy().asarray([*cut.placement.rank_of], "i8")
        axes = [
            (own.start, own.stop, axis.cells, *map(RULES.index, rule), axis.parts)
            for own, axis, rule in zip(domain.plain.owned, cut.axes, rules, strict=True)
        ]
        addresses = [table.data.ptr for table in self._tables]
        self._grid = _words([*addresses, self._world.rank, self._world.size], np.array(axes, "f8"))
        self._axes = len(axes)
        self._key: object = None
        arena = domain.context.use_device(self._device)
        self._arena = arena if domain.context.find_gpus().all_map else None
        self._outbox: Any = cupy().empty(0, "u1")
        self._outboxes: dict[int, int] = {}  # addresses of other ranks' memory

    def find(self, arrays: Sequence[Any], flips: Sequence[bool]) -> tuple[Array, int]:
        """Count the particles that leave, as `Migration.find`, and settle the others."""
        cp, self._before = cupy(), len(arrays[0])
        self._list, counters = cp.empty(self._before, "i8"), cp.zeros(self._world.size + 3, "i8")
        rows = self._rows_of(arrays, flips)
        self._launch("find", self._before, rows, arrays[0], self._before, self._list, counters)
        *numbers, absorbed, lost, self._listed = counters.get().tolist()
        if lost:  # the host names the particle
            self._host.find([arrays[0].get()], [])
        numbers[self._world.rank] = 0
        return np.array(numbers), sum(numbers) + absorbed

    def pack(
        self, arrays: Sequence[Any], flips: Sequence[bool], counts: Array, incoming: Array
    ) -> object:
        """Pack particles that leave, as `Migration.pack`; return the place and handles of memory that is new."""
        cp, self._counts, self._incoming = cupy(), counts, incoming
        self._width, arrived = sum(map(row_bytes, arrays)), int(incoming.sum())
        self._is_idle = not self._listed and not arrived
        if self._is_idle:
            return None
        self._after = self._before - self._listed + arrived
        self._rows = self._rows_of(arrays, flips)
        self._arrivals = cp.empty((arrived, self._width), "u1")
        starts = np.cumsum([0, *counts, 0])
        starts[-2:] = 0  # numbers of holes that are found, and filled
        self._cursors, self._holes = cp.asarray(starts), cp.empty(self._listed, "i8")
        self._tail = cp.zeros(max(0, self._before - self._after), "u1")
        nbytes, record = int(counts.sum()) * self._width, None
        if nbytes > len(self._outbox):
            size = max(nbytes, len(self._outbox) * 3 // 2)
            if self._arena is None:
                self._outbox = cp.empty(size, "u1")
            else:
                self._outbox = self._arena.array((size,), np.dtype("u1"))
                start = self._outbox.data.ptr
                place = self._arena.locate(start, start + size)
                assert place is not None
                record = place, self._arena.handles([place])
        items = self._rows, arrays[0], self._list, self._listed, self._after, self._cursors
        self._launch("pack", self._listed, *items, self._outbox, self._holes, self._tail)
        if self._listed:
            cp.cuda.get_current_stream().synchronize()
        return record

    def swap(self, records: Sequence[Any], places: Array) -> None:
        """Copy the arrivals from other ranks, as `Migration.swap`."""
        stream, runtime = cupy().cuda.get_current_stream(), cupy().cuda.runtime
        if self._arena is not None:
            for rank, record in enumerate(records):
                if record is not None and rank != self._world.rank:
                    self._arena.open(record[1])
                    self._outboxes[rank] = self._arena.pointer(record[0])
        if self._is_idle:
            return
        if self._arena is None:
            totals = int(self._counts.sum()), int(self._incoming.sum())
            sent, self._received = (_pinned((total, self._width)) for total in totals)
            self._outbox[: sent.size].get(out=sent.reshape(-1))
            swap_rows(self._world, sent, self._received, self._counts, self._incoming)
            self._arrivals.set(self._received, stream)
            return
        target = self._arrivals.data.ptr
        for rank in np.flatnonzero(self._incoming).tolist():
            nbytes = int(self._incoming[rank]) * self._width
            source = self._outboxes[rank] + int(places[rank]) * self._width
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)
            target += nbytes

    def put(self) -> None:
        """Store arrivals in place of those that leave, as `Migration.put`."""
        if self._is_idle:
            return
        arrived, moved = len(self._arrivals), max(0, self._before - self._after)
        items = self._arrivals, arrived, self._before, self._after, self._holes, self._listed
        self._launch("place", arrived + moved, self._rows, *items, self._tail, self._cursors)
        if arrived:
            cupy().cuda.get_current_stream().synchronize()

    def _rows_of(self, arrays: Sequence[Any], flips: Sequence[bool]) -> Any:
        """Return the kernels' description of rows, whose tables are kept for the same arrays."""
        widths = list(map(row_bytes, arrays))
        key = [(a.data.ptr, a.dtype, w, f) for a, w, f in zip(arrays, widths, flips, strict=True)]
        if key != self._key:
            word, masks, words = gcd(8, *widths), [], []
            for pointer, dtype, width, is_flipped in key:
                mask = np.zeros((self._axes, width), "u1")
                if is_flipped:  # the sign bits of the component along each axis
                    number = dtype.itemsize // (2 if dtype.kind == "c" else 1)
                    signs = mask.reshape(self._axes, self._axes, -1, number)[..., -1]
                    signs[np.arange(self._axes), np.arange(self._axes)] = 0x80
                masks.append(mask)
                words += [(pointer + start, width) for start in range(0, width, word)]
            bases, strides = np.array(words, "u8").T
            flags = np.concatenate(masks, axis=1).view(f"u{word}")
            self._kept = [cupy().asarray(table) for table in (bases, strides, flags)]
            self._described = _words([*(table.data.ptr for table in self._kept), len(words)])
            self._key, self._word = key, ELEMENTS[f"u{word}"]
        return self._described

    def _launch(self, function: str, items: int, *args: Any) -> None:
        """Launch a kernel for so many items; arguments are arrays, integers and structs."""
        defines = ("AXES", str(self._axes)), ("WORD", self._word)
        if items:
            PreparedLaunch(
                kernel("migrate", function, self._device, defines),
                -(-items // (_THREADS * (_ROWS if function == "find" else 1))),
                _THREADS,
                [self._grid, *map(_parameter, args)],
                device=self._device,
            ).launch(stream_pointer())


def _words(integers: Sequence[int], *arrays: Array) -> Any:
    """Return a struct of words of 8 bytes."""
    words = np.concatenate([np.array(integers, "u8"), *(a.reshape(-1).view("u8") for a in arrays)])
    return (ctypes.c_uint64 * len(words))(*words.tolist())


def _parameter(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return value if isinstance(value, ctypes.Array) else ctypes.c_uint64(value.data.ptr)


def _pinned(shape: tuple[int, int]) -> Array:
    """Return rows of bytes in page-locked memory of CuPy's pool."""
    memory = cupy().cuda.alloc_pinned_memory(max(1, prod(shape)))
    return np.frombuffer(memory, np.uint8, prod(shape)).reshape(shape)
