"""Fields as labelled arrays (`xarray.DataArray`, `xarray.Dataset`) and back; needs xarray.

`dataarray` gives a field the names and coordinates of the grid's axes. `from_dataarray` makes a field: `read` finds the
grid axes by their names, and holds the array's shape against ``part``, which says what of the field the array holds.
`DatasetFields` is the accessor ``halox`` of all datasets, once this module is imported: exchanges and checkpoints of
their variables. Begin reading at `Reading`.

`Grid.dataarray` and `Grid.from_dataarray` import this module when they are called. It works on the grid's domain and so
imports nothing of `halox.grid`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.domain.dimension_names import FACE, Coordinates, beyond, with_faces
from halox.domain.domain import HasDomain, domain_of
from halox.domain.options import FieldOptions, fixed_dtype
from halox.errors import FieldError, MissingPackageError, raising
from halox.io.checkpoint.arguments import Progress
from halox.io.checkpoint.calls import SaveOptions, save
from halox.io.checkpoint.fields import kept_attributes, kept_options
from halox.io.checkpoint.store import PREFIX
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

Part: TypeAlias = Literal["whole", "block", "halo"]
"""What a labelled array holds: the whole field, the cells of this rank, or these with their halo."""


# From fields


def dataarray(
    grid: HasDomain,
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
    Local. `xarray.combine_by_coords` combines the blocks of several ranks. `from_dataarray` is the inverse, with
    ``part="block"``, or ``part="halo"`` for an array with halo.
    """
    domain = domain_of(grid)
    layout = domain.layouts.find(field)
    spec = layout.spec
    if spec.parity is not None:
        raise FieldError(
            f"field has {spec.parity} cells only, whose coordinates are no product of axes; set the cells of a "
            "field of the whole grid from it"
        )
    if name is not None and not isinstance(name, str):
        raise FieldError(f"name must be a str or None, got {shown(name)}")
    if attrs is not None and not isinstance(attrs, Mapping):
        raise FieldError(f"attrs must be a mapping of names to attributes, got {shown(attrs)}")
    labels = domain.labels.updated(dims, coords, numbers=False)
    axes = with_faces(labels.dims, spec.staggered)
    with_halo = check_bool("halo", halo, FieldError)
    before = spec.grid_axes.start
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
        attrs=kept_attributes(spec, domain.plain.spec) | dict(attrs or {}),
    )


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


def from_dataarray(
    grid: HasDomain, array: object, *, dims: Sequence[str] | None = None, part: Part = "whole"
) -> Any:
    """Make a field from a labelled array; `Grid.from_dataarray` calls it.

    Parameters
    ----------
    grid : Grid
    array : xarray.DataArray
        Axes may be in any order. "x_face" in place of "x" is a staggered axis; axes with other names are components.
    dims : sequence of str, optional
        Names of the grid axes; by default ``dims`` of the grid.
    part : {"whole", "block", "halo"}
        What ``array`` holds, the same on all ranks: the whole field, from which each rank takes its cells (if values
        are loaded lazily, as from a file, it loads no others); the cells of this rank; or the cells of this rank and
        their halo. This is the halo of the field that ``array`` is a view of, or else the grid's halo, or else that of
        the only fields of the grid with this shape.

    Returns
    -------
    array
        A new field on the grid's device. Its halo is zero unless ``part`` is "halo". It has the options ``sign``,
        ``position`` and ``boundary`` that attributes of `dataarray` keep. Arithmetic of xarray may drop attributes
        (``xarray.set_options(keep_attrs=True)``).

    Raises
    ------
    FieldError
        If ``array`` is not a DataArray, a grid axis is missing, ``part`` is invalid, or the extents are not those of
        this part of a field.
    MismatchError
        If ``part``, or the arrays' dtype or layout, differ between ranks.
    MissingPackageError
        If xarray is not installed.

    Notes
    -----
    Collective. All errors are raised on all ranks.
    """
    domain = domain_of(grid)

    def read_here() -> tuple[Reading, Mapping[str, object]]:
        reading = read(domain, array, dims, part)
        return reading, reading.compared("the array")

    return make_field(domain, domain.world.attempt(read_here, _CALL, alike=True))


@dataclass(frozen=True)
class Reading:
    """A labelled array that becomes a field: its axes in the order of the field's, and the layout of the field."""

    array: xarray.DataArray
    layout: FieldLayout
    options: FieldOptions
    part: Part

    @property
    def dims(self) -> tuple[Hashable, ...]:
        """Names of the array's dimensions along the grid axes."""
        return self.array.dims[self.layout.spec.grid_slice]

    @property
    def cells(self) -> tuple[slice, ...]:
        """The cells of this rank in the array, along the grid axes."""
        if self.part == "whole":
            return self.layout.owned
        if self.part == "halo":
            return self.layout.interior[self.layout.spec.grid_slice]
        return tuple(slice(None) for _ in self.dims)

    def compared(self, name: str) -> dict[str, object]:
        """Return what must be the same on all ranks; errors call the array ``name``."""
        spec, dtype = self.layout.spec.without_boundary, self.array.dtype
        return {"part": self.part, f"dtype of {name}": dtype, f"layout of {name}": spec}


