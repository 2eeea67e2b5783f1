"""The ranks of a communicator as all benchmarks share them: options, GPUs, clock, NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from halox.errors import PathError
from halox.grid import Grid
from halox.paths import PATHS
from halox_bench.common.rig import Rig
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from halox_bench.ranks.nccl import Nccl, nccl_between

Row = TypeVar("Row", bound=Any)


@dataclass(frozen=True)
class Options:
    """Selection of what is measured.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    named : tuple of str or None
        Paths or algorithms to be named one by one; None means all.
    baselines : tuple of str or None
        Names of what users write; None means all.
    graph : bool
        Whether also to capture calls in CUDA graphs.
    no_gpu_aware : str
        Why MPI is not to be given device memory; empty if it may be.
    busy : bool
        Whether also to measure with shares of the GPUs held by other work; ping-pong only.
    """

    device: str
    named: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    graph: bool = True
    timing: Timing = field(default_factory=Timing)
    no_gpu_aware: str = "it is not known whether this MPI takes device memory"
    busy: bool = False


class RanksBench(ABC, Generic[Row]):
    """The ranks of a communicator with what all cases share.

    Parameters
    ----------
    stage : Stage, optional
        By default of the GPU that a grid takes on this rank.

    Attributes
    ----------
    shared_gpu : bool
        Whether two of the ranks use one GPU.
    kind : str
        Name of the benchmark: the package with its ``rows`` and ``plots``.
    choice : str
        What halox chooses: ``"path"`` or ``"algorithm"``.

    Notes
    -----
    Everything here is collective.
    """

    kind: ClassVar[str]
    choice: ClassVar[str] = "path"

    def __init__(self, comm: Any, options: Options, stage: Stage | None = None) -> None:
        self.comm, self.options = comm, options
        if stage is None:
            device: Any = options.device
            with Grid(comm.size, halo=0, comm=comm, device=device) as grid:
                stage = Stage(grid.device_id)
        self.stage = stage
        self.clock = RanksClock(comm, stage, options.timing)
        self.shared_gpu = len(set(comm.allgather(self._place()))) < comm.size

    def suited(self, cases: Sequence[Any]) -> Sequence[Any]:
        """Return the cases that are for so many ranks: here all."""
        return cases

    @abstractmethod
    def measure(self, case: Any) -> list[Row]:
        """Measure one case; the rows are the same on all ranks."""

    @abstractmethod
    def heading(self) -> str:
        """Return what stands above the table."""

    def header(self) -> str:
        """Return the table's head."""
        return str(self._module("rows").header())

    def line(self, row: Row, selected_us: float | None) -> str:
        """Return a row's line, given the time of what halox selects in the same mode."""
        return str(self._module("rows").line(row, selected_us))

    def draw(self, rows: Sequence[Row], folder: Path) -> list[Path]:
        """Draw the figures and return the files."""
        return list(self._module("plots").draw(rows, folder))

    def _module(self, name: str) -> Any:
        return import_module(f"halox_bench.{self.kind}.{name}")

    def names(self) -> tuple[str, ...]:
        """Return what is to be named one by one."""
        return self.known() if self.options.named is None else self.options.named

    def known(self) -> tuple[str, ...]:
        """Return all that can be named one by one: here paths to other ranks, for the arrays' memory."""
        memory: Literal["host", "gpu"] = "host" if self.stage.device is None else "gpu"
        return tuple(
            name for name, path in PATHS.items() if path.moves(memory) and not path.to_self
        )

    def _place(self) -> Any:
        """Return what tells this rank's GPU from those of others."""
        if self.stage.device is None:
            return self.comm.rank
        properties = self.stage.xp.cuda.runtime.getDeviceProperties(self.stage.device)
        return bytes(properties["uuid"])

    def nccl(self) -> Nccl:
        """Return NCCL between these ranks.

        Raises
        ------
        PathError
            On all ranks, if there is none.
        """
        return nccl_between(self.comm, shared_gpu=self.shared_gpu)

    def need_gpu_aware(self) -> None:
        """Refuse to go on where MPI is not to be given device memory.

        Raises
        ------
        PathError
        """
        if self.options.no_gpu_aware:
            raise PathError(self.options.no_gpu_aware)

    def peer_bytes_per_us(self) -> float | None:
        """Return the speed of a large copy to another GPU, if the first rank sees one."""
        speed = None
        if self.comm.rank == 0:
            with suppress(Exception):
                speed = Rig(self.stage.device or 0).link_bytes_per_us("peer")
        return self.comm.bcast(speed)  # type: ignore[no-any-return]

    def free(self) -> None:
        """Give device memory that nothing uses any more back."""
        if self.stage.device is not None:
            self.stage.xp.get_default_memory_pool().free_all_blocks()
