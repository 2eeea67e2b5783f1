"""The ``local`` path on a GPU."""

from __future__ import annotations

from halox.paths.base import Job
from halox.paths.launches import MovableChannel, clearing_of, copying
from halox.runtime.gpu.cuda import cupy


class LocalDeviceChannel(MovableChannel):
    """Copies between arrays of one rank on its GPU, in one kernel on the current stream."""

    needs_host = False

    def __init__(self, job: Job, device: int) -> None:
        copies, self.is_movable = copying(job, [*job.pairs()], device)
        self._movable = [copies, *clearing_of(job, device)]
        self._current_stream = cupy().cuda.get_current_stream

    def start(self) -> None:
        """Put the kernel on the current stream."""
        pointer = self._current_stream().ptr
        for launches in self._movable:
            for launch, source, target in launches.stages[0]:
                launch(pointer, source, target)
