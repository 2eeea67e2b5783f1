"""Casts of values to a field's dtype; losing an imaginary part, overflow and truncated text are errors."""

from __future__ import annotations

import numpy as np

from halox.runtime.dlpack import Array, DType


def cast(value: object, dtype: DType) -> Array:
    """Return a value as an array of a dtype, cast as `numpy.full` casts it.

    The value is a scalar or an array on the host, or a tuple of the values of a structured dtype's fields. Casting a
    float to an integer truncates its fraction, and casting to a narrower float rounds. Any other loss is an error.

    Raises
    ------
    ValueError
        If the dtype cannot hold the value; the text gives the reason. NumPy may raise errors of other types.

    Examples
    --------
    >>> cast(2.5, np.dtype("i4")), cast(True, np.dtype("f4"))
    (array(2, dtype=int32), array(1., dtype=float32))
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            "it is a masked array, and a field has no mask; its .filled(number) has none"
        )
    if dtype.names is not None:
        return _cast_fields(value, dtype)
    given = np.asarray(value)
    if given.dtype == object:
        given = np.asarray(given.tolist())  # an object array of numbers becomes an array of numbers
    if given.dtype.names is not None:
        raise ValueError("it has fields, and the dtype has none")
    given = _as_numbers(given, dtype)
    found = np.zeros(given.shape, dtype)
    with np.errstate(all="ignore"):
        np.copyto(found, given, casting="unsafe")
        _check_kept(given, found)
    return found


def _cast_fields(value: object, dtype: DType) -> Array:
    """Cast the values of a structured dtype's fields one by one; a plain number is used for all fields."""
    assert dtype.names is not None
    if isinstance(value, tuple):
        shape, parts = (), list(value)
    else:
        given = np.asarray(value)
        shape, names = given.shape, given.dtype.names
        if names is None:
            parts = [given[(..., *(None for _ in dtype[name].shape))] for name in dtype.names]
        else:
            parts = [given[name] for name in names]
    if len(parts) != len(dtype.names):
        raise ValueError(f"it has {len(parts)} fields, the dtype {len(dtype.names)}")
    found = np.zeros(shape, dtype)
    for name, part in zip(dtype.names, parts, strict=True):
        found[name][...] = cast(part, dtype[name].base)
    return found


def _as_numbers(given: Array, dtype: DType) -> Array:
    """Convert values so that their cast to a numeric dtype can be checked; drop imaginary parts of zero."""
    if dtype.kind not in "iufcmM":
        return given
    if given.dtype.kind in "mM" and dtype.kind in "iufc":
        if np.any(np.isnat(given)):
            raise ValueError("NaT is no number")
        return given.astype("i8")
    if given.dtype.kind in "SU" and dtype.kind in "fc":
        return given.astype("G" if dtype.kind == "c" else "g")
    if given.dtype.kind == "c" and dtype.kind != "c":
        if np.any(given.imag != 0):
            raise ValueError("it has an imaginary part")
        return given.real
    return given


def _check_kept(given: Array, found: Array) -> None:
    """Raise ValueError if the cast has changed values by more than truncation of a fraction or rounding."""
    kind, dtype = given.dtype.kind, found.dtype
    if dtype.kind in "iu" and kind in "iuf":
        limits = np.iinfo(dtype)
        low, high = limits.min, limits.max
        if kind == "f":  # the largest integer may be no float, but its successor is
            fits = (given >= np.float64(low)) & (given < np.float64(high) + 1)
        else:
            fits = (given >= low) & (given <= high)
        if not np.all(fits):
            raise ValueError(f"{dtype} holds {low} to {high}")
    elif dtype.kind in "fc":
        was_infinite = np.isinf(given) if kind in "fc" else given == np.inf
        if np.any(np.isinf(found) & ~was_infinite):
            raise ValueError(f"{dtype} holds up to {np.finfo(dtype).max}")
    elif dtype.kind in "mM":
        if kind == "f":
            is_kept = np.isnat(found) == np.isnan(given)
        elif kind == dtype.kind and np.can_cast(given.dtype, dtype, "safe"):
            is_kept = np.isnat(given) | (found.astype(given.dtype) == given)
        else:
            return
        if not np.all(is_kept):
            raise ValueError(f"it is beyond the range of {dtype}")
    elif dtype.kind in "SUV":
        whole = given.astype(dtype.kind)
        if whole.itemsize > dtype.itemsize and np.any(found.astype(whole.dtype) != whole):
            raise ValueError("it would be cut off")
