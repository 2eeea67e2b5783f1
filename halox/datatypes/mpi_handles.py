"""Handles of mpi4py's datatypes, made constructor by constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from halox.errors import MissingPackageError

if TYPE_CHECKING:
    from mpi4py import MPI


def mpi4py() -> Any:
    """Return ``mpi4py.MPI``, imported on demand."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingPackageError(
            f"MPI datatypes need mpi4py: pip install mpi4py ({error})"
        ) from error
    return MPI


def primitive_handle(dtype: np.dtype) -> MPI.Datatype:
    """MPI's type of one element; bytes where MPI has none, as for half precision."""
    mpi = mpi4py()
    made: MPI.Datatype
    if dtype.isnative and dtype.kind in "biufc":
        try:
            made = mpi.Datatype.fromcode(dtype.char).Dup()
            return made
        except (ValueError, KeyError, mpi.Exception):
            pass
    made = mpi.CHAR.Dup() if dtype == "S1" else mpi.BYTE.Create_contiguous(dtype.itemsize)
    return made


def derived_handle(
    constructor: str, arguments: tuple[Any, ...], olds: list[MPI.Datatype], old_extent: int
) -> MPI.Datatype:
    """Call the MPI constructor of that name.

    ``old_extent`` is the extent of the first of ``olds`` as halox counts it.
    """
    mpi = mpi4py()
    given: list[Any] = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    made: MPI.Datatype
    if constructor == "struct":
        made = mpi.Datatype.Create_struct(*given, olds)
        return made
    if constructor == "dup":
        return olds[0].Dup()
    if constructor in ("vector", "hvector"):
        count, blocklength, stride = given
        if stride * (old_extent if constructor == "vector" else 1) == -1:
            # Open MPI up to 5.0 reads a stride of -1 byte as "one extent of the old type".
            row = olds[0].Create_contiguous(blocklength)
            made = row.Create_hindexed_block(1, list(range(0, -count, -1)))
            row.Free()
            return made
    if constructor == "subarray":
        given[3] = {"C": mpi.ORDER_C, "F": mpi.ORDER_FORTRAN}[given[3]]
    made = getattr(olds[0], f"Create_{constructor}")(*given)
    return made


def with_bounds(made: MPI.Datatype, lb: int, extent: int) -> MPI.Datatype:
    """Give a type these bounds, if it has others.

    Implementations differ in rare extents (padding, explicit bounds of parts), and bytes that stand
    for a primitive have another alignment.
    """
    if made.Get_extent() == (lb, extent):
        return made
    fitted = made.Create_resized(lb, extent)
    made.Free()
    return fitted
