"""NCCL through CuPy, between the ranks of a communicator."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from halox.errors import PathError
from halox.runtime.gpu.cuda import cupy
from halox.runtime.world import load_mpi


class Nccl:
    """A communicator of NCCL; made by :func:`nccl_between`."""

    def __init__(self, comm: Any) -> None:
        self.nccl: Any = import_module("cupy.cuda.nccl")
        unique = comm.bcast(self.nccl.get_unique_id() if comm.rank == 0 else None)
        self.comm: Any = self.nccl.NcclCommunicator(comm.size, unique, comm.rank)
        # Kept until the process ends: destroying or aborting waits for every graph that holds a send or receive, and
        # graphs may live as long.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.comm))


_made: dict[tuple[int, ...], Nccl] = {}


def nccl_between(comm: Any, *, shared_gpu: bool) -> Nccl:
    """Return NCCL between the GPUs that are current on the ranks of a communicator.

    Parameters
    ----------
    shared_gpu : bool
        Whether two of the ranks use one GPU; the same on all of them.

    Raises
    ------
    PathError
        On all ranks, if NCCL is missing or refuses these ranks.

    Notes
    -----
    Collective. Made once, and kept until the process ends.
    """
    whys = comm.allgather(why_no_nccl())
    why = "NCCL refuses ranks that share a GPU" if shared_gpu else max(whys)
    if why:
        raise PathError(why)
    world = load_mpi().COMM_WORLD.group
    ranks = comm.group.Translate_ranks(list(range(comm.size)), world)
    key = (*ranks, cupy().cuda.Device().id)
    if key not in _made:
        _made[key] = Nccl(comm)
    return _made[key]


def exchange(
    wire: Nccl,
    sends: Sequence[tuple[int, int, int]],
    receives: Sequence[tuple[int, int, int]],
    stream: int,
) -> None:
    """Enqueue messages of bytes in one group, each given by its peer, address and length."""
    if not sends and not receives:
        return
    nccl, comm, byte = wire.nccl, wire.comm, wire.nccl.NCCL_UINT8
    nccl.groupStart()
    for peer, address, nbytes in sends:
        comm.send(address, nbytes, byte, peer, stream)
    for peer, address, nbytes in receives:
        comm.recv(address, nbytes, byte, peer, stream)
    nccl.groupEnd()


def why_no_nccl() -> str:
    """Return why CuPy's NCCL cannot be used in this process, or an empty text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nccl: Any = import_module("cupy.cuda.nccl")
    except Exception as error:
        return f"CuPy has no NCCL here ({error})"
    return "" if getattr(nccl, "available", True) else "CuPy finds no NCCL library"
