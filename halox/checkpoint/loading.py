"""Loads of groups: all ranks read fields of a checkpoint, in any division of the saved grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halox.checkpoint import bucket, moving
from halox.checkpoint.arguments import CallerField, Progress
from halox.checkpoint.bucket import BucketPath
from halox.checkpoint.chunks import ShardGrid
from halox.checkpoint.folder import opened, replaced
from halox.checkpoint.saving import Meter, checked
from halox.checkpoint.store import Contents, Store, open_field, read
from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import CheckpointError, FieldError, raising
from halox.gathering.staging import owned_cells
from halox.runtime.arrays import DType
from halox.runtime.world import World
from halox.values import shortened

LOADING = "a load"

Source = TypeVar("Source")
Description = TypeVar("Description")


class Loaded(dict[str, Any]):
    """Fields of a checkpoint by name, and the saved attributes.

    Attributes
    ----------
    attrs : dict
        The attributes that were given to `Grid.save`.
    """

    def __init__(self, fields: dict[str, Any], attrs: dict[str, Any]) -> None:
        super().__init__(fields)
        self.attrs = attrs

    def __repr__(self) -> str:
        """Return the names of the fields, and the attributes."""
        return f"<halox checkpoint: fields {', '.join(self) or 'none'}; attrs {self.attrs}>"


def load_group(
    domain: Domain,
    path: Path | BucketPath,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
    progress: Progress | None,
) -> Loaded:
    """Read fields; the caller has compared the arguments of the ranks. Collective; blocks."""
    world, step = domain.world, f"reading {path}"
    with opened_on_all(world, path, opened_store(path, world.limit_s), read) as (store, contents):
        world.attempt(checked(lambda: _check(domain, contents, path, names, into), step), LOADING)
        if names is None:
            names = () if into else tuple(contents.fields)
        wanted = sorted({*into, *names})
        fields: dict[str, tuple[Any, FieldLayout]] = {}
        for name in wanted:
            if name in into:
                fields[name] = into[name].array, into[name].layout
            else:
                stored = contents.fields[name]
                fields[name] = new_field(domain, stored.dtype, stored.options)
        _check_shapes(world, contents, path, fields)
        shards = {n: ShardGrid(fields[n][1], contents.fields[n].shard) for n in wanted}
        meter = Meter(progress, [(shards[n], contents.fields[n].dtype.itemsize) for n in wanted])
        for name in wanted:
            stored = contents.fields[name]
            array = world.attempt(checked(partial(open_field, store, stored), step), LOADING)
            cells = world.attempt(checked(partial(owned_cells, *fields[name]), step), LOADING)
            error = moving.load(shards[name], cells, stored, store, array, meter)
            world.attempt(checked(raising(error), step), LOADING)
    return Loaded({name: fields[name][0] for name in wanted}, contents.attrs)


def new_field(domain: Domain, dtype: DType, options: Any) -> tuple[Any, FieldLayout]:
    """Allocate a field with options of `Grid.zeros`; return it and its layout. Collective."""
    field = domain.allocation.new(dtype, options)
    return field, domain.layouts.find(field)


@contextmanager
def opened_store(path: Path | BucketPath, limit_s: float) -> Iterator[Store]:
    """Yield the store of a checkpoint, which remains valid if another checkpoint replaces it; local."""
    if isinstance(path, BucketPath):
        with bucket.opened(path, limit_s) as store:
            yield store
    else:
        with opened(path, is_folder=True) as link:
            yield Store.of_folder(link, path, limit_s)


@contextmanager
def opened_on_all(
    world: World,
    path: object,
    opening: AbstractContextManager[Source],
    describe: Callable[[Source], Description],
) -> Iterator[tuple[Source, Description]]:
    """Open one checkpoint on all ranks, and describe it; raises on all ranks or on none.

    The descriptions include an identity. They differ if another checkpoint took the name before the last rank opened
    it, or if nodes do not share the file system.
    """
    with ExitStack() as stack:

        def open_here() -> tuple[Source, Description]:
            source = stack.enter_context(opening)
            return source, describe(source)

        described: tuple[Source, Description] = world.attempt(
            checked(open_here, f"reading {path}"), LOADING
        )
        if len(world.gather(lambda: (None, repr(described[1])), LOADING)[1].distinct) > 1:
            raise replaced(path)
        yield described


def _check(
    domain: Domain,
    contents: Contents,
    path: object,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
) -> None:
    if contents.grid_shape != domain.grid_shape:
        raise CheckpointError(
            f"{path} has fields of a grid of {contents.grid_shape} cells, and this grid has {domain.grid_shape}; make "
            "a grid of the same shape: the ranks, their division and the halo may differ"
        )
    for name in (*(names or ()), *into):
        if name not in contents.fields:
            raise CheckpointError(
                f"{path} has no field {shortened(name)}; it has {', '.join(contents.fields) or 'none'}"
            )
    for name in contents.fields if names is None and not into else names or ():
        if name not in into:
            try:
                domain.layouts.of_options(contents.fields[name].options)
            except FieldError as error:
                raise FieldError(
                    f"{name}: {error}; or give a field to fill, as in grid.load(path, {name}=grid.zeros())"
                ) from error
    for name, given in into.items():
        why = contents.fields[name].differs(given.layout, given.described.dtype)
        if why:
            raise FieldError(f"{name}: {why}; give a field like the one saved, or let load make it")


def _check_shapes(
    world: World, contents: Contents, path: object, fields: dict[str, tuple[Any, FieldLayout]]
) -> None:
    """Raise on all ranks if a new field has another shape, as a staggered field does if an axis is now periodic."""

    def check() -> None:
        for name, (_, layout) in fields.items():
            stored = contents.fields[name]
            why = stored.differs(layout, stored.dtype)
            if why:
                raise CheckpointError(
                    f"{path}: {name} does not fit this grid: {why}; a staggered field has another number of points "
                    "along a periodic axis: make the grid periodic as it was"
                )

    world.attempt(checked(check, f"reading {path}"), LOADING)
