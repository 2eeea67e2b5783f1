"""``halox bench pack``: packing and unpacking of many layouts on one process, beside copies and by hand.

On a GPU times are between CUDA events. With ``--cold`` calls go in turns over copies of the array that exceed four
times the L2 cache; otherwise over the same memory, which stays in the cache where it fits. Every word of memory is
filled with a mixture of its place, so that the layout alone determines the packed bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import DatatypeError, PathError
from halox.packing.choosing import choose, device_packer
from halox.packing.host import HostPacker
from halox_bench import byhand
from halox_bench.bench import MIB, NAMED, Bench, Method, Plan, made, timed
from halox_bench.checks import Bytes, filled
from halox_bench.clock import MOST_GRAPH_CALLS, Call, EventClock
from halox_bench.kernels import DEFAULT, copy, cupy, packed_buffer
from halox_bench.kinds import Kind, Option, words_of
from halox_bench.layouts import Boxes
from halox_bench.patterns import Case, select
from halox_bench.rows import BASELINE, GRAPH, SELECTED, STREAM, Column, Row

COPY, MEMCPY_2D, BLOCK_COPIES = "copy of the same bytes", "cudaMemcpy2D", "one copy a block"
BY_HAND, MPI_PACK = "kernel by hand", "MPI_Pack"
DIRECTIONS, PLACES = ("pack", "unpack"), ("device", "host")

MOST_COPIES = 64
"""Most blocks that are copied one by one."""

_MOST_HOST_BYTES = 512 * MIB
_ALL_MEMORY = 1 << 40
"""Extent beyond any case's memory: mpi4py derives counts from the lengths of buffers."""

_FREE_SHARE, _CACHES, _SECTOR = 0.5, 4, 32


class PackCase:
    """A pattern in one size, packed or unpacked; on a GPU to or from memory of the device or of the host."""

    def __init__(self, case: Case, direction: str, to: str, cold: bool) -> None:
        self.case, self.direction, self.to, self.cold = case, direction, to, cold
        where = "" if to == "device" else f" {'to' if direction == 'pack' else 'from'} {to}"
        self.name = f"{case.name} {direction}{where}{', cold' if cold else ''}"
        self.details = {**case.details, "direction": direction, "to": to, "cold": cold}

    @property
    def unpack(self) -> bool:
        return self.direction == "unpack"


def cases(args: argparse.Namespace) -> list[PackCase]:
    """Return the cases of a command line, to the host only for a GPU."""
    return [
        PackCase(case, direction, to, args.cold)
        for case in select(args.patterns, quick=args.quick)
        for to in args.to
        for direction in args.direction
    ]


def measure(bench: Bench, args: argparse.Namespace, case: PackCase) -> list[Row]:
    if not bench.on_gpu:
        return _on_host(bench, args, case)
    cp = bench.stage.xp
    memory_errors = (MemoryError, cp.cuda.memory.OutOfMemoryError)
    try:
        return _OnDevice(bench, case).rows(args)
    except memory_errors as error:
        return bench.left_out(case, str(error))
    finally:
        bench.free()


def _on_host(bench: Bench, args: argparse.Namespace, given: PackCase) -> list[Row]:
    case, datatype = given.case, given.case.datatype()
    if case.slab_bytes > _MOST_HOST_BYTES or (given.to == "host" and len(args.to) > 1):
        return []  # too large, or the same as to the device
    slab: Bytes = filled(case.slab_bytes)
    packed, wanted = np.empty(case.payload, np.uint8), packed_bytes(case, slab)

    def check(method: Method, call: Call) -> int:
        if not given.unpack:
            packed[:] = 0xA5
            call()
            return int(np.count_nonzero(packed != wanted))
        # Memory holds the complement of the expected bytes, so that written bytes are visible.
        packed[:] = wanted
        before = filled(slab.size)
        slab[:] = ~before
        call()
        changed, right = (int(np.count_nonzero(slab == one)) for one in (~before, before))
        slab[:] = before
        return int(abs(right - packed.size) + abs(slab.size - packed.size - changed))

    def host() -> Method:
        packer = HostPacker(slab[case.start :], datatype, case.count)
        return Method(packer.unpacking(packed) if given.unpack else packer.packing(packed))

    def mpi() -> Method:
        from mpi4py import MPI

        items = dt.resized(dt.contiguous(case.count, datatype), 0, _ALL_MEMORY).to_mpi()
        memory = MPI.buffer.fromaddress(slab[case.start :].ctypes.data, _ALL_MEMORY)
        if given.unpack:
            return Method(lambda: items.Unpack(packed, 0, memory, MPI.COMM_SELF), items.Free)
        return Method(lambda: items.Pack(memory, packed, 0, MPI.COMM_SELF), items.Free)

    source, target = packed if given.unpack else slab[: packed.size], np.empty_like(packed)
    plans = [Plan(SELECTED, SELECTED, host), Plan(BASELINE, MPI_PACK, mpi)]
    return timed(bench, given, plans, check, further={COPY: lambda: np.copyto(target, source)})


