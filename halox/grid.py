"""The grid: what a user declares once and calls every step.

This module is the public face of the layers below and holds no algorithm of its own; it is longer than others
because every public method's docstring stands here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from halox.collectives import local
from halox.collectives.device.device_numbers import Cells, DeviceNumbers
from halox.collectives.operations import find_operation
from halox.collectives.reductions import (
    check_numeric,
    check_ordered,
    check_out,
    reduce_array,
    reduce_scalar,
)
from halox.decomposition import (
    Decomposition,
    FieldLayout,
    FieldSpec,
    decompose,
    normalise_halo,
)
from halox.errors import DecompositionError, FieldError, HaloxError
from halox.exchange.cache import PlanCache
from halox.exchange.draft import Draft
from halox.exchange.halo import check_apart, halo_draft
from halox.exchange.making import make_plan
from halox.exchange.plan import Plan
from halox.exchange.report import Report
from halox.exchange.selection import reads_in_place, wished_path
from halox.exchange.surroundings import Surroundings
from halox.field_layouts import FieldLayouts
from halox.field_options import check_extents, field_spec, fixed_dtype
from halox.gathering import gather
from halox.notebook import html_facts
from halox.paths.base import Operation
from halox.runtime.arrays import as_ndarray, describe
from halox.runtime.call_guard import one_thread
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import (
    allocate,
    array_module,
    as_device_array,
    choose_device,
    fill,
    fill_value,
    to_host,
)
from halox.runtime.world import World
from halox.values import as_bool, check_bool, shortened, shown

if TYPE_CHECKING:
    from mpi4py import MPI

_ALLOCATION = "an allocation"


class Grid:
    """A regular grid of 1 to 4 axes, divided among the ranks of a communicator.

    Parameters
    ----------
    grid_shape : int or sequence of int
        Global number of cells per axis, halos not counted. Need not divide evenly.
    halo : int, or one per axis, or (low, high) per axis
        Cells of the neighbours that each rank keeps a copy of.
    periodic : bool or one per axis
        Whether the last cell's upper neighbour is the first cell.
    proc_shape : sequence of int, optional
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
    path : {"peer", "ipc", "staged", "cuda_aware", "host"}, optional
        The data path of all messages to other ranks; by default that of HALOX_PATH, or else the fastest.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are.
    comm : mpi4py.MPI.Intracomm
        The private duplicate.
    grid_shape, rank_shape, padded_shape : tuple of int
        Cells of the whole grid; owned by this rank; with halo.
    proc_shape, coords : tuple of int
        Ranks per axis, and this rank's place among them.
    halo : tuple of (int, int)
        Low and high width per axis.
    periodic : tuple of bool
    owned : tuple of slice
        Global indices of this rank's cells.
    device : {"cpu", "gpu"}
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
    MissingPackageError
        If there is no mpi4py or no MPI library.

    Notes
    -----
    Collective over ``comm``, as are `close`, the field factories, the reductions and everything that exchanges.
    All errors are raised on all ranks or on none. One thread at a time: a second one is refused with a `StateError`.

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
        halo: Any = 1,
        periodic: Any = False,
        proc_shape: Any = None,
        blocks: Sequence[Sequence[int] | None] | None = None,
        comm: MPI.Intracomm | None = None,
        corners: bool = True,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        placement: bool = True,
        path: str | None = None,
    ) -> None:
        self._world = world = World(comm, "making a grid")
        self._surroundings = Surroundings(world)
        self._plan_number = self._made = 0
        self._all_plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        try:

            def build() -> tuple[Decomposition, FieldLayout, int | None, bool]:
                fill_corners = check_bool("corners", corners, DecompositionError)
                by_node = check_bool("placement", placement, DecompositionError)
                decomposition = decompose(
                    grid_shape,
                    world.size,
                    halo=halo,
                    periodic=periodic,
                    proc_shape=proc_shape,
                    blocks=blocks,
                    nodes=world.nodes if by_node else None,
                )
                spec = FieldSpec(normalise_halo(halo, decomposition.ndim))
                layout = FieldLayout(decomposition, world.rank, spec)
                layout.check_widths()
                wished_path(path)
                return decomposition, layout, choose_device(device, world.turn), fill_corners

            self._decomposition, self._layout, self.device_id, self.corners = world.guarded(
                build, "the making of a grid"
            )
            self._path = path
            self._compare_arguments()
        except HaloxError as error:
            self._surroundings.close_after(error)
            raise
        self.comm: MPI.Intracomm = world.comm
        self.rank: int = world.rank
        self.size: int = world.size
        self.grid_shape: tuple[int, ...] = self._decomposition.grid_shape
        self.proc_shape: tuple[int, ...] = self._decomposition.proc_shape
        self.periodic: tuple[bool, ...] = self._decomposition.periodic
        self.coords: tuple[int, ...] = self._decomposition.coords_of(self.rank)
        self.halo: tuple[tuple[int, int], ...] = self._layout.spec.halo
        self.padded_shape: tuple[int, ...] = self._layout.padded_shape
        self.rank_shape: tuple[int, ...] = self._decomposition.rank_shape(self.rank)
        self.owned: tuple[slice, ...] = self._layout.owned
        self._layouts = FieldLayouts(self._decomposition, self.rank, self.halo, self.device_id)
        self._plans = PlanCache(self._layouts.key, self._layouts.shared_key)
        self._layouts.watch(self._plans)
        self.device: Literal["cpu", "gpu"] = "cpu" if self.device_id is None else "gpu"
        self.xp: Any = array_module(self.device_id)
        self._numbers: DeviceNumbers | None = None
        if self.device_id is not None:
            self._numbers = DeviceNumbers(self._surroundings, self.device_id)

    def _compare_arguments(self) -> None:
        """Raise on all ranks if their grids differ; names the argument."""
        world, decomposition = self._world, self._decomposition
        mine = {
            "grid_shape": decomposition.grid_shape,
            "halo": self._layout.spec.halo,
            "periodic": decomposition.periodic,
            "proc_shape": decomposition.proc_shape,
            "blocks": tuple(axis.bounds for axis in decomposition.axes),
            "corners": self.corners,
            "device": "cpu" if self.device_id is None else "gpu",
            "placement": decomposition.placement.coords,
            "path": self._path,
        }
        remedies = {"device": 'say device="cpu" or device="gpu"'}
        world.compare(mine, "the making of a grid", remedies=remedies)

    # Fields

    def zeros(self, dtype: Any = "f8", **layout: Any) -> Any:
        """Allocate a field of zeros, halo included: bytes of zero, whatever the dtype.

        Parameters
        ----------
        dtype : dtype
            Any dtype of fixed size.
        components : int or sequence of int
            Extents of axes in front of the grid axes.
        components_after : int or sequence of int
            Extents of axes behind the grid axes.
        staggered : int or sequence of int
            Grid axes along which the field has one more point than cells.
        halo : int, or one per axis, or (low, high) per axis
            Widths of this field, the grid's by default.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape ``components + padded_shape + components_after``. On a CPU with several ranks on the node it lies
            in memory that they share, so that neighbours can read halos in place; unless it is large and cut along
            its innermost axis, where packing from private memory (in huge pages) is faster.

        Raises
        ------
        FieldError, DecompositionError
            On all ranks, if the dtype or the layout is impossible.
        HaloxError
            On all ranks, if one of them has too little memory.

        Notes
        -----
        Collective. The array stays valid after `close`.
        """
        return self._new(dtype, layout)

    def ones(self, dtype: Any = "f8", **layout: Any) -> Any:
        """Allocate a field of ones, as `numpy.ones` has them for any dtype; see `zeros`."""
        return self._new(dtype, layout, "ones", 1)

    def full(self, value: Any, dtype: Any = "f8", **layout: Any) -> Any:
        """Allocate a field filled with ``value``; see `zeros`.

        Parameters
        ----------
        value : scalar or array
            Converted to the dtype as by `numpy.full`, but for integers, which must be in its range. An array is
            broadcast to the field's shape on each rank, halo included.
        dtype, **layout
            As of `zeros`.

        Raises
        ------
        FieldError
            On all ranks, also if the dtype cannot hold the value, or its shape does not broadcast.
        """
        return self._new(dtype, layout, "full", value)

    def empty(self, dtype: Any = "f8", **layout: Any) -> Any:
        """Allocate a field with undefined contents; see `zeros`."""
        return self._new(dtype, layout, "empty")

    def zeros_like(self, field: Any, dtype: Any = None) -> Any:
        """Allocate a field of zeros with the layout of another one; see `zeros`.

        Parameters
        ----------
        field : array
            A field of this grid, whose components, staggering and halo the new one gets.
        dtype : dtype, optional
            That of ``field`` by default.

        Raises
        ------
        FieldError
            On all ranks, also if ``field`` is no field of the grid.
        """
        return self._new(dtype, field, "zeros")

    def ones_like(self, field: Any, dtype: Any = None) -> Any:
        """Allocate a field of ones with the layout of another one; see `zeros_like`."""
        return self._new(dtype, field, "ones", 1)

    def full_like(self, field: Any, value: Any, dtype: Any = None) -> Any:
        """Allocate a field filled with ``value``, as of `full`, with the layout of another one; see `zeros_like`."""
        return self._new(dtype, field, "full", value)

    def empty_like(self, field: Any, dtype: Any = None) -> Any:
        """Allocate a field with undefined contents and the layout of another one; see `zeros_like`."""
        return self._new(dtype, field, "empty")

    def declare(self, array: Any, **layout: Any) -> Any:
        """Tell how the axes of an array that you allocated are to be read.

        Needed where its shape alone leaves that open, where it is staggered, or where its halo is not the grid's.

        Parameters
        ----------
        array : numpy.ndarray or array on this rank's GPU
        **layout
            ``components``, ``components_after``, ``staggered``, ``halo`` as of `zeros`.

        Returns
        -------
        array
            The same object.

        Raises
        ------
        FieldError
            If the array does not have the shape that this layout gives on this rank.
        DeviceError
            If it is on another device than the grid's fields.

        Notes
        -----
        Local; to be the same on all ranks. Holds for every array of the same address, shape, strides and dtype, such as
        ``array[:]``, as long as the array that owns the memory lives; other views are read by their own shapes. An
        array may be declared again: plans made by `plan` stay as they are, all other calls follow.
        """
        self._world.check_open()
        self._layouts.declare(array, self._field_layout(layout))
        if self._numbers is not None:
            self._numbers.forget()
        return array

    def layout(self, field: Any) -> FieldLayout:
        """Return where the cells of a field lie: its shape, interior, owned points, regions; local."""
        return self._layouts.find(field)

    def interior(self, field: Any) -> Any:
        """Return a view of a field without its halo: the cells this rank owns; local."""
        return field[self.layout(field).interior]

    def indices(self, *, halo: bool = False) -> tuple[Any, ...]:
        """Return the global indices of this rank's cells, one array an axis, ready to broadcast.

        Parameters
        ----------
        halo : bool
            With those of the halo, which run below 0 and beyond the grid's end.

        Returns
        -------
        tuple of ndarray
            On the grid's device; the shape is 1 along all axes but one.
        """
        with_halo = check_bool("halo", halo, FieldError)
        ranges = (
            [
                (first, first + n)
                for first, n in zip(self._layout.origin, self.padded_shape, strict=True)
            ]
            if with_halo
            else [(s.start, s.stop) for s in self.owned]
        )
        return tuple(self.xp.ix_(*(self.xp.arange(start, stop) for start, stop in ranges)))

    @one_thread
    def gather(self, field: Any, root: int = 0) -> np.ndarray[Any, Any] | None:
        """Bring the owned cells of all ranks together.

        Parameters
        ----------
        field : array
            Of one dtype and layout on all ranks.
        root : int
            The rank that gets them; the same on all ranks.

        Returns
        -------
        numpy.ndarray or None
            The whole field on the host of rank ``root``, None on the others.

        Raises
        ------
        FieldError
            If the array does not fit the grid, or ``root`` is no rank.
        MismatchError
            If dtypes, layouts or roots differ between ranks.
        HaloxError
            Also if rank ``root`` has no memory for the whole field.
        ExchangeTimeoutError
            If a rank does not come within ``HALOX_TIMEOUT`` seconds, or stops in the middle.

        Notes
        -----
        Collective; blocks. Rank ``root`` needs memory for the whole field and 128 MiB. Others need as much if their
        cells are not contiguous; a field on a GPU comes to the host as a whole first.
        """
        self._world.begin("gather")
        return gather(self._world, field, self.layout, root)

    def dataarray(self, field: Any, **options: Any) -> Any:
        """Return the owned cells as an `xarray.DataArray`; see `halox.xarray.dataarray`."""
        from halox.xarray import dataarray

        return dataarray(self, field, **options)

    # Exchanges

    def exchange(self, *fields: Any, corners: bool | None = None) -> None:
        """Fill the halos of fields with the neighbours' cells.

        Parameters
        ----------
        *fields : array
            Made by this grid, or arrays of its padded shape on its device; any dtypes. Component axes are found from
            the shape; staggered arrays, and those with another halo, need `declare`. All travel together, in one
            message a neighbour.
        corners : bool, optional
            With edges and corners; the grid's setting by default.

        Raises
        ------
        FieldError
            If an array does not fit the grid: shape, device, read-only.
        MismatchError
            If the ranks' fields do not match.
        StateError
            If another thread is inside a collective call of this grid.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective among neighbours; the first call with new arrays makes a plan and is collective over all ranks. New
        is also a NumPy array whose shape, dtype or permission to be written has changed, and one that was declared
        otherwise since. The last 512 plans are kept. Ordered with CuPy's current stream on a GPU. Halo cells
        outside the grid are left alone.
        """
        key = self.corners if corners is None else as_bool(corners)
        plan = self._plans.find(key, fields)
        if plan is None:
            plan = self._cached("copy", fields, corners, key)
        plan.__call__()  # plan() takes longer to find it

    def accumulate(self, *fields: Any, corners: bool | None = None) -> None:
        """Add halo values into the cells of their owners, and set those halos to zero: the adjoint of `exchange`.

        Parameters and errors as of `exchange`; values are added in an order that does not change between runs.

        Raises
        ------
        FieldError
            Also if a field is not of numbers, or two of them share memory, whose halos would count twice.
        """
        key = ("add", self.corners if corners is None else as_bool(corners))
        plan = self._plans.find(key, fields)
        if plan is None:
            plan = self._cached("add", fields, corners, key)
        plan.__call__()

    def plan(self, *fields: Any, corners: bool | None = None, path: str | None = None) -> Plan:
        """Make the persistent form of an exchange of these fields.

        Parameters
        ----------
        *fields, corners
            As of `exchange`.
        path : str, optional
            As of `Grid`, for this plan.

        Returns
        -------
        Plan
            ``plan()`` exchanges; ``plan.start()`` and ``plan.finish()`` allow interior work in between.

        Notes
        -----
        Collective. Errors as of `exchange`, and `PathError` if the path asked for cannot be taken.
        """
        self._world.begin("plan")
        return self._plan("copy", fields, corners, keep=True, path=path)

    def explain(self, *fields: Any) -> Report | str:
        """Tell how the grid is divided; given fields, tell how their exchange travels.

        Returns
        -------
        str or Report
            Print either. With fields it is collective the first time, as `exchange` is.
        """
        if not fields:
            return self._describe()
        plan = self._plans.find(self.corners, fields)
        if plan is None:
            plan = self._cached("copy", fields, None, self.corners)
        return plan.explain()

    def _cached(
        self, operation: Operation, fields: tuple[Any, ...], corners: bool | None, key: Hashable
    ) -> Plan:
        self._world.begin("exchange" if operation == "copy" else "accumulate")
        plan = self._plan(operation, fields, corners, keep=False)
        self._plans.add(key, fields, plan)
        return plan

    def _plan(
        self,
        operation: Operation,
        fields: tuple[Any, ...],
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
            for found, layout in read:
                if not found.writable:
                    raise FieldError("field is read-only; its halo cannot be filled")
                if operation == "add" and found.dtype.kind not in "iufc":
                    raise FieldError(
                        f"accumulate has no meaning for dtype {found.dtype}; use numbers"
                    )
                layout.check_widths()
            described, layouts = zip(*read, strict=True)
            if operation == "add":
                check_apart(described)
            drafted = halo_draft(
                fields,
                described,
                layouts,
                operation=operation,
                corners=with_corners,
                device=self.device_id,
            )
            return replace(
                drafted,
                numbers=tuple(map(self._layouts.number, described)),
                specs=tuple(str(layout.spec) for layout in layouts),
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
        plan = make_plan(self._surroundings, draft, keep=keep, path=path, call=call)
        self._all_plans.add(plan)
        return plan

    # Reductions over owned cells

    def sum(self, field: Any, out: Any = None) -> Any:
        """Return the sum over the whole field, components included, halo left out.

        Parameters
        ----------
        field : array
            Of numbers; made by this grid, or of its padded shape on its device.
        out : array, optional
            Of one element of the result's dtype, on the grid's device, where the result is written.

        Returns
        -------
        scalar or array
            ``out``; or else a NumPy scalar, and on a GPU a CuPy array of shape (): ``float(x)`` brings it to the host.
            Floats are added in float64, complex ones in complex128, integers in 64 bits.

        Raises
        ------
        FieldError
            If the dtype has no such operation, the array does not fit the grid, or ``out`` the result.
        MismatchError
            If the ranks' dtypes or layouts (components, staggering, halo) differ; on a GPU dtypes only, at the first
            call with one.
        StateError
            If CuPy's current stream is being captured, and this is the first call with this dtype and shape, or
            ranks share a GPU or are on several nodes; if another thread is inside a collective call of this grid.
        ExchangeTimeoutError
            If a rank does not come within ``HALOX_TIMEOUT`` seconds; where GPUs signal to one another, if one did not
            come to an earlier call. That result, and those since, are not valid.

        Notes
        -----
        Collective, and the same for all reductions: the same bits on every rank and in every run. Blocks on the host.
        On a GPU it is ordered with the current stream. Where every rank has a GPU of its own, and all map one another's
        memory, it is one launch that does not block and can be captured in a CUDA graph, once it has been called; else
        it goes the way of a `halox.Allreduce` of one element.

        There, an error that only one rank can see (an array that does not fit) is raised on it at once, and after the
        first call as a `MismatchError` on the others when they call again; that result is not valid.
        """
        return self._number("sum", local.total, out, field)

    def min(self, field: Any, out: Any = None) -> Any:
        """Return the smallest value of a real field; NaN if there is one. All else as of `sum`."""
        return self._number("min", np.min, out, field)

    def max(self, field: Any, out: Any = None) -> Any:
        """Return the largest value of a real field; NaN if there is one. All else as of `sum`."""
        return self._number("max", np.max, out, field)

    def norm(self, field: Any, out: Any = None) -> Any:
        """Return the Euclidean norm, formed in float64. All else as of `sum`."""
        return self._number("norm", local.sum_of_squares, out, field)

    def dot(self, field: Any, other: Any, out: Any = None) -> Any:
        """Return the sum of ``conj(field) * other``, formed in float64, complex128 or 64-bit integers.

        The fields are of one layout. All else as of `sum`.
        """
        return self._number("dot", local.dot, out, field, other)

    def allreduce(self, array: Any, op: str = "sum", out: Any = None) -> Any:
        """Combine arrays that are not fields, element by element, over all ranks.

        Parameters
        ----------
        array : scalar, numpy.ndarray or array on this rank's GPU
            Of one shape and dtype on all ranks.
        op : str
            As of `halox.Allreduce`, which does the same again and again without comparing shapes each time.
        out : array, optional
            Of the array's shape and dtype, where the result is written; may be ``array`` itself.

        Returns
        -------
        scalar or array
            ``out``, or a new array where ``array`` is; the same bits on every rank.

        Raises
        ------
        FieldError
            If the operation has no meaning for the dtype, or ``out`` does not fit.
        MismatchError
            If ranks give different shapes, dtypes or operations; on a GPU at the first call with these.
        StateError, ExchangeTimeoutError
            As of `sum`.

        Notes
        -----
        Collective. Blocks for arrays on the host. Of arrays on a GPU grid's GPU each first call with a shape, dtype and
        operation makes a `halox.Allreduce`, of which the grid keeps the 32 that were made last; so such calls must
        come in one order on all ranks. Later calls cost what those of a `halox.Allreduce` cost.
        """
        if self._numbers is not None:
            try:
                prepared = self._numbers.arrays_seen.found.get((op, id(array), id(out)))
            except TypeError:  # an operation that is none
                prepared = None
            if prepared is not None:
                launch, shape = prepared
                if array.shape == shape and (out is None or out is array or out.shape == shape):
                    result = launch()
                    return result if out is None else out
        if self._numbers is not None and is_device_array(array):
            with self._world.guard:
                self._world.check_open()
                return self._numbers.array(array, op, out)
        with self._world.guard:
            return self._allreduce_on_host(array, op, out)

    def _allreduce_on_host(self, array: Any, op: str, out: Any) -> Any:
        self._world.begin("allreduce", op)

        def prepare() -> np.ndarray[Any, Any]:
            try:
                host = np.ascontiguousarray(to_host(array))
            except HaloxError:
                raise
            except Exception as error:  # NumPy's of several kinds, and what an object raises
                raise FieldError(
                    f"array: {shown(array)} is neither an array nor a number ({shortened(str(error))})"
                ) from error
            find_operation(op, host.dtype)
            if out is not None:
                check_out(describe(out, "out"), np.shape(array), host.dtype)
            return host

        host = self._world.guarded(prepare, "an allreduce")
        result = reduce_array(self._world, host.reshape(np.shape(array)), op)
        if out is not None:
            if is_device_array(out):
                as_device_array(out)[...] = self.xp.asarray(result)
            else:
                out[...] = result
            return out
        if isinstance(array, np.ndarray) or np.isscalar(array):
            return result if isinstance(array, np.ndarray) else result[()]
        return self.xp.asarray(result)

    def _number(
        self, name: str, local_number: Callable[..., Any], out: Any, field: Any, other: Any = None
    ) -> Any:
        """Reduce fields to a number: on the host by this function of their cells, and a sum or so of the ranks."""
        if self._numbers is not None:
            prepared = self._numbers.numbers_seen.found.get((name, id(field), id(other), id(out)))
            if prepared is not None:
                launch, shape = prepared
                if field.shape == shape and (other is None or other.shape == shape):
                    result = launch()
                    return result if out is None else out
        fields = (field,) if name != "dot" else (field, other)
        if self._numbers is not None:
            with self._world.guard:
                self._world.check_open()
                return self._numbers.number(name, fields, lambda: self._cells(name, fields), out)

        def value() -> tuple[Any, str, FieldSpec]:
            cells = [one.view() for one in self._cells(name, fields)]
            for one in cells:
                check_numeric(one.dtype, name)
                check_ordered(one.dtype, name)
            found = np.asarray(local_number(*cells))
            if out is not None:
                check_out(describe(out, "out"), None, found.dtype)
            dtypes = ",".join([one.dtype.str for one in cells])
            return found, dtypes, self.layout(fields[0]).spec

        op = name if name in ("min", "max") else "sum"
        with self._world.guard:
            self._world.begin(name)
            result = reduce_scalar(self._world, value, op)
        if name == "norm":
            result = np.sqrt(result)
        if out is None:
            return result
        as_ndarray(out)[...] = result
        return out

    def _cells(self, name: str, fields: Sequence[Any]) -> list[Cells]:
        """Return the cells of fields, halos left out."""
        layouts = [self.layout(field) for field in fields]
        if layouts[-1] is not layouts[0] and layouts[-1].spec != layouts[0].spec:
            raise FieldError(
                f"{name} needs two fields of one layout, got shapes {fields[0].shape} and {fields[1].shape}"
            )
        return [_cells_of(field, layout) for field, layout in zip(fields, layouts, strict=True)]

    # Life

    @one_thread
    def close(self) -> None:
        """Free plans, staging memory and communicators.

        Collective, and harmless when repeated. Fields stay valid; the grid's methods raise `ClosedError` after it.
        """
        if not self._world.closed:
            self._plans.clear()
            for plan in list(self._all_plans):
                plan.close()
            if self._numbers is not None:
                self._numbers.close()
            self._surroundings.close()

    def __enter__(self) -> Grid:
        """Return the grid."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the grid, unless an error is on its way: other ranks may not come along then."""
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        """Return the grid's shape and division."""
        return (
            f"<halox.Grid {self.grid_shape} on {self.proc_shape} ranks, halo {self.halo}, "
            f"periodic {self.periodic}, {self.device}{', closed' if self._world.closed else ''}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        facts = {
            "grid shape": self.grid_shape,
            "process grid": self.proc_shape,
            "halo": self.halo,
            "periodic": self.periodic,
            "corners": self.corners,
            "device": self.device if self.device_id is None else f"GPU {self.device_id}",
            "path": self._path,
            f"rank {self.rank} of {self.size}": f"coords {self.coords}",
            "owns": f"{self.rank_shape}, from {tuple(cut.start for cut in self.owned)}",
            "stores": self.padded_shape,
        }
        return html_facts(f"halox.Grid{' (closed)' if self._world.closed else ''}", facts)

    def _describe(self) -> str:
        decomposition = self._decomposition
        sizes = [
            sorted({b - a for a, b in zip(x.bounds, x.bounds[1:], strict=False)})
            for x in decomposition.axes
        ]
        blocks = " x ".join("/".join(map(str, s)) for s in sizes)
        nodes = len(set(self._world.nodes))
        return "\n".join(
            [
                f"grid {self.grid_shape}, halo {self.halo}, periodic {self.periodic}, device {self.device}",
                f"process grid {self.proc_shape} on {nodes} node(s), blocks of {blocks} cells",
                decomposition.placement.summary(),
                f"rank {self.rank}: coords {self.coords}, owns {self.rank_shape}, stores {self.padded_shape}, "
                f"{len(decomposition.neighbours(self.rank, self.corners))} neighbours",
            ]
        )

    # Internal

    def _field_layout(self, options: dict[str, Any]) -> FieldLayout:
        spec = field_spec(options, self._layout.spec)
        layout = self._layouts.of(spec)
        layout.check_widths()
        check_extents(layout.padded_shape)
        return layout

    @one_thread
    def _new(self, dtype: Any, like: object, contents: str = "zeros", value: Any = None) -> Any:
        """Allocate a field with the layout of another one, or of options."""
        self._world.begin(contents, dtype)

        def build() -> tuple[FieldLayout, np.dtype[Any], np.ndarray[Any, Any] | None]:
            if isinstance(like, dict):
                layout, found = self._field_layout(like), fixed_dtype(dtype)
            else:
                described, layout = self._layouts.read(like)
                found = fixed_dtype(described.dtype if dtype is None else dtype)
            if contents in ("zeros", "empty"):
                return layout, found, None
            return layout, found, fill_value(value, found, layout.padded_shape)

        layout, found, filling = self._world.guarded(build, _ALLOCATION)
        shared = None
        if self.device_id is None and reads_in_place(layout, found.itemsize):
            shared = self._surroundings.arena.array(layout.padded_shape, found)

        def make() -> Any:
            array = shared
            try:
                if self.device_id is not None and self._world.node_size > 1:
                    # Memory that neighbours can map, so that they can store into its halo.
                    arena = self._surroundings.use_device(self.device_id)
                    array = arena.array(layout.padded_shape, found)
                elif array is None:
                    array = allocate(layout.padded_shape, found, self.device_id)
            except MemoryError as error:
                raise HaloxError(
                    f"no memory for a field of shape {layout.padded_shape} and dtype {found} ({error}); use more "
                    "ranks, or a smaller dtype"
                ) from error
            if contents != "empty":
                fill(array, filling)
            return array

        # Memory can run out on one rank alone.
        array = self._world.guarded(make, _ALLOCATION)
        self._made += 1
        self._layouts.add(array, layout, self._made)
        return array


def _cells_of(field: Any, layout: FieldLayout) -> Cells:
    """Return the cells of a field without making a view of it, which takes longer on a GPU than a launch."""
    whole, interior = describe(field, "field"), layout.interior
    if tuple(whole.shape) != layout.padded_shape:
        raise FieldError(
            f"field: its shape is {tuple(whole.shape)} now, and was {layout.padded_shape} when the grid read it; take "
            "a reshaped view instead, which is a field of its own"
        )
    pointer, shape = whole.pointer, []
    for cut, extent, stride in zip(interior, whole.shape, whole.strides, strict=True):
        start, stop = cut.start or 0, extent if cut.stop is None else cut.stop
        pointer += start * stride
        shape.append(stop - start)
    found = replace(whole, pointer=pointer, shape=tuple(shape))
    # On the host a view of NumPy, since sums of other libraries are formed in other dtypes.
    return Cells(found, lambda: as_ndarray(field)[interior])
