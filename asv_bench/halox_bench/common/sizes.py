"""Numbers of bytes as words."""

from __future__ import annotations

from halox.errors import HaloxError

KIB, MIB = 1 << 10, 1 << 20

_UNITS = {"MiB": MIB, "KiB": KIB, "B": 1, "": 1}


def size_label(nbytes: int) -> str:
    """Return a number of bytes as one word.

    Examples
    --------
    >>> size_label(8), size_label(65536), size_label(3 << 20), size_label(1025)
    ('8B', '64KiB', '3MiB', '1025B')
    """
    unit = next(unit for unit, size in _UNITS.items() if nbytes >= size and nbytes % size == 0)
    return f"{nbytes // _UNITS[unit]}{unit}"


def nbytes_of(text: str) -> int:
    """Read a number of bytes, for an option.

    Raises
    ------
    HaloxError
        If it is none.

    Examples
    --------
    >>> nbytes_of("8"), nbytes_of("64KiB")
    (8, 65536)
    """
    digits = text.rstrip("BKMi")
    unit = text[len(digits) :]
    if unit not in _UNITS or not digits.isdecimal() or int(digits) < 1:
        raise HaloxError(f"--sizes {text}: expected bytes, as in 8, 64KiB or 128MiB")
    return int(digits) * _UNITS[unit]
