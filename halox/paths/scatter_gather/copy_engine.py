"""The ``copy_engine`` engine: copies of the CUDA driver between this rank's GPU and memory of a peer that it maps.

The driver makes 2D and 3D copies, and batches of contiguous copies. Between GPUs its copy engines move the data, and no
kernel of halox runs. A key is a list of blocks; a key for export must be in a memory segment that peers map. Segment
numbers are never reused, so that they serve as generations.
"""

from __future__ import annotations

import numpy as np

from halox.packing.copy_boxes import PreparedCopies, common_blocks
from halox.packing.copy_engine import MOST_RUNS
from halox.paths.scatter_gather import COPY_ENGINE
from halox.paths.scatter_gather.engine import (
    Direction,
    Engine,
    Key,
    Limits,
    RegisteredRegion,
    RemoteKey,
    Transfer,
)
from halox.runtime.device_arena import Allocation, DeviceArena, DevicePlace
from halox.runtime.segments import Place


class CopyEngine(Engine):
    """Mover of windows between GPUs of a node, or within a shared GPU; ``arena`` belongs to this rank's GPU."""

    name = COPY_ENGINE
    limits = Limits(entries=MOST_RUNS, key_bytes=1 << 50, keys=1 << 30, pool=0)
    needs_registration = False

    def __init__(self, arena: DeviceArena) -> None:
        self.arena = arena
        self.device = arena.device

    def register(
        self, address: int, nbytes: int, generation: int, device: int | None = None
    ) -> RegisteredRegion:
        """Return a region; its handle names the segment, or is None if peers cannot map the memory."""
        place = self.arena.locate(address, address + nbytes)
        return RegisteredRegion(address, nbytes, 0, handle=None if place is None else place.segment)

    def export(self, key: Key) -> RemoteKey:
        """Return the places of the key's blocks, for ranks that have mapped their segments."""
        window = key.window
        assert window is not None
        segments: dict[Allocation, int] = {}
        places: list[DevicePlace] = []
        origin = np.zeros(window.array_of.max() + 1, np.int64)
        index = np.zeros(window.array_of.max() + 1, np.int64)
        for array in np.unique(window.array_of).tolist():
            mine = window.array_of == array
            low = int(window.addresses[mine].min())
            high = int((window.addresses[mine] + window.lengths[mine]).max())
            place = self.arena.locate(low, high)
            assert place is not None, "keys of memory that no peer can map are not exported"
            if place.segment not in segments:
                segments[place.segment] = len(places)
                places.append(Place(place.segment))
            index[array] = segments[place.segment]
            origin[array] = low - place.offset
        blocks = window.addresses - origin[window.array_of], window.lengths, index[window.array_of]
        return RemoteKey(nbytes=window.nbytes, blocks=(tuple(places), *blocks))

    def transfer(self, direction: Direction, key: Key, remote: RemoteKey, peer: int) -> Transfer:
        """Prepare the copies; the segments of the peer's key must be open."""
        window = key.window
        assert window is not None
        places, offsets, lengths, index = remote.blocks
        pointers = np.array([self.arena.pointer(place) for place in places], np.int64)
        own = window.addresses, window.lengths, window.array_of
        theirs = offsets + pointers[index], lengths, index
        ends = (own, theirs) if direction == "put" else (theirs, own)
        return PreparedCopies(common_blocks(*ends), self.arena.device).launch
