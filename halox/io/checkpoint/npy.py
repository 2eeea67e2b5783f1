"""One field as a ``.npy`` file, without checksums.

The file is cut into slabs, which are contiguous in it. One rank writes a slab, and the other ranks send it their cells
of the slab, as with the shards of a group. Each rank reads its own cells.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import CheckpointError, FieldError, raising
from halox.io.checkpoint import moving
from halox.io.checkpoint.arguments import CallerField, Progress
from halox.io.checkpoint.chunks import ShardGrid, extents
from halox.io.checkpoint.fields import StoredField
from halox.io.checkpoint.folder import Replacement, check_exists
from halox.io.checkpoint.loading import Loaded, Reading, new_field
from halox.io.checkpoint.moving import Failure, collect, fill
from halox.io.checkpoint.saving import SAVING, Meter, checked, replacing
from halox.io.message_queue import as_bytes
from halox.io.regions import Cut, owned_cells
from halox.runtime.arrays import Array, DType
from halox.runtime.world import World

SUFFIX = ".npy"


def save(world: World, path: Path, given: CallerField, progress: Progress | None) -> None:
    """Write a field. Collective; blocks."""
    layout, dtype, step = given.layout, given.described.dtype, f"writing {path}"
    header = world.attempt(checked(partial(_header, layout.global_shape, dtype), step), SAVING)

    def begin() -> Replacement:
        return Replacement(path, Path.is_file, is_folder=False)

    def make(partial_name: str) -> None:
        Path(partial_name).write_bytes(header)

    with replacing(world, path, begin, make) as name, ExitStack() as stack:

        def enter() -> tuple[int, Any]:
            # For writing only: clients of NFS then write these bytes alone, not the pages around them.
            handle = os.open(name, os.O_WRONLY)
            stack.callback(os.close, handle)
            return handle, owned_cells(given.array, layout)

        # All ranks open the file before any rank writes: if rank 0 ends, another run may take the name.
        handle, cells = world.attempt(checked(enter, step), SAVING)
        slabs, failure = _slabs(layout, dtype), Failure()

        def write(cut: Cut, values: Array) -> None:
            rest = as_bytes(np.ascontiguousarray(values)).data
            place = len(header) + _offset(cut, layout, dtype)
            while rest:
                written = os.pwrite(handle, rest, place)
                rest, place = rest[written:], place + written

        collect(
            world,
            slabs,
            cells,
            StoredField.of(path.stem, layout, dtype),
            SAVING,
            lambda cut, values: failure.attempt(partial(write, cut, values)),
            failure.attempting(Meter(progress, [(slabs, dtype.itemsize)])),
        )
        failure.attempt(partial(os.fsync, handle))
        world.attempt(checked(raising(failure.error), step), SAVING)


def load(
    domain: Domain,
    path: Path,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
    progress: Progress | None,
) -> Loaded:
    """Read the field, under the requested name or the file's name. Collective; blocks."""
    world = domain.world
    (name,) = into or names or (path.stem,)
    with ExitStack() as stack:
        files: list[BinaryIO] = []

        def identify() -> str:
            if not files:
                check_exists(path, is_folder=False)
                files.append(stack.enter_context(open(path, "rb")))
            # Without the number of the device, which may differ between nodes.
            status = os.fstat(files[0].fileno())
            return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"

        reading = Reading(world, path, identify)
        (file,) = files

        def describe() -> tuple[DType, int, dict[str, Any]]:
            shape, dtype, begin = _header_of(file, path)
            if not into:
                remedy = "give a field with its layout, as in u=grid.zeros(components=(2, ...))"
                return dtype, begin, dict(domain.layouts.of_whole(shape, str(path), remedy))
            if into[name].described.dtype != dtype:
                raise FieldError(
                    f"{name}: dtype {dtype} in {path}, {into[name].described.dtype} in the field; give a field "
                    "like the one saved, or let load make it"
                )
            if shape != (expected := into[name].layout.global_shape):
                raise CheckpointError(
                    f"{path} has an array of shape {shape}, and the whole field has {expected}; make a grid of "
                    "its shape, or give a field with its components or staggering"
                )
            return dtype, begin, {}

        dtype, begin, options = reading.attempt(describe)
        field, layout = (
            (into[name].array, into[name].layout) if into else new_field(domain, dtype, options)
        )
        cells = reading.attempt(partial(owned_cells, field, layout))
        slabs, stored = _slabs(layout, dtype), StoredField.of(name, layout, dtype)
        meter = Meter(progress, [(slabs, dtype.itemsize)])

        def read(cut: Cut, values: Array) -> None:
            shape = layout.global_shape
            # From this axis on, all cells of the box are adjacent in the file.
            axis = max((n for n, c in enumerate(cut) if extents((c,)) != (shape[n],)), default=0)
            along = [range(c.start, c.stop if n < axis else c.start + 1) for n, c in enumerate(cut)]
            starts = np.ravel_multi_index(np.ix_(*along), shape).ravel() * dtype.itemsize
            runs = as_bytes(values).reshape(len(starts), -1)
            for start, run in zip(starts.tolist(), runs, strict=True):
                file.seek(begin + start)
                if file.readinto(run.data) < run.nbytes:  # type: ignore[attr-defined]
                    raise CheckpointError(f"{path} was cut off while it was read")

        reading.attempt(partial(fill, slabs, cells, stored, read, meter))
        reading.end()
    return Loaded({name: field}, {})


