"""`Points`: values of fields at points of a grid, such as receivers, and the adjoint, sources."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.domain.domain import domain_of
from halox.errors import FieldError, MismatchError, StateError
from halox.io.gather_scatter import PART_BYTES, root_of
from halox.reductions.grid_reductions import GridReductions
from halox.runtime.arrays import Array, Described, as_ndarray
from halox.runtime.call_guard import Unique, short_errors, single_threaded
from halox.runtime.gpu.streams import is_capturing, stream_pointer
from halox.runtime.known_arrays import KnownArrays
from halox.sampling.locating import as_numbers, as_points, grid_first, indices_of
from halox.sampling.records import Record
from halox.sampling.weights import Corners, Weights, adding, check_points, owners, reading
from halox.values import shown

if TYPE_CHECKING:
    from halox.runtime.array_types import FieldLike
    from halox.sampling.device_points import PointLaunch

_MOST = 2.0**53


class Points(Unique):
    """Points of a grid, at which fields are read (`get`) and to which values are added (`add`).

    Parameters
    ----------
    grid : Grid
        The grid of the fields.
    indices : array_like, or mapping of str to array_like
        Global indices, shape (n, axes), or (n,) if the grid has one axis; the same on all ranks. Integers are cells.
        Fractional indices interpolate linearly between the cells below and above. Along a periodic axis, indices below
        2**53 in magnitude wrap around; along other axes, they may be in the field's halo. A mapping gives positions by
        dimension, ``{"x": ..., "y": ...}``: in ``coords`` of the grid, or indices along axes without coordinates. For
        fields that are staggered along "x" it has "x_face" in place of "x". `Grid.locate` takes other coordinates.

    Attributes
    ----------
    indices : numpy.ndarray
        The indices as float64, shape (n, axes); read-only.
    owners : numpy.ndarray
        Rank of each point: the owner of the cell at or below the point, beyond a wall the nearest rank.

    Raises
    ------
    FieldError
        If the indices have another shape, are masked or not finite, or are 2**53 or more in magnitude. Also if a
        mapping has other dimensions than the grid, or coordinates neither rise nor fall. In methods: if an array does
        not fit the grid, or a point is beyond its halo at a wall.
    MismatchError
        If ranks give different indices, or dtypes, layouts or roots; on a GPU compared in the first call with a layout
        and dtype.
    DeviceError, StateError, ClosedError, ExchangeTimeoutError
        The same as for `Grid`.

    Notes
    -----
    Collective; every rank keeps all indices. Fields may have any layout, except one parity; indices of a staggered
    field count its points.

    Examples
    --------
    >>> import halox
    >>> with halox.Grid((8, 6), device="cpu") as grid:
    ...     u = grid.zeros()
    ...     grid.interior(u)[...] = 10 * grid.indices()[0] + grid.indices()[1]
    ...     grid.exchange(u)
    ...     halox.Points(grid, [(2, 3), (6.5, 0.25)]).get(u)
    array([23.  , 65.25])
    >>> with halox.Grid(4, coords={"x": [10, 20, 40, 80]}, device="cpu") as grid:
    ...     halox.Points(grid, {"x": [30, 80]}).indices
    array([[1.5],
           [3. ]])
    """

    def __init__(
        self, grid: GridReductions, indices: npt.ArrayLike | Mapping[str, npt.ArrayLike]
    ) -> None:
        self._domain = domain_of(grid)
        self._grid, self._world = grid, self._domain.world

        def check() -> tuple[Corners, dict[str, bytes]]:
            found: Any = indices
            if isinstance(indices, Mapping):
                found = indices_of(indices, self._domain.labels)
            self.indices = as_points(found, len(self._domain.grid_shape), "indices")
            if len(far := np.flatnonzero((abs(self.indices) >= _MOST).any(axis=1))):
                raise FieldError(
                    f"indices: point {far[0]} is at {shown(self.indices[far[0]].tolist())}, and float64 does not hold "
                    "all integers from 2**53 on; give its index within the grid, as index % cells"
                )
            self.indices.flags.writeable = False
            return Corners.of(self.indices), {"indices": self.indices.tobytes()}

        with self._world.guard:
            self._world.begin("making Points")
            self._corners, given = self._world.gather(check, "the making of points")
            self._world.check_alike(given.distinct, shown=lambda sent: shown(np.frombuffer(sent)))
        self.owners = owners(self._domain.plain, self._corners.cells[:, 0])
        self._weights: dict[tuple[str, FieldLayout], Weights] = {}
        self._launches: dict[tuple[object, ...], PointLaunch] = {}
        self._steps, self._records = 0, list[Record]()  # a record for each field
        self._known: KnownArrays[list[Record]] = KnownArrays()
        self._domain.layouts.register(self._known)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.indices)

    def __repr__(self) -> str:
        """Return the number of points and the grid."""
        return f"<halox.Points: {len(self)} on {self._grid!r}>"

    @single_threaded
    def get(self, field: FieldLike, *, root: int | None = None) -> Any:
        """Return the values of a field at the points.

        Parameters
        ----------
        field : array
            A field of the grid. Fractional points need its halo, corners included: call `Grid.exchange` before.
        root : int, optional
            The rank that gets the values; other ranks get None. By default all ranks get them.

        Returns
        -------
        array or None
            Shape (n,), or (n, components) with all component axes; in the dtype of the field and the memory of the
            grid's fields. Values at cells have the bits of the cells. Other values are computed in float64 or
            complex128, and have the same bits for any number of ranks.

        Raises
        ------
        FieldError
            Also if the field lacks a halo around a fractional point; if its dtype has no fractions, or no kernel on a
            GPU; if ``root`` is not a rank.

        Notes
        -----
        Collective. Blocks on the host. On a GPU, from the second call with a layout and dtype on, it is one launch
        ordered with the current stream, and with several ranks a `Grid.allreduce`. A CUDA graph can capture it if it
        can capture the allreduce; an error of one rank is then raised as for `Grid.sum`.
        """
        on_host, launch = self._domain.device_id is None, None
        if not on_host:
            described, layout = self._domain.layouts.read(field)
            launch = self._launches.get(_key("get", described, layout))
        if launch is None:

            def check() -> tuple[tuple[Described, FieldLayout], dict[str, object]]:
                described, layout = self._read(field)
                if not on_host:
                    self._launch("get", described, layout)
                kind = f"{described.dtype}, {layout.spec.without_boundary}"
                rank = root if root is None else root_of(self._world, root)
                return (described, layout), {"the field": kind, "root": rank}

            self._world.begin("get")
            described, layout = self._world.attempt(check, "a call of Points.get", alike=True)
        is_root = root is None or root_of(self._world, root) == self._world.rank
        # All bytes are zero; a launch sets all values.
        values: Any = (np.zeros if on_host else self._domain.xp.empty)(
            self._shape(layout), described.dtype
        )
        if on_host:
            weights = self._weights_of("get", layout)
            if len(weights.rows):
                terms = grid_first(as_ndarray(field), layout)[tuple(weights.columns.T)]
                values[weights.rows] = weights.sums(terms)
        else:
            launch = self._launch("get", described, layout)
            launch(values.data.ptr, described.pointer, stream_pointer())
        self._combine(values)
        return values if is_root else None

    @short_errors
    def add(self, field: FieldLike, values: npt.ArrayLike) -> None:
        """Add values to a field at the points: the adjoint of `get`.

        Each cell around a point gets the share of its weight, on the rank that owns the cell. Shares of cells beyond a
        wall or a connection are lost. Points at one cell are added up in their order.

        Parameters
        ----------
        field : array
            A field of the grid. Its halo is neither read nor changed.
        values : array_like
            Numbers that broadcast to the shape of the result of `get`; the same on all ranks.

        Raises
        ------
        FieldError
            Also if the field is not numeric or is read-only, or the values do not broadcast or cannot be cast to its
            dtype.

        Notes
        -----
        Local; an error is raised on its rank. On a GPU it is one launch, ordered with the current stream, which a CUDA
        graph can capture if the values are a contiguous CuPy array of the field's dtype and the result's shape.
        """
        described, layout = self._read(field)
        numbers = as_numbers(values, described, self._shape(layout), self._domain.xp)
        if self._domain.device_id is None:
            weights = self._weights_of("add", layout)
            if len(weights.rows):
                sums = weights.sums(numbers[weights.columns])
                grid_first(as_ndarray(field), layout)[tuple(weights.rows.T)] += sums
        else:
            launch = self._launch("add", described, layout)
            launch(described.pointer, numbers.data.ptr, stream_pointer())

    def record(self, *fields: FieldLike) -> None:
        """Record the values of fields at this rank's points, in each step of a loop; `collect` returns them.

        The fields are those of `get`, in each step as many, of the same layouts and dtypes; `FieldError` otherwise.
        `StateError` while the current stream is captured.

        Local; an error is raised on its rank. On a GPU it is one launch a field, ordered with the current stream, and
        the record stays on the GPU. On the host the record of a point between cells is its cells.
        """
        if self._domain.device_id is not None and is_capturing():
            raise StateError("the current stream is being captured; record after the graph has run")
        records = self._known.find(None, fields)
        if records is None or records is not self._records:
            records = self._records_of(fields)
        step = self._steps
        for number, record in enumerate(records):
            record.add(fields[number], step)
        self._steps = step + 1

    @single_threaded
    def collect(self, *, root: int | None = None) -> Any:
        """Return the values of all points in all recorded steps, and begin a new record. Collective; blocks.

        All ranks get them, or only ``root``, and other ranks None. They are an array on the host, with the result of
        `get` in a row for each step; a tuple of arrays if several fields were recorded. `StateError` if a rank has
        recorded nothing; `MismatchError` also if ranks recorded other fields, or other numbers of steps. A new record
        begins after these errors, too.
        """

        def prepare() -> tuple[tuple[list[Array], list[Array]], dict[str, object]]:
            steps, records, wholes = self._steps, self._records, []
            if not steps:
                raise StateError("nothing was recorded; call record(field) in each step before")
            if root is None or root_of(self._world, root) == self._world.rank:
                wholes = [
                    np.empty((steps, *self._shape(each.layout)), each.dtype) for each in records
                ]
            kinds = ", ".join(each.kind for each in records)
            found = [each.values(steps) for each in records], wholes
            return found, {"root": root, "the number of steps": steps, "the fields": kinds}

        self._world.begin("collect")
        try:
            own, wholes = self._world.attempt(prepare, "a call of Points.collect", alike=True)
        except (StateError, MismatchError):
            # The ranks' records do not fit together in later calls either.
            self._steps, self._records = 0, []
            raise
        mine = self.owners == self._world.rank
        for number, values in enumerate(own):
            shape = (len(self), *values.shape[2:])
            steps = max(1, PART_BYTES // max(1, prod(shape) * values.itemsize))
            for start in range(0, len(values), steps):
                rows = values[start : start + steps]
                part = np.zeros((len(rows), *shape), values.dtype)
                part[:, mine] = rows
                self._combine(part)
                if wholes:
                    wholes[number][start : start + steps] = part
        self._steps, self._records = 0, []
        return wholes[0] if len(wholes) == 1 else tuple(wholes) or None

    @short_errors
    def _records_of(self, fields: tuple[FieldLike, ...]) -> list[Record]:
        """Return the records of fields, in the first step new ones, after a check of layouts and dtypes."""
        if not fields:
            raise FieldError("fields: no field given; pass one or more fields of this grid")
        domain, reads = self._domain, [self._read(field) for field in fields]
        launch = None if domain.device_id is None else self._launch_record
        if not self._steps:
            self._records = [
                Record(*read, self._weights_of("get", read[1]), domain.xp, launch) for read in reads
            ]
        kinds = [f"{described.dtype} {layout.spec.without_boundary}" for described, layout in reads]
        before = [record.kind for record in self._records]
        if kinds != before:
            raise FieldError(
                f"fields: got {', '.join(kinds)}, after {', '.join(before)}; record the same in each step, or collect()"
            )
        self._known.keep(None, fields, self._records)
        return self._records

    def _launch_record(self, field: FieldLike, row: Any) -> None:
        described, layout = self._domain.layouts.read(field)
        self._launch("record", described, layout)(row.data.ptr, described.pointer, stream_pointer())

    def _combine(self, values: Any) -> None:
        """Set the values of other ranks' points, which are 0, on all ranks."""
        if self._world.size > 1 and values.size:
            # All bits are 0, so that this is exact for any dtype.
            words = values.reshape(-1).view("u1").view(f"u{gcd(values.nbytes, 8)}")
            self._grid.allreduce(words, "bitwise_or", out=words)

    def _shape(self, layout: FieldLayout) -> tuple[int, ...]:
        return (len(self), *layout.spec.components_before, *layout.spec.components_after)

    def _read(self, field: object) -> tuple[Described, FieldLayout]:
        """Describe a field that has values at all points."""
        described, layout = self._domain.layouts.read(field)
        check_points(layout, self.indices, self._corners.splits)
        if any(self._corners.splits) and described.dtype.kind not in "fc":
            raise FieldError(
                f"field: dtype {described.dtype} has no values between cells; use floats, or round the indices"
            )
        return described, layout

    def _weights_of(self, name: str, layout: FieldLayout) -> Weights:
        key = name, layout
        if key not in self._weights:
            self._weights[key] = (adding if name == "add" else reading)(layout, self._corners)
        return self._weights[key]

    def _launch(self, name: str, described: Described, layout: FieldLayout) -> PointLaunch:
        key = _key(name, described, layout)
        if key not in self._launches:
            from halox.sampling.device_points import PointLaunch, plan_points

            weights, device = self._weights_of(name, layout), described.device
            assert device is not None
            points = len(self)
            if name == "record":  # this rank's points alone
                points = len(weights.rows)
                weights = weights._replace(rows=np.arange(points))
            tables = plan_points(layout, described, weights, points, add=name == "add")
            self._launches[key] = PointLaunch(tables, device)
        return self._launches[key]


def _key(name: str, described: Described, layout: FieldLayout) -> tuple[object, ...]:
    alignment = described.pointer % described.dtype.itemsize
    return name, layout, described.dtype, described.strides, alignment
