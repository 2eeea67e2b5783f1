"""Memory of GPUs for network adapters: ranges exported as dmabufs, and adapters' writes made visible.

References
----------
CUDA driver API, cuMemGetHandleForAddressRange and cuFlushGPUDirectRDMAWrites.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from halox.runtime.gpu import driver
from halox.values import rounded_up


class DmaBuf(NamedTuple):
    """A range of a GPU's memory as a file descriptor; it begins at ``address``, which is that of a page."""

    descriptor: int
    address: int
    nbytes: int


@contextmanager
def exported(address: int, nbytes: int, device: int) -> Iterator[DmaBuf]:
    """Export memory as a dmabuf of whole pages of the host; who registers it keeps it, the descriptor is closed.

    Raises `DeviceError` if the driver refuses: without support for dmabufs, or where the pages around belong to other
    allocations too.
    """
    page = os.sysconf("SC_PAGESIZE")
    start = address // page * page
    whole = rounded_up(address + nbytes, page) - start
    cu = driver.bindings()
    kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    (found,) = driver.call(cu.cuMemGetHandleForAddressRange, start, whole, kind, 0, device=device)
    descriptor = int(found)
    try:
        yield DmaBuf(descriptor, start, whole)
    finally:
        os.close(descriptor)


def flush_writes(device: int) -> None:
    """Make what adapters have written to a GPU, and have said so, visible to work that is put on its streams now."""
    if _needs_flush(device):
        cu = driver.bindings()
        driver.call(
            cu.cuFlushGPUDirectRDMAWrites,
            cu.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
            cu.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            device=device,
        )


@cache
def _needs_flush(device: int) -> bool:
    """Whether a GPU orders adapters' writes in no way by itself."""
    cu = driver.bindings()
    asked = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    (order,) = driver.call(cu.cuDeviceGetAttribute, asked, device, device=device)
    return int(order) == 0
