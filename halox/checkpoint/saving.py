"""`Grid.save`: all ranks write a checkpoint under a temporary name, which is replaced at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from halox.checkpoint.arguments import Given, Progress
from halox.checkpoint.chunks import ChunkGrid, extents
from halox.checkpoint.fields import StoredField
from halox.checkpoint.folder import Replacement
from halox.checkpoint.moving import Mover, open_store
from halox.checkpoint.store import Contents, create, is_checkpoint
from halox.errors import CheckpointError, HaloxError
from halox.runtime.arrays import Array
from halox.runtime.world import World
from halox.staging import owned_cells

SAVING = "a save"


@dataclass(frozen=True)
class Request:
    """A rank's arguments of a save of a group."""

    path: Path
    fields: dict[str, Given]
    grid_shape: tuple[int, ...]
    dims: tuple[str, ...]
    coords: dict[str, Array]
    attrs: dict[str, Any]
    array_attrs: dict[str, dict[str, Any]]
    codecs: list[Any]
    progress: Progress | None


def save(world: World, request: Request) -> None:
    """Write a group; the caller has compared the arguments of the ranks. Collective; blocks."""
    stored = {
        name: StoredField.of(name, given.layout, given.found.dtype, is_plain=not request.codecs)
        for name, given in request.fields.items()
    }
    axes = next(iter(request.fields.values())).layout.decomposition.axes
    blocks = tuple(axis.sizes for axis in axes)
    contents = Contents(request.grid_shape, stored, request.attrs, blocks)

    def make(partial: Path) -> None:
        create(partial, contents, request.dims, request.coords, request.array_attrs, request.codecs)

    with replacing(world, request.path, is_checkpoint, make) as partial:
        grids = {
            name: ChunkGrid(given.layout, stored[name].chunk)
            for name, given in request.fields.items()
        }
        meter = Meter(request.progress, [(grids[n], stored[n].dtype.itemsize) for n in grids])
        for name, given in request.fields.items():
            field = stored[name]
            opening = functools.partial(
                open_store, partial, request.path, field, mode="r+", node_ranks=world.node_comm.size
            )
            store = guarded(world, opening, f"writing {request.path}", SAVING)
            cells = owned_cells(given.array, given.layout)
            error = Mover(world, grids[name], cells, field, meter).save(store)
            world.agree(as_checkpoint_error(error, f"writing {request.path}"), SAVING)


@contextmanager
def replacing(
    world: World,
    path: Path,
    may_replace: Callable[[Path], bool],
    make: Callable[[Path], None] | None,
) -> Iterator[Path]:
    """Yield the temporary name of a new folder, made by rank 0, or of a file; it replaces the old one at the end.

    After an error the old folder or file stays unchanged. Collective.
    """
    doing = f"writing {path}"
    replacement: Replacement | None = None

    def begin() -> None:
        nonlocal replacement
        if world.rank == 0:
            replacement = Replacement(path, may_replace, is_folder=make is not None)
            if make is not None:
                make(replacement.partial)

    try:
        guarded(world, begin, doing, SAVING)
        partial = Path(world.gather(str(replacement.partial) if replacement else None, SAVING)[0])

        def look() -> None:
            if make is not None and not partial.is_dir():
                raise CheckpointError(
                    f"{path}: this rank does not see {partial}, which rank 0 has made; give a path on a file system "
                    "that all nodes share"
                )

        guarded(world, look, doing, SAVING)
        yield partial

        def commit() -> None:
            if replacement is not None:
                replacement.commit()

        guarded(world, commit, doing, SAVING)
    finally:
        if replacement is not None:
            replacement.discard()


class Meter:
    """Reports to a callback the bytes of all its fields that a rank has moved.

    ``grids`` has the chunks of each field, and the bytes per element.
    """

    def __init__(self, progress: Progress | None, grids: list[tuple[ChunkGrid, int]]) -> None:
        self._progress, self._done = progress, 0
        self._total = sum(prod(extents(grid.own)) * size for grid, size in grids)

    def __call__(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def guarded(world: World, build: Callable[[], Any], doing: str, call: str) -> Any:
    """Return ``build()``; if it fails on any rank, raise its error on all ranks, as a `HaloxError`. Collective."""
    result, error = None, None
    try:
        result = build()
    except Exception as caught:
        error = as_checkpoint_error(caught, doing)
    world.agree(error, call)
    return result


def as_checkpoint_error(error: Exception | None, doing: str) -> Exception | None:
    """Return the error itself if it is a `HaloxError`, else a `CheckpointError` that names the error as its cause."""
    if error is None or isinstance(error, HaloxError):
        return error
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    found = CheckpointError(f"{doing} failed: {text}")
    found.__cause__ = error
    return found
