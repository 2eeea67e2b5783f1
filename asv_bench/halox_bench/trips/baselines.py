"""Messages between two ranks as users write them: MPI types, packing by hand, MPI_Pack, NCCL; and contiguous bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

import halox
from halox.errors import PathError
from halox.packing.host import HostPacker
from halox.runtime.gpu.cuda import cupy
from halox.runtime.world import load_mpi
from halox_bench.common.byhand import packed_buffer, prepare
from halox_bench.common.layouts import Box, Boxes, ByHand, Bytes
from halox_bench.ranks.methods import Baseline
from halox_bench.ranks.nccl import Nccl
from halox_bench.trips.cases import Direction, TripCase

MPI_TYPES = "mpi4py types"
BY_HAND = "pack by hand + mpi4py"
MPI_PACK = "MPI_Pack + mpi4py"
HALOX_PACK = "halox.pack + mpi4py"
ZERO_COPY = "zero-copy + mpi4py"
NCCL = "pack + NCCL + unpack"
GPU_TYPES = "GPU-aware mpi4py types"
GPU_AWARE = "pack + GPU-aware mpi4py + unpack"
REFERENCE = "contiguous bytes"

MOST_BLOCKS = 1 << 14
"""MPI libraries that copy device memory block by block take seconds for more."""

_TAG = 4
_ALL_MEMORY = 1 << 40
"""Extent beyond any slab: mpi4py derives counts from the lengths of buffers."""

Call = Callable[[], Any]


def address_of(array: Any) -> int:
    """Return the address of an array of NumPy or CuPy."""
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return int(pointer)


class Trip(Baseline):
    """One rank's part in both directions."""

    def __call__(self) -> None:
        self.go(0)
        self.go(1)

    @abstractmethod
    def go(self, direction: int) -> None:
        """Move the messages of a direction: 0 there, 1 back."""


class MpiTypes(Trip):
    """Send and Recv with the derived types, or Alltoallw; on device memory where the MPI takes it."""

    def __init__(self, comm: Any, case: TripCase, slab: Any) -> None:
        buffer = load_mpi().buffer.fromaddress(address_of(slab), case.slab_bytes)
        self._types: list[Any] = []
        self._calls = [self._call(comm, buffer, one) for one in case.directions(comm.rank)]

    def _call(self, comm: Any, buffer: Any, direction: Direction) -> Call:
        sends, receives = (
            {peer: one.to_mpi() for peer, one in messages.items()}
            for messages in (direction.sends, direction.receives)
        )
        self._types += [*sends.values(), *receives.values()]
        if sends and receives:
            ones, starts = [1] * comm.size, [0] * comm.size
            both = [[buffer, ones, starts, [*types.values()]] for types in (sends, receives)]
            return lambda: comm.Alltoallw(*both)
        ((peer, made),) = (sends or receives).items()
        move, message = (comm.Send if sends else comm.Recv), [buffer, 1, made]
        return lambda: move(message, peer, _TAG)

    def go(self, direction: int) -> None:
        self._calls[direction]()

    def close(self) -> None:
        for made in self._types:
            made.Free()


