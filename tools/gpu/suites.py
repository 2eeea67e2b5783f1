"""The launches into which the GPU check divides the GPU suite, and the outcomes of their tests."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launching import SHARED_CORES
from tools.gpu import outcomes
from tools.gpu.running import ROOT, run

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
ALONE = ("plan_memory", "tune")
"""Rank tests of free memory and of times."""
BY_THEMSELVES = (*ALONE, "bench", "allreduce", "paths", "nccl")
LAUNCHES = 3
"""On several GPUs each file in BY_THEMSELVES has a launch of its own, and the other files share LAUNCHES launches. A
launch takes 3 s."""
LAUNCHES_ON_ONE = 6
"""On one GPU the files in ALONE share a launch, each file in LONGEST_OF_RANKS has a launch of its own, and the others
share these launches."""
FAILING = ("ipc", "staged", "not ipc and not staged")
"""The failure tests on one GPU, divided by path among processes."""
LONGEST = tuple(
    f"{FOLDER}/test_{name}_gpu.py"
    for name in ("fft_examples", "bench", "milc", "nas_ft", "jacobi", "nas_mg", "packers")
)
LONGEST_OF_RANKS = (
    "allreduce",
    "paths",
    "random_programs",
    "checkerboards",
    "collecting",
    "milc",
    "bench",
)
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Environment that makes NCCL use sockets, as between nodes: no peer access, shared memory or InfiniBand."""
BY_SOCKETS = ("exchange", "graphs", "new_arrays", "nccl")


@dataclass(frozen=True)
class Suite:
    """Test files of one launch, on ``ranks`` ranks or in one process; ``how`` is appended to the names of the tests."""

    files: Sequence[str]
    ranks: int | None = None
    options: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    how: str = ""

    @property
    def name(self) -> str:
        """The files, options and ranks, for reports."""
        others = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        options = "".join(f" {option}" for option in self.options)
        return f"{self.files[0]}{others}{options} on {self.ranks or 1} rank(s){self.how}"

    def run(self, variables: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Run the tests, and return the outcome of each; a run that died or ran no test has a further, bad outcome.

        ``variables`` are added to the environment.
        """
        # --maxfail ends a broken suite early: a failing test on ranks may take HALOX_TIMEOUT seconds.
        command = ["-m", "pytest", "-q", "--maxfail=4", "-p", "no:cacheprovider"]
        command += ["-p", "tools.gpu.outcomes", *self.files, *self.options]
        command += ["-p", "halox.testing"] if self.ranks else []
        ranks = self.ranks or 1
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outcomes"
            environment = {**SHARED_CORES, **self.variables, **(variables or {})}
            environment["HALOX_OUTCOMES"] = str(file)
            status, said = run(command, self.ranks, environment)
            found, died_in = outcomes.read(file)
        for one in found:
            one["test"] += self.how
            one["ranks"] = ranks
        where = self.name
        if status != 0 or not found or died_in is not None:
            outcome = f"exit status {status}{f' in {died_in}' if died_in else ''}"
            found.append({"test": where, "ranks": ranks, "outcome": outcome})
            print(said)
        count = Counter(one["outcome"] for one in found)
        print(f"{where}: {count['passed']} of {len(found)} passed")
        if count["skipped"] == len(found):
            reasons = {one["reason"] for one in found}
            print(f"{where}: all skipped: {'; '.join(sorted(reasons))}")
        return found


def rank_files() -> list[str]:
    """Return the test files that run on ranks."""
    return sorted(
        file.relative_to(ROOT).as_posix() for file in (ROOT / RANKS_FOLDER).glob("test_*.py")
    )


def one_process(gpus: int) -> list[Suite]:
    """Return the suites that run in one process, the longest first.

    They include the rank tests on one rank. With one GPU they also include the failure tests, whose ranks mostly wait.
    """
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).glob("test_*.py")}
    others = sorted(files - {RANDOM_TYPES, FAILURES, NCCL_FAILURES, *LONGEST})
    failing = FAILING if gpus == 1 else ()
    of_ranks = rank_files()
    return [
        *(Suite(of_ranks[k::ON_ONE_RANK], 1) for k in range(ON_ONE_RANK)),
        *(Suite([FAILURES], options=["-k", paths]) for paths in failing),
        *(Suite([file]) for file in LONGEST),
        *(
            Suite([RANDOM_TYPES], options=["-s"], variables={"HALOX_RANDOM_SHARD": f"{k}/{SHARDS}"})
            for k in range(SHARDS)
        ),
        *(Suite([file]) for file in others),
    ]


def among(file: str, names: Sequence[str]) -> bool:
    """Whether the name of a test file contains one of these names."""
    return any(name in file for name in names)


def several_ranks(gpus: int) -> tuple[list[Suite], list[Suite]]:
    """Return two lists of suites on several ranks: suites that may run at the same time, longest first, and the others.

    On several GPUs only the failure tests, whose ranks mostly wait, may run at the same time: kernels that wait for
    each other must not share a GPU with another suite. Ranks that share one GPU have no kernels that wait, so that only
    tests of free memory or of times run alone.
    """
    names = ON_FOUR_GPUS if gpus >= 4 else ON_FOUR_RANKS
    on_four = [Suite([f"{RANKS_FOLDER}/test_{name}_gpu.py"], 4) for name in names]
    launches = LAUNCHES_ON_ONE if gpus == 1 else LAUNCHES
    separate = (*ALONE, *LONGEST_OF_RANKS) if gpus == 1 else BY_THEMSELVES
    files = rank_files()
    others = [file for file in files if not among(file, separate)]
    shared = [Suite(others[k::launches], 2) for k in range(launches)]
    if gpus == 1:
        longest = [Suite([file], 2) for file in files if among(file, LONGEST_OF_RANKS)]
        alone = [file for file in files if among(file, ALONE)]
        return [*longest, *shared, *on_four], [Suite(alone, 2)]
    by_themselves = [Suite([file], 2) for file in files if file not in others]
    by_sockets = [f"{RANKS_FOLDER}/test_{name}_gpu.py" for name in BY_SOCKETS]
    return [Suite([FAILURES]), Suite([NCCL_FAILURES])], [
        *by_themselves,
        *shared,
        *on_four,
        Suite(by_sockets, 2, ["-k", "nccl"], SOCKETS, ", by sockets"),
    ]
