"""Datatypes from and to mpi4py. The only place here that knows MPI, and only when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.datatypes import constructors as make
from halox.datatypes.boxes import subarray
from halox.datatypes.datatype import Datatype
from halox.datatypes.numpy_types import as_datatype
from halox.errors import DatatypeError, MissingPackageError
from halox.values import shown

if TYPE_CHECKING:
    from mpi4py import MPI


def to_mpi(datatype: Datatype) -> MPI.Datatype:
    """Make a committed mpi4py datatype; see :meth:`Datatype.to_mpi`."""
    return _to_mpi(datatype, _mpi()).Commit()


def from_mpi(mpi_datatype: MPI.Datatype) -> Datatype:
    """Take over a datatype made with mpi4py.

    Parameters
    ----------
    mpi_datatype : mpi4py.MPI.Datatype
        Predefined or derived; need not be committed, and is neither kept nor freed.

    Returns
    -------
    Datatype
        The same layout, bounds and signature.

    Raises
    ------
    DatatypeError
        If it is the null datatype, or contains a type without counterpart here (distributed
        arrays, Fortran's parametrised types without a NumPy equivalent).
    MissingPackageError
        If mpi4py is not installed.

    Notes
    -----
    Not collective. Bounds are the ones that MPI reports, also where an implementation departs from
    the standard's rules.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> column = MPI.DOUBLE.Create_vector(3, 1, 4)
    >>> from_mpi(column)
    <Datatype vector(3, 1, 4, f8): 24 bytes, extent 72>
    >>> column.Free()
    """
    mpi = _mpi()
    if not isinstance(mpi_datatype, mpi.Datatype):
        raise DatatypeError(f"an mpi4py datatype is needed, got {shown(mpi_datatype)}")
    if mpi_datatype == mpi.DATATYPE_NULL:
        raise DatatypeError("the null datatype describes nothing; pass a datatype that was made")
    return _from_mpi(mpi_datatype, mpi)


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingPackageError(
            f"MPI datatypes need mpi4py: pip install mpi4py ({error})"
        ) from error
    return MPI


def _to_mpi(datatype: Datatype, mpi: Any) -> MPI.Datatype:
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


def _build(datatype: Datatype, olds: list[MPI.Datatype], mpi: Any) -> MPI.Datatype:
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
    elif name in ("vector", "hvector") and _byte_stride(datatype) == -1:
        # Open MPI up to 5.0 reads a stride of -1 byte as "one extent of the old type".
        row = olds[0].Create_contiguous(arguments[1])
        made = row.Create_hindexed_block(1, list(range(0, -arguments[0], -1)))
        row.Free()
    else:
        if name == "subarray":
            arguments[3] = {"C": mpi.ORDER_C, "F": mpi.ORDER_FORTRAN}[arguments[3]]
        made = getattr(olds[0], f"Create_{name}")(*arguments)
    return made


def _byte_stride(datatype: Datatype) -> int:
    """Stride in bytes of a vector or hvector."""
    stride: int = datatype.arguments[2]
    return stride * datatype.olds[0].extent if datatype.constructor == "vector" else stride


def _from_mpi(given: MPI.Datatype, mpi: Any) -> Datatype:
    if given.combiner == mpi.COMBINER_NAMED:
        return _from_named(given, mpi)
    if given.is_predefined:  # Fortran's parametrised kinds
        return _from_type_string(given)
    base, _, described = given.decode()
    parts = described["datatypes"] if given.combiner == mpi.COMBINER_STRUCT else [base]
    try:
        olds = [_from_mpi(part, mpi) for part in parts]
    finally:
        for part in parts:
            if not part.is_predefined:
                part.Free()
    read = _readers(mpi).get(given.combiner)
    if read is None:
        raise DatatypeError(
            f"an MPI datatype made by constructor number {given.combiner} has no counterpart; "
            "describe the same bytes with struct, indexed or subarray"
        )
    made = read(described, olds)
    lb, extent = given.Get_extent()
    return made if (made.lb, made.extent) == (lb, extent) else make.resized(made, lb, extent)


def _readers(mpi: Any) -> dict[int, Callable[[dict[str, Any], list[Datatype]], Datatype]]:
    """For each of MPI's combiners, the constructor call that does the same."""
    orders = {mpi.ORDER_C: "C", mpi.ORDER_FORTRAN: "F"}
    return {
        mpi.COMBINER_DUP: lambda _, old: make.dup(old[0]),
        mpi.COMBINER_CONTIGUOUS: lambda a, old: make.contiguous(a["count"], old[0]),
        mpi.COMBINER_VECTOR: lambda a, old: make.vector(
            a["count"], a["blocklength"], a["stride"], old[0]
        ),
        mpi.COMBINER_HVECTOR: lambda a, old: make.hvector(
            a["count"], a["blocklength"], a["stride"], old[0]
        ),
        mpi.COMBINER_INDEXED: lambda a, old: make.indexed(
            a["blocklengths"], a["displacements"], old[0]
        ),
        mpi.COMBINER_HINDEXED: lambda a, old: make.hindexed(
            a["blocklengths"], a["displacements"], old[0]
        ),
        mpi.COMBINER_INDEXED_BLOCK: lambda a, old: make.indexed_block(
            a["blocklength"], a["displacements"], old[0]
        ),
        mpi.COMBINER_HINDEXED_BLOCK: lambda a, old: make.hindexed_block(
            a["blocklength"], a["displacements"], old[0]
        ),
        mpi.COMBINER_STRUCT: lambda a, old: make.struct(a["blocklengths"], a["displacements"], old),
        mpi.COMBINER_SUBARRAY: lambda a, old: subarray(
            a["sizes"],
            a["subsizes"],
            a["starts"],
            old[0],
            "C" if orders[a["order"]] == "C" else "F",
        ),
        mpi.COMBINER_RESIZED: lambda a, old: make.resized(old[0], a["lb"], a["extent"]),
    }


def _from_named(given: MPI.Datatype, mpi: Any) -> Datatype:
    # The types of MINLOC and MAXLOC are structs in disguise.
    pairs = {
        "FLOAT_INT": ("f", "i"),
        "DOUBLE_INT": ("d", "i"),
        "LONG_INT": ("l", "i"),
        "TWOINT": ("i", "i"),
        "SHORT_INT": ("h", "i"),
        "LONG_DOUBLE_INT": ("g", "i"),
    }
    for name, (value, index) in pairs.items():
        if given == getattr(mpi, name):
            return as_datatype(np.dtype([("value", value), ("index", index)], align=True))
    return _from_type_string(given)


def _from_type_string(given: MPI.Datatype) -> Datatype:
    try:
        dtype = np.dtype(given.typestr)
    except (TypeError, ValueError):
        dtype = np.dtype("V")
    if dtype.itemsize != given.Get_size() or dtype.kind == "V":
        raise DatatypeError(f"MPI type {given.Get_name()} has no NumPy equivalent") from None
    return as_datatype(dtype)
