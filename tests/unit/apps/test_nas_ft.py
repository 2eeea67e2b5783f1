"""The parts of the Fourier mini-app on one rank: random numbers, evolution, checksums, memory, checks, options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from apps import memory
from apps.nas_ft import options
from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.device_kernels import DeviceKernels
from apps.nas_ft.solver import Solver
from tests import support
from tests.unit.apps.apps_on_cpu import FOURIER, FakeCupy


class OnNumpy(DeviceKernels):
    """The GPU kernels on NumPy arrays; NumPy replaces CuPy's copies and sums."""

    def copy(self, values: np.ndarray, target: Any) -> None:
        target[...] = values

    def sums(self, samples: Any) -> np.ndarray:
        return samples.sum(axis=1)


@pytest.fixture(scope="module")
def device() -> FakeCupy:
    support.require("cxx")
    return FakeCupy(FOURIER)


@pytest.mark.parametrize("on", ["host", "device as C++"])
def test_official_checksums(
    on: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/mpi/test_nas_ft.py has the other classes."""
    support.require("mpi")
    from mpi4py import MPI

    if on != "host":
        kernels = OnNumpy(request.getfixturevalue("device"))
        monkeypatch.setattr("apps.nas_ft.solver.HostKernels", lambda: kernels)
    problem = CLASSES["S"]
    settings = options.Settings(problem, (1, 1, 1), 1, False, "cpu")
    with problem_grid(settings, MPI.COMM_SELF) as grid, Solver(grid, problem) as solver:
        for _ in range(2):  # a second run must not depend on the first
            solver.start()
            solver.forward()
            for _ in range(problem.iterations):
                solver.iterate()
            found = solver.checksums()
            assert max(problem.errors(found)) < 3e-13 and problem.is_verified(found)


class TestClasses:
    def test_every_iteration_counts(self) -> None:
        problem = CLASSES["C"]
        for number in range(problem.iterations):
            found = problem.checksums
            found[number] *= 1 + 3e-12j
            assert not problem.is_verified(found)
            found[number] = complex("nan")
            assert not problem.is_verified(found)
        assert problem.is_verified(problem.checksums * (1 + 5e-13))


class TestOptions:
    @staticmethod
    def settings(ranks: int, *words: str) -> options.Settings:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        return options.settings(parser.parse_args(words), ranks)

    @pytest.mark.parametrize(
        ("ranks", "words"),
        [(65, "--decomposition 1d"), (67, ""), (67, "--decomposition 2d"), (8192, "--class W")],
    )
    def test_ranks_that_do_not_fit(self, ranks: int, words: str) -> None:
        with pytest.raises(halox.errors.DecompositionError, match=str(ranks)):
            self.settings(ranks, *words.split())


V2 = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "inactive_file 50000"}
V2 |= {"job/memory.max": "max", "job/memory.current": "123"}
V1 = {
    "memory/job/memory.limit_in_bytes": "1000000",
    "memory/job/memory.usage_in_bytes": "1200000",
    "memory/job/memory.stat": "cache 7\ntotal_inactive_file 300000",
    "memory/memory.limit_in_bytes": "9223372036854771712",  # means "unlimited"
    "memory/memory.usage_in_bytes": "5",
    "memory/memory.stat": "cache 7",
}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        (None, {}, 4000 << 10),
        ("0::/", {}, 4000 << 10),
        ("0::/", V2, 350000),
        ("0::/job", V2, 350000),
        ("0::/job", {f"job/{name}": text for name, text in V2.items()}, 350000),
        ("5:cpu,cpuacct:/job\n4:memory:/job\n0::/job", V1, 100000),
    ],
)
def test_free_memory_within_control_groups(
    groups: str | None, files: dict[str, str], free: int, tmp_path: Path
) -> None:
    """Of a folder with the /proc and /sys files of a machine."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    files["proc/meminfo"] = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"
    if groups is not None:
        files["proc/self/cgroup"] = groups
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.host_free_bytes(tmp_path) == free
    assert 0 < memory.host_free_bytes() < 1 << 50
