"""``halox bench pack``: packing and unpacking of many layouts on one process, beside copies and by hand.

On a GPU times are between CUDA events. With ``--cold`` calls go in turns over copies of the array that exceed four
times the L2 cache; otherwise over the same memory, which stays in the cache where it fits. Every word of memory is
filled with a mixture of its place, so that the layout alone determines the packed bytes.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import DatatypeError
from halox.packing.choosing import choose, device_packer
from halox.packing.host import HostPacker
from halox_bench import byhand
from halox_bench.bench import MIB, NAMED, Bench, Method, Plan, WrongResult, timed
from halox_bench.checks import Bytes, expected, filled
from halox_bench.clock import MOST_GRAPH_CALLS, Call, EventClock, TurnCall
from halox_bench.kernels import DEFAULT, copy, cupy, multiprocessors, packed_buffer, prepared
from halox_bench.kinds import Kind, Option, words_of
from halox_bench.layouts import Boxes
from halox_bench.patterns import Case, select
from halox_bench.rows import BASELINE, GRAPH, SELECTED, Column, Row

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
    """Measure one case."""
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
    slab, packed = filled(case.slab_bytes), np.empty(case.payload, np.uint8)
    wanted = packed_bytes(case)

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
        return abs(right - packed.size) + abs(slab.size - packed.size - changed)

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
    plans, further = [Plan(SELECTED, SELECTED, host)], dict[str, Call]()
    if not args.no_baselines:
        plans.append(Plan(BASELINE, MPI_PACK, mpi))
        further[COPY] = lambda: np.copyto(target, source)
    return timed(bench, given, plans, check, further=further)


def packed_bytes(case: Case) -> Bytes:
    """Return the bytes that packing filled memory gives, by the layout by hand, or else by the list of blocks."""
    if case.by_hand is None:
        return expected(case.datatype().blocks(case.count).shifted(case.start))
    slab, packed = filled(case.slab_bytes), np.empty(case.payload, np.uint8)
    arrays = [slab[at : at + n] for at, n in zip(case.offsets, case.arrays, strict=True)]
    case.by_hand.pack(arrays, packed)
    return packed


class _OnDevice:
    """A case in the memory of a GPU: slabs of its arrays, packed bytes, and their checks."""

    def __init__(self, bench: Bench, given: PackCase) -> None:
        self._given, self._case = given, given.case
        self._stage, self._device = bench.stage, bench.stage.device or 0
        self._clock = EventClock(bench.stage, bench.clock.timing.batches)
        case, cp = self._case, cupy()
        cp.get_default_memory_pool().free_all_blocks()
        free = cp.cuda.runtime.memGetInfo()[0]
        self._step = step = -(-case.slab_bytes // 512) * 512
        if step + case.payload > 0.9 * free:
            raise MemoryError(f"{case.name} needs {step + case.payload:,} bytes, {free:,} are free")
        self._datatype = case.datatype()
        turns = self._turns(free, step) if given.cold else 1
        self._memory = cp.empty(turns * step, np.uint8)
        base = int(self._memory.data.ptr)
        self._slabs = [base + turn * step for turn in range(turns)]
        for turn in range(turns):
            self._fill(self._slab(turn))
        # Several packed buffers on the device only: the host's memory is not cached there.
        self._room = -(-case.payload // 512) * 512
        several = turns if given.to == "device" else 1
        self._packed, self._at, self._owner = packed_buffer(
            self._room * several, host=given.to == "host"
        )
        self._several = several
        cp.cuda.Device(self._device).synchronize()
        self._expected = packed_bytes(case)

    @cached_property
    def _blocks(self) -> Any:
        """Blocks relative to the slab."""
        return self._datatype.blocks(self._case.count).shifted(self._case.start)

    def _turns(self, free: int, step: int) -> int:
        """Return how many copies of the memory exceed the L2 cache four times; 1 if that is impossible."""
        l2 = int(cupy().cuda.runtime.getDeviceProperties(self._device)["l2CacheSize"])
        sectors = int((-(-self._blocks.lengths // _SECTOR)).sum())
        touched = _SECTOR * sectors + self._case.payload
        needed = -(-_CACHES * l2 // touched)
        small = (
            needed <= MOST_GRAPH_CALLS and needed * (step + self._case.payload) < _FREE_SHARE * free
        )
        return needed if touched <= l2 and small else 1

    def _slab(self, turn: int) -> Any:
        return self._memory[turn * self._step : (turn + 1) * self._step]

    def _fill(self, memory: Any, *, flip: int = 0, combine: bool = False) -> None:
        """Fill memory of whole words, or combine it with the fill by exclusive or."""
        values = int(memory.data.ptr), memory.nbytes // 8, flip
        arguments = (*map(ctypes.c_uint64, values), ctypes.c_int(combine))
        blocks = 8 * multiprocessors(self._device)
        prepared("bench", "fill", blocks, 256, arguments, self._device).launch(
            self._stage.stream.ptr
        )
        self._stage.synchronize()

    def _packed_at(self, turn: int) -> int:
        return self._at + self._room * (turn % self._several)

    def rows(self, args: argparse.Namespace) -> list[Row]:
        """Check and measure all methods."""
        given, found = self._given, list[Row]()
        for kind, name, make in self._methods(args):
            row = Row(given.name, kind, name, details=given.details)
            try:
                call, path = make()
                if name != COPY:
                    self._check(call)
                us, graph_us = self._clock.measure(
                    call, turns=len(self._slabs), graph=not args.no_graph and name != BLOCK_COPIES
                )
            except DatatypeError as error:
                found.append(row.with_(error=f"not for this type: {error}"))
                continue
            except Exception as error:
                found.append(row.with_(error=f"{type(error).__name__}: {error}", failed=True))
                cupy().cuda.Device(self._device).synchronize()  # raises if the GPU is broken
                continue
            row = row.with_(path=path, us=us, gb_per_s=self._case.payload / us / 1e3)
            found.append(row)
            if graph_us is not None:
                speed = self._case.payload / graph_us / 1e3
                found.append(row.with_(mode=GRAPH, us=graph_us, gb_per_s=speed))
        self._memory = self._packed = self._owner = None
        return found

    def _methods(
        self, args: argparse.Namespace
    ) -> Iterator[tuple[str, str, Callable[[], tuple[TurnCall, str]]]]:
        """Yield kind, name, and a function that returns the call and its packer."""
        yield SELECTED, SELECTED, partial(self._packing, "auto")
        for method in args.methods or ():
            yield NAMED, method, partial(self._packing, method)
        yield BASELINE, COPY, partial(self._moving, self._copy)
        if args.no_baselines:
            return
        layout = self._case.by_hand
        boxes = layout.boxes if isinstance(layout, Boxes) else ()
        if layout is not None:
            device, direction = self._device, self._given.direction
            yield (
                BASELINE,
                BY_HAND,
                lambda: self._moving(byhand.prepare(layout, self._case.offsets, direction, device)),
            )
        if len(boxes) == 1 and len(boxes[0].counts) == 1:
            yield BASELINE, MEMCPY_2D, partial(self._moving, self._memcpy_2d)
        if len(boxes) > 1 and self._blocks.n_blocks <= MOST_COPIES:
            yield BASELINE, BLOCK_COPIES, partial(self._moving, self._block_copies)

    def _packing(self, method: str) -> tuple[TurnCall, str]:
        case, start = self._case, self._case.start
        if method == "auto":
            to_host = self._given.to == "host"
            method = choose(self._datatype, case.count, to_host=to_host).method
        packer: Any = device_packer(method, self._datatype, case.count, self._device)

        def call(stream: int, turn: int) -> None:
            if self._given.unpack:
                packer.unpack(self._packed_at(turn), self._slabs[turn] + start, stream)
            else:
                packer.pack(self._slabs[turn] + start, self._packed_at(turn), stream)

        return call, packer.method

    def _moving(self, move: byhand.Move) -> tuple[TurnCall, str]:
        def call(stream: int, turn: int) -> None:
            move(self._slabs[turn], self._packed_at(turn), stream)

        return call, ""

    def _ends(self, slab: int, packed: int) -> tuple[int, int]:
        """Return source and target."""
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

    def _check(self, call: TurnCall) -> None:
        """Make a call and compare every byte; raise `WrongResult`."""
        wrong = self._wrong_slab(call) if self._given.unpack else self._wrong_packed(call)
        if wrong:
            raise WrongResult(f"wrong result: {wrong} bytes")

    def _first_packed(self) -> Any:
        return self._packed[: self._case.payload]

    def _wrong_packed(self, call: TurnCall) -> int:
        self._first_packed()[:] = 0xA5
        cupy().cuda.Device(self._device).synchronize()
        call(self._stage.stream.ptr, 0)
        self._stage.synchronize()
        found = self._first_packed()
        found = found if isinstance(found, np.ndarray) else found.get()
        return int(np.count_nonzero(found != self._expected))

    def _wrong_slab(self, call: TurnCall) -> int:
        cp, slab = cupy(), self._slab(0)
        packed = self._first_packed()
        packed[:] = self._expected if isinstance(packed, np.ndarray) else cp.asarray(self._expected)
        self._fill(slab, flip=2**64 - 1)
        cp.cuda.Device(self._device).synchronize()
        call(self._stage.stream.ptr, 0)
        # Right bytes are now 0, bytes that were not written 255.
        self._fill(slab, combine=True)
        counts = {0: self._case.payload, 255: slab.size - self._case.payload}
        for begin in range(0, slab.size, 256 * MIB):
            for value in counts:
                part = slab[begin : begin + 256 * MIB]
                counts[value] -= int(cp.count_nonzero(part == value))
        cp.cuda.Device(self._device).synchronize()
        self._fill(slab)
        return sum(map(abs, counts.values()))


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
