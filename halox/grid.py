"""`Grid`, the main class of halox: made once, called in every step.

The class contains no algorithms: its methods document and call the lower layers. `halox.domain` divides the grid and
allocates fields, `halox.plans` plans exchanges, `halox.io` and `halox.io.checkpoint` move whole arrays. The
reductions are in its base class `GridReductions`. `exchange` and `accumulate` look up their plan themselves: a call
with known arrays costs a dict look-up and the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from itertools import product
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, Unpack, cast, get_args, overload

import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.decomposition.normalise import axis_number
from halox.domain import Domain, FieldOptions
from halox.domain.options import grid_arguments, with_signature
from halox.errors import FieldError, HaloxError, stripped
from halox.plans.grid_plans import GridPlans
from halox.plans.plan import Plan
from halox.plans.report import Report
from halox.reductions.grid_reductions import GridReductions
from halox.runtime.arrays import Array
from halox.runtime.call_guard import Closing, short_errors, single_threaded
from halox.tables import Text
from halox.values import as_bool, check_bool

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import TypeVar

    from halox.domain.dimension_names import GridCoords
    from halox.domain.options import Arguments, Axes
    from halox.io.checkpoint.arguments import Progress
    from halox.io.checkpoint.loading import Loaded
    from halox.io.regions import CellRanges
    from halox.plans.device_loop import Loop
    from halox.runtime.array_types import FieldLike, GpuArray
    from halox.solvers.coarsening import Coarse
    from halox.solvers.linear_operators import FieldOperator

    FieldArray = TypeVar("FieldArray", default=Any)
else:
    from typing import TypeVar

    FieldArray = TypeVar("FieldArray")

Shape: TypeAlias = int | Sequence[int]
Device: TypeAlias = Literal["auto", "cpu", "gpu"]
Side: TypeAlias = Literal["low", "high"]

Given = TypeVar("Given", bound="FieldLike")


class Grid(GridReductions, Closing, Generic[FieldArray]):
    """A regular grid of 1 to 4 axes, divided among the ranks of a communicator.

    - Make fields: `zeros`, `ones`, `full`, `empty`, `random`; `zeros_like` and so on; `declare` for your own arrays.
      Find their cells: `interior`, `indices`, `layout`, `walls`, `at_wall`, `wall`.
    - Exchange: `exchange`, `accumulate`; `plan` for the same fields in each step. See how: `describe`, `explain`,
      `predict`.
    - Reduce: `sum`, `mean`, `std`, `min`, `max`, `argmin`, `argmax`, `norm`, `dot`, `histogram`; `reduce` for
      expressions of fields; `allreduce` for other arrays.
    - Whole arrays: `gather`, `scatter`. Points by their coordinates: `locate`, for `halox.Points`. Ranks: `owner`.
    - Files: `save`, `load`.
    - Labels: `dims`, `coords`, `dataarray`, `from_dataarray`.
    - Solve: `loop`, `linear_operator`, `coarsen`.

    Parameters
    ----------
    grid_shape : int or sequence of int
        Global number of cells per axis, without halos. It need not be a multiple of the number of ranks.
    halo : int, or one per axis, or (low, high) per axis
        Halo widths: the number of neighbour cells per side that each rank keeps a copy of. A halo may be wider than
        the neighbours' blocks, and than the grid.
    periodic : bool or one per axis, optional
        Whether the first cell is the upper neighbour of the last cell; False by default.
    proc_shape : int or sequence of int, optional
        Ranks per axis; halox chooses each number that is 0 or None, for few halo bytes in long blocks of memory, which
        faces along the last axis do not have. If possible, it chooses blocks at least as wide as the halo.
    blocks : sequence, optional
        Per axis the number of cells of each block, or None for an even division.
    weights : array or callable, optional
        Work of each cell, for ``blocks`` of about equal work: a mask or a cost of at least 0, of the grid's shape (or 1
        along an axis), on rank 0; or a function of arrays as of `indices`. halox cuts each axis so that the largest sum
        over a block is small, and chooses ``proc_shape`` for the fewest cells of this sum and of the halo together.
    boundary : None, str, tuple, callable, or one per axis, or (low, high) per axis
        What exchanges write into the halo at the walls of the grid, as `numpy.pad` pads the whole field, edges and
        corners included (unless ``corners`` is False). None leaves the halo there unchanged. "edge" repeats the cell at
        the wall; "symmetric" mirrors the cells at the wall's face, and "reflect" at the centre of the cell next to it,
        or at the point on the wall along a staggered axis.
        "antisymmetric" and "antireflect" mirror them with the opposite sign, or with ("antisymmetric", a) so that the
        value at the mirror is ``a``. "extrapolate" continues the last two cells linearly. ("constant", a) is the number
        ``a``; on a staggered axis the point on the wall also gets it. ("gradient", g) changes by ``g`` per cell in the
        direction of the axis. "periodic" or "wrap" is the same as ``periodic``. ("phase", z) is periodic, and
        multiplies cells from beyond the high end by ``z``, and from beyond the low end by ``1 / z``. A function is
        called as ``function(slab, axis, side, indices)``, or with five parameters ``function(slab, axis, side, indices,
        field)``, to fill ``slab``, a view of the halo at the ``side`` "low" or "high". ``indices`` has the global
        indices of its cells, one array per axis, which wrap along periodic axes. It is also called once when a plan is
        made, and must make no collective call. One boundary for all axes applies to sides without neighbours.
    connect : dict, optional
        Sides of one axis that are joined with a flip or a shift, as `Connection` objects. A key ``(axis, side)`` joins
        a side with itself: the fold of a tripolar grid, ``{(0, "high"): Connection(flip=1)}``, or the poles of ``n``
        longitudes, ``{(0, "low"): Connection(shift=(1, n // 2)), (0, "high"): ...}``. A key ``axis`` joins both sides
        with each other: a Moebius strip, ``{0: Connection(flip=1)}``. The halo there is narrower than the axis.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks; ``MPI.COMM_WORLD`` by default. All grids on it use one private duplicate of it. A
        Cartesian communicator (``MPI.Cartcomm``) determines ``proc_shape``, ``periodic`` and the coordinates of the
        ranks; ``placement`` then has no effect. Give ``MPI.Intracomm(comm)`` to ignore its topology.
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
        Data path of all messages to other ranks (``halox info`` lists them); by default HALOX_PATH, or the fastest.
    leave_sms : bool
        Whether to leave a GPU's multiprocessors to the caller's kernels: copy engines move messages of long blocks.
    dims : sequence of str, optional
        Names of the axes in labelled arrays and checkpoints; ("x", "y", "z", "t") by default. The dimension of a
        staggered axis "x" is called "x_face".
    coords : mapping of str to array, optional
        Coordinates in labelled arrays and checkpoints: by dimension, one for each point of the whole grid, alike on
        all ranks. Labelled arrays keep their attributes. Faces, if not given, are halfway between cells, or conversely.
    reproducible : bool
        Whether `sum`, `norm`, `dot` and `allreduce` give the same bits on any number of ranks, in any division, on CPUs
        and GPUs, by default (docs/allreduce.md). Each call can decide otherwise.

    Attributes
    ----------
    rank, size, comm : int, int, mpi4py.MPI.Intracomm
        Number of this rank, number of ranks, and the private duplicate of the communicator.
    grid_shape, rank_shape, padded_shape : tuple of int
        Per axis, the cells of the whole grid, the cells that this rank owns, and these plus the halo: the shape of a
        field on this rank.
    proc_shape, proc_coords : tuple of int
        Ranks per axis, and the coordinates of this rank among them.
    coords : mapping of str to numpy.ndarray
        Coordinates of all cells ("x") and faces ("x_face") of the whole grid; empty without coordinates.
    halo, periodic, dims : tuple
        These parameters, with an entry for each axis; halo widths are pairs (low, high).
    owned : tuple of slice
        Global indices of this rank's cells.
    device, device_id, xp : str, int or None, module
        "cpu" or "gpu", the number of this rank's GPU, and ``numpy`` or ``cupy``.
    reproducible : bool
        Whether reductions are reproducible by default.
    domain : Domain
        The division, layouts and memory below this grid, for code that extends halox. Its interface may change.

    Raises
    ------
    DecompositionError
        If the grid cannot be divided as asked, ``connect`` is invalid or does not fit the grid, or a Cartesian
        communicator contradicts another argument.
    FieldError
        If ``boundary`` is invalid, is a wall on a periodic axis, or needs more cells than a block at the wall has; if
        ``dims`` or ``coords`` do not fit the grid. In methods: if an array does not fit the grid in shape or dtype, is
        read-only, or shares memory with another one of the call, or if another argument is invalid.
    MismatchError
        If ranks give different arguments, or arrays of different dtypes or layouts, make different calls, or if only
        some ranks find a GPU.
    DeviceError
        If ``device`` is invalid, or is "gpu" and a rank finds no GPU; if an array is on another device than the grid's
        fields.
    PathError
        If no path has this name; in exchanges, if the path cannot be used on this machine. The message says why.
    StateError
        If another thread is inside a collective call of this grid, or an earlier call has failed on this rank alone. If
        CuPy's current stream is being captured, and this is the first call with these arrays, or it cannot be captured.
    ExchangeTimeoutError
        If another rank does not make the matching call within ``HALOX_TIMEOUT`` seconds, or stops during the call.
    ClosedError
        If the grid is closed, or MPI has been finalized.
    MissingPackageError
        If mpi4py or an MPI library is missing, or an optional package that a method needs.
    HaloxError
        If ``comm`` is not an intracommunicator of mpi4py, an environment variable of halox has an invalid value, or a
        rank has too little memory.
    TypeError
        If an option is unknown.

    Notes
    -----
    Collective over ``comm``. `close`, the allocation of fields, the reductions and the exchanges are also collective.
    Their errors are raised on all ranks or on none, except errors of reductions between GPUs (see `sum`). Methods raise
    the errors of this list; they name only special ones. Only one thread at a time may call the grid. A call that fails
    on one rank alone (a time-out, an interruption) ends the grid: later calls raise `StateError`, and a new grid can be
    made.

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

    @overload
    def __init__(
        self: Grid[Array], grid_shape: Shape, *, device: Literal["cpu"], **_: Unpack[Arguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Grid[GpuArray], grid_shape: Shape, *, device: Literal["gpu"], **_: Unpack[Arguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Grid[Any], grid_shape: Shape, *, device: Device = "auto", **_: Unpack[Arguments]
    ) -> None: ...

    @with_signature
    @short_errors
    def __init__(self, *shape: Any, **options: Any) -> None:
        self._use(Domain(*grid_arguments(shape, options)))

    def _use(self, domain: Domain) -> None:
        self.domain = domain
        self._world, self._layouts = domain.world, domain.layouts
        division, decomposition = domain.division, domain.decomposition
        self.comm: MPI.Intracomm = domain.world.comm
        self.rank: int = domain.world.rank
        self.size: int = domain.world.size
        self.grid_shape: tuple[int, ...] = domain.grid_shape
        self.proc_shape: tuple[int, ...] = decomposition.proc_shape
        self.periodic: tuple[bool, ...] = decomposition.periodic
        self.proc_coords: tuple[int, ...] = decomposition.coords_of(self.rank)
        self.corners: bool = division.corners
        self.reproducible: bool = division.reproducible
        self.halo: tuple[tuple[int, int], ...] = domain.plain.spec.halo
        self.padded_shape: tuple[int, ...] = domain.plain.padded_shape
        self.rank_shape: tuple[int, ...] = domain.rank_shape
        self.owned: tuple[slice, ...] = domain.plain.owned
        self.dims: tuple[str, ...] = domain.labels.dims
        self.device: Literal["cpu", "gpu"] = division.device
        self.device_id: int | None = domain.device_id
        self.xp: ModuleType = domain.xp
        self._new: Callable[..., FieldArray] = domain.allocation.new
        self._new_like: Callable[..., FieldArray] = domain.allocation.new_like
        self._plans = GridPlans(domain)
        self._plan_cache, self._known_plans = self._plans.cache, self._plans.cache.known
        self._use_reductions(domain)
        self._layouts.register(self._of_fields)

    # Fields

    def zeros(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> FieldArray:
        """Allocate a field of zeros, halo included; all bytes are zero for every dtype.

        Parameters
        ----------
        dtype : dtype
            Any fixed-size dtype; on a GPU, any dtype that CuPy supports.
        components : int or sequence of int
            Extents of the component axes, which are before the grid axes. An ellipsis stands for the grid axes:
            ``components=(2, ..., 3)`` gives an axis of 2 before and an axis of 3 after them.
        staggered : int or sequence of int
            Grid axes along which the field has one more point than cells.
        halo : int, or one per axis, or (low, high) per axis
            Halo widths of this field; by default the halo of the grid.
        parity : {"even", "odd"}, optional
            Store only the cells with an even or odd sum of coordinates, compactly along the last grid axis: the cell
            ``(x, ..., z)`` is at index ``(x, ..., z // 2)``. Halo widths still count cells of the grid.
        offsets : int or sequence of int, optional
            Distances along each axis at which a stencil reads the field, in both directions. Exchanges then move only
            the halo cells that this stencil reads, and no corners. By default exchanges move the whole halo.
        boundary
            As for `Grid`, by default that of the grid. A dict gives boundaries by component: ``{0: "antisymmetric", ():
            "symmetric"}`` for component 0 and all others. With several component axes a key has one index for each.
        sign : {1, -1} or dict, optional
            Factor of values that come across a connection (``connect`` of `Grid`), -1 for the components of a velocity
            along a folded axis. A dict gives signs by component, as for ``boundary``.
        position : str or one per axis, optional
            Where the field's points are in their cells: "center", or the "low" or "high" face. Only connections use it.
            By default "low" along staggered axes, else "center". For the velocity along axis 1 on the high faces of the
            cells, as NEMO stores u, give ``("center", "high")``.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape ``padded_shape``, between the component axes. For a field of one parity, a block of ``n`` cells with
            the halo ``(low, high)`` has the extent ``ceil(low / 2) + n / 2 + ceil(high / 2)`` along the last grid
            axis. On a CPU with several ranks on a node, the array is in memory that these ranks share, unless it is
            large and divided along its innermost axis.

        Raises
        ------
        FieldError, DecompositionError
            Also if a field of one parity has odd grid extents, or blocks that do not begin at even cells along the last
            axis (see ``checkerboard`` of `Grid`).

        Notes
        -----
        Collective. The array stays valid after `close`.
        """
        return self._new(dtype, layout)

    def ones(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> FieldArray:
        """Allocate a field of ones, with the value that `numpy.ones` uses for the dtype; see `zeros`."""
        return self._new(dtype, layout, "ones", 1)

    def full(
        self, value: object, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]
    ) -> FieldArray:
        """Allocate a field filled with ``value``; see `zeros`.

        Parameters
        ----------
        value : scalar or array
            Converted to the dtype as by `numpy.full`: floats are rounded to the precision of a float dtype, and
            truncated for an integer dtype. An array is broadcast to the field's shape on each rank, halo included, by
            NumPy's rules. For example, one number per component of a field with a component axis before two grid axes
            has the shape ``(components, 1, 1)``.
        dtype, **layout
            The same as for `zeros`.

        Raises
        ------
        FieldError
            Also if the dtype cannot represent the value (an imaginary part, a number out of range, NaN for integers, a
            longer string, a mask, a date or a duration). Arrays of structs or objects are cast by NumPy without these
            checks.
        """
        return self._new(dtype, layout, "full", value)

    def empty(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> FieldArray:
        """Allocate a field with undefined contents; see `zeros`."""
        return self._new(dtype, layout, "empty")

    def random(
        self,
        seed: int,
        dist: Literal["uniform", "normal"] = "uniform",
        dtype: npt.DTypeLike | None = None,
        *,
        out: Any = None,
        **layout: Unpack[FieldOptions],
    ) -> FieldArray:
        """Return a field of random numbers that do not depend on the division of the grid.

        Parameters
        ----------
        seed : int
            From 0 to 2**64 - 1; the same on all ranks.
        dist : {"uniform", "normal"}
            Numbers in [0, 1), or of mean 0 and deviation 1; real and imaginary parts are independent.
        dtype : dtype, optional
            float32, float64 (default), complex64 or complex128.
        out : array, optional
            Field of this grid to fill, halo included, in place of a new one; not with ``dtype`` or layout options.
        **layout
            Layout options of `zeros`.

        Returns
        -------
        array
            ``out``, or a new field. Its halo has the numbers of a periodic grid.

        Notes
        -----
        Collective. The generator is Philox4x32-10; its key is the seed, and its counter the flat index of the point in
        the whole field, as `gather` returns it. Uniform numbers have the same bits on CPUs and GPUs; normal numbers
        (Box-Muller) may differ in the last bits.
        """
        from halox.sampling.random_numbers import random_field

        field: FieldArray = random_field(self.domain, seed, dist, dtype, out, layout)
        return field

    def zeros_like(self, field: FieldLike, dtype: npt.DTypeLike | None = None) -> FieldArray:
        """Allocate a field of zeros with the layout of another field; see `zeros`.

        Parameters
        ----------
        field : array
            A field of this grid. The new field has all its options: components, staggering, halo, parity, offsets,
            boundary, sign and position. Results of arithmetic, such as ``2 * field``, have the options that follow from
            their shape only: compute into a new field, as in ``numpy.multiply(field, 2, out=new)``, or `declare` them.
        dtype : dtype, optional
            By default the dtype of ``field``.
        """
        return self._new_like(field, dtype, "zeros")

    def ones_like(self, field: FieldLike, dtype: npt.DTypeLike | None = None) -> FieldArray:
        """Allocate a field of ones with the layout of another field; see `zeros_like`."""
        return self._new_like(field, dtype, "ones", 1)

    def full_like(
        self, field: FieldLike, value: object, dtype: npt.DTypeLike | None = None
    ) -> FieldArray:
        """Allocate a field filled with ``value``, with the layout of another field; see `full` and `zeros_like`."""
        return self._new_like(field, dtype, "full", value)

    def empty_like(self, field: FieldLike, dtype: npt.DTypeLike | None = None) -> FieldArray:
        """Allocate a field with undefined contents and the layout of another field; see `zeros_like`."""
        return self._new_like(field, dtype, "empty")

    @short_errors
    def declare(self, array: Given, **layout: Unpack[FieldOptions]) -> Given:
        """Declare the layout of an array that you allocated.

        Needed if the layout does not follow from the shape, if the field is staggered or of one parity, or if its halo
        differs from the grid's halo. Takes the options of `zeros`, and returns the same array. It is an error if the
        array is already a field of the opposite parity.

        Notes
        -----
        Local; all ranks must make the same declaration. It applies to every array of the same address, shape, strides
        and dtype, such as ``array[:]``, as long as the array that owns the memory lives. Layouts of other views are
        inferred from their shapes. An array may be declared again: later calls use the new layout, but plans made by
        `plan` keep the old layout.
        """
        self._world.check_open()
        self._layouts.declare(array, self._layouts.of_options(layout))
        return array

    def layout(self, field: FieldLike) -> FieldLayout:
        """Return the layout of a field: the positions of its cells in the array and in the grid; local.

        Returns
        -------
        FieldLayout
            Its attributes include ``padded_shape``, the shape of the array; ``interior``, the slices of the owned
            points in the array; ``owned``, the global indices of the owned points; and ``origin``, the global index of
            the array's first point along each axis. For a field of one parity, ``owned`` and ``origin`` count pairs of
            cells along the last axis.
        """
        try:
            return self._layouts.find(field)
        except HaloxError as error:
            raise stripped(error) from error.__cause__

    def interior(self, field: Given) -> Given:
        """Return a view of the cells that this rank owns, without the halo. Local; raises the errors of `layout`."""
        return field[self.layout(field).interior]  # type: ignore[index, no-any-return]

    @property
    def cells(self) -> CellRanges:
        """Cells by global indices: ``u[grid.cells[:-1, 1:]]`` are the cells of this range that the rank owns."""
        from halox.io.regions import CellRanges

        return CellRanges(self.domain.plain, self.layout)

    @property
    def coords(self) -> GridCoords:
        """Coordinates of the whole grid by dimension, NumPy arrays of cells and of faces; empty without coordinates."""
        return self.domain.labels.all_coords()

    @short_errors
    def indices(
        self,
        *,
        halo: bool = False,
        parity: Literal["even", "odd"] | None = None,
        staggered: int | Sequence[int] | None = None,
        field: FieldLike | None = None,
    ) -> tuple[Any, ...]:
        """Return the global indices of this rank's cells, one array per axis, ready to broadcast. Local.

        Parameters
        ----------
        halo : bool
            Whether to include the halo cells. Their indices continue below 0 and beyond the end of the grid.
        parity : {"even", "odd"}, optional
            Return the indices of a field of this parity that has the grid's halo.
        staggered : int or sequence of int, optional
            Return the indices of the points of a field that is staggered along these axes and has the grid's halo.
        field : array, optional
            Return the indices of the points of this field, which has a parity, staggering and halo of its own.

        Returns
        -------
        tuple of ndarray
            Arrays on the grid's device, each with length 1 along all axes except its own. With a parity, the last array
            has the shape of the field without components.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid(4, device="cpu") as grid:
        ...     grid.indices(staggered=0), grid.indices(field=grid.zeros(halo=2), halo=True)
        ((array([0, 1, 2, 3, 4]),), (array([-2, -1,  0,  1,  2,  3,  4,  5]),))
        """
        with_halo = check_bool("halo", halo, FieldError)
        if field is not None and not (parity is None and staggered is None):
            raise FieldError(
                "field determines its layout; leave out parity and staggered, or field"
            )
        options: FieldOptions = {"parity": parity}
        options["staggered"] = () if staggered is None else staggered
        layout = self._layouts.of_options(options) if field is None else self.layout(field)
        return layout.indices(self.xp, halo=with_halo)

    @short_errors
    def locate(
        self,
        points: npt.ArrayLike,
        *,
        coords: Mapping[str, object] | None = None,
        staggered: int | Sequence[int] = (),
    ) -> Array:
        """Return the fractional indices of points given by their coordinates, for `halox.Points`. Local.

        Parameters
        ----------
        points : array_like
            Shape (n, axes), or (n,) if the grid has one axis: coordinates, or indices along axes without coordinates.
        coords : mapping of str to array, optional
            Coordinates by dimension, in addition to ``coords`` of the grid or in place of them. They rise or fall.
        staggered : int or sequence of int
            Return the indices of the points of a field that is staggered along these axes.

        Returns
        -------
        numpy.ndarray
            Shape (n, axes), float64: linear between two cells, exact at a cell. Beyond the first and the last cell, the
            distance to the next cell is continued.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((4, 3), coords={"x": [0.5, 1.5, 2.5, 3.5]}, device="cpu") as grid:
        ...     grid.locate([(0.5, 20.0), (1.25, 35.0)], coords={"y": [10, 20, 40]})
        array([[0.  , 1.  ],
               [0.75, 1.75]])
        """
        from halox.sampling.locating import locate

        spec = self._layouts.of_options({"staggered": staggered}).spec
        return locate(points, self.domain.labels.updated(None, coords), spec.staggered)

    def owner(self, cells: npt.ArrayLike) -> Array:
        """Return the ranks of cells, given by global indices (n, axes); beyond walls the nearest rank. Local."""
        from halox.sampling.weights import owner

        return owner(self.domain.plain, cells)

    # Walls

    @property
    def walls(self) -> tuple[tuple[int, Side], ...]:
        """The ``(axis, side)`` at which this rank's block ends the grid; none on periodic and joined axes."""
        every = product(range(len(self.grid_shape)), get_args(Side))
        return tuple(wall for wall in every if self.at_wall(*wall))

    def at_wall(self, axis: int | str, side: Side) -> bool:
        """Whether this rank's block ends the grid on a side of an axis; False on a periodic or joined side. Local."""
        return self.domain.plain.is_at_wall(axis_number(axis, self.dims), side)

    def at_end(self, axis: int | str, side: Side) -> bool:
        """Whether this rank has the first ("low") or last cells along an axis, also if it is periodic. Local."""
        return self.domain.plain.is_at_end(axis_number(axis, self.dims), side)

    def wall(
        self, field: Given, axis: int | str, side: Side, depth: int = 1, *, halo: bool = False
    ) -> Given:
        """Return a view of the cells of a field next to a wall; empty on ranks that are not at this wall. Local.

        Parameters
        ----------
        field, axis, side
            A field of the grid, and a wall as in `walls`, or with the axis by its name in ``dims``.
        depth : int
            Number of layers of owned cells.
        halo : bool
            Whether to include the halo: its layers beyond the wall, and along the other axes the whole array.
        """
        index = self.layout(field).wall(axis_number(axis, self.dims), side, depth, halo=halo)
        return field[index]  # type: ignore[index, no-any-return]

    @short_errors
    def dataarray(self, field: FieldLike, **options: Any) -> Any:
        """Return this rank's cells as an `xarray.DataArray`; see `halox.xarray.dataarray`."""
        from halox.xarray import dataarray

        return dataarray(self, field, **options)

    @single_threaded
    def from_dataarray(
        self,
        array: object,
        *,
        dims: Sequence[str] | None = None,
        part: Literal["whole", "block", "halo"] = "whole",
    ) -> FieldArray:
        """Make a field from an `xarray.DataArray`; see `halox.xarray.from_dataarray`. Collective."""
        self._world.begin("from_dataarray")
        labelled = self._world.attempt(lambda: import_module("halox.xarray"), "from_dataarray")
        made: FieldArray = labelled.from_dataarray(self, array, dims=dims, part=part)
        return made

    # Exchanges

    def exchange(self, *fields: FieldLike, corners: bool | None = None, axes: Axes = None) -> None:
        """Fill the halos of fields with the neighbours' cells.

        Parameters
        ----------
        *fields : array
            Fields that this grid allocated, or arrays of its padded shape on its device; any dtypes. Component axes are
            inferred from the shape. Staggered arrays, and arrays with another halo, need `declare`. All fields are sent
            together, in one message per neighbour.
        corners : bool, optional
            Whether to fill edges and corners; by default the grid's setting. Fields with ``offsets`` get no corners.
        axes : str, int, or sequence of these, optional
            Fill only the halos along these axes, by name or number, with the corners that lie in these halos alone.

        Notes
        -----
        Collective among neighbours. The first call with new fields of the grid, or with arrays of a new layout, dtype
        or strides, makes a plan and is collective over all ranks; the last 512 plans are kept. Ordered with CuPy's
        current stream on a GPU. Halo cells outside the grid are not changed, unless the field has a ``boundary`` there.
        """
        key: Hashable = self.corners if corners is None else as_bool(corners)
        if axes is not None:
            key = self._plans.key(key, axes)
        cached = self._known_plans.find(key, fields) or self._plan_cache.find(key, fields)
        if cached is None:
            cached = self._plans.add("copy", fields, corners, key, axes=axes)
        runner, bound = cached
        runner.run(bound)

    def accumulate(
        self, *fields: FieldLike, corners: bool | None = None, axes: Axes = None
    ) -> None:
        """Add halo values to the cells of their owners, and set the halo cells to zero: the adjoint of `exchange`.

        It has the parameters and errors of `exchange`. Values are added in an order that does not change between runs.
        At walls with a ``boundary`` halo values are added to the cells from which they were filled, with the factors of
        the fill (complex ones conjugated); the halo of a constant is only set to zero.

        Raises
        ------
        FieldError
            Also if a field's dtype is not numeric, or a boundary is a function.
        """
        key: Hashable = ("add", self.corners if corners is None else as_bool(corners))
        if axes is not None:
            key = self._plans.key(key, axes)
        cached = self._known_plans.find(key, fields) or self._plan_cache.find(key, fields)
        if cached is None:
            cached = self._plans.add("add", fields, corners, key, axes=axes)
        runner, bound = cached
        runner.run(bound)

    def plan(
        self,
        *fields: FieldLike,
        corners: bool | None = None,
        axes: Axes = None,
        path: str | None = None,
        every: int = 1,
        overlap: Literal["auto"] | bool = "auto",
    ) -> Plan:
        """Make a persistent exchange of these fields.

        Parameters
        ----------
        *fields, corners, axes
            The same as for `exchange`.
        path : str, optional
            The data path of this plan; by default the path of the grid.
        every : int
            Number of steps between exchanges, see `Plan.steps`: for steps that read ``w`` cells on each side, halos of
            ``every * w`` cells. Values above 1 need all axes and corners, and no phase and no ``connect``.
        overlap : {"auto", True, False}
            Whether `Plan.overlap` computes during the exchange. "auto" decides by the time of the first ten loops, on a
            GPU by prediction; each rank decides alone.

        Returns
        -------
        Plan
            ``plan()`` exchanges; ``plan.start()`` and ``plan.finish()`` allow interior work in between.

        Notes
        -----
        Collective.
        """
        return self._plans.persistent(fields, corners, path, every, overlap, axes)

    def describe(self) -> str:
        """Return a text about the division of the grid; local."""
        return Text(self.domain.division.text(self.rank, self._world.node_count))

    def explain(self, *fields: FieldLike) -> Report:
        """Return a report of the messages and paths of an exchange of fields; the first call is collective."""
        if not fields:
            raise FieldError("explain: give fields; grid.describe() describes the grid")
        return self._plans.of_call(fields, None, self.corners, call="explain")[0].report

    def predict(
        self, ranks: int | Sequence[int], *fields: Any, **options: Any
    ) -> list[dict[str, Any]]:
        """Predict the time of a step on other numbers of ranks, by a model (docs/predict.md); exchanges nothing.

        Parameters
        ----------
        ranks : int or sequence of int
            Numbers of ranks; an int stands for the powers of two up to it that ``proc_shape`` allows, and for itself.
        *fields
            Fields of an exchange, or dtypes; by default one float64 field.
        **options
            ``stencil`` (ns per cell), ``overlap``, ``reductions``, ``graph``, ``weak``, ``proc_shape``, ``node_ranks``,
            ``gpu_ranks``, ``link`` and ``network`` (us, GB/s), as in docs/predict.md.

        Returns
        -------
        list of dict
            For each number of ranks its ``proc_shape`` and ``rank_shape``, ``messages`` and ``bytes`` that the busiest
            rank sends to others, times (``step_us`` is the whole step), ``efficiency`` relative to the first number,
            and the fastest process grid, ``best_proc_shape`` and ``best_us``. Collective on GPUs, else local.
        """
        from halox.plans.prediction import constants, predict

        return predict(self, ranks, fields or ["f8"], constants(self), **options)

    # Solvers

    def loop(
        self, step: Callable[[], object], until: Any, most: int = 100_000, every: int = 1
    ) -> Loop:
        """Return a loop that repeats a step until a flag is set; on a GPU it runs without the host (docs/loops.md).

        Parameters
        ----------
        step : callable
            Function without arguments: exchanges, kernels on the current stream, reductions with ``out=``. The GPU
            repeats the launches of one call, so that values pass from step to step in arrays only.
        until : array
            One bool or integer on the device of the fields, which ``step`` writes; not 0 ends the loop.
        most, every : int
            Limit of the steps; steps between two looks at the flag, a divisor of ``most``.

        Returns
        -------
        Loop
            ``loop()`` runs the steps, and returns their number.

        Notes
        -----
        Collective. The first ``every`` steps are plain calls. So are all steps on CPUs, and if a step needs the host.
        """
        from halox.plans.device_loop import Loop

        return Loop(self.domain.context, self.device_id, step, until, most, every)

    def linear_operator(self, apply: Callable[..., object], fields: Any) -> FieldOperator:
        """Return a function of fields as a matrix, for the solvers of SciPy, CuPy and PETSc.

        Parameters
        ----------
        apply : callable
            Called as ``apply(u, out)``, to set the owned cells of ``out`` to a linear function of the owned cells of
            ``u``. The halo of ``u`` is not filled: call `exchange`.
        fields : array, or sequence of array
            Fields with the layouts and the dtype of the arguments; their values are not used. For several fields
            ``apply`` is called as ``apply(u, v, out_u, out_v)``.

        Returns
        -------
        FieldOperator
            A ``LinearOperator`` of SciPy, or on a GPU of CuPy; on several ranks only a context of petsc4py's matrices,
            see `halox.solvers.linear_operators.FieldOperator`. Making it is collective, and so are products.

        Examples
        --------
        >>> import halox, numpy as np
        >>> from scipy.sparse.linalg import cg
        >>> grid = halox.Grid(64, boundary="antisymmetric", device="cpu")
        >>> def apply(u, out):
        ...     grid.exchange(u)
        ...     out[1:-1] = 2 * u[1:-1] - u[:-2] - u[2:]
        >>> cg(grid.linear_operator(apply, grid.zeros()), np.ones(64), rtol=1e-10)[0][:2].round(6)
        array([16., 47.])
        """
        from halox.solvers.linear_operators import linear_operator

        return cast("FieldOperator", linear_operator(self.domain, apply, fields))

    def coarsen(
        self, factor: int | Sequence[int] = 2, *, even: bool = True, whole: bool | None = None
    ) -> CoarseGrid[FieldArray]:
        """Make a grid of larger cells over this grid, with the same options, for multigrid methods.

        Parameters
        ----------
        factor : int, or one per axis
            Cells per coarse cell: coarse cell ``c`` lies over the cells from ``factor * c``.
        even : bool
            Whether the factor must divide all blocks. With False a coarse cell belongs to the rank of its first cell,
            and may lie over cells of the next rank; the last one may lie over fewer cells.
        whole : bool, optional
            Whether every rank holds the whole coarse grid; by default if it has at most 4096 cells, or blocks narrower
            than the halo or two cells.

        Returns
        -------
        halox.grid.CoarseGrid
            ``coarse.aligned(u)`` is the part of a field over this rank's block, and ``coarse.collector(u)`` returns a
            function that completes a whole field from the parts of all ranks.

        Raises
        ------
        DecompositionError
            If the factor does not divide the blocks.

        Notes
        -----
        Collective. Close the coarse grid separately. Numbers in a ``boundary`` are not scaled. ``coords`` are not kept.
        """
        from halox.solvers.coarsening import coarsen

        return CoarseGrid(self.domain, coarsen(self.domain, factor, even, whole))

    # Whole arrays and checkpoints

    @single_threaded
    def gather(
        self, field: FieldLike, root: int = 0, *, region: Sequence[slice] | None = None
    ) -> Array | None:
        """Return the whole field, or a region of it, in host memory, on rank ``root``; None on other ranks.

        ``region`` is a slice of global indices for each grid axis, with any positive step; only ranks that own some of
        it send cells. A field of one parity stays compact, with half the cells along the last grid axis.

        Notes
        -----
        Collective; blocks. Rank ``root`` needs memory for the whole field and 64 MiB. Other ranks need 64 MiB if their
        cells are not contiguous, and memory for all of their cells if the field is on a GPU.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((8, 6), device="cpu") as grid:
        ...     plane = grid.gather(grid.ones(), region=(slice(4, 5), slice(None, None, 2)))
        ...     plane.shape if grid.rank == 0 else (1, 3)
        (1, 3)
        """
        from halox.io.gather_scatter import gather

        self._world.begin("gather")
        return gather(self.domain, field, root, region)

    @single_threaded
    def scatter(
        self,
        /,
        whole: object,
        root: int = 0,
        *,
        out: Any = None,
        region: Sequence[slice] | None = None,
        **layout: Unpack[FieldOptions],
    ) -> FieldArray:
        """Distribute a whole array of one rank: the inverse of `gather`.

        Parameters
        ----------
        whole : array or None
            On rank ``root``, an array of all cells of the grid, without halo, in the shape that `gather` returns; any
            fixed-size dtype. A `numpy.memmap` is read part by part. The argument is ignored on other ranks.
        root : int
            The rank that has the whole array; the same on all ranks.
        out : array, optional
            A field of the grid to fill; given on all ranks or on no rank. By default a new field is made.
        region : sequence of slice, optional
            The part of ``out`` to fill, as in `gather`; ``whole`` then has the cells of the region alone.
        **layout
            Layout options of a new field, see `zeros`. Without options, component axes are inferred from the array's
            shape.

        Returns
        -------
        array
            The field. The halo of a new field is zero, the halo of ``out`` is not changed; `exchange` fills either.

        Notes
        -----
        Collective; blocks. Needs memory for the field and 64 MiB.

        Examples
        --------
        >>> import halox, numpy as np
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     u = grid.scatter(np.arange(24.0).reshape(4, 6) if grid.rank == 0 else None)
        ...     grid.sum(u)
        np.float64(276.0)
        """
        from halox.io.gather_scatter import scatter

        self._world.begin("scatter")
        made: FieldArray = scatter(self.domain, whole, root, out, layout, region)
        return made

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
        keep: int = 1,
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
        fields : mapping of str to array or Particles, optional
            Fields by name, with any dtypes and layouts, and `Particles`; or by keyword, as in ``u=u``.
        attrs : mapping, optional
            Attributes such as time and step: numbers, also NaN, text, lists, and dicts whose keys are text. Dates are
            stored as their ISO text. The attributes of rank 0 are stored.
        dims : sequence of str, optional
            Names of the grid axes; by default ``dims`` of the grid, with "x_axis" in place of "x" if a field is called
            "x".
        coords : mapping of str to array, optional
            Coordinates of the whole grid by dimension, in addition to ``coords`` of the grid or in place of them. The
            coordinates of rank 0 are stored; labelled arrays keep their attributes.
        compressors : str, dict, codec or sequence, optional
            Zarr codecs: their names, such as "zstd", their JSON, such as ``{"name": "zstd", "configuration": {"level":
            3}}``, or codecs of `zarr.codecs`. By default chunks are not compressed.
        progress : callable, optional
            Called on each rank as ``progress(done_bytes, total_bytes)`` after each shard, with the bytes of this rank.
        keep : int
            Number of Zarr groups to keep. With 3, the last one of ``run.zarr`` is renamed to ``run.1.zarr``, and the
            one before to ``run.2.zarr``; `load` reads them under these names. If anything else has one of these names,
            the save is an error.

        Raises
        ------
        CheckpointError
            If the checkpoint cannot be written: no permission, no space, another run is writing it, a file or folder
            that is not a checkpoint has this name, or it is a name of netCDF or HDF5. An existing checkpoint then stays
            unchanged.

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
        ...     loaded = grid.load(f"{folder}/run.zarr")
        ...     grid.sum(loaded["u"]), loaded.attrs
        (np.float64(48.0), {'step': 7})
        """
        from halox.io.checkpoint.calls import SaveOptions, save

        options = SaveOptions(attrs, dims, coords, compressors, progress, keep)
        save(self.domain, path, fields, named, options)

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

        Returns
        -------
        Loaded
            A dict of the fields, and of dicts for new `Particles`; ``attrs`` has the saved attributes.

        Raises
        ------
        CheckpointError
            If the checkpoint does not exist, has another grid shape or format, lacks a requested field, is truncated or
            damaged, or was replaced while it was read. The contents of the fields to fill are then undefined.

        Notes
        -----
        Collective; blocks. Loaded cells have exactly the saved bits. Halos are not filled: call `exchange`. Each rank
        reads its own cells. Needs at most 256 MiB of memory per rank.
        """
        from halox.io.checkpoint.calls import load

        return load(self.domain, path, into, named, names, progress)

    # Life

    @single_threaded
    def close(self) -> None:
        """Free plans, staging memory and communicators.

        Collective; repeated calls have no effect. Fields stay valid. Later collective calls and `declare` raise
        `ClosedError`; local calls such as `interior`, `layout` and `indices` still work.
        """
        if not self._world.closed:
            self._plans.cache.clear()
            self.domain.close_dependents()
            self._reductions.close()
            self.domain.close()

    def __repr__(self) -> str:
        """Return the grid's shape and division."""
        if "domain" not in vars(self):
            return "<halox.Grid that could not be made>"
        joined = self.domain.decomposition.joined
        connect = f"connect {joined}, " if joined else ""
        return (
            f"<halox.Grid {self.grid_shape} on {self.proc_shape} ranks, halo {self.halo}, periodic {self.periodic}, "
            f"{connect}{self.device}{', closed' if self._world.closed else ''}>"
        )


class CoarseGrid(Grid[FieldArray]):
    """A grid over a finer grid, made by `Grid.coarsen`, with all methods of `Grid`.

    Attributes
    ----------
    is_whole : bool
        Whether every rank holds the whole grid. Each rank then has a grid of one rank, and its exchanges and reductions
        need no communication.
    """

    def __init__(self, finer: Domain, coarse: Coarse) -> None:
        self.is_whole: bool = coarse.is_whole
        self._finer, self._coarse = finer, coarse
        self._collectors: list[Plan] = []
        self._use(coarse.domain)

    def aligned(self, field: Any) -> Any:
        """Return a view of a field's cells over this rank's block of the finer grid, halo included.

        If the grid is not whole, this is the field itself. Local; raises the errors of `layout`.
        """
        from halox.solvers.coarsening import cells_over_block

        layout = self.layout(field)
        if not self.is_whole:
            return field
        return field[cells_over_block(self._finer, self._coarse, layout)]

    def collector(self, field: Any) -> Callable[[], None]:
        """Return a function that completes a field after each rank has set its own cells in the `aligned` part.

        If the grid is whole, this is a `halox.Plan` of the parts of all ranks, which `close` closes. Otherwise it
        does nothing. Halos are not filled: call `exchange`.

        Collective over the ranks of the finer grid, and so are calls. Raises the errors of `layout`, on all ranks.
        """
        from halox.solvers.coarsening import collecting_plan

        plan = collecting_plan(self._finer, self._coarse, field)
        if plan is None:
            return lambda: None
        self._collectors.append(plan)
        return plan

    def close(self) -> None:
        """Free plans, collectors and memory; see `Grid.close`."""
        while self._collectors:
            self._collectors.pop().close()
        super().close()
