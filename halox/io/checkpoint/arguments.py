"""Checks of the arguments of a save or a load, on each rank."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain.dimension_names import FACE, Coordinates, Labels
from halox.domain.layouts import FieldLayouts
from halox.domain.options import OPTIONS
from halox.errors import CheckpointError, FieldError
from halox.io.checkpoint.bucket import SCHEME, BucketPath
from halox.io.checkpoint.dates import encoded
from halox.io.checkpoint.fields import is_number
from halox.io.checkpoint.store import PREFIX
from halox.io.checkpoint.tables import layout_of
from halox.io.regions import Cut, region_of
from halox.runtime.arrays import Described, check_elements_apart, describe
from halox.runtime.gpu.devices import to_host
from halox.values import as_int, as_list, has_unit, shown

_NAME = re.compile(r"\w[\w.-]*")
_OTHER_FORMATS = (".nc", ".nc4", ".cdf", ".h5", ".hdf5")

Progress = Callable[[int, int], object]
"""Called as ``progress(done_bytes, total_bytes)``."""


class CallerField(NamedTuple):
    """A field of the caller, or an array of a table, whose layout has the rows of this rank alone at first."""

    array: Any
    described: Described
    layout: FieldLayout
    table: str = ""


def path_of(path: object, *, written: bool) -> Path | BucketPath:
    """Return a local path with all links resolved, or one in a bucket; raises `CheckpointError`.

    A path of another format's suffix cannot be written.
    """
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"path: expected a str or a path, got {shown(path)}")
    if "://" in text:
        return _bucket_path(text)
    resolved = Path(os.path.realpath(os.path.expanduser(text)))
    if not resolved.name:
        raise CheckpointError(f"path: {text} names no file or folder; add a name")
    if written and resolved.suffix.lower() in _OTHER_FORMATS:
        raise CheckpointError(
            f"path: {resolved} is a name of netCDF or HDF5, and halox writes a Zarr group, or one field as .npy; save "
            f"{resolved.stem}.zarr, and convert it by xarray.open_zarr(...).to_netcdf('{resolved.name}')"
        )
    text = str(resolved)
    if resolved.suffix != ".npy" and (
        "\\" in text or text != text.encode(errors="ignore").decode()
    ):
        raise CheckpointError(
            f"path: {shown(text)} has a backslash, or bytes that are not UTF-8, which TensorStore cannot use in names; "
            "give another path"
        )
    return resolved


def _bucket_path(text: str) -> BucketPath:
    path = BucketPath(text.removeprefix(SCHEME))
    if not text.startswith(SCHEME) or len(path.parts) < 2 or ".." in path.parts:
        raise CheckpointError(
            f"path: expected a path, or s3://BUCKET/NAME, got {text}; no other stores are supported"
        )
    if path.suffix == ".npy":
        raise CheckpointError(
            f"path: {text}: .npy files are written to file systems only; name a Zarr group"
        )
    return path


def fields_of(
    layouts: FieldLayouts,
    fields: object,
    named: Mapping[str, object],
    *,
    written: bool,
) -> dict[str, CallerField]:
    """Return the fields of a mapping and of keywords, sorted by name; raises `FieldError`.

    Of particles it has the arrays, unless the fields are to be ``written``.
    """
    if fields is None:
        fields = {}
    if not isinstance(fields, Mapping):
        raise FieldError(
            "fields: expected a mapping of names to fields, got "
            f"{'an array' if hasattr(fields, 'shape') else shown(fields)}; write u=u for a field called u"
        )
    both = sorted(set(fields) & set(named), key=str)
    if both:
        raise FieldError(
            f"{', '.join(both)}: given both in the mapping and by name; give each once"
        )
    by_name: dict[str, CallerField] = {}
    for name, field in sorted({**fields, **named}.items(), key=lambda item: str(item[0])):
        _check_name(name)
        if hasattr(field, "keys") and not written:
            arrays = _arrays_of(name, field, layouts)
            if both := sorted({*arrays} & {*fields, *named}):
                raise FieldError(
                    f"{both[0]} is the name of a field and of an array of {name}; rename one"
                )
            by_name |= arrays
            continue
        try:
            described, layout = layouts.read(field)
        except FieldError as error:
            remedy = ""
            if written and name in OPTIONS:
                remedy = f"; give a field with this layout to be filled, as in u=grid.zeros({name}={shown(field)})"
            raise FieldError(f"{name}: {error}{remedy}") from error
        if written and not described.writable:
            raise FieldError(f"{name}: the array is read-only; give one that can be written")
        if written:
            check_elements_apart(described, name)
        by_name[name] = CallerField(field, described, layout)
    return by_name


def rows_of(fields: Mapping[str, CallerField]) -> dict[str, int]:
    """Return the number of rows of each table on this rank."""
    return {field.table: len(field.array) for field in fields.values() if field.table}


def place_rows(
    fields: dict[str, CallerField], rows: Sequence[Mapping[str, int]], rank: int
) -> None:
    """Set the layouts of arrays of tables among all ranks, given the `rows_of` each rank."""
    for name, field in fields.items():
        if field.table:
            table_rows = [of_rank[field.table] for of_rank in rows]
            layout = layout_of(table_rows, rank, field.described.shape[1:])
            fields[name] = field._replace(layout=layout)


def _arrays_of(name: str, table: Any, layouts: FieldLayouts) -> dict[str, CallerField]:
    """Return the arrays of particles by their names in the checkpoint."""
    if getattr(getattr(table, "domain", None), "layouts", None) is not layouts:
        raise FieldError(f"{name}: expected a field, or particles of this grid, got {shown(table)}")
    arrays = {}
    for key in table.keys():  # noqa: SIM118 - the table is not a dict
        _check_name(key)
        array = table[key]
        if array.dtype.names is not None:  # without the bytes between members, which nobody has set
            array = table.domain.xp.zeros(array.shape, array.dtype)
            array[...] = table[key]
        described = describe(array)
        layout = layout_of([len(table)], 0, described.shape[1:])
        arrays[f"{name}.{key}"] = CallerField(array, described, layout, name)
    return arrays


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "zarr.json":
        raise FieldError(
            f"{shown(name)} is no name for a field: expected letters, digits, '_', '-' and '.'"
        )


def labels_of(
    labels: Labels, dims: object, coords: object, fields: Mapping[str, CallerField]
) -> Labels:
    """Return the labels of a grid with the arguments of a call; raises `FieldError`.

    xarray accepts no field with the name of its dimension: without ``dims``, the axis "x" is called "x_axis" if a field
    is called "x".
    """
    taken = {name.removesuffix(FACE) for name in fields}
    if dims is None and taken & {*labels.dims}:
        dims = [f"{name}_axis" if name in taken else name for name in labels.dims]
    return labels.updated(dims, coords)


def coords_of(labels: Labels, fields: Mapping[str, CallerField]) -> dict[str, Coordinates]:
    """Return the coordinates to store, by dimension; raises `FieldError` if Zarr cannot store a name or a dtype."""
    for name in labels.dims:
        if not _NAME.fullmatch(name):
            raise FieldError(
                f"dims: expected names of letters, digits, '_', '-' and '.', got {shown(name)}"
            )
        if taken := sorted({name, name + FACE} & set(fields)):
            raise FieldError(
                f"{taken[0]} is the name of a field and of a dimension; rename the field, or give dims="
            )
    given = labels.of_fields(given.layout.spec for given in fields.values())
    coords = {name: encoded(name, along) for name, along in given.items()}
    for name, (values, _) in coords.items():
        if not is_number(values.dtype):
            raise FieldError(
                f"coords[{name!r}] has dtype {values.dtype}, which Zarr lacks; convert it to float64"
            )
    return coords


def attrs_of(attrs: object, what: str = "attrs") -> dict[str, Any]:
    """Return attributes as JSON values; raises `FieldError`, with ``what`` as their name."""
    if attrs is None:
        return {}
    if not isinstance(attrs, Mapping):
        raise FieldError(f"{what}: expected a mapping of names to values, got {shown(attrs)}")
    for name in attrs:
        if not isinstance(name, str) or name.startswith(PREFIX):
            raise FieldError(
                f"{what}: expected names that are str and do not begin with {PREFIX!r}, got {shown(name)}"
            )
    plain = {}
    for name, value in attrs.items():
        try:
            _check_keys(value)
            plain[name] = json.loads(json.dumps(value, default=_json_value))
        except (TypeError, ValueError, RecursionError) as error:
            raise FieldError(
                f"{what}: {name} has no place in JSON ({error}); give numbers, text, dates, lists and dicts"
            ) from error
    return plain


def array_attrs_of(
    coords: Mapping[str, Coordinates], given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return attributes of fields and of coordinates; raises `FieldError`."""
    known = {name: attrs for name, (_, attrs) in coords.items()}
    both = {n: {**given.get(n, {}), **known.get(n, {})} for n in {**known, **given}}
    return {name: attrs_of(attrs, f"attrs of {name}") for name, attrs in both.items() if attrs}


