"""Description of an output in time: a Zarr group whose arrays have a time axis in front, in JSON.

The length of the time axes is the number of complete records. Readers take it from the group's consolidated metadata,
a single file, which is replaced atomically, after the times. Chunks of later records do not count until then::

    run.zarr/zarr.json      the group, and the metadata of all its arrays
    run.zarr/time/c/0       times, in chunks of many records
    run.zarr/u/c/3/...      shards of the fourth record of u
    run.zarr/u/zarr.json    the array alone; its length follows in `Output.wait`
    run.zarr/p_count/c/0    rows of each record of the particles p; their arrays are as long as the largest record

Values over windows of four records have the axis "time_window_4": the middle of the bounds "time_window_4_bnds".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from halox.errors import CheckpointError, FieldError
from halox.io.checkpoint.dates import Dates
from halox.io.checkpoint.fields import DTYPE, TABLE, StoredField
from halox.io.checkpoint.saving import Request
from halox.io.checkpoint.series import KEPT_BITS, Series
from halox.io.checkpoint.store import GRID_SHAPE, OUTPUT, PREFIX, arrays_of, coordinate, group
from halox.io.checkpoint.tables import shard_rows
from halox.io.regions import Cut
from halox.runtime.arrays import Array

TIME = "time"
TIMES = 1024
"""Times in a chunk."""

_VERSION = 1
_REGION = f"{PREFIX}region"
_WINDOW, _BOUNDS = f"{TIME}_window", "_bnds"


def describe(
    request: Request, series: Mapping[str, Series], regions: Mapping[str, Cut], *, is_common: bool
) -> tuple[dict[str, Any], dict[str, Array], frozenset[str]]:
    """Return the metadata of an output without records, its coordinates, and the names of the given coordinates.

    ``regions`` has a slice per grid axis for each field, with all numbers given. ``is_common`` tells that all fields
    have the same region, so that their dimensions need no names of their own. Raises `FieldError`.
    """
    arrays: dict[str, Any] = {}
    coords: dict[str, Array] = {}
    attrs: dict[str, dict[str, Any]] = {}
    counts: dict[str, Any] = {}
    taken, given = {TIME}, set()
    origins: dict[str, tuple[str, str]] = {}
    for dim in request.dims:
        if dim.startswith(TIME):
            raise FieldError(f"dims: {dim} is the name of the axis of the records; give another")
    for name, variable in series.items():
        field, region = request.fields[variable.field], regions[variable.field]
        table = {TABLE: json.dumps(field.table)} if field.table else {}
        stored = StoredField.of(name, field.layout, variable.dtype, request.codecs, region, table)
        dims, lengths = list(stored.dims(request.dims)), field.layout.global_shape
        for axis, cut in enumerate(region, stored.before):
            dim, is_cut = dims[axis], cut != slice(0, lengths[axis], 1)
            origin = dim, (variable.field if is_cut and not is_common else "")
            dims[axis] = "_".join(filter(None, origin))
            if origins.setdefault(dims[axis], origin) != origin:
                raise FieldError(
                    f"region: {dims[axis]} would be the name of two dimensions; rename a field, or give dims="
                )
            if is_cut or dim in request.coords:
                coords[dims[axis]] = request.coords.get(dim, np.arange(lengths[axis]))[cut]
                attrs[dims[axis]] = request.array_attrs.get(dim, {})
                if dim in request.coords:
                    given.add(dims[axis])
        dims = [_axis_of(variable), *dims]
        if field.table:
            count = count_name(field.table)
            attrs[count] = {"long_name": f"number of particles of {field.table}"} | table
            counts[count] = coordinate(count, np.zeros(TIMES, "i8"), attrs)
            counts[count]["dimension_names"] = dims[:1]
        taken |= {*dims, *counts}
        arrays[name] = {
            **_in_time(stored),
            "attributes": {**stored.attributes, _REGION: str(region)},
            "dimension_names": dims,
        }
        if variable.method:
            arrays[name]["attributes"]["cell_methods"] = f"time: {variable.method}"
        if variable.keepbits:
            arrays[name]["attributes"][KEPT_BITS] = variable.keepbits
    if both := sorted(taken & {*arrays}):
        raise FieldError(
            f"{both[0]} is the name of a field and of a dimension; rename the field, or give dims="
        )
    arrays |= {dim: coordinate(dim, values, attrs) for dim, values in coords.items()} | counts
    for time in sorted({TIME, *map(_axis_of, series.values())}):
        arrays[time] = coordinate(time, np.full(TIMES, np.nan), {})
        if time.startswith(_WINDOW):
            bounds = time + _BOUNDS
            arrays[time]["attributes"] = {"standard_name": TIME, "bounds": bounds}
            arrays[bounds] = coordinate(bounds, np.full((TIMES, 2), np.nan), {})
            arrays[bounds]["dimension_names"] = [time, "bnds"]
    own = {OUTPUT: _VERSION, GRID_SHAPE: list(request.grid_shape)}
    return sized(group({**request.attrs, **own}, arrays), 0), coords, frozenset(given)


def count_name(table: str) -> str:
    """Return the name of the array of the numbers of rows of a table, one for each record."""
    return f"{table}_count"


def _axis_of(series: Series) -> str:
    """Return the name of the time axis of a variable."""
    if series.method:
        return f"{_WINDOW}_{series.every}"
    return TIME if series.every == 1 else f"{TIME}_{series.every}"


def every_of(array: Mapping[str, Any]) -> int | None:
    """Return n for an array of every n-th record, or of windows of n; None for an array without a time axis.

    Examples
    --------
    >>> every_of({"dimension_names": ["time_4", "x"]}), every_of({"dimension_names": ["x"]})
    (4, None)
    """
    name = array["dimension_names"][0]
    if name == TIME:
        return 1
    return int(name.rpartition("_")[2]) if name.startswith(f"{TIME}_") else None


def dates_of(metadata: Mapping[str, Any]) -> Dates:
    """Return the attributes of times that are dates."""
    attributes = arrays_of(metadata)[TIME]["attributes"]
    return {name: attributes[name] for name in ("units", "calendar") if name in attributes}


def set_dates(metadata: Mapping[str, Any], dates: Dates) -> None:
    """Add the attributes of dates to the time axes of an output."""
    for name, array in arrays_of(metadata).items():
        if array["dimension_names"] == [name] and every_of(array):
            array["attributes"] |= dates


def length_of(array: Mapping[str, Any], records: int) -> int:
    """Return the length of an array's time axis after so many records: of windows, the number that have ended."""
    every, is_window = every_of(array) or 1, array["dimension_names"][0].startswith(_WINDOW)
    return records // every if is_window else -(-records // every)


