"""Cartesian communicators of MPI: their topology determines the process grid and the periodicity of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
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

    def check_periodic(self, name: str, periodic: tuple[bool, ...]) -> None:
        """Raise `DecompositionError` if an argument makes other axes periodic than the communicator."""
        if periodic != self.periods:
            raise _contradiction(name, f"periodic axes {periodic}", f"periods={self.periods}")


def cartesian_of(mpi: ModuleType, comm: MPI.Intracomm | None) -> Cartesian | None:
    """Return the topology of a Cartesian communicator, None for all other communicators; local."""
    if not isinstance(comm, mpi.Cartcomm):
        return None
    dims, periods, _ = comm.Get_topo()
    return Cartesian(tuple(dims), tuple(map(bool, periods)))


def with_cartesian(
    options: GridOptions, cartesian: Cartesian, grid_shape: int | Sequence[int]
) -> GridOptions:
    """Return the options of a grid with the process grid and the periodicity of its Cartesian communicator.

    MPI numbers the ranks of a Cartesian communicator in C order of their coordinates, also if it has reordered them.
    With blocks in rank order each rank therefore has its coordinates of the communicator.

    Raises `DecompositionError` if the communicator has another number of axes than the grid, or contradicts
    ``periodic``, ``proc_shape`` or ``blocks``.
    """
    dims, periods = cartesian
    shape = normalise_grid_shape(grid_shape)
    if len(dims) != len(shape):
        raise DecompositionError(
            f"comm: expected a Cartesian communicator of {len(shape)} axes, as grid_shape={shape} has them, got one of "
            f"{len(dims)} with dims={dims}; give each axis of the grid a number of ranks, 1 if it is not divided, or "
            f"{_PLAIN}"
        )
    if options.periodic is not None:
        cartesian.check_periodic("periodic", normalise_periodic(options.periodic, len(shape)))
    given = normalise_proc_shape(options.proc_shape, len(shape)) or ()
    if any(parts not in (0, ranks) for parts, ranks in zip(given, dims, strict=False)):
        raise _contradiction("proc_shape", given, f"dims={dims}")
    for axis, cut in enumerate(normalise_blocks(options.blocks, shape)):
        if cut is not None and len(cut) != dims[axis]:
            raise _contradiction(f"blocks[{axis}]", f"{len(cut)} blocks", f"dims={dims}")
    return replace(options, periodic=periods, proc_shape=dims)


_PLAIN = "give comm=mpi4py.MPI.Intracomm(comm) to ignore the topology"


def _contradiction(name: str, given: object, theirs: str) -> DecompositionError:
    return DecompositionError(
        f"{name}: got {given}, but comm is a Cartesian communicator with {theirs}; leave {name.partition('[')[0]} out, "
        f"or {_PLAIN}"
    )
