"""NCCL through CuPy, between the ranks of a communicator."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from halox.errors import PathError
from halox_bench.kernels import cupy


class Nccl:
    def __init__(self, comm: Any) -> None:
        self.nccl: Any = import_module("cupy.cuda.nccl")
        unique = comm.bcast(self.nccl.get_unique_id() if comm.rank == 0 else None)
        self.comm: Any = self.nccl.NcclCommunicator(comm.size, unique, comm.rank)
        # Kept until the process ends: destroying or aborting waits for every graph that holds a send or receive.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.comm))

    def exchange(
        self,
        sends: Sequence[tuple[int, int, int]],
        receives: Sequence[tuple[int, int, int]],
        stream: int,
    ) -> None:
        """Enqueue messages of bytes in one group, each given by its peer, address and length."""
        if not sends and not receives:
            return
        byte = self.nccl.NCCL_UINT8
        self.nccl.groupStart()
        for peer, address, nbytes in sends:
            self.comm.send(address, nbytes, byte, peer, stream)
        for peer, address, nbytes in receives:
            self.comm.recv(address, nbytes, byte, peer, stream)
        self.nccl.groupEnd()


_made: dict[tuple[int, ...], Nccl] = {}


def nccl_between(comm: Any, *, shared_gpu: bool) -> Nccl:
    """Return NCCL between the current GPUs of the ranks of a communicator, made once; collective.

    Raises
    ------
    PathError
        On all ranks, if NCCL is missing or two ranks share a GPU.
    """
    from mpi4py import MPI

    why = "NCCL refuses ranks that share a GPU" if shared_gpu else max(comm.allgather(_why_not()))
    if why:
        raise PathError(why)
    ranks = comm.group.Translate_ranks(list(range(comm.size)), MPI.COMM_WORLD.group)
    key = (*ranks, cupy().cuda.Device().id)
    if key not in _made:
        _made[key] = Nccl(comm)
    return _made[key]


def _why_not() -> str:
    """Return why CuPy's NCCL cannot be used in this process, or an empty text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nccl: Any = import_module("cupy.cuda.nccl")
    except Exception as error:
        return f"CuPy has no NCCL here ({error})"
    return "" if getattr(nccl, "available", True) else "CuPy finds no NCCL library"
