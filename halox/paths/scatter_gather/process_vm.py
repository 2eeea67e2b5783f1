"""The ``process_vm`` engine: Linux copies between the memory of two processes of a node, block list to block list.

A key is a list of addresses. The engine can access any memory of a rank, so that no memory is registered, and keys of
other arrays of a layout follow from known keys.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from halox.paths.scatter_gather import PROCESS_VM
from halox.paths.scatter_gather.engine import Direction, Engine, Key, Limits, RemoteKey, Transfer
from halox.paths.scatter_gather.windows import Int64Array
from halox.runtime.cross_memory import MOST_BLOCKS, MOST_BYTES, Iovec, MemoryCopy

WINDOWS, WINDOW_BYTES = 2, 8 << 10
"""Smallest number of windows of a message, to be divided between its ends, and smallest window, in bytes.

A window is a call of about 1 us; copying 8 KiB takes at least as long.
"""


class ProcessVm(Engine):
    """Mover of windows between processes of a node; ``pids`` has the process IDs of the ranks of the node."""

    name = PROCESS_VM
    limits = Limits(
        entries=MOST_BLOCKS,
        key_bytes=MOST_BYTES,
        pool=0,
        windows=WINDOWS,
        window_bytes=WINDOW_BYTES,
    )
    needs_registration = False

    def __init__(self, rank: int, pids: Mapping[int, int]) -> None:
        self._rank, self._pids = rank, pids

    def export(self, key: Key) -> RemoteKey:
        """Return the addresses and lengths of the key's blocks, each with the number of its array."""
        window = key.window
        assert window is not None
        blocks = window.addresses, window.lengths, window.array_of
        return RemoteKey(nbytes=window.nbytes, blocks=blocks)

    def moved(self, remote: RemoteKey, shifts: Sequence[int]) -> RemoteKey:
        """Return a peer's key for arrays that are shifted by some bytes."""
        addresses, lengths, array_of = remote.blocks
        moved = addresses + np.array(shifts, np.int64)[array_of]
        return replace(remote, blocks=(moved, lengths, array_of))

    def transfer(self, direction: Direction, key: Key, remote: RemoteKey, peer: int) -> Transfer:
        """Prepare the kernel's system call, which completes the window's transfer."""
        window = key.window
        assert window is not None and window.nbytes == remote.nbytes
        kind: Literal["read", "write"] = "write" if direction == "put" else "read"
        theirs = iovec(*remote.blocks[:2])
        own = iovec(window.addresses, window.lengths)
        return partial(self._move, MemoryCopy(kind, self._pids[peer], own, theirs), peer)

    def _move(self, call: MemoryCopy, peer: int) -> None:
        try:
            call()
        except OSError as error:
            raise _failure(error, self._rank, peer) from error


def iovec(addresses: Int64Array, lengths: Int64Array) -> Iovec:
    """Return blocks as an array of the kernel's ``struct iovec``."""
    return np.stack([addresses, lengths], axis=1).astype(np.uint64)


def _failure(error: OSError, rank: int, peer: int) -> HaloxError:
    if error.errno == errno.ESRCH:
        return ExchangeTimeoutError(
            f"exchange: rank {rank} cannot reach the memory of rank {peer}, whose process has ended"
        )
    freed = "; an array of the plan was freed" if error.errno == errno.EFAULT else ""
    return PathError(
        f"rank {rank} cannot reach the memory of rank {peer} any more: {error.strerror}{freed}"
    )
