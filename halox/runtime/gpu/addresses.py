"""Memory behind an address: its kind, its GPU and its allocation."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

from halox.runtime.gpu import driver


class MemoryKind(NamedTuple):
    """Kind of the memory at an address: of a GPU, managed by the driver, page-locked host memory, or any other.

    ``device`` is the GPU, or the one that host memory was locked for; ``device_pointer`` the address on the GPU, which
    for page-locked memory need not be the host's.
    """

    kind: Literal["device", "managed", "pinned", "unregistered"]
    device: int | None
    device_pointer: int | None


def memory_kind(address: int) -> MemoryKind:
    """Return the kind of the memory at an address; waits for nothing. Raises `DeviceError` without a GPU."""
    cu = driver.bindings()
    ((where, managed, device),) = driver.call(
        cu.cuPointerGetAttributes, 3, _attributes(cu), address
    )
    if managed:
        return MemoryKind("managed", device, address)
    if where == cu.CUmemorytype.CU_MEMORYTYPE_DEVICE:
        return MemoryKind("device", device, address)
    if where == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
        asked = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        code, mapped = cu.cuPointerGetAttribute(asked, address)
        return MemoryKind("pinned", device, None if code else int(mapped))
    return MemoryKind("unregistered", None, None)


def memory_range(address: int) -> tuple[int, int] | None:
    """Return address and bytes of the device allocation around an address; waits for nothing.

    It is the allocation as the driver made it, which for CuPy's arrays is the pool's; None outside of GPUs' memory.
    Raises `DeviceError` without a GPU.
    """
    if memory_kind(address).kind not in ("device", "managed"):
        return None
    look_up = driver.bindings().cuMemGetAddressRange
    code, base, nbytes = look_up(address)
    if code in (driver.INVALID_VALUE, driver.NOT_FOUND):
        return None
    if code:
        raise driver.failure(look_up, code)
    return int(base), int(nbytes)


@cache
def _attributes(cu: Any) -> list[Any]:
    asked = cu.CUpointer_attribute
    return [
        asked.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        asked.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        asked.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ]
