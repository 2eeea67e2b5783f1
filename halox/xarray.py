"""Conversion between fields and labelled arrays (`xarray.DataArray`, `xarray.Dataset`); needs xarray.

`Grid.dataarray` and `Grid.from_dataarray` import this module when they are called. Importing this module gives every
`xarray.Dataset` the accessor ``halox``, see `DatasetFields`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from halox.checkpoint.arguments import Progress
from halox.checkpoint.calls import SaveOptions, save
from halox.checkpoint.fields import kept_attributes, kept_options
from halox.checkpoint.store import PREFIX
from halox.decomposition import FieldLayout, FieldSpec
from halox.decomposition.normalise import Halo
from halox.dimension_names import FACE, Coordinates, beyond, with_faces
from halox.domain.domain import domain_of
from halox.domain.options import FieldOptions, fixed_dtype
from halox.errors import FieldError, MismatchError, MissingPackageError, raising
from halox.grid import Grid
from halox.runtime.arrays import Array
from halox.runtime.call_guard import short_errors
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import as_device_array, to_host
from halox.values import check_bool, shown

try:
    import xarray
except ImportError as error:
    raise MissingPackageError(
        "labelled arrays need xarray; install it with `pip install xarray`"
    ) from error

_CALL, _WRITING = "from_dataarray", "to_zarr"

WHOLE, BLOCK, HALO = "the whole field", "the cells of this rank", "the cells of this rank with halo"


# From fields


def dataarray(
    grid: Grid[Any],
    field: Any,
    *,
    name: str | None = None,
    dims: Sequence[str] | None = None,
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    halo: bool = False,
) -> xarray.DataArray:
    """Return this rank's cells of a field as a labelled array.

    Parameters
    ----------
    grid : Grid
    field : array
        A field of the grid.
    name : str, optional
        Name of the result.
    dims : sequence of str, optional
        Names of the grid axes; by default ``dims`` of the grid. The name of a staggered axis gets the suffix "_face".
        Component axes are called "component_0", "component_1", ...
    coords : mapping, optional
        Coordinates in addition to ``coords`` of the grid, or in place of them: by dimension a one-dimensional array
        with a value for every point of the whole grid (along "x_face", for every face). Labelled arrays keep their
        attributes, such as units. If only cells have coordinates, faces lie halfway between them, and vice versa.
        Dimensions without coordinates have global indices.
    attrs : mapping, optional
        Attributes of the result. The options ``sign``, ``position`` and ``boundary`` of the field are added as
        attributes such as "halox_sign", so that `from_dataarray` restores them.
    halo : bool
        Whether to include the halo, so that the result can be exchanged (`DatasetFields.exchange`). Coordinates beyond
        an end of the grid continue with the spacing at that end.

    Returns
    -------
    xarray.DataArray
        A view of the field, also on a GPU (``.as_numpy()`` copies it to the host).

    Raises
    ------
    MissingPackageError
        If xarray is not installed.
    FieldError
        If ``dims`` does not name each grid axis, ``name`` is not a string, the field is of one parity, or a coordinate
        is for an unknown dimension, has the wrong length, or is not one-dimensional.

    Notes
    -----
    Local. `xarray.combine_by_coords` combines the blocks of several ranks. `from_dataarray` is the inverse.
    """
    domain_of(grid)
    layout = grid.layout(field)
    spec = layout.spec
    if spec.parity is not None:
        raise FieldError(
            f"field has {spec.parity} cells only, whose coordinates are no product of axes; set the cells of a "
            "field of the whole grid from it"
        )
    if name is not None and not isinstance(name, str):
        raise FieldError(f"name must be a str or None, got {shown(name)}")
    labels = grid.domain.labels.updated(dims, coords, numbers=False)
    axes = with_faces(labels.dims, spec.staggered)
    with_halo = check_bool("halo", halo, FieldError)
    before = len(spec.components_before)
    names = [f"component_{n}" for n in range(before + len(spec.components_after))]
    cuts = layout.stored if with_halo else layout.owned
    points = layout.global_shape[before:]
    return xarray.DataArray(
        field if with_halo else field[layout.interior],
        dims=(*names[:before], *axes, *names[before:]),
        coords={
            axis: _cut(axis, labels.along(*place), cut, n)
            for axis, place, cut, n in zip(
                axes, enumerate(spec.staggered), cuts, points, strict=False
            )
        },
        name=name,
        attrs=kept_attributes(spec, grid.domain.plain.spec) | dict(_attrs(attrs)),
    )


def _attrs(attrs: object) -> Mapping[str, Any]:
    if attrs is not None and not isinstance(attrs, Mapping):
        raise FieldError(f"attrs must be a mapping of names to attributes, got {shown(attrs)}")
    return attrs or {}


def _cut(axis: str, given: Coordinates | None, cut: slice, points: int) -> xarray.Variable:
    """Return the coordinates of a rank's points along an axis of ``points`` points."""
    if given is None:
        return xarray.Variable((axis,), np.arange(cut.start, cut.stop))
    values, attrs = given
    inside = values[max(cut.start, 0) : cut.stop]
    low, high = max(-cut.start, 0), max(cut.stop - points, 0)
    if low or high:
        inside = np.concatenate([beyond(values, low)[::-1], inside, beyond(values[::-1], high)])
    return xarray.Variable((axis,), inside, attrs)


