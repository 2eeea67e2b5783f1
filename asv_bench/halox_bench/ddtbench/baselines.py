"""DDTBench's methods: MPI's types, packing by hand, MPI_Pack, contiguous bytes; and halox's packing beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

import halox
from halox.packing.host import HostPacker
from halox.runtime.gpu.cuda import cupy
from halox.runtime.world import load_mpi
from halox_bench.common.byhand import packed_buffer, prepare
from halox_bench.common.layouts import ByHand, Bytes
from halox_bench.ddtbench.cases import DdtCase, Direction
from halox_bench.pingpong.baselines import Trip

MPI_PACK = "MPI_Pack + mpi4py"
HALOX_PACK = "halox.pack + mpi4py"
REFERENCE = "contiguous bytes"

_TAG = 4
_ALL_MEMORY = 1 << 40
"""Extent beyond any slab: mpi4py derives counts from the lengths of buffers."""

Call = Callable[[], Any]


def address_of(array: Any) -> int:
    """Return the address of an array of NumPy or CuPy."""
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return int(pointer)


class _BothWays(Trip):
    """Both directions of a case."""

    def there(self) -> None:
        self._go(0)

    def back(self) -> None:
        self._go(1)

    @abstractmethod
    def _go(self, direction: int) -> None: ...


class MpiTypes(_BothWays):
    """Send and Recv with the derived types, or Alltoallw; on device memory where the MPI takes it."""

    def __init__(self, comm: Any, case: DdtCase, array: Any) -> None:
        mpi = load_mpi()
        buffer = mpi.buffer.fromaddress(address_of(array), case.slab_bytes)
        self._types: list[Any] = []
        self._directions = [
            self._direction(comm, buffer, direction) for direction in case.directions(comm.rank)
        ]

    def _direction(self, comm: Any, buffer: Any, direction: Direction) -> Call:
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

    def _go(self, direction: int) -> None:
        self._directions[direction]()

    def close(self) -> None:
        for made in self._types:
            made.Free()


class Packed(_BothWays):
    """Packs, communicates packed bytes, unpacks.

    Parameters
    ----------
    buffers : sequence of array
        Packed bytes to send, and received ones.

    Notes
    -----
    A subclass prepares in ``packs`` and ``unpacks`` one call a direction, None where there is nothing to do.
    """

    packs: list[Call | None]
    unpacks: list[Call | None]

    def __init__(self, comm: Any, case: DdtCase, buffers: Any) -> None:
        self._comm, self._buffers = comm, buffers
        self._moves = [self._move(direction) for direction in case.directions(comm.rank)]

    def _move(self, direction: Direction) -> Call:
        comm, (out, into) = self._comm, self._buffers
        if direction.sends and direction.receives:
            return lambda: comm.Alltoall(out, into)
        if direction.sends:
            return lambda: comm.Send(out, *direction.sends, _TAG)
        return lambda: comm.Recv(into, *direction.receives, _TAG)

    def _go(self, direction: int) -> None:
        pack, unpack = self.packs[direction], self.unpacks[direction]
        if pack is not None:
            pack()
        self._moves[direction]()
        if unpack is not None:
            unpack()

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


def _each(
    case: DdtCase, rank: int, make: Callable[[ByHand, bool], Call]
) -> tuple[list[Call | None], list[Call | None]]:
    """Return the calls that pack and those that unpack each direction, made by layout and whether to unpack."""
    directions = case.directions(rank)
    packs = [
        None if direction.packed is None else make(direction.packed, False)
        for direction in directions
    ]
    unpacks = [
        None if direction.unpacked is None else make(direction.unpacked, True)
        for direction in directions
    ]
    return packs, unpacks


def host_buffers(case: DdtCase) -> tuple[Bytes, Bytes]:
    """Return memory for packed bytes to send, and for received ones."""
    return np.empty(case.nbytes, np.uint8), np.empty(case.nbytes, np.uint8)


class ByHandPacked(Packed):
    """NumPy slicing, or fancy indexing by lists."""

    def __init__(self, comm: Any, case: DdtCase, array: Any) -> None:
        out, into = host_buffers(case)
        super().__init__(comm, case, (out, into))
        arrays = case.of_slab(array)

        def make(layout: ByHand, unpack: bool) -> Call:
            if unpack:
                return lambda: layout.unpack(arrays, into)
            return lambda: layout.pack(arrays, out)

        self.packs, self.unpacks = _each(case, comm.rank, make)


class _Typed(Packed):
    """Packs the datatypes one after another."""

    def __init__(self, comm: Any, case: DdtCase, array: Any, buffers: Any) -> None:
        super().__init__(comm, case, buffers)
        self._array = array
        directions = case.directions(comm.rank)
        self.packs = [self._calls(direction.sends, unpack=False) for direction in directions]
        self.unpacks = [self._calls(direction.receives, unpack=True) for direction in directions]

    def _calls(self, messages: dict[int, Any], *, unpack: bool) -> Call | None:
        calls, at = [], 0
        for datatype in messages.values():
            part = self._buffers[unpack][at : at + datatype.size]
            calls.append(self._call(datatype, part, unpack=unpack))
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

    def __init__(self, comm: Any, case: DdtCase, array: Any, buffers: Any = None) -> None:
        mpi = load_mpi()
        self._self, self._made = mpi.COMM_SELF, list[Any]()
        self._origin = mpi.buffer.fromaddress(address_of(array), _ALL_MEMORY)
        super().__init__(comm, case, array, buffers or host_buffers(case))

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
        self, comm: Any, case: DdtCase, array: Any, device: int | None, buffers: Any = None
    ) -> None:
        self._device = device
        if device is None:
            buffers = buffers or host_buffers(case)
        else:
            made = [packed_buffer(case.nbytes, host=True) for _ in range(2)]
            buffers, self._keep = [one[0] for one in made], made
        super().__init__(comm, case, array, buffers)

    def _call(self, datatype: Any, part: Any, *, unpack: bool) -> Call:
        array = self._array
        if self._device is None:
            packer = HostPacker(array, datatype)
            return packer.unpacking(part) if unpack else packer.packing(part)
        if unpack:
            return lambda: halox.unpack(part, datatype, array)

        def pack() -> None:
            halox.pack(array, datatype, 1, part)
            cupy().cuda.get_current_stream().synchronize()

        return pack


class Kernels(Packed):
    """One kernel packs, one unpacks; page-locked host memory, or device memory that is given to MPI."""

    def __init__(self, comm: Any, case: DdtCase, array: Any, device: int, *, host: bool) -> None:
        made = [packed_buffer(case.nbytes, host=host) for _ in range(2)]
        buffers, pointers, self._keep = zip(*made, strict=True)
        super().__init__(comm, case, buffers)
        slab, current = address_of(array), cupy().cuda.get_current_stream

        def make(layout: ByHand, unpack: bool) -> Call:
            move = prepare(layout, case.offsets, "unpack" if unpack else "pack", device)
            if unpack:
                return lambda: move(slab, pointers[1], current().ptr)

            def pack() -> None:
                stream = current()
                move(slab, pointers[0], stream.ptr)
                stream.synchronize()

            return pack

        self.packs, self.unpacks = _each(case, comm.rank, make)


class Reference(Packed):
    """Contiguous bytes of host memory, without any layout."""

    def __init__(self, comm: Any, case: DdtCase) -> None:
        super().__init__(comm, case, host_buffers(case))
        self.packs, self.unpacks = [None, None], [None, None]

    def wrong(self) -> int:
        """Send both ways, and count the bytes that have not come."""
        out, into = self._buffers
        out[:], into[:] = 1, 0
        self()
        return int(np.count_nonzero(into != 1))
