"""Migration of particles on a GPU, by the three kernels of `halox/sampling/kernels/migrate.cu`."""

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
from halox.sampling.migration import RULES, Migration, Rules, row_bytes

_THREADS, _ROWS = 256, 8


class DeviceMigration:
    """A migration of one rank's particles on a GPU; the steps of `halox.sampling.migration.Migration`."""

    def __init__(self, domain: Domain, rules: Rules) -> None:
        self._host = Migration(domain, rules)
        cut, world, self._device = domain.decomposition, domain.world, domain.device_id or 0
        self._rank, self._ranks = world.rank, world.size
        bounds = [*chain(*(axis.bounds[1:-1] for axis in cut.axes))]
        self._tables = cupy().asarray(bounds, "f8"), cupy().asarray([*cut.placement.rank_of], "i8")
        head = [self._tables[0].data.ptr, self._tables[1].data.ptr, self._rank, self._ranks]
        axes = [
            (own.start, own.stop, axis.cells, *map(RULES.index, rule), axis.parts)
            for own, axis, rule in zip(domain.plain.owned, cut.axes, rules, strict=True)
        ]
        self._grid = _words(np.array(head, "u8"), np.array(axes, "f8"))
        self._axes, self._word = len(axes), ELEMENTS["u8"]
        self._key: object = None

    def find(self, positions: Any) -> tuple[Array, int]:
        """Count the particles that leave, as `Migration.find`; waits for the GPU."""
        cp, n = cupy(), len(positions)
        self._before = n
        self._list, counters = cp.empty(n, "i8"), cp.zeros(self._ranks + 3, "i8")
        self._launch("find", n, positions, n, self._list, counters)
        counts = counters.get()
        *_, absorbed, lost, self._listed = counts.tolist()
        if lost:  # the host finds the same particle
            self._host.find(positions.get())
        counts = counts[: self._ranks]
        counts[self._rank] = 0
        self._left = int(counts.sum()) + absorbed
        return counts, self._left

    def pack(
        self, arrays: Sequence[Any], flips: Sequence[bool], counts: Array, incoming: Array
    ) -> tuple[Array, Array]:
        """Return rows to send and rows to receive, in page-locked memory, as `Migration.pack`."""
        cp, self._arrived = cupy(), int(incoming.sum())
        self._after = self._before - self._left + self._arrived
        width = sum(map(row_bytes, arrays))
        shapes = [(int(counts.sum()), width), (self._arrived, width)]
        if not self._listed and not self._arrived:
            return np.empty(shapes[0], "u1"), np.empty(shapes[1], "u1")
        self._rows = self._rows_of(arrays, flips)
        starts = np.cumsum([0, *counts, 0])
        starts[-2:] = 0  # of holes that are found, and filled
        self._cursors, sent = cp.asarray(starts), cp.empty(shapes[0], "u1")
        self._holes = cp.empty(self._left, "i8")
        self._tail = cp.zeros(max(0, self._before - self._after), "u1")
        self._positions = arrays[0]
        items = self._rows, self._positions, self._list, self._listed, self._after
        more = self._cursors, sent, self._holes, self._tail
        self._launch("pack", self._listed, *items, *more)
        rows, received = (_pinned(shape) for shape in shapes)
        sent.get(out=rows)
        return rows, received

    def put(self, arrivals: Array) -> None:
        """Settle particles that stay, and store arrivals, as `Migration.put`."""
        if not self._listed and not self._arrived:
            return
        copy, stream = cupy().empty(arrivals.shape, "u1"), cupy().cuda.get_current_stream()
        copy.set(arrivals, stream)
        moved = max(0, self._before - self._after)
        count = self._listed + self._arrived + moved
        items = self._rows, self._positions, self._list, self._listed, self._before, self._after
        more = self._cursors, copy, self._arrived, self._holes, self._left, self._tail
        self._launch("place", count, *items, *more)
        stream.synchronize()  # before CuPy's pool uses the arrivals' memory again

    def _rows_of(self, arrays: Sequence[Any], flips: Sequence[bool]) -> Any:
        """Return the kernels' table of the words of a particle; kept for the same arrays."""
        widths = list(map(row_bytes, arrays))
        key = tuple(array.data.ptr for array in arrays), tuple(widths), tuple(flips)
        if key != self._key:
            word = gcd(8, *widths)
            masks = [np.zeros((self._axes, width), "u1") for width in widths]
            for array, is_flipped, mask in zip(arrays, flips, masks, strict=True):
                if is_flipped:  # the sign bits of the component along each axis
                    number = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
                    signs = mask.reshape(self._axes, self._axes, -1, number)[..., -1]
                    signs[np.arange(self._axes), np.arange(self._axes)] = 0x80
            at = [
                (a.data.ptr + k, w)
                for a, w in zip(arrays, widths, strict=True)
                for k in range(0, w, word)
            ]
            bases, strides = np.array(at, "u8").T
            flags = np.concatenate(masks, axis=1)
            tables = [cupy().asarray(each) for each in (bases, strides, flags.view(f"u{word}"))]
            self._key, self._kept = key, tables
            self._word = ELEMENTS[f"u{word}"]
            self._table = _words(np.array([*(each.data.ptr for each in tables), len(bases)], "u8"))
        return self._table

    def _launch(self, function: str, items: int, *args: Any) -> None:
        """Launch a kernel for so many items: arrays by address, and integers."""
        defines = ("AXES", str(self._axes)), ("WORD", self._word)
        per_block = _THREADS * (_ROWS if function == "find" else 1)
        if items:
            PreparedLaunch(
                kernel("migrate", function, self._device, defines),
                -(-items // per_block),
                _THREADS,
                [self._grid, *map(_parameter, args)],
                device=self._device,
            ).launch(stream_pointer())


def _words(*arrays: Array) -> Any:
    """Return the words of arrays as a kernel's parameter."""
    words = np.concatenate([array.reshape(-1).view("u8") for array in arrays])
    return (ctypes.c_uint64 * len(words))(*words.tolist())


def _parameter(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return value if isinstance(value, ctypes.Array) else ctypes.c_uint64(value.data.ptr)


def _pinned(shape: tuple[int, int]) -> Array:
    """Return rows of bytes on the host, in page-locked memory of CuPy's pool."""
    memory = cupy().cuda.alloc_pinned_memory(max(1, prod(shape)))
    return np.frombuffer(memory, np.uint8, prod(shape)).reshape(shape)
