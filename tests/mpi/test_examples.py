"""The examples on ranks; each checks its own result. tests/project/test_docs.py runs them on one rank."""

from __future__ import annotations

import importlib.util
import os
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import FULL, full
from tests.unit.apps import test_fft_examples, test_jacobi

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = {
    "heat": ["--cells", "37", "24", "--steps", "60"],
    "cg": ["--cells", "37", "24"],
    "poisson": ["--cells", "21", "23", "18"],
    "taylor_green": ["--cells", "17", "--steps", "20", "--dt", ".001"],
    "fused": ["--cells", "37", "24", "--steps", "60"],
    "heat_walls": ["--cells", "37", "24", "--steps", "60"],
    "acoustic": ["--cells", "34", "21", "--steps", "80"],
    "acoustic --bang": ["--cells", "40", "36", "--steps", "50"],
    "maxwell": ["--cells", "9", "8", "13", "--steps", "30"],
    "shallow_water": ["--cells", "100", "4"],
    "tripolar": ["--cells", "24", "72"],
    "gray_scott": ["--cells", "34", "27", "--steps", "60"],
    "jacobi": ["--cells", "9", "8", "11", "--tolerance", "1e-3", "--read-every", "6"],
    "taylor_green_3d": ["--cells", "16", "--steps", "5"],
    "convolution": ["--cells", "17", "12"],
    "pic": ["--cells", "32", "--across", "1", "--time", "30"],
}
DRAWN = "heat"
LARGEST = {"shallow_water": 0.03, "taylor_green_3d": 1e-7, "pic": 0.02}
"""Errors of a scheme of first order, of a truncated series, and of a rate fitted to few periods."""

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.usually(2)]


def run(name: str, *words: str) -> float:
    program, *options = name.split()
    if program == "shallow_water":
        pytest.importorskip("zarr")
        pytest.importorskip("xarray")
    if program == "convolution":
        pytest.importorskip("torch")
    found: float = runpy.run_path(str(EXAMPLES / f"{program}.py"))["main"](
        [*options, *SHORT[name], "--device", "cpu", *words]
    )
    return found


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.part(2)
def test_it_is_right_and_draws_a_picture(name: str, comm: MPI.Intracomm, tmp_path: Path) -> None:
    picture, words = comm.bcast(tmp_path / "picture.png"), []
    # Matplotlib takes longer than most examples: outside the whole matrix one of them draws.
    if importlib.util.find_spec("matplotlib") and (name == DRAWN or FULL in os.environ):
        words = ["--png", str(picture)]
    errors = comm.allgather(run(name, *words))
    assert len(set(errors)) == 1 and errors[0] < LARGEST.get(name, 1e-13)
    if words:
        assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usually(4)
@pytest.mark.parametrize("name", ["maxwell", *full("tripolar", "poisson", "gray_scott")])
def test_it_is_right_with_two_divided_axes(name: str, comm: MPI.Intracomm) -> None:
    errors = comm.allgather(run(name))
    assert len(set(errors)) == 1 and errors[0] < 1e-13


