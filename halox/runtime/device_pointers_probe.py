"""Test process that passes device pointers to MPI: ``python -m halox.runtime.device_pointers_probe DEVICE``.

`halox.runtime.device_pointers` starts this process. An MPI library without GPU support reads a device pointer on the
host, and crashes or corrupts memory. So the process sends messages to itself between two device buffers, and compares
the bytes. If all are equal, it prints `YES` and exits with status 0. Any other outcome means that the test has failed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halox.runtime.world import load_mpi

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from halox.runtime.array_types import CupyMemory

YES = "halox: this MPI takes device pointers"

SIZES = (8, 4096, 1 << 16, 4 << 20)
"""Sizes of the messages in bytes: MPI libraries use different protocols for short, medium and long messages."""


class DeviceMemory:
    """Memory of one GPU from cudaMalloc: some MPI libraries cannot export memory of a pool."""

    def __init__(self, device: int) -> None:
        from halox.runtime.gpu.cuda import cupy

        self._cupy = cupy()
        self._cupy.cuda.Device(device).use()

    def allocate(self, nbytes: int) -> CupyMemory:
        """Return memory with an attribute ``ptr``."""
        memory: CupyMemory = self._cupy.cuda.Memory(nbytes)
        return memory

    def write(self, pointer: int, content: npt.NDArray[np.uint8]) -> None:
        """Copy bytes from the host."""
        runtime = self._cupy.cuda.runtime
        runtime.memcpy(pointer, content.ctypes.data, content.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()

    def read(self, pointer: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Copy bytes to the host."""
        content = np.empty(nbytes, np.uint8)
        runtime = self._cupy.cuda.runtime
        runtime.deviceSynchronize()
        runtime.memcpy(content.ctypes.data, pointer, nbytes, runtime.memcpyDeviceToHost)
        return content


def why_wrong(
    comm: MPI.Comm, span: Callable[[int, int], memoryview], memory: DeviceMemory
) -> str | None:
    """Send messages of several sizes from this rank to itself; return a description of the first error, or None."""
    guard = 64
    for nbytes in SIZES:
        sent = (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
        source, target = memory.allocate(nbytes), memory.allocate(nbytes + guard)
        memory.write(int(source.ptr), sent)
        memory.write(int(target.ptr), ~np.resize(sent, nbytes + guard))
        comm.Sendrecv(span(int(source.ptr), nbytes), 0, 1, span(int(target.ptr), nbytes), 0, 1)
        received = memory.read(int(target.ptr), nbytes + guard)
        if not np.array_equal(received[:nbytes], sent):
            return f"a message of {nbytes} bytes arrived with other bytes"
        if not np.array_equal(received[nbytes:], ~np.resize(sent, nbytes + guard)[nbytes:]):
            return f"a message of {nbytes} bytes wrote more than that"
    return None


def main(arguments: list[str]) -> int:
    """Test the GPU with the number ``arguments[0]``; return the exit status."""
    mpi = load_mpi()
    wrong = why_wrong(mpi.COMM_SELF, mpi.memory.fromaddress, DeviceMemory(int(arguments[0])))
    print(YES if wrong is None else wrong, flush=True)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
