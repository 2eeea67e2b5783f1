"""A slice or a projection of a field, read by one process, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halox.checkpoint import npy
from halox.checkpoint.chunks import SHARD_BYTES, extents
from halox.checkpoint.fields import StoredField
from halox.checkpoint.folder import opened
from halox.checkpoint.moving import read_now
from halox.checkpoint.store import Store, load_tensorstore, open_field, read
from halox.dimension_names import AXES
from halox.errors import CheckpointError, FieldError, HaloxError
from halox.runtime.arrays import Array
from halox.runtime.waiting import timeout_s

Projection = Literal["max", "mean"]
Pick = int | slice | Projection
"""Selection along an axis: one index, every n-th point (a slice with only a step), or a projection of all points."""

_NUMBERS = "biufc"


_Read = Callable[[tuple[int, ...], tuple[int, ...]], Array]
"""Returns the cells of a chunk, by chunk index and shape."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint open for reading; a ``.npy`` file has one field without component axes, named after the file."""

    path: Path
    fields: dict[str, StoredField]
    attrs: dict[str, Any]
    # Cells of each block along each grid axis; empty if not recorded.
    blocks: tuple[tuple[int, ...], ...]
    _open: Callable[[StoredField], _Read]
    _dims_of: Callable[[StoredField], tuple[str, ...]]

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the names of a field's dimensions, component axes included."""
        return self._dims_of(self.fields[name])

    def part(self, name: str, picks: Sequence[Pick], progress: Callable[[int, int], None]) -> Array:
        """Return a part of a field as float64, with the axes of the slices; complex numbers as their magnitude.

        ``picks`` has the selection of each axis, with at most one kind of projection; a slice has only a step.
        ``progress(done, total)`` is called after each chunk. Raises `FieldError` if the field's dtype is not numeric,
        and `CheckpointError` if a chunk is damaged, truncated or missing.
        """
        field = self.fields[name]
        if field.dtype.kind not in _NUMBERS:
            raise FieldError(
                f"{name} has dtype {field.dtype}, whose elements are no numbers; give another field"
            )
        with _named(self.path):
            return _part(self._open(field), field, picks, progress)


@contextmanager
def opened_for_reading(path: Path) -> Iterator[Stored]:
    """Open a checkpoint, a Zarr group or a ``.npy`` file, in this process only; raises `CheckpointError`."""
    with ExitStack() as stack:
        with _named(path):
            is_npy = path.suffix == npy.SUFFIX
            link = stack.enter_context(opened(path, is_folder=not is_npy))
            stored = (_npy if is_npy else _group)(link, path)
        yield stored


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except HaloxError:
        raise
    except OSError as error:
        raise CheckpointError(f"reading {path} failed: {error}") from error


def _group(folder: Path, path: Path) -> Stored:
    load_tensorstore()
    store = Store.of_folder(folder, path, timeout_s())
    contents = read(store)

    def open_reader(field: StoredField) -> _Read:
        array = open_field(store, field)

        def read_shard(number: tuple[int, ...], shape: tuple[int, ...]) -> Array:
            starts = [k * n for k, n in zip(number, field.shard, strict=True)]
            cut = tuple(slice(at, at + n) for at, n in zip(starts, shape, strict=True))
            return read_now(array, cut, field, store)

        return read_shard

    def dims_of(field: StoredField) -> tuple[str, ...]:
        return tuple(field.metadata["dimension_names"][: len(field.shape)])

    return Stored(path, contents.fields, contents.attrs, contents.blocks, open_reader, dims_of)


def _npy(file: Path, path: Path) -> Stored:
    shape, dtype, begin, _ = npy.header_of(file, path)
    if not prod(shape) or not shape:
        raise CheckpointError(f"{path} has an array of shape {shape}, without cells of a grid")
    rows = min(shape[0], max(1, SHARD_BYTES // (prod(shape[1:]) * max(1, dtype.itemsize))))
    chunk = (rows, *shape[1:])
    field = StoredField(path.stem, shape, chunk, dtype, 0, 0, (), "", {})
    names = (*AXES[: len(shape)], *(f"axis_{n}" for n in range(4, len(shape))))

    def open_field(field: StoredField) -> _Read:
        # Only accessed parts are read from the disk.
        values = np.memmap(file, dtype, "r", begin, shape)
        return lambda index, cut: values[index[0] * rows :][: cut[0]]

    return Stored(path, {field.name: field}, {}, (), open_field, lambda field: names)


def _part(
    read_chunk: _Read,
    field: StoredField,
    picks: Sequence[Pick],
    progress: Callable[[int, int], None],
) -> Array:
    """Read the chunks of a part one after another, and collect the cells of the part."""
    numbers = [
        range(pick // n, pick // n + 1) if isinstance(pick, int) else range(-(-extent // n))
        for pick, n, extent in zip(picks, field.shard, field.shape, strict=True)
    ]
    kept = [pick for pick in picks if not isinstance(pick, int)]
    over = tuple(axis for axis, pick in enumerate(kept) if isinstance(pick, str))
    extent_of = list(zip(picks, field.shape, strict=True))
    shape = [len(range(extent)[pick]) for pick, extent in extent_of if isinstance(pick, slice)]
    found = np.full(shape, -np.inf if "max" in picks else 0.0)
    total = prod(map(len, numbers))
    for done, number in enumerate(product(*numbers), 1):
        cut = tuple(
            slice(k * n, min((k + 1) * n, extent))
            for k, n, extent in zip(number, field.shard, field.shape, strict=True)
        )
        along = [_along(pick, here) for pick, here in zip(picks, cut, strict=True)]
        place = tuple(there for _, there in along if there is not None)
        if all(there.start < there.stop for there in place):
            values = read_chunk(number, extents(cut))[tuple(index for index, _ in along)]
            values = np.abs(values) if field.dtype.kind == "c" else values
            # The sum of infinities of both signs is NaN, without a warning: the values are drawn.
            with np.errstate(invalid="ignore", over="ignore"):
                if "mean" in picks:
                    found[place] += values.sum(over, np.float64)
                elif "max" in picks:
                    found[place] = np.maximum(found[place], values.max(over))
                else:
                    found[place] = values
        progress(done, total)
    if "mean" in picks:
        found /= prod(extent for pick, extent in extent_of if pick == "mean")
    return found


def _along(pick: Pick, here: slice) -> tuple[int | slice, slice | None]:
    """Return the index of a part's points in a chunk along an axis, and their position if the part has this axis."""
    if isinstance(pick, int):
        return pick - here.start, None
    if isinstance(pick, str):
        return slice(None), None
    step = pick.step
    first, last = -(-here.start // step), -(-here.stop // step)
    return slice(first * step - here.start, None, step), slice(first, last)
