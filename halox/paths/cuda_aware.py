"""The ``cuda_aware`` path: packed on the device, sent by MPI from device memory, unpacked on the device.

Only CUDA-aware MPI libraries accept device pointers; `halox.runtime.device_pointers` finds out whether this one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths.base import Build, Candidate, ChannelMessages, MessageEnds, Path, Protocol
from halox.paths.buffers import Buffer, RequestBuffers
from halox.paths.costs import ProtocolCost
from halox.runtime.context import Context
from halox.runtime.device_pointers import decided_by_user, find_out
from halox.runtime.world import load_mpi


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
    summary = "where MPI takes device memory; see `halox info --paths -n N`"

    def check_settings(self) -> None:
        """Check HALOX_CUDA_AWARE."""
        decided_by_user()

    def survey(self, context: Context, *, is_named: bool) -> str | None:
        """Return why MPI cannot take device pointers, None if it can; collective the first time."""
        return context.of_gpus(_why_no_device_pointers)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Offer MPI if it takes device pointers."""
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
    verdict = find_out(context.world, context.device)
    return None if verdict.takes else verdict.reason


def device_buffer(nbytes: int) -> Buffer:
    """Return memory of the current GPU from the CUDA driver, which MPI may export to other processes."""
    from halox.runtime.gpu.cuda import cupy

    owner = cupy().cuda.Memory(max(1, nbytes))
    return Buffer(load_mpi().memory.fromaddress(owner.ptr, nbytes), int(owner.ptr), owner)
