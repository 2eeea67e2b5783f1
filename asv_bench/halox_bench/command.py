"""The kinds of ``halox bench``, their rows and figures; ``halox.cli`` calls this module."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from halox.cli import launcher
from halox.cli import run as running
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError, HaloxError
from halox.runtime.gpu.cuda import why_no_gpu
from halox_bench import rows as tables
from halox_bench.allreduce import ALLREDUCE
from halox_bench.bench import Bench
from halox_bench.calls import CALLS
from halox_bench.checkpoint import CHECKPOINT
from halox_bench.clock import Timing
from halox_bench.exchange import EXCHANGE
from halox_bench.fft import FFT
from halox_bench.figures import measured, shown
from halox_bench.kinds import Kind
from halox_bench.machine import machine
from halox_bench.messages import DDTBENCH, SCATTER_GATHER
from halox_bench.pack import PACK
from halox_bench.reductions import REDUCTIONS
from halox_bench.rows import SELECTED, Row
from halox_bench.steps import STEPS
from halox_bench.transpose import TRANSPOSE_KIND

KINDS = {
    kind.name: kind
    for kind in (
        *(EXCHANGE, ALLREDUCE, REDUCTIONS, TRANSPOSE_KIND, FFT, PACK, DDTBENCH),
        *(SCATTER_GATHER, STEPS, CALLS, CHECKPOINT),
    )
}

QUICK = Timing(batches=5, batch_s=2e-3)
AIMED = {"gpu": Timing(batches=7, batch_s=3e-3), "cpu": Timing(batches=31, batch_s=1.5e-3)}
"""Batches of the figures with targets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        kind.add_arguments(
            kinds.add_parser(name, help=kind.about, description=f"Measure {kind.about}.")
        )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the kind of benchmark that the command line names; return 1 if a method failed or gave a wrong result.

    ``words`` are the command line itself, for the ranks that are started. Collective on several ranks; the process
    becomes the launcher if it has to start them.
    """
    kind = KINDS[args.bench]
    cases = kind.cases(args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    asked, name = args.ranks, f"halox bench {kind.name}"
    if kind.ranks > 1 and asked is None and launcher.running_ranks() is None:
        asked, words = kind.ranks, [*words, "-n", str(kind.ranks)]
    comm = running.ranks(asked, words, name)

    def work() -> int:
        if kind.ranks not in (0, comm.size):
            raise HaloxError(f"{name} needs {kind.ranks} rank(s), not {comm.size}")
        return _on(comm, kind, args, cases)

    return running.together(comm, work, name)


def device_of(comm: Any, kind: Kind, asked: str) -> str:
    """Return "cpu" or "gpu", the same on all ranks; `DeviceError` if GPUs are required and a rank has none."""
    why = why_no_gpu() if asked != "cpu" else "not with --device cpu"
    why = next(filter(None, comm.allgather(why)), None)
    if why is not None and asked == "gpu":
        raise DeviceError(f"halox bench {kind.name}: no GPU can be used: {why}")
    return "cpu" if why is not None else "gpu"


def _on(comm: Any, kind: Kind, args: argparse.Namespace, cases: Sequence[Any]) -> int:
    device: Any = device_of(comm, kind, args.device)
    result: dict[str, Any] = {"machine": machine(comm, device)}
    timing = AIMED[device] if args.targets else QUICK if args.quick else Timing()
    if args.repeats:
        timing = timing._replace(batches=args.repeats)
    with _written(args, comm, result):
        bench = Bench(comm, device, timing)
        progress = TerminalProgress(comm.rank)
        if args.targets:
            result["targets"] = found = measured(kind, bench, args, progress)
            progress.clear()
            say(comm, shown(found))
            return int(any("failed" in one for one in found))
        say(comm, f"{comm.size} rank(s), {device} arrays; {tables.header(kind.columns)}")
        rows: list[Row] = []
        result["rows"] = []
        for number, case in enumerate(cases):
            progress(case.name, number, len(cases))
            found_rows = kind.measure(bench, args, case)
            progress.clear()
            rows += found_rows
            result["rows"] += [row.as_dict() for row in found_rows]
            selected = {row.mode: row for row in found_rows if row.kind == SELECTED}
            for row in found_rows:
                say(comm, tables.line(row, kind.columns, selected.get(row.mode)))
        compared = tables.choices(rows)
        if compared:
            result["choices"] = compared
            close = sum(one["close"] for one in compared)
            say(
                comm,
                f"\nchosen like the fastest of the named {kind.named}, or at most {tables.CLOSE:.2f} x its time: "
                f"{close} of {len(compared)} cases and modes",
            )
        return int(any(row.failed for row in rows))


@contextmanager
def _written(args: argparse.Namespace, comm: Any, result: dict[str, Any]) -> Iterator[None]:
    """Write the result on the first rank when the block ends, also by an error; fail at once without the folder."""
    absent = args.json is not None and not args.json.parent.is_dir()
    if comm.bcast(absent):
        raise HaloxError(f"--json: there is no such folder as {args.json.parent}")
    try:
        yield
    except BaseException as error:
        result["broken"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if comm.rank == 0 and args.json is not None:
            text = json.dumps(result, indent=1, allow_nan=False)
            args.json.write_text(text + "\n", encoding="utf-8")


def say(comm: Any, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)
