"""Memory that the ranks of a node share, handed out in blocks and used again.

Blocks lie in MPI shared windows. Fields that a grid allocates and the staging memory of plans come from here.
Releasing a block is a local act, which may happen at another time on every rank; so allocation asks all ranks
of the node whether each has a block to use again, and only then makes a new window, together.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.world import World

Bytes = npt.NDArray[np.uint8]

_GRANULE = 4096
_WASTE = 1 << 16
_SHM = "/dev/shm"


@dataclass(frozen=True)
class Place:
    """Where a block lies, in terms that mean the same to every rank of the node."""

    window: int
    node_rank: int
    offset: int = 0


@dataclass(eq=False)
class Block:
    """A piece of shared memory of this rank; ``memory`` is its bytes."""

    place: Place
    memory: Bytes


class _Window:
    """One MPI shared window with a segment for each rank of the node."""

    def __init__(self, world: World, nbytes: int) -> None:
        MPI = world.mpi
        self.handle = MPI.Win.Allocate_shared(nbytes, 1, comm=world.node_comm)
        self.handle.Lock_all(MPI.MODE_NOCHECK)
        self.segments: list[Bytes] = [
            np.ndarray((len(buffer),), np.uint8, buffer=buffer)
            for buffer, _ in (self.handle.Shared_query(r) for r in range(world.node_comm.size))
        ]
        own = self.segments[world.node_rank]
        self.start = own.ctypes.data
        self.capacity = nbytes


class SharedArena:
    """Shared memory of the ranks of one node.

    Parameters
    ----------
    world : World
        The ranks; memory is shared among those of one node.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._windows: list[_Window] = []
        self._free: list[int] = []
        self._registered: dict[tuple[int, int], Any] = {}

    def allocate(self, nbytes: int) -> Block | None:
        """Return a block of shared memory, its contents undefined.

        Parameters
        ----------
        nbytes : int
            Bytes wanted by this rank; ranks may ask for different amounts.

        Returns
        -------
        Block or None
            None on all ranks of the node if its shared memory is too small (or there is only one rank).

        Notes
        -----
        Collective over the ranks of the node.
        """
        world = self.world
        if world.node_comm.size == 1:
            return None
        reusable = self._find_free(nbytes)
        rounded = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
        mine = np.array([reusable is None, rounded], dtype="i8")
        total = np.empty(2, dtype="i8")
        world.wait(
            [world.node_comm.Iallreduce(mine, total)], "in an allocation for the ranks of its node"
        )
        if total[0] == 0 and reusable is not None:
            self._free.remove(reusable)
            return self._block(reusable, nbytes)
        # One rank looks, since the others' pages may appear in between.
        fits = world.node_comm.bcast(_shared_memory_left() > total[1])
        if not fits:
            return None
        self._windows.append(_Window(world, rounded))
        return self._block(len(self._windows) - 1, nbytes)

    def release(self, block: Block) -> None:
        """Give a block back; it may be handed out again once every rank of the node has one to reuse."""
        if self._windows:  # not after `close`
            self._free.append(block.place.window)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an array in shared memory that releases its block when the last view of it is gone.

        Notes
        -----
        Collective over the ranks of the node; None where `allocate` gives None.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = self.allocate(nbytes)
        if block is None:
            return None
        # NumPy makes this the base of every view, so that it lives as long as any of them. Its own base must
        # not be an array: NumPy would then pass over it, to the array at the end of the chain.
        raw: Any = (ctypes.c_char * nbytes).from_address(block.memory.ctypes.data)
        root: Bytes = np.ndarray((nbytes,), np.uint8, buffer=raw)
        weakref.finalize(root, self.release, block).atexit = False
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=root)
        return array

    def locate(self, start: int, end: int) -> Place | None:
        """Return the place of memory [start, end) of this rank if it lies in the arena."""
        for number, window in enumerate(self._windows):
            if window.start <= start and end <= window.start + window.capacity:
                return Place(number, self.world.node_rank, start - window.start)
        return None

    def memory(self, place: Place) -> Bytes:
        """Return the bytes of any rank's segment from a place onwards."""
        return self._windows[place.window].segments[place.node_rank][place.offset :]

    def device_pointer(self, place: Place) -> int:
        """Return the GPU's address of a place, page-locking its segment at the first use."""
        key = (place.window, place.node_rank)
        if key not in self._registered:
            from halox.engine.memory import register

            self._registered[key] = register(self._windows[place.window].segments[place.node_rank])
        return int(self._registered[key].device_pointer) + place.offset

    def fence(self) -> None:
        """Order this rank's loads and stores in shared memory before and after."""
        self._windows[0].handle.Sync()

    def close(self) -> None:
        """Free the windows in which no rank has a field any more; collective over the ranks of the node.

        The others stay until the process ends, so that fields outlive their grid.
        """
        self._close(list(self._free))

    def close_all(self) -> None:
        """Free all windows, where what would have used them was never made; collective as `close` is."""
        self._close(list(range(len(self._windows))))

    def _close(self, unused: list[int]) -> None:
        for registration in self._registered.values():
            registration.close()
        self._registered.clear()
        if not self._windows:
            return
        used = np.ones(len(self._windows), "i4")
        used[unused] = 0
        anywhere = np.empty_like(used)
        request = self.world.node_comm.Iallreduce(used, anywhere, self.world.mpi.MAX)
        self.world.wait([request], "in the closing of a grid for the ranks of its node")
        for window, is_used in zip(self._windows, anywhere, strict=True):
            if not is_used:
                window.segments.clear()
                window.handle.Unlock_all()
                window.handle.Free()
        self._windows.clear()
        self._free.clear()

    def _find_free(self, nbytes: int) -> int | None:
        # Not one that is far too large: a plan's flags must not hold a field's memory.
        most = 4 * nbytes + _WASTE
        fitting = [n for n in self._free if nbytes <= self._windows[n].capacity <= most]
        return min(fitting, key=lambda n: (self._windows[n].capacity, n), default=None)

    def _block(self, number: int, nbytes: int) -> Block:
        place = Place(number, self.world.node_rank)
        return Block(place, self.memory(place)[:nbytes])


def _shared_memory_left() -> int:
    try:
        status = os.statvfs(_SHM)
    except OSError:
        return 1 << 62
    return status.f_bavail * status.f_frsize
