"""The ``cuda_aware`` path: packed on the device, sent by MPI from device memory, unpacked on the device.

Only MPI libraries built for it take device pointers; `halox.runtime.device_pointers` finds out whether this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halox.paths.base import (
    Build,
    Candidate,
    Carried,
    EndpointInfo,
    Path,
    Protocol,
    SelectionContext,
    numpy_ends,
)
from halox.paths.buffers import Buffer, RequestBuffers
from halox.paths.costs import ProtocolCost
from halox.runtime.device_pointers import decided_by_user
from halox.runtime.leftovers import Leftovers
from halox.runtime.world import World, load_mpi


class CudaAwarePath(Path):
    """Hands device pointers to MPI."""

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
        """Look at HALOX_CUDA_AWARE."""
        decided_by_user()

    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer MPI if it takes device pointers."""
        why = numpy_ends(sender, receiver) or selection.no_device_pointers
        return why or [self.offer("mpi", "MPI takes device pointers")]

    def channels(self, build: Build, agreed: Any) -> Sequence[Carried]:
        """Make the channel, of whole messages."""
        job, device = build.job(self), build.device
        if device is None or not job.messages:
            return ()
        from halox.paths.staged.channel import staged_channel

        left = build.context.leftovers
        buffers = DeviceBuffers(
            build.world, job.sends, job.receives, build.mpi_tag, device, leftovers=left
        )
        channel = staged_channel(build.world, job, buffers, device, self.name)
        return [Carried(self.name, channel, job.messages)]


class DeviceBuffer:
    """Device memory of one message, from the driver: MPI may export it to other processes."""

    def __init__(self, nbytes: int, allocate: Callable[[int], Any]) -> None:
        self._memory: Any = allocate(max(1, nbytes))
        self._fromaddress = load_mpi().memory.fromaddress

    @property
    def device_pointer(self) -> int:
        """Its address."""
        return int(self._memory.ptr)

    def span(self, start: int, end: int) -> Any:
        """Return bytes [start, end), as mpi4py takes them."""
        return self._fromaddress(self.device_pointer + start, end - start)

    def close(self) -> None:
        """Free it."""
        self._memory = None


class DeviceBuffers(RequestBuffers):
    """Sends device memory with persistent MPI requests, whole messages: MPI cuts them itself."""

    def __init__(
        self,
        world: World,
        sends: Any,
        receives: Any,
        mpi_tag: Any,
        device: int,
        allocate: Callable[[int], Any] | None = None,
        leftovers: Leftovers | None = None,
    ) -> None:
        self._allocate = _allocator(device) if allocate is None else allocate
        super().__init__(world, sends, receives, mpi_tag, leftovers=leftovers)

    def _buffer(self, nbytes: int) -> Buffer:
        return DeviceBuffer(nbytes, self._allocate)


def _allocator(device: int) -> Callable[[int], Any]:
    from halox.runtime.gpu.cuda import cupy

    def allocate(nbytes: int) -> Any:
        with cupy().cuda.Device(device):
            return cupy().cuda.Memory(nbytes)

    return allocate
