"""The GPU check: runs the whole GPU suite and the benchmarks that have targets; writes docs/performance/gpu-check.json.

Run ``python3 -m tools.gpu.check`` (``make gpu-check``) in the checkout, on a machine with at least one GPU, CuPy,
mpi4py, NumPy and pytest. On a machine with one GPU all ranks share it. The exit status is 1 if anything failed. If all
tests of a file are skipped, the file counts as skipped, and the result contains the reasons. A file that runs no test
for another reason counts as failed.

``--several`` runs only the tests and figures of several ranks, which a machine with several GPUs adds to a check on one
GPU. ``--figures`` runs only the figures of several ranks. Figures are measured on 2, 4 and 8 ranks, up to the number of
GPUs. ``--tests`` runs the whole suite without benchmarks, in two thirds of the time. It writes gpu-check-tests.json, so
that the figures of the last check stay. ``--several --tests`` runs the tests of several ranks.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from halox.cli import catalogue
from tools.gpu import apps, suites
from tools.gpu.running import ROOT, run

RESULT = ROOT / "docs" / "performance" / "gpu-check.json"
TESTS = RESULT.with_name("gpu-check-tests.json")
AT_ONCE, RANKS_AT_ONCE = 8, 4
"""Suites that run at the same time on a GPU: suites of one process, and suites of ranks, whose processes take turns on
the GPU."""


def sources_sha256(root: Path = ROOT) -> str:
    """Digest of all files under halox/, ordered by path: the path, a zero byte, the content."""
    digest = hashlib.sha256()
    paths = [p.relative_to(root) for p in (root / "halox").rglob("*") if p.is_file()]
    for path in sorted(paths, key=lambda p: p.as_posix()):
        if "__pycache__" not in path.parts:
            digest.update(path.as_posix().encode() + b"\0" + (root / path).read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Return the hardware and the software versions of this machine."""
    import cupy
    import mpi4py
    import numpy
    from mpi4py import MPI

    runtime = cupy.cuda.runtime
    gpus = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    return {
        "gpus": [gpu["name"].decode() for gpu in gpus],
        "gpu_memory_bytes": [gpu["totalGlobalMem"] for gpu in gpus],
        "cores": len(os.sched_getaffinity(0)),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cupy": cupy.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().strip().splitlines()[0].rstrip("\0"),
    }


