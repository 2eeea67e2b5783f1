"""What the commands ``halox bench exchange``, ``allreduce`` and ``pingpong`` do alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from halox.cli import run
from halox.cli.bench.headlines import Figure
from halox.cli.bench.ranks_bench import device_of
from halox.cli.bench.ranks_headlines import shown
from halox.cli.bench.ranks_options import say, written
from halox.cli.bench.ranks_ways import SELECTED
from halox.cli.bench.surroundings import machines
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError

Case = TypeVar("Case", bound=Any)
Row = TypeVar("Row", bound=Any)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that both have beside those of all benchmarks on several ranks."""
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if usable"
    )
    parser.add_argument(
        "--headlines", action="store_true", help="only the figures that halox is measured by"
    )


def run_command(
    args: argparse.Namespace,
    words: Sequence[str],
    name: str,
    chosen: Sequence[Case],
    measure: Callable[[Any, str, dict[str, Any]], Sequence[Row]],
    headlines: Callable[..., list[Figure]],
) -> int:
    """Run what the command line asks for and return the exit status.

    Parameters
    ----------
    args : argparse.Namespace
    words : sequence of str
        The command line itself, for the ranks that are started.
    name : str
        The command.
    chosen : sequence
        The cases.
    measure : callable
        Given the communicator, the device and where the result is kept, measures them.
    headlines : callable
        Given the communicator and ``progress``, measures the figures with targets.

    Returns
    -------
    int
        0; 1 if a result was wrong or a way failed.

    Raises
    ------
    HaloxError
        If an option fits nothing, or a GPU is asked for and there is none.

    Notes
    -----
    Collective; becomes the launcher where ranks are to be started.
    """
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    comm = run.ranks(args.ranks, words, name)

    def work() -> int:
        device = device_of(args.device, comm)
        if args.headlines and device == "cpu":
            raise DeviceError("--headlines needs a GPU on every rank")
        result: dict[str, Any] = {"machine": machines(comm, device)}
        with written(args, comm, result):
            if args.headlines:
                return _headlines(comm, headlines, result)
            return int(any(row.failed for row in measure(comm, device, result)))

    return run.together(comm, work, name)


def _headlines(comm: Any, headlines: Callable[..., list[Figure]], result: dict[str, Any]) -> int:
    progress = TerminalProgress(comm.rank)
    found = headlines(comm, progress=progress)
    progress.clear()
    result["headlines"] = found
    say(comm)(shown(found))
    return int(any("failed" in one for one in found))


def in_turn(
    comm: Any,
    cases: Sequence[Case],
    measure: Callable[[Case], list[Row]],
    line: Callable[[Row, float | None], str],
    result: dict[str, Any],
) -> list[Row]:
    """Measure cases, print their rows and keep them in a result; the same on all ranks; collective.

    Parameters
    ----------
    line : callable
        Makes a row's text, given the time of what halox selects in the same mode.
    """
    progress = TerminalProgress(comm.rank)
    found: list[Row] = []
    result["rows"] = []
    for number, case in enumerate(cases):
        progress(case.name, number, len(cases))
        rows = measure(case)
        progress.clear()
        found += rows
        result["rows"] += [row.as_dict() for row in rows]
        selected = {row.mode: row.us for row in rows if row.kind == SELECTED}
        for row in rows:
            say(comm)(line(row, selected.get(row.mode)))
    return found


def drawn(folder: Path | None, comm: Any, draw: Callable[[Path], Sequence[Path]]) -> None:
    """Draw figures on the first rank where a folder for them was given, and print their names."""
    if folder is not None and comm.rank == 0:
        for path in draw(folder):
            print(f"wrote {path}")
