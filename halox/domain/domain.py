"""`Domain`: a grid divided among ranks, with the memory and layouts of its fields, but without communication plans."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from halox.decomposition import Decomposition, FieldLayout
from halox.domain.allocation import Allocation
from halox.domain.division import Division, divide
from halox.domain.layouts import FieldLayouts
from halox.domain.options import GridOptions
from halox.errors import HaloxError
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module
from halox.runtime.world import World
from halox.values import shown

if TYPE_CHECKING:
    from halox.domain.dimension_names import Labels


class Dependent(Protocol):
    """Object that uses memory of a domain, such as a plan."""

    def close(self) -> None:
        """Stop using the memory; local."""


class HasDomain(Protocol):
    """A grid, seen from modules below it."""

    @property
    def domain(self) -> Domain:
        """The division of the grid, and its ranks."""


def domain_of(grid: object, remedy: str = "", name: str = "grid") -> Domain:
    """Return the domain of a grid; raises `HaloxError` for anything else."""
    domain = getattr(grid, "domain", None)
    if not isinstance(domain, Domain):
        raise HaloxError(f"{name} must be a halox.Grid, got {shown(grid)}{remedy}")
    return domain


class Domain:
    """A grid divided among the ranks of a communicator: the base of grids, and of the stages of an FFT.

    Collective over the communicator; raises the errors of `halox.Grid`.

    Attributes
    ----------
    options : GridOptions
        The options as given.
    world : World
        The ranks.
    context : Context
        Shared memory and GPUs of the ranks.
    division : Division
        Results of the division, the same on all ranks except for this rank's layout.
    decomposition : Decomposition
        Cuts of the grid.
    plain : FieldLayout
        Layout of a field without options.
    layouts : FieldLayouts
        Layouts of all known fields.
    allocation : Allocation
        Allocates fields.
    grid_shape, rank_shape : tuple of int
        Cells of the whole grid and of this rank, per axis.
    device_id : int or None
        Number of this rank's GPU; None on the host.
    xp : module
        ``numpy`` or ``cupy``.
    dependents : WeakSet
        Objects that are closed before the memory of the domain is freed.
    outputs : list
        Open outputs, which are closed before: collectively, and in this order.
    plans_made : int
        Plans made for exchanges of the grid. The number stays the same in a loop whose exchanges reuse their plans.
    """

    def __init__(self, grid_shape: int | Sequence[int], options: GridOptions) -> None:
        self.options, comm = options, options["comm"]
        self.world = World(comm, "making a grid", "grid")
        self.context = Context(self.world)
        try:
            cartesian = None
            if isinstance(comm, self.world.mpi.Cartcomm):
                from halox.domain.cartesian import Cartesian

                cartesian = Cartesian.of(comm)
            self.division: Division = divide(self.world, grid_shape, options, cartesian)
        except BaseException as error:
            self.context.close_after(error)
            raise
        self.decomposition: Decomposition = self.division.decomposition
        if self.division.balance is not None:
            self.options |= {"weights": None, "blocks": self.division.balance.blocks}
        self.plain: FieldLayout = self.division.layout
        self.device_id = self.division.device_id
        self.xp: ModuleType = array_module(self.device_id)
        self.grid_shape: tuple[int, ...] = self.decomposition.grid_shape
        self.rank_shape: tuple[int, ...] = self.decomposition.rank_shape(self.world.rank)
        self.layouts = FieldLayouts(
            self.decomposition,
            self.world.rank,
            self.plain.spec.halo,
            self.device_id,
            self.plain.spec.boundary,
        )
        self.allocation = Allocation(self.world, self.context, self.layouts, self.device_id)
        self.dependents: weakref.WeakSet[Dependent] = weakref.WeakSet()
        self.outputs: list[Dependent] = []
        self.plans_made = 0

    @cached_property
    def labels(self) -> Labels:
        """Names of the axes, and coordinates along them: the defaults of calls with ``dims`` and ``coords``."""
        from halox.domain.dimension_names import AXES, Labels

        return self.division.labels or Labels(self.decomposition, AXES[: len(self.grid_shape)])

    def close_dependents(self) -> None:
        """Close the objects that use the domain's memory; local, unless there are open outputs."""
        for output in list(self.outputs):
            output.close()
        for dependent in list(self.dependents):
            dependent.close()

    def close(self) -> None:
        """Close the dependents, and free memory and communicators; collective, and harmless when repeated."""
        with self.world.guard:
            self.close_dependents()
            self.context.close()
