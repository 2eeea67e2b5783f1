"""Options that several kinds of benchmarks have, and the values they read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halox.errors import HaloxError


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
            raise argparse.ArgumentTypeError(
                f"expected names out of {', '.join(allowed)}, with commas between; got {text!r}"
            )
        return found

    return parse


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
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
        raise argparse.ArgumentTypeError(f"expected shapes of 1 to 4 axes, got {text!r}")
    return found


def add_list(
    parser: argparse.ArgumentParser,
    name: str,
    text: str,
    *,
    read: Callable[[str], Any] = words,
    default: Any = (),
    metavar: str = "A,B",
) -> None:
    """Add an option that takes several values with commas between."""
    parser.add_argument(name, type=read, default=default, metavar=metavar, help=text)


def add_arguments(parser: argparse.ArgumentParser, repeats: str) -> None:
    """Add the options of all kinds; ``repeats`` says what is repeated, and its default."""
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer samples")
    parser.add_argument("--repeats", type=positive, metavar="N", help=repeats)
    parser.add_argument(
        "--no-baselines", action="store_true", help="leave out what users write by hand"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures as PNG files")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to measure, and on what."""
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if usable"
    )
    parser.add_argument(
        "--targets",
        "--headlines",
        action="store_true",
        help="only the figures that have a target; --headlines is its former name",
    )


def check_folders(args: argparse.Namespace, comm: Any = None) -> None:
    """Refuse results that cannot be written: on all ranks, if the first has no such folder.

    Raises
    ------
    HaloxError
        If there is no such folder.
    """
    folders = [path.parent for path in (args.json, args.plot) if path is not None]
    absent = next((str(folder) for folder in folders if not folder.is_dir()), None)
    if comm is not None:
        absent = comm.bcast(absent)
    if absent is not None:
        raise HaloxError(f"there is no such folder as {absent}, where results are to be written")


def write(result: dict[str, Any], file: Path | None) -> None:
    """Write a result as JSON, if a file is named."""
    if file is not None:
        text = json.dumps(result, indent=1, allow_nan=False)
        file.write_text(text + "\n", encoding="utf-8")


def draw(folder: Path | None, drawn: Callable[[Path], list[Path]]) -> None:
    """Draw figures where a folder for them is named, and print the names of the files."""
    if folder is not None:
        for path in drawn(folder):
            print(f"wrote {path}")
