"""The runner of all kinds of benchmarks: options, ranks, rows, tables, figures with targets, files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halox.cli import launcher
from halox.cli import run as running
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError, HaloxError, PathError
from halox.paths import PATHS
from halox_bench.common.machine import device_of, machines, why_no_gpu, why_not_gpu_aware
from halox_bench.common.options import Option, positive, words
from halox_bench.common.plots import Plot, draw
from halox_bench.common.rows import PATH, SELECTED, Row, Table, choices
from halox_bench.common.targets import Groups, measured, shown
from halox_bench.ranks.bench import Bench, Options
from halox_bench.ranks.clock import Timing

PLACES = ("host", "1gpu", "2gpus")
"""Memory of the arrays of two ranks."""

_QUICK = Timing(batches=5, batch_s=2e-3)

ALL, TWO, ALONE = "all", "two", "alone"


@dataclass(frozen=True)
class Kind:
    """Declaration of a kind of benchmark.

    Attributes
    ----------
    name, about : str
        Name on the command line, and its description.
    table : Table
    cases : callable
        Given the parsed command line, returns the cases.
    bench : callable
        Given the command line, the communicator, the device or place, and `Options`, returns the bench.
    options : tuple of Option
    plots : tuple of Plot
    targets : callable or None
        Given the command line, the communicator and the device or place, returns the groups of figures with targets,
        or None.
    budget_s : float
        Seconds after which no further group of figures is begun.
    named : {"paths", "algorithms", ""}
        Methods of halox that the command line can name.
    ranks : {"all", "two", "alone"}
        All ranks; two, with arrays in one or several of `PLACES`; or this process without MPI.
    defaults : str
        Description of the cases without options.
    """

    name: str
    about: str
    table: Table
    cases: Callable[[argparse.Namespace], Sequence[Any]]
    bench: Callable[[argparse.Namespace, Any, str, Options], Bench]
    options: tuple[Option, ...] = ()
    plots: tuple[Plot, ...] = ()
    targets: Callable[[argparse.Namespace, Any, str], Groups | None] | None = None
    budget_s: float = 60.0
    named: str = "paths"
    ranks: str = ALL
    defaults: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of all kinds, and of this one."""
        flag: Any = {"action": "store_true"}
        if self.ranks != ALONE:
            text = "ranks to start on this machine (default: those of a surrounding mpiexec)"
            parser.add_argument("-n", "--ranks", type=positive, metavar="RANKS", help=text)
        if self.named:
            text = f"{self.named} to name one by one, beside halox's own choice; default: all"
            read = _paths if self.named == "paths" else words
            Option(f"--{self.named}", text, read, None).add(parser)
            parser.add_argument("--no-graph", **flag, help="leave out replayed CUDA graphs")
        if self.ranks == TWO:
            Option(
                "--where", f"places of the arrays, out of {', '.join(PLACES)}; default: all"
            ).add(parser)
        else:
            parser.add_argument(
                "--device",
                choices=("auto", "cpu", "gpu"),
                default="auto",
                help="default: GPUs if usable",
            )
        if self.targets is not None:
            text = "only the figures that have a target"
            parser.add_argument("--targets", **flag, help=text)
        for option in self.options:
            option.add(parser)
        parser.add_argument("--list", **flag, help="list the cases and end")
        parser.add_argument("--quick", **flag, help="fewer cases, fewer samples")
        parser.add_argument("--repeats", type=positive, metavar="N", help="samples of each figure")
        parser.add_argument("--no-baselines", **flag, help="leave out hand-written code")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
        parser.add_argument("--plot", type=Path, metavar="DIR", help="draw figures as PNG files")

    def run(self, args: argparse.Namespace, command: Sequence[str]) -> int:
        """Run the cases or targets of the command line; the same as for `halox_bench.command.run`."""
        unknown = [place for place in getattr(args, "where", ()) if place not in PLACES]
        if unknown:
            raise HaloxError(f"--where {unknown[0]}: expected one of {', '.join(PLACES)}")
        cases = self.cases(args)
        if args.list:
            print("\n".join(case.name for case in cases))
            return 0
        run = _Run(self, args, cases)
        if self.ranks == ALONE:
            return run.on(None)
        name, asked = f"halox bench {self.name}", args.ranks
        if self.ranks == TWO and asked is None and launcher.running_ranks() is None:
            asked, command = 2, [*command, "-n", "2"]
        comm = running.ranks(asked, command, name)
        work = run.of_two if self.ranks == TWO else run.on
        return running.together(comm, lambda: work(comm), name)


def _paths(text: str) -> tuple[str, ...]:
    known = {name: path for name, path in PATHS.items() if not path.to_self}
    for word in words(text):
        name, slash, protocol = word.partition("/")
        if name not in known or (slash and known[name].protocol(protocol) is None):
            among = (
                [f"{name}/{one.name}" for one in known[name].protocols] if name in known else known
            )
            raise argparse.ArgumentTypeError(
                f"there is no path {word!r} between ranks; known are {', '.join(among)}"
            )
    return words(text)