# To fields


def from_dataarray(grid: Grid[Any], array: object, *, dims: Sequence[str] | None = None) -> Any:
    """Make a field from a labelled array; `Grid.from_dataarray` calls it.

    Parameters
    ----------
    grid : Grid
    array : xarray.DataArray
        On every rank either the whole field, from which each rank takes its cells, or the cells of this rank, with or
        without a halo. The halo is the grid's halo, or the halo of the field that the array is a view of. Axes may be
        in any order. "x_face" in place of "x" is a staggered axis; axes with other names are components. If values are
        loaded lazily, as from a file, only the needed part is loaded.
    dims : sequence of str, optional
        Names of the grid axes; by default ``dims`` of the grid.

    Returns
    -------
    array
        A new field on the grid's device. Its halo is zero unless ``array`` includes the halo. It has the options
        ``sign``, ``position`` and ``boundary`` that attributes of `dataarray` keep. Arithmetic of xarray may drop
        attributes (``xarray.set_options(keep_attrs=True)``).

    Raises
    ------
    FieldError
        If ``array`` is not a DataArray, a grid axis is missing, or the extents fit neither the whole field nor the
        rank's cells. Also if the extents fit both the whole field and the rank's cells with halo, and ``array`` is not
        a view of a field.
    MismatchError
        If the arrays of the ranks differ in dtype or layout, or only some of the arrays are the whole field.
    MissingPackageError
        If xarray is not installed.

    Notes
    -----
    Collective. All errors are raised on all ranks.
    """

    def read_here() -> tuple[Reading, ArrayRecord]:
        reading = read(grid, array, dims)
        return reading, reading.record

    reading, records = grid.domain.world.gather(read_here, _CALL)
    kinds = agreed(records)
    if _is_open(kinds):
        raise FieldError(f"the array {reading.choices}")
    return make_field(grid, reading, kinds[0])


def make_field(grid: Grid[Any], reading: Reading, kind: str) -> Any:
    """Make a field from a labelled array; collective."""
    options = reading.options | {"halo": reading.layout.spec.halo}
    field = grid.zeros(reading.record.dtype, **options)
    grid.domain.world.attempt(lambda: reading.fill(field, kind), _CALL)
    return field