def names_of(names: object, argument: str = "names") -> tuple[str, ...] | None:
    """Return the sorted names of fields, None if none are given; raises `FieldError`."""
    if names is None:
        return None
    given = [names] if isinstance(names, str) else as_list(names)
    if given is None or not all(isinstance(name, str) for name in given):
        raise FieldError(f"{argument}: expected names of fields, got {shown(names)}")
    return tuple(sorted(set(given)))


def regions_of(region: object, fields: Mapping[str, CallerField]) -> tuple[dict[str, Cut], bool]:
    """Return the region of each field, with all numbers given, and whether one was given for all fields.

    Raises `FieldError`.
    """
    plain = without_tables(fields)
    by_name = region if isinstance(region, Mapping) else dict.fromkeys(plain, region)
    check_names("region", by_name, plain)
    regions = {
        name: () if field.table else region_of(by_name.get(name), field.layout, name)
        for name, field in fields.items()
    }
    return regions, not isinstance(region, Mapping)


def without_tables(fields: Mapping[str, CallerField]) -> list[str]:
    """Return the names of fields of the grid."""
    return [name for name, field in fields.items() if not field.table]


def every_of(every: object, fields: Collection[str]) -> dict[str, int]:
    """Return the stride in time of each field or table that has one; raises `FieldError`."""
    given = mapping_of("every", every, fields)
    return {name: count_of(f"every: {name}", n, "records") for name, n in given.items()}


