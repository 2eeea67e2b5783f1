"""`Grid.load`: reads fields of a checkpoint, with all ranks, in any division."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halox.checkpoint.arguments import Given, Progress
from halox.checkpoint.chunks import ChunkGrid
from halox.checkpoint.folder import opened, replaced
from halox.checkpoint.moving import Mover, open_store
from halox.checkpoint.saving import Meter, as_checkpoint_error, guarded
from halox.checkpoint.store import Contents, PlainChunks, read
from halox.decomposition import FieldLayout
from halox.errors import CheckpointError, FieldError
from halox.runtime.arrays import DType
from halox.runtime.world import World
from halox.staging import owned_cells
from halox.values import shortened

LOADING = "a load"

Found = TypeVar("Found")

Allocate = Callable[[DType, dict[str, Any]], tuple[Any, FieldLayout]]
"""Allocates a field with a dtype and options of `Grid.zeros`; returns the field and its layout. Collective."""


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


def load(
    world: World,
    path: Path,
    grid_shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    into: dict[str, Given],
    allocate: Allocate,
    progress: Progress | None,
) -> Loaded:
    """Read fields; the caller has compared the arguments of the ranks. Collective; blocks."""
    doing, node_ranks = f"reading {path}", world.node_comm.size
    with one_opened(world, path, lambda folder: read(folder, path), is_folder=True) as found:
        folder, contents = found
        guarded(world, lambda: _check(contents, path, grid_shape, names, into), doing, LOADING)
        if names is None:
            names = () if into else tuple(contents.fields)
        wanted = sorted({*into, *names})
        fields: dict[str, tuple[Any, FieldLayout]] = {}
        for name in wanted:
            if name in into:
                fields[name] = into[name].array, into[name].layout
            else:
                stored = contents.fields[name]
                fields[name] = allocate(stored.dtype, stored.options)
        _check_shapes(world, contents, path, fields)
        grids = {n: ChunkGrid(fields[n][1], contents.fields[n].chunk) for n in wanted}
        meter = Meter(progress, [(grids[n], contents.fields[n].dtype.itemsize) for n in wanted])
        for name in wanted:
            stored = contents.fields[name]
            opening = partial(open_store, folder, path, stored, mode="r", node_ranks=node_ranks)
            store = guarded(world, opening, doing, LOADING)
            cells = owned_cells(*fields[name])
            residues, error = Mover(world, grids[name], cells, stored, meter).load(store)
            of_all = world.gather(residues, LOADING, as_checkpoint_error(error, doing))
            if isinstance(store, PlainChunks):
                store.check_shared(of_all)
    return Loaded({name: fields[name][0] for name in wanted}, contents.attrs)


@contextmanager
def one_opened(
    world: World, path: Path, describe: Callable[[Path], Found], *, is_folder: bool
) -> Iterator[tuple[Path, Found]]:
    """Open one checkpoint on all ranks with `opened`, and describe it; raises on all ranks or on none.

    The descriptions include an identity. They differ if another checkpoint took the name before the last rank opened
    it, or if nodes do not share the file system.
    """
    with ExitStack() as stack:

        def look() -> tuple[Path, Found]:
            link = stack.enter_context(opened(path, is_folder=is_folder))
            return link, describe(link)

        found: tuple[Path, Found] = guarded(world, look, f"reading {path}", LOADING)
        if len({*world.gather(repr(found[1]), LOADING)}) > 1:
            raise replaced(path)
        yield found


def _check(
    contents: Contents,
    path: Path,
    grid_shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    into: dict[str, Given],
) -> None:
    """Check that the checkpoint fits the grid and the fields."""
    if contents.grid_shape != grid_shape:
        raise CheckpointError(
            f"{path} has fields of a grid of {contents.grid_shape} cells, and this grid has {grid_shape}; make a grid "
            "of the same shape: the ranks, their division and the halo may differ"
        )
    for name in (*(names or ()), *into):
        if name not in contents.fields:
            raise CheckpointError(
                f"{path} has no field {shortened(name)}; it has {', '.join(contents.fields) or 'none'}"
            )
    for name, given in into.items():
        why = contents.fields[name].differs(given.layout, given.found.dtype)
        if why:
            raise FieldError(f"{name}: {why}; give a field like the one saved, or let load make it")


def _check_shapes(
    world: World, contents: Contents, path: Path, fields: dict[str, tuple[Any, FieldLayout]]
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

    guarded(world, check, f"reading {path}", LOADING)
