"""``halox bench allreduce``: cases, the check of results, rows, figures with targets, the command, its kernel."""

from __future__ import annotations

import ctypes
import functools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox.errors import HaloxError
from halox_bench.allreduce import plots as allreduce_plots
from halox_bench.allreduce import targets
from halox_bench.allreduce.baselines import HOST_STAGED, MPI, NCCL
from halox_bench.allreduce.cases import AllreduceCase, AllreduceOracle, cases
from halox_bench.allreduce.rows import AllreduceRow, calls_to_pay, header, line, paid
from halox_bench.allreduce.targets import (
    MEDIUM,
    SHARED_BYTES,
    Targets,
    measure,
)
from halox_bench.common.kernels import source
from halox_bench.common.sizes import MIB, nbytes_of, size_label
from tests.gpu.check import multigrid_figures
from tests.support import halox_bench, require
from tests.unit.cpu_kernels import SHIM, shared_library
from tests.unit.lone_rank import alone

# Of Python's own numbers: the integers of a dtype wrap around afterwards.
BY_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "logical_and": lambda a, b: int(bool(a) and bool(b)),
    "logical_or": lambda a, b: int(bool(a) or bool(b)),
    "logical_xor": lambda a, b: int(bool(a) != bool(b)),
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}
DTYPES = {"b1": "min", "i1": "sum", "u2": "prod", "i8": "max", "f4": "sum", "f8": "prod"}
CASES = [
    *(AllreduceCase(n, dtype, op) for dtype, op in DTYPES.items() for n in (1, 37)),
    *(AllreduceCase(29, "i4", op) for op in BY_PYTHON),
    *(AllreduceCase(29, "b1", op) for op in BY_PYTHON if op not in ("sum", "prod")),
    *(AllreduceCase(29, "c8", op) for op in ("sum", "prod")),
]


def combined(case: AllreduceCase, sources: list[np.ndarray]) -> np.ndarray:
    found = [
        functools.reduce(BY_PYTHON[case.op], numbers)
        for numbers in zip(*(source.tolist() for source in sources), strict=True)
    ]
    if case.op.startswith("logical") and len(sources) == 1:
        found = [int(bool(number)) for number in found]
    wrapped = np.array(found, object)
    kind, bits = np.dtype(case.dtype).kind, 8 * np.dtype(case.dtype).itemsize
    if kind in "iu":
        wrapped %= 1 << bits
        return wrapped.astype(f"u{bits // 8}").view(case.dtype)
    return wrapped.astype(case.dtype)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestOracle:
    def filled(self, case: AllreduceCase, ranks: int, step: int) -> tuple[Any, Any]:
        sources, targets = (
            [np.zeros(case.elements, case.dtype) for _ in range(ranks)] for _ in range(2)
        )
        for rank in range(ranks):
            AllreduceOracle(case, rank, ranks).fill(sources[rank], targets[rank], step)
        return sources, targets

    def test_knows_what_python_gives(self, case: AllreduceCase, ranks: int) -> None:
        oracle = AllreduceOracle(case, 0, ranks)
        for step in (1, 2, 3):
            sources, targets = self.filled(case, ranks, step)
            result = combined(case, sources)
            assert oracle.wrong(targets[0], step) == case.elements, "nothing is right before"
            assert oracle.wrong(result, step) == 0
            # Any order gives the same.
            assert oracle.wrong(combined(case, sources[::-1]), step) == 0
            if case.elements > 1 and ranks > 1:
                assert oracle.wrong(result, step + 1) > 0, "the last call's values are wrong"

    def test_one_wrong_value_anywhere_is_seen(self, case: AllreduceCase, ranks: int) -> None:
        sources, _ = self.filled(case, ranks, 1)
        result = combined(case, sources)
        for at in range(case.elements):
            spoilt = result.copy()
            spoilt[at] = not spoilt[at] if case.dtype == "b1" else spoilt[at] + 1
            assert AllreduceOracle(case, 0, ranks).wrong(spoilt, 1) == 1


def test_parts_of_a_large_array_cannot_be_mixed_up() -> None:
    case = AllreduceCase(3 * AllreduceOracle.PERIOD + 100, "u1", "sum")
    source, target = np.zeros(case.elements, "u1"), np.zeros(case.elements, "u1")
    oracle = AllreduceOracle(case, 0, 1)
    oracle.fill(source, target, 1)
    assert oracle.wrong(target, 1) == case.elements and oracle.wrong(source, 1) == 0
    for power in range(17):
        assert oracle.wrong(np.roll(source, 1 << power), 1) > case.elements // 2
    source[-1] += 1
    assert oracle.wrong(source, 1) == 1


