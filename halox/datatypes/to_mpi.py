"""Datatypes to mpi4py."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halox.errors import MissingPackageError

if TYPE_CHECKING:
    from mpi4py import MPI


class Tree(Protocol):
    """A datatype as it was constructed."""

    constructor: str
    arguments: tuple[Any, ...]

    @property
    def olds(self) -> tuple[Tree, ...]:
        """The old types."""

    @property
    def lb(self) -> int:
        """Lower bound in bytes."""

    @property
    def extent(self) -> int:
        """Extent in bytes."""


def to_mpi(datatype: Tree) -> MPI.Datatype:
    """Make a committed mpi4py datatype; see `Datatype.to_mpi`."""
    return _to_mpi(datatype, load_mpi()).Commit()


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``, for conversions."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingPackageError(
            f"MPI datatypes need mpi4py: pip install mpi4py ({error})"
        ) from error
    return MPI


def _to_mpi(datatype: Tree, mpi: Any) -> MPI.Datatype:
    if datatype.constructor == "primitive":
        return _primitive_to_mpi(datatype.arguments[0], mpi)
    olds = [_to_mpi(old, mpi) for old in datatype.olds]
    try:
        made = _build(datatype, olds, mpi)
    finally:
        for old in olds:
            old.Free()
    # Implementations differ in rare extents (padding, explicit bounds of parts), and bytes that
    # stand for a primitive have another alignment: what matters is that both sides mean the same.
    if made.Get_extent() == (datatype.lb, datatype.extent):
        return made
    fitted = made.Create_resized(datatype.lb, datatype.extent)
    made.Free()
    return fitted


def _primitive_to_mpi(dtype: np.dtype, mpi: Any) -> MPI.Datatype:
    made: MPI.Datatype
    if dtype.isnative and dtype.kind in "biufc":
        try:
            made = mpi.Datatype.fromcode(dtype.char).Dup()
            return made
        except (ValueError, KeyError, mpi.Exception):
            pass  # MPI has no such type (half precision); travel as bytes
    if dtype == np.dtype("S1"):
        made = mpi.CHAR.Dup()
        return made
    made = mpi.BYTE.Create_contiguous(dtype.itemsize)
    return made


def _build(datatype: Tree, olds: list[MPI.Datatype], mpi: Any) -> MPI.Datatype:
    """Call the MPI constructor that goes with a datatype's outermost one."""
    name = datatype.constructor
    arguments: list[Any] = [
        argument.tolist() if isinstance(argument, np.ndarray) else argument
        for argument in datatype.arguments
    ]
    made: MPI.Datatype
    if name == "struct":
        made = mpi.Datatype.Create_struct(*arguments, olds)
    elif name == "dup":
        made = olds[0].Dup()
    elif name == "slab":
        made = _slab(arguments, olds[0])
    elif name in ("vector", "hvector"):
        made = _vector(arguments[0], arguments[1], _byte_stride(datatype), olds[0])
    else:
        if name == "subarray":
            arguments[3] = {"C": mpi.ORDER_C, "F": mpi.ORDER_FORTRAN}[arguments[3]]
        made = getattr(olds[0], f"Create_{name}")(*arguments)
    return made


def _vector(count: int, blocklength: int, stride: int, old: MPI.Datatype) -> MPI.Datatype:
    if stride != -1:
        return old.Create_hvector(count, blocklength, stride)
    # Open MPI up to 5.0 reads a stride of -1 byte as "one extent of the old type".
    row = old.Create_contiguous(blocklength)
    made = row.Create_hindexed_block(1, list(range(0, -count, -1)))
    row.Free()
    return made


def _slab(arguments: list[Any], old: MPI.Datatype) -> MPI.Datatype:
    _, strides, starts, subsizes = arguments
    made = old.Dup()
    for stride, subsize in zip(reversed(strides), reversed(subsizes), strict=True):
        row, made = made, _vector(subsize, 1, stride, made)
        row.Free()
    offset = sum(map(mul, starts, strides))
    row, made = made, made.Create_hindexed_block(1, [offset])
    row.Free()
    return made


def _byte_stride(datatype: Tree) -> int:
    """Stride in bytes of a vector or hvector."""
    stride: int = datatype.arguments[2]
    return stride * datatype.olds[0].extent if datatype.constructor == "vector" else stride
