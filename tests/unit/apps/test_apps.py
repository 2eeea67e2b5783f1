"""All mini-apps by the same tests: figures, exit status, options, kernels; captures of their iterations."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from apps import stencil2d
from apps.capture import captured
from apps.milc import scidac
from apps.nas_ft.classes import CLASSES
from halox.cli import catalogue, main
from tests import support
from tests.fakes.nvrtc import by_nvrtc

SMALL = {
    "stencil2d": "--custom-size 20,30 --num-iters 10 --passes 1",
    "milc": "--lattice 4 6 4 8 --gauge unit",
    "nas_ft": "--class S --passes 1",
    "nas_mg": "--class S --passes 1",
}
# Operations of the original benchmarks, in 10^6: of a run of NAS, of an iteration of MILC on each site of a parity.
OPERATIONS = {"nas_ft": 177.1670, "nas_mg": 7.602176, "milc": 1187 * 768 / 1e6}


def run(app: str, *words: str) -> int:
    support.require("mpi")
    return main(["run", app, *SMALL[app].split(), "--device", "cpu", *words])


@pytest.fixture
def figures(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    app = request.param
    words = ["--solution", str(tmp_path / "solution")] if app == "milc" else []
    assert run(app, "--json", *words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["verified"] is True and (found["app"], found["ranks"]) == (app, 1)
    return found


@pytest.mark.parametrize("figures", SMALL, indirect=True)
def test_figures(figures: dict[str, Any], tmp_path: Path) -> None:
    app, rows = figures["app"], figures["rows"]
    if app == "stencil2d":
        assert [row["precision"] for row in rows] == ["single", "double"]
        assert all(row["bytes_exchanged"] == 0 and row["verified"] for row in rows)
        return
    shares = [row["share"] for row in rows if "(once)" not in row["part"]]
    assert sum(shares) == pytest.approx(1)
    times, rate = 1, figures.get("mops")
    if app == "milc":
        times = figures["even"]["milc_iterations"] + figures["odd"]["milc_iterations"]
        rate = figures["cg_gflops"] * 1e3
        assert figures["lattice"] == [4, 6, 4, 8] and figures["even"]["residual"] <= 1e-18
        with halox.Grid((8, 4, 6, 4), device="cpu") as grid:
            found = scidac.read(str(tmp_path / "solution"), grid, scidac.VECTOR)
        assert np.abs(found).min() > 0
    assert rate == pytest.approx(OPERATIONS[app] * times / figures["time_s"], rel=1e-6)
    if app == "nas_ft":
        sums = [complex(one["re"], one["im"]) for one in figures["checksums"]]
        assert CLASSES["S"].is_verified(sums) and figures["relative_error"] <= 1e-12
    if app == "nas_mg":
        assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}


@pytest.mark.parametrize(
    ("app", "module", "name", "change", "words"),
    [
        ("nas_ft", "solver", "DECAY", lambda decay: decay * (1 + 1e-9), ""),
        ("nas_mg", "cycle", "_MINUS_OPERATOR", lambda w: (*w[:3], w[3] + 1e-9), ""),
        ("nas_mg", "cycle", "_MINUS_OPERATOR", lambda w: w, "--check none"),
        ("milc", "links", "LONG", lambda long: long * (1 + 1e-9), "--lattice 6 6 6 6"),
        ("stencil2d", "verification", "solution", lambda _: lambda start, *_: start, ""),
    ],
)
def test_a_failed_check_is_a_failing_status(
    app: str, module: str, name: str, change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue.load(app)
    # All modules of the app are loaded before, so that none takes the changed value as its own.
    import_module(f"{catalogue.PACKAGE}.{app}.benchmark")
    theirs = import_module(f"{catalogue.PACKAGE}.{app}.{module}")
    monkeypatch.setattr(theirs, name, change(getattr(theirs, name)))
    assert run(app, *words.split()) == 1


@pytest.mark.parametrize(
    ("app", "words", "option"),
    [
        ("stencil2d", "--custom-size 0,4", "--custom-size"),
        ("stencil2d", "--num-iters 0", "--num-iters"),
        ("stencil2d", "--num-iters 100000 --custom-size 4,4", "--num-iters"),
        ("stencil2d", "--msize 2,2", "4 places"),
        ("nas_ft", "--class E", "--class"),
        ("nas_ft", "--graph", "--graph"),
        ("nas_mg", "--gather -1", "--gather"),
        ("nas_mg", "--graph", "--graph"),
        ("milc", "--lattice 6 6 6 5", "--lattice"),
        ("milc", "--lattice 6 6 6 2", "--lattice"),
        ("milc", "--mass nan", "--mass"),
        ("milc", "--residual 1", "--residual"),
        ("milc", f"--seed {2**64}", "--seed"),
        ("milc", "--gauge /none/file", "/none/file"),
        ("milc", "--fat f", "--long"),
        ("milc", "--fat f --long l --naive", "--naive"),
        ("milc", "--gauge random --iterations 2", "--iterations"),
    ],
)
def test_runs_that_cannot_be(
    app: str, words: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(app, *words.split())
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    assert option in capsys.readouterr().err


APPS = Path(stencil2d.__file__).parents[1]
KERNELS = [
    ("milc/milc.cu", ""),
    ("milc/milc.cu", "-DSINGLE -DDEPTH=1"),
    ("nas_ft/ft.cu", ""),
    ("nas_mg/mg.cu", ""),
    ("stencil2d/stencil.cu", "-fmad=false -DREAL=float"),
    ("stencil2d/stencil.cu", "-fmad=false -DREAL=double"),
]


@pytest.mark.parametrize("architecture", ["sm_90", *support.full("sm_80")])
@pytest.mark.parametrize(("file", "flags"), KERNELS)
@pytest.mark.part(2)
def test_kernels_compile(file: str, flags: str, architecture: str) -> None:
    words = [f"-arch={architecture}", "-std=c++17", *flags.split()]
    assert not by_nvrtc((APPS / file).read_text(), Path(file).name, words).log


def test_capture() -> None:
    """Work is captured once and replayed; a path that refuses leaves a usable stream."""
    log: list[str] = []
    stream = SimpleNamespace(
        begin_capture=lambda: log.append("begin"),
        end_capture=lambda: log.append("end") or SimpleNamespace(launch=log.append),
    )

    def refused() -> None:
        raise halox.errors.StateError("it cannot be captured")

    replay = captured(lambda: log.append("work"), stream)
    replay()
    replay()
    assert log == ["begin", "work", "end", stream, stream]
    with pytest.raises(halox.errors.StateError):
        captured(refused, stream)
    assert log[5:] == ["begin", "end"]