class TestCases:
    def test_without_options(self) -> None:
        found = cases()
        floats = [case for case in found if case.dtype == "f4"]
        assert [floats[0].nbytes, floats[-1].nbytes] == [4, 128 * MIB] and len(floats) > 10
        assert {case.dtype for case in found if case.elements == 1} == {"f4", "f8", "c16", "i8"}
        assert 3 < len(cases(quick=True)) < 7

    def test_combinations(self) -> None:
        found = cases(("4", "8", "1KiB"), ("f8", "i2"), ("min", "max"))
        assert [(case.elements, case.dtype, case.op) for case in found] == [
            (n, dtype, op)
            for dtype, sizes in (("f8", (1, 128)), ("i2", (2, 4, 512)))
            for op in ("min", "max")
            for n in sizes
        ]
        assert cases((), ("f8",))[-1].nbytes == 128 * MIB

    @pytest.mark.parametrize("nbytes", [1, 8, 1000, 1 << 13, 3 << 19, 128 << 20])
    def test_sizes_are_read_as_they_are_written(self, nbytes: int) -> None:
        assert nbytes_of(size_label(nbytes)) == nbytes

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ((("0",),), "--sizes 0: expected bytes"),
            ((("8kB",),), "--sizes 8kB: expected bytes"),
            ((("KiB",),), "expected bytes"),
            (((), ("floaty",)), "--dtype floaty"),
            (((), ("f2",)), "float16 cannot be reduced"),
            (((), ("f4",), ("bitwise_or",)), "no meaning for dtype float32"),
            (((), (), ("mean",)), "op must be one of"),
        ],
    )
    def test_what_is_no_case(self, words: tuple[Any, ...], text: str) -> None:
        with pytest.raises(HaloxError, match=text):
            cases(*words)


def row(kind: str, name: str, us: float | None, **others: Any) -> AllreduceRow:
    return AllreduceRow(1, 8, "f8", "sum", case="8B f8 sum", kind=kind, name=name, us=us, **others)


class TestRows:
    @pytest.mark.parametrize("setup", [0.5, 3.0, 1000.0])
    @pytest.mark.parametrize(("us", "theirs"), [(1.0, 1.5), (4.0, 400.0), (7.0, 7.001)])
    def test_set_up_is_made_up_for(self, setup: float, us: float, theirs: float) -> None:
        calls = calls_to_pay(setup, us, theirs)
        assert calls is not None and setup + calls * us <= calls * theirs * (1 + 1e-12)
        assert calls == 1 or setup + (calls - 1) * us > (calls - 1) * theirs

    def test_paid(self) -> None:
        near = {NCCL: 5.0, HOST_STAGED: 60.0}
        rows = paid(
            [
                row("selected", "selected", 10.0, setup_us=1000.0, beside=near),
                row("baseline", NCCL, 5.0, beside=near),
                row("algorithm", "binomial", None, error="no"),
            ]
        )
        assert [one.pays_after for one in rows] == [{NCCL: None, HOST_STAGED: 20}, {}, {}]

    def test_lines_are_aligned(self) -> None:
        ours = row("algorithm", "oneshot", 4.0, setup_us=90.0, pays_after={MPI: 3})
        for shown in (line(ours, 2.0, MPI), line(row("baseline", MPI, 8.0), 2.0, MPI)):
            assert shown.index(" x") == header().index("halox over it") + 4
        assert line(ours, None, NCCL).endswith("never")
        assert line(row("algorithm", "oneshot", None, error="no\nmore"), None).endswith("  no")
        broken = row("algorithm", "oneshot", None, error="why", failed=True)
        assert line(broken, None).endswith("FAILED: why")

    def test_plots(self, tmp_path: Path) -> None:
        rows = [row("selected", "selected", 3.0, pays_after={MPI: 7}), row("baseline", MPI, 9.0)]
        larger = [replace(r, nbytes=64, case="64B") for r in rows]
        drawn = allreduce_plots.draw([*rows, *larger], tmp_path / "new", MPI)
        assert [path.name for path in drawn] == [
            "allreduce-f8-sum.png",
            "allreduce-f8-sum-set-up.png",
        ]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


