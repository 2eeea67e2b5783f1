"""``halox predict``: `Grid.predict` with constants of links and stencils that are measured on the ranks here."""

from __future__ import annotations

import argparse
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox
from halox.cli import probing, report, run
from halox.errors import HaloxError
from halox.plans.measuring import exchange_us
from halox.plans.prediction import HOST_COSTS, constants, predict

_HOST_LARGE_BYTES = 128 << 10  # in the caches of a core, as most messages
_HOST_ROUNDS = 6
_MOST_CELLS = 1 << 25  # of a measured block; larger blocks take as long per cell


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add ``predict`` to the command's parser."""
    about = "predict the time of a step on other numbers of ranks"
    parser = commands.add_parser("predict", parents=[common], help=about, description=f"{about}.")
    add = parser.add_argument
    add("predicted", type=_numbers, metavar="RANKS", help="1, 2, 4, ... RANKS; or 1,3,9")
    add("--grid", type=_numbers, required=True, help="cells per axis, such as 512,512,512")
    add("--halo", type=int, default=1, help="width of the halo (default: 1)")
    add("--periodic", action="store_true", help="along all axes")
    add("--fields", default="f8", help="number of f8 fields, or dtypes: f8,f8,f4 (default: f8)")
    add("--stencil", type=float, default=0.0, metavar="NS", help="computing time per cell")
    add("--script", type=Path, metavar="FILE", help="measure step(grid, *fields) in FILE instead")
    add("--overlap", action="store_true", help="the exchange overlaps the interior")
    add("--reductions", type=int, default=0, metavar="N", help="sums over the ranks in a step")
    add("--graph", action="store_true", help="a step is a CUDA graph")
    add("--weak", action="store_true", help="each rank has a block of --grid")
    add("--proc-shape", type=_numbers, help="ranks per axis, 0 to choose, such as 0,0,1")
    add("--node-ranks", type=int, metavar="N", help="ranks of a node (default: all)")
    add("--gpu-ranks", type=int, default=1, metavar="N", help="ranks of a GPU (default: 1)")
    add("--link", type=_numbers, metavar="US,GB/S", help="latency and bandwidth within a node")
    add("--network", type=_numbers, metavar="US,GB/S", help="the same between nodes, of a node")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="memory of the fields")
    add("--png", type=Path, metavar="FILE", help="draw the times into FILE")


def _numbers(text: str) -> list[float]:
    try:
        return [int(word) if word.isdecimal() else float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers with commas between them, such as 4,8, got {text!r}"
        ) from None


def show(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run ``halox predict`` and return the exit status; collective inside a launcher."""
    if args.png is not None:
        run.check_picture(args.png)
    comm = run.ranks(getattr(args, "ranks", None), words, "halox predict")
    return run.together(comm, lambda: _show_on_ranks(args, comm), "halox predict")


def _show_on_ranks(args: argparse.Namespace, comm: Any) -> int:
    fields = ["f8"] * int(args.fields) if args.fields.isdecimal() else args.fields.split(",")
    names = "stencil overlap reductions graph weak proc_shape node_ranks gpu_ranks link network"
    options = {name: getattr(args, name) for name in names.split()}
    division = {"halo": args.halo, "periodic": args.periodic, "device": args.device}
    with halox.Grid(args.grid, comm=comm, **division) as grid:
        world, costs = grid.domain.world, constants(grid)
        partners = probing.partners(comm.rank, world.nodes)
        prober = probing.Prober(world, grid.comm, grid.device_id, *partners)
        if grid.device == "cpu" and world.node_count < comm.size:
            found = probing.campaign(
                prober,
                list(HOST_COSTS.protocols),
                HOST_COSTS,
                lambda *_: None,
                large_bytes=_HOST_LARGE_BYTES,
                rounds=_HOST_ROUNDS,
            )
            costs = HOST_COSTS.updated(found.costs, f"measured on {comm.size} ranks")
        if args.script is not None:
            options["stencil"] = _stencil_ns(args.script, fields, division, prober, grid.grid_shape)
        first, *others = args.predicted
        rows = predict(grid, args.predicted if others else first, fields, costs, **options)
    if comm.rank == 0:
        figures = {"constants": costs.origin, "rows": rows}
        print(report.as_json(figures) if args.json else report.as_text(figures), flush=True)
        if args.png is not None:
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            axes = figure.add_subplot(xlabel="ranks", ylabel="us")
            for part in ("step", "stencil", "exchange", "reduction"):
                times = [row[f"{part}_us"] for row in rows]
                axes.loglog([row["ranks"] for row in rows], times, ".-", label=part)
            axes.legend()
            figure.savefig(args.png)
    return 0


def _stencil_ns(
    path: Path, fields: Sequence[str], division: dict[str, Any], prober: probing.Prober, shape: Any
) -> float:
    sys.path.insert(0, str(path.parent))  # as for any script
    step = runpy.run_path(str(path)).get("step") if path.is_file() else None
    if not callable(step):
        raise HaloxError(f"--script {path} measures nothing: no function step(grid, *fields) there")
    # No rows are images of one another.
    rows = min(shape[0], max(1, division["halo"], _MOST_CELLS // math.prod(shape[1:])))
    with halox.Grid((rows, *shape[1:]), comm=prober.world.mpi.COMM_SELF, **division) as grid:
        arrays = [grid.ones(dtype) for dtype in fields]
        us = exchange_us(prober.world, lambda: step(grid, *arrays), 3, prober.device)
        return us * 1e3 / math.prod(grid.grid_shape)
