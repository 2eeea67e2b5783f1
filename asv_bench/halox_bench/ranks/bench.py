"""The ranks of a communicator in a benchmark: options, GPUs, clock, NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from halox.errors import PathError
from halox.grid import Grid
from halox.paths import PATHS
from halox_bench.common.rig import Rig
from halox_bench.common.rows import PATH, SELECTED, Row
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from halox_bench.ranks.nccl import Nccl, nccl_between


@dataclass(frozen=True)
class Options:
    """Selection of methods and length of the measurement.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    named : tuple of str or None
        Paths or algorithms to name one by one; None means all.
    baselines : tuple of str or None
        Names of hand-written baselines; None means all.
    graph : bool
        Whether calls are captured in CUDA graphs as well.
    no_gpu_aware : str
        Reason why MPI does not get device memory; empty if it does.
    busy : bool
        Whether to measure also while other work holds shares of the GPUs; between two ranks only.
    """

    device: str
    named: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    graph: bool = True
    timing: Timing = field(default_factory=Timing)
    no_gpu_aware: str = "it is not known whether this MPI takes device memory"
    busy: bool = False


class Bench(ABC):
    """Measures the cases of a kind of benchmark.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm or None
        The ranks that measure together; None for this process alone.
    choice : str
        Kind of the methods that the command line can name.
    """

    choice: ClassVar[str] = PATH
    comm: Any = None

    def suited(self, cases: Sequence[Any]) -> Sequence[Any]:
        """Return the cases for this number of ranks: by default all."""
        return cases

    @abstractmethod
    def measure(self, case: Any) -> list[Row]:
        """Measure one case; the rows are the same on all ranks."""

    @abstractmethod
    def heading(self) -> str:
        """Return the lines above the table."""

    def blank(self, case: Any, kind: str, name: str, **details: Any) -> Row:
        """Return a method's row without a time."""
        return Row(case.name, kind, name, details={**case.details, **details})

    def left_out(self, case: Any, why: str) -> list[Row]:
        """Return the row of a case that is not measured."""
        return [self.blank(case, SELECTED, SELECTED).with_(error=f"left out: {why}")]


class RanksBench(Bench):
    """The ranks of a communicator, with everything that the cases share; all methods are collective.

    Parameters
    ----------
    stage : Stage, optional
        By default for the GPU that a grid takes on this rank.

    Attributes
    ----------
    shared_gpu : bool
        Whether two of the ranks use one GPU.
    """

    def __init__(self, comm: Any, options: Options, stage: Stage | None = None) -> None:
        self.comm, self.options = comm, options
        if stage is None:
            device: Any = options.device
            with Grid(comm.size, halo=0, comm=comm, device=device) as grid:
                stage = Stage(grid.device_id)
        self.stage = stage
        self.clock = RanksClock(comm, stage, options.timing)
        self.shared_gpu = len(set(comm.allgather(self._place()))) < comm.size

    def names(self) -> tuple[str, ...]:
        """Return the methods to name one by one."""
        return self.known() if self.options.named is None else self.options.named

    def known(self) -> tuple[str, ...]:
        """Return all methods that can be named: by default paths to other ranks for the arrays' memory."""
        memory: Literal["host", "gpu"] = "host" if self.stage.device is None else "gpu"
        return tuple(
            name for name, path in PATHS.items() if path.moves(memory) and not path.to_self
        )

    def _place(self) -> Any:
        """Return the identity of this rank's processor."""
        if self.stage.device is None:
            return self.comm.rank
        properties = self.stage.xp.cuda.runtime.getDeviceProperties(self.stage.device)
        return bytes(properties["uuid"])

    def nccl(self) -> Nccl:
        """Return NCCL between these ranks; `PathError` on all ranks if it is missing."""
        return nccl_between(self.comm, shared_gpu=self.shared_gpu)

    def need_gpu_aware(self) -> None:
        """Raise `PathError` if MPI does not get device memory."""
        if self.options.no_gpu_aware:
            raise PathError(self.options.no_gpu_aware)

    def peer_bytes_per_us(self) -> float | None:
        """Return the speed of a large copy to another GPU, None if the first rank sees only one."""
        speed = None
        if self.comm.rank == 0:
            with suppress(Exception):
                speed = Rig(self.stage.device or 0).link_bytes_per_us("peer")
        return self.comm.bcast(speed)  # type: ignore[no-any-return]

    def free(self) -> None:
        """Free unused device memory of CuPy's pool."""
        if self.stage.device is not None:
            self.stage.xp.get_default_memory_pool().free_all_blocks()
