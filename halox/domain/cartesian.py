"""Cartesian communicators of MPI: their topology determines the process grid and the periodicity of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from halox.decomposition.normalise import (
    normalise_blocks,
    normalise_grid_shape,
    normalise_periodic,
    normalise_proc_shape,
)
from halox.domain.options import GridOptions
from halox.errors import DecompositionError

if TYPE_CHECKING:
    from mpi4py import MPI


class Cartesian(NamedTuple):
    """Ranks and periodicity per axis of a Cartesian communicator."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @classmethod
    def of(cls, comm: MPI.Cartcomm) -> Cartesian:
        dims, periods, _ = comm.Get_topo()
        return cls(tuple(dims), tuple(map(bool, periods)))

    def with_options(self, options: GridOptions, grid_shape: int | Sequence[int]) -> GridOptions:
        """Return the options of a grid with the process grid and the periodicity of the communicator.

        MPI numbers the ranks of a Cartesian communicator in C order of their coordinates, also if it has reordered
        them. With blocks in rank order each rank therefore has its coordinates of the communicator.

        Raises `DecompositionError` if the communicator has another number of axes than the grid, or contradicts
        ``periodic``, ``proc_shape`` or ``blocks``.
        """
        dims, shape = self.dims, normalise_grid_shape(grid_shape)
        if len(dims) != len(shape):
            raise DecompositionError(
                f"comm: expected a Cartesian communicator of {len(shape)} axes, as grid_shape={shape} has them, got "
                f"one of {len(dims)} with dims={dims}; give each axis of the grid a number of ranks, 1 if it is not "
                f"divided, or {_PLAIN}"
            )
        if options["periodic"] is not None:
            self.check_periodic("periodic", normalise_periodic(options["periodic"], len(shape)))
        given = normalise_proc_shape(options["proc_shape"], len(shape)) or ()
        if any(parts not in (0, ranks) for parts, ranks in zip(given, dims, strict=False)):
            raise _contradiction("proc_shape", given, f"dims={dims}")
        for axis, cut in enumerate(normalise_blocks(options["blocks"], shape)):
            if cut is not None and len(cut) != dims[axis]:
                raise _contradiction(f"blocks[{axis}]", f"{len(cut)} blocks", f"dims={dims}")
        return {**options, "periodic": self.periods, "proc_shape": dims}

    def check_periodic(self, name: str, periodic: tuple[bool, ...]) -> None:
        """Raise `DecompositionError` if an argument makes other axes periodic than the communicator."""
        if periodic != self.periods:
            raise _contradiction(name, f"periodic axes {periodic}", f"periods={self.periods}")


_PLAIN = "give comm=mpi4py.MPI.Intracomm(comm) to ignore the topology"


def _contradiction(name: str, given: object, theirs: str) -> DecompositionError:
    return DecompositionError(
        f"{name}: got {given}, but comm is a Cartesian communicator with {theirs}; leave {name.partition('[')[0]} out, "
        f"or {_PLAIN}"
    )
