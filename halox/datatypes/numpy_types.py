"""NumPy dtypes as datatypes."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.datatypes.algebra import box_of, primitive_of, resized_of, struct_of
from halox.datatypes.arguments import frozen
from halox.datatypes.datatype import Datatype
from halox.errors import DatatypeError
from halox.values import shortened, shown

TypeLike = Datatype | npt.DTypeLike
"""A datatype, or anything ``numpy.dtype`` takes."""


def as_datatype(old: Any) -> Datatype:
    """Datatype itself, or the one of anything that ``numpy.dtype`` takes.

    A structured dtype becomes the struct of its fields, resized to its item size: padding between
    fields does not move. A dtype with a shape becomes that many contiguous elements.

    Parameters
    ----------
    old : Datatype or dtype-like
        Type to describe.

    Raises
    ------
    DatatypeError
        If NumPy knows no such dtype, or its elements have no fixed size in the array's memory
        (objects, variable-length strings, strings of unstated length).

    Examples
    --------
    >>> as_datatype("f4")
    <Datatype f4: 4 bytes, extent 4>
    >>> particle = as_datatype(np.dtype([("mass", "f4"), ("place", "f8", (3,))], align=True))
    >>> particle.size, particle.extent, str(particle.signature)
    (28, 32, 'f4 x 1, f8 x 3')
    """
    if isinstance(old, Datatype):
        return old
    if old is None:
        raise DatatypeError("a datatype or dtype is needed, got None")
    try:
        dtype = np.dtype(old)
    except Exception as error:  # NumPy's of several kinds, and an object's own
        is_mpi = type(old).__module__.startswith("mpi4py")
        raise DatatypeError(
            f"a datatype or anything numpy.dtype() takes is needed, got {shown(old)} "
            f"({'convert it by halox.datatypes.from_mpi' if is_mpi else shortened(str(error))})"
        ) from None
    return _from_dtype(dtype)


@lru_cache(maxsize=512)
def _from_dtype(dtype: np.dtype) -> Datatype:
    if dtype.hasobject or dtype.kind == "T":
        raise DatatypeError(
            f"dtype {dtype} keeps its elements outside the array, so they cannot be sent; "
            "use a dtype of fixed size"
        )
    if dtype.itemsize == 0:
        raise DatatypeError(
            f"dtype {dtype.str!r} has elements of 0 bytes; state a length, such as 'S8'"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        count = prod(shape)
        return box_of(("contiguous", (count,)), _from_dtype(base), (count,), (base.itemsize,), 0)
    if dtype.fields is not None:
        return _from_fields(dtype)
    return primitive_of(dtype)


def _from_fields(dtype: np.dtype) -> Datatype:
    fields = [dtype.fields[name] for name in dtype.names or ()]  # type: ignore[index]
    types = tuple(_from_dtype(field[0]) for field in fields)
    lengths = frozen(np.ones(len(fields), dtype=np.int64))
    displacements = frozen(np.array([field[1] for field in fields], dtype=np.int64))
    record = struct_of(("struct", (lengths, displacements)), lengths, displacements, types)
    return resized_of(("resized", (0, dtype.itemsize)), record, 0, dtype.itemsize)
