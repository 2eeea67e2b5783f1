"""``halox.pack`` and ``halox.unpack`` for arrays on a GPU: checks, the choice of a packer, and caches of both.

A time loop packs a few datatypes, usually in the same arrays. Packers and checks are cached by datatype and count. The
addresses of arrays that have passed the checks are cached by the identity of the arrays. A call with known arrays only
launches a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from halox.datatypes.arguments import count_of
from halox.packing.choosing import check_method, choose, device_packer
from halox.packing.device_arrays import device_array, packed_bytes
from halox.packing.device_packer import DevicePacker
from halox.packing.host import overlapping
from halox.runtime.arrays import check_no_gaps
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import check_max_blocks
from halox.runtime.known_arrays import KnownArrays

if TYPE_CHECKING:
    from halox.datatypes import Datatype

Move = Callable[[int, int, int], None]
"""`DevicePacker.pack` or `DevicePacker.unpack`."""

CACHED_CALLS = 256
"""Largest number of calls (datatype, count, method, max_blocks) with cached packers; the oldest is dropped first."""


class _Checked(NamedTuple):
    """A call with two arrays that have passed all checks."""

    move: Move
    first: int  # address of the first array
    second: int
    device: int  # GPU of both


class _Call:
    """Cached checks and packers for a datatype, a count and a method."""

    def __init__(self, datatype: Datatype, count: int, method: str, max_blocks: int | None) -> None:
        self.datatype = datatype  # must stay alive, because the cache's key contains its id
        self.count = count
        self.method = method
        self.max_blocks = max_blocks
        self.nbytes = datatype.size * count
        self.first, self.end = datatype.reach(count)
        self.ndarray: type[Any] = cupy().ndarray
        self.known: KnownArrays[_Checked] = KnownArrays()
        self._overlaps: bool | None = None
        self._packers: dict[tuple[int, bool], DevicePacker] = {}

    def packer(self, device: int, to_host: bool) -> DevicePacker:
        """Return the packer on a GPU; ``to_host`` says that the packed bytes are in host memory."""
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

    def keep(self, kind: str, one: object, other: object, checked: _Checked) -> None:
        """Cache the result for two CuPy arrays, which never change their addresses."""
        if type(one) is self.ndarray and type(other) is self.ndarray:
            self.known.keep(kind, (one, other), checked)

    def check_receivable(self) -> None:
        """Raise if the items touch a byte twice."""
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
    known = call.known.find("pack", (source, out))
    if known is None or _cuda().runtime.getDevice() != known.device:
        pointer, device = call.array(source, "source")
        if _cuda().runtime.getDevice() != device:
            with _cuda().Device(device):
                return pack_device(source, datatype, count, out, method, max_blocks)
        is_new = out is None
        if is_new:
            out = cupy().empty(call.nbytes, np.uint8)
        packed = call.packed(out, "out", device, writable=True)
        known = _Checked(call.packer(device, type(out) is np.ndarray).pack, pointer, packed, device)
        if not is_new:
            call.keep("pack", source, out, known)
    known.move(known.first, known.second, _current_stream())
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
    known = call.known.find("unpack", (packed, target))
    if known is None or _cuda().runtime.getDevice() != known.device:
        call.check_receivable()
        pointer, device = call.array(target, "target", writable=True)
        if _cuda().runtime.getDevice() != device:
            with _cuda().Device(device):
                return unpack_device(packed, datatype, target, count, method, max_blocks)
        source = call.packed(packed, "packed", device)
        known = _Checked(
            call.packer(device, type(packed) is np.ndarray).unpack, source, pointer, device
        )
        call.keep("unpack", packed, target, known)
    known.move(known.first, known.second, _current_stream())


@cache
def _cuda() -> ModuleType:
    cuda: ModuleType = cupy().cuda
    return cuda


def _current_stream() -> int:
    return int(_cuda().get_current_stream().ptr)
