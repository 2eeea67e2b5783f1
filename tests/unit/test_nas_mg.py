"""The parts of the multigrid mini-app on one rank: operators, random numbers, cycle, checks, options."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from apps import nas_random_numbers
from apps.capture import captured
from apps.nas_mg import cycle, host_kernels, options, random_numbers
from apps.nas_mg.benchmark import Solver
from apps.nas_mg.classes import CLASSES, FIRST_NORMS, OPERATOR
from apps.nas_mg.device_kernels import DeviceKernels
from apps.nas_mg.hierarchy import Hierarchy, finest_grid
from apps.nas_mg.host_kernels import HostKernels
from halox.cli import catalogue, main
from tests import support
from tests.unit.apps_on_cpu import MULTIGRID, FakeCupy
from tests.unit.nvrtc import by_nvrtc

MG_CU = Path(options.__file__).with_name("mg.cu")


# Published 1-based (x, y, z) of the ten largest random numbers, largest first, and the ten smallest, smallest first.
CHARGES = {
    "S": (
        "(8,2,21) (20,30,32) (3,1,4) (5,23,4) (2,17,22) (22,32,7) (13,16,13) (31,5,26) (29,1,29) (18,27,18)",
        "(1,12,3) (14,9,18) (6,15,1) (5,29,16) (13,3,2) (6,18,9) (21,20,12) (27,16,32) (9,26,23) (8,15,27)",
    ),
    "W": (
        "(114,86,51) (128,46,33) (15,111,119) (35,22,101) (30,18,110) (28,49,12) (81,91,21) (27,85,74) "
        "(40,33,2) (116,87,21)",
        "(16,23,124) (103,118,60) (15,122,76) (110,88,122) (10,2,22) (96,35,55) (39,127,13) (93,84,36) "
        "(71,3,65) (115,104,6)",
    ),
    "A": (
        "(53,208,39) (242,171,13) (202,17,197) (201,82,208) (114,122,206) (211,6,247) (44,193,233) "
        "(175,245,163) (4,117,174) (56,119,166)",
        "(222,41,239) (153,161,35) (81,183,254) (249,169,156) (198,6,202) (91,62,204) (16,204,31) "
        "(100,155,58) (101,137,111) (210,153,97)",
    ),
}
LARGEST = {
    "S": (5.6673957039446e-02, 2.0223500301609e-02, 2.9748567774337e-03, 1.1217668764697e-03)
}


@pytest.fixture(scope="module")
def device() -> FakeCupy:
    support.require("cxx")
    return FakeCupy(MG_CU, MULTIGRID)


@pytest.fixture(scope="module")
def device_kernels(device: FakeCupy) -> DeviceKernels:
    return DeviceKernels(device)


@pytest.fixture(params=["host", "host, small pieces", "device as C++"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "device as C++":
        return request.getfixturevalue("device_kernels")
    if request.param == "host, small pieces":
        monkeypatch.setattr(host_kernels, "PIECE", 50)
    return HostKernels()


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) - 0.5


def by_27_points(u: np.ndarray, weights: tuple[float, ...]) -> np.ndarray:
    """Apply a stencil by its definition; an offset's weight depends on the number of its nonzero components."""
    total = np.zeros(tuple(n - 2 for n in u.shape))
    for offset in itertools.product((-1, 0, 1), repeat=3):
        moved = tuple(slice(1 + o, n - 1 + o) for o, n in zip(offset, u.shape, strict=True))
        total += weights[sum(map(abs, offset))] * u[moved]
    return total


class TestOperators:
    def test_arrays_that_would_go_wrong_are_refused(self, kernels: Any) -> None:
        u, v = random((6, 6, 6)), random((6, 6, 6))
        with pytest.raises(ValueError, match="contiguous"):
            kernels.stencil(u, v.transpose(), v, OPERATOR)
        with pytest.raises(ValueError, match="must differ"):
            kernels.stencil(u, v, u, OPERATOR)


