"""The parts of the Fourier mini-app on one rank: random numbers, evolution, checksums, memory, checks, options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from apps import memory
from apps.nas_ft import host_kernels, initial, options
from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.device_kernels import DeviceKernels
from apps.nas_ft.host_kernels import HostKernels
from apps.nas_ft.solver import PARTS, Solver, sampled
from apps.nas_random_numbers import numbers
from halox.cli import catalogue, main
from tests import support
from tests.unit.apps_on_cpu import FOURIER, FakeCupy
from tests.unit.nvrtc import by_nvrtc

FT_CU = Path(options.__file__).with_name("ft.cu")

FIRST = (0.7945219111887383 + 0.8690652738745399j, 0.6476317284643329 + 0.7855626502289539j)
LAST = {
    "S": 0.1729437280659596 + 0.29926707752976256j,
    "W": 0.3523291219239155 + 0.16102969058785277j,
    "A": 0.0463909376625935 + 0.5764080823305591j,
    "B": 0.26738874802636303 + 0.3056189359072192j,
    "C": 0.15137998948144116 + 0.22246235021385985j,
}
# Shapes of grids and of blocks: single points, odd sizes, rows longer than a thread block.
SHAPES = [(1, 1, 1), (2, 2, 2), (3, 5, 70), (1, 9, 4), (40, 3, 6), (2, 129, 17)]


class OnNumpy(DeviceKernels):
    """The GPU kernels on NumPy arrays; NumPy replaces CuPy's copies and sums."""

    def copy(self, values: np.ndarray, target: Any) -> None:
        target[...] = values

    def sums(self, samples: Any) -> np.ndarray:
        return samples.sum(axis=1)


@pytest.fixture(scope="module")
def device() -> FakeCupy:
    support.require("cxx")
    return FakeCupy(FT_CU, FOURIER)