@dataclass(frozen=True)
class ArrayRecord:
    """Layout and dtype of a rank's array, and the kinds that fit its shape (`WHOLE`, `BLOCK`, `HALO`)."""

    layout: FieldSpec
    dtype: np.dtype[Any]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """A labelled array with recognised axes, in the order of the field's axes."""

    array: xarray.DataArray
    layout: FieldLayout
    record: ArrayRecord
    options: FieldOptions

    @property
    def dims(self) -> tuple[Hashable, ...]:
        """Names of the dimensions along the grid axes."""
        before = len(self.layout.spec.components_before)
        return self.array.dims[before : before + self.layout.spec.ndim]

    @property
    def choices(self) -> str:
        """Error text for an array that fits both the whole field and this rank's cells with halo."""
        inside = self.layout.interior[len(self.layout.spec.components_before) :]
        ways = [
            ", ".join(
                f"{d}=slice({cut.start}, {cut.stop})"
                for d, cut in zip(self.dims, cuts, strict=False)
            )
            for cuts in (self.layout.owned, inside)
        ]
        return (
            f"has the shape of {WHOLE} and of {HALO}; give the cells of this rank alone: array.isel({ways[0]}) of the "
            f"whole field, array.isel({ways[1]}) of cells with halo"
        )

    def fill(self, field: Any, kind: str) -> None:
        """Set the cells of a field of the same layout; local."""
        layout, array = self.layout, self.array
        if kind == WHOLE:
            array = array.isel(dict(zip(self.dims, layout.owned, strict=True)))
        data = array.data  # loads lazy values
        target = field if kind == HALO else field[layout.interior]
        if is_device_array(target):
            target[...] = as_device_array(data)
        else:
            target[...] = to_host(data)

    def own_part(self, values: Array, axis: int, kind: str) -> tuple[int, Array]:
        """Return the global index of the first coordinate along a grid axis, and the coordinates without the halo."""
        owned, stored = self.layout.owned[axis], self.layout.stored[axis]
        if kind == WHOLE:
            return 0, values
        if kind == HALO:
            values = values[owned.start - stored.start :][: owned.stop - owned.start]
        return owned.start, values


def agreed(records: Sequence[ArrayRecord], name: str | None = None) -> tuple[str, ...]:
    """Return the kinds that fit the arrays of all ranks; raises `MismatchError` on all ranks."""
    first, arrays = records[0], "the arrays" + ("" if name is None else f" of variable {name!r}")
    for rank, other in enumerate(records):
        for which in ("layout", "dtype"):
            mine, theirs = getattr(first, which), getattr(other, which)
            if mine != theirs:
                raise MismatchError(
                    f"{arrays} need one {which} on all ranks: rank 0 gave {mine}, rank {rank} {theirs}; give "
                    "the same on all ranks"
                )
    common = tuple(kind for kind in first.kinds if all(kind in other.kinds for other in records))
    if not common:
        text = "; ".join(f"rank {rank} gave {other.kinds[0]}" for rank, other in enumerate(records))
        raise MismatchError(f"{arrays} are not alike: {text}; give the same kind on all ranks")
    return common


def _is_open(kinds: Sequence[str]) -> bool:
    """Whether an array fits both the whole field and a block with halo, but not a block without halo."""
    return WHOLE in kinds and HALO in kinds and BLOCK not in kinds


def read(grid: Grid[Any], array: object, dims: Sequence[str] | None) -> Reading:
    """Recognise the axes of a labelled array, with the parameters and errors of `from_dataarray`. Local."""
    if not isinstance(array, xarray.DataArray):
        raise FieldError(
            f"expected an xarray.DataArray, got a {type(array).__name__}; of a Dataset, give the variables one by one"
        )
    axes = grid.domain.labels.updated(dims, None).dims
    grid_dims = _grid_dims(array, axes)
    if len(grid_dims) < len(axes):
        raise FieldError(
            f"the array has the dimensions {_listed(array.dims)}, and the grid {_listed(axes)}; name the "
            "grid axes by dims="
        )
    ordered = array.transpose(*_order(array.dims, grid_dims))
    before = ordered.dims.index(grid_dims[0])
    behind = before + len(grid_dims)
    options: FieldOptions = {
        "components": ordered.shape[:before],
        "components_after": ordered.shape[behind:],
        "staggered": [axis for axis, name in enumerate(grid_dims) if name.endswith(FACE)],
        **kept_options(array.attrs),
    }
    layout = grid.domain.layouts.of_options(options)
    spec, dtype = layout.spec, fixed_dtype(array.dtype)
    owned = tuple(cut.stop - cut.start for cut in layout.owned)
    shapes = {
        WHOLE: layout.global_shape,
        BLOCK: spec.components_before + owned + spec.components_after,
        HALO: layout.padded_shape,
    }
    kinds = tuple(kind for kind, shape in shapes.items() if ordered.shape == shape)
    halo = _halo_of_field(grid, ordered, spec, any_array=not kinds)
    if halo is not None:
        spec, kinds = replace(spec, halo=halo), (HALO,)
        layout = grid.domain.layouts.of(spec)
    if not kinds:
        raise FieldError(
            f"the array has the extents {ordered.shape} along {_listed(ordered.dims)}; expected "
            + ", or ".join(f"{shape} for {kind}" for kind, shape in shapes.items())
        )
    record = ArrayRecord(spec.without_boundary, dtype, kinds)
    return Reading(ordered, layout, record, options)


