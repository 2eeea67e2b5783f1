"""A case's memory on a GPU: slabs of arrays, packed buffers at each destination, and checks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from halox.cli.bench import reference
from halox.cli.bench.baselines import copy
from halox.cli.bench.kernels import defines, kernel
from halox.cli.bench.patterns import MIB, Case
from halox.cli.bench.reference import Bytes
from halox.cli.bench.sectors import SECTOR, sectors
from halox.cli.bench.timing import MOST_GRAPH_CALLS, Clock
from halox.datatypes import BlockList
from halox.errors import DeviceError
from halox.runtime.gpu.cuda import cupy, gpu_count, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned

DESTINATIONS = ("device", "host", "peer")

DEVICE_COPY_BYTES = 256 * MIB
LINK_COPY_BYTES = 64 * MIB
"""What the speeds of large copies are measured with."""

_FREE_SHARE = 0.5
"""Share of the free memory that copies of a case may take."""

_CACHES = 4
"""Cold turns go over this many times what the L2 holds."""


@dataclass(frozen=True)
class Buffer:
    """Packed bytes somewhere that kernels of the GPU reach.

    Attributes
    ----------
    addresses : tuple of int
        One, or one a turn.
    read, write : callable
        Content of the first on the host, and back.
    """

    addresses: tuple[int, ...]
    read: Callable[[], Bytes]
    write: Callable[[Bytes], None]

    def address(self, turn: int) -> int:
        """Address for a turn."""
        return self.addresses[turn % len(self.addresses)]


class Rig:
    """One GPU with its clock and what it can do at best.

    Parameters
    ----------
    device : int
    repeats : int
        Samples of each measurement.
    """

    def __init__(self, device: int = 0, repeats: int = 11) -> None:
        self.cp = cupy()
        self.device = device
        self.clock = Clock(device, repeats)
        self.stream = self.clock.stream
        runtime = self.cp.cuda.runtime
        self.l2_bytes = int(runtime.getDeviceProperties(device)["l2CacheSize"])
        self.sms = multiprocessors(device)
        self._links = {"device": float("inf")}
        self._fill_args = (
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
            ctypes.c_int(0),
        )
        self._fill = PreparedLaunch(
            kernel("bench", "fill", device, defines("bench")),
            8 * self.sms,
            256,
            self._fill_args,
            device=device,
        )

    def destinations(self) -> tuple[str, ...]:
        """Return where packed bytes can be put here."""
        return ("device", "host", *(("peer",) if self.peer is not None else ()))

    @cached_property
    def peer(self) -> int | None:
        """Another GPU whose memory this one reaches."""
        runtime = self.cp.cuda.runtime
        for other in range(gpu_count()):
            if other != self.device and runtime.deviceCanAccessPeer(self.device, other):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise
                return other
        return None

    @cached_property
    def bytes_per_us(self) -> float:
        """Bytes read and written a microsecond by a copy on the device too large for the L2."""
        nbytes = max(DEVICE_COPY_BYTES, 4 * self.l2_bytes)
        ends = self.cp.empty(nbytes, np.uint8), self.cp.empty(nbytes, np.uint8)
        source, target = (int(end.data.ptr) for end in ends)
        self.cp.cuda.Device(self.device).synchronize()
        timed = self.clock.measure(
            lambda stream, _: copy(source, target, nbytes, stream), graph=False
        )
        return 2 * nbytes / timed.us

    def link_bytes_per_us(self, destination: str) -> float:
        """Bytes that a copy moves to the host or the peer in a microsecond."""
        if destination not in self._links:
            self._links[destination] = self._measured_link(destination)
        return self._links[destination]

    def _measured_link(self, destination: str) -> float:
        nbytes = LINK_COPY_BYTES
        source = self.cp.empty(nbytes, np.uint8)
        buffer = self.buffer(destination, nbytes)
        self.cp.cuda.Device(self.device).synchronize()
        ends = int(source.data.ptr), buffer.address(0)
        timed = self.clock.measure(lambda stream, _: copy(*ends, nbytes, stream), graph=False)
        return nbytes / timed.us

    def buffer(self, destination: str, nbytes: int, turns: int = 1) -> Buffer:
        """Allocate packed bytes; several only on the device itself.

        Raises
        ------
        DeviceError
            If there is no such destination here.
        """
        cp = self.cp
        if destination == "host":
            page = pinned(nbytes)

            def to_host(packed: Bytes) -> None:
                page.array[:] = packed

            return Buffer((page.device_pointer,), lambda: page.array.copy(), to_host)
        place = self.device if destination == "device" else self.peer
        if place is None:
            raise DeviceError("destination 'peer': no other GPU here that this one can reach")
        step = -(-nbytes // 512) * 512
        with cp.cuda.Device(place):
            memory = cp.empty(step * turns, np.uint8)
            cp.cuda.Device(place).synchronize()

        def read() -> Bytes:
            with cp.cuda.Device(place):
                return np.asarray(memory[:nbytes].get())

        def write(packed: Bytes) -> None:
            with cp.cuda.Device(place):
                memory[:nbytes].set(packed)
                cp.cuda.Device(place).synchronize()

        pointer = int(memory.data.ptr)
        return Buffer(tuple(pointer + step * turn for turn in range(turns)), read, write)

    def fill(self, memory: Any, *, flip: int = 0, combine: bool = False) -> None:
        """Fill device memory of whole words, or combine it with what it would be filled with."""
        words, n, flipped, combined = self._fill_args
        words.value, n.value = int(memory.data.ptr), memory.nbytes // 8
        flipped.value, combined.value = flip, int(combine)
        self._fill.launch(self.stream.ptr)
        self.stream.synchronize()


class Placed:
    """A case in the memory of a rig's GPU.

    Parameters
    ----------
    rig : Rig
    case : Case

    Attributes
    ----------
    datatype : Datatype
    addresses : tuple of int
        Buffer address of each turn; the first alone for warm measurements.
    slabs : tuple of int
        Where each turn's slab begins.
    blocks : BlockList
        The blocks, relative to the slab.
    sector_bytes : int
        Bytes of the sectors that one turn touches.
    caches : tuple of str
        Which states of the cache can be measured.

    Raises
    ------
    DeviceError
        If the memory cannot be had.
    """

    def __init__(self, rig: Rig, case: Case) -> None:
        self.rig, self.case = rig, case
        cp = rig.cp
        cp.get_default_memory_pool().free_all_blocks()
        free = cp.cuda.runtime.memGetInfo()[0]
        step = -(-case.slab_bytes // 512) * 512
        if step + case.payload > 0.9 * free:
            raise DeviceError(
                f"{case.name} needs {step + case.payload} bytes, free on device {rig.device} are {free}"
            )
        datatype, _ = case.place(0)
        self.sector_bytes = SECTOR * sectors(datatype, case.count, case.start)
        touched = self.sector_bytes + case.payload
        turns = 1
        self.caches: tuple[str, ...] = ("large",)
        if touched <= rig.l2_bytes:
            self.caches = ("warm",)
            needed = -(-_CACHES * rig.l2_bytes // touched)
            if needed <= MOST_GRAPH_CALLS and needed * (step + case.payload) < _FREE_SHARE * free:
                turns, self.caches = needed, ("warm", "cold")
        self.memory = cp.empty(turns * step, np.uint8)
        base = int(self.memory.data.ptr)
        cp.cuda.Device(rig.device).synchronize()
        self.datatype, address = case.place(base)
        self.addresses = tuple(address + turn * step for turn in range(turns))
        self.slabs = tuple(base + turn * step for turn in range(turns))
        self.blocks: BlockList = self.datatype.blocks(case.count).shifted(address - base)
        self._step = step
        self.array = self.memory[case.start : step] if not case.absolute else None
        self.refill()

    def refill(self) -> None:
        """Give all memory its first content again; whatever has been unpacked there is gone."""
        for turn in range(self.turns):
            self.rig.fill(self._slab(turn))

    @property
    def turns(self) -> int:
        """Number of slabs."""
        return len(self.slabs)

    @cached_property
    def expected(self) -> Bytes:
        """Packed bytes, from the block list alone."""
        return reference.expected(self.blocks)

    def bound_us(self, destination: str) -> float:
        """Least time: sectors and payload through device memory, or the payload over the link."""
        moved = self.sector_bytes + (self.case.payload if destination == "device" else 0)
        link_us = self.case.payload / self.rig.link_bytes_per_us(destination)
        return max(moved / self.rig.bytes_per_us, link_us)

    def check_packed(self, move: Callable[[int], None], buffer: Buffer, nbytes: int) -> str:
        """Do a move into a buffer; return what is wrong, or an empty text.

        Parameters
        ----------
        move : callable
            Given a stream's address.
        nbytes : int
            How many of the bytes it is to pack.
        """
        buffer.write(np.full(self.case.payload, 0xA5, np.uint8))
        move(self.rig.stream.ptr)
        self.rig.stream.synchronize()
        wrong = np.flatnonzero(buffer.read()[:nbytes] != self.expected[:nbytes])
        return f"{wrong.size} wrong bytes, the first at {wrong[0]}" if wrong.size else ""

    def check_unpacked(self, move: Callable[[int], None], buffer: Buffer) -> str:
        """Do a move out of a buffer into the slab; return what is wrong, or an empty text."""
        cp, slab = self.rig.cp, self._slab(0)
        buffer.write(self.expected)
        self.rig.fill(slab, flip=2**64 - 1)
        move(self.rig.stream.ptr)
        # What has been written is now 0, all else is 255.
        self.rig.fill(slab, combine=True)
        word = reference.word_of(self.blocks)
        words = slab.view(f"u{word}")
        missed = 0
        for places in reference.word_places(self.blocks, word):
            missed += int(cp.count_nonzero(words[cp.asarray(places)]))
        untouched = 0
        for begin in range(0, slab.size, 256 * MIB):
            untouched += int(cp.count_nonzero(slab[begin : begin + 256 * MIB] == 255))
        cp.cuda.Device(self.rig.device).synchronize()
        self.rig.fill(slab)
        spoilt = slab.size - self.case.payload - untouched
        if missed or spoilt:
            return f"{missed} words not written, {spoilt} bytes written that should not be"
        return ""

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = self.array = None

    def _slab(self, turn: int) -> Any:
        return self.memory[turn * self._step : (turn + 1) * self._step]
