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
"""A datatype, or an argument of ``numpy.dtype``."""


def as_datatype(old: Any) -> Datatype:
    """Datatype of a NumPy dtype; a datatype is returned unchanged.

    A structured dtype becomes a struct of its fields, resized to the dtype's item size. Padding
    between fields is not part of the message. A dtype with a shape becomes contiguous elements.

    Parameters
    ----------
    old : Datatype or dtype-like
        Type to describe.

    Raises
    ------
    DatatypeError
        If ``numpy.dtype`` rejects the argument, or the elements have no fixed size in the array's
        memory (objects, variable-length strings, strings without a stated length).

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
    except Exception as error:  # NumPy raises several types
        is_mpi = type(old).__module__.startswith("mpi4py")
        # The text of an mpi4py object contains its address, which differs between ranks.
        got = "one of mpi4py" if is_mpi else shown(old)
        remedy = "convert it by halox.datatypes.from_mpi" if is_mpi else shortened(str(error))
        raise DatatypeError(
            f"a datatype or anything numpy.dtype() takes is needed, got {got} ({remedy})"
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
