"""Conversion of arguments of any type to integers, booleans and lists; their text in errors; rounding up."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from halox.errors import FieldError, HaloxError

SCALARS = (int, float, complex, np.generic)
"""Types of Python's and NumPy's numbers."""


def arrays_in(values: Iterable[Any]) -> list[Any]:
    """Return the arrays among the keywords of an expression; the profile ("x", numbers) has one."""
    return [
        value[-1] if type(value) is tuple and value else value
        for value in values
        if not isinstance(value, SCALARS)
    ]


def kind_of(value: object) -> object:
    """Return the type of a keyword of an expression; for a profile its axis."""
    return value[:1] if type(value) is tuple else type(value)


LARGEST = 2**63 - 1
"""The largest number of bytes or elements that NumPy can address."""

_MOST_TEXT = 200


def shown(value: object) -> str:
    """Return an object's text for an error: its repr, cut to 200 characters.

    Examples
    --------
    >>> shown([1, 2]), len(shown("x" * 1000))
    ('[1, 2]', 200)
    """
    return shortened(repr(value))


def shortened(text: str) -> str:
    """Return a text for an error, cut to 200 characters."""
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 4]} ..."


def as_int(value: object) -> int | None:
    """Return an integer of any library as a Python int; None for anything else, including bools.

    Examples
    --------
    >>> as_int(np.int16(-3)), as_int(2.0), as_int(True), as_int(np.array([1]))
    (-3, None, None, None)
    """
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind not in "iu"):
        return None  # NumPy accepts an array of one number, or one bool, as an index
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def has_unit(value: object) -> bool:
    """Whether a value of NumPy is a date or a duration, which is no number without its unit.

    Examples
    --------
    >>> has_unit(np.timedelta64(3, "s")), has_unit(3), has_unit(np.zeros(2, "M8[ns]"))
    (True, False, True)
    """
    return getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")


def as_bool(value: object) -> bool | None:
    """Return a bool of Python or NumPy as a Python bool; None for anything else.

    Examples
    --------
    >>> as_bool(np.True_), as_bool(1), as_bool("no")
    (True, None, None)
    """
    return bool(value) if isinstance(value, (bool, np.bool_)) else None


def check_bool(name: str, value: object, error: type[HaloxError], remedy: str = "") -> bool:
    """Return a bool, of Python or NumPy; raise ``error`` for anything else.

    Examples
    --------
    >>> check_bool("corners", np.False_, HaloxError)
    False
    """
    result = as_bool(value)
    if result is None:
        raise error(
            f"{name}: expected True or False, got {shown(value)} of type {type(value).__name__}{remedy}"
        )
    return result


def as_list(value: object) -> list[Any] | None:
    """Return the entries of a sequence or array as a list; None for anything else.

    Strings, sets, mappings and 0-d arrays do not count as sequences. Iterators do.

    Examples
    --------
    >>> as_list((1, 2)), as_list(range(2)), as_list(3), as_list("12"), as_list({1, 2})
    ([1, 2], [0, 1], None, None, None)
    """
    if isinstance(value, (str, bytes, bytearray, dict, set, frozenset)):
        return None
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        return None


def as_entries(value: object) -> list[Any]:
    """Return the entries of a sequence as a list; any other object becomes a list of one entry."""
    entries = as_list(value)
    return [value] if entries is None else entries


def check_unmasked(value: object, name: str) -> None:
    """Raise `FieldError` for a masked array, whose mask would be lost; does not import ``numpy.ma``, a large module.

    Examples
    --------
    >>> check_unmasked(np.ones(2), "array")
    """
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(value, ma.MaskedArray):
        raise FieldError(
            f"{name} is a masked array, whose mask would be lost; give its .data or its .filled(number)"
        )


def unknown_option(name: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    """Return the text of an error for an unknown option, with the nearest known one.

    ``others`` has the options by old names, and by names of other libraries.

    Examples
    --------
    >>> unknown_option("peridic", ["halo", "periodic"], {}), unknown_option("ghost", ["halo"], {"ghost": "halo"})
    ("unknown option 'peridic'; write periodic", "unknown option 'ghost'; write halo")
    """
    from difflib import get_close_matches

    near = [others[name]] if name in others else get_close_matches(name, known, 1)
    return f"unknown option {name!r}; write {near[0] if near else ' or '.join(known)}"


def rounded_up(number: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is at least ``number``.

    Examples
    --------
    >>> rounded_up(17, 16), rounded_up(16, 16), rounded_up(0, 16)
    (32, 16, 0)
    """
    return -(-number // to) * to