class Packed(Trip):
    """Packs, communicates packed bytes, unpacks.

    Parameters
    ----------
    out, into : array
        Packed bytes to send, and received ones.

    Notes
    -----
    A subclass prepares in ``packs`` and ``unpacks`` one call a direction, None where there is nothing to do.
    """

    packs: list[Call | None]
    unpacks: list[Call | None]

    def __init__(self, comm: Any, case: TripCase, out: Any, into: Any) -> None:
        self._comm, self._case = comm, case
        self._directions = case.directions(comm.rank)
        self._moves = [self._move(direction, out, into) for direction in self._directions]

    def _move(self, direction: Direction, out: Any, into: Any) -> Call:
        comm = self._comm
        if direction.sends and direction.receives:
            return lambda: comm.Alltoall(out, into)
        if direction.sends:
            return lambda: comm.Send(out, *direction.sends, _TAG)
        return lambda: comm.Recv(into, *direction.receives, _TAG)

    def go(self, direction: int) -> None:
        pack, unpack = self.packs[direction], self.unpacks[direction]
        if pack is not None:
            pack()
        self._moves[direction]()
        if unpack is not None:
            unpack()

    def _each(self, make: Callable[[ByHand, bool], Call | None]) -> None:
        """Make the calls that pack and unpack, given a layout and whether to unpack."""
        self.packs, self.unpacks = (
            [None if layout is None else make(layout, unpack) for layout in layouts]
            for layouts, unpack in (
                ([one.packed for one in self._directions], False),
                ([one.unpacked for one in self._directions], True),
            )
        )

    def phases(self) -> dict[str, Call]:
        """Return DDTBench's phases: packing of one direction, both directions of packed bytes, unpacking of one."""

        def communicate() -> None:
            for move in self._moves:
                move()

        found: dict[str, Call] = {"communicate": communicate}
        pack, unpack = (next(filter(None, calls), None) for calls in (self.packs, self.unpacks))
        if pack is not None and unpack is not None:
            found |= {"pack": pack, "unpack": unpack}
        return found


def host_buffers(case: TripCase) -> tuple[Bytes, Bytes]:
    """Return memory for packed bytes to send, and for received ones."""
    return np.empty(case.nbytes, np.uint8), np.empty(case.nbytes, np.uint8)


def is_in_place(case: TripCase, rank: int) -> bool:
    """Whether a rank has nothing to pack: its layouts are one run at the beginning of the slab."""
    layouts = [
        layout for one in case.directions(rank) for layout in (one.packed, one.unpacked) if layout
    ]
    return all(layout == Boxes((Box(case.nbytes),)) for layout in layouts)


class ByHandPacked(Packed):
    """NumPy slicing, or fancy indexing by lists."""

    def __init__(self, comm: Any, case: TripCase, slab: Any) -> None:
        in_place = is_in_place(case, comm.rank)
        own = slab[: case.nbytes]
        out, into = (own, own) if in_place else host_buffers(case)
        super().__init__(comm, case, out, into)
        arrays = case.of_slab(slab)

        def make(layout: ByHand, unpack: bool) -> Call | None:
            if in_place:
                return None
            if unpack:
                return lambda: layout.unpack(arrays, into)
            return lambda: layout.pack(arrays, out)

        self._each(make)


class _Typed(Packed):
    """Packs the datatypes one after another."""

    def __init__(self, comm: Any, case: TripCase, slab: Any, out: Any, into: Any) -> None:
        super().__init__(comm, case, out, into)
        self._slab = slab
        self.packs = [self._calls(one.sends, out, unpack=False) for one in self._directions]
        self.unpacks = [self._calls(one.receives, into, unpack=True) for one in self._directions]

    def _calls(self, messages: dict[int, Any], packed: Any, *, unpack: bool) -> Call | None:
        calls, at = [], 0
        for datatype in messages.values():
            calls.append(self._call(datatype, packed[at : at + datatype.size], unpack=unpack))
            at += datatype.size
        if len(calls) < 2:
            return calls[0] if calls else None

        def every() -> None:
            for call in calls:
                call()

        return every

    @abstractmethod
    def _call(self, datatype: Any, part: Any, *, unpack: bool) -> Call:
        """Return the call that packs a datatype of the slab into some bytes, or unpacks them."""


class MpiPacked(_Typed):
    """MPI_Pack and MPI_Unpack, prepared as far as mpi4py allows."""

    def __init__(self, comm: Any, case: TripCase, slab: Any, buffers: Any = None) -> None:
        mpi = load_mpi()
        self._self, self._made = mpi.COMM_SELF, list[Any]()
        self._origin = mpi.buffer.fromaddress(address_of(slab), _ALL_MEMORY)
        super().__init__(comm, case, slab, *(buffers or host_buffers(case)))

    def _call(self, datatype: Any, part: Any, *, unpack: bool) -> Call:
        made = halox.datatypes.resized(datatype, 0, _ALL_MEMORY).to_mpi()
        self._made.append(made)
        origin, packed, comm = self._origin, load_mpi().buffer(part), self._self
        if unpack:
            return lambda: made.Unpack(packed, 0, origin, comm)
        return lambda: made.Pack(origin, packed, 0, comm)

    def close(self) -> None:
        for made in self._made:
            made.Free()


