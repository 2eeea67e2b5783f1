"""``halox.pack`` and ``halox.unpack`` for arrays on a GPU: checks, the choice of a packer, and a cache of packers.

A time loop packs a few datatypes. Packers, and the bytes that the items reach, are cached by datatype and count. Each
call checks its arrays, and launches a kernel.
"""

from __future__ import annotations

from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.datatypes.arguments import count_of
from halox.packing.choosing import check_method, choose, device_packer
from halox.packing.device_arrays import device_array, packed_bytes
from halox.packing.device_packer import DevicePacker
from halox.packing.host import overlapping
from halox.runtime.arrays import check_no_gaps
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import check_max_blocks

if TYPE_CHECKING:
    from halox.datatypes import Datatype

CACHED_CALLS = 256
"""Largest number of calls (datatype, count, method, max_blocks) with cached packers; the oldest is dropped first."""


class _Call:
    """Cached checks and packers for a datatype, a count and a method."""

    def __init__(self, datatype: Datatype, count: int, method: str, max_blocks: int | None) -> None:
        self.datatype = datatype  # must stay alive, because the cache's key contains its id
        self.count = count
        self.method = method
        self.max_blocks = max_blocks
        self.nbytes = datatype.size * count
        self.first, self.end = datatype.reach(count)
        # Kept, since importing CuPy anew would cost a microsecond.
        self.cuda: ModuleType = cupy().cuda
        self.ndarray: type[Any] = cupy().ndarray
        self._overlaps: bool | None = None
        self._packers: dict[tuple[int, bool], DevicePacker] = {}

    def packer(self, device: int, to_host: bool) -> DevicePacker:
        """``to_host`` says that the packed bytes are in host memory."""
        packer = self._packers.get((device, to_host))
        if packer is None:
            method = self.method
            if method == "auto":
                method = choose(self.datatype, self.count, to_host=to_host).method
            packer = device_packer(method, self.datatype, self.count, device, self.max_blocks)
            self._packers[device, to_host] = packer
        return packer

    def array(self, array: Any, name: str, *, writable: bool = False) -> tuple[int, int]:
        """Return the address and GPU of an array, after a check that the items touch only its own bytes."""
        if type(array) is self.ndarray:
            if not array.flags.forc:
                check_no_gaps(name, array.shape, array.strides, array.itemsize)
            data = array.data
            memory = data.mem
            pointer, low = data.ptr, memory.ptr
            if pointer + self.first >= low and pointer + self.end <= low + memory.size:
                return pointer, data.device_id
        described = device_array(array, name, writable=writable)
        check_no_gaps(name, described.shape, described.strides, described.itemsize)
        described.check_bounds(self.datatype, self.count)
        return described.pointer, described.device

    def packed(self, array: Any, name: str, device: int, *, writable: bool = False) -> int:
        """Return the address of a packed buffer, after a check of its size, dtype and memory."""
        if (
            type(array) is self.ndarray
            and array.dtype.char == "B"
            and array.strides == (1,)
            and array.size >= self.nbytes
        ):
            data = array.data
            if data.device_id == device:
                return int(data.ptr)
        return packed_bytes(array, name, self.nbytes, device, writable=writable)

    def stream(self) -> int:
        return int(self.cuda.get_current_stream().ptr)

    def check_receivable(self) -> None:
        if self._overlaps is None:
            self._overlaps = self.datatype.overlaps(self.count)
        if self._overlaps:
            raise overlapping(self.datatype, self.count)


_calls: dict[tuple[int, int, str, int | None], _Call] = {}
_lock = Lock()


def _call(datatype: Datatype, count: int, method: str, max_blocks: int | None) -> _Call:
    if type(count) is not int:
        count = count_of("count", count)
    key = (id(datatype), count, method, max_blocks)
    try:
        call = _calls.get(key)
    except TypeError:  # an argument is not hashable
        check_method(method)
        check_max_blocks(max_blocks)
        raise
    if call is not None:
        return call
    new = _Call(datatype, count_of("count", count), method, max_blocks)
    with _lock:
        _calls[key] = new
        while len(_calls) > CACHED_CALLS:
            _calls.pop(next(iter(_calls)))
    return new


def pack_device(
    source: object,
    datatype: Datatype,
    count: int,
    out: Any,
    method: str,
    max_blocks: int | None,
) -> Any:
    """Pack an array on a GPU; see :func:`halox.pack`."""
    call = _call(datatype, count, method, max_blocks)
    pointer, device = call.array(source, "source")
    if call.cuda.runtime.getDevice() != device:
        with call.cuda.Device(device):
            return pack_device(source, datatype, count, out, method, max_blocks)
    if out is None:
        out = cupy().empty(call.nbytes, np.uint8)
    packed = call.packed(out, "out", device, writable=True)
    call.packer(device, type(out) is np.ndarray).pack(pointer, packed, call.stream())
    return out if out.size == call.nbytes else out[: call.nbytes]


def unpack_device(
    packed: object,
    datatype: Datatype,
    target: object,
    count: int,
    method: str,
    max_blocks: int | None,
) -> None:
    """Unpack into an array on a GPU; see :func:`halox.unpack`."""
    call = _call(datatype, count, method, max_blocks)
    call.check_receivable()
    pointer, device = call.array(target, "target", writable=True)
    if call.cuda.runtime.getDevice() != device:
        with call.cuda.Device(device):
            return unpack_device(packed, datatype, target, count, method, max_blocks)
    source = call.packed(packed, "packed", device)
    packer = call.packer(device, type(packed) is np.ndarray)
    packer.unpack(source, pointer, call.stream())
