"""Datatypes from mpi4py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.datatypes import constructors as make
from halox.datatypes.boxes import subarray
from halox.datatypes.datatype import Datatype
from halox.datatypes.numpy_types import as_datatype
from halox.datatypes.to_mpi import load_mpi
from halox.errors import DatatypeError
from halox.values import shown

if TYPE_CHECKING:
    from mpi4py import MPI


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
    mpi = load_mpi()
    if not isinstance(mpi_datatype, mpi.Datatype):
        raise DatatypeError(f"an mpi4py datatype is needed, got {shown(mpi_datatype)}")
    if mpi_datatype == mpi.DATATYPE_NULL:
        raise DatatypeError("the null datatype describes nothing; pass a datatype that was made")
    return _from_mpi(mpi_datatype, mpi)


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
