"""The ``cuda_aware`` path: packed on the device, sent by MPI from device memory, unpacked on the device.

An MPI library without GPU support reads a device pointer on the host, and crashes. So users must say on all ranks, with
``HALOX_CUDA_AWARE=1``, that their library takes device pointers; the path is not used if the library itself denies it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from halox.errors import HaloxError
from halox.paths.base import Build, Candidate, ChannelMessages, MessageEnds, Path, Protocol
from halox.paths.buffers import Buffer, RequestBuffers
from halox.paths.costs import ProtocolCost
from halox.runtime.context import Context
from halox.runtime.world import load_mpi

VARIABLE = "HALOX_CUDA_AWARE"


class CudaAwarePath(Path):
    """Passes device pointers to MPI."""

    name = "cuda_aware"
    protocols = (
        Protocol(
            "mpi",
            ProtocolCost(35.0, 3.0, (93.0, 160.0, 230.0, 250.0)),
            ProtocolCost(500.0, 3.0, (60.0, 120.0, 200.0, 220.0)),
            reach="nodes",
        ),
    )
    summary = "where MPI takes device memory, with HALOX_CUDA_AWARE=1 on all ranks"

    def check_settings(self) -> None:
        if os.environ.get(VARIABLE) not in ("", "0", "1"):
            raise HaloxError(
                f"{VARIABLE}={os.environ[VARIABLE]!r}: expected 1 (MPI takes device pointers), or 0 or nothing "
                "(it must not be given any)"
            )

    def survey(self, context: Context, *, is_named: bool) -> str | None:
        return context.once(_why_no_device_pointers)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        why = ends.host_reason or ends.selection.surveys.get(self.name, "no MPI library was asked")
        return why or [self.candidate("mpi", "MPI takes device pointers")]

    def channels(self, build: Build, agreed: object) -> Sequence[ChannelMessages]:
        """Make the channel; its messages are not cut into fragments."""
        job, device = build.job(self), build.device
        assert device is not None
        from halox.paths.staged.pipeline import StagedPipeline, Work
        from halox.runtime.gpu.cuda import cupy

        with cupy().cuda.Device(device):
            buffers = RequestBuffers(
                build.world,
                job.sends,
                job.receives,
                build.mpi_tag,
                device_buffer,
                leftovers=build.context.leftovers,
            )
        channel = StagedPipeline(build.world, buffers, Work(job, buffers, device, self.name))
        return [ChannelMessages(self.name, channel, job.messages)]


def _why_no_device_pointers(context: Context) -> str | None:
    """Return why some rank must not pass device pointers to MPI, None if all may; collective."""
    step = "the question whether MPI takes device pointers"
    _, reasons = context.world.gather(lambda: (None, _why_not_here()), step)
    if len(reasons.distinct) == 1:
        return reasons.distinct[0]
    return next(f"on rank {rank}, {why}" for rank, why in enumerate(reasons) if why is not None)


def _why_not_here() -> str | None:
    if os.environ.get(VARIABLE) != "1":
        return f"{VARIABLE} is not 1; set it on all ranks if the MPI library takes device pointers"
    if _library_denies():
        return "the MPI library says that it has no support for CUDA (MPIX_Query_cuda_support)"
    return None


def _library_denies() -> bool:
    """Whether the MPI library reports that it has no CUDA support; libraries without a report do not deny it."""
    try:
        query = ctypes.CDLL(load_mpi().__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.restype, query.argtypes = ctypes.c_int, ()
    return int(query()) == 0


def device_buffer(nbytes: int) -> Buffer:
    """Return memory of the current GPU from the CUDA driver, which MPI may export to other processes."""
    from halox.runtime.gpu.cuda import cupy

    owner = cupy().cuda.Memory(max(1, nbytes))
    return Buffer(load_mpi().memory.fromaddress(owner.ptr, nbytes), int(owner.ptr), owner)