def read(domain: Domain, array: object, dims: Sequence[str] | None, part: Part) -> Reading:
    """Recognise the axes of a labelled array, with the parameters and errors of `from_dataarray`. Local."""
    if not isinstance(array, xarray.DataArray):
        raise FieldError(
            f"expected an xarray.DataArray, got a {type(array).__name__}; of a Dataset, give the variables one by one"
        )
    if not isinstance(part, str) or part not in get_args(Part):
        raise FieldError(f'part must be "whole", "block" or "halo", got {shown(part)}')
    ordered, grid_dims = _ordered(array, domain.labels.updated(dims, None).dims, "the array")
    fixed_dtype(array.dtype)
    before = ordered.dims.index(grid_dims[0])
    options: FieldOptions = {
        "components": (*ordered.shape[:before], ..., *ordered.shape[before + len(grid_dims) :]),
        "staggered": [axis for axis, name in enumerate(grid_dims) if name.endswith(FACE)],
        **kept_options(array.attrs),
    }
    layout = domain.layouts.of_options(options)
    if part == "halo":
        layout = _with_halo_of(domain, ordered, layout)
    spec = layout.spec
    own = tuple(cut.stop - cut.start for cut in layout.owned)
    shapes = {
        "whole": layout.global_shape,
        "block": spec.components_before + own + spec.components_after,
        "halo": layout.padded_shape,
    }
    if ordered.shape != shapes[part]:
        others = " or ".join(f"{shape} for part={one!r}" for one, shape in shapes.items())
        raise FieldError(
            f"the array has the extents {ordered.shape} along {_listed(ordered.dims)}, and part={part!r}; expected "
            f"{others}"
        )
    return Reading(ordered, layout, options | {"halo": spec.halo}, part)


def _with_halo_of(domain: Domain, array: xarray.DataArray, plain: FieldLayout) -> FieldLayout:
    """Return the layout of an array with halo; ``plain`` has the grid's halo."""
    layouts, mine = domain.layouts, plain.spec.of_cells
    halos = {u.spec.halo for u in layouts.of_shape(array.shape) if u.spec.of_cells == mine}
    if not halos:
        return plain  # without loading lazy values
    field = layouts.declared(array.data)
    if field is not None and field.spec.of_cells == mine:
        halos = {field.spec.halo}
    elif plain.padded_shape == array.shape or len(halos) > 1:
        return plain
    return layouts.of(replace(plain.spec, halo=halos.pop()))


def make_field(domain: Domain, reading: Reading) -> Any:
    """Make a field from a labelled array; collective."""
    field = domain.allocation.new(reading.array.dtype, reading.options)

    def fill() -> None:
        target, array = field, reading.array
        if reading.part != "halo":
            target = field[reading.layout.interior]
            array = array.isel(dict(zip(reading.dims, reading.cells, strict=True)))
        data = array.data  # loads lazy values
        target[...] = as_device_array(data) if is_device_array(target) else to_host(data)

    domain.world.attempt(fill, _CALL)
    return field


def _ordered(array: Any, axes: Sequence[str], what: str) -> tuple[Any, list[str]]:
    """Return a labelled array or variable with the grid axes adjacent, at the place of the first, and their names.

    Raises `FieldError` if an axis is missing or present twice.
    """
    dims, grid_dims = array.dims, _grid_dims(array, axes)
    if len(grid_dims) < len(axes):
        raise FieldError(
            f"{what} has the dimensions {_listed(dims)}, and the grid {_listed(axes)}; name the grid axes by dims="
        )
    first = min(dims.index(name) for name in grid_dims)
    behind = [name for name in dims[first:] if name not in grid_dims]
    return array.transpose(*dims[:first], *grid_dims, *behind), grid_dims


def _grid_dims(array: xarray.DataArray | xarray.Variable, axes: Sequence[str]) -> list[str]:
    """Return the names of an array's grid axes; raises `FieldError` if an axis is present twice."""
    dims = [name for axis in axes for name in (axis, axis + FACE) if name in array.dims]
    if len(dims) > len(axes):
        raise FieldError(
            f"the array has the dimensions {_listed(array.dims)}, and among them a grid axis twice, by its cells "
            "and by its faces; select one of the two"
        )
    return dims


def _listed(names: Iterable[Hashable]) -> str:
    return ", ".join(map(str, names)) or "none"


