"""Loads of groups: all ranks read fields of a checkpoint, in any division of the saved grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import CheckpointError, FieldError
from halox.io.checkpoint import moving
from halox.io.checkpoint.arguments import CallerField, Progress
from halox.io.checkpoint.bucket import BucketPath, current
from halox.io.checkpoint.chunks import ShardGrid
from halox.io.checkpoint.folder import check_exists, replaced
from halox.io.checkpoint.saving import Made, Meter, checked
from halox.io.checkpoint.store import Contents, Store, id_of, open_field, read
from halox.io.checkpoint.tables import joined, layout_of
from halox.io.regions import owned_cells
from halox.runtime.arrays import DType
from halox.runtime.gpu.devices import allocate
from halox.runtime.world import World
from halox.values import shortened

LOADING = "a load"


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
        return f"<halox checkpoint: fields {', '.join(self) or 'none'}; attrs {self.attrs}>"


class Reading:
    """A checkpoint that all ranks read, and that must stay the same meanwhile. Construction is collective.

    ``identify`` returns an id that each save makes anew; it raises an error if there is no checkpoint. All ranks must
    find the same id before they read, and again after their last cell. So they never return parts of two checkpoints,
    though the path may be replaced at any moment.
    """

    def __init__(self, world: World, path: object, identify: Callable[[], str]) -> None:
        self._world, self._path, self._identify = world, path, identify
        self._step = f"reading {path}"

        def found() -> tuple[str, str]:
            mine = identify()
            return mine, mine

        self.id, records = world.gather(checked(found, self._step), LOADING)
        if len(records.distinct) > 1:
            raise replaced(path)

    def attempt(self, read: Callable[[], Made]) -> Made:
        """Return ``read()``, or raise on all ranks if it raises on any, as `World.attempt`."""

        def call() -> Made:
            try:
                return read()
            except OSError:  # also of TensorStore, and `CheckpointError`
                self._check()
                raise

        return self._world.attempt(checked(call, self._step), LOADING)

    def end(self) -> None:
        """Raise on all ranks if the checkpoint has been replaced or removed since the construction."""
        self._world.attempt(checked(self._check, self._step), LOADING)

    def _check(self) -> None:
        try:
            is_same = self._identify() == self.id
        except OSError:
            is_same = False
        if not is_same:
            raise replaced(self._path)


def load_group(
    domain: Domain,
    path: Path | BucketPath,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
    progress: Progress | None,
) -> Loaded:
    """Read fields; the caller has compared the arguments of the ranks. Collective; blocks."""
    world = domain.world
    if isinstance(path, BucketPath):
        root = path.store(world.limit_s)
        reading = Reading(world, path, partial(_id_in_bucket, root))
        store = root.below(reading.id, shown_as=str(path)) if reading.id else root
    else:
        store = Store.of_folder(path, path, world.limit_s)
        reading = Reading(world, path, partial(_id_in_folder, path, store))

    def describe() -> tuple[Contents, list[str]]:
        contents = read(store)
        return contents, _check(domain, contents, path, names, into)

    contents, wanted = reading.attempt(describe)
    fields: dict[str, tuple[Any, FieldLayout]] = {}
    for name in wanted:
        stored = contents.fields[name]
        if name in into:
            fields[name] = into[name].array, into[name].layout
        elif stored.table:
            rows = [(stored.shape[0] + rank) // world.size for rank in range(world.size)]
            layout = layout_of(rows, world.rank, stored.shape[1:])
            array = allocate(layout.padded_shape, stored.dtype, domain.device_id)
            fields[name] = array, layout
        else:
            fields[name] = new_field(domain, stored.dtype, stored.options)
    shards = {n: ShardGrid(fields[n][1], contents.fields[n].shard) for n in wanted}
    meter = Meter(progress, [(shards[n], contents.fields[n].dtype.itemsize) for n in wanted])

    def read_field(name: str) -> None:
        stored, cells = contents.fields[name], owned_cells(*fields[name])
        moving.load(shards[name], cells, stored, store, open_field(store, stored), meter)

    for name in wanted:
        reading.attempt(partial(read_field, name))
    reading.end()
    tables = {name: contents.fields[name].table for name in wanted}
    return Loaded(joined({name: fields[name][0] for name in wanted}, tables), contents.attrs)


def _id_in_folder(path: Path, store: Store) -> str:
    check_exists(path, is_folder=True)
    return id_of(store)


def _id_in_bucket(root: Store) -> str:
    found = current(root)
    if found is None:
        raise CheckpointError(f"there is no checkpoint {root.name}")
    return found


def new_field(domain: Domain, dtype: DType, options: Any) -> tuple[Any, FieldLayout]:
    """Allocate a field with options of `Grid.zeros`; return it and its layout. Collective."""
    field = domain.allocation.new(dtype, options)
    return field, domain.layouts.find(field)


def _check(
    domain: Domain,
    contents: Contents,
    path: object,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
) -> list[str]:
    """Check that a checkpoint fits the grid and the fields to fill; return the names of the fields to load."""
    if contents.grid_shape != domain.grid_shape:
        raise CheckpointError(
            f"{path} has fields of a grid of {contents.grid_shape} cells, and this grid has {domain.grid_shape}; make "
            "a grid of the same shape: the ranks, their division and the halo may differ"
        )
    if names is None:
        names = () if into else tuple(contents.fields)
    tables: dict[str, list[str]] = {}
    for name, stored in contents.fields.items():
        tables.setdefault(stored.table or name, []).append(name)
    wanted = sorted({one for name in (*into, *names) for one in tables.get(name, [name])})
    for name in wanted:
        if name not in contents.fields:
            raise CheckpointError(
                f"{path} has no field {shortened(name)}; it has {', '.join(contents.fields) or 'none'}"
            )
        stored, given = contents.fields[name], into.get(name)
        if stored.table and given is None:
            continue
        if given is None:
            try:
                layout, dtype = domain.layouts.of_options(stored.options), stored.dtype
            except FieldError as error:
                raise FieldError(
                    f"{name}: {error}; or give a field to fill, as in grid.load(path, {name}=grid.zeros())"
                ) from error
        else:
            layout, dtype = given.layout, given.described.dtype
        why = stored.differs(layout, dtype)
        if why and given is not None:
            raise FieldError(f"{name}: {why}; give a field like the one saved, or let load make it")
        if why:
            raise CheckpointError(
                f"{path}: {name} does not fit this grid: {why}; a staggered field has another number of points along a "
                "periodic axis: make the grid periodic as it was"
            )
    return wanted
