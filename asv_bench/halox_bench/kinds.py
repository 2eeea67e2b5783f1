"""Declaration of a kind of benchmark, and the options of its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halox.errors import HaloxError
from halox_bench.rows import Column, Row

Wrong = argparse.ArgumentTypeError


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def words_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = words(text)
        if not found or not {*found} <= {*allowed}:
            raise Wrong(f"expected names out of {', '.join(allowed)}, got {text!r}")
        return found

    return parse


def dtypes(text: str) -> tuple[str, ...]:
    for word in words(text):
        try:
            is_number = np.dtype(word).kind in "iufc"
        except TypeError:
            is_number = False
        if not is_number:
            raise Wrong(f"dtype {word!r} is not one of numbers, such as f4, f8, c16, i4")
    return words(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise Wrong(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(word) for word in words(text))


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    found = tuple(tuple(positive(n) for n in word.split("x")) for word in words(text))
    if any(len(shape) > 4 for shape in found):
        raise Wrong(f"expected shapes of 1 to 4 axes, got {text!r}")
    return found


_UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1, "": 1}


def size_label(nbytes: int) -> str:
    unit = next(unit for unit, size in _UNITS.items() if nbytes >= size and nbytes % size == 0)
    return f"{nbytes // _UNITS[unit]}{unit}"


def sizes(text: str) -> tuple[int, ...]:
    found = []
    for word in words(text):
        digits = word.rstrip("BKMi")
        unit = word[len(digits) :]
        if unit not in _UNITS or not digits.isdecimal() or int(digits) < 1:
            raise Wrong(f"{word}: expected bytes, as in 8, 64KiB or 128MiB")
        found.append(int(digits) * _UNITS[unit])
    return tuple(found)


class Option(NamedTuple):
    """An option of a kind: ``read`` returns the value of its text, None for an option without a value."""

    name: str
    help: str
    read: Callable[[str], Any] | None = words
    default: Any = ()
    metavar: str = "A,B"

    def add(self, parser: argparse.ArgumentParser) -> None:
        if self.read is None:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.name, type=self.read, default=self.default, metavar=self.metavar, help=self.help
        )


@dataclass(frozen=True)
class Kind:
    """A kind of benchmark.

    ``cases`` returns the cases of a command line, each with a ``name`` and ``details``. ``measure``, given the `Bench`,
    the command line and a case, returns its rows; it is collective.
    """

    name: str
    about: str
    cases: Callable[[argparse.Namespace], Sequence[Any]]
    measure: Callable[[Any, argparse.Namespace, Any], list[Row]]
    options: tuple[Option, ...] = ()
    columns: tuple[Column, ...] = ()  # of its table, beside those of all kinds
    named: str = ""  # methods of halox that the command line names: paths, algorithms or methods
    ranks: int = 0  # their number, 0 for any
    budget_s: float = 60.0  # seconds after which no further group of figures is begun

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flag: Any = {"action": "store_true"}
        text = "ranks to start on this machine (default: those of a surrounding mpiexec)"
        parser.add_argument("-n", "--ranks", type=positive, metavar="RANKS", help=text)
        devices, text = ("auto", "cpu", "gpu"), "default: GPUs if usable"
        parser.add_argument("--device", choices=devices, default="auto", help=text)
        text = f"{self.named} to name one by one, beside halox's own choice; default: all"
        Option(
            f"--{self.named or 'paths'}", text if self.named else argparse.SUPPRESS, words, None
        ).add(parser)
        parser.add_argument("--targets", **flag, help="only the figures that have a target")
        for option in self.options:
            option.add(parser)
        parser.add_argument("--list", **flag, help="list the cases and end")
        parser.add_argument("--quick", **flag, help="fewer cases, fewer samples")
        parser.add_argument("--repeats", type=positive, metavar="N", help="samples of each figure")
        parser.add_argument("--no-graph", **flag, help="leave out replayed CUDA graphs")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")

    def parsed(self, text: str) -> argparse.Namespace:
        """Parse a command line of this kind; `HaloxError` if it is wrong."""
        parser = argparse.ArgumentParser(exit_on_error=False)
        self.add_arguments(parser)
        try:
            return parser.parse_args(text.split())
        except argparse.ArgumentError as error:
            raise HaloxError(f"{self.name} {text}: {error}") from error