class TestCommand:
    def test_two_ranks(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.json"
        ended = halox_bench(
            *("allreduce", "-n", "2", "--device", "cpu", "--sizes", "4,3000,1MiB"),
            *("--dtype", "f4,i8", "--op", "sum", "--repeats", "1"),
            *("--json", str(file), "--plot", str(tmp_path / "plots")),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        result = json.loads(file.read_text())
        rows = result["rows"]
        assert result["machine"]["ranks"] == 2 and len(rows) == 6 * 4
        assert {r["name"] for r in rows} == {"selected", "host", "hierarchical", MPI}
        assert all(r["us"] > 0 and r["checked"] and not r["error"] for r in rows)
        assert {r["nbytes"] for r in rows} == {4, 8, 3000, MIB}
        for r in rows:
            assert list(r["beside"]) == [MPI]
            if r["kind"] == "baseline":
                assert r["setup_us"] is None and r["pays_after"] == {}
            else:
                assert r["setup_us"] > 0 and r["first_setup_us"] > 0 and r["algorithm"]
                calls = calls_to_pay(r["setup_us"], r["us"], r["beside"][MPI])
                assert r["pays_after"] == {MPI: calls}
        assert len(result["chosen_over_best"]["cases"]) == 6
        assert "chosen algorithm over best algorithm" in ended.stdout
        assert len(list((tmp_path / "plots").glob("allreduce-*-sum.png"))) == 2

    def test_one_rank_in_this_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        words = (
            "bench allreduce --device cpu --sizes 8 --algorithms host --repeats 1 --no-baselines"
        )
        assert main([*words.split(), "--json", str(tmp_path / "x.json")]) == 0
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert [(r["name"], r["algorithm"]) for r in rows] == [
            ("selected", rows[0]["algorithm"]),
            ("host", "host"),
        ]
        assert "8B f4 sum" in capsys.readouterr().out

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "allreduce", "--list"]) == 0
        assert {"4B f4 sum", "128MiB f4 sum", "8B f8 max"} <= set(
            capsys.readouterr().out.splitlines()
        )

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("--sizes 0", "expected bytes"),
            ("--dtype f4 --op bitwise_and", "no meaning"),
            ("--device cpu --sizes 8 --algorithms magic", "expected host, hierarchical"),
            ("--targets --device cpu", "needs a GPU"),
            ("--device cpu --sizes 8 --json /no/such/x.json", "no such folder"),
        ],
    )
    def test_wrong_command_lines(
        self, words: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        require("mpi")
        assert main(["bench", "allreduce", *words.split()]) == 2
        assert text in capsys.readouterr().err


class FakeBench:
    """Rows whose times are a latency and the bytes at a speed; NCCL only where the ranks have a GPU each."""

    def __init__(self, *, shared: bool = False, size: int = 2, failed: str = "") -> None:
        self.shared_gpu, self.failed = shared, failed
        self.comm = alone(size)
        self.stage: Any = None
        self.clock: Any = None
        self.seen: list[int] = []

    def measure(self, case: AllreduceCase) -> list[AllreduceRow]:
        self.seen.append(case.nbytes)
        us = {"selected": 4.0 + case.nbytes / 4e5, HOST_STAGED: 20.0 + case.nbytes / 1e4}
        us |= {} if self.shared_gpu else {NCCL: 8.0 + case.nbytes / 4e5}
        found = []
        for name, streamed in us.items():
            kind = "selected" if name == "selected" else "baseline"
            common = (case.elements, case.nbytes, case.dtype, case.op)
            modes = {"stream": streamed}
            if not self.shared_gpu and name != HOST_STAGED:
                modes["graph"] = streamed / 2
            if case.elements == 1:
                modes["value"] = streamed + 9
            for mode, time in modes.items():
                bad = name == self.failed
                found.append(
                    AllreduceRow(
                        *common,
                        **{"case": case.name, "kind": kind, "name": name, "path": "oneshot"},
                        mode=mode,
                        us=None if bad else time,
                        failed=bad,
                        error="bad",
                    )
                )
        return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    require("mpi")

    def none(self: Any) -> Iterator[Any]:
        return iter(())

    for name in ("over_launch", "norm", "jacobi", "choice"):
        monkeypatch.setattr(Targets, name, none)

    def run(budget_s: float = 60.0, **options: Any) -> dict[str, Any]:
        bench = FakeBench(**options)
        monkeypatch.setattr(targets, "AllreduceBench", lambda comm, options: bench)
        found = measure(bench.comm, budget_s=budget_s)
        measured_once = len(bench.seen) == len(set(bench.seen))
        assert measured_once or bench.failed
        json.dumps(found, allow_nan=False)
        return {one["name"]: one for one in found}

    return run


class TestTargets:
    def test_a_gpu_each(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures()
        one = {
            what: found[f"allreduce of one float64, 2 ranks, {what}"]
            for what in ("in a stream", "in a graph", "each read by the host")
        }
        assert [(f["target"], f["met"]) for f in one.values()] == [
            (5.0, True),
            (2.0, False),
            (None, None),
        ]
        assert [f["baseline"] for f in one.values()] == [8.0, 4.0, 17.0]
        for nbytes in MEDIUM:
            name = f"allreduce of {size_label(nbytes)} float64, 2 ranks, in a stream: over {NCCL}"
            wanted = (4 + nbytes / 4e5) / (8 + nbytes / 4e5)
            assert found[name]["value"] == pytest.approx(wanted, abs=1e-4)
            assert found[name]["target"] == 0.67 and found[name]["met"] is (wanted <= 0.67)
        large = found[f"allreduce of 128MiB float64, 2 ranks, in a stream: over {NCCL}"]
        assert large["target"] == 1.1 and large["met"]
        staged = [one for name, one in found.items() if name.endswith(f"over {HOST_STAGED}")]
        assert len(staged) == 11 and {one["target"] for one in staged} == {0.5}

    def test_ranks_that_share_a_gpu(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(shared=True)
        assert not any(NCCL in name or "graph" in name for name in found)
        assert found["allreduce of one float64, 2 ranks, in a stream"]["target"] is None
        targets = {
            nbytes: found[
                f"allreduce of {size_label(nbytes)} float64, 2 ranks, in a stream: over {HOST_STAGED}"
            ]["target"]
            for nbytes in (8, 1024, SHARED_BYTES, 128 * MIB)
        }
        assert list(targets.values()) == [None, None, 1.0, 1.0]

    def test_eight_gpus(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(size=8)
        assert [
            found[f"allreduce of one float64, 8 ranks, in a {mode}"]["target"]
            for mode in ("stream", "graph")
        ] == [6.0, 2.5]
        assert figures(size=4)["allreduce of one float64, 4 ranks, in a graph"]["target"] is None

    def test_a_wrong_result_leaves_no_figures(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(failed=HOST_STAGED)
        assert f"{HOST_STAGED}: bad" in found["one float64"]["failed"]
        assert not any(name.startswith("allreduce") for name in found)

    def test_what_there_is_no_time_for_says_so(
        self, figures: Callable[..., dict[str, Any]]
    ) -> None:
        assert all("left out" in one["failed"] for one in figures(budget_s=-1.0).values())


def test_multigrid_figures() -> None:
    common = {"class": "C", "device": "gpu", "verified": True, "relative_error": 1e-13}
    common |= {"time_s": 1.0, "graph": True}
    figures = {
        1: {**common, "mops": 100.0, "exchange_share": 0.0},
        2: {**common, "mops": 180.0, "exchange_share": 0.1},
        8: {**common, "class": "D", "mops": 900.0, "exchange_share": 0.2},
    }
    runs = [
        {"app": "nas_mg", "ranks": n, "exit_status": 0, "figures": one}
        for n, one in figures.items()
    ]
    bad = {"app": "nas_mg", "ranks": 4, "exit_status": 1, "figures": {"output": "no"}}
    found = multigrid_figures([*runs, bad, {"app": "stencil2d", "exit_status": 0}])
    assert [one["value"] for one in found] == [100.0, 180.0, 900.0]
    # That of another class is no baseline.
    assert [one["speed_up"] for one in found] == [1.0, 1.8, None]
    assert found[1]["exchange_share"] == 0.1 and found[1]["baseline"] == 100.0
    assert multigrid_figures([bad]) == []


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (2, 7, 300)])
@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_jacobi_kernel(shape: tuple[int, int, int], blocks: int) -> None:
    require("cxx")
    text = f"""
#include "{SHIM}"
{source("jacobi", "halox_bench.allreduce")}
extern "C" void run(unsigned grid, unsigned block, u64 before, u64 after, u64 change, int nz, int ny, int nx)
{{
    launch_on_cpu(grid, block, true, jacobi, (const double*)before, (double*)after, (double*)change, nz, ny, nx);
}}
""".replace("u64", "unsigned long long")
    padded = tuple(n + 2 for n in shape)
    before = np.random.default_rng(1).integers(-50, 50, padded).astype(float)
    after, change = np.full(padded, 0.5), np.full(padded, 0.25)
    addresses = [ctypes.c_uint64(array.ctypes.data) for array in (before, after, change)]
    shared_library(text).run(ctypes.c_uint(blocks), ctypes.c_uint(32), *addresses, *shape)
    inner = (slice(1, -1),) * 3
    mean = sum(np.roll(before, shift, axis)[inner] for axis in range(3) for shift in (-1, 1)) / 6
    wanted = {0.5: mean, 0.25: mean - before[inner]}
    for array, (halo, right) in zip((after, change), wanted.items(), strict=True):
        assert np.array_equal(array[inner], right)
        array[inner] = halo
        assert (array == halo).all(), "the halo is left as it was"
