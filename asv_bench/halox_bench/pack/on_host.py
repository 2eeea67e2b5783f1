"""Packing of NumPy arrays: the host packer beside slicing and MPI_Pack, checked and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError, MissingPackageError
from halox.packing.host import HostPacker
from halox.runtime.world import load_mpi
from halox_bench.common import reference
from halox_bench.common.reference import Bytes
from halox_bench.common.sizes import MIB
from halox_bench.common.timing import Timed
from halox_bench.pack.options import Options
from halox_bench.pack.patterns import Case
from halox_bench.pack.rows import COPY, Row, common, rows_of
from halox_bench.pack.sectors import SECTOR, sectors

MOST_BYTES = 512 * MIB
"""Larger cases are left out."""

_SAMPLE_S = 2e-3
_MOST_CALLS = 1000
_ALL_MEMORY = 1 << 40
"""Extent beyond any case's memory: mpi4py derives counts from the lengths of buffers."""


def run(cases: Iterable[Case], options: Options, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure cases; yields rows as they are there.

    Notes
    -----
    Not collective. A method that fails on a case is a row with the error; the others go on.
    """
    for case in cases:
        if case.slab_bytes > MOST_BYTES:
            continue
        progress(case.name)
        for direction in options.directions:
            yield from _rows(case, direction, options)


def _rows(case: Case, direction: str, options: Options) -> list[Row]:
    datatype, start = case.place(0)
    slab = reference.filled(case.slab_bytes)
    packed = np.empty(case.payload, np.uint8)
    expected = reference.expected(datatype.blocks(case.count).shifted(start))
    found: list[tuple[str, str, Timed | str, bool]] = []
    for name, kind, prepare in _methods(case, datatype, start, slab, packed, direction):
        if kind == "baseline" and not options.baselines and name != COPY:
            continue
        try:
            call = prepare()
            if name != COPY:
                _check(call, slab, packed, expected, direction)
            found.append((name, kind, Timed(_median_us(call, options.repeats)), False))
        except MissingPackageError as error:
            found.append((name, kind, f"left out: {error}", False))
        except Exception as error:
            # One broken method must not keep the others from being measured.
            found.append((name, kind, f"{type(error).__name__}: {error}", True))
    touched = SECTOR * sectors(datatype, case.count, start)
    return rows_of(common(case, touched, direction, "memory", "warm"), found, None)


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

    yield COPY, "baseline", copy
    if case.by_hand is not None:
        yield "NumPy by hand", "baseline", by_hand
    yield "mpi4py", "baseline", mpi
    yield "host", "packer", host


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
    # Memory is filled with the complement of what unpacking gives, so that what was written shows.
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
