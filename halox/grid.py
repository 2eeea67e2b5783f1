"""`Grid`, the main class of halox: made once, called in every step.

The class combines the lower layers and contains no algorithms. Its base classes are in
`halox.collectives.grid_reductions` (reductions), `halox.allocation` (new fields) and `halox.grid_data` (gathers and
scatters). `halox.division` divides the grid. Most of the module's lines are the documentation of the methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from halox.allocation import GridAllocation
from halox.checkpoint import calls
from halox.checkpoint.arguments import Progress
from halox.checkpoint.calls import LoadOptions, SaveOptions
from halox.checkpoint.loading import Loaded
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
from halox.runtime.arrays import DType
from halox.runtime.call_guard import Closing, one_thread
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module
from halox.runtime.world import World
from halox.tables import html_facts
from halox.values import as_bool, check_bool

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.decomposition.normalise import HaloLike
    from halox.runtime.array_types import Field

Declared = TypeVar("Declared")


class Grid(Closing, GridAllocation, GridReductions, GridData):
    """A regular grid of 1 to 4 axes, divided among the ranks of a communicator.

    Parameters
    ----------
    grid_shape : int or sequence of int
        Global number of cells per axis, without halos. It need not be a multiple of the number of ranks.
    halo : int, or one per axis, or (low, high) per axis
        Halo widths: the number of neighbour cells per side that each rank keeps a copy of.
    periodic : bool or one per axis
        Whether the first cell is the upper neighbour of the last cell.
    proc_shape : int or sequence of int, optional
        Ranks per axis; halox chooses each number that is 0 or None. By default it chooses all, to minimize the halo
        bytes.
    blocks : sequence, optional
        Per axis the number of cells of each block, or None for an even division.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks; ``MPI.COMM_WORLD`` by default. The grid uses a private duplicate.
    corners : bool
        Whether exchanges also fill the edges and corners of the halo.
    device : {"auto", "cpu", "gpu"}
        Whether fields are NumPy arrays ("cpu") or CuPy arrays ("gpu"). "auto" is "gpu" if CuPy and a GPU are found. The
        GPUs of a node are assigned to its ranks in turn; a single rank uses the current GPU.
    placement : bool
        Whether blocks are assigned to ranks so that the largest faces stay within nodes.
    checkerboard : bool
        Whether the grid supports fields of one parity, which store only the even or odd cells. Blocks then begin at
        even cells along the last axis, and every extent must be even.
    path : str, optional
        The data path of all messages to other ranks; ``halox info`` lists the paths. By default the path in HALOX_PATH,
        or else the fastest path.
    leave_sms : bool
        Whether to leave a GPU's multiprocessors to the caller's kernels. Unless a path is requested, copy engines then
        move messages of long blocks between fields of the grid, even if a kernel might be faster.

    Attributes
    ----------
    rank : int
        Number of this rank.
    size : int
        Number of ranks.
    comm : mpi4py.MPI.Intracomm
        The private duplicate of the communicator.
    grid_shape : tuple of int
        Cells of the whole grid per axis.
    rank_shape : tuple of int
        Cells that this rank owns per axis.
    padded_shape : tuple of int
        ``rank_shape`` plus the halo: the shape of a field on this rank.
    proc_shape : tuple of int
        Ranks per axis.
    coords : tuple of int
        Coordinates of this rank in the process grid.
    halo : tuple of (int, int)
        Low and high halo width per axis.
    periodic : tuple of bool
        Per axis, whether the first cell is the upper neighbour of the last cell.
    owned : tuple of slice
        Global indices of this rank's cells.
    device : {"cpu", "gpu"}
        Memory of the fields.
    device_id : int or None
        Number of this rank's GPU; None on the host.
    xp : module
        ``numpy`` or ``cupy``, the module of the fields' arrays.

    Raises
    ------
    DecompositionError
        If the grid cannot be divided as asked, or a halo is wider than a block.
    MismatchError
        If ranks give different arguments, or only some ranks find a GPU.
    DeviceError
        If ``device`` is invalid, or is "gpu" and a rank finds no GPU.
    PathError
        If no path has this name. If the path cannot be used on this machine, the exchanges raise the error.
    HaloxError
        If ``comm`` is not an intracommunicator of mpi4py, or an environment variable of halox has an invalid value.
    ClosedError
        If MPI has been finalized.
    ExchangeTimeoutError
        If another rank does not make the matching call within ``HALOX_TIMEOUT`` seconds.
    MissingPackageError
        If mpi4py or an MPI library is missing.

    Notes
    -----
    Collective over ``comm``. `close`, the allocation of fields, the reductions and the exchanges are also collective.
    All errors are raised on all ranks or on none, except errors of reductions between GPUs (see `sum`). Only one thread
    at a time may call the grid; a call in a second thread raises `StateError`. A call that fails on one rank alone (a
    time-out, an interruption) ends the grid: later calls raise `StateError`, and a new grid can be made.

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
        """Declare the layout of an array that you allocated.

        Needed if the layout does not follow from the shape, if the field is staggered or of one parity, or if its halo
        differs from the grid's halo.

        Parameters
        ----------
        array : numpy.ndarray or array on this rank's GPU
        **layout
            The options ``components``, ``components_after``, ``staggered``, ``halo``, ``parity`` and ``offsets`` of
            `zeros`.

        Returns
        -------
        array
            The same object.

        Raises
        ------
        FieldError
            If the array's shape differs from the shape of this layout on this rank, or the array is already a field of
            the opposite parity.
        DeviceError
            If the array is on another device than the grid's fields.

        Notes
        -----
        Local; all ranks must make the same declaration. It applies to every array of the same address, shape, strides
        and dtype, such as ``array[:]``, as long as the array that owns the memory lives. Layouts of other views are
        inferred from their shapes. An array may be declared again: later calls use the new layout, but plans made by
        `plan` keep the old layout.
        """
        self._world.check_open()
        self._layouts.declare(array, self._layout_of(layout))
        self._reductions.forget()
        return array

    def layout(self, field: object) -> FieldLayout:
        """Return the layout of a field: the positions of its cells in the array and in the grid; local.

        Returns
        -------
        FieldLayout
            Its attributes include ``padded_shape``, the shape of the array; ``interior``, the slices of the owned
            points in the array; ``owned``, the global indices of the owned points; and ``origin``, the global index of
            the array's first point along each axis. For a field of one parity, ``owned`` and ``origin`` count pairs of
            cells along the last axis.

        Raises
        ------
        FieldError
            If the array does not fit the grid.
        """
        return self._layouts.find(field)

    def interior(self, field: Any) -> Any:
        """Return a view of the cells that this rank owns, without the halo. Local; raises the errors of `layout`."""
        return field[self.layout(field).interior]

    def indices(
        self, *, halo: bool = False, parity: Literal["even", "odd"] | None = None
    ) -> tuple[Any, ...]:
        """Return the global indices of this rank's cells, one array per axis, ready to broadcast.

        Parameters
        ----------
        halo : bool
            Whether to include the halo cells. Their indices continue below 0 and beyond the end of the grid.
        parity : {"even", "odd"}, optional
            Return the indices of a field of this parity that has the grid's halo.

        Returns
        -------
        tuple of ndarray
            Arrays on the grid's device, each with length 1 along all axes except its own. With ``parity``, the last
            array has the shape of the field without components.
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
        """Make a field from an `xarray.DataArray`; see `halox.xarray.from_dataarray`. Collective."""
        self._world.begin("from_dataarray")
        labelled = self._world.guarded(lambda: import_module("halox.xarray"), "from_dataarray")
        return labelled.from_dataarray(self, array, dims=dims)

    # Exchanges

    def exchange(self, *fields: object, corners: bool | None = None) -> None:
        """Fill the halos of fields with the neighbours' cells.

        Parameters
        ----------
        *fields : array
            Fields that this grid allocated, or arrays of its padded shape on its device; any dtypes. Component axes are
            inferred from the shape. Staggered arrays, and arrays with another halo, need `declare`. All fields are sent
            together, in one message per neighbour.
        corners : bool, optional
            Whether to fill edges and corners; by default the grid's setting. Fields with ``offsets`` get no corners.

        Raises
        ------
        FieldError
            If an array does not fit the grid in shape or dtype, or is read-only.
        DeviceError
            If an array is on another device than the grid's fields.
        MismatchError
            If the ranks' fields do not match, or the ranks make different calls.
        PathError
            If the requested path (``path`` of the grid, ``HALOX_PATH``) cannot be used; the message says why.
        StateError
            If another thread is inside a collective call of this grid. Also if CuPy's current stream is being captured,
            and either the fields have no plan yet, or the plan's path does not support capture.
        ClosedError
            If the grid is closed.
        ExchangeTimeoutError
            If a neighbour does not make the matching call within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective among neighbours. The first call with new fields of the grid, or with arrays of a new layout, dtype
        or strides, makes a plan and is collective over all ranks. Changing the shape, dtype or writability of a NumPy
        array, or declaring another layout, also triggers a new plan. The last 512 plans are kept. Ordered with CuPy's
        current stream on a GPU. Halo cells outside the grid are not changed.
        """
        key = self.corners if corners is None else as_bool(corners)
        found = self._plans.find(key, fields)
        if found is None:
            found = self._cached("copy", fields, corners, key)
        plan, bound = found
        plan.__call__(bound)  # plan() takes longer to find it

    def accumulate(self, *fields: object, corners: bool | None = None) -> None:
        """Add halo values to the cells of their owners, and set the halo cells to zero: the adjoint of `exchange`.

        It has the parameters and errors of `exchange`. Values are added in an order that does not change between runs.

        Raises
        ------
        FieldError
            Also if a field's dtype is not numeric, or two fields share memory, since their halos would count twice.
        """
        key = ("add", self.corners if corners is None else as_bool(corners))
        found = self._plans.find(key, fields)
        if found is None:
            found = self._cached("add", fields, corners, key)
        plan, bound = found
        plan.__call__(bound)

    @one_thread
    def plan(self, *fields: object, corners: bool | None = None, path: str | None = None) -> Plan:
        """Make a persistent exchange of these fields.

        Parameters
        ----------
        *fields, corners
            The same as for `exchange`.
        path : str, optional
            The data path of this plan; by default the path of the grid.

        Returns
        -------
        Plan
            ``plan()`` exchanges; ``plan.start()`` and ``plan.finish()`` allow interior work in between.

        Notes
        -----
        Collective. Raises the errors of `exchange`.
        """
        self._world.begin("plan")
        return self._plan("copy", fields, corners, keep=True, path=path)

    def explain(self, *fields: object) -> Report | str:
        """Describe the division of the grid, or, given fields, the messages and paths of their exchange.

        Returns
        -------
        str or Report
            A text about the grid, or a report about fields; print either. With fields, the first call is collective, as
            for `exchange`.
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
        """Make a plan on this grid's ranks that is closed with the grid; `Transpose` also calls this."""
        self._world.check_open()
        self._plans.sweep()
        self._plan_number += 1
        path = self._path if path is None else path
        leave_sms = self._division.leave_sms
        plan = make_plan(self._context, draft, keep=keep, path=path, leave_sms=leave_sms, call=call)
        self._all_plans.add(plan)
        return plan

    # Checkpoints

    def save(
        self,
        path: str | PathLike[str],
        fields: Mapping[str, object] | None = None,
        /,
        *,
        attrs: Mapping[str, object] | None = None,
        dims: Sequence[str] | None = None,
        coords: Mapping[str, object] | None = None,
        compressors: object = None,
        progress: Progress | None = None,
        **named: object,
    ) -> None:
        """Write fields to a checkpoint, all ranks together: a Zarr v3 group, or a ``.npy`` file of one field.

        Parameters
        ----------
        path : str or path
            A path on a file system that all ranks share, or ``s3://bucket/name``. Missing parent folders are made. A
            checkpoint of the same name is replaced, but only after the new checkpoint is complete. A name that ends in
            ``.npy`` is a file of one field, without checksums, attributes and coordinates. Names of netCDF and HDF5
            (``.nc``, ``.h5``, ...) are errors.
        fields : mapping of str to array, optional
            Fields by name, with any dtypes and layouts; or by keyword, as in ``u=u``.
        attrs : mapping, optional
            Attributes such as time and step, with values that JSON supports. The attributes of rank 0 are stored.
        dims : sequence of str, optional
            Names of the grid axes; ("x", "y", "z", "t") by default. The dimension of a staggered axis "x" is called
            "x_face".
        coords : mapping of str to array, optional
            Coordinates of the whole grid by dimension. The coordinates of rank 0 are stored; labelled arrays keep their
            attributes.
        compressors : str, dict, codec or sequence, optional
            Zarr codecs: their names, such as "zstd", their JSON, such as ``{"name": "zstd", "configuration": {"level":
            3}}``, or codecs of `zarr.codecs`. By default chunks are not compressed.
        progress : callable, optional
            Called on each rank as ``progress(done_bytes, total_bytes)`` after each shard, with the bytes of this rank.
        **named
            Further fields.

        Raises
        ------
        FieldError
            If a field does not fit the grid, or an argument is malformed.
        MismatchError
            If paths, fields or options differ between ranks.
        CheckpointError
            If the checkpoint cannot be written: no permission, no space, another run is writing it, a file or folder
            that is not a checkpoint has this name, or it is a name of netCDF or HDF5. An existing checkpoint then stays
            unchanged.
        MissingPackageError
            If tensorstore is not installed.

        Notes
        -----
        Collective; blocks until all data is on disk (``fsync``). Owned cells are stored, halos are not. Needs at most
        256 MiB of memory per rank. Fields on a GPU are copied through page-locked memory: while one part is written,
        the next part is copied.

        Examples
        --------
        >>> import halox, tempfile
        >>> with halox.Grid((8, 6), device="cpu") as grid, tempfile.TemporaryDirectory() as folder:
        ...     grid.save(f"{folder}/run.zarr", u=grid.ones(), attrs={"step": 7})
        ...     found = grid.load(f"{folder}/run.zarr")
        ...     grid.sum(found["u"]), found.attrs
        (np.float64(48.0), {'step': 7})
        """
        options = SaveOptions(attrs, dims, coords, compressors, progress)
        self._save(path, fields, named, options)

    @one_thread
    def _save(
        self, path: object, fields: object, named: Mapping[str, object], options: SaveOptions
    ) -> None:
        self._world.begin("save")
        calls.save(self._world, self._layouts, path, fields, named, options)

    @one_thread
    def load(
        self,
        path: str | PathLike[str],
        into: Mapping[str, object] | None = None,
        /,
        *,
        names: str | Sequence[str] | None = None,
        progress: Progress | None = None,
        **named: object,
    ) -> Loaded:
        """Read fields of a checkpoint, on any number of ranks, in any division of the same cells.

        Parameters
        ----------
        path : str or path
            The path given to `save`.
        into : mapping of str to array, optional
            Fields to fill, by name; or by keyword, as in ``u=u``.
        names : str or sequence of str, optional
            Fields to load into new arrays. By default all fields, or no fields if there are fields to fill.
        progress : callable, optional
            The same as for `save`.
        **named
            Further fields to fill.

        Returns
        -------
        Loaded
            A dict of the fields; its attribute ``attrs`` has the saved attributes. New fields have the grid's halo.

        Raises
        ------
        CheckpointError
            If the checkpoint does not exist, has another grid shape or format, lacks a requested field, is truncated or
            damaged, or was replaced while it was read. The contents of the fields to fill are then undefined.
        FieldError
            If a field to fill does not match the saved field, or is read-only.
        MismatchError
            If paths or fields differ between ranks.
        MissingPackageError
            If tensorstore is not installed.

        Notes
        -----
        Collective; blocks. Loaded cells have exactly the saved bits. Halos are not filled: call `exchange`. Each rank
        reads its own cells. Needs at most 256 MiB of memory per rank.
        """
        self._world.begin("load")

        def new(dtype: DType, options: FieldOptions) -> tuple[Field, FieldLayout]:
            field = self._new(dtype, options)
            return field, self._layouts.find(field)

        options = LoadOptions(into, named, names, progress)
        return calls.load(self._world, self._layouts, self.grid_shape, new, path, options)

    # Life

    @one_thread
    def close(self) -> None:
        """Free plans, staging memory and communicators.

        Collective; repeated calls have no effect. Fields stay valid. Later collective calls and `declare` raise
        `ClosedError`; local calls such as `interior`, `layout` and `indices` still work.
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
