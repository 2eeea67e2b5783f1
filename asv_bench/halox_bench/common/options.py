"""Options of the command line, and the values that they read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from halox.errors import HaloxError

Wrong = argparse.ArgumentTypeError


def words(text: str) -> tuple[str, ...]:
    """Split at commas.

    Examples
    --------
    >>> words("x,,all")
    ('x', 'all')
    """
    return tuple(word for word in text.split(",") if word)


def words_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """Return a function that splits at commas into some of these words."""

    def parse(text: str) -> tuple[str, ...]:
        found = words(text)
        if not found or not {*found} <= {*allowed}:
            raise Wrong(
                f"expected names out of {', '.join(allowed)}, with commas between; got {text!r}"
            )
        return found

    return parse


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise Wrong(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise Wrong(f"expected at least 1, got {value}")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Split at commas into whole numbers of at least 1."""
    return tuple(positive(word) for word in words(text))


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """Split at commas into shapes.

    Examples
    --------
    >>> shapes("64,16x16x8")
    ((64,), (16, 16, 8))
    """
    found = tuple(tuple(positive(n) for n in word.split("x")) for word in words(text))
    if any(len(shape) > 4 for shape in found):
        raise Wrong(f"expected shapes of 1 to 4 axes, got {text!r}")
    return found


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
    """Read a number of bytes.

    Raises
    ------
    HaloxError
        If the text has another form.

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


class Option(NamedTuple):
    """An option of a kind of benchmark.

    Attributes
    ----------
    read : callable or None
        Returns the value of the text; None for an option without a value.
    """

    name: str
    help: str
    read: Callable[[str], Any] | None = words
    default: Any = ()
    metavar: str = "A,B"

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        if self.read is None:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.name, type=self.read, default=self.default, metavar=self.metavar, help=self.help
        )


def option_of(name: str, known: tuple[str, ...], what: str) -> Option:
    """Return an option that selects among known words, by default all."""
    return Option(name, f"{what}, out of {', '.join(known)}; default: all", words_of(*known))