def mapping_of(argument: str, given: object, fields: Collection[str]) -> Mapping[str, Any]:
    """Return an argument that has a number for each of some fields; raises `FieldError`."""
    if given is not None and not isinstance(given, Mapping):
        raise FieldError(f"{argument}: expected a mapping of fields to numbers, got {shown(given)}")
    check_names(argument, given or {}, fields)
    return given or {}


def count_of(name: str, value: object, what: str) -> int:
    """Return an argument that is a number of things, 1 or more; raises `FieldError`."""
    number = as_int(value)
    if number is None or number < 1:
        raise FieldError(f"{name}: expected a number of {what}, 1 or more, got {shown(value)}")
    return number


def check_names(what: str, given: Iterable[object], fields: Collection[str]) -> None:
    """Raise `FieldError`, with ``what`` as the argument, unless all names are names of fields."""
    for name in given:
        if name not in fields:
            raise FieldError(
                f"{what}: {shown(name)} is no field; the fields are {', '.join(fields)}"
            )


def keep_of(keep: object, path: Path | BucketPath) -> int:
    """Return how many checkpoints to keep; raises `FieldError`."""
    number = count_of("keep", keep, "checkpoints")
    if number > 1 and (isinstance(path, BucketPath) or path.suffix == ".npy"):
        raise FieldError(
            f"keep: {path}: only Zarr groups on a file system are kept; give each save another name"
        )
    return number


def progress_of(progress: object) -> Progress | None:
    """Return the progress callback; raises `FieldError`."""
    if progress is not None and not callable(progress):
        raise FieldError(
            f"progress: expected a callable taking done_bytes and total_bytes, got {shown(progress)}"
        )
    return progress


def _check_keys(value: object) -> None:
    """Raise TypeError if a mapping has a key that is not text: JSON would make text of it."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {shown(key)} is not a str")
    for inner in value.values() if isinstance(value, Mapping) else as_list(value) or ():
        _check_keys(inner)


def _json_value(value: object) -> Any:
    if has_unit(value) and value.dtype.kind == "m":  # type: ignore[attr-defined]
        raise TypeError(f"{shown(value)}: a duration has a unit")
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind == "M":
        return np.asarray(value).astype(str).tolist()
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "get") and hasattr(value, "shape"):  # CuPy arrays
        return to_host(value).tolist()
    raise TypeError(f"{shown(value)} of type {type(value).__name__}")