class Result:
    """Results so far. The file is rewritten after each step, so that a run that dies leaves its results."""

    def __init__(self, parts: str) -> None:
        self._file = TESTS if parts.startswith("tests") else RESULT
        self._started = time.monotonic()
        found = machine()
        self.gpus = len(found["gpus"])
        self._head = {
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "sources_sha256": sources_sha256(),
            "machine": found,
            "parts": parts,
        }
        self._lock = Lock()
        self._tests: list[dict[str, Any]] = []
        self._figures: list[dict[str, Any]] = []
        self._apps: list[dict[str, Any]] = []
        self._launches: list[dict[str, Any]] = []

    def add(
        self,
        tests: Sequence[dict[str, Any]] = (),
        figures: Sequence[dict[str, Any]] = (),
        runs: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Add outcomes, figures and runs of mini-apps, and rewrite the file; safe to call from several threads."""
        with self._lock:
            self._tests += tests
            self._figures += figures
            self._apps += runs
            self._write(ended=False)

    def timed(self, name: str, began: float) -> None:
        """Record the start and the duration of a launch that ends now; ``began`` is a time of `time.monotonic`."""
        seconds = round(time.monotonic() - began, 1)
        print(f"{name}: {seconds} s")
        with self._lock:
            launch = {"name": name, "at_s": round(began - self._started, 1), "seconds": seconds}
            self._launches.append(launch)

    def _write(self, ended: bool) -> Counter[str]:
        """Write the file, print a summary line, and return the numbers of tests by outcome."""
        count = Counter(
            outcome if (outcome := one["outcome"]) in ("passed", "skipped") else "failed"
            for one in self._tests
        )
        found = self._head | {
            "ended": ended,
            **{outcome: count[outcome] for outcome in ("passed", "skipped", "failed")},
            "seconds": round(time.monotonic() - self._started, 1),
            "launches": self._launches,
            "benchmarks": self._figures,
            "apps": self._apps,
            "tests": self._tests,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{found['passed']} passed, {found['skipped']} skipped, {found['failed']} failed "
            f"in {found['seconds']} s; {self._file}",
            flush=True,
        )
        return count

    def end(self) -> bool:
        """Write the file as complete, print reasons of skips, and return whether no test, figure or app has failed."""
        count = self._write(ended=True)
        skipped = Counter(one["reason"] for one in self._tests if one["outcome"] == "skipped")
        for reason, tests in skipped.items():
            print(f"{tests} skipped: {reason}")
        broken = any("failed" in one for one in self._figures)
        return not (count["failed"] or broken or any(one["exit_status"] for one in self._apps))


def run_suites(
    result: Result, found: Sequence[suites.Suite], at_once: int, gpus: Sequence[str] = ()
) -> None:
    """Run suites, at most ``at_once`` at the same time, and add the outcomes to the result.

    ``gpus`` has a value of CUDA_VISIBLE_DEVICES for each suite that runs at the same time; by default a suite sees all
    GPUs.
    """
    free: SimpleQueue[str] = SimpleQueue()
    for seen in gpus:
        free.put(seen)

    def one(suite: suites.Suite) -> None:
        seen = free.get() if gpus else ""
        began = time.monotonic()
        tests = suite.run({"CUDA_VISIBLE_DEVICES": seen} if seen else {})
        result.timed(suite.name, began)
        result.add(tests=tests)
        if seen:
            free.put(seen)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, found))


def run_alone(result: Result, found: Sequence[suites.Suite]) -> None:
    """Run suites that must not share their GPUs with another; on four GPUs or more, suites of two ranks in pairs."""
    pairs = [f"{k},{k + 1}" for k in range(0, result.gpus - 1, 2)]
    if len(pairs) > 1:
        run_suites(result, [suite for suite in found if suite.ranks == 2], len(pairs), pairs)
        found = [suite for suite in found if suite.ranks != 2]
    run_suites(result, found, 1)


def measure(result: Result, name: str, words: Sequence[str], ranks: int | None) -> None:
    """Run a benchmark and add its figures; its last command-line argument is the JSON file that it writes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        status, said = run(["-m", *words, str(file)], ranks)
        found = json.loads(file.read_text()) if file.exists() else []
    where = f"{name} on {ranks or 1} rank(s)"
    result.timed(where, began)
    if isinstance(found, dict):
        found = found.get("targets", [])
    if not found or (status and not any("failed" in row for row in found)):
        print(said[-4000:])
        found = [{"name": where, "failed": f"exit status {status}"}]
    for row in found:
        shown = row.get("failed") or f"{row['value']} {row['unit']}"
        print(f"{row['name']}: {shown}; {row.get('baseline_name', '')} {row.get('baseline')}")
    result.add(figures=found)


def targets(result: Result, kind: str, ranks: int | None) -> None:
    """Run one kind of ``halox bench`` and add its figures that have targets."""
    words = ["halox", "bench", kind, "--device", "gpu", "--targets", "--json"]
    measure(result, f"halox bench {kind}", words, ranks)


def kinds_on(ranks: int, gpus: int) -> list[str]:
    """Return the kinds of ``halox bench`` with figures on a number of ranks, from the table of targets."""
    catalogue.package(catalogue.BENCHMARKS)
    table = import_module(f"{catalogue.BENCHMARKS}.targets")
    kinds: list[str] = table.kinds_on(ranks, gpus)
    return kinds


def measure_ranks(result: Result) -> None:
    """Run the mini-apps and the benchmarks of several ranks."""
    gpus = result.gpus
    found = apps.run_all(gpus)
    result.add(runs=found, figures=apps.figures_of(found))
    for ranks in apps.measured_ranks(gpus):
        for kind in kinds_on(ranks, gpus):
            targets(result, kind, ranks)


def measure_one(result: Result) -> None:
    """Run the benchmarks of one process."""
    measure(result, "nas_ft", ["tools.gpu.bench_nas_ft"], None)
    measure(result, "loop", ["tools.gpu.bench_loop"], None)
    for kind in kinds_on(1, result.gpus):
        targets(result, kind, None)


PARTS = {
    (): "all",
    ("--several",): "those of several ranks",
    ("--figures",): "figures of several ranks",
    ("--tests",): "tests",
    ("--several", "--tests"): "tests of several ranks",
}
"""Description of the checked parts, for each command line."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts that the command line selects, write the result, and return the exit status."""
    parts = PARTS.get(tuple(arguments))
    if parts is None:
        print(__doc__)
        return 2
    has_figures = "--tests" not in arguments
    result = Result(parts)
    is_whole = not arguments
    if "--figures" not in arguments:
        together, alone = suites.several_ranks(result.gpus)
        run_suites(result, together, RANKS_AT_ONCE)
        run_alone(result, alone)
    if is_whole or parts == PARTS["--tests",]:
        run_suites(result, suites.one_process(result.gpus), AT_ONCE)
    if has_figures:
        measure_ranks(result)
    if is_whole:
        measure_one(result)
    return 0 if result.end() else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
