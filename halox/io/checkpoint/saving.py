"""Saves of groups: all ranks write a checkpoint under a temporary name, and rank 0 then replaces the old one by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from halox.decomposition import FieldSpec
from halox.errors import CheckpointError, HaloxError, raising
from halox.io.checkpoint import moving
from halox.io.checkpoint.arguments import CallerField, Progress
from halox.io.checkpoint.bucket import BucketPath, BucketReplacement
from halox.io.checkpoint.chunks import ShardGrid, extents
from halox.io.checkpoint.fields import TABLE, StoredField, kept_attributes
from halox.io.checkpoint.folder import Replacement
from halox.io.checkpoint.store import Contents, Store, create, is_checkpoint, is_output
from halox.io.regions import owned_cells
from halox.runtime.arrays import Array
from halox.runtime.world import World

SAVING = "a save"

Made = TypeVar("Made")


@dataclass(frozen=True)
class Request:
    """A rank's arguments of a save of a group."""

    path: Path | BucketPath
    fields: dict[str, CallerField]
    grid_shape: tuple[int, ...]
    dims: tuple[str, ...]
    coords: dict[str, Array]
    attrs: dict[str, Any]
    array_attrs: dict[str, dict[str, Any]]
    codecs: list[Any]
    plain: FieldSpec  # of the grid's fields without options
    blocks: tuple[tuple[int, ...], ...]  # sizes of the grid's blocks along each axis
    progress: Progress | None = None
    keep: int = 1


def save_group(world: World, request: Request) -> None:
    """Write a group; the caller has compared the arguments of the ranks. Collective; blocks."""
    path, given = request.path, request.fields
    stored = {
        name: StoredField.of(
            name,
            field.layout,
            field.described.dtype,
            request.codecs,
            kept={TABLE: json.dumps(field.table)}
            if field.table
            else kept_attributes(field.layout.spec, request.plain),
        )
        for name, field in given.items()
    }
    contents = Contents(request.grid_shape, stored, request.attrs, request.blocks)

    def store_of(partial: str) -> Store:
        if isinstance(path, BucketPath):
            return path.store(world.limit_s).below(partial, shown_as=str(path))
        return Store.of_folder(partial, path, world.limit_s)

    def begin() -> Replacement | BucketReplacement:
        if isinstance(path, BucketPath):
            return BucketReplacement(path, world.limit_s)
        return Replacement(path, may_replace, is_folder=True, keep=request.keep)

    def make(partial: str) -> None:
        create(store_of(partial), contents, request.dims, request.coords, request.array_attrs)

    with replacing(world, path, begin, make) as partial:
        step = f"writing {path}"

        def prepare() -> tuple[Store, dict[str, Any]]:
            return store_of(partial), {n: owned_cells(f.array, f.layout) for n, f in given.items()}

        store, cells = world.attempt(checked(prepare, step), SAVING)
        shards = {
            name: ShardGrid(field.layout, stored[name].shard) for name, field in given.items()
        }
        meter = Meter(request.progress, [(shards[n], stored[n].dtype.itemsize) for n in shards])
        for name in given:
            error = moving.save(world, shards[name], cells[name], stored[name], store, meter)
            world.attempt(checked(raising(error), step), SAVING)


def may_replace(path: Path, *, outputs: bool = False) -> bool:
    """Whether a folder contains a checkpoint (or an output), or is empty; does not raise."""
    try:
        metadata = Store.of_folder(path, path, 0).read_json()
        is_known = is_checkpoint(metadata) or (outputs and is_output(metadata))
        return is_known or not any(path.iterdir())
    except (OSError, ValueError):
        return False


@contextmanager
def replacing(
    world: World,
    path: object,
    begin: Callable[[], Replacement | BucketReplacement],
    make: Callable[[str], object],
) -> Iterator[str]:
    """Yield the temporary name of a new file, folder or prefix; at the end of the block, it replaces the old one.

    Rank 0 calls ``begin``, and ``make`` with the temporary name, to write headers and metadata. After an error the old
    contents stay unchanged. Collective.
    """
    step = f"writing {path}"
    replacement: Replacement | BucketReplacement | None = None

    def begin_here() -> str:
        nonlocal replacement
        replacement = begin()
        make(str(replacement.partial))
        return str(replacement.partial)

    try:
        name = world.from_first(checked(begin_here, step), SAVING)
        is_local = isinstance(path, Path)

        def look() -> None:
            if is_local and not Path(name).exists():
                raise CheckpointError(
                    f"{path}: this rank does not see {name}, which rank 0 has made; give a path on a file system that "
                    "all nodes share"
                )

        world.attempt(checked(look, step), SAVING)
        yield name

        def commit() -> None:
            if replacement is not None:
                replacement.commit()

        world.attempt(checked(commit, step), SAVING)
    finally:
        if replacement is not None:
            replacement.discard()


class Meter:
    """Reports to a callback the bytes of all its fields that a rank has moved.

    ``fields`` has the shards of each field, and the bytes per element.
    """

    def __init__(self, progress: Progress | None, fields: list[tuple[ShardGrid, int]]) -> None:
        self._progress, self._done = progress, 0
        self._total = sum(prod(extents(shards.own)) * size for shards, size in fields)

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def checked(build: Callable[[], Made], step: str) -> Callable[[], Made]:
    """Return a function that calls ``build`` and raises its error as `as_checkpoint_error` does."""

    def call() -> Made:
        try:
            return build()
        except HaloxError:
            raise
        except Exception as error:
            raise as_checkpoint_error(error, step) from error

    return call


def as_checkpoint_error(error: Exception, step: str) -> HaloxError:
    """Return the error itself if it is a `HaloxError`, else a `CheckpointError` that names the error as its cause."""
    if isinstance(error, HaloxError):
        return error
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    checkpoint_error = CheckpointError(f"{step} failed: {text}")
    checkpoint_error.__cause__ = error
    return checkpoint_error
