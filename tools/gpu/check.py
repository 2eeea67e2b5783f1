"""The GPU check: runs the whole GPU suite and the benchmarks that have targets; writes docs/performance/gpu-check.json.

Run ``python3 -m tools.gpu.check`` (``make gpu-check``) in the checkout, on a machine with at least one GPU, CuPy,
mpi4py, NumPy and pytest. On a machine with one GPU all ranks share it. The exit status is 1 if anything failed. If all
tests of a file are skipped, the file counts as skipped, and the result contains the reasons. A file that runs no test
for another reason counts as failed.

``--several`` runs only the tests and figures of several ranks, which a machine with several GPUs adds to a check on one
GPU. ``--figures`` runs only the figures of several ranks. Figures are measured on 2, 4 and 8 ranks, up to the number of
GPUs. ``--one`` runs the check for one GPU on a machine with several: each test suite and benchmark sees one GPU, and
the GPUs work in parallel.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import MappingProxyType
from typing import Any

from halox.cli import launcher
from tests.launching import descendants
from tools.gpu import junit

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "performance" / "gpu-check.json"
FOLDER = "tests/gpu"
RANKS_FOLDER = f"{FOLDER}/ranks"
RANDOM_TYPES = f"{FOLDER}/test_random_types_gpu.py"
FAILURES = f"{FOLDER}/test_failures_gpu.py"
NCCL_FAILURES = f"{FOLDER}/test_nccl_failures_gpu.py"
ON_FOUR_RANKS = ("exchange",)
ON_FOUR_GPUS = (*ON_FOUR_RANKS, "typed", "reductions")
SHARDS = 4
ON_ONE_RANK = 2
"""Launches that run the rank tests on a single rank. Each contains files with tests for one rank."""
AT_ONCE, RANKS_AT_ONCE = 8, 3
"""Suites that run at the same time on a GPU: suites of one process, and suites of ranks, whose processes take turns on
the GPU. A larger number of rank suites makes the whole check slower."""
ALONE = ("plan_memory", "tune", "bench")
BY_THEMSELVES = (*ALONE, "allreduce", "paths", "nccl")
LAUNCHES = 3
"""On several GPUs each file in BY_THEMSELVES has a launch of its own, and the other files share LAUNCHES launches. A
launch takes 3 s."""
LONGEST = tuple(
    f"{FOLDER}/test_{name}_gpu.py"
    for name in ("milc", "bench", "nas_mg", "nas_ft", "fft_examples", "jacobi", "workunits")
)
LONGEST_OF_RANKS = ("allreduce", "paths", "milc", "fft_ranks", "checkerboards", "delays")
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
STEP_LIMIT_S = 200
DUMPING_S = 2
SAID = 4_000, 24_000
"""Characters printed of a failed suite's output, from its start and from its end, which has the stacks of all ranks."""
APP_LIMIT_S = 120
MG_CLASS, FT_CLASSES = "C", ("B", "C")
LARGE_MG_CLASS, LARGE_MG_RANKS = "D", 8
SOCKETS = {
    **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    **{"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
}
"""Environment that makes NCCL use sockets, as between nodes: no peer access, shared memory or InfiniBand."""
BY_SOCKETS = ("exchange", "graphs", "new_arrays", "nccl")
MILC_LATTICE = ("--lattice", "16", "16", "16", "16")
VISIBLE: ContextVar[str | None] = ContextVar("VISIBLE", default=None)
"""The GPU that a test suite sees on a machine with several; None for all GPUs."""

NPB_CUDA = {"B": 325_900.0, "C": 340_300.0}
"""Mop/s of the CUDA version of NAS FT (GMAP/NPB-GPU) on an H200."""


def sources_sha256(root: Path = ROOT) -> str:
    """Digest of all files under halox/, ordered by path: the path, a zero byte, the content."""
    digest = hashlib.sha256()
    paths = [p.relative_to(root) for p in (root / "halox").rglob("*") if p.is_file()]
    for path in sorted(paths, key=lambda p: p.as_posix()):
        if "__pycache__" not in path.parts:
            digest.update(path.as_posix().encode() + b"\0" + (root / path).read_bytes())
    return digest.hexdigest()


def run(
    command: list[str], ranks: int | None = None, limit_s: float = STEP_LIMIT_S, **variables: str
) -> tuple[int, str]:
    """Run a Python command in the checkout, on ``ranks`` ranks unless None; return its exit status and output."""
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), HALOX_REQUIRE="gpu,mpi", HALOX_TIMEOUT="30", **variables
    )
    if VISIBLE.get() is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(VISIBLE.get())
    if ranks is not None:
        environment |= launcher.environment(ranks)
        command = launcher.command(launcher.find(), ranks, command)
    else:
        command = [sys.executable, *command]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as started:
        try:
            said, _ = started.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # On SIGABRT the pytest of each rank prints its stacks; SIGKILL ends every rank.
            ranks_of_it = descendants(started.pid)
            for signalled in (signal.SIGABRT, signal.SIGKILL):
                for pid in ranks_of_it:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signalled)
                time.sleep(DUMPING_S)
            started.kill()
            said, _ = started.communicate()
            return 124, said + f"\ntook longer than {limit_s} s"
    return started.returncode, said


