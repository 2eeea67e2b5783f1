"""``halox bench``: hands on to what is to be measured, and runs ``halox bench pack``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from halox.cli import report
from halox.cli.bench import allreduce_command, exchange_command, pingpong_command
from halox.cli.bench import options as settings
from halox.cli.bench import rows as table
from halox.cli.bench.catalogue import catalogue, select
from halox.cli.bench.rows import Row
from halox.cli.bench.surroundings import machine
from halox.errors import DeviceError, HaloxError

EXIT_FAILED = 1

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns."""


def add_parser(commands: Subparsers) -> None:
    """Add ``bench`` and what can be measured to the command's parser."""
    bench = commands.add_parser("bench", help="measure the library's parts on this machine")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    about = "packing of many layouts, beside CUDA's copies and hand-written kernels"
    settings.add_arguments(kinds.add_parser("pack", help=about, description=f"Measure {about}."))
    exchange_command.add_parser(kinds)
    pingpong_command.add_parser(kinds)
    allreduce_command.add_parser(kinds)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for.

    Parameters
    ----------
    args : argparse.Namespace
        What the command line said.
    words : sequence of str
        The command line itself, for the ranks that are started.

    Returns
    -------
    int
        0; 1 if a method gave wrong bytes or failed.

    Raises
    ------
    HaloxError
        If an option fits nothing, or a GPU is asked for and there is none.

    Notes
    -----
    Collective where it runs on several ranks.
    """
    on_ranks = {
        "exchange": exchange_command.run_command,
        "pingpong": pingpong_command.run_command,
        "allreduce": allreduce_command.run_command,
    }
    return on_ranks[args.bench](args, words) if args.bench in on_ranks else _run_pack(args)


def _run_pack(args: argparse.Namespace) -> int:
    if args.list:
        show_list()
        return 0
    device = _device(args.device)
    if (args.headlines or args.contention) and device == "cpu":
        why = "not with --device cpu" if args.device == "cpu" else _why_no_gpu()
        raise DeviceError(f"--headlines and --contention need a GPU: {why}")
    for path in (args.json.parent if args.json else None, args.plot and args.plot.parent):
        if path is not None and not path.is_dir():
            raise HaloxError(f"there is no such folder as {path}, where results are to be written")
    result: dict[str, Any] = {"machine": machine(device)}
    if args.headlines:
        result["headlines"] = _headlines()
        failed = any("failed" in one for one in result["headlines"])
    elif args.contention:
        result["contention"] = _contention(quick=args.quick)
        failed = False
    else:
        found, broken = _pack(args, device)
        result["rows"] = [row.as_dict() for row in found]
        failed = bool(broken) or any(row.failed for row in found)
        if broken:
            result["broken"] = broken
        _draw(found, args.plot)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return EXIT_FAILED if failed else 0


def show_list() -> None:
    """Print every pattern with its sizes."""
    for pattern in catalogue().values():
        source = f" ({pattern.source})" if pattern.source else ""
        print(f"{pattern.name}: {pattern.summary}{source}")
        print(f"    {' '.join(case.size for case in pattern.cases())}")


def _device(asked: str) -> str:
    reason = None if asked == "cpu" else _why_no_gpu()
    if asked == "gpu" and reason is not None:
        raise DeviceError(f"--device gpu: no GPU can be used: {reason}")
    return "gpu" if asked != "cpu" and reason is None else "cpu"


def _why_no_gpu() -> str | None:
    from halox.runtime.gpu.cuda import why_no_gpu

    return why_no_gpu()


def _pack(args: argparse.Namespace, device: str) -> tuple[list[Row], str]:
    """Measure and print; return the rows, and what has broken the GPU, if something has."""
    chosen = settings.options_of(args)
    cases = select(chosen.patterns, quick=chosen.quick)
    watch = _Watch()
    rows: Iterable[Row]
    if device == "cpu":
        from halox.cli.bench import on_host

        print("NumPy arrays; times on the host's clock\n")
        rows = on_host.run(cases, chosen, watch)
    else:
        from halox.cli.bench import on_device
        from halox.cli.bench.rig import Rig

        rig = Rig(repeats=chosen.repeats)
        _print_speeds(rig, chosen.destinations)
        rows = on_device.run(rig, cases, chosen, watch)
    found: list[Row] = []
    try:
        for row in rows:
            if not found:
                watch.clear()
                print(table.header())
            found.append(row)
            watch.clear()
            print(table.line(row), flush=True)
    except HaloxError as error:
        if not found:
            raise
        watch.clear()
        print(f"halox bench: stopped: {error}", file=sys.stderr)
        return found, str(error)
    if not found:
        raise HaloxError("nothing to measure: the cases chosen are too large for this machine")
    return found, ""


def _print_speeds(rig: Any, destinations: Iterable[str]) -> None:
    speeds = {"device": f"{rig.bytes_per_us / 1e6:.2f} TB/s read and written"}
    for name in rig.destinations():
        if name != "device" and name in destinations:
            speeds[name] = f"{rig.link_bytes_per_us(name) / 1e3:.1f} GB/s"
    empty = rig.clock.empty()
    graph = "" if empty.graph_us is None else f", {empty.graph_us:.2f} us in a graph"
    print("large copies: " + "; ".join(f"{name} {speed}" for name, speed in speeds.items()))
    print(f"empty kernel: {empty.us:.2f} us in a stream{graph}\n")


def _headlines() -> list[dict[str, Any]]:
    from halox.cli.bench import headlines

    watch = _Watch()
    found = headlines.headlines(progress=watch)
    watch.clear()
    shown = [
        {
            "figure": one["name"],
            "value": one["value"],
            "unit": one["unit"],
            "target": f"{'<=' if one['at_most'] else '>='} {one['target']}",
            "met": "-" if one["met"] is None else one["met"],
            "beside": one.get("failed") or f"{one['baseline']} {one['baseline_name']}",
        }
        for one in found
    ]
    print("\n".join(report.table(shown)))
    return found


def _contention(*, quick: bool) -> list[dict[str, Any]]:
    from halox.cli.bench import contention
    from halox.cli.bench.rig import Rig

    watch = _Watch()
    found = [line.as_dict() for line in contention.run(Rig(), watch, quick=quick)]
    watch.clear()
    print("\n".join(report.table(found)))
    return found


def _draw(rows: list[Row], folder: Path | None) -> None:
    if folder is None:
        return
    from halox.cli.bench import plots

    for path in plots.draw(rows, folder):
        print(f"wrote {path}")


class _Watch:
    """Shows on a terminal what is being measured."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._width = 0

    def __call__(self, what: str) -> None:
        """Show it in the place of what was shown before."""
        if self._shown:
            sys.stderr.write(f"\r{what.ljust(self._width)}")
            sys.stderr.flush()
            self._width = len(what)

    def clear(self) -> None:
        """Wipe the line."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0
