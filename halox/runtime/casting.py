"""Casts of values to a field's dtype; losing an imaginary part and overflow are errors."""

from __future__ import annotations

import numpy as np

from halox.runtime.dlpack import Array, DType
from halox.values import check_unmasked


def cast(value: object, dtype: DType) -> Array:
    """Return a scalar or an array on the host as an array of a dtype, cast as `numpy.full` casts it.

    For a structured dtype the value may be a tuple of the values of its fields.

    Raises
    ------
    ValueError
        If the value has a mask or an imaginary part, or is beyond the range of an integer dtype. NumPy raises errors of
        other types, such as FloatingPointError for an overflow.

    Examples
    --------
    >>> cast(2.5, np.dtype("i4")), cast(True, np.dtype("f4"))
    (array(2, dtype=int32), array(1., dtype=float32))
    """
    check_unmasked(value, "it")
    with np.errstate(all="ignore", over="raise"):
        if dtype.names is not None:
            return np.asarray(value, dtype)
        given = np.asarray(value)
        if given.dtype.kind == "c" and dtype.kind in "iuf":
            if np.any(given.imag):
                raise ValueError("it has an imaginary part")
            given = given.real
        values = given.astype(dtype)
        to_integers = dtype.kind in "iu" and given.dtype.kind in "iuf"
        if to_integers and np.any(np.trunc(given) != values):
            limits = np.iinfo(dtype)
            raise ValueError(f"{dtype} holds {limits.min} to {limits.max}")
    return values
