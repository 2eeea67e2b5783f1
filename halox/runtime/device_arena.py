"""Memory of this rank's GPU that other ranks of the node can map.

Other ranks map memory by CUDA's IPC handles. Only memory of this arena is exported: memory of CuPy's pools cannot be
exported, and memory of other libraries may be freed by its owner at any time. A segment is one cudaMalloc. Once its
handle has been exported, the segment stays allocated until `DeviceArena.free`, and its blocks are reused. So there are
few handles, and no handle becomes stale. A mapping belongs to the whole process: plans of one grid can access fields of
another.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from halox.runtime.dlpack import DType
from halox.runtime.gpu.cuda import cupy
from halox.runtime.segments import Block, Place, Segment, SegmentKey, Segments
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_GRANULE = 512
_SEGMENT_BYTES = 32 << 20  # smallest segment for small blocks
_LARGE_GRANULE = 2 << 20  # sizes of segments are multiples of it


_arenas: weakref.WeakValueDictionary[str, DeviceArena] = weakref.WeakValueDictionary()
_mapped: dict[SegmentKey, int] = {}  # local addresses of the peers' segments


class DeviceArena:
    """Exportable memory of one rank's GPU; ``name`` is unique among all arenas of all ranks."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.name = uuid4().hex
        self._segments = Segments(self.name, _GRANULE)
        self._next = 0
        self._retired: list[Block] = []
        _arenas[self.name] = self

    def allocate(self, nbytes: int) -> Block:
        """Return uninitialized memory, aligned to 512 bytes.

        Local. May synchronize with the GPU; must not be called during stream capture.
        """
        block = self._segments.take(nbytes)
        if block is not None:
            return block
        size = rounded_up(self._segments.rounded(nbytes), _LARGE_GRANULE)
        if nbytes <= _SEGMENT_BYTES // 4:
            size = max(_SEGMENT_BYTES, size)
        with cupy().cuda.Device(self.device):
            memory = cupy().cuda.Memory(size)
        number, self._next = self._next, self._next + 1
        # Until a peer can have mapped it, a segment is freed with its last block.
        segment = Segment(memory, int(memory.ptr), size, is_kept=False)
        return self._segments.add(number, segment, nbytes)

    def release(self, block: Block) -> None:
        """Release a block that no pending GPU work uses; local."""
        self._segments.release(block)

    def retire(self, block: Block) -> None:
        """Release a block at the next `reclaim`, since peers may still write to it."""
        self._retired.append(block)

    def reclaim(self) -> None:
        """Release the retired blocks, once all pending accesses of peers have ended; local."""
        while self._retired:
            self.release(self._retired.pop())

    def array(self, shape: tuple[int, ...], dtype: DType) -> CupyArray:
        """Return an uninitialized CuPy array; deleting its last view releases its block. Local."""
        cp = cupy()
        nbytes = prod(shape) * dtype.itemsize
        block = self.allocate(nbytes)
        root = _Root(self._segments.by_number[block.place.segment[1]].memory)
        weakref.finalize(root, self.release, block).atexit = False
        memory = cp.cuda.UnownedMemory(block.pointer, max(nbytes, 1), root, self.device)
        array: CupyArray = cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))
        return array

    def locate(self, start: int, end: int) -> Place | None:
        """Return the place of device memory [start, end) if it is in this arena or in another arena of this process."""
        others = (arena for arena in list(_arenas.values()) if arena.device == self.device)
        places = (arena._segments.locate(start, end) for arena in (self, *others))
        return next((place for place in places if place is not None), None)

    def around(self, start: int, end: int) -> tuple[int, int, object] | None:
        """Return address, size and owner of the segment that contains memory [start, end); None if no arena does."""
        place = self.locate(start, end)
        if place is None:
            return None
        segment = _own_segment(place.segment)
        return segment.start, segment.nbytes, segment

    def handles(self, places: Iterable[Place]) -> dict[SegmentKey, bytes]:
        """Return the IPC handles of the segments that contain places of this process; peers pass them to `open`."""
        handles = {}
        for key in {place.segment: None for place in places}:
            segment = _own_segment(key)
            if segment.handle is None:
                segment.handle = bytes(cupy().cuda.runtime.ipcGetMemHandle(segment.start))
                segment.is_kept = True
            handles[key] = segment.handle
        return handles

    def open(self, handles: Mapping[SegmentKey, bytes]) -> None:
        """Map segments of a peer, except segments that this process has already mapped."""
        runtime = cupy().cuda.runtime
        for segment, handle in handles.items():
            if segment not in _mapped:
                with cupy().cuda.Device(self.device):
                    lazily = runtime.cudaIpcMemLazyEnablePeerAccess
                    _mapped[segment] = int(runtime.ipcOpenMemHandle(handle, lazily))

    def pointer(self, place: Place) -> int:
        """Return the local address of a place in a segment of this process, or in a segment that it has mapped."""
        is_own = place.segment[0] in _arenas
        start = _own_segment(place.segment).start if is_own else _mapped[place.segment]
        return start + place.offset

    def synchronize(self) -> None:
        cupy().cuda.Device(self.device).synchronize()

    def unmap(self, names: Collection[str]) -> None:
        """Unmap the memory of peers' arenas, once it is no longer used; local."""
        with cupy().cuda.Device(self.device) as device:
            device.synchronize()
            for segment in [segment for segment in _mapped if segment[0] in names]:
                cupy().cuda.runtime.ipcCloseMemHandle(_mapped.pop(segment))

    def free(self) -> None:
        """Free all segments; a segment with a live field is freed with the field. Local, after the peers' `unmap`."""
        self._segments.by_number.clear()


def _own_segment(key: SegmentKey) -> Segment:
    name, number = key
    return _arenas[str(name)]._segments.by_number[number]


class _Root:
    """Owner of an array's memory: keeps the segment's memory alive, and its finalizer releases the block."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
