"""Copies between processes of one machine by ``process_vm_readv`` and ``process_vm_writev`` (cross-memory attach).

The kernel decides whether it permits a copy by properties of both processes: their users, Yama's ``ptrace_scope``,
container filters, and their PID namespaces. So `survey` tries a copy between every two ranks of a node, and a single
refusal makes all ranks of the node do without.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.runtime.world import World

Iovec = npt.NDArray[np.uint64]
"""Blocks of memory as C's ``struct iovec``, shape (n, 2): address and size in bytes of each block."""

MOST_BLOCKS = 1024
"""Largest number of blocks per call, on either side: IOV_MAX of Linux."""

_SURVEYING = "the survey of cross-memory attach"
_TOKEN_BYTES = 16
_REMEDY = "the ranks need one user and PID namespace, kernel.yama.ptrace_scope=0, in containers --cap-add=SYS_PTRACE"


class MemoryCopy:
    """Prepared copy between blocks of this process and blocks of another process, of the same total size.

    "read" copies ``theirs`` to ``own``, "write" copies ``own`` to ``theirs``. Raises `OSError` if the system does not
    have these calls.
    """

    def __init__(self, kind: Literal["read", "write"], pid: int, own: Iovec, theirs: Iovec) -> None:
        read, write = _functions()
        self._function = read if kind == "read" else write
        self._pid, self._own, self._theirs = pid, own, theirs
        self._arguments = pid, own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0
        self.nbytes = int(own[:, 1].sum())

    def __call__(self) -> None:
        """Copy the blocks; raise `OSError` with the kernel's reason if it refuses."""
        moved = self._function(*self._arguments)
        if moved != self.nbytes:
            self._copy_rest(moved)

    def _copy_rest(self, moved: int) -> None:
        """Copy the bytes after the first ``moved`` bytes; -1 means that the first call has failed.

        The kernel copies at most 2 GiB per call. It stops at the first inaccessible block, and returns the number of
        bytes before that block without an error code.
        """
        while moved < self.nbytes:
            done = max(moved, 0)
            own, theirs = _without(self._own, done), _without(self._theirs, done)
            more = -1
            if moved >= 0:
                more = self._function(
                    *(self._pid, own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)
                )
            if more <= 0:
                code = ctypes.get_errno() if more < 0 else errno.EFAULT
                raise OSError(code, os.strerror(code))
            moved += more


def _without(blocks: Iovec, nbytes: int) -> Iovec:
    ends = np.cumsum(blocks[:, 1].astype(np.int64))
    first = int(np.searchsorted(ends, nbytes, "right"))
    rest = blocks[first:].copy()
    cut = nbytes - (int(ends[first - 1]) if first else 0)
    rest[0] += np.array([cut, 0], np.uint64)
    rest[0, 1] -= np.uint64(cut)
    return rest


@cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        functions = library.process_vm_readv, library.process_vm_writev
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv") from error
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    for function in functions:
        function.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        function.restype = ctypes.c_ssize_t
    return functions


class _Probe(NamedTuple):
    """PID of a rank, and the address of its test memory: a token, then one byte per rank of the node."""

    pid: int
    address: int
    token: bytes


class Attachments(NamedTuple):
    """PIDs of the ranks of this node, and why the node's ranks cannot use these calls: the first refusal, if any."""

    pids: Mapping[int, int]
    refused: str | None


def survey(world: World) -> Attachments:
    """Try to read and write memory of all other ranks of the node; collective over the ranks of the node.

    A rank writes to another process only after it has read that rank's token there.
    """
    ranks, place = [*world.node_ranks], world.node_rank
    memory = np.zeros(_TOKEN_BYTES + len(ranks), np.uint8)
    token = os.urandom(_TOKEN_BYTES)
    memory[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    mine = _Probe(os.getpid(), memory.ctypes.data, token)
    probes: list[_Probe] = world.ranks.gather(mine, _SURVEYING, of_node=True)
    whys = (
        _why_refused(world.rank, place, rank, probe)
        for rank, probe in zip(ranks, probes, strict=True)
        if rank != world.rank
    )
    why = next((why for why in whys if why is not None), None)
    _, differing = world.ranks.reduce(why, _SURVEYING, of_node=True)
    refused = next((why for why in differing or [why] if why is not None), None)
    return Attachments(
        {rank: probe.pid for rank, probe in zip(ranks, probes, strict=True)}, refused
    )


def _why_refused(own: int, place: int, rank: int, probe: _Probe) -> str | None:
    """Return why this rank cannot read and write another rank's memory, None if it can."""
    token, mark = np.zeros(_TOKEN_BYTES, np.uint8), np.ones(1, np.uint8)
    their_token = np.array([[probe.address, _TOKEN_BYTES]], np.uint64)
    their_mark = np.array([[probe.address + _TOKEN_BYTES + place, 1]], np.uint64)
    try:
        MemoryCopy("read", probe.pid, iovec_of(token), their_token)()
        if token.tobytes() != probe.token:
            raise OSError(errno.ESRCH, "the process is another one")
        MemoryCopy("write", probe.pid, iovec_of(mark), their_mark)()
    except OSError as error:
        return f"rank {own} cannot reach the memory of rank {rank} (process {probe.pid}): {error.strerror}; {_REMEDY}"
    return None


def iovec_of(array: npt.NDArray[np.uint8]) -> Iovec:
    """Return the memory of a contiguous array as a list of one block."""
    return np.array([[array.ctypes.data, array.nbytes]], np.uint64)
