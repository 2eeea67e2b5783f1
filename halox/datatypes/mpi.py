"""Conversion of mpi4py datatypes; mpi4py is imported on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.datatypes import constructors as make
from halox.datatypes.boxes import subarray
from halox.datatypes.datatype import Datatype
from halox.datatypes.mpi_handles import mpi4py
from halox.datatypes.numpy_types import as_datatype
from halox.errors import DatatypeError
from halox.values import shown

if TYPE_CHECKING:
    from mpi4py import MPI


def from_mpi(mpi_datatype: MPI.Datatype) -> Datatype:
    """Convert an mpi4py datatype to a halox datatype.

    Parameters
    ----------
    mpi_datatype : mpi4py.MPI.Datatype
        Predefined or derived. It need not be committed. halox neither keeps nor frees it.

    Returns
    -------
    Datatype
        Has the same layout, bounds and signature.

    Raises
    ------
    DatatypeError
        If it is the null datatype, as after its ``Free``, or contains a type without a halox
        equivalent (distributed arrays, pairs of MINLOC, types without a NumPy equivalent).
    MissingPackageError
        If mpi4py is not installed.

    Notes
    -----
    Not collective. The bounds are taken from MPI, even if the MPI implementation deviates from the
    standard's rules.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> column = MPI.DOUBLE.Create_vector(3, 1, 4)
    >>> from_mpi(column)
    <Datatype vector(3, 1, 4, f8): 24 bytes, extent 72>
    >>> column.Free()
    """
    mpi = mpi4py()
    if not isinstance(mpi_datatype, mpi.Datatype):
        raise DatatypeError(f"an mpi4py datatype is needed, got {shown(mpi_datatype)}")
    if mpi_datatype == mpi.DATATYPE_NULL:
        raise DatatypeError(
            "the null datatype describes nothing; pass a datatype that was made and not freed"
        )
    return _from_mpi(mpi_datatype, mpi)


def _from_mpi(given: MPI.Datatype, mpi: ModuleType) -> Datatype:
    if given.is_predefined:
        return _from_type_string(given)
    combiners = {getattr(mpi, key): key for key in vars(mpi) if key.startswith("COMBINER_")}
    combiner = combiners.get(given.combiner, f"combiner {given.combiner}")
    name = combiner.removeprefix("COMBINER_")
    if name not in _COMBINERS:
        raise DatatypeError(
            f"an MPI datatype of {combiner} has no counterpart; describe the same bytes with "
            "struct, indexed or subarray"
        )
    base, _, described = given.decode()
    parts = described["datatypes"] if name == "STRUCT" else [base]
    try:
        olds = [_from_mpi(part, mpi) for part in parts]
    finally:
        for part in parts:
            if not part.is_predefined:
                part.Free()
    datatype = _rebuilt(name, described, olds)
    lb, extent = given.Get_extent()
    return (
        datatype
        if (datatype.lb, datatype.extent) == (lb, extent)
        else make.resized(datatype, lb, extent)
    )


def _rebuilt(name: str, given: dict[str, Any], olds: list[Datatype]) -> Datatype:
    if name == "STRUCT":
        return make.struct(given["blocklengths"], given["displacements"], olds)
    if name == "RESIZED":
        return make.resized(olds[0], given["lb"], given["extent"])
    constructor, keys = _CONSTRUCTORS[name]
    datatype: Datatype = constructor(*(given[key] for key in keys), olds[0])
    return datatype


def _subarray(
    sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int, old: Datatype
) -> Datatype:
    return subarray(sizes, subsizes, starts, old, "C" if order == mpi4py().ORDER_C else "F")


_CONSTRUCTORS: dict[str, tuple[Callable[..., Datatype], tuple[str, ...]]] = {
    "DUP": (make.dup, ()),
    "CONTIGUOUS": (make.contiguous, ("count",)),
    "VECTOR": (make.vector, ("count", "blocklength", "stride")),
    "HVECTOR": (make.hvector, ("count", "blocklength", "stride")),
    "INDEXED": (make.indexed, ("blocklengths", "displacements")),
    "HINDEXED": (make.hindexed, ("blocklengths", "displacements")),
    "INDEXED_BLOCK": (make.indexed_block, ("blocklength", "displacements")),
    "HINDEXED_BLOCK": (make.hindexed_block, ("blocklength", "displacements")),
    "SUBARRAY": (_subarray, ("sizes", "subsizes", "starts", "order")),
}
"""Constructor of each MPI combiner, and mpi4py's names of its arguments; the old type is the last argument."""

_COMBINERS = ("STRUCT", "RESIZED", *_CONSTRUCTORS)


def _from_type_string(given: MPI.Datatype) -> Datatype:
    try:
        dtype = np.dtype(given.typestr)
    except (TypeError, ValueError):
        dtype = np.dtype("V")
    if dtype.itemsize != given.Get_size() or dtype.kind == "V":
        raise DatatypeError(f"MPI type {given.Get_name()} has no NumPy equivalent") from None
    return as_datatype(dtype)
