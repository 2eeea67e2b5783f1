"""The ranks of a communicator, as what is measured on several of them shares it."""

from __future__ import annotations

from typing import Any

from halox.cli.bench.ranks_clock import RanksClock, Stage, Timing
from halox.errors import DeviceError
from halox.grid import Grid
from halox.runtime.gpu.cuda import why_no_gpu


class RanksBench:
    """Where the ranks of a communicator work, their clock, and NCCL between them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    device : {"cpu", "gpu"}
    timing : Timing

    Attributes
    ----------
    stage : Stage
    clock : RanksClock
    shared_gpu : bool
        Whether two of the ranks use one GPU.

    Notes
    -----
    Everything here is collective.
    """

    def __init__(self, comm: Any, device: Any, timing: Timing) -> None:
        self.comm = comm
        with Grid(comm.size, halo=0, comm=comm, device=device) as grid:
            self.stage = Stage(grid.device_id)
        self.clock = RanksClock(comm, self.stage, timing)
        self.shared_gpu = len(set(comm.allgather(self._place()))) < comm.size

    def _place(self) -> Any:
        """Return what tells this rank's GPU from those of others."""
        if self.stage.device is None:
            return self.comm.rank
        properties = self.stage.xp.cuda.runtime.getDeviceProperties(self.stage.device)
        return bytes(properties["uuid"])

    def nccl(self) -> Any:
        """Return NCCL between these ranks.

        Raises
        ------
        PathError
            On all ranks, if there is none.
        """
        from halox.cli.bench import exchange_rivals_gpu as gpu

        return gpu.nccl_between(self.comm, shared_gpu=self.shared_gpu)

    def free(self) -> None:
        """Give device memory that nothing uses any more back."""
        if self.stage.device is not None:
            self.stage.xp.get_default_memory_pool().free_all_blocks()


def device_of(asked: str, comm: Any) -> str:
    """Return "cpu" or "gpu", the same on all ranks; collective.

    Parameters
    ----------
    asked : {"auto", "cpu", "gpu"}

    Raises
    ------
    DeviceError
        On all ranks, if GPUs are asked for and any rank has none.
    """
    whys = comm.allgather(None if asked == "cpu" else why_no_gpu())
    why = next(filter(None, whys), None)
    if asked == "gpu" and why is not None:
        raise DeviceError(f"--device gpu: no GPU can be used: {why}")
    return "gpu" if asked != "cpu" and why is None else "cpu"