def _halo_of_field(
    grid: Grid[Any], array: xarray.DataArray, spec: FieldSpec, *, any_array: bool
) -> Halo | None:
    """Return the halo of an array that is a field; None if it is not a field, or has no halo.

    With ``any_array``, an array that is not a field may be a result of arithmetic on fields: return the halo of the
    grid's fields with its shape, if they have a single one.
    """

    def is_like(other: FieldSpec) -> bool:
        return replace(spec, halo=other.halo, offsets=other.offsets) == other and any(
            map(any, other.halo)
        )

    layouts = grid.domain.layouts.of_shape(array.shape)
    specs = [layout.spec for layout in layouts if is_like(layout.spec)]
    if not specs:
        return None  # do not load lazy values
    declared = grid.domain.layouts.declared(array.data)
    if declared is not None:
        return declared.spec.halo if is_like(declared.spec) else None
    halos = {spec.halo for spec in specs}
    return halos.pop() if any_array and len(halos) == 1 else None


def _grid_dims(array: xarray.DataArray | xarray.Variable, axes: Sequence[str]) -> list[str]:
    """Return the names of an array's grid axes; raises `FieldError` if an axis is present twice."""
    dims = [name for axis in axes for name in (axis, axis + FACE) if name in array.dims]
    if len(dims) > len(axes):
        raise FieldError(
            f"the array has the dimensions {_listed(array.dims)}, and among them a grid axis twice, by its cells "
            "and by its faces; select one of the two"
        )
    return dims


def _order(dims: Sequence[Hashable], grid_dims: Sequence[Hashable]) -> list[Hashable]:
    """Return an array's dimensions with the grid axes adjacent, at the position of the first grid axis."""
    first = min(dims.index(name) for name in grid_dims)
    return [*dims[:first], *grid_dims, *(name for name in dims[first:] if name not in grid_dims)]


def _listed(names: Iterable[Hashable]) -> str:
    return ", ".join(map(str, names)) or "none"


# Datasets


class _DatasetRecord(NamedTuple):
    """Variables of a dataset and their coordinates: for each axis, a variable that has it and the axis number."""

    arrays: dict[str, ArrayRecord]
    coords: dict[str, tuple[str, int]]


def _dataset_text(record: _DatasetRecord) -> str:
    return f"the variables {_listed(record.arrays)} with coordinates {_listed(record.coords)}"


