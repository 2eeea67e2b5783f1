"""One field as a ``.npy`` file, written and read by all ranks through MPI-IO.

The file is NumPy's: a header, and all cells in C order. Each rank sees the cells of its own block through a subarray
type; the ranks write and read in rounds of parts, as many on all. There are no checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from halox.checkpoint.arguments import Given, Progress
from halox.checkpoint.chunks import ChunkGrid, Cut, extents
from halox.checkpoint.failure import Failure
from halox.checkpoint.saving import SAVING, Meter, as_checkpoint_error, guarded, replacing
from halox.collectives.host.cell_sums import blocks
from halox.decomposition import FieldLayout
from halox.errors import CheckpointError, FieldError
from halox.runtime.arrays import DType
from halox.runtime.world import World
from halox.staging import Index, owned_cells, part_shape, staging
from halox.window import as_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

SUFFIX = ".npy"
PART_BYTES = 16 << 20
"""Most bytes of a part, but for a single element of more."""

_LOADING = "a load"


def save(world: World, path: Path, given: Given, progress: Progress | None) -> None:
    """Write a field. Collective; blocks."""
    layout, dtype, doing = given.layout, given.found.dtype, f"writing {path}"

    def header() -> bytes:
        try:
            if npy.descr_to_dtype(npy.dtype_to_descr(dtype)) != dtype:
                raise ValueError("it would come back as another one")
        except ValueError as error:
            raise FieldError(
                f"a .npy file cannot hold dtype {dtype} ({error}); save a group instead, under a name without .npy"
            ) from error
        found = BytesIO()
        described = {
            "shape": layout.global_shape,
            "fortran_order": False,
            "descr": npy.dtype_to_descr(dtype),
        }
        npy.write_array_header_2_0(found, described)
        return found.getvalue()

    begin = guarded(world, header, doing, SAVING)
    mode = world.mpi.MODE_WRONLY | world.mpi.MODE_CREATE
    with replacing(world, path, Path.is_file, None) as partial:
        file = guarded(
            world, lambda: world.mpi.File.Open(world.comm, str(partial), mode), doing, SAVING
        )
        failure = Failure()
        if world.rank == 0:
            failure.attempt(lambda: file.Write_at(0, begin))
        move = _Parts(world, file, len(begin), layout, dtype)
        error = move.move(given.array, failure, progress, writes=True)
        for ending in (file.Sync, file.Close):
            failure.attempt_always(ending)
        world.agree(as_checkpoint_error(error or failure.error, doing), SAVING)


def header_of(path: Path) -> tuple[tuple[int, ...], DType, int]:
    """Return shape, dtype and the length of the header of a file; raises `CheckpointError` and OSError."""
    try:
        with open(path, "rb") as file:
            version = npy.read_magic(file)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, is_fortran, dtype = reader(file)
            begin, end = file.tell(), file.seek(0, 2)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no .npy file, or its header is damaged: {error}"
        ) from error
    if is_fortran or dtype.hasobject:
        raise CheckpointError(
            f"{path}: expected plain elements in C order; write it by np.save again"
        )
    expected = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if end != expected:
        raise CheckpointError(f"{path} has {end} bytes, expected {expected}: it was cut off")
    return shape, dtype, begin


def load(
    world: World,
    path: Path,
    field: Any,
    layout: FieldLayout,
    header: tuple[tuple[int, ...], DType, int],
    progress: Progress | None,
) -> None:
    """Read a file into a field of its dtype. Collective; blocks."""
    shape, dtype, begin = header
    doing = f"reading {path}"

    def check() -> None:
        if shape != layout.global_shape:
            raise CheckpointError(
                f"{path} has an array of shape {shape}, and the whole field has {layout.global_shape}; make a grid of "
                "its shape, or give a field with its components or staggering"
            )

    guarded(world, check, doing, _LOADING)
    mode = world.mpi.MODE_RDONLY
    file = guarded(world, lambda: world.mpi.File.Open(world.comm, str(path), mode), doing, _LOADING)
    failure = Failure()
    error = _Parts(world, file, begin, layout, dtype).move(field, failure, progress, writes=False)
    failure.attempt_always(file.Close)
    world.agree(as_checkpoint_error(error or failure.error, doing), _LOADING)


class _Parts:
    """The parts of a field in a file, a round of one of each rank at a time."""

    def __init__(
        self, world: World, file: MPI.File, begin: int, layout: FieldLayout, dtype: DType
    ) -> None:
        self._world, self._file, self._begin, self._layout = world, file, begin, layout
        self._dtype = dtype
        self._own: Cut = ChunkGrid(layout, layout.global_shape).own

    def move(
        self, field: Any, failure: Failure, progress: Progress | None, *, writes: bool
    ) -> Exception | None:
        """Write or read all parts; returns the error of this rank. Collective."""
        cells = owned_cells(field, self._layout)
        indices = list(self._indices())
        rounds = max(self._world.gather(len(indices), SAVING if writes else _LOADING))
        meter = Meter(
            progress, [(ChunkGrid(self._layout, self._layout.global_shape), self._dtype.itemsize)]
        )
        with staging(cells, max(PART_BYTES, self._dtype.itemsize)) as staged:
            parts = staged.read(indices) if writes else iter(())
            for number in range(rounds):
                index = indices[number] if number < len(indices) else None
                memory = np.empty(0, np.uint8)
                if index is not None:
                    shape = part_shape(extents(self._own), index)
                    memory = as_bytes(next(parts) if writes else staged.take(shape))
                call = self._file.Write_all if writes else self._file.Read_all
                self._view(index)
                failure.attempt_always(partial(call, memory))
                if index is not None and not writes:
                    staged.put(index)
                failure.attempt(partial(meter, memory.nbytes))
        return failure.error

    def _indices(self) -> Iterator[Index]:
        return blocks(extents(self._own), max(1, PART_BYTES // self._dtype.itemsize))

    def _view(self, index: Index | None) -> None:
        """Let the file be seen as one part of this rank's cells; collective."""
        byte = self._world.mpi.BYTE
        if index is None:
            self._file.Set_view(self._begin, byte, byte)
            return
        starts, sizes = [], []
        for axis, own in enumerate(self._own):
            one = index[axis] if axis < len(index) else slice(0, own.stop - own.start)
            cut = slice(one, one + 1) if isinstance(one, int) else one
            starts.append(own.start + cut.start)
            sizes.append(min(own.start + cut.stop, own.stop) - starts[-1])
        element = byte.Create_contiguous(self._dtype.itemsize)
        box = element.Create_subarray(self._layout.global_shape, sizes, starts).Commit()
        try:
            self._file.Set_view(self._begin, byte, box)
        finally:
            box.Free()
            element.Free()
