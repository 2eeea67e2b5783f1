"""A case's memory on a GPU: slabs of arrays, and checks of packed and unpacked bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from halox.datatypes import BlockList
from halox.errors import DeviceError, HaloxError
from halox_bench.common import reference
from halox_bench.common.byhand import Move
from halox_bench.common.options import MIB
from halox_bench.common.reference import Bytes
from halox_bench.common.rig import Buffer, Rig
from halox_bench.common.timing import MOST_GRAPH_CALLS, Call, Timed
from halox_bench.pack.patterns import Case
from halox_bench.pack.sectors import SECTOR, sectors

_FREE_SHARE = 0.5
"""Share of the free memory that copies of a case may take."""

_CACHES = 4
"""Cold turns go over this many times what the L2 holds."""


class Placed:
    """A case in the memory of a rig's GPU.

    Attributes
    ----------
    addresses : tuple of int
        Buffer address of each turn; the first alone for warm measurements.
    slabs : tuple of int
        Address of each turn's slab.
    blocks : BlockList
        The blocks, relative to the slab.
    sector_bytes : int
        Bytes of the sectors that one turn touches.
    caches : tuple of str
        States of the cache that can be measured.

    Raises
    ------
    DeviceError
        If the memory cannot be allocated.
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
        self.array = self.memory[case.start : step]
        self.refill()

    def refill(self) -> None:
        """Fill all memory again; unpacked bytes are lost."""
        for turn in range(self.turns):
            self.rig.fill(self._slab(turn))

    @property
    def turns(self) -> int:
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

    def moving(self, move: Move, buffer: Buffer) -> Call:
        """Return a call that moves bytes between a turn's slab and the buffer."""

        def call(stream: int, turn: int) -> None:
            move(self.slabs[turn], buffer.address(turn), stream)

        return call

    def packing(self, packer: Any, buffer: Buffer, *, unpack: bool = False) -> Call:
        """Return a call of a packer between a turn's address and the buffer."""

        def call(stream: int, turn: int) -> None:
            if unpack:
                packer.unpack(buffer.address(turn), self.addresses[turn], stream)
            else:
                packer.pack(self.addresses[turn], buffer.address(turn), stream)

        return call

    def timed(
        self, call: Call, *, graph: bool = True, note: str = "", caches: Sequence[str] = ()
    ) -> dict[str, Timed]:
        """Time a call in all states of the cache, or in some."""
        return {
            cache: self.rig.clock.measure(
                call, turns=self.turns if cache == "cold" else 1, graph=graph, note=note
            )
            for cache in caches or self.caches
        }

    def check(
        self, call: Call, buffer: Buffer, *, unpack: bool = False, nbytes: int | None = None
    ) -> None:
        """Make a call and compare every byte.

        Parameters
        ----------
        nbytes : int, optional
            Number of packed bytes to compare; by default all.

        Raises
        ------
        HaloxError
            If the result is wrong.
        """
        if unpack:
            wrong = self._check_unpacked(call, buffer)
        else:
            wrong = self._check_packed(call, buffer, nbytes or self.case.payload)
        if wrong:
            raise HaloxError(f"{self.case.name}: wrong result: {wrong}")

    def _check_packed(self, call: Call, buffer: Buffer, nbytes: int) -> str:
        buffer.write(np.full(self.case.payload, 0xA5, np.uint8))
        call(self.rig.stream.ptr, 0)
        self.rig.stream.synchronize()
        wrong = np.flatnonzero(buffer.read()[:nbytes] != self.expected[:nbytes])
        return f"{wrong.size} wrong bytes, the first at {wrong[0]}" if wrong.size else ""

    def _check_unpacked(self, call: Call, buffer: Buffer) -> str:
        cp, slab = self.rig.cp, self._slab(0)
        buffer.write(self.expected)
        self.rig.fill(slab, flip=2**64 - 1)
        call(self.rig.stream.ptr, 0)
        # Written bytes are now 0, all others 255.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the memory."""
        self.memory = self.array = None

    def _slab(self, turn: int) -> Any:
        return self.memory[turn * self._step : (turn + 1) * self._step]