def _kinds(
    readings: Mapping[str, Reading], common: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return the kind of each variable of a dataset; raises `FieldError` on all ranks.

    Along a dimension, either all variables have a halo or no variable has one. A variable of known kind thus decides
    about ambiguous variables that share its dimensions.
    """
    decided: dict[str, str] = {}
    first: dict[Hashable, str] = {}  # a variable that has the dimension
    for name in sorted(common, key=lambda name: _is_open(common[name])):
        kinds, reading = common[name], readings[name]
        widths = zip(reading.dims, reading.layout.spec.halo, strict=True)
        dims = [dim for dim, sides in widths if any(sides)]
        others = [first[dim] for dim in dims if dim in first]
        if _is_open(kinds):
            if not others:
                raise FieldError(f"variable {name!r} {reading.choices}")
            kinds = (HALO,) if decided[others[0]] == HALO else (WHOLE,)
        decided[name] = kinds[0]
        for other in others:
            if (decided[other] == HALO) != (decided[name] == HALO):
                raise FieldError(
                    f"variables {other!r} and {name!r} share a dimension, and one is {decided[other]}, the other "
                    f"{decided[name]}; give both with halo, or both without"
                )
        first = dict.fromkeys(dims, name) | first
    return decided


def _joined(parts: Sequence[tuple[int, Array]]) -> Array:
    """Join the coordinates of all ranks' parts to the coordinates of the whole grid."""
    by_start = dict(parts)
    return np.concatenate([by_start[start] for start in sorted(by_start)])


def _own_attrs(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return attributes without the entries of an earlier checkpoint; the dataset may have been read from one."""
    return {k: v for k, v in attrs.items() if not (isinstance(k, str) and k.startswith(PREFIX))}


@xarray.register_dataset_accessor("halox")  # type: ignore[no-untyped-call]
class DatasetFields:
    """Variables of an `xarray.Dataset` as fields of a grid: ``dataset.halox``.

    Parameters
    ----------
    dataset : xarray.Dataset
        A dataset of labelled arrays with halo, such as ``grid.dataarray(u, halo=True)`` and results of arithmetic on
        them.
    """

    def __init__(self, dataset: xarray.Dataset) -> None:
        self._dataset = dataset

    @short_errors
    def exchange(
        self,
        grid: Grid[Any],
        *names: str,
        dims: Sequence[str] | None = None,
        corners: bool | None = None,
    ) -> None:
        """Fill the halos of variables in place, all in one exchange.

        Parameters
        ----------
        grid : Grid
        *names : str
            Names of variables; by default all variables with the grid's axes. Coordinates, and variables with fewer
            dimensions than the grid, such as a time or a profile, are not fields and are ignored.
        dims : sequence of str, optional
            Names of the grid axes; see `dataarray`.
        corners : bool, optional
            The same as for `Grid.exchange`.

        Raises
        ------
        FieldError
            If no variable has the grid's axes; if a named variable, or a variable with at least as many dimensions as
            the grid, lacks a grid axis; or if a variable has no halo. Raised on all ranks.

        Notes
        -----
        Collective; also raises the errors of `Grid.exchange`. Variables are exchanged in the order of their names.
        """
        domain_of(grid)
        try:
            fields = self._fields(grid, names, dims)
        except Exception as error:  # other ranks get the error in their exchange
            grid.domain.world.begin("exchange")
            grid.domain.world.attempt(raising(error), "exchange")
        else:
            grid.exchange(*fields, corners=corners)

    @short_errors
    def to_zarr(
        self,
        path: str | PathLike[str],
        grid: Grid[Any],
        *,
        dims: Sequence[str] | None = None,
        compressors: object = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a checkpoint of the variables; see `Grid.save`.

        Parameters
        ----------
        path : str or path
        grid : Grid
        dims : sequence of str, optional
            Names of the grid axes; see `dataarray`.
        compressors, progress
            As for `Grid.save`.

        Raises
        ------
        FieldError
            If no variable has the grid's axes, or a variable with at least as many dimensions as the grid lacks a grid
            axis. Also if a variable fits both the whole field and a block with halo, and no variable of known kind
            shares a dimension with it.
        MismatchError
            If variables or coordinates differ between ranks.

        Notes
        -----
        Collective; also raises the errors of `Grid.from_dataarray` and `Grid.save`. Stores the variables with the
        grid's axes, their coordinates along these axes, and the attributes of variables, coordinates and dataset, from
        rank 0. Halos, coordinates of halo cells, and variables with fewer dimensions than the grid are not stored.
        """
        with domain_of(grid).world.guard:
            self._write(path, grid, dims, compressors, progress)

    def _write(
        self,
        path: str | PathLike[str],
        grid: Grid[Any],
        dims: Sequence[str] | None,
        compressors: object,
        progress: Progress | None,
    ) -> None:
        world = grid.domain.world
        world.begin(_WRITING)
        (axes, readings), datasets = world.gather(
            lambda: self._read_variables(grid, dims), _WRITING
        )
        for rank, other in enumerate(datasets):
            if list(other.arrays) != list(datasets[0].arrays) or other.coords != datasets[0].coords:
                raise MismatchError(
                    f"the datasets differ between ranks: rank 0 has {_dataset_text(datasets[0])}, rank {rank} "
                    f"{_dataset_text(other)}; give the same variables and coordinates on all ranks"
                )
        kinds = _kinds(
            readings,
            {
                name: agreed([of_rank.arrays[name] for of_rank in datasets], name)
                for name in readings
            },
        )
        fields = {
            name: make_field(grid, reading, kinds[name]) for name, reading in readings.items()
        }

        def own_coords() -> dict[str, tuple[int, Array]]:  # may load lazy values
            return {
                axis: readings[name].own_part(self._dataset[axis].values, number, kinds[name])
                for axis, (name, number) in datasets[0].coords.items()
            }

        _, parts = world.gather(lambda: (None, own_coords()), _WRITING)

        def joined() -> dict[str, Array]:
            return {axis: _joined([of_rank[axis] for of_rank in parts]) for axis in parts[0]}

        coords = world.attempt(joined, _WRITING)
        chosen = SaveOptions(
            attrs=_own_attrs(self._dataset.attrs),
            dims=axes,
            coords=coords,
            array_attrs={
                name: _own_attrs(self._dataset[name].attrs) for name in (*fields, *coords)
            },
            compressors=compressors,
            progress=progress,
        )
        save(grid.domain, path, fields, {}, chosen)

    def _read_variables(
        self, grid: Grid[Any], dims: Sequence[str] | None
    ) -> tuple[tuple[tuple[str, ...], dict[str, Reading]], _DatasetRecord]:
        """Return the names of the grid axes, the variables with all grid axes, and the facts that ranks compare."""
        axes, dataset = grid.domain.labels.updated(dims, None).dims, self._dataset
        readings: dict[str, Reading] = {}
        coords: dict[str, tuple[str, int]] = {}
        for name in self._names(axes):
            try:
                readings[name] = read(grid, dataset[name], axes)
            except FieldError as error:
                raise FieldError(f"variable {name!r}: {error}") from error
            for number, axis in enumerate(readings[name].dims):
                if axis in dataset.coords:
                    coords.setdefault(str(axis), (name, number))
        arrays = {name: reading.record for name, reading in readings.items()}
        return (axes, readings), _DatasetRecord(arrays, coords)

    def _names(self, axes: Sequence[str]) -> list[str]:
        """Return the sorted names of the variables with all grid axes.

        Raises `FieldError` if there is no such variable, or a variable with enough dimensions for a field lacks a grid
        axis.
        """
        variables = self._dataset.data_vars
        names: list[Any] = [
            k for k, v in variables.items() if len(_grid_dims(v, axes)) == len(axes)
        ]
        for name in names:
            if not isinstance(name, str):
                raise FieldError(f"variable {shown(name)} has a name that is not a str; rename it")
        if not names:
            text = "; ".join(f"{k}: {_listed(v.dims)}" for k, v in variables.items())
            raise FieldError(
                f"no variable of the dataset has the grid axes {_listed(axes)} ({text or 'it has none'}); name the "
                "grid axes by dims="
            )
        names.sort()
        for name, variable in variables.items():
            if name not in names and variable.ndim >= len(axes):
                raise FieldError(
                    f"variable {name!r} has the dimensions {_listed(variable.dims)}, and the grid {_listed(axes)}; "
                    f"rename its dimensions, or leave it out, as in dataset[{names}]"
                )
        return names

    def _fields(
        self, grid: Grid[Any], names: Sequence[str], dims: Sequence[str] | None
    ) -> list[Any]:
        """Return the arrays of variables, with their axes in the grid's order."""
        axes, arrays = grid.domain.labels.updated(dims, None).dims, []
        for name in sorted(names, key=str) or self._names(axes):
            if not isinstance(name, str) or name not in self._dataset.variables:
                raise FieldError(
                    f"the dataset has no variable {shown(name)}; it has {_listed(self._dataset.data_vars)}"
                )
            variable = self._dataset[name].variable
            grid_dims = _grid_dims(variable, axes)
            if len(grid_dims) < len(axes):
                raise FieldError(
                    f"variable {name!r} has the dimensions {_listed(variable.dims)}, and the grid {_listed(axes)}; "
                    "name the grid axes by dims="
                )
            array = variable.transpose(*_order(variable.dims, grid_dims)).data
            try:
                grid.layout(array)
            except FieldError as error:
                raise FieldError(
                    f"variable {name!r} is no field with halo, as grid.dataarray(u, halo=True) is: {error}"
                ) from error
            arrays.append(array)
        return arrays