@pytest.fixture(params=["host", "host, small pieces", "device as C++"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "device as C++":
        return OnNumpy(request.getfixturevalue("device"))
    if request.param == "host, small pieces":
        monkeypatch.setattr(host_kernels, "PIECE", 50)
    return HostKernels()


def guarded(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return a field of NaN, and its memory with guards before and after it."""
    n = int(np.prod(shape))
    memory = np.full(n + 16, complex(np.nan, np.nan))
    return memory[8 : n + 8].reshape(shape), memory


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).random((2, *shape)) - 0.5
    return found[0] + 1j * found[1]


def initial_values(kernels: Any, shape: Any, owned: tuple[slice, ...]) -> np.ndarray:
    u, around = guarded(tuple(part.stop - part.start for part in owned))
    kernels.initial(u, initial.factors(shape, owned))()
    assert np.isnan(around[:8]).all() and np.isnan(around[-8:]).all()
    return u


class TestInitialValues:
    @pytest.mark.parametrize("name", LAST)
    def test_first_and_last_points(self, kernels: Any, name: str) -> None:
        shape = CLASSES[name].shape
        first = initial_values(kernels, shape, (slice(0, 1), slice(0, 1), slice(0, 2)))
        assert first.ravel().tolist() == list(FIRST)
        last = initial_values(kernels, shape, tuple(slice(n - 1, n) for n in shape))
        assert last.item() == LAST[name]

    @pytest.mark.parametrize("shape", SHAPES)
    def test_blocks_of_the_stream(self, kernels: Any, shape: tuple[int, int, int]) -> None:
        grid_shape = tuple(n + 3 for n in shape)
        stream = numbers(1, 2 * int(np.prod(grid_shape))) / 2**46
        whole = stream.view(np.complex128).reshape(grid_shape)
        for start in ((0, 0, 0), (3, 1, 2), (0, 3, 3)):
            owned = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            assert np.array_equal(initial_values(kernels, grid_shape, owned), whole[owned])


class TestEvolution:
    def test_arrays_that_would_go_wrong_are_refused(self, kernels: Any) -> None:
        factors = tuple(np.ones(4) for _ in range(3))
        for wrong in (random((4, 4, 4)).T, random((4, 4, 4)).real, random((4, 4))):
            with pytest.raises(ValueError, match="C-contiguous array of complex128"):
                kernels.evolve(wrong, factors, np.zeros(1, np.int64))
            with pytest.raises(ValueError, match="C-contiguous array of complex128"):
                kernels.initial(wrong, factors)


class TestChecksum:
    def test_a_block_without_points(self, kernels: Any) -> None:
        # Sampled points have z = 5 j mod 5 = 0; plane 1 has none.
        offsets = sampled((5, 5, 5), (slice(1, 2), slice(0, 5), slice(0, 5)))
        assert len(offsets) == 0
        samples = np.empty((2, 0), np.complex128)
        kernels.sample(random((1, 5, 5)), offsets, samples, np.array([1]))()
        assert kernels.sums(samples).tolist() == [0, 0]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_device_kernels_compile(architecture: str) -> None:
    flags = [f"-arch={architecture}", "-std=c++17"]
    assert not by_nvrtc(FT_CU.read_text(), "ft.cu", flags).log


@pytest.fixture
def solver_of() -> Iterator[Any]:
    """Yield a function that creates the solver of a problem class on one rank."""
    support.require("mpi")
    from mpi4py import MPI

    opened: list[Any] = []

    def make(name: str) -> Solver:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        words = ["--class", name, "--device", "cpu"]
        settings = options.settings(parser.parse_args(words), 1)
        grid = problem_grid(settings, MPI.COMM_SELF)
        solver = Solver(grid, settings.problem)
        opened.extend([grid, solver])
        return solver

    yield make
    for found in reversed(opened):
        found.close()


def checksums(solver: Solver, iterations: int) -> np.ndarray:
    solver.start()
    solver.forward()
    for _ in range(iterations):
        solver.iterate()
    return solver.checksums()


class TestSolver:
    @pytest.mark.parametrize("name", ["S", "W"])
    def test_official_checksums(self, name: str, solver_of: Any) -> None:
        problem, solver = CLASSES[name], solver_of(name)
        for _ in range(2):  # a second run must not depend on the first
            found = checksums(solver, problem.iterations)
            assert max(problem.errors(found)) < 3e-13
            assert problem.is_verified(found)

    def test_device_kernels_give_the_official_checksums(
        self, solver_of: Any, device: FakeCupy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("apps.nas_ft.solver.HostKernels", lambda: OnNumpy(device))
        problem, solver = CLASSES["S"], solver_of("S")
        device.calls.clear()
        assert problem.is_verified(checksums(solver, problem.iterations))
        # CUDA graphs need the same launches in every iteration.
        assert device.calls == ["initial", *["evolve", "sample"] * problem.iterations]

    def test_the_solver_replays_what_it_captured(
        self, solver_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log: list[str] = []
        stream = SimpleNamespace(
            begin_capture=lambda: log.append("begin"),
            end_capture=lambda: SimpleNamespace(launch=lambda _: log.append("launch")),
        )
        solver = solver_of("S")
        solver.start()
        monkeypatch.setattr(solver, "_stream", stream)
        monkeypatch.setattr(
            solver,
            "_iteration",
            tuple((name, lambda name=name: log.append(name)) for name in PARTS),
        )
        solver.iterate()
        solver.capture()
        solver.iterate()
        assert log == [*PARTS, "begin", *PARTS, "launch"]


class TestClasses:
    def test_operations(self) -> None:
        # From the tables of the original benchmark.
        expected = {"S": 1.771670e8, "W": 3.726727e8, "A": 7.136444e9, "B": 9.205359e10}
        expected |= {"C": 3.963882e11}
        for name, operations in expected.items():
            assert CLASSES[name].operations == pytest.approx(operations, rel=1e-6)

    def test_sizes(self) -> None:
        # Points along x, y and z, and iterations.
        expected = {"S": (64, 64, 64, 6), "W": (128, 128, 32, 6), "A": (256, 256, 128, 6)}
        expected |= {"B": (512, 256, 256, 20), "C": (512, 512, 512, 20)}
        expected |= {"D": (2048, 1024, 1024, 25)}
        found = {p.name: (*p.shape[::-1], p.iterations) for p in CLASSES.values()}
        assert found == expected
        for problem in CLASSES.values():
            assert len(problem.checksums) == problem.iterations
            assert max(problem.shape) < 65536  # CUDA's limit on blocks along y and z

    def test_every_iteration_counts(self) -> None:
        problem = CLASSES["C"]
        for number in range(problem.iterations):
            found = problem.checksums
            found[number] *= 1 + 3e-12j
            assert not problem.is_verified(found)
            assert [error > 1e-12 for error in problem.errors(found)].index(True) == number
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
        ("ranks", "words", "expected"),
        [
            (1, "", (1, 1, 1)),
            (7, "", (7, 1, 1)),
            (64, "", (64, 1, 1)),
            (96, "", (8, 12, 1)),
            (4096, "", (64, 64, 1)),
            (6, "--decomposition 2d", (2, 3, 1)),
            (16, "--decomposition 2d", (4, 4, 1)),
            (5, "--decomposition 2d", (1, 5, 1)),
            (4096, "--class W", (32, 128, 1)),
        ],
    )
    def test_process_grids(self, ranks: int, words: str, expected: tuple[int, ...]) -> None:
        assert self.settings(ranks, *words.split()).proc_shape == expected

    @pytest.mark.parametrize(
        ("ranks", "words", "text"),
        [
            (65, "--decomposition 1d", "class S has 64 slabs at most, and 65 ranks"),
            (67, "", "class S cannot be divided in pencils among 67 ranks"),
            (67, "--decomposition 2d", "at most 64 parts along z and 64 along y is 67"),
            (8192, "--class W", "use another number of ranks or a larger --class"),
        ],
    )
    def test_ranks_that_do_not_fit(self, ranks: int, words: str, text: str) -> None:
        with pytest.raises(halox.errors.DecompositionError, match=text):
            self.settings(ranks, *words.split())

    @pytest.mark.parametrize(
        "words", [["--class", "E"], ["--decomposition", "3d"], ["--passes", "0"]]
    )
    def test_wrong_words(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            self.settings(1, *words)
        assert words[0] in capsys.readouterr().err


class TestMemory:
    @staticmethod
    def machine(root: Path, groups: str, **contents: str) -> Path:
        """Create a folder with the /proc and /sys files of a machine; "__" in argument names stands for "/"."""
        files = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"}
        files["proc/self/cgroup"] = groups
        files |= {f"sys/fs/cgroup/{name}": text for name, text in contents.items()}
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    def test_of_the_host(self, tmp_path: Path) -> None:
        assert memory.host_free_bytes(self.machine(tmp_path, "0::/\n")) == 4000 << 10

    @pytest.mark.parametrize("where", ["user/job", "user", ""])
    def test_limit_of_a_group_or_of_one_above(self, tmp_path: Path, where: str) -> None:
        files = {
            "memory.max": "1000000\n",
            "memory.current": "700000\n",
            "memory.stat": "anon 5\ninactive_file 50000\n",
        }
        files = {f"{where}/{name}".lstrip("/"): text for name, text in files.items()}
        files["user/job/memory.current"] = files.get("user/job/memory.current", "123\n")
        files["user/job/memory.max"] = files.get("user/job/memory.max", "max\n")
        root = self.machine(tmp_path, "0::/user/job\n", **files)
        assert memory.host_free_bytes(root) == 350000

    def test_limit_of_the_first_version(self, tmp_path: Path) -> None:
        files = {
            "memory/job/memory.limit_in_bytes": "1000000\n",
            "memory/job/memory.usage_in_bytes": "1200000\n",
            "memory/job/memory.stat": "cache 7\ntotal_inactive_file 300000\n",
            # This number means "unlimited".
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
            "memory/memory.stat": "cache 7\n",
        }
        groups = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/job\n"
        assert memory.host_free_bytes(self.machine(tmp_path, groups, **files)) == 100000

    def test_no_groups(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, "")
        (root / "proc/self/cgroup").unlink()
        assert memory.host_free_bytes(root) == 4000 << 10

    def test_of_this_machine(self) -> None:
        assert 0 < memory.host_free_bytes() < 1 << 50


class TestCommand:
    def test_on_one_rank_in_this_process(self, capsys: pytest.CaptureFixture[str]) -> None:
        support.require("mpi")
        words = "run nas_ft --class S --device cpu --json --passes 2"
        assert main(words.split()) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["verified"] is True and figures["relative_error"] <= 1e-12
        assert figures["mops"] == pytest.approx(177.1670 / figures["time_s"], rel=1e-6)
        found = [complex(one["re"], one["im"]) for one in figures["checksums"]]
        assert CLASSES["S"].is_verified(found)
        assert [row["part"] for row in figures["rows"][:3]] == list(PARTS)
        assert sum(row["share"] for row in figures["rows"][:3]) == pytest.approx(1)
        assert figures["process_grid"] == [1, 1, 1] and figures["points"] == [64, 64, 64]

    @pytest.mark.parametrize("iteration", [0, 5])
    def test_a_wrong_checksum_is_a_failing_status(
        self, iteration: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        catalogue.load("nas_ft")
        theirs = import_module(f"{catalogue.PACKAGE}.nas_ft.classes")
        official = list(theirs.CHECKSUMS["S"])
        official[iteration] += 1e-8
        monkeypatch.setitem(theirs.CHECKSUMS, "S", tuple(official))
        assert main(["run", "nas_ft", "--class", "S", "--device", "cpu"]) == 1
        said = capsys.readouterr().out
        assert "verified: NO" in said
        (line,) = [line for line in said.splitlines() if line.startswith("relative error")]
        assert 1.3e-11 < float(line.split()[-1]) < 1.5e-11

    def test_a_wrong_result_is_a_failing_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        catalogue.load("nas_ft")
        theirs = import_module(f"{catalogue.PACKAGE}.nas_ft.solver")
        monkeypatch.setattr(theirs, "DECAY", theirs.DECAY * (1 + 1e-9))
        assert main(["run", "nas_ft", "--class", "S", "--device", "cpu"]) == 1
        assert "verified: NO" in capsys.readouterr().out

    def test_memory_that_is_not_there(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        catalogue.load("nas_ft")
        theirs = import_module(f"{catalogue.PACKAGE}.memory")
        monkeypatch.setattr(theirs, "host_free_bytes", lambda: 50 << 30)
        made: list[str] = []
        benchmark = import_module(f"{catalogue.PACKAGE}.nas_ft.benchmark")
        monkeypatch.setattr(benchmark, "Solver", lambda *_: made.append("solver"))
        assert main(["run", "nas_ft", "--class", "D", "--device", "cpu"]) == 2
        said = capsys.readouterr().err
        assert (
            "class D needs 64 GiB of memory on" in said
            and "for 1 rank(s), and 50 GiB are free there" in said
        )
        assert not made

    def test_a_graph_needs_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        support.require("mpi")
        assert main(["run", "nas_ft", "--graph", "--device", "cpu"]) == 2
        assert "--graph needs GPUs" in capsys.readouterr().err
