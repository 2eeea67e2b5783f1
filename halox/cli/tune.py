"""``halox tune``: measures the paths of this machine, and stores the constants of the cost model.

`halox.cli.probing` measures, `halox.plans.calibration` stores the constants for later selections of paths.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from halox.cli import launcher, probing, report, run
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError
from halox.paths.costs import RUN_BYTES
from halox.plans import calibration
from halox.plans.costs import Costs
from halox.runtime.context import Context
from halox.runtime.gpu import cuda
from halox.runtime.gpu.devices import choose_device
from halox.runtime.topology import Topology
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

NAME = "halox tune"
_NO_GPU = (
    "nothing to tune and nothing written: these ranks have no GPU, and NumPy arrays follow fixed rules "
    "(docs/paths.md)"
)


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add ``tune`` to the command's parser."""
    about = "measure paths and store the cost-model constants by which halox chooses among them"
    tuning = commands.add_parser("tune", parents=[common], help=about, description=f"{about}.")
    tuning.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where arrays live (default: on GPUs where there are any)",
    )
    tuning.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")


def tune(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run ``halox tune`` and return the exit status; collective inside a launcher."""
    comm = run.ranks(ranks_wanted(getattr(args, "ranks", None)), words, NAME)
    return run.together(comm, lambda: tune_on_ranks(args, comm), NAME)


def ranks_wanted(asked: int | None) -> int | None:
    """Return the number of ranks to start: as requested, else one per GPU and at least two.

    Returns None inside a launcher, which determines the number.
    """
    started = launcher.running_ranks() is not None or launcher.STARTED_BY_HALOX in os.environ
    if asked is not None or started:
        return asked
    return max(2, cuda.gpu_count())


def tune_on_ranks(args: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Measure on the ranks of a communicator, and print and store the constants; collective."""
    if comm.size < 2:
        raise HaloxError(f"{NAME} measures between ranks and needs 2 or more, got 1; add -n 2")
    world = World(comm, "tune")
    try:
        progress = TerminalProgress(comm.rank)
        device = world.attempt(lambda: choose_device(args.device, world.turn), "the choice of GPUs")
        if len(set(comm.allgather(device is None))) > 1:
            raise HaloxError("some ranks have a GPU and some have none; give --device cpu")
        near, far = probing.partners(comm.rank, world.nodes)
        prober = probing.Prober(world, comm, device, near, far)
        begin = time.monotonic()
        protocols = probing.tuned_protocols("host" if device is None else "gpu")
        figures: dict[str, Any] = {"ranks": world.size, "file": None, "note": _NO_GPU}
        if protocols:
            figures = tuned_figures(prober, progress, protocols, write=not args.dry_run)
        progress.clear()
        if comm.rank == 0:
            figures["seconds"] = round(time.monotonic() - begin, 1)
            shown = figures if args.json else _for_people(figures)
            print(report.as_json(shown) if args.json else report.as_text(shown), flush=True)
    except HaloxError as error:
        world.close_after(error)
        raise
    world.close()
    return 0


def tuned_figures(
    prober: probing.Prober,
    progress: probing.Progress,
    protocols: Sequence[str],
    *,
    write: bool,
) -> dict[str, object]:
    """Measure and write the constants; collective."""
    world = prober.world
    topology, before = topology_and_costs(prober)
    fingerprint = calibration.fingerprint_of(world, topology, prober.device)
    shared = topology.is_shared
    found = probing.campaign(prober, protocols, before, progress, shared_gpu=shared)
    if not found.costs:
        why = "; ".join(f"{name}: {text}" for name, text in found.refused.items())
        raise HaloxError(f"no protocol could be measured: {why}")
    day = datetime.now(UTC).date().isoformat()
    after = before.updated(found.costs, f"measured by {NAME} on {world.size} ranks, {day}")
    path = None
    if write:
        path = world.attempt(
            lambda: calibration.save(fingerprint, after) if world.rank == 0 else None,
            "the writing of the tuning file",
        )
    return {
        "ranks": world.size,
        "gpu": fingerprint.gpu,
        "driver": fingerprint.driver,
        "topology": fingerprint.topology,
        "mpi": fingerprint.mpi,
        "file": str(path) if path else "not written (--dry-run)",
        "rows": rows_of(found, before),
        "not_measured": found.refused,
    }


def topology_and_costs(prober: probing.Prober) -> tuple[Topology, Costs]:
    """Return the topology of GPUs and ranks, and the constants in use; collective."""
    context = Context(World(prober.comm))
    if prober.device is not None:
        context.use_device(prober.device)
    state = context.find_gpus(), context.once(calibration.costs_of)
    context.close()
    return state


def rows_of(found: probing.Campaign, before: Costs) -> list[dict[str, object]]:
    """Return two rows per protocol, with its constants before and after."""
    rows: list[dict[str, object]] = []
    for name, after in found.costs.items():
        for which, cost in (("before", before.protocols.get(name)), ("after", after)):
            if cost is None:
                continue
            speeds = zip(RUN_BYTES, cost.gb_per_s, strict=True)
            rows.append(
                {
                    "protocol": name,
                    "constants": which,
                    "latency_us": round(cost.latency_us, 2),
                    "message_us": round(cost.message_us, 2),
                    **{f"GB/s {run} B": round(speed, 1) for run, speed in speeds},
                }
            )
    return rows


def _for_people(figures: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in figures.items() if value not in (None, {})}