@pytest.mark.parametrize("name", ["heat", *full("poisson")])
def test_a_picture_that_cannot_be_written(name: str, comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Only rank 0 fails, and no other rank waits for it."""
    pytest.importorskip("matplotlib")
    found = None
    with short_waits(5):
        try:
            run(name, "--png", str(tmp_path / "none" / "picture.png"))
        except Exception as error:
            found = type(error).__name__
    assert comm.allgather(found) == ["FileNotFoundError"] + [None] * (comm.size - 1)


def test_a_restart_from_a_later_step(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """A run that would end before the step of the checkpoint is refused, and the checkpoint stays intact."""
    zarr = pytest.importorskip("zarr")
    path = str(comm.bcast(tmp_path / "run.zarr"))
    program = runpy.run_path(str(EXAMPLES / "restart.py"))["main"]
    assert program([path, "4"]) < 1e-12
    with pytest.raises(SystemExit, match="is at step 4"):
        program([path, "2"])
    comm.Barrier()
    assert zarr.open_group(path, mode="r").attrs["step"] == 4
    comm.Barrier()
    assert program([path, "6"]) < 1e-12


def test_records_of_a_restarted_run(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """The records of both runs, against the damped wave."""
    xarray = pytest.importorskip("xarray")
    path = comm.bcast(tmp_path / "run.zarr")
    scope = runpy.run_path(str(EXAMPLES / "restart.py"))
    for steps in ("120", "160"):
        assert scope["main"]([str(path), steps]) < 1e-12
        comm.Barrier()
    cells, rate = scope["CELLS"], scope["RATE"]
    kx, ky = 4 * np.pi / cells[0], 6 * np.pi / cells[1]
    damping = 1 - 4 * rate * (np.sin(kx / 2) ** 2 + np.sin(ky / 2) ** 2)
    with xarray.open_zarr(path.with_name("run-records.zarr"), chunks=None) as ds:
        assert ds.time.values.tolist() == [50, 100, 150]
        wave = np.outer(np.cos(kx * ds.x), np.cos(ky * ds.y))
        for time, u in zip(ds.time.values, ds.u, strict=True):
            assert abs(u - damping**time * wave).max() < 1e-12
    comm.Barrier()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.usually(4)
@pytest.mark.parametrize("options", test_fft_examples.CASES)
def test_energy_and_enstrophy_of_the_vortex(
    options: str, comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / "taylor_green_3d.py"))["main"](
        [*options.split(), "--device", "cpu"]
    )
    said = comm.bcast(capsys.readouterr().out)
    assert test_fft_examples.printed(said)[2:] == pytest.approx(
        test_fft_examples.CASES[options], abs=1e-9
    )


def jacobi(words: str, capsys: pytest.CaptureFixture[str], **given: Any) -> tuple[int, float]:
    """Run the example on a grid with more options; return the steps and the residual that rank 0 prints."""
    main = runpy.run_path(str(EXAMPLES / "jacobi.py"))["main"]
    main.__globals__["halox"] = SimpleNamespace(Grid=partial(halox.Grid, **given))
    main([*words.split(), "--device", "cpu"])
    said = MPI.COMM_WORLD.bcast(capsys.readouterr().out)
    return test_jacobi.printed(said)[1:]


@pytest.mark.ranks(1, 2, 4)
def test_jacobi_takes_the_steps_of_a_serial_run(capsys: pytest.CaptureFixture[str]) -> None:
    steps, residual = jacobi("--cells 9 8 11 --tolerance 1e-3 --read-every 6", capsys)
    known_steps, known = test_jacobi.serial((9, 8, 11), 1e-3, 6)
    assert steps == known_steps and residual == pytest.approx(known, rel=1e-11)


def test_reproducible_residuals_have_the_bits_of_one_rank(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--cells 40 37 33 --tolerance 1e-9 --steps 30 --read-every 10 --reproducible"
    alone = jacobi(words, capsys, comm=MPI.COMM_SELF)
    assert agree(jacobi(words, capsys) == alone, comm)


@pytest.mark.parametrize("name", ["acoustic", "gray_scott", "heat_walls", "jacobi"])
def test_it_notices_a_missing_exchange(name: str) -> None:
    scope = runpy.run_path(str(EXAMPLES / f"{name}.py"))

    class Nothing:
        def __call__(self, *fields: object) -> None: ...
        def start(self) -> None: ...
        def finish(self) -> None: ...

    class Deaf(halox.Grid):
        def exchange(self, *fields: object, corners: bool | None = None) -> None:
            """Leave the halos as they are."""

        def plan(self, *fields: object, corners: bool | None = None, path: str | None = None):  # type: ignore[no-untyped-def]
            return Nothing()

    scope["main"].__globals__["halox"] = SimpleNamespace(Grid=Deaf)
    with pytest.raises(SystemExit, match="wrong"):
        scope["main"]([*SHORT[name], "--device", "cpu"])