def _slabs(layout: FieldLayout, dtype: DType) -> ShardGrid:
    """Return the slabs of a field, one part each: whole rows, planes and so on, or parts of a row."""
    shape, most = layout.global_shape, max(1, moving.PART_BYTES // dtype.itemsize)
    slab = [max(1, min(n, most // prod(shape[axis + 1 :]))) for axis, n in enumerate(shape)]
    return ShardGrid(layout, tuple(slab))


def _offset(cut: Cut, layout: FieldLayout, dtype: DType) -> int:
    """Return the place of a slab in the file, after the header, in bytes."""
    starts = [axis.start for axis in cut]
    return int(np.ravel_multi_index(starts, layout.global_shape)) * dtype.itemsize


def _header(shape: tuple[int, ...], dtype: DType) -> bytes:
    """Return the header of a file; raises `FieldError` if its format does not support the dtype."""
    buffer = BytesIO()
    try:
        descr = npy.dtype_to_descr(dtype)
        if npy.descr_to_dtype(descr) != dtype:
            raise ValueError("a load would return another dtype")
    except ValueError as error:
        raise FieldError(
            f"a .npy file cannot hold dtype {dtype} ({error}); save a group instead, under a name without .npy"
        ) from error
    described = {"shape": shape, "fortran_order": False, "descr": descr}
    npy.write_array_header_2_0(buffer, described)
    return buffer.getvalue()


def _header_of(file: BinaryIO, path: Path) -> tuple[tuple[int, ...], DType, int]:
    """Return the shape and dtype of a file's array, and the length of its header in bytes; raises `CheckpointError`."""
    try:
        version = npy.read_magic(file)
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = reader(file)
        begin, end = file.tell(), file.seek(0, 2)
    except OSError:
        raise
    except Exception as error:  # the parser of a damaged header raises several types
        raise CheckpointError(
            f"{path} is no .npy file, or its header is damaged: {error}"
        ) from error
    if is_fortran or dtype.hasobject:
        raise CheckpointError(
            f"{path}: expected an array in C order, of elements of fixed size; write it by "
            "np.save(path, np.ascontiguousarray(array)), objects as in u.astype('f8')"
        )
    expected = begin + prod(shape) * dtype.itemsize
    if end != expected:
        raise CheckpointError(f"{path} has {end} bytes, expected {expected}: it was cut off")
    return shape, dtype, begin