class HaloxPacked(_Typed):
    """halox's packers: on the host prepared as in a plan, on a GPU `halox.pack` into page-locked memory."""

    def __init__(
        self, comm: Any, case: TripCase, slab: Any, device: int | None, buffers: Any = None
    ) -> None:
        self._device = device
        if device is None:
            buffers = buffers or host_buffers(case)
        else:
            made = [packed_buffer(case.nbytes, host=True) for _ in range(2)]
            buffers, self._keep = [one[0] for one in made], made
        super().__init__(comm, case, slab, *buffers)

    def _call(self, datatype: Any, part: Any, *, unpack: bool) -> Call:
        slab = self._slab
        if self._device is None:
            packer = HostPacker(slab, datatype)
            return packer.unpacking(part) if unpack else packer.packing(part)
        if unpack:
            return lambda: halox.unpack(part, datatype, slab)

        def pack() -> None:
            halox.pack(slab, datatype, 1, part)
            cupy().cuda.get_current_stream().synchronize()

        return pack


class Kernels(Packed):
    """One kernel packs, one unpacks; page-locked host memory, or device memory that is given to MPI."""

    waits = True
    """Whether the stream is waited for before a message is sent."""

    def __init__(self, comm: Any, case: TripCase, slab: Any, device: int, *, host: bool) -> None:
        in_place = not host and is_in_place(case, comm.rank)
        made = [packed_buffer(case.nbytes, host=host) for _ in range(0 if in_place else 2)]
        if in_place:
            made = [(slab[: case.nbytes], address_of(slab), slab)] * 2
        buffers, self._pointers, self._keep = zip(*made, strict=True)
        self._current = cupy().cuda.get_current_stream
        super().__init__(comm, case, *buffers)
        address, pointers, current, waits = (
            address_of(slab),
            self._pointers,
            self._current,
            self.waits,
        )

        def make(layout: ByHand, unpack: bool) -> Call | None:
            if in_place:
                return (lambda: current().synchronize()) if waits and not unpack else None
            move = prepare(layout, case.offsets, "unpack" if unpack else "pack", device)
            if unpack:
                return lambda: move(address, pointers[1], current().ptr)

            def pack() -> None:
                stream = current()
                move(address, pointers[0], stream.ptr)
                if waits:
                    stream.synchronize()

            return pack

        self._each(make)


class KernelsAndNccl(Kernels):
    """Everything on the stream; messages between two ranks only."""

    capturable = True
    waits = False

    def __init__(self, nccl: Nccl, comm: Any, case: TripCase, slab: Any, device: int) -> None:
        self._nccl, self._byte = nccl.comm, nccl.nccl.NCCL_UINT8
        super().__init__(comm, case, slab, device, host=False)

    def _move(self, direction: Direction, out: Any, into: Any) -> Call:
        if direction.sends and direction.receives:
            raise PathError("NCCL by hand is measured for one message at a time")
        nccl, nbytes, byte, current = self._nccl, self._case.nbytes, self._byte, self._current
        pointers = self._pointers
        if direction.sends:
            (peer,) = direction.sends
            return lambda: nccl.send(pointers[0], nbytes, byte, peer, current().ptr)
        (peer,) = direction.receives
        return lambda: nccl.recv(pointers[1], nbytes, byte, peer, current().ptr)


class Reference(Packed):
    """Contiguous bytes of host memory, without any layout."""

    def __init__(self, comm: Any, case: TripCase) -> None:
        self._buffers = host_buffers(case)
        super().__init__(comm, case, *self._buffers)
        self.packs, self.unpacks = [None, None], [None, None]

    def wrong(self) -> int:
        """Send both ways, and count the bytes that did not arrive."""
        out, into = self._buffers
        out[:], into[:] = 1, 0
        self()
        return int(np.count_nonzero(into != 1))
