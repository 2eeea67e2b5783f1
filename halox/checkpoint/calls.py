"""`Grid.save` and `Grid.load`: check the arguments, compare them between the ranks, and choose the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halox.checkpoint import npy
from halox.checkpoint.arguments import (
    Given,
    Progress,
    array_attrs_of,
    attrs_of,
    coords_of,
    dims_of,
    fields_of,
    names_of,
    path_of,
    progress_of,
)
from halox.checkpoint.bucket import BucketPath
from halox.checkpoint.fields import spec_text
from halox.checkpoint.loading import LOADING, Loaded, load_group
from halox.checkpoint.saving import SAVING, Request, guarded, save_group
from halox.checkpoint.store import codecs_of, load_tensorstore
from halox.decomposition import FieldLayout
from halox.dimension_names import FACE
from halox.domain import Domain, FieldOptions
from halox.domain.options import dtype_text
from halox.errors import FieldError, MismatchError
from halox.gathering.scatter import components_of
from halox.runtime.arrays import DType
from halox.values import shown

if TYPE_CHECKING:
    from halox.runtime.array_types import Field


def save(
    domain: Domain,
    path: object,
    fields: object,
    *,
    attrs: object = None,
    dims: Sequence[str] | None = None,
    coords: object = None,
    compressors: object = None,
    progress: object = None,
    named: Mapping[str, object] | None = None,
    array_attrs: Mapping[str, object] | None = None,
) -> None:
    """Save as `halox.Grid.save` does; ``array_attrs`` has the attributes of fields and coordinates."""
    with domain.world.guard:
        domain.world.begin("save")

        def check() -> tuple[Request, dict[str, object]]:
            where = path_of(path, written=True)
            given = fields_of(domain.layouts, fields, named or {}, written=False)
            if not given:
                raise FieldError("no field given; write grid.save(path, u=u)")
            names = dims_of(dims, len(domain.grid_shape))
            lengths = _lengths(domain, names)
            codecs = codecs_of(compressors)
            if where.suffix != npy.SUFFIX:
                load_tensorstore()
            elif len(given) > 1 or attrs or coords or codecs:
                raise FieldError(
                    f"{where.name}: a .npy file holds one field, without attrs, coords and compressors; save a group "
                    "instead, under a name without .npy"
                )
            request = Request(
                where,
                given,
                domain.grid_shape,
                names,
                coords_of(coords, names, lengths, given),
                attrs_of(attrs),
                array_attrs_of(coords, array_attrs or {}),
                codecs,
                progress_of(progress),
            )
            return request, _said(where, given, dims=names, compressors=codecs)

        request, said = domain.world.prepare(check, SAVING)
        compare(said, "save")
        if isinstance(request.path, Path) and request.path.suffix == npy.SUFFIX:
            (given,) = request.fields.values()
            npy.save(domain.world, request.path, given, request.progress)
        else:
            save_group(domain.world, request)


def load(
    domain: Domain,
    path: object,
    into: object,
    *,
    names: object,
    progress: object,
    named: dict[str, object],
) -> Loaded:
    """Load as `halox.Grid.load` does."""
    with domain.world.guard:
        domain.world.begin("load")

        def check() -> tuple[
            tuple[Path | BucketPath, dict[str, Given], tuple[str, ...] | None, Progress | None],
            dict[str, object],
        ]:
            where = path_of(path, written=False)
            given = fields_of(domain.layouts, into, named, written=True)
            wanted = names_of(names)
            if where.suffix != npy.SUFFIX:
                load_tensorstore()
            elif len(given) + len(wanted or ()) > 1:
                raise FieldError(f"{where.name}: a .npy file holds one field; ask for one")
            found = where, given, wanted, progress_of(progress)
            return found, _said(where, given, names=wanted)

        (where, given, wanted, tell), said = domain.world.prepare(check, LOADING)
        compare(said, "load")

        def new(dtype: DType, options: FieldOptions) -> tuple[Field, FieldLayout]:
            field = domain.allocation.new(dtype, options)
            return field, domain.layouts.find(field)

        if isinstance(where, Path) and where.suffix == npy.SUFFIX:
            return _load_npy(domain, where, given, wanted, tell)
        return load_group(domain.world, where, domain.grid_shape, wanted, given, new, tell)


def _load_npy(
    domain: Domain,
    path: Path,
    into: dict[str, Given],
    names: tuple[str, ...] | None,
    progress: Progress | None,
) -> Loaded:
    """Return the field of a ``.npy`` file, under the requested name or the file's name."""
    with npy.opened_file(domain.world, path) as found:
        shape, dtype = found[1].shape, found[1].dtype

        def options() -> FieldOptions:
            for name, given in into.items():
                if given.found.dtype != dtype:
                    raise FieldError(
                        f"{name}: dtype {dtype} in {path}, {given.found.dtype} in the field; give a field like "
                        "the one saved, or let load make it"
                    )
            if into:
                return {}
            call = f"grid.load({str(path)!r}, u=grid.zeros({dtype_text(dtype)}, {{}}))"
            return components_of(shape, domain.grid_shape, str(path), call)

        layout = guarded(domain.world, options, f"reading {path}", LOADING)
        if into:
            ((name, given),) = into.items()
            field = given.array
        else:
            (name,) = names or (path.stem,)
            field = domain.allocation.new(dtype, layout)
        npy.load(domain.world, path, found, field, domain.layouts.find(field), progress)
    return Loaded({name: field}, {})


def _lengths(domain: Domain, dims: Sequence[str]) -> dict[str, int]:
    """Return the length of each dimension that may have coordinates."""
    axes = domain.decomposition.axes
    faces = {f"{name}{FACE}": axis.points(True) for name, axis in zip(dims, axes, strict=True)}
    return dict(zip(dims, domain.grid_shape, strict=True)) | faces


def _said(path: Path | BucketPath, fields: dict[str, Given], **more: object) -> dict[str, object]:
    """Return the arguments that must be the same on all ranks."""
    kinds = {name: f"{f.found.dtype} {spec_text(f.layout.spec)}" for name, f in fields.items()}
    return {"path": str(path), "fields": sorted(fields), **kinds, **more}


def compare(said: Sequence[Mapping[str, object]], call: str) -> None:
    """Raise `MismatchError` if the arguments of the ranks differ; local, with the same result on all ranks."""
    first = said[0]
    for rank, other in enumerate(said):
        for name in first:
            if other.get(name) != first[name]:
                raise MismatchError(
                    f"{call}: {name} differs between ranks: rank 0 has {shown(first[name])}, rank {rank} has "
                    f"{shown(other.get(name))}; give the same on all ranks"
                )
