"""Ping-pongs as users write them: MPI types, packing by hand, NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from halox.cli.bench.layouts import Box, Boxes, Bytes, Triangle
from halox.cli.bench.pingpong_cases import PingPong
from halox.runtime.world import load_mpi

MPI_TYPES = "mpi4py types"
BY_HAND = "pack by hand + mpi4py"
ZERO_COPY = "zero-copy + mpi4py"
NCCL = "pack + NCCL + unpack"
GPU_TYPES = "GPU-aware mpi4py types"
GPU_AWARE = "pack + GPU-aware mpi4py + unpack"

MOST_BLOCKS = 1 << 14
"""MPI libraries that copy device memory block by block take seconds for more."""

_TAG = 3


class Party(ABC):
    """One player's part in a ping-pong that is written by hand.

    Attributes
    ----------
    capturable : bool
        Whether it may be tried to capture it in a CUDA graph.
    """

    capturable = False

    def __init__(self, comm: Any) -> None:
        self._comm, self._other = comm, 1 - comm.rank

    def there(self) -> None:
        """Move the message from player 0 to player 1."""
        self._move(sends=self._comm.rank == 0)

    def back(self) -> None:
        """Move it from player 1 to player 0."""
        self._move(sends=self._comm.rank == 1)

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what it holds."""

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
        """Free the type."""
        self._type.Free()


class ByHand(Party):
    """NumPy slicing into a buffer, Send, Recv, NumPy slicing out of it."""

    def __init__(self, comm: Any, case: PingPong, array: Any) -> None:
        super().__init__(comm)
        self._layout = case.sides[comm.rank].by_hand
        self._memory: Bytes = array.view(np.uint8)
        self._in_place = is_contiguous(self._layout)
        self._packed = self._memory if self._in_place else np.empty(case.nbytes, np.uint8)

    def _send(self) -> None:
        if not self._in_place:
            self._layout.pack([self._memory], self._packed)
        self._comm.Send(self._packed, self._other, _TAG)

    def _receive(self) -> None:
        self._comm.Recv(self._packed, self._other, _TAG)
        if not self._in_place:
            unpack(self._layout, self._packed, self._memory)


def is_contiguous(layout: Any) -> bool:
    """Whether there is nothing to pack: one box that is one run at the array's start."""
    return isinstance(layout, Boxes) and layout.boxes == (Box(layout.boxes[0].block_bytes),)


def unpack(layout: Any, packed: Bytes, memory: Bytes) -> None:
    """Copy packed bytes into their places by slicing; boxes and triangles."""
    if isinstance(layout, Boxes):
        for at, box in layout.placed():
            view = box.view(memory)
            np.copyto(view, packed[at : at + box.nbytes].view(view.dtype).reshape(view.shape))
        return
    if not isinstance(layout, Triangle):
        raise TypeError(f"no unpacking for {type(layout).__name__}")
    columns, values, at = memory.view("f8").reshape(layout.n, layout.n), packed.view("f8"), 0
    for j in range(layout.n):
        part = columns[j, j:] if layout.lower else columns[j, : j + 1]
        part[:] = values[at : at + part.size]
        at += part.size


class _Kernels(Party):
    """One kernel packs into a buffer, one unpacks out of another."""

    def __init__(self, comm: Any, case: PingPong, array: Any, device: int, *, host: bool) -> None:
        from halox.cli.bench.byhand import prepare
        from halox.runtime.gpu.cuda import cupy
        from halox.runtime.gpu.memory import pinned

        super().__init__(comm)
        cp = cupy()
        layout = case.sides[comm.rank].by_hand
        self._pack, self._unpack = (
            prepare(layout, (0,), direction, device) for direction in ("pack", "unpack")
        )
        self._array = int(array.data.ptr)
        self._keep: list[Any]
        if is_contiguous(layout) and not host:
            self._pack = self._unpack = _nothing
            self._keep = self._buffers = [array, array]
            self._pointers = [self._array] * 2
        elif host:
            self._keep = [pinned(case.nbytes) for _ in range(2)]
            self._buffers = [page.array for page in self._keep]
            self._pointers = [page.device_pointer for page in self._keep]
        else:
            self._keep = self._buffers = [cp.empty(case.nbytes, np.uint8) for _ in range(2)]
            self._pointers = [int(buffer.data.ptr) for buffer in self._buffers]
        self._nbytes = case.nbytes
        self._current_stream = cp.cuda.get_current_stream


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

    def __init__(self, wire: Any, comm: Any, case: PingPong, array: Any, device: int) -> None:
        super().__init__(comm, case, array, device, host=False)
        self._wire, self._byte = wire.comm, wire.nccl.NCCL_UINT8

    def _send(self) -> None:
        stream = self._current_stream().ptr
        self._pack(self._array, self._pointers[0], stream)
        self._wire.send(self._pointers[0], self._nbytes, self._byte, self._other, stream)

    def _receive(self) -> None:
        stream = self._current_stream().ptr
        self._wire.recv(self._pointers[1], self._nbytes, self._byte, self._other, stream)
        self._unpack(self._array, self._pointers[1], stream)