# Datasets


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
        grid: Any,
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
        domain = domain_of(grid)
        try:
            fields = self._fields(domain, names, dims)
        except Exception as error:  # other ranks get the error in their exchange
            domain.world.begin("exchange")
            domain.world.attempt(raising(error), "exchange")
        else:
            grid.exchange(*fields, corners=corners)

    @short_errors
    def to_zarr(
        self,
        path: str | PathLike[str],
        grid: HasDomain,
        *,
        part: Part = "halo",
        dims: Sequence[str] | None = None,
        compressors: object = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a checkpoint of the variables; see `Grid.save`.

        Parameters
        ----------
        path : str or path
        grid : Grid
        part : {"halo", "block", "whole"}
            What the variables hold, all alike: the cells of this rank with halo, without halo, or the whole field; see
            `from_dataarray`.
        dims : sequence of str, optional
            Names of the grid axes; see `dataarray`.
        compressors, progress
            As for `Grid.save`.

        Raises
        ------
        FieldError
            If no variable has the grid's axes, or a variable with at least as many dimensions as the grid lacks a grid
            axis. Also if ``part`` is invalid, or a variable's extents are not those of this part of a field.
        MismatchError
            If ``part``, variables or coordinates differ between ranks.

        Notes
        -----
        Collective; also raises the errors of `Grid.from_dataarray` and `Grid.save`. Stores the variables with the
        grid's axes, their coordinates along these axes, and the attributes of variables, coordinates and dataset, from
        rank 0. Halos, coordinates of halo cells, and variables with fewer dimensions than the grid are not stored.
        """
        domain, dataset = domain_of(grid), self._dataset
        with domain.world.guard:
            domain.world.begin(_WRITING)
            readings = domain.world.attempt(
                lambda: self._read_variables(domain, dims, part), _WRITING, alike=True
            )
            fields = {name: make_field(domain, reading) for name, reading in readings.items()}
            coords = self._whole_coords(domain, readings)
            chosen = SaveOptions(
                attrs=_own_attrs(dataset.attrs),
                dims=dims,
                coords=coords,
                array_attrs={name: _own_attrs(dataset[name].attrs) for name in (*fields, *coords)},
                compressors=compressors,
                progress=progress,
            )
            save(domain, path, fields, {}, chosen)

    def _read_variables(
        self, domain: Domain, dims: Sequence[str] | None, part: Part
    ) -> tuple[dict[str, Reading], dict[str, object]]:
        """Return the variables with all grid axes, and what must be the same on all ranks."""
        axes = domain.labels.updated(dims, None).dims
        readings: dict[str, Reading] = {}
        for name in self._names(axes):
            try:
                readings[name] = read(domain, self._dataset[name], axes, part)
            except FieldError as error:
                raise FieldError(f"variable {name!r}: {error}") from error
        compared: dict[str, object] = {
            "variables": [*readings],
            "coordinates": [*self._places(readings)],
        }
        for name, reading in readings.items():
            compared |= reading.compared(f"variable {name!r}")
        return readings, compared

    def _places(self, readings: Mapping[str, Reading]) -> dict[str, tuple[Reading, int]]:
        """Return the dimensions with coordinates: for each, a variable that has it, and the number of its grid axis."""
        return {
            str(dim): (reading, axis)
            for reading in readings.values()
            for axis, dim in enumerate(reading.dims)
            if dim in self._dataset.coords
        }

    def _whole_coords(self, domain: Domain, readings: Mapping[str, Reading]) -> dict[str, Array]:
        """Join the coordinates of the cells of all ranks to those of the whole grid; collective."""

        def of_this_rank() -> dict[str, tuple[int, Array]]:  # may load lazy values
            return {
                dim: (reading.layout.owned[axis].start, values[reading.cells[axis]])
                for dim, (reading, axis) in self._places(readings).items()
                for values in [self._dataset[dim].values]
            }

        _, ranks = domain.world.gather(lambda: (None, of_this_rank()), _WRITING)

        def joined() -> dict[str, Array]:
            by_start = {dim: dict(rank[dim] for rank in ranks) for dim in ranks[0]}
            return {
                dim: np.concatenate([values for _, values in sorted(found.items())])
                for dim, found in by_start.items()
            }

        return domain.world.attempt(joined, _WRITING)

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
        self, domain: Domain, names: Sequence[str], dims: Sequence[str] | None
    ) -> list[Any]:
        """Return the arrays of variables, with their axes in the grid's order."""
        axes, arrays = domain.labels.updated(dims, None).dims, []
        for name in sorted(names, key=str) or self._names(axes):
            if not isinstance(name, str) or name not in self._dataset.variables:
                raise FieldError(
                    f"the dataset has no variable {shown(name)}; it has {_listed(self._dataset.data_vars)}"
                )
            ordered, _ = _ordered(self._dataset[name].variable, axes, f"variable {name!r}")
            try:
                domain.layouts.find(ordered.data, halo=True)
            except FieldError as error:
                raise FieldError(
                    f"variable {name!r} is no field with halo, as grid.dataarray(u, halo=True) is: {error}"
                ) from error
            arrays.append(ordered.data)
        return arrays
