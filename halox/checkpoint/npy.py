"""One field as a ``.npy`` file, written and read by all ranks through MPI-IO.

The file has NumPy's format: a header, and all cells in C order. Each rank accesses the cells of its block through a
subarray type, and writes or reads them part by part. There are no checksums.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from halox.checkpoint.arguments import Given, Progress
from halox.checkpoint.chunks import ShardGrid, extents
from halox.checkpoint.folder import Replacement, identity_of, opened, replaced
from halox.checkpoint.loading import LOADING, one_opened
from halox.checkpoint.saving import SAVING, Meter, guarded, replacing
from halox.collectives.host.cell_sums import blocks
from halox.decomposition import FieldLayout
from halox.errors import CheckpointError, FieldError
from halox.gathering.staging import Index, owned_cells, part_shape, staging
from halox.gathering.window import as_bytes
from halox.runtime.arrays import DType
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

SUFFIX = ".npy"
PART_BYTES = 16 << 20
"""Maximum bytes of a part; a single element may be larger."""


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

    def create() -> Replacement:
        found = Replacement(path, Path.is_file, is_folder=False)
        try:
            found.partial.write_bytes(begin)
        except BaseException:
            found.discard()
            raise
        return found

    with replacing(world, path, create) as name, ExitStack() as stack:
        partial = Path(name)

        def enter() -> _Parts:
            open(partial, "r+b").close()  # its errors give the reason
            mode = world.mpi.MODE_WRONLY
            return stack.enter_context(_parts(world, partial, mode, len(begin), layout, dtype))

        # All ranks open the file before any rank writes: if rank 0 ends, another run may take the name.
        parts: _Parts = guarded(world, enter, doing, SAVING)

        def write() -> None:
            # Close the file before waiting for other ranks: if a write fails, MPICH's ROMIO keeps its lock of the file,
            # and the other ranks would wait for the lock.
            with stack:
                try:
                    parts.write(given.array, progress)
                except world.mpi.Exception as error:  # MPI seldom gives the reason
                    free = shutil.disk_usage(partial.parent).free
                    raise OSError(f"{error}; its file system has {free} bytes left") from error

        guarded(world, write, doing, SAVING)


class Header(NamedTuple):
    """Shape and dtype of the array in a file, the length of its header, and its identity."""

    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    identity: str


def header_of(name: Path, path: Path) -> Header:
    """Return the header of a file; raises `CheckpointError`, which names ``path``, and OSError."""
    try:
        with open(name, "rb") as file:
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
    if is_fortran:
        raise CheckpointError(
            f"{path}: expected an array in C order, found Fortran order; write it by "
            "np.save(path, np.ascontiguousarray(array))"
        )
    if dtype.hasobject:
        raise CheckpointError(
            f"{path}: expected elements of fixed size, found Python objects; convert them, as in u.astype('f8')"
        )
    expected = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if end != expected:
        raise CheckpointError(f"{path} has {end} bytes, expected {expected}: it was cut off")
    return Header(shape, dtype, begin, identity_of(name))


def opened_file(world: World, path: Path) -> AbstractContextManager[tuple[Path, Header]]:
    """Open one file on all ranks; see `one_opened`."""
    opening = opened(path, is_folder=False)
    return one_opened(world, path, opening, lambda name: header_of(name, path))


def load(
    world: World,
    path: Path,
    found: tuple[Path, Header],
    field: Any,
    layout: FieldLayout,
    progress: Progress | None,
) -> None:
    """Read an opened file (see `opened_file`) into a field of the same dtype. Collective; blocks."""
    name, (shape, dtype, begin, identity) = found

    def read() -> None:
        if shape != layout.global_shape:
            raise CheckpointError(
                f"{path} has an array of shape {shape}, and the whole field has {layout.global_shape}; make a grid of "
                "its shape, or give a field with its components or staggering"
            )
        with _parts(world, name, world.mpi.MODE_RDONLY, begin, layout, dtype) as parts:
            parts.read(field, progress)
        if identity_of(name) != identity:  # another program has written to it
            raise replaced(path)

    guarded(world, read, f"reading {path}", LOADING)


@contextmanager
def _parts(
    world: World, path: Path, mode: int, begin: int, layout: FieldLayout, dtype: DType
) -> Iterator[_Parts]:
    """Open a file on ``COMM_SELF``: MPI's collective calls have no timeout if another rank has failed."""
    file = world.mpi.File.Open(world.mpi.COMM_SELF, str(path), mode)
    try:
        yield _Parts(world, file, begin, layout, dtype)
    finally:
        file.Close()


class _Parts:
    """A rank's cells in a file, accessed part by part; local."""

    def __init__(
        self, world: World, file: MPI.File, begin: int, layout: FieldLayout, dtype: DType
    ) -> None:
        self._file, self._layout, self._dtype = file, layout, dtype
        grid = ShardGrid(layout, layout.global_shape)
        self._shape = extents(grid.own)
        self._meter_of = partial(Meter, fields=[(grid, dtype.itemsize)])
        starts = [cut.start for cut in grid.own]
        byte = world.mpi.BYTE
        element = byte.Create_contiguous(dtype.itemsize)
        box = element.Create_subarray(layout.global_shape, self._shape, starts).Commit()
        try:
            file.Set_view(begin, byte, box)
        finally:
            box.Free()
            element.Free()

    def write(self, field: Any, progress: Progress | None) -> None:
        """Write all parts, in the order of the file view, through to the disk."""
        meter = self._meter_of(progress)
        with staging(owned_cells(field, self._layout), self._part_bytes) as staged:
            for part in staged.read(self._indices()):
                self._file.Write(as_bytes(part))
                meter(part.nbytes)
        self._file.Sync()

    def read(self, field: Any, progress: Progress | None) -> None:
        """Read all parts."""
        meter = self._meter_of(progress)
        with staging(owned_cells(field, self._layout), self._part_bytes) as staged:
            for index in self._indices():
                part = staged.take(part_shape(self._shape, index))
                self._file.Read(as_bytes(part))
                staged.put(index)
                meter(part.nbytes)

    @property
    def _part_bytes(self) -> int:
        return max(PART_BYTES, self._dtype.itemsize)

    def _indices(self) -> Iterator[Index]:
        return blocks(self._shape, max(1, PART_BYTES // self._dtype.itemsize))
