"""The command line: ``run`` (mini-apps and scripts), ``info``, ``probe``, ``tune``, ``predict``, ``view``, ``bench``.

`build_parser` defines the words and options, and `main` calls the module of the subcommand.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from halox._version import __version__
from halox.cli import (
    catalogue,
    compare,
    info,
    links,
    paths,
    predict,
    progress,
    report,
    run,
    script,
    tune,
    view,
)
from halox.errors import HaloxError
from halox.paths.scatter_gather.mlx5 import probe as mlx5_probe

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
"""Exit status of a program that SIGPIPE ended."""


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


class Parser(argparse.ArgumentParser):
    """A parser that rejects unknown words itself, so that the error shows the usage of the subcommand."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words, or end with an error."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments, unknown


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the whole command, including the options of the subcommand at the start of ``words``."""
    parser: argparse.ArgumentParser = Parser(
        prog="halox",
        description="Halo exchange for NumPy and CuPy arrays: mini-apps, benchmarks, information.",
    )
    parser.add_argument("--version", action="version", version=f"halox {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    # The same options are accepted before and after an app's name. With SUPPRESS, the defaults of the second parser do
    # not overwrite values of the first parser.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "-n",
        "--ranks",
        type=_positive,
        metavar="RANKS",
        help="ranks to start on this machine (default: one, or those of a surrounding mpiexec)",
    )
    common.add_argument("--json", action="store_true", help="print figures as JSON")

    running = commands.add_parser(
        "run",
        parents=[common],
        help="run a mini-app, or a script of your own, on one or more ranks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=script.USAGE,
    )
    running.add_argument("--list", action="store_true", help="list the mini-apps and end")
    apps = running.add_subparsers(dest="app", metavar="NAME")
    for name in catalogue.names():
        app = catalogue.load(name)
        options = apps.add_parser(name, parents=[common], help=app.summary, description=app.summary)
        app.add_arguments(options)
        if app.picture is not None:
            options.add_argument(
                "--png", type=Path, metavar="FILE", help=f"draw {app.picture} into FILE"
            )

    about = commands.add_parser(
        "info", parents=[common], help="show versions, the MPI library, GPUs and possible paths"
    )
    between = about.add_mutually_exclusive_group()
    between.add_argument(
        "--paths",
        action="store_true",
        help="show the path between every two ranks instead (default: a rank a GPU, at least two)",
    )
    between.add_argument(
        "--check",
        action="store_true",
        help="measure the links between ranks instead, and name causes of slow links",
    )
    probed = commands.add_parser(
        "probe", help="try hardware that halox uses only when asked to, and measure it"
    )
    probed.add_argument("what", choices=["mlx5"], help="mlx5: a network adapter, by itself")
    probed.add_argument("--json", action="store_true", help="print figures as JSON")
    tune.add_parser(commands, common)
    predict.add_parser(commands, common)
    view.add_parser(commands)

    bench = commands.add_parser("bench", help="measure the library's parts on this machine")
    if words[:1] == ["bench"]:
        benchmarks().add_arguments(bench)
    return parser


def benchmarks() -> ModuleType:
    """Return the command module of the benchmarks; raise `MissingPackageError` if they are not installed."""
    catalogue.package(catalogue.BENCHMARKS)
    return import_module(f"{catalogue.BENCHMARKS}.command")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the words after ``halox``, by default from the command line; return the exit status.

    The status is 0 for success, 1 if an app's result is not verified, a benchmark or a probe failed or a link is slow,
    2 for a wrong command line, input or installation, and 141 if the reader of the output has ended. A script or a
    launcher replaces this process. Collective inside an MPI launcher.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(words)
        print(end="", flush=True)
        return status
    except HaloxError as error:
        print(f"halox: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does. Redirect stdout, so that Python's last flush works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(words: Sequence[str]) -> int:
    program = script.read(words[1:]) if words[:1] == ["run"] else None
    if program is not None and program.compare is not None:
        return compare.compare(program.ranks or 1, program.compare, program.arguments)
    if program is not None:
        script.start(program)
    args = build_parser(words).parse_args(words)
    progress.announce_terminal()
    if args.command == "bench":
        return int(benchmarks().run(args, words))
    if args.command == "view":
        return view.view(args)
    args.json = getattr(args, "json", False)
    if args.command == "info":
        return _info(args, words)
    if args.command == "probe":
        return _probe(as_json=args.json)
    if args.command == "tune":
        return tune.tune(args, words)
    if args.command == "predict":
        return predict.show(args, words)
    if args.list:
        run.show_list(as_json=args.json)
        return 0
    if args.app is None:
        print(
            "halox run: name a mini-app (`halox run --list` shows them), a script or -m MODULE",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return run.run(args, words)


def _probe(*, as_json: bool) -> int:
    try:
        outcome = mlx5_probe.collect()
    except HaloxError as error:
        outcome = {"works": False, "why_not": str(error)}
    print(report.as_json(outcome) if as_json else report.as_text(outcome))
    return 0 if outcome["works"] else 1


def _info(args: argparse.Namespace, words: Sequence[str]) -> int:
    requested = getattr(args, "ranks", None)
    if not (args.paths or args.check):
        if requested is not None:
            raise HaloxError("halox info needs no ranks; -n goes with --paths and --check")
        info.show(as_json=args.json)
        return 0
    comm = run.ranks(tune.ranks_wanted(requested), words, "halox info")
    show = links.show if args.check else paths.show
    return run.together(comm, lambda: show(comm, as_json=args.json), "halox info")
