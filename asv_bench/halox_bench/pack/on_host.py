"""Packing of NumPy arrays: the host packer beside slicing and MPI_Pack, checked and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError, MissingPackageError
from halox.packing.host import HostPacker
from halox.runtime.world import load_mpi
from halox_bench.common import reference
from halox_bench.common.options import MIB
from halox_bench.common.reference import Bytes
from halox_bench.common.rows import BASELINE, Row
from halox_bench.common.timing import Timed
from halox_bench.pack.options import PackOptions
from halox_bench.pack.patterns import Case
from halox_bench.pack.rows import COPY, PACKER, Measured, rows_of
from halox_bench.pack.sectors import SECTOR, sectors
from halox_bench.ranks.bench import Bench

MOST_BYTES = 512 * MIB
"""Larger cases are left out."""

_SAMPLE_S = 2e-3
_MOST_CALLS = 1000
_ALL_MEMORY = 1 << 40
"""Extent beyond any case's memory: mpi4py derives counts from the lengths of buffers."""


class HostBench(Bench):
    """The host packer beside slicing and MPI_Pack, on this process."""

    def __init__(self, options: PackOptions) -> None:
        self._options = options

    def heading(self) -> str:
        return "NumPy arrays; times on the host's clock"

    def measure(self, case: Case) -> list[Row]:
        """Measure one case; a method that fails is a row with the error."""
        if case.slab_bytes > MOST_BYTES:
            return self.left_out(case, f"{case.slab_bytes:,} bytes are too large")
        return [row for one in self._options.directions for row in self._rows(case, one)]

    def _rows(self, case: Case, direction: str) -> list[Row]:
        options = self._options
        datatype, start = case.place(0)
        slab = reference.filled(case.slab_bytes)
        packed = np.empty(case.payload, np.uint8)
        expected = reference.expected(datatype.blocks(case.count).shifted(start))
        found: list[Measured] = []
        for name, kind, prepare in _methods(case, datatype, start, slab, packed, direction):
            if kind == BASELINE and not options.baselines and name != COPY:
                continue
            try:
                call = prepare()
                if name != COPY:
                    _check(call, slab, packed, expected, direction)
                found.append((name, kind, Timed(_median_us(call, options.repeats)), False))
            except MissingPackageError as error:
                found.append((name, kind, f"left out: {error}", False))
            except Exception as error:
                # A failed method does not end the run.
                found.append((name, kind, f"{type(error).__name__}: {error}", True))
        alike: dict[str, Any] = {"direction": direction, "destination": "memory", "cache": "warm"}
        alike["sector_bytes"] = SECTOR * sectors(datatype, case.count, start)
        return rows_of(case, alike, found, None)


def _methods(
    case: Case, datatype: dt.Datatype, start: int, slab: Bytes, packed: Bytes, direction: str
) -> Iterator[tuple[str, str, Callable[[], Callable[[], Any]]]]:
    """Yield name, kind, and a function that returns the call to measure."""
    unpack = direction == "unpack"

    def copy() -> Callable[[], Any]:
        ends = (packed, slab[: packed.size])
        target, source = ends[::-1] if unpack else ends
        return lambda: np.copyto(target, source)

    def host() -> Callable[[], Any]:
        packer = HostPacker(slab[start:], datatype, case.count)
        return packer.unpacking(packed) if unpack else packer.packing(packed)

    def by_hand() -> Callable[[], Any]:
        arrays = [
            slab[at : at + nbytes] for at, nbytes in zip(case.offsets, case.arrays, strict=True)
        ]
        layout = case.by_hand
        if layout is None:
            raise HaloxError(f"{case.name} has no hand-written counterpart")
        move = layout.unpack if unpack else layout.pack
        return lambda: move(arrays, packed)

    def mpi() -> Callable[[], Any]:
        return _mpi(case, datatype, slab[start:], packed, unpack=unpack)

    yield COPY, BASELINE, copy
    if case.by_hand is not None:
        yield "NumPy by hand", BASELINE, by_hand
    yield "mpi4py", BASELINE, mpi
    yield "host", PACKER, host


def _mpi(
    case: Case, datatype: dt.Datatype, memory: Bytes, packed: Bytes, *, unpack: bool
) -> Callable[[], Any]:
    mpi = load_mpi()
    items = dt.resized(dt.contiguous(case.count, datatype), 0, _ALL_MEMORY).to_mpi()
    origin = mpi.buffer.fromaddress(memory.ctypes.data, _ALL_MEMORY)
    if unpack:
        return lambda: items.Unpack(packed, 0, origin, mpi.COMM_SELF)
    return lambda: items.Pack(origin, packed, 0, mpi.COMM_SELF)


def _check(
    call: Callable[[], Any], slab: Bytes, packed: Bytes, expected: Bytes, direction: str
) -> None:
    if direction == "pack":
        packed[:] = 0xA5
        call()
        wrong = np.flatnonzero(packed != expected)
        if wrong.size:
            raise HaloxError(f"wrong result: {wrong.size} wrong bytes, the first at {wrong[0]}")
        return
    # Memory holds the complement of the expected bytes, so that written bytes are visible.
    packed[:] = expected
    before = reference.filled(slab.size)
    slab[:] = ~before
    call()
    spoilt = slab.size - packed.size - int(np.count_nonzero(slab == ~before))
    missed = packed.size - int(np.count_nonzero(slab == before))
    slab[:] = before
    if missed or spoilt:
        raise HaloxError(f"wrong result: {missed} bytes not written, {spoilt} written beside")


def _median_us(call: Callable[[], Any], repeats: int) -> float:
    call()
    begin = time.perf_counter()
    call()
    once = time.perf_counter() - begin
    inner = max(1, min(_MOST_CALLS, int(_SAMPLE_S / max(once, 1e-7))))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - begin) / inner)
    return median(times) * 1e6