def test_walks_of_many_planes(
    device_kernels: DeviceKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread walks along a few planes, as on large grids; the last walk is shorter."""
    monkeypatch.setattr("apps.nas_mg.device_kernels.planes_per_thread", lambda *_: 4)
    u, v = random((12, 7, 9)), random((12, 7, 9), 1)
    expected = v[1:-1, 1:-1, 1:-1] + by_27_points(u, OPERATOR)
    device_kernels.stencil(u, v, v, OPERATOR)()
    np.testing.assert_allclose(v[1:-1, 1:-1, 1:-1], expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_device_kernels_compile(architecture: str) -> None:
    flags = [f"-arch={architecture}", "-std=c++17"]
    assert not by_nvrtc(MG_CU.read_text(), "mg.cu", flags).log


class TestRandomNumbers:
    @pytest.mark.parametrize("first", [2, 17, 5000, 10**12 + 7])
    def test_jump_ahead(self, first: int) -> None:
        x = 314159265
        if first <= 5000:
            for _ in range(first):
                x = x * 5**13 % 2**46
        else:
            x = x * pow(5**13, first, 2**46) % 2**46
        expected = []
        for _ in range(50):
            expected.append(x)
            x = x * 5**13 % 2**46
        assert nas_random_numbers.numbers(first, 50).tolist() == expected

    @pytest.mark.parametrize("name", CHARGES)
    @pytest.mark.parametrize("parts", [(1, 1, 1), (2, 2, 2), (4, 1, 2)])
    def test_charges(self, name: str, parts: tuple[int, ...]) -> None:
        points = CLASSES[name].points
        found = [
            random_numbers.extremes(
                points,
                [
                    slice(at * points // p, (at + 1) * points // p)
                    for at, p in zip(place, parts, strict=True)
                ],
            )
            for place in np.ndindex(*parts)
        ]

        class Comm:
            def allgather(self, mine: Any) -> Any:
                return found

        everything = (slice(0, points),) * 3
        for places, expected in zip(
            random_numbers.charges(points, everything, Comm()), CHARGES[name], strict=True
        ):
            text = " ".join(f"({x},{y},{z})" for z, y, x in (places + 1).tolist())
            assert text == expected

    def test_fewer_points_than_charges(self) -> None:
        largest, smallest = random_numbers.extremes(2, (slice(0, 2), slice(1, 2), slice(0, 2)))
        every = nas_random_numbers.numbers(1, 8)[[2, 3, 6, 7]]
        assert largest[:, 0].tolist() == sorted(every.tolist(), reverse=True)
        assert smallest[:, 0].tolist() == sorted(every.tolist())
        assert sorted(largest[:, 1].tolist()) == [2, 3, 6, 7]


@pytest.fixture
def solver_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a function that creates the solver of a problem class on one rank."""
    support.require("mpi")
    from mpi4py import MPI

    opened: list[Any] = []

    def make(name: str) -> tuple[Solver, Hierarchy]:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        settings = options.settings(parser.parse_args(["--class", name]), 1)
        grid = finest_grid(settings.problem.points, (1, 1, 1), MPI.COMM_SELF, "cpu")
        hierarchy = Hierarchy(grid, settings.gather)
        opened.extend([grid, hierarchy])
        return Solver(hierarchy, settings), hierarchy

    yield make
    for found in reversed(opened):
        found.close()


class TestCycle:
    @pytest.mark.parametrize("name", ["S", "W"])
    def test_norms_after_every_iteration(self, name: str, solver_of: Any) -> None:
        solver, _ = solver_of(name)
        points = CLASSES[name].points
        for _ in range(2):  # a second run must not depend on the first
            solver.start()
            solver.first_residual()
            assert solver.norm() == pytest.approx((20 / points**3) ** 0.5, rel=1e-15)
            assert solver.largest() == 1
            for number, expected in enumerate(FIRST_NORMS[name]):
                solver.iterate()
                assert solver.norm() == pytest.approx(expected, rel=1e-11)
                if name in LARGEST:
                    assert solver.largest() == pytest.approx(LARGEST[name][number], rel=1e-11)
        assert CLASSES[name].is_verified(solver.norm())

    def test_device_kernels_give_the_official_norm(
        self, solver_of: Any, device: FakeCupy, device_kernels: DeviceKernels
    ) -> None:
        solver, hierarchy = solver_of("S")
        iteration = cycle.iteration(hierarchy, device_kernels, CLASSES["S"].smoother)
        solver.start()
        solver.first_residual()
        launches = []
        for _ in range(4):
            device.calls.clear()
            cycle.run(iteration)
            launches.append(tuple(device.calls))
        assert CLASSES["S"].is_verified(solver.norm())
        # CUDA graphs need the same launches in every iteration, whatever the values.
        assert len(set(launches)) == 1
        levels = CLASSES["S"].levels
        assert launches[0].count("restriction") == launches[0].count("prolongation") == levels - 1
        assert launches[0].count("stencil") == 2 * levels

    def test_as_many_exchanges_as_the_original(self, solver_of: Any) -> None:
        for name in ("S", "W"):
            _, hierarchy = solver_of(name)
            steps = cycle.iteration(hierarchy, HostKernels(), CLASSES[name].smoother)
            levels = CLASSES[name].levels
            assert sum(step.part == "exchange" for step in steps) == 3 * levels - 1
            assert {step.part for step in steps} <= set(cycle.PARTS)
            assert {step.level for step in steps} == set(range(1, levels + 1))


class FakeStream:
    """Records the beginning and the end of a capture, and launches."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_capture(self) -> None:
        self.log.append("begin")

    def end_capture(self) -> FakeStream:
        self.log.append("end")
        return self

    def launch(self, stream: FakeStream) -> None:
        assert stream is self
        self.log.append("launch")


class TestCapture:
    def test_work_is_captured_once_and_replayed(self) -> None:
        stream = FakeStream()
        replay = captured(lambda: stream.log.append("work"), stream)
        assert stream.log == ["begin", "work", "end"]
        replay()
        replay()
        assert stream.log == ["begin", "work", "end", "launch", "launch"]

    def test_a_refusal_ends_the_capture(self) -> None:
        stream = FakeStream()

        def refuse() -> None:
            raise halox.errors.StateError("the staged path cannot be captured")

        with pytest.raises(halox.errors.StateError, match="staged"):
            captured(refuse, stream)
        assert stream.log == ["begin", "end"]

    def test_the_solver_replays_what_it_captured(
        self, solver_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        solver, _ = solver_of("S")
        stream = FakeStream()
        monkeypatch.setattr(solver, "_stream", stream)
        done = []
        monkeypatch.setattr(cycle, "run", lambda steps: done.append(len(steps)))
        solver.iterate()
        solver.capture()
        assert stream.log == ["begin", "end"] and len(done) == 2
        solver.iterate()
        assert stream.log[2:] == ["launch"] and len(done) == 2


class TestClasses:
    def test_operations(self) -> None:
        # From the tables of the original benchmark.
        expected = {"S": 7.602176e6, "W": 4.865393e8, "A": 3.892314e9, "B": 1.946157e10}
        expected |= {"C": 1.556926e11, "D": 3.113851e12}
        for name, operations in expected.items():
            assert CLASSES[name].operations == pytest.approx(operations, rel=1e-6)

    def test_first_norms_end_at_the_official_ones(self) -> None:
        for name in ("S", "W", "A"):
            assert CLASSES[name].is_verified(FIRST_NORMS[name][-1])

    def test_not_a_number_is_never_verified(self) -> None:
        assert not CLASSES["S"].is_verified(float("nan"))


class TestOptions:
    @staticmethod
    def settings(ranks: int, *words: str) -> options.Settings:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        return options.settings(parser.parse_args(words), ranks)

    def test_process_grids_are_the_originals(self) -> None:
        # The original's grids, along x, y, z: 1 x 1 x 2, 1 x 2 x 2, 2 x 2 x 2, 2 x 2 x 4, 2 x 4 x 4, ...
        expected = {2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (4, 2, 2), 32: (4, 4, 2)}
        expected |= {64: (4, 4, 4), 128: (8, 4, 4)}
        for ranks, shape in expected.items():
            assert options.process_grid(ranks) == shape

    @pytest.mark.parametrize(
        ("ranks", "text"), [(3, "-n 2 or -n 4"), (6, "-n 4 or -n 8"), (8**5, "32 in a row")]
    )
    def test_ranks_that_do_not_do(self, ranks: int, text: str) -> None:
        with pytest.raises(halox.errors.DecompositionError, match=text):
            self.settings(ranks)

    @pytest.mark.parametrize("words", [["--class", "E"], ["--gather", "-1"], ["--passes", "0"]])
    def test_wrong_words(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            self.settings(1, *words)
        assert words[0] in capsys.readouterr().err


class TestCommand:
    def test_on_one_rank_in_this_process(self, capsys: pytest.CaptureFixture[str]) -> None:
        support.require("mpi")
        words = "run nas_mg --class S --device cpu --json --passes 2"
        assert main(words.split()) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["verified"] is True
        assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}
        assert figures["mops"] == pytest.approx(7.602176 / figures["time_s"], rel=1e-6)
        assert [row["part"] for row in figures["rows"]] == [*cycle.PARTS, "norm (once)"]
        assert sum(row["share"] for row in figures["rows"][:-1]) == pytest.approx(1)
        assert figures["exchanged_bytes_an_iteration"] == 0

    def test_an_unverified_result_is_a_failing_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support.require("mpi")
        words = "run nas_mg --class S --device cpu --check"
        assert main([*words.split(), "none"]) == 1
        catalogue.load("nas_mg")
        theirs = import_module(f"{catalogue.PACKAGE}.nas_mg.cycle")
        slightly_wrong = (8 / 3, 0.0, -1 / 6, -1 / 12 + 1e-9)
        monkeypatch.setattr(theirs, "_MINUS_OPERATOR", slightly_wrong)
        assert main([*words.split(), "official"]) == 1
        assert "verified: NO" in capsys.readouterr().out

    def test_a_graph_needs_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        support.require("mpi")
        assert main(["run", "nas_mg", "--graph", "--device", "cpu"]) == 2
        assert "--graph needs GPUs" in capsys.readouterr().err