def axis_values(name: str, array: Mapping[str, Any], times: Sequence[float], first: int) -> Array:
    """Return the values of a time axis, or of the bounds of windows, from index ``first``.

    A window is bounded by the record before it, or else by its own first record, and by its last record.
    """
    every = every_of(array) or 1
    if not name.startswith(_WINDOW):
        return np.array(times[first * every :: every])
    ends = times[every - 1 :: every]
    bounds = np.array([[*times[:1], *ends][first : len(ends)], ends[first:]]).T
    return bounds if name.endswith(_BOUNDS) else bounds.mean(axis=1)


def _in_time(field: StoredField) -> dict[str, Any]:
    """Return the metadata of an array with a time axis, of one record a shard, or of some rows of a record."""
    metadata, shape = field.metadata, [0, *field.metadata["shape"]]
    (sharding,) = metadata["codecs"]
    inner = sharding["configuration"]
    inner = {**inner, "chunk_shape": [1, *inner["chunk_shape"]]}
    shard = [1, *metadata["chunk_grid"]["configuration"]["chunk_shape"]]
    if field.table:
        row_bytes = max(1, prod(field.shape[1:]) * field.dtype.itemsize)
        shard[1], inner["chunk_shape"][1] = shard_rows(shape[1], row_bytes)
        shape[1] = 0
        if metadata["data_type"].startswith("float"):
            metadata = {**metadata, "fill_value": "NaN"}
    return {
        **metadata,
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "codecs": [{**sharding, "configuration": inner}],
    }


def sized(metadata: Mapping[str, Any], records: int) -> dict[str, Any]:
    """Return the metadata of an output of so many records."""
    arrays = {
        name: with_length(array, length_of(array, records))
        for name, array in arrays_of(metadata).items()
    }
    return group(metadata["attributes"], arrays)


def with_length(array: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the metadata of an array with another length of its time axis, if it has one."""
    first = array["shape"][0] if every_of(array) is None else length
    return {**array, "shape": [first, *array["shape"][1:]]}


def variables(metadata: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the metadata of each variable of an output."""
    for name, array in arrays_of(metadata).items():
        if DTYPE in array["attributes"]:
            yield name, array


def check_alike(path: object, stored: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless an existing output has the fields of a new one."""
    facts = [{name: _facts(a) for name, a in variables(metadata)} for metadata in (stored, new)]
    facts[0]["the grid"], facts[1]["the grid"] = (
        m["attributes"][GRID_SHAPE] for m in (stored, new)
    )
    for name in sorted({*facts[0], *facts[1]}, key=lambda name: (name != "the grid", name)):
        there, here = (of_one.get(name, "nothing") for of_one in facts)
        if there != here:
            raise CheckpointError(
                f"{path}: {name} is {there} in the output, and {here} here; give the grid, fields, every=, region=, "
                'mean=, min=, max= and keepbits= of the run that made it, or mode="w" to replace it'
            )


def check_coords(
    path: object,
    stored: Mapping[str, Any],
    new: Mapping[str, Any],
    coords: Mapping[str, tuple[Array, Array | None]],
) -> None:
    """Raise `CheckpointError` if an output has other coordinates than the given ones, each with the stored ones."""
    there, here = arrays_of(stored), arrays_of(new)
    for name, (mine, theirs) in coords.items():
        attrs = here[name]["attributes"]
        if (
            theirs is None
            or not np.array_equal(mine, theirs, equal_nan=True)
            or attrs not in ({}, there[name]["attributes"])
        ):
            raise CheckpointError(
                f"{path}: coords: {name} differs from the output; leave it out, to go on as it is"
            )


def _facts(array: Mapping[str, Any]) -> str:
    time, *dims = array["dimension_names"]
    attributes, shape = array["attributes"], array["shape"][1:]
    if TABLE in attributes:
        shape[0] = "any"
    lengths = [f"{dim} of {n}" for dim, n in zip(dims, shape, strict=True)]
    text = f"{attributes[DTYPE]} along {', '.join([time, *lengths])}, of the region {attributes[_REGION]}"
    return text + (f", rounded to {attributes[KEPT_BITS]} bits" if KEPT_BITS in attributes else "")
