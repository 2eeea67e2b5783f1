"""``halox predict``: tables and pictures of `halox.prediction`, with links and stencils measured on the ranks here."""

from __future__ import annotations

import argparse
import math
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import halox
from halox.cli import probing, report, run, tune
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError
from halox.exchange.costs import Costs
from halox.prediction import HOST_COSTS, predict
from halox.runtime.gpu.devices import choose_device
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

NAME = "halox predict"
_HOST_PROTOCOLS = [("local", "copy"), ("host", "direct"), ("host", "shared")]
_MOST_BYTES = 1 << 20
_MOST_CELLS = 1 << 25
"""Cells of a measured block; larger blocks take as long per cell."""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add ``predict`` to the command's parser."""
    about = "predict the time of a step on other numbers of ranks"
    add = commands.add_parser(
        "predict", parents=[common], help=about, description=f"{about}."
    ).add_argument
    numbers, link = _list_of(int), _list_of(float)
    add("predicted", type=numbers, metavar="RANKS", help="1, 2, 4, ... up to RANKS; or 1,3,9")
    add("--grid", type=numbers, required=True, help="cells per axis, such as 512,512,512")
    add("--halo", type=int, default=1, help="width of the halo (default: 1)")
    add("--periodic", action="store_true", help="all axes are periodic")
    add("--fields", default="f8", help="dtypes, such as f8,f8,f4, or a number of f8 (default: f8)")
    add("--stencil", type=float, default=0.0, metavar="NS", help="time of a step per cell")
    text = "measure step(grid, *fields) of a Python file instead, without exchanges"
    add("--script", type=Path, metavar="FILE", help=text)
    add("--overlap", action="store_true", help="the exchange overlaps the interior")
    add("--reductions", type=int, default=0, metavar="N", help="sums of a field per step")
    add("--weak", action="store_true", help="each rank has a block of --grid")
    add("--proc-shape", type=numbers, help="ranks per axis, 0 to choose, such as 0,0,1")
    add("--node-ranks", type=int, metavar="N", help="ranks of a node (default: all)")
    add("--gpu-ranks", type=int, default=1, metavar="N", help="ranks that share a GPU (default: 1)")
    add("--link", type=link, metavar="US,GB/S", help="latency and bandwidth within a node")
    add("--network", type=link, metavar="US,GB/S", help="latency and bandwidth of a node's network")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="memory of the fields")
    add("--png", type=Path, metavar="FILE", help="draw the times into FILE")


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        return [kind(word) for word in text.split(",")]

    return numbers


def show(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run ``halox predict`` and return the exit status; collective inside a launcher."""
    if args.png is not None:
        run.check_picture(args.png)
    comm = run.ranks(getattr(args, "ranks", None), words, NAME)
    return run.together(comm, lambda: _show_on_ranks(args, comm), NAME)


def _show_on_ranks(args: argparse.Namespace, comm: MPI.Intracomm) -> int:
    world = World(comm, "tune")
    try:
        device = world.guarded(lambda: choose_device(args.device, world.turn), "the choice of GPUs")
        near, far = probing.partners(comm.rank, world.nodes)
        prober = probing.Prober(world, comm, device, near, far)
        costs = _costs(prober)
        fields = args.fields.split(",")
        fields = ["f8"] * int(args.fields) if args.fields.isdecimal() else fields
        names = "overlap reductions weak proc_shape node_ranks gpu_ranks link network stencil"
        options = {name: getattr(args, name) for name in names.split()}
        division: dict[str, Any] = {"halo": args.halo, "periodic": args.periodic}
        division |= {"comm": world.mpi.COMM_SELF, "device": "cpu" if device is None else "gpu"}
        if args.script is not None:
            options["stencil"] = _stencil(args.script, fields, division, prober)
        ranks = args.predicted[0] if len(args.predicted) == 1 else args.predicted
        with halox.Grid(args.grid, **division) as grid:
            rows = predict(grid, ranks, fields, costs, **options)
        if comm.rank == 0:
            figures = {"constants": costs.origin, "rows": rows}
            print(report.as_json(figures) if args.json else report.as_text(figures), flush=True)
            if args.png is not None:
                _draw(rows, args)
    except HaloxError as error:
        world.close_after(error)
        raise
    world.close()
    return 0


def _costs(prober: probing.Prober) -> Costs:
    """Return the constants of the ranks' GPUs, or measure the links of ranks on the host; collective."""
    size = prober.comm.size
    if prober.device is not None:
        with warnings.catch_warnings():
            return tune.topology_and_costs(prober)[1] if size > 1 else Costs.default()
    if size == 1:
        return HOST_COSTS
    points = [point for point in probing.POINTS if point.nbytes <= _MOST_BYTES]
    progress = TerminalProgress(prober.comm.rank)
    found = probing.campaign(prober, _HOST_PROTOCOLS, points, progress, lambda: False)
    progress.clear()
    fitted = probing.fitted(found, HOST_COSTS, shared_gpu=False)
    return HOST_COSTS.updated(fitted, f"measured on {size} ranks")


def _stencil(
    path: Path, fields: Sequence[str], division: dict[str, Any], prober: probing.Prober
) -> Callable[[tuple[int, ...]], float]:
    """Return a function that measures a script's step on a block, in microseconds; collective."""
    if not path.is_file():
        raise HaloxError(f"--script {path}: there is no such file")
    step = runpy.run_path(str(path)).get("step")
    if not callable(step):
        raise HaloxError(
            f"--script {path} measures nothing: define step(grid, *fields) there, one step without exchanges"
        )
    ns: dict[int, float] = {}

    def stencil(block: tuple[int, ...]) -> float:
        cells = math.prod(block)
        # Blocks of similar size take as long per cell.
        size = round(4 * math.log2(cells))
        if size not in ns:
            rows = max(1, min(block[0], block[0] * _MOST_CELLS // cells))
            shape = (rows, *block[1:])
            with halox.Grid(shape, **division) as grid:
                arrays = [grid.ones(dtype) for dtype in fields]
                us = prober.time(lambda: step(grid, *arrays))
            ns[size] = us / math.prod(shape)
        return ns[size] * cells

    return stencil


def _draw(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Draw the times of a step and of its parts."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="ranks", ylabel="us", xscale="log", yscale="log")
    axes.set_title(f"{'weak' if args.weak else 'strong'} scaling of {args.grid}")
    ranks = [row["ranks"] for row in rows]
    for part in ("step", "stencil", "exchange", "reduction"):
        times = [row[f"{part}_us"] for row in rows]
        if any(times):
            axes.plot(ranks, times, ".-", label=part)
    axes.set_xticks(ranks, ranks)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(args.png)
