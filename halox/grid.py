"""The grid: what a user declares once and calls every step.

This module is the public face of the layers below and holds no algorithm of its own: reductions are methods of
`halox.collectives.grid_reductions`, allocations of `halox.allocation`, gathers, scatters and checkpoints of
`halox.grid_data`; the division is made in `halox.division`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from halox.allocation import GridAllocation
from halox.collectives.grid_reductions import GridReductions
from halox.decomposition import PARITIES, FieldLayout
from halox.division import divide
from halox.errors import FieldError
from halox.exchange.cache import Found, PlanCache
from halox.exchange.draft import Draft
from halox.exchange.halo import halo_draft
from halox.exchange.making import make_plan
from halox.exchange.plan import Plan
from halox.exchange.report import Report
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions, field_spec
from halox.grid_data import GridData
from halox.paths.base import Operation
from halox.runtime.call_guard import Closing, one_thread
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module
from halox.runtime.world import World
from halox.tables import html_facts
from halox.values import as_bool, check_bool

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.decomposition.normalise import HaloLike

Declared = TypeVar("Declared")


class Grid(Closing, GridAllocation, GridReductions, GridData):
    """A regular grid of 1 to 4 axes, divided among the ranks of a communicator.

    Parameters
    ----------
    grid_shape : int or sequence of int
        Global number of cells per axis, halos not counted. Need not divide evenly.
    halo : int, or one per axis, or (low, high) per axis
        Cells of the neighbours that each rank keeps a copy of.
    periodic : bool or one per axis
        Whether the last cell's upper neighbour is the first cell.
    proc_shape : int or sequence of int, optional
        Ranks per axis; 0 or None for axes that halox chooses. By default it chooses all, for the fewest halo bytes.
    blocks : sequence, optional
        Per axis None, or the number of cells of each part, where an even division is not wanted.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; ``MPI.COMM_WORLD`` by default. The grid works on a private duplicate.
    corners : bool
        Whether exchanges fill edges and corners of the halo too.
    device : {"auto", "cpu", "gpu"}
        Where fields live: NumPy or CuPy arrays. "auto" is "gpu" where CuPy and a GPU are found. Ranks of one
        machine take its GPUs in turn; a rank alone takes the current one.
    placement : bool
        Whether blocks are given to ranks so that the largest faces stay within nodes.
    checkerboard : bool
        Whether the grid is to have fields of even or odd cells: blocks then begin at even cells along the last axis,
        and every extent must be even.
    path : str, optional
        The data path of all messages to other ranks, of those that ``halox info`` lists; by default that of
        HALOX_PATH, or else the fastest.
    leave_sms : bool
        Whether a GPU's multiprocessors are to be left to the caller's kernels: where no path is asked for, copy engines
        then move messages of long blocks between fields of the grid, though a kernel might be faster.

    Attributes
    ----------
    rank : int
        Number of this rank.
    size : int
        Number of ranks.
    comm : mpi4py.MPI.Intracomm
        The private duplicate.
    grid_shape : tuple of int
        Cells of the whole grid per axis.
    rank_shape : tuple of int
        Cells that this rank owns.
    padded_shape : tuple of int
        The same with the halo: the shape of a field on this rank.
    proc_shape : tuple of int
        Ranks per axis.
    coords : tuple of int
        Place of this rank in the process grid.
    halo : tuple of (int, int)
        Low and high width per axis.
    periodic : tuple of bool
        Per axis, whether the last cell's upper neighbour is the first cell.
    owned : tuple of slice
        Global indices of this rank's cells.
    device : {"cpu", "gpu"}
        Memory of the fields.
    device_id : int or None
        Number of this rank's GPU.
    xp : module
        ``numpy`` or ``cupy``.

    Raises
    ------
    DecompositionError
        If the grid cannot be divided as asked, or a halo is wider than a block.
    MismatchError
        If ranks give different arguments.
    DeviceError
        If ``device="gpu"`` and there is none, or ranks would differ.
    PathError
        If there is no such path; if it cannot be taken here, the exchanges say so.
    HaloxError
        If ``comm`` is no intracommunicator of mpi4py, or a variable of halox in the environment has no valid value.
    ClosedError
        If MPI has been finalized.
    ExchangeTimeoutError
        If another rank does not come within ``HALOX_TIMEOUT`` seconds.
    MissingPackageError
        If there is no mpi4py or no MPI library.

    Notes
    -----
    Collective over ``comm``, as are `close`, the field factories, the reductions and everything that exchanges.
    All errors are raised on all ranks or on none, but for those of reductions between GPUs (see `sum`). One thread at a
    time: a second one is refused with a `StateError`.

    Examples
    --------
    >>> import halox
    >>> grid = halox.Grid((8, 8), halo=1, periodic=True, device="cpu")
    >>> u = grid.ones("f8")
    >>> grid.exchange(u)
    >>> float(u.sum()) == u.size, grid.sum(u)
    (True, np.float64(64.0))
    >>> grid.close()
    """

    def __init__(
        self,
        grid_shape: int | Sequence[int],
        *,
        halo: HaloLike = 1,
        periodic: bool | Sequence[bool] = False,
        proc_shape: int | Sequence[int | None] | None = None,
        blocks: Sequence[Sequence[int] | None] | None = None,
        comm: MPI.Intracomm | None = None,
        corners: bool = True,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        placement: bool = True,
        checkerboard: bool = False,
        path: str | None = None,
        leave_sms: bool = False,
    ) -> None:
        self._world = world = World(comm, "making a grid")
        self._context = Context(world)
        self._plan_number = 0
        self._read_in_place = {}
        self._all_plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        try:
            division = divide(
                world,
                grid_shape,
                halo=halo,
                periodic=periodic,
                proc_shape=proc_shape,
                blocks=blocks,
                corners=corners,
                device=device,
                placement=placement,
                path=path,
                checkerboard=checkerboard,
                leave_sms=leave_sms,
            )
        except BaseException as error:
            self._context.close_after(error)
            raise
        self._division, self._layout = division, division.layout
        self._decomposition = decomposition = division.decomposition
        self._path, self.corners, self.device_id = path, division.corners, division.device_id
        self.comm: MPI.Intracomm = world.comm
        self.rank: int = world.rank
        self.size: int = world.size
        self.grid_shape: tuple[int, ...] = decomposition.grid_shape
        self.proc_shape: tuple[int, ...] = decomposition.proc_shape
        self.periodic: tuple[bool, ...] = decomposition.periodic
        self.coords: tuple[int, ...] = decomposition.coords_of(self.rank)
        self.halo: tuple[tuple[int, int], ...] = self._layout.spec.halo
        self.padded_shape: tuple[int, ...] = self._layout.padded_shape
        self.rank_shape: tuple[int, ...] = decomposition.rank_shape(self.rank)
        self.owned: tuple[slice, ...] = self._layout.owned
        self._layouts = FieldLayouts(decomposition, self.rank, self.halo, self.device_id)
        self._plans = PlanCache(self._layouts.key, self._layouts.shared_key, self._layouts.owners)
        self._layouts.watch(self._plans)
        self.device: Literal["cpu", "gpu"] = division.device
        self.xp: ModuleType = array_module(self.device_id)
        self._make_reductions(self._context, self.device_id, self._layouts.find)

    # Fields

    def declare(self, array: Declared, **layout: Unpack[FieldOptions]) -> Declared:
        """Tell how the axes of an array that you allocated are to be read.

        Needed where its shape alone leaves that open, where it is staggered or of one parity, or where its halo is not
        the grid's.

        Parameters
        ----------
        array : numpy.ndarray or array on this rank's GPU
        **layout
            ``components``, ``components_after``, ``staggered``, ``halo``, ``parity``, ``offsets`` as of `zeros`.

        Returns
        -------
        array
            The same object.

        Raises
        ------
        FieldError
            If the array does not have the shape that this layout gives on this rank, or is known as a field of the
            other parity.
        DeviceError
            If it is on another device than the grid's fields.

        Notes
        -----
        Local; to be the same on all ranks. Holds for every array of the same address, shape, strides and dtype, such as
        ``array[:]``, as long as the array that owns the memory lives; other views are read by their own shapes. An
        array may be declared again: plans made by `plan` stay as they are, all other calls follow.
        """
        self._world.check_open()
        self._layouts.declare(array, self._layout_of(layout))
        self._reductions.forget()
        return array

    def layout(self, field: object) -> FieldLayout:
        """Return the places of a field's cells in its array and in the grid; local.

        Returns
        -------
        FieldLayout
            Among others ``padded_shape``, the shape of the array; ``interior``, the slices of the owned points in it;
            ``owned``, their global indices; ``origin``, the global index of the array's first point along each axis.
            For a field of one parity the last two count pairs of cells along the last axis.

        Raises
        ------
        FieldError
            If the array does not fit the grid.
        """
        return self._layouts.find(field)

    def interior(self, field: Any) -> Any:
        """Return a view of a field without its halo, the cells this rank owns; local, with the errors of `layout`."""
        return field[self.layout(field).interior]

    def indices(
        self, *, halo: bool = False, parity: Literal["even", "odd"] | None = None
    ) -> tuple[Any, ...]:
        """Return the global indices of this rank's cells, one array an axis, ready to broadcast.

        Parameters
        ----------
        halo : bool
            With those of the halo, which run below 0 and beyond the grid's end.
        parity : {"even", "odd"}, optional
            Those of a field of one parity, with the grid's halo.

        Returns
        -------
        tuple of ndarray
            On the grid's device; the shape is 1 along all axes but one. With a parity, the last array has the
            shape of the field without components.
        """
        with_halo = check_bool("halo", halo, FieldError)
        options: FieldOptions = {} if parity is None else {"parity": parity}
        layout = self._layouts.of(field_spec(options, self._layout.spec))
        cuts = layout.stored if with_halo else layout.owned
        *others, last = self.xp.ix_(*(self.xp.arange(cut.start, cut.stop) for cut in cuts))
        if layout.spec.parity is not None:
            last = 2 * last + (sum(others) + PARITIES.index(layout.spec.parity)) % 2
        return (*others, last)

    def dataarray(self, field: object, **options: Any) -> Any:
        """Return this rank's cells as an `xarray.DataArray`; see `halox.xarray.dataarray`."""
        from halox.xarray import dataarray

        return dataarray(self, field, **options)

    @one_thread
    def from_dataarray(self, array: object, *, dims: Sequence[str] | None = None) -> Any:
        """Make a field of an `xarray.DataArray`; see `halox.xarray.from_dataarray`. Collective."""
        self._world.begin("from_dataarray")
        labelled = self._world.guarded(lambda: import_module("halox.xarray"), "from_dataarray")
        return labelled.from_dataarray(self, array, dims=dims)

    # Exchanges

    def exchange(self, *fields: object, corners: bool | None = None) -> None:
        """Fill the halos of fields with the neighbours' cells.

        Parameters
        ----------
        *fields : array
            Made by this grid, or arrays of its padded shape on its device; any dtypes. Component axes are found from
            the shape; staggered arrays, and those with another halo, need `declare`. All travel together, in one
            message a neighbour.
        corners : bool, optional
            With edges and corners; the grid's setting by default. A field with ``offsets`` has none.

        Raises
        ------
        FieldError
            If an array does not fit the grid: shape, dtype, read-only.
        DeviceError
            If it is on another device than the grid's fields.
        MismatchError
            If the ranks' fields do not match, or they have made different calls.
        PathError
            If the path asked for (``path`` of the grid, ``HALOX_PATH``) cannot be taken; says why.
        StateError
            If another thread is inside a collective call of this grid; if CuPy's current stream is being captured, and
            a plan has to be made or its path cannot be captured.
        ClosedError
            If the grid is closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective among neighbours; the first call with new fields of the grid, or with arrays of a new layout, dtype
        or strides, makes a plan and is collective over all ranks. New is also a NumPy array whose shape, dtype or
        permission to be written has changed, and one that was declared otherwise since. The last 512 plans are kept.
        Ordered with CuPy's current stream on a GPU. Halo cells outside the grid are left alone.
        """
        key = self.corners if corners is None else as_bool(corners)
        found = self._plans.find(key, fields)
        if found is None:
            found = self._cached("copy", fields, corners, key)
        plan, bound = found
        plan.__call__(bound)  # plan() takes longer to find it

    def accumulate(self, *fields: object, corners: bool | None = None) -> None:
        """Add halo values into the cells of their owners, and set those halos to zero: the adjoint of `exchange`.

        Parameters and errors as of `exchange`; values are added in an order that does not change between runs.

        Raises
        ------
        FieldError
            Also if a field is not of numbers, or two of them share memory, whose halos would count twice.
        """
        key = ("add", self.corners if corners is None else as_bool(corners))
        found = self._plans.find(key, fields)
        if found is None:
            found = self._cached("add", fields, corners, key)
        plan, bound = found
        plan.__call__(bound)

    @one_thread
    def plan(self, *fields: object, corners: bool | None = None, path: str | None = None) -> Plan:
        """Make the persistent form of an exchange of these fields.

        Parameters
        ----------
        *fields, corners
            The same as for `exchange`.
        path : str, optional
            The same as for `Grid`, for this plan.

        Returns
        -------
        Plan
            ``plan()`` exchanges; ``plan.start()`` and ``plan.finish()`` allow interior work in between.

        Notes
        -----
        Collective. Errors as of `exchange`.
        """
        self._world.begin("plan")
        return self._plan("copy", fields, corners, keep=True, path=path)

    def explain(self, *fields: object) -> Report | str:
        """Tell how the grid is divided; given fields, tell how their exchange travels.

        Returns
        -------
        str or Report
            Print either. With fields it is collective the first time, as `exchange` is.
        """
        if not fields:
            return self._division.text(self.rank, len(set(self._world.nodes)))
        found = self._plans.find(self.corners, fields)
        if found is None:
            found = self._cached("copy", fields, None, self.corners)
        return found[0].explain()

    @one_thread
    def _cached(
        self, operation: Operation, fields: tuple[object, ...], corners: bool | None, key: Hashable
    ) -> Found:
        self._world.begin("exchange" if operation == "copy" else "accumulate")
        plan = self._plan(operation, fields, corners, keep=False)
        self._plans.add(key, fields, plan)
        return plan, None

    def _plan(
        self,
        operation: Operation,
        fields: tuple[object, ...],
        corners: bool | None,
        *,
        keep: bool,
        path: str | None = None,
    ) -> Plan:
        def draft() -> Draft:
            with_corners = (
                self.corners if corners is None else check_bool("corners", corners, FieldError)
            )
            if not fields:
                raise FieldError("no field given; pass one or more arrays of this grid")
            read = [self._layouts.read(field) for field in fields]
            return halo_draft(
                fields,
                read,
                operation=operation,
                corners=with_corners,
                numbers=tuple([self._layouts.number(found) for found, _ in read]),
                floats=not keep and not any(map(self._layouts.is_own, fields)),
            )

        call = "start of a plan" if keep else "exchange" if operation == "copy" else "accumulate"
        return self._make_plan(draft, keep=keep, path=path, call=call)

    @one_thread
    def _make_plan(
        self, draft: Callable[[], Draft], *, keep: bool, path: str | None = None, call: str
    ) -> Plan:
        """Make a plan on this grid's ranks that ends with the grid; `Transpose` makes its own by this too."""
        self._world.check_open()
        self._plans.sweep()
        self._plan_number += 1
        path = self._path if path is None else path
        leave_sms = self._division.leave_sms
        plan = make_plan(self._context, draft, keep=keep, path=path, leave_sms=leave_sms, call=call)
        self._all_plans.add(plan)
        return plan

    # Life

    @one_thread
    def close(self) -> None:
        """Free plans, staging memory and communicators.

        Collective, and harmless when repeated. Fields stay valid; calls raise `ClosedError` after it, but for
        `interior`, `layout` and `indices`.
        """
        if not self._world.closed:
            self._plans.clear()
            for plan in list(self._all_plans):
                plan.close()
            self._reductions.close()
            self._context.close()

    def __repr__(self) -> str:
        """Return the grid's shape and division."""
        return (
            f"<halox.Grid {self.grid_shape} on {self.proc_shape} ranks, halo {self.halo}, "
            f"periodic {self.periodic}, {self.device}{', closed' if self._world.closed else ''}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        facts = self._division.facts(self.rank, self.size)
        return html_facts(f"halox.Grid{' (closed)' if self._world.closed else ''}", facts)
