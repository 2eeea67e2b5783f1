"""One field as a ``.npy`` file, written and read by all ranks through MPI-IO, without checksums.

Each rank opens the file on ``MPI.COMM_SELF`` and accesses only its own cells. MPI's collective calls on files would
wait forever for a rank that has failed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from halox.checkpoint.arguments import CallerField, Progress
from halox.checkpoint.chunks import ShardGrid, extents
from halox.checkpoint.folder import Replacement, identity_of, opened, replaced
from halox.checkpoint.loading import LOADING, Loaded, new_field, opened_on_all
from halox.checkpoint.saving import SAVING, Meter, checked, replacing
from halox.decomposition import FieldLayout
from halox.decomposition.blocks import blocks
from halox.domain import Domain
from halox.domain.options import dtype_text
from halox.errors import CheckpointError, FieldError
from halox.gathering.message_queue import as_bytes
from halox.gathering.scatter import components_of
from halox.gathering.staging import owned_cells, part_shape, staging
from halox.runtime.arrays import DType
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

SUFFIX = ".npy"
PART_BYTES = 16 << 20
"""Maximum bytes of a part; a single element may be larger."""


def save(world: World, path: Path, given: CallerField, progress: Progress | None) -> None:
    """Write a field. Collective; blocks."""
    layout, dtype, step = given.layout, given.described.dtype, f"writing {path}"
    header: bytes = world.attempt(
        checked(lambda: _header(layout.global_shape, dtype), step), SAVING
    )

    def begin() -> Replacement:
        return Replacement(path, Path.is_file, is_folder=False)

    def make(partial: str) -> None:
        Path(partial).write_bytes(header)

    with replacing(world, path, begin, make) as name, ExitStack() as stack:

        def enter() -> MPI.File:
            open(name, "r+b").close()  # its errors give the reason
            mode = world.mpi.MODE_WRONLY
            return stack.enter_context(_view(world, name, mode, len(header), layout, dtype))

        # All ranks open the file before any rank writes: if rank 0 ends, another run may take the name.
        file: MPI.File = world.attempt(checked(enter, step), SAVING)

        def write() -> None:
            # Close the file before waiting for other ranks: if a write fails, MPICH's ROMIO keeps its lock of the file,
            # and the other ranks would wait for the lock.
            with stack:
                try:
                    _move(file, given.array, layout, progress, is_writing=True)
                except world.mpi.Exception as error:  # MPI seldom gives the reason
                    free = shutil.disk_usage(path.parent).free
                    raise OSError(f"{error}; its file system has {free} bytes left") from error

        world.attempt(checked(write, step), SAVING)


def load(
    domain: Domain,
    path: Path,
    names: tuple[str, ...] | None,
    into: dict[str, CallerField],
    progress: Progress | None,
) -> Loaded:
    """Read the field, under the requested name or the file's name. Collective; blocks."""
    world = domain.world
    step, opening = f"reading {path}", opened(path, is_folder=False)
    (name,) = into or names or (path.stem,)
    with opened_on_all(world, path, opening, lambda link: header_of(link, path)) as (link, header):

        def options() -> dict[str, Any]:
            if not into:
                call = f"grid.load({str(path)!r}, u=grid.zeros({dtype_text(header.dtype)}, {{}}))"
                return dict(components_of(header.shape, domain, str(path), call))
            if into[name].described.dtype != header.dtype:
                raise FieldError(
                    f"{name}: dtype {header.dtype} in {path}, {into[name].described.dtype} in the field; give a field "
                    "like the one saved, or let load make it"
                )
            return {}

        field_options = world.attempt(checked(options, step), LOADING)
        field, layout = (
            (into[name].array, into[name].layout)
            if into
            else new_field(domain, header.dtype, field_options)
        )

        def read() -> None:
            if header.shape != layout.global_shape:
                raise CheckpointError(
                    f"{path} has an array of shape {header.shape}, and the whole field has {layout.global_shape}; make "
                    "a grid of its shape, or give a field with its components or staggering"
                )
            mode = world.mpi.MODE_RDONLY
            with _view(world, link, mode, header.nbytes, layout, header.dtype) as file:
                _move(file, field, layout, progress, is_writing=False)
            if identity_of(link) != header.identity:  # another program has written to it
                raise replaced(path)

        world.attempt(checked(read, step), LOADING)
    return Loaded({name: field}, {})


class Header(NamedTuple):
    """Shape and dtype of the array in a file, the length of its header, and its identity."""

    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    identity: str


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


@contextmanager
def _view(
    world: World, name: str | Path, mode: int, begin: int, layout: FieldLayout, dtype: DType
) -> Iterator[MPI.File]:
    byte, own = world.mpi.BYTE, ShardGrid(layout, layout.global_shape).own
    file = world.mpi.File.Open(world.mpi.COMM_SELF, str(name), mode)
    try:
        element = byte.Create_contiguous(dtype.itemsize)
        starts = [cut.start for cut in own]
        box = element.Create_subarray(layout.global_shape, extents(own), starts).Commit()
        try:
            file.Set_view(begin, byte, box)
        finally:
            box.Free()
            element.Free()
        yield file
    finally:
        file.Close()


def _move(
    file: MPI.File, field: Any, layout: FieldLayout, progress: Progress | None, *, is_writing: bool
) -> None:
    """Write this rank's cells and flush them to the disk, or read the cells; part by part."""
    cells = owned_cells(field, layout)
    meter = Meter(progress, [(ShardGrid(layout, layout.global_shape), cells.itemsize)])
    indices = list(blocks(cells.shape, max(1, PART_BYTES // cells.itemsize)))
    with staging(cells, max(PART_BYTES, cells.itemsize)) as staged:
        if is_writing:
            for part in staged.read(indices):
                file.Write(as_bytes(part))
                meter(part.nbytes)
            file.Sync()
            return
        for index in indices:
            part = staged.next_buffer(part_shape(cells.shape, index))
            file.Read(as_bytes(part))
            staged.put(index)
            meter(part.nbytes)
