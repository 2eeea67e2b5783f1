"""GPU memory for network adapters: export of ranges as dmabufs, and flush of the adapters' writes.

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
    """A range of GPU memory as a file descriptor; the range begins at the page-aligned ``address``."""

    descriptor: int
    address: int
    nbytes: int


@contextmanager
def exported(address: int, nbytes: int, device: int) -> Iterator[DmaBuf]:
    """Export whole pages of GPU memory as a dmabuf; the descriptor is closed on exit, a registration stays valid.

    Raises `DeviceError` if the driver refuses the export: it does not support dmabufs, or another allocation shares
    these pages.
    """
    page = os.sysconf("SC_PAGESIZE")
    start = address // page * page
    whole = rounded_up(address + nbytes, page) - start
    cu = driver.bindings()
    kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    (handle,) = driver.call(cu.cuMemGetHandleForAddressRange, start, whole, kind, 0, device=device)
    descriptor = int(handle)
    try:
        yield DmaBuf(descriptor, start, whole)
    finally:
        os.close(descriptor)


def flush_writes(device: int) -> None:
    """Make completed adapter writes to a GPU visible to work that is enqueued later on its streams."""
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
    """Whether a GPU gives no ordering guarantee for adapters' writes without a flush."""
    cu = driver.bindings()
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    (order,) = driver.call(cu.cuDeviceGetAttribute, attribute, device, device=device)
    return int(order) == 0