class _Run:
    """One run of a kind of benchmark on the ranks of a communicator; all methods are collective."""

    def __init__(self, kind: Kind, args: argparse.Namespace, cases: Sequence[Any]) -> None:
        self._kind, self._args, self._cases = kind, args, cases

    def of_two(self, comm: Any) -> int:
        """Run on the first two ranks; all ranks return the status, or raise the error."""
        if comm.size < 2:
            raise HaloxError(f"{self._kind.name} needs two ranks; give -n 2, or use mpiexec -n 2")
        players = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
        status, error = 0, None
        try:
            status = self.on(players) if comm.rank < 2 else 0
        except HaloxError as caught:
            error = caught
        status, error = comm.bcast((status, error))
        players.Free()
        if error is not None:
            raise error
        return int(status)

    def on(self, comm: Any) -> int:
        """Run on all ranks of a communicator, or on this process if it is None."""
        args = self._args
        places = self._places(comm)
        device = "cpu" if {*places} <= {"cpu", "host"} else "gpu"
        result: dict[str, Any] = {"machine": machines(comm, device)}
        with written(args, comm, result):
            if getattr(args, "targets", False):
                return self._targets(comm, places, result)
            rows, choice = self._rows(comm, places, device, result)
            for line in choices(rows, result, choice):
                say(comm, line)
            if args.plot is not None and is_first(comm):
                for path in draw(self._kind.plots, rows, args.plot):
                    print(f"wrote {path}")
            return int(any(row.failed for row in rows))

    def _places(self, comm: Any) -> tuple[str, ...]:
        if self._kind.ranks != TWO:
            return (device_of(self._args.device, comm),)
        why = next(filter(None, comm.allgather(why_no_gpu())), None)
        places: tuple[str, ...] = self._args.where or (PLACES if why is None else PLACES[:1])
        if why is not None and places != PLACES[:1]:
            raise DeviceError(f"--where {','.join(places)}: no GPU can be used: {why}")
        return places

    def _targets(self, comm: Any, places: Sequence[str], result: dict[str, Any]) -> int:
        kind, progress = self._kind, TerminalProgress(0 if comm is None else comm.rank)
        result["targets"] = found = []
        for place in places:
            assert kind.targets is not None
            groups = kind.targets(self._args, comm, place)
            if groups is None:
                why = why_no_gpu() or "not with --device cpu"
                raise DeviceError(f"--targets needs a GPU on every rank: {why}")
            found += measured(groups, kind.budget_s, progress, comm)
        progress.clear()
        say(comm, shown(found))
        return int(any("failed" in one for one in found))

    def _rows(
        self, comm: Any, places: Sequence[str], device: str, result: dict[str, Any]
    ) -> tuple[list[Row], str]:
        """Measure the cases in all places; print and keep the rows."""
        kind, options = self._kind, self._options(comm, device)
        rows: list[Row] = []
        result["rows"], result["left_out"] = [], {}
        choice, is_begun = PATH, False
        for place in places:
            try:
                bench = kind.bench(self._args, comm, place, options)
            except PathError as error:
                result["left_out"][place] = str(error)
                say(comm, f"left out: {error}")
                continue
            if not is_begun:
                say(comm, f"{bench.heading()}\n\n{kind.table.header()}")
            is_begun, choice = True, bench.choice
            rows += run_cases(kind.table, bench, self._cases, result)
        return rows, choice

    def _options(self, comm: Any, device: str) -> Options:
        """Return the options that the command line sets."""
        args = self._args
        timing = _QUICK if args.quick else Timing()
        return Options(
            device,
            getattr(args, self._kind.named or "paths", None),
            () if args.no_baselines else None,
            not getattr(args, "no_graph", False),
            replace(timing, batches=args.repeats) if args.repeats else timing,
            "" if self._kind.ranks == ALONE else why_not_gpu_aware(comm, device),
            getattr(args, "busy", False),
        )


def run_cases(
    table: Table, bench: Bench, cases: Sequence[Any], result: dict[str, Any]
) -> list[Row]:
    """Measure cases, print their rows and keep them in a result; the same on all ranks; collective."""
    comm = bench.comm
    progress = TerminalProgress(0 if comm is None else comm.rank)
    found: list[Row] = []
    suited = bench.suited(cases)
    for number, case in enumerate(suited):
        progress(case.name, number, len(suited))
        rows = bench.measure(case)
        progress.clear()
        found += rows
        result["rows"] += [row.as_dict() for row in rows]
        selected = {row.mode: row.us for row in rows if row.kind == SELECTED}
        for row in rows:
            say(comm, table.line(row, selected.get(row.mode)))
    return found


@contextmanager
def written(args: argparse.Namespace, comm: Any, result: dict[str, Any]) -> Iterator[None]:
    """Write the result on the first rank when the block ends, also when it ends with an error; collective.

    Raises
    ------
    HaloxError
        On all ranks, at once, if a folder for results does not exist.
    """
    folders = [path.parent for path in (args.json, args.plot) if path is not None]
    absent = next((str(folder) for folder in folders if not folder.is_dir()), None)
    if comm is not None:
        absent = comm.bcast(absent)
    if absent is not None:
        raise HaloxError(f"there is no such folder as {absent}, where results are to be written")
    try:
        yield
    except BaseException as error:
        result["broken"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if is_first(comm) and args.json is not None:
            text = json.dumps(result, indent=1, allow_nan=False)
            args.json.write_text(text + "\n", encoding="utf-8")


def is_first(comm: Any) -> bool:
    """Whether this process is the first rank, or alone."""
    return comm is None or comm.rank == 0


def say(comm: Any, text: str) -> None:
    """Print on the first rank."""
    if is_first(comm):
        print(text, flush=True)