def suite(
    path: str,
    ranks: int | None,
    scratch: Path,
    *others: str,
    options: tuple[str, ...] = (),
    shard: str = "",
    how: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run the tests of one or more files, and return the outcome of each; ``how`` is appended to their names."""
    parts = path, ranks, shard, how
    report = scratch / f"{'-'.join(map(str, parts)).replace('/', '-').replace(' ', '-')}.xml"
    # The plugin tools.gpu.junit makes rank 0 write the report named by HALOX_JUNIT.
    # --maxfail ends a broken suite early, so that it prints its failures before its time limit.
    command = ["-m", "pytest", "-q", "--maxfail=4", "-p", "no:cacheprovider"]
    command += ["-p", "tools.gpu.junit", path, *others]
    began = time.monotonic()
    status, said = run(
        [*command, *options],
        ranks,
        HALOX_JUNIT=str(report),
        HALOX_RANDOM_SHARD=shard,
        **variables,
    )
    where = f"{path}{f' and {len(others)} more' if others else ''} on {ranks or 1} rank(s){how}"
    outcomes: list[dict[str, Any]] = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [child for child in case if child.tag in OUTCOMES]
            outcome = {
                "test": "::".join(filter(None, (case.get("classname"), case.get("name")))) + how,
                "ranks": ranks or 1,
                "outcome": OUTCOMES[bad[0].tag] if bad else "passed",
                "seconds": float(case.get("time", 0)),
            }
            if bad and bad[0].tag == "skipped":
                outcome["reason"] = junit.reason(bad[0])
            outcomes.append(outcome)
    if status != 0 or not outcomes:
        running = junit.running(report)
        outcomes.append(
            {
                "test": where,
                "ranks": ranks or 1,
                "outcome": f"exit status {status}{f' in {running}' if running else ''}",
            }
        )
        first, last = SAID
        print(said if len(said) <= first + last else f"{said[:first]}\n...\n{said[-last:]}")
    count = Counter(one["outcome"] for one in outcomes)
    seconds = time.monotonic() - began
    print(f"{where}: {count['passed']} of {len(outcomes)} passed in {seconds:.0f} s")
    if count["skipped"] == len(outcomes):
        reasons = {one["reason"] for one in outcomes}
        print(f"{where}: all skipped: {'; '.join(sorted(reasons))}")
    return outcomes


Job = Callable[[Path], list[dict[str, Any]]]
"""A test suite; its argument is a folder for its files."""


def launch(files: Sequence[str], ranks: int, **how: Any) -> Job:
    """Return a suite that runs several files in one launch."""
    return lambda scratch: suite(files[0], ranks, scratch, *files[1:], **how)


def rank_files() -> list[str]:
    """Return the test files that run on ranks."""
    return sorted(
        file.relative_to(ROOT).as_posix() for file in (ROOT / RANKS_FOLDER).glob("test_*.py")
    )


def one_process(gpus: int) -> list[Job]:
    """Return the suites that run in one process, the longest first.

    They include the rank tests on one rank. With one GPU they also include the failure tests, whose ranks mostly wait.
    """
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).glob("test_*.py")}
    others = files - {RANDOM_TYPES, FAILURES, NCCL_FAILURES, *LONGEST}
    of_ranks = rank_files()
    on_one_rank = [launch(of_ranks[k::ON_ONE_RANK], 1) for k in range(ON_ONE_RANK)]
    shards = [
        partial(suite, RANDOM_TYPES, None, options=("-s",), shard=f"{k}/{SHARDS}")
        for k in range(SHARDS)
    ]
    failures = (FAILURES,) if gpus == 1 else ()
    longest, rest = (
        [partial(suite, path, None) for path in some]
        for some in ((*failures, *LONGEST), sorted(others))
    )
    return [*on_one_rank, *longest, *shards, *rest]


def among(file: str, names: Sequence[str]) -> bool:
    """Whether the name of a test file contains one of these names."""
    return any(name in file for name in names)


def several_ranks(gpus: int) -> tuple[list[Job], list[Job]]:
    """Return two lists of suites on several ranks: suites that may run at the same time, longest first, and the others.

    On several GPUs only the failure tests, whose ranks mostly wait, may run at the same time: kernels that wait for
    each other must not share a GPU with another suite. Ranks that share one GPU have no kernels that wait, so that only
    tests of free memory or of times run alone.
    """
    names = ON_FOUR_GPUS if gpus >= 4 else ON_FOUR_RANKS
    on_four = [partial(suite, f"{RANKS_FOLDER}/test_{name}_gpu.py", 4) for name in names]
    files = sorted(rank_files(), key=lambda file: not among(file, LONGEST_OF_RANKS))
    if gpus == 1:
        together = [partial(suite, file, 2) for file in files if not among(file, ALONE)]
        return [*together, *on_four], [partial(suite, f, 2) for f in files if among(f, ALONE)]
    others = [file for file in files if not among(file, BY_THEMSELVES)]
    by_sockets = [f"{RANKS_FOLDER}/test_{name}_gpu.py" for name in BY_SOCKETS]
    failures = [partial(suite, file, None) for file in (FAILURES, NCCL_FAILURES)]
    return failures, [
        *(partial(suite, file, 2) for file in files if file not in others),
        *(launch(others[k::LAUNCHES], 2) for k in range(LAUNCHES)),
        *on_four,
        launch(by_sockets, 2, options=("-k", "nccl"), how=", by sockets", variables=SOCKETS),
    ]


def on_each(gpus: Sequence[str | None], jobs: Sequence[Callable[[], None]], at_once: int) -> None:
    """Run jobs, at most ``at_once`` at a time on each GPU. A job sees only its own GPU, or all GPUs if it is None."""
    free: SimpleQueue[str | None] = SimpleQueue()
    for gpu in [*gpus] * at_once:
        free.put(gpu)

    def on_one(job: Callable[[], None]) -> None:
        gpu = free.get()
        VISIBLE.set(gpu)
        try:
            job()
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus) * at_once) as pool:
        for started in [pool.submit(on_one, job) for job in jobs]:
            started.result()


def measure(name: str, words: list[str], ranks: int | None, scratch: Path) -> list[dict[str, Any]]:
    """Run a benchmark and return its figures; its last command-line argument is the JSON file that it writes."""
    result = scratch / f"{name}-{ranks}.json"
    began = time.monotonic()
    status, said = run(["-m", *words, str(result)], ranks)
    print(f"{name} on {ranks or 1} rank(s): {time.monotonic() - began:.0f} s")
    found = json.loads(result.read_text()) if result.exists() else []
    if isinstance(found, dict):
        found = found.get("targets", [])
    if not found or (status and not any("failed" in row for row in found)):
        print(said[-4000:])
        print(f"{name} on {ranks or 1} rank(s): exit status {status}")
        found = [{"name": f"{name} on {ranks or 1} rank(s)", "failed": f"exit status {status}"}]
    for row in found:
        shown = row.get("failed") or f"{row['value']} {row['unit']}"
        print(f"{row['name']}: {shown}; {row.get('baseline_name', '')} {row.get('baseline')}")
    return found


def targets(
    kind: str, ranks: int | None, scratch: Path, where: Sequence[str] = ("--device", "gpu")
) -> list[dict[str, Any]]:
    """Run one kind of ``halox bench`` and return its figures that have targets."""
    words = ["halox", "bench", kind, *where, "--targets", "--json"]
    return measure(f"halox bench {kind}", words, ranks, scratch)


def app(name: str, ranks: int, *options: str) -> dict[str, Any]:
    """Run a mini-app on GPUs through the command line, and return its exit status and figures."""
    started = time.monotonic()
    status, said = run(
        ["-m", "halox", "run", name, "--device", "gpu", "--json", *options], ranks, APP_LIMIT_S
    )
    try:
        figures = json.loads(said[said.index("{") : said.rindex("}") + 1])
    except ValueError:
        figures = {"output": said[-2000:]}
    print(f"{name} on {ranks} rank(s): exit status {status}, verified {figures.get('verified')}")
    return {
        "app": name,
        "ranks": ranks,
        "exit_status": status,
        "seconds": round(time.monotonic() - started, 1),
        "figures": figures,
    }


def apps(gpus: int) -> list[dict[str, Any]]:
    """Run the mini-apps on one rank and, with several GPUs, on two; NAS MG also on more ranks, one per GPU.

    Tests cover mini-apps on ranks that share a GPU.
    """
    stencil = ("--size", "2", "--num-iters", "200", "--passes", "3", "--precision", "double")
    found = []
    for ranks in range(1, min(gpus, 2) + 1):
        found.append(app("stencil2d", ranks, *stencil))
        found.append(app("nas_mg", ranks, "--class", MG_CLASS, "--graph"))
        found += [
            app("nas_ft", ranks, "--class", name, "--passes", "3", "--graph") for name in FT_CLASSES
        ]
        found.append(app("milc", ranks, *MILC_LATTICE, "--gauge", "random", "--graph"))
    for ranks in measured_ranks(gpus)[1:]:
        name = LARGE_MG_CLASS if ranks == LARGE_MG_RANKS else MG_CLASS
        found.append(app("nas_mg", ranks, "--class", name, "--graph"))
    found.append(app("milc", 1, *MILC_LATTICE, "--gauge", "unit", "--precision", "mixed"))
    return found


def measured_ranks(gpus: int) -> list[int]:
    """Return the numbers of ranks for which figures are measured; two ranks share a single GPU.

    Examples
    --------
    >>> measured_ranks(1), measured_ranks(5), measured_ranks(8)
    ([2], [2, 4], [2, 4, 8])
    """
    return [ranks for ranks in (2, 4, 8) if ranks <= max(gpus, 2)]


def multigrid_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of the successful NAS MG runs; these figures have no targets."""
    ended = {
        one["ranks"]: one["figures"]
        for one in found
        if one["app"] == "nas_mg" and not one["exit_status"]
    }
    alone = {one["class"]: one["mops"] for ranks, one in ended.items() if ranks == 1}
    return [
        {
            "name": f"NAS MG class {one['class']}, {ranks} ranks, {one['device']}",
            "value": round(one["mops"], 4),
            "unit": "Mop/s",
            "baseline": (mops := alone.get(one["class"])) and round(mops, 3),
            "baseline_name": "Mop/s on one rank",
            "target": None,
            "at_most": True,
            "met": None,
            "speed_up": mops and round(one["mops"] / mops, 3),
            "exchange_share": round(one["exchange_share"], 4),
            **{name: one[name] for name in ("verified", "relative_error", "time_s", "graph")},
        }
        for ranks, one in ended.items()
    ]


def fourier_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of the successful NAS FT runs; runs on one rank have a target."""
    ended = [one["figures"] for one in found if one["app"] == "nas_ft" and not one["exit_status"]]
    rows = []
    for one in ended:
        theirs = NPB_CUDA[one["class"]]
        target = 6 * theirs if one["ranks"] == 1 else None
        rows.append(
            {
                "name": f"NAS FT class {one['class']}, {one['ranks']} ranks, {one['device']}",
                "value": round(one["mops"], 4),
                "unit": "Mop/s",
                "baseline": None,
                "others": {"NPB's CUDA version on one H200, of another run": theirs},
                "target": target,
                "at_most": False,
                "met": None if target is None else one["mops"] >= target,
                **{name: one[name] for name in ("verified", "relative_error", "time_s", "graph")},
            }
        )
    return rows


def milc_figures(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of the successful MILC runs in double precision; these figures have no targets."""
    ended = [one["figures"] for one in found if one["app"] == "milc" and not one["exit_status"]]
    alone = next((one["cg_gflops"] for one in ended if one["ranks"] == 1), None)
    return [
        {
            "name": f"MILC {'x'.join(map(str, one['lattice']))} {one['operator']} {one['precision']}, "
            f"{one['ranks']} ranks, {one['device']}",
            "value": round(one["cg_gflops"], 4),
            "unit": "GFLOPS",
            "baseline": alone and round(alone, 3),
            "baseline_name": "GFLOPS on one rank",
            "target": None,
            "at_most": False,
            "met": None,
            **{name: one[name] for name in ("verified", "time_s", "graph", "dslash_gflops")},
        }
        for one in ended
        if one["precision"] == "double"
    ]


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
        self._started = time.monotonic()
        self._head = {
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "sources_sha256": sources_sha256(),
            "machine": machine(),
            "parts": parts,
        }
        self.gpus = len(self._head["machine"]["gpus"])
        self.cores: int = self._head["machine"]["cores"]
        self._lock = Lock()
        self.tests: list[dict[str, Any]] = []
        self.figures: list[dict[str, Any]] = []
        self.apps: list[dict[str, Any]] = []
        self.ended = False

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Tests that need hardware or software that this machine lacks; each has a reason."""
        return [test for test in self.tests if test["outcome"] == "skipped"]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Tests that neither passed nor were skipped."""
        return [test for test in self.tests if test["outcome"] not in ("passed", "skipped")]

    @property
    def is_good(self) -> bool:
        """Whether no test, figure or app has failed."""
        broken = any("failed" in one for one in self.figures)
        return not (self.failed or broken or any(one["exit_status"] for one in self.apps))

    def add(
        self, tests: Sequence[dict[str, Any]] = (), figures: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Add outcomes and figures, and rewrite the file; safe to call from several threads."""
        with self._lock:
            self.tests += tests
            self.figures += figures
            self.write()

    def write(self) -> None:
        """Write the file, and print a summary line."""
        found = self._head | {
            "ended": self.ended,
            "passed": len(self.tests) - len(self.failed) - len(self.skipped),
            "skipped": len(self.skipped),
            "failed": len(self.failed),
            "seconds": round(time.monotonic() - self._started, 1),
            "benchmarks": self.figures,
            "apps": self.apps,
            "tests": self.tests,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{found['passed']} passed, {found['skipped']} skipped, {found['failed']} failed "
            f"in {found['seconds']} s; {RESULT}",
            flush=True,
        )


PARTS = {
    (): "all",
    ("--several",): "those of several ranks",
    ("--figures",): "figures of several ranks",
    ("--one",): "all, of one GPU",
}
"""Description of the checked parts, for each command line."""


def main(arguments: list[str]) -> int:
    """Run the parts that the command line selects, write the result, and return the exit status."""
    parts = PARTS.get(tuple(arguments))
    if parts is None:
        print(__doc__)
        return 2
    result = Result(parts)
    gpus = 1 if "--one" in arguments else result.gpus
    seen = [str(k) for k in range(result.gpus)] if "--one" in arguments else [None]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)

        def tested(job: Job) -> Callable[[], None]:
            return lambda: result.add(tests=job(scratch))

        is_whole = arguments not in (["--several"], ["--figures"])
        if "--figures" not in arguments:
            together, alone = several_ranks(gpus)
            on_each(seen, [*map(tested, together)], RANKS_AT_ONCE)
            on_each(seen, [*map(tested, alone)], 1)
        if is_whole:
            on_each(seen, [*map(tested, one_process(gpus))], AT_ONCE)

        def of_one() -> None:
            for name in ("strided", "nas_ft"):
                result.add(figures=measure(name, [f"tools.gpu.bench_{name}"], None, scratch))
            for name in ("milc", "pack", "transpose"):
                result.add(figures=targets(name, None, scratch))

        def of_several() -> None:
            result.apps += apps(gpus)
            for figures in (multigrid_figures, fourier_figures, milc_figures):
                result.add(figures=figures(result.apps))
            for ranks in measured_ranks(gpus):
                kinds = (
                    "exchange",
                    "allreduce",
                    "transpose",
                    *(("milc",) if ranks <= gpus else ()),
                )
                for kind in kinds:
                    result.add(figures=targets(kind, ranks, scratch))
            where = "--where", "1gpu" if gpus == 1 else "2gpus"
            result.add(figures=targets("scatter_gather", 2, scratch, where))

        on_each(seen, [of_several, of_one] if is_whole else [of_several], 1)
    result.ended = True
    result.write()
    for reason, tests in Counter(test["reason"] for test in result.skipped).items():
        print(f"{tests} skipped: {reason}")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
