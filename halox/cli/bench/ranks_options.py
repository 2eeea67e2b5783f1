"""Options and output that the benchmarks on several ranks have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halox.cli.bench.options import positive
from halox.cli.bench.ranks_clock import BATCHES, Timing
from halox.errors import HaloxError

_QUICK = Timing(batches=5, batch_s=2e-3)


def words(text: str) -> tuple[str, ...]:
    """Split at commas.

    Examples
    --------
    >>> words("x,,all")
    ('x', 'all')
    """
    return tuple(word for word in text.split(",") if word)


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


def add_arguments(parser: argparse.ArgumentParser, named: str = "paths") -> None:
    """Add the options that are the same for all benchmarks on several ranks.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    named : str
        What can be named one by one.
    """
    parser.add_argument(
        "-n",
        "--ranks",
        type=positive,
        metavar="RANKS",
        help="ranks to start on this machine (default: those of a surrounding mpiexec)",
    )
    parser.add_argument(
        f"--{named}",
        type=words,
        metavar="A,B",
        help=f"{named} to name one by one, beside the one that halox selects; default: all there are",
    )
    parser.add_argument("--no-graph", action="store_true", help="leave out replayed CUDA graphs")
    parser.add_argument(
        "--no-baselines", action="store_true", help="leave out what users write by hand"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer samples")
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help=f"batches a figure; default: {BATCHES}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures as PNG files")


def timing_of(args: argparse.Namespace) -> Timing:
    """Return how long to measure."""
    timing = _QUICK if args.quick else Timing()
    return Timing(args.repeats, timing.batch_s) if args.repeats else timing


@contextmanager
def written(args: argparse.Namespace, comm: Any, result: dict[str, Any]) -> Iterator[None]:
    """Write the result when the block ends, also when it ends with an error, on the first rank.

    Raises
    ------
    HaloxError
        On all ranks, at once, if there is no such folder.

    Notes
    -----
    Collective.
    """
    folders = (args.json.parent if args.json else None, args.plot.parent if args.plot else None)
    missing = [str(path) for path in folders if path is not None and not path.is_dir()]
    missing = comm.bcast(missing)
    if missing:
        raise HaloxError(
            f"there is no such folder as {missing[0]}, where results are to be written"
        )
    try:
        yield
    except BaseException as error:
        result["broken"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if comm.rank == 0 and args.json:
            text = json.dumps(result, indent=1, allow_nan=False)
            args.json.write_text(text + "\n", encoding="utf-8")


def say(comm: Any) -> Callable[[str], None]:
    """Return a function that prints on the first rank."""

    def to_screen(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    return to_screen
