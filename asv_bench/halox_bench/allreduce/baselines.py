"""Allreduces by hand: MPI on NumPy arrays, staged through the host, GPU-aware MPI, NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.errors import PathError
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.memory import pinned
from halox.runtime.world import load_mpi
from halox_bench.allreduce.cases import AllreduceCase
from halox_bench.ranks.methods import Baseline
from halox_bench.ranks.nccl import Nccl

MPI = "MPI_Allreduce"
HOST_STAGED = "D2H + MPI_Allreduce + H2D"
GPU_AWARE = "GPU-aware MPI_Allreduce"
NCCL = "NCCL"

_OPS = {
    **{"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"},
    **{f"logical_{name}": f"L{name.upper()}" for name in ("and", "or", "xor")},
    **{f"bitwise_{name}": f"B{name.upper()}" for name in ("and", "or", "xor")},
}
_NCCL_TYPES = {
    **{"i1": "INT8", "u1": "UINT8", "i4": "INT32", "u4": "UINT32", "i8": "INT64", "u8": "UINT64"},
    **{"f4": "FLOAT32", "f8": "FLOAT64"},
}


def mpi_op(case: AllreduceCase) -> Any:
    """Return MPI's operation."""
    return getattr(load_mpi(), _OPS[case.op])


def numbers(case: AllreduceCase) -> np.dtype[Any]:
    """Return the elements' dtype for MPI and NCCL: neither reduces bools, which are bytes of 0 and 1."""
    dtype = np.dtype(case.dtype)
    return np.dtype("u1") if dtype.kind == "b" else dtype


class Reducing(Baseline):
    """A hand-written allreduce of an array into another."""

    def __init__(self, comm: Any, case: AllreduceCase, source: Any, target: Any) -> None:
        self._comm, self._target, self._op = comm, target, mpi_op(case)

    def value(self) -> Any:
        """Reduce a single value and return it on the host."""
        self()
        return self._target[0].item()


class HostMpi(Reducing):
    """``MPI_Allreduce`` of NumPy arrays."""

    name = MPI

    def __init__(self, comm: Any, case: AllreduceCase, source: Any, target: Any) -> None:
        super().__init__(comm, case, source, target)
        self._arrays = source.view(numbers(case)), target.view(numbers(case))

    def __call__(self) -> None:
        self._comm.Allreduce(*self._arrays, self._op)


class HostStaged(Reducing):
    """Copied into page-locked host memory, reduced there by MPI, and copied back."""

    name = HOST_STAGED

    def __init__(self, comm: Any, case: AllreduceCase, source: Any, target: Any) -> None:
        super().__init__(comm, case, source, target)
        cuda = cupy().cuda
        self._pages = [pinned(case.nbytes) for _ in range(2)]
        self._host = [page.array.view(numbers(case)) for page in self._pages]
        places = [page.array.ctypes.data for page in self._pages]
        self._down = places[0], int(source.data.ptr), case.nbytes, cuda.runtime.memcpyDeviceToHost
        self._up = int(target.data.ptr), places[1], case.nbytes, cuda.runtime.memcpyHostToDevice
        self._copy, self._current_stream = cuda.runtime.memcpyAsync, cuda.get_current_stream

    def __call__(self) -> None:
        self._copy(*self._up, self._reduced())

    def value(self) -> Any:
        """Reduce a single value and return it from the host, without the copy to the GPU."""
        self._reduced()
        return self._host[1][0].item()

    def _reduced(self) -> int:
        """Form the result on the host; return the stream's address."""
        stream = self._current_stream()
        self._copy(*self._down, stream.ptr)
        stream.synchronize()
        self._comm.Allreduce(*self._host, self._op)
        return int(stream.ptr)


class GpuAware(Reducing):
    """``MPI_Allreduce`` of device memory."""

    name = GPU_AWARE

    def __init__(self, comm: Any, case: AllreduceCase, source: Any, target: Any) -> None:
        super().__init__(comm, case, source, target)
        memory, kind = load_mpi().buffer.fromaddress, numbers(case).char
        self._messages = [
            [memory(int(array.data.ptr), case.nbytes), case.elements, kind]
            for array in (source, target)
        ]
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self) -> None:
        self._current_stream().synchronize()
        self._comm.Allreduce(*self._messages, self._op)


class ByNccl(Reducing):
    """``ncclAllReduce`` on the current stream.

    Raises
    ------
    PathError
        If NCCL lacks the operation or the dtype.
    """

    name = NCCL
    capturable = True

    def __init__(
        self, nccl: Nccl, comm: Any, case: AllreduceCase, source: Any, target: Any
    ) -> None:
        super().__init__(comm, case, source, target)
        dtype, count = numbers(case), case.elements
        if dtype.kind == "c" and case.op == "sum":
            # A sum of complex numbers is a sum of their parts.
            dtype, count = np.dtype(f"f{dtype.itemsize // 2}"), 2 * count
        kind = _NCCL_TYPES.get(f"{dtype.kind}{dtype.itemsize}")
        if kind is None or case.op not in ("sum", "prod", "min", "max"):
            raise PathError(f"NCCL has no {case.op} of {case.dtype}")
        op = getattr(nccl.nccl, f"NCCL_{case.op.upper()}")
        arrays = int(source.data.ptr), int(target.data.ptr)
        self._reduce = nccl.comm.allReduce
        self._arguments = *arrays, count, getattr(nccl.nccl, f"NCCL_{kind}"), op
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self) -> None:
        self._reduce(*self._arguments, self._current_stream().ptr)