def packed_bytes(case: Case, slab: Bytes) -> Bytes:
    """Return the bytes that packing a slab gives, by the layout by hand."""
    packed = np.empty(case.payload, np.uint8)
    arrays = [slab[at : at + n] for at, n in zip(case.offsets, case.arrays, strict=True)]
    case.by_hand.pack(arrays, packed)
    return packed


class _OnDevice:
    """A case in the memory of a GPU: slabs of its arrays, packed bytes, and their checks."""

    def __init__(self, bench: Bench, given: PackCase) -> None:
        self._bench, self._given, self._case = bench, given, given.case
        self._device = bench.stage.device or 0
        self._clock = EventClock(bench.stage, bench.clock.timing.batches)
        case, cp = given.case, cupy()
        bench.free()
        free = cp.cuda.runtime.memGetInfo()[0]
        step = -(-case.slab_bytes // 512) * 512
        needed = 3 * step + case.payload  # the slab, its contents, and a temporary of the check
        if needed > 0.9 * free:
            raise MemoryError(f"{case.name} needs {needed:,} bytes, {free:,} are free")
        self._datatype = case.datatype()
        self._turn, self._turns = 0, self._copies(free, step) if given.cold else 1
        self._expected, self._contents = packed_bytes(case, filled(step)), filled(step, cp)
        self._memory = cp.empty((self._turns, step), np.uint8)
        self._memory[...] = self._contents
        self._slabs = [int(slab.data.ptr) for slab in self._memory]
        # Several packed buffers on the device only: the host's memory is not cached there.
        room, several = -(-case.payload // 512) * 512, self._turns if given.to == "device" else 1
        self._packed, first, self._owner = packed_buffer(room * several, host=given.to == "host")
        self._places = [first + room * (turn % several) for turn in range(self._turns)]
        bench.stage.settle()

    @cached_property
    def _blocks(self) -> Any:
        return self._datatype.blocks(self._case.count).shifted(self._case.start)

    def _copies(self, free: int, step: int) -> int:
        """Return how many copies of the memory exceed the L2 cache four times; 1 if that is impossible."""
        l2 = int(cupy().cuda.runtime.getDeviceProperties(self._device)["l2CacheSize"])
        sectors = int((-(-self._blocks.lengths // _SECTOR)).sum())
        touched = _SECTOR * sectors + self._case.payload
        needed = -(-_CACHES * l2 // touched)
        small = (
            needed <= MOST_GRAPH_CALLS and needed * (step + self._case.payload) < _FREE_SHARE * free
        )
        return needed if touched <= l2 and small else 1

    def rows(self, args: argparse.Namespace) -> list[Row]:
        blank, found = Row(self._given.name, "", "", details=self._given.details), list[Row]()
        with made(self._bench, blank, [*self._plans(args)], self._wrong) as (methods, rows):
            methods[COPY] = self._moving(self._copy)
            rows[COPY] = blank.with_(kind=BASELINE, name=COPY)
            for name, row in rows.items():
                if name not in methods:
                    found.append(row)
                    continue
                method = methods[name]
                us, graph_us = self._clock.measure(
                    method.call, least=self._turns, graph=method.captures and not args.no_graph
                )
                for mode, time_us in ((STREAM, us), (GRAPH, graph_us)):
                    if time_us is not None:
                        speed = self._case.payload / time_us / 1e3
                        found.append(row.with_(mode=mode, us=time_us, gb_per_s=speed))
        return found

    def _plans(self, args: argparse.Namespace) -> Iterator[Plan]:
        yield Plan(SELECTED, SELECTED, partial(self._packing, "auto"))
        for method in args.methods or ():
            yield Plan(NAMED, method, partial(self._packing, method))
        layout = self._case.by_hand
        boxes = layout.boxes if isinstance(layout, Boxes) else ()
        what = layout, self._case.offsets, self._given.direction, self._device
        yield Plan(BASELINE, BY_HAND, lambda: self._moving(byhand.prepare(*what)))
        if len(boxes) == 1 and len(boxes[0].counts) == 1:
            yield Plan(BASELINE, MEMCPY_2D, partial(self._moving, self._memcpy_2d))
        if len(boxes) > 1 and self._blocks.n_blocks <= MOST_COPIES:
            copies = partial(self._moving, self._block_copies, captures=False)
            yield Plan(BASELINE, BLOCK_COPIES, copies)

    def _packing(self, method: str) -> Method:
        case, to_host = self._case, self._given.to == "host"
        if method == "auto":
            method = choose(self._datatype, case.count, to_host=to_host).method
        try:
            packer: Any = device_packer(method, self._datatype, case.count, self._device)
        except DatatypeError as error:
            raise PathError(f"not for this type: {error}") from error

        def move(slab: int, packed: int, stream: int) -> None:
            if self._given.unpack:
                packer.unpack(packed, slab + case.start, stream)
            else:
                packer.pack(slab + case.start, packed, stream)

        moving = self._moving(move)
        moving.found["path"] = packer.method
        return moving

    def _moving(self, move: byhand.Move, *, captures: bool = True) -> Method:
        """Return the method that moves the bytes of one slab after another on CuPy's current stream."""
        current = cupy().cuda.get_current_stream

        def call() -> None:
            turn = self._turn
            self._turn = (turn + 1) % self._turns
            move(self._slabs[turn], self._places[turn], current().ptr)

        return Method(call, captures=captures)

    def _ends(self, slab: int, packed: int) -> tuple[int, int]:
        return (packed, slab) if self._given.unpack else (slab, packed)

    def _copy(self, slab: int, packed: int, stream: int) -> None:
        copy(*self._ends(slab, packed), self._case.payload, stream)

    def _block_copies(self, slab: int, packed: int, stream: int) -> None:
        at = 0
        for offset, length in zip(
            self._blocks.offsets.tolist(), self._blocks.lengths.tolist(), strict=True
        ):
            copy(*self._ends(slab + offset, packed + at), length, stream)
            at += length

    def _memcpy_2d(self, slab: int, packed: int, stream: int) -> None:
        assert isinstance(self._case.by_hand, Boxes)
        (box,) = self._case.by_hand.boxes
        ends = (slab + box.offset, box.strides[0]), (packed, box.block_bytes)
        source, target = ends[::-1] if self._given.unpack else ends
        cupy().cuda.runtime.memcpy2DAsync(
            *target, *source, box.block_bytes, box.counts[0], DEFAULT, stream
        )

    def _wrong(self, method: Method, call: Call) -> int:
        """Move the bytes of the first slab, and return the number of wrong ones."""
        cp, stage, slab = cupy(), self._bench.stage, self._memory[0]
        packed = self._packed[: self._case.payload]
        self._turn = 0
        if not self._given.unpack:
            packed[...] = 0xA5
            stage.settle()
            call()
            stage.synchronize()
            found = packed if isinstance(packed, np.ndarray) else packed.get()
            return int(np.count_nonzero(found != self._expected))
        packed[...] = (
            cp.asarray(self._expected) if isinstance(packed, cp.ndarray) else self._expected
        )
        cp.invert(self._contents, out=slab)
        stage.settle()
        call()
        slab ^= self._contents
        # Right bytes are now 0, bytes that were not written 255.
        right = int(slab.size) - int(cp.count_nonzero(slab))
        untouched = int(cp.count_nonzero(slab == 255))
        slab[...] = self._contents
        stage.settle()
        moved = self._case.payload
        return abs(right - moved) + abs(int(slab.size) - moved - untouched)


PACK = Kind(
    "pack",
    "packing of many layouts, beside CUDA's copies, kernels by hand and MPI_Pack",
    cases,
    measure,
    (
        Option("--patterns", "patterns, or pattern/size, with wildcards; default: all"),
        Option(
            "--to",
            "memory of packed bytes on a GPU: device, host (mapped)",
            words_of(*PLACES),
            ("device",),
        ),
        Option("--direction", "pack, unpack; default: pack", words_of(*DIRECTIONS), ("pack",)),
        Option("--cold", "with cold caches", None),
    ),
    (Column("bytes", "nbytes"), Column("GB/s", "gb_per_s", ".1f")),
    named="methods",
    ranks=1,
    budget_s=90.0,
)
