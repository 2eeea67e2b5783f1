"""What lies at an address: whose memory, and how far it reaches."""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

from halox.runtime.gpu import libcuda


class MemoryKind(NamedTuple):
    """What lies at an address; see :func:`memory_kind`.

    Attributes
    ----------
    kind : {"device", "managed", "pinned", "unregistered"}
        Memory of a GPU; memory that moves by itself; page-locked host memory; anything else.
    device : int or None
        The GPU, or the one that host memory was locked for.
    device_pointer : int or None
        The address on the GPU, which for page-locked memory need not be the host's.
    """

    kind: Literal["device", "managed", "pinned", "unregistered"]
    device: int | None
    device_pointer: int | None


# CU_POINTER_ATTRIBUTE_ MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, and the one asked for apart.
_ATTRIBUTES = (ctypes.c_int * 3)(2, 8, 9)
_DEVICE_POINTER = 3
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


def memory_kind(address: int) -> MemoryKind:
    """Find out what kind of memory an address belongs to.

    Parameters
    ----------
    address : int

    Returns
    -------
    MemoryKind

    Raises
    ------
    DeviceError
        If there is no GPU.

    Notes
    -----
    Not collective; waits for nothing.
    """
    values = (ctypes.c_uint64 * 3)()
    start = ctypes.addressof(values)
    places = (ctypes.c_void_p * 3)(start, start + 8, start + 16)
    called = libcuda.function("cuPointerGetAttributes")
    libcuda.call(called, 3, _ATTRIBUTES, places, address)
    # Each value is four bytes, the first of the eight on every machine that CUDA runs on.
    where, managed, device = (value & 0xFFFFFFFF for value in values)
    if managed:
        return MemoryKind("managed", device, address)
    if where == _DEVICE:
        return MemoryKind("device", device, address)
    if where == _HOST:
        mapped = ctypes.c_uint64()
        called = libcuda.function("cuPointerGetAttribute")
        found = called(ctypes.byref(mapped), _DEVICE_POINTER, address) == 0
        return MemoryKind("pinned", device, mapped.value if found else None)
    return MemoryKind("unregistered", None, None)


def memory_range(address: int) -> tuple[int, int] | None:
    """Find the device allocation that an address lies in.

    Parameters
    ----------
    address : int

    Returns
    -------
    (int, int) or None
        Address and bytes of the allocation as the driver made it, which for CuPy's arrays is the
        pool's; None where no GPU's memory lies.

    Raises
    ------
    DeviceError
        If there is no GPU.

    Notes
    -----
    Not collective; waits for nothing.
    """
    if memory_kind(address).kind not in ("device", "managed"):
        return None
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    called = libcuda.function("cuMemGetAddressRange_v2")
    code = called(ctypes.byref(base), ctypes.byref(nbytes), address)
    if code in (libcuda.INVALID_VALUE, libcuda.NOT_FOUND):
        return None
    if code:
        raise libcuda.failure(called.__name__, code)
    return base.value, nbytes.value
