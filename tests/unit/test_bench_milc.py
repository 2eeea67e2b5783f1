"""The MILC benchmark: its cases and command line, and results that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.milc import device_kernels
from halox.cli import main
from halox_bench.milc.cases import MilcCase, grown, scaled
from halox_bench.ranks.methods import WrongResult
from tests import support


def test_tables_of_several_ranks() -> None:
    case = MilcCase((8, 8, 8, 8))
    found = scaled(case, 6)
    assert [(one.scaling, one.ranks) for one in found] == [
        *(("strong", n) for n in (1, 2, 4, 6)),
        *(("weak", n) for n in (2, 4, 6)),
    ]
    assert all(one.volume == 8**4 * (one.ranks if one.scaling == "weak" else 1) for one in found)
    assert [one.ranks for one in scaled(case, 2, ["weak"])] == [1, 2]
    assert grown((8, 8, 8, 8), 16) == (16, 16, 16, 16)


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    support.require("mpi")
    from mpi4py import MPI

    from halox_bench.milc.problem import Problem

    with Problem(MilcCase((4, 4, 4, 6), "naive"), MPI.COMM_SELF, "cpu") as problem:
        problem.check()
        problem.operator.tables[0].matrices[5] *= 1.001
        with pytest.raises(WrongResult, match=r"D\^2 of an eigenvector is wrong by"):
            problem.check()


def test_kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as C++, on fields and tables in the order that GPUs have."""
    support.require("mpi")
    support.require("cxx")
    from mpi4py import MPI

    from halox_bench.milc import problem
    from tests.unit.test_milc_kernels import BARRIERS, MILC_CU, STAGGERED, FakeCupy, OnNumpy

    lattices, operators = problem.app("milc.lattice"), problem.app("milc.operator")
    monkeypatch.setattr(device_kernels, "THREADS", 32)
    device = FakeCupy(MILC_CU, STAGGERED, BARRIERS)

    class ComponentsFirst(lattices.Lattice):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.components_first = True

    monkeypatch.setattr(lattices, "Lattice", ComponentsFirst)
    monkeypatch.setattr(
        operators, "DeviceKernels", lambda lattice, dtype: OnNumpy(lattice, dtype, device)
    )
    case = MilcCase((10, 8, 4, 6), "naive")
    with problem.Problem(case, MPI.COMM_SELF, "cpu") as made:
        made.check()
        device.calls.clear()
        made.dslash()()
        assert device.calls == ["dslash"]
        run = made.iterations(made.iteration)
        for _ in range(3):
            run()
        assert made.gradient.is_running
        assert made.floor_bytes() == (1248 * 960, 2928 * 960)
        made.operator.tables[1].matrices[3] *= -1
        with pytest.raises(WrongResult):
            made.check()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    support.require("mpi")
    file = tmp_path / "milc.json"
    words = ["--lattices", "8x8x8x8", "--operators", "improved", "--precisions", "double"]
    assert main(["bench", "milc", *words, "--repeats", "1", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "halox",
        "whole NumPy arrays",
        "whole NumPy arrays in pieces",
    ]
    assert all(row["checked"] and not row["error"] for row in rows)
    for row in rows:
        # Microseconds, and 10^9 operations a second.
        assert row["dslash_gflops"] * row["dslash_us"] * 1e3 == pytest.approx(1146 * 2048)
        assert row["cg_gflops"] * row["us"] * 1e3 == pytest.approx(1187 * 4096)
    ours, speed = rows[0], rows[0]["copy_bytes_per_us"]
    assert ours["share"] * ours["dslash_us"] * speed == pytest.approx(2400 * 2048)
    assert ours["us"] * speed / ours["over_floor"] == pytest.approx(5232 * 2048)
    assert ours["exchange_share"] * ours["us"] == pytest.approx(ours["exchange_us"])
    assert set(ours["beside"]) == {row["name"] for row in rows[1:]}
    assert "8x8x8x8 improved double" in said
