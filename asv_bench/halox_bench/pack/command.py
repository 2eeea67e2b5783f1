"""``halox bench pack``: runs it, prints and writes its results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halox.cli import report
from halox.errors import DeviceError, HaloxError
from halox_bench.common import machine
from halox_bench.common.options import check_folders, draw, write
from halox_bench.common.targets import Figure, shown
from halox_bench.pack import options as settings
from halox_bench.pack import rows as table
from halox_bench.pack.cases import catalogue, select
from halox_bench.pack.rows import Row

EXIT_FAILED = 1
ABOUT = "packing of many layouts, beside CUDA's copies and hand-written kernels"

add_arguments = settings.add_arguments


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`, on this process alone."""
    if args.list:
        show_list()
        return 0
    device = machine.device_of(args.device)
    if (args.targets or args.contention) and device == "cpu":
        why = "not with --device cpu" if args.device == "cpu" else machine.why_no_gpu()
        raise DeviceError(f"--targets and --contention need a GPU: {why}")
    check_folders(args)
    result: dict[str, Any] = {"machine": machine.machine(device)}
    failed = False
    if args.targets:
        result["targets"] = _targets()
        failed = any("failed" in one for one in result["targets"])
    elif args.contention:
        result["contention"] = _contention(quick=args.quick)
    else:
        found, broken = _pack(args, device)
        result["rows"] = [row.as_dict() for row in found]
        failed = bool(broken) or any(row.failed for row in found)
        if broken:
            result["broken"] = broken
        draw(args.plot, partial(_drawn, found))
    write(result, args.json)
    return EXIT_FAILED if failed else 0


def show_list() -> None:
    """Print every pattern with its sizes."""
    for pattern in catalogue().values():
        source = f" ({pattern.source})" if pattern.source else ""
        print(f"{pattern.name}: {pattern.summary}{source}")
        print(f"    {' '.join(case.size for case in pattern.cases())}")


def _drawn(rows: list[Row], folder: Path) -> list[Path]:
    from halox_bench.pack import plots

    return plots.draw(rows, folder)


def _pack(args: argparse.Namespace, device: str) -> tuple[list[Row], str]:
    """Measure and print; return the rows, and what has broken the GPU, if something has."""
    chosen = settings.options_of(args)
    cases = select(chosen.patterns, quick=chosen.quick)
    watch = _Watch()
    rows: Iterable[Row]
    if device == "cpu":
        from halox_bench.pack import on_host

        print("NumPy arrays; times on the host's clock\n")
        rows = on_host.run(cases, chosen, watch)
    else:
        from halox_bench.common.rig import Rig
        from halox_bench.pack import on_device

        rig = Rig(repeats=chosen.repeats)
        _print_speeds(rig, chosen.destinations)
        rows = on_device.run(rig, cases, chosen, watch)
    found: list[Row] = []
    try:
        for row in rows:
            watch.clear()
            if not found:
                print(table.TABLE.header())
            found.append(row)
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


def _targets() -> list[Figure]:
    from halox_bench.pack import targets

    watch = _Watch()
    found = targets.measure(progress=lambda what, done, total: watch(what))
    watch.clear()
    print(shown(found))
    return found


def _contention(*, quick: bool) -> list[dict[str, Any]]:
    from halox_bench.common.rig import Rig
    from halox_bench.pack import contention

    watch = _Watch()
    found = [line.as_dict() for line in contention.run(Rig(), watch, quick=quick)]
    watch.clear()
    print("\n".join(report.table(found)))
    return found


class _Watch:
    """Shows on a terminal what is being measured."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._width = 0

    def __call__(self, what: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r{what.ljust(self._width)}")
            sys.stderr.flush()
            self._width = len(what)

    def clear(self) -> None:
        """Wipe the line."""
        self("")
        if self._shown:
            sys.stderr.write("\r")
