"""`Grid.save` and `Grid.load`: check and compare the arguments of all ranks, then write or read the path's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halox.domain import Domain
from halox.errors import FieldError
from halox.io.checkpoint import arguments, npy
from halox.io.checkpoint.arguments import CallerField, Progress
from halox.io.checkpoint.bucket import BucketPath
from halox.io.checkpoint.loading import LOADING, Loaded, load_group
from halox.io.checkpoint.saving import SAVING, Request, save_group
from halox.io.checkpoint.store import codecs_of, load_tensorstore


@dataclass(frozen=True)
class SaveOptions:
    """Options of `Grid.save`, not yet checked; ``array_attrs`` has the attributes of fields and coordinates."""

    attrs: object = None
    dims: Sequence[str] | None = None
    coords: object = None
    compressors: object = None
    progress: object = None
    keep: object = 1
    array_attrs: Mapping[str, object] | None = None


def save(
    domain: Domain,
    path: object,
    fields: object,
    named: Mapping[str, object],
    options: SaveOptions,
) -> None:
    """Write fields; see `Grid.save`. Collective; blocks."""

    def check() -> tuple[Request, tuple[dict[str, object], dict[str, int]]]:
        where = arguments.path_of(path, written=True)
        given = arguments.fields_of(domain.layouts, fields, named, written=False)
        if not given:
            raise FieldError("no field given; write grid.save(path, u=u)")
        request = request_of(domain, where, given, options)
        rows = arguments.rows_of(given)
        if not _is_npy(where):
            load_tensorstore()
        elif len(given) > 1 or options.attrs or options.coords or request.codecs or rows:
            raise FieldError(
                f"{where.name}: a .npy file holds one field, without attrs, coords and compressors; save a group "
                "instead, under a name without .npy"
            )
        alike = compared(
            where, given, dims=request.dims, compressors=request.codecs, keep=request.keep
        )
        return request, (alike, rows)

    world = domain.world
    with world.guard:
        world.begin("save")
        request, records = world.gather(check, SAVING)
        world.check_alike([alike for alike, _ in records.distinct])
        arguments.place_rows(request.fields, [rows for _, rows in records], world.rank)
        if isinstance(request.path, Path) and _is_npy(request.path):
            (given,) = request.fields.values()
            npy.save(world, request.path, given, request.progress)
        else:
            save_group(world, request)


def request_of(
    domain: Domain,
    path: Path | BucketPath,
    given: dict[str, CallerField],
    options: SaveOptions,
) -> Request:
    """Check the options of a save; local. Raises `FieldError` and `CheckpointError`."""
    labels = arguments.labels_of(domain.labels, options.dims, options.coords, given)
    coords = arguments.coords_of(labels, given)
    return Request(
        path,
        given,
        domain.grid_shape,
        labels.dims,
        {name: values for name, (values, _) in coords.items()},
        arguments.attrs_of(options.attrs),
        arguments.array_attrs_of(coords, options.array_attrs or {}),
        codecs_of(options.compressors),
        domain.plain.spec,
        tuple(axis.sizes for axis in domain.decomposition.axes),
        arguments.progress_of(options.progress),
        arguments.keep_of(options.keep, path),
    )


_Read = tuple[Path | BucketPath, dict[str, CallerField], tuple[str, ...] | None, Progress | None]


def load(
    domain: Domain,
    path: object,
    into: object,
    named: Mapping[str, object],
    names: object,
    progress: object,
) -> Loaded:
    """Read fields; see `Grid.load`. Collective; blocks."""

    def check() -> tuple[_Read, dict[str, object]]:
        where = arguments.path_of(path, written=False)
        given = arguments.fields_of(domain.layouts, into, named, written=True)
        wanted = arguments.names_of(names)
        if not _is_npy(where):
            load_tensorstore()
        elif len(given) + len(wanted or ()) > 1:
            raise FieldError(f"{where.name}: a .npy file holds one field; ask for one")
        read = (where, given, wanted, arguments.progress_of(progress))
        return read, compared(where, given, names=wanted)

    world = domain.world
    with world.guard:
        world.begin("load")
        where, given, wanted, meter = world.attempt(check, LOADING, alike=True)
        if isinstance(where, Path) and _is_npy(where):
            return npy.load(domain, where, wanted, given, meter)
        return load_group(domain, where, wanted, given, meter)


def _is_npy(path: Path | BucketPath) -> bool:
    return path.suffix == npy.SUFFIX


def compared(
    path: Path | BucketPath, fields: dict[str, CallerField], **more: object
) -> dict[str, object]:
    """Return the arguments that must be the same on all ranks."""
    kinds = {name: f"{f.described.dtype} {f.layout.spec.of_cells}" for name, f in fields.items()}
    return {"path": str(path), "fields": sorted(fields), **kinds, **more}
