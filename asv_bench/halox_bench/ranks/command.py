"""The command line of the benchmarks on several ranks: starts the ranks, prints and writes the results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from halox.cli import run
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError
from halox.paths import PATHS
from halox_bench.common import options as common
from halox_bench.common.machine import device_of, machines, why_not_gpu_aware
from halox_bench.common.options import add_list, positive
from halox_bench.common.targets import Figure, shown
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.clock import BATCHES, Timing
from halox_bench.ranks.rows import SELECTED, choices

_QUICK = Timing(batches=5, batch_s=2e-3)


def add_arguments(parser: argparse.ArgumentParser, named: str | None = "paths") -> None:
    """Add the options that are the same for all benchmarks on several ranks.

    Parameters
    ----------
    named : {"paths", "algorithms", None}
        What can be named one by one, if anything.
    """
    parser.add_argument(
        "-n",
        "--ranks",
        type=positive,
        metavar="RANKS",
        help="ranks to start on this machine (default: those of a surrounding mpiexec)",
    )
    if named is not None:
        text = (
            f"{named} to name one by one, beside the one that halox selects; default: all there are"
        )
        read = _paths if named == "paths" else common.words
        add_list(parser, f"--{named}", text, read=read, default=None)
    parser.add_argument("--no-graph", action="store_true", help="leave out replayed CUDA graphs")
    common.add_arguments(parser, f"batches a figure; default: {BATCHES}")


def _paths(text: str) -> tuple[str, ...]:
    known = {name: path for name, path in PATHS.items() if not path.to_self}
    for word in common.words(text):
        name, slash, protocol = word.partition("/")
        if name not in known or (slash and known[name].protocol(protocol) is None):
            among = (
                [f"{name}/{one.name}" for one in known[name].protocols] if name in known else known
            )
            raise argparse.ArgumentTypeError(
                f"there is no path {word!r} between ranks; known are {', '.join(among)}"
            )
    return common.words(text)


def options_of(
    args: argparse.Namespace, comm: Any, device: str, named: tuple[str, ...] | None
) -> Options:
    """Return the options that a command line sets; collective."""
    timing = _QUICK if args.quick else Timing()
    return Options(
        device,
        named,
        () if args.no_baselines else None,
        not args.no_graph,
        replace(timing, batches=args.repeats) if args.repeats else timing,
        why_not_gpu_aware(comm, device),
        getattr(args, "busy", False),
    )


def run_cases(
    args: argparse.Namespace,
    words: Sequence[str],
    kind: str,
    chosen: Sequence[Any],
    prepared: Callable[[Any, str], RanksBench[Any]],
    on_host: Callable[..., list[Figure]] | None = None,
) -> int:
    """Run what the command line asks for and return the exit status.

    Parameters
    ----------
    words : sequence of str
        The command line itself, for the ranks that are started.
    kind : str
        The benchmark: a package with the module ``targets``.
    chosen : sequence
        The cases.
    prepared : callable
        Given the communicator and the device, returns the bench that measures.
    on_host : callable, optional
        Measures the figures with targets of NumPy arrays, as ``measure`` of ``targets`` does those on GPUs; where there
        are none, ``--targets`` needs GPUs.

    Returns
    -------
    int
        0; 1 if a result was wrong or a method failed.

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
    name = f"halox bench {kind}"
    comm = run.ranks(args.ranks, words, name)

    def work() -> int:
        device = device_of(args.device, comm)
        if args.targets and device == "cpu" and on_host is None:
            raise DeviceError("--targets needs a GPU on every rank")
        result: dict[str, Any] = {"machine": machines(comm, device)}
        with written(args, comm, result):
            if args.targets:
                return _targets(comm, kind, result, on_host if device == "cpu" else None)
            bench = prepared(comm, device)
            suited = bench.suited(chosen)
            say(comm, f"{bench.heading()}\n\n{bench.header()}")
            rows = measured(bench, suited, result)
            say(comm, "\n".join(choices(rows, result, bench.choice)))
            if comm.rank == 0:
                common.draw(args.plot, partial(bench.draw, rows))
            return int(any(row.failed for row in rows))

    return run.together(comm, work, name)


def _targets(
    comm: Any, kind: str, result: dict[str, Any], on_host: Callable[..., list[Figure]] | None
) -> int:
    progress = TerminalProgress(comm.rank)
    measured: Any = on_host or import_module(f"halox_bench.{kind}.targets").measure
    found = result["targets"] = measured(comm, progress=progress)
    progress.clear()
    say(comm, shown(found))
    return int(any("failed" in one for one in found))


def measured(
    bench: RanksBench[Any], cases: Sequence[Any], result: dict[str, Any], what: str = ""
) -> list[Any]:
    """Measure cases, print their rows and keep them in a result; the same on all ranks; collective."""
    comm = bench.comm
    progress = TerminalProgress(comm.rank)
    found: list[Any] = []
    kept = result.setdefault("rows", [])
    for number, case in enumerate(cases):
        progress(what or case.name, number, len(cases))
        rows = bench.measure(case)
        progress.clear()
        found += rows
        kept += [row.as_dict() for row in rows]
        selected = {row.mode: row.us for row in rows if row.kind == SELECTED}
        for row in rows:
            say(comm, bench.line(row, selected.get(row.mode)))
    return found


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
    common.check_folders(args, comm)
    try:
        yield
    except BaseException as error:
        result["broken"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if comm.rank == 0:
            common.write(result, args.json)


def say(comm: Any, text: str) -> None:
    """Print on the first rank."""
    if comm.rank == 0:
        print(text, flush=True)
