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
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from halox.runtime.deferred import Deferred
from halox.runtime.dlpack import DType
from halox.runtime.free_list import FreeList
from halox.runtime.gpu.cuda import cupy
from halox.runtime.place import Place
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_GRANULE = 512
_SEGMENT_BYTES = 32 << 20  # smallest segment for small blocks
_LARGE_GRANULE = 2 << 20  # sizes of segments are multiples of it

Allocation: TypeAlias = tuple[str, int]
"""An arena's name and the number of one of its segments."""

DevicePlace: TypeAlias = Place[Allocation]
"""Place in device memory."""


@dataclass(eq=False)
class DeviceBlock:
    """A block of this rank's device memory: its place, as other ranks name it, its local address and size in bytes."""

    place: DevicePlace
    pointer: int
    nbytes: int


class _Segment:
    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory, self.nbytes, self.pointer = memory, nbytes, int(memory.ptr)
        self.free = FreeList(nbytes)
        self.handle: bytes | None = None


_arenas: weakref.WeakValueDictionary[str, DeviceArena] = weakref.WeakValueDictionary()
_mapped: dict[Allocation, int] = {}  # local addresses of the peers' segments


class DeviceArena:
    """Exportable memory of one rank's GPU; ``name`` is unique among all arenas of all ranks."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.name = uuid4().hex
        self._segments: dict[int, _Segment] = {}
        self._next = 0
        self._lock = Deferred()
        self._retired: list[DeviceBlock] = []
        _arenas[self.name] = self

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Return uninitialized memory, aligned to 512 bytes.

        Local. May synchronize with the GPU; must not be called during stream capture.
        """
        with self._lock:
            number, offset = self._reserve(nbytes)
        place = Place((self.name, number), offset)
        return DeviceBlock(place, self._segments[number].pointer + offset, nbytes)

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        """Reserve room in the first segment that has enough, or in a new segment; return its number and the offset."""
        rounded = _rounded(nbytes)
        for number, segment in self._segments.items():
            offset = segment.free.allocate(rounded)
            if offset is not None:
                return number, offset
        size = rounded_up(rounded, _LARGE_GRANULE)
        if nbytes <= _SEGMENT_BYTES // 4:
            size = max(_SEGMENT_BYTES, size)
        with cupy().cuda.Device(self.device):
            segment = _Segment(cupy().cuda.Memory(size), size)
        number, self._next = self._next, self._next + 1
        segment.free.allocate(rounded)
        self._segments[number] = segment
        return number, 0

    def release(self, block: DeviceBlock) -> None:
        """Release a block that no pending GPU work uses; local."""
        self._lock.do(partial(self._put, block))

    def _put(self, block: DeviceBlock) -> None:
        number = block.place.segment[1]
        segment = self._segments.get(number)
        if segment is None:  # after `free`
            return
        segment.free.release(block.place.offset, _rounded(block.nbytes))
        if segment.free.is_whole and segment.handle is None:  # no peer can have mapped it
            self._segments.pop(number, None)

    def retire(self, block: DeviceBlock) -> None:
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
        root = _Root(self._segments[block.place.segment[1]].memory)
        weakref.finalize(root, self.release, block).atexit = False
        memory = cp.cuda.UnownedMemory(block.pointer, max(nbytes, 1), root, self.device)
        array: CupyArray = cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))
        return array

    def locate(self, start: int, end: int) -> DevicePlace | None:
        """Return the place of device memory [start, end) if it is in this arena or in another arena of this process."""
        others = (arena for arena in list(_arenas.values()) if arena.device == self.device)
        for arena in (self, *others):
            # Iterate over a copy: the garbage collector may free fields, and with them segments.
            for number, segment in arena._segments.copy().items():
                if segment.pointer <= start and end <= segment.pointer + segment.nbytes:
                    return Place((arena.name, number), start - segment.pointer)
        return None

    def around(self, start: int, end: int) -> tuple[int, int, object] | None:
        """Return address, size and owner of the segment that contains memory [start, end); None if no arena does."""
        place = self.locate(start, end)
        if place is None:
            return None
        name, number = place.segment
        segment = _arenas[name]._segments[number]
        return segment.pointer, segment.nbytes, segment

    def handles(self, places: Iterable[DevicePlace]) -> dict[Allocation, bytes]:
        """Return the IPC handles of the segments that contain places of this process; peers pass them to `open`."""
        handles = {}
        for name, number in sorted({place.segment for place in places}):
            segment = _arenas[name]._segments[number]
            if segment.handle is None:
                segment.handle = bytes(cupy().cuda.runtime.ipcGetMemHandle(segment.pointer))
            handles[name, number] = segment.handle
        return handles

    def open(self, handles: Mapping[Allocation, bytes]) -> None:
        """Map segments of a peer, except segments that this process has already mapped."""
        runtime = cupy().cuda.runtime
        for segment, handle in handles.items():
            if segment not in _mapped:
                with cupy().cuda.Device(self.device):
                    lazily = runtime.cudaIpcMemLazyEnablePeerAccess
                    _mapped[segment] = int(runtime.ipcOpenMemHandle(handle, lazily))

    def pointer(self, place: DevicePlace) -> int:
        """Return the local address of a place in a segment of this process, or in a segment that it has mapped."""
        name, number = place.segment
        own = _arenas.get(name)
        pointer = _mapped[place.segment] if own is None else own._segments[number].pointer
        return pointer + place.offset

    def synchronize(self) -> None:
        """Wait until the GPU is idle."""
        cupy().cuda.Device(self.device).synchronize()

    def unmap(self, names: Collection[str]) -> None:
        """Unmap the memory of peers' arenas, once it is no longer used; local."""
        with cupy().cuda.Device(self.device) as device:
            device.synchronize()
            for segment in [segment for segment in _mapped if segment[0] in names]:
                cupy().cuda.runtime.ipcCloseMemHandle(_mapped.pop(segment))

    def free(self) -> None:
        """Free all segments; a segment with a live field is freed with the field. Local, after the peers' `unmap`."""
        self._segments.clear()


def _rounded(nbytes: int) -> int:
    return rounded_up(max(nbytes, 1), _GRANULE)


class _Root:
    """Owner of an array's memory: keeps the segment's memory alive, and its finalizer releases the block."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
