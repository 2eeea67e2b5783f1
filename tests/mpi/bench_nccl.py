"""NCCL on host memory, by MPI: for the hand-written baselines of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.unit import bench_gpu

OPS = {"SUM": MPI.SUM, "PROD": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
DTYPES = {
    f"{name}{bits}": f"{kind}{bits // 8}"
    for name, kind in {"INT": "i", "UINT": "u", "FLOAT": "f"}.items()
    for bits in (8, 32, 64)
}


class Nccl:
    """Sends and receives, posted when their group ends, or at once outside of a group; allreduces."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._mpi, self._is_open = comm, False
        self._group: list[Callable[[], MPI.Request]] = []
        self.nccl = self.comm = self
        for name in (*DTYPES, *OPS):
            setattr(self, f"NCCL_{name}", name)

    def groupStart(self) -> None:
        self._is_open = True

    def groupEnd(self) -> None:
        self._is_open = False
        MPI.Request.Waitall([post() for post in self._group])
        self._group = []

    def send(self, address: int, n: int, kind: str, peer: int, stream: int) -> None:
        self._post(self._mpi.Isend, address, n, peer)

    def recv(self, address: int, n: int, kind: str, peer: int, stream: int) -> None:
        self._post(self._mpi.Irecv, address, n, peer)

    def _post(self, post: Any, address: int, n: int, peer: int) -> None:
        self._group.append(lambda: post(bench_gpu.memory_at(address, n), peer, 5))
        if not self._is_open:
            self.groupEnd()

    def allReduce(
        self, source: int, target: int, count: int, kind: str, op: str, stream: int
    ) -> None:
        assert stream
        dtype = np.dtype(DTYPES[kind])
        arrays = [
            bench_gpu.memory_at(address, count * dtype.itemsize).view(dtype)
            for address in (source, target)
        ]
        self._mpi.Allreduce(*arrays, OPS[op])
