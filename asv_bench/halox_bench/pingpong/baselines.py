"""Ping-pongs as users write them: MPI types, packing by hand, NCCL."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from halox.runtime.gpu.cuda import cupy
from halox.runtime.world import load_mpi
from halox_bench.common.byhand import Move, packed_buffer, prepare
from halox_bench.common.layouts import Box, Boxes, Bytes
from halox_bench.pingpong.cases import PingPong
from halox_bench.ranks.methods import Baseline
from halox_bench.ranks.nccl import Nccl

MPI_TYPES = "mpi4py types"
BY_HAND = "pack by hand + mpi4py"
ZERO_COPY = "zero-copy + mpi4py"
NCCL = "pack + NCCL + unpack"
GPU_TYPES = "GPU-aware mpi4py types"
GPU_AWARE = "pack + GPU-aware mpi4py + unpack"

MOST_BLOCKS = 1 << 14
"""MPI libraries that copy device memory block by block take seconds for more."""

_TAG = 3


class Trip(Baseline):
    """One player's part in a ping-pong."""

    def __call__(self) -> None:
        self.there()
        self.back()

    @abstractmethod
    def there(self) -> None:
        """Move the message from player 0 to player 1."""

    @abstractmethod
    def back(self) -> None:
        """Move it from player 1 to player 0."""


class Party(Trip):
    """One player's part, written by hand: what it does to send, and to receive."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._other = comm, 1 - comm.rank

    def there(self) -> None:
        self._move(sends=self._comm.rank == 0)

    def back(self) -> None:
        self._move(sends=self._comm.rank == 1)

    def _move(self, *, sends: bool) -> None:
        if sends:
            self._send()
        else:
            self._receive()

    @abstractmethod
    def _send(self) -> None: ...

    @abstractmethod
    def _receive(self) -> None: ...


class MpiTypes(Party):
    """Send and Recv with the derived types; on device memory where the MPI takes it."""

    def __init__(self, comm: Any, case: PingPong, array: Any) -> None:
        super().__init__(comm)
        side = case.sides[comm.rank]
        self._type = side.datatype.to_mpi()
        pointer = array.ctypes.data if isinstance(array, np.ndarray) else int(array.data.ptr)
        buffer = load_mpi().buffer.fromaddress(pointer, array.nbytes)
        self._message = [buffer, side.count, self._type]

    def _send(self) -> None:
        self._comm.Send(self._message, self._other, _TAG)

    def _receive(self) -> None:
        self._comm.Recv(self._message, self._other, _TAG)

    def close(self) -> None:
        self._type.Free()


class ByHand(Party):
    """NumPy slicing into a buffer, Send, Recv, NumPy slicing out of it."""

    def __init__(self, comm: Any, case: PingPong, array: Any) -> None:
        super().__init__(comm)
        self._layout = case.sides[comm.rank].by_hand
        self._memory: Bytes = array.view(np.uint8)
        self._in_place = is_contiguous(self._layout)
        own = self._memory[: case.nbytes]
        self._packed = own if self._in_place else np.empty(case.nbytes, np.uint8)

    def _send(self) -> None:
        if not self._in_place:
            self._layout.pack([self._memory], self._packed)
        self._comm.Send(self._packed, self._other, _TAG)

    def _receive(self) -> None:
        self._comm.Recv(self._packed, self._other, _TAG)
        if not self._in_place:
            self._layout.unpack([self._memory], self._packed)


def is_contiguous(layout: Any) -> bool:
    """Whether there is nothing to pack: one box that is one run at the array's start."""
    return isinstance(layout, Boxes) and layout.boxes == (Box(layout.boxes[0].block_bytes),)


class _Kernels(Party):
    """One kernel packs into a buffer, one unpacks out of another."""

    def __init__(self, comm: Any, case: PingPong, array: Any, device: int, *, host: bool) -> None:
        super().__init__(comm)
        layout = case.sides[comm.rank].by_hand
        self._array, self._nbytes = int(array.data.ptr), case.nbytes
        if is_contiguous(layout) and not host:
            self._pack: Move = _nothing
            self._unpack: Move = _nothing
            made = [(array.view(np.uint8)[: case.nbytes], self._array, array)] * 2
        else:
            self._pack, self._unpack = (
                prepare(layout, (0,), direction, device) for direction in ("pack", "unpack")
            )
            made = [packed_buffer(case.nbytes, host=host) for _ in range(2)]
        self._buffers, self._pointers, self._keep = zip(*made, strict=True)
        self._current_stream = cupy().cuda.get_current_stream


def _nothing(array: int, packed: int, stream: int) -> None:
    """Stand in for packing where the array is sent as it is."""


class KernelsAndMpi(_Kernels):
    """The buffers are page-locked host memory, which the kernels reach by themselves, or device memory."""

    def _send(self) -> None:
        stream = self._current_stream()
        self._pack(self._array, self._pointers[0], stream.ptr)
        stream.synchronize()
        self._comm.Send(self._buffers[0], self._other, _TAG)

    def _receive(self) -> None:
        # The last message has left the buffer: the stream was waited for when the answer was sent.
        self._comm.Recv(self._buffers[1], self._other, _TAG)
        self._unpack(self._array, self._pointers[1], self._current_stream().ptr)


class KernelsAndNccl(_Kernels):
    """Everything on the stream."""

    capturable = True

    def __init__(self, nccl: Nccl, comm: Any, case: PingPong, array: Any, device: int) -> None:
        super().__init__(comm, case, array, device, host=False)
        self._nccl, self._byte = nccl.comm, nccl.nccl.NCCL_UINT8

    def _send(self) -> None:
        stream = self._current_stream().ptr
        self._pack(self._array, self._pointers[0], stream)
        self._nccl.send(self._pointers[0], self._nbytes, self._byte, self._other, stream)

    def _receive(self) -> None:
        stream = self._current_stream().ptr
        self._nccl.recv(self._pointers[1], self._nbytes, self._byte, self._other, stream)
        self._unpack(self._array, self._pointers[1], stream)
