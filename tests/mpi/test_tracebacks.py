"""Tracebacks of user errors: a few lines, without the frames of halox below the public call."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError

pytestmark = pytest.mark.ranks(1, 2)

SHAPE = (8, 6)

CALLS: dict[str, Callable[[halox.Grid, Path], Any]] = {
    "Grid": lambda grid, _: halox.Grid(SHAPE, comm=grid.comm, halo=-1),
    "zeros": lambda grid, _: grid.zeros("no dtype"),
    "full": lambda grid, _: grid.full(1 + 2j),
    "full_like": lambda grid, _: grid.full_like(grid.zeros("f4"), 1j),
    "declare": lambda grid, _: grid.declare(np.zeros(3)),
    "interior": lambda grid, _: grid.interior(np.zeros(3)),
    "indices": lambda grid, _: grid.indices(staggered=5),
    "exchange": lambda grid, _: grid.exchange(3),
    "accumulate": lambda grid, _: grid.accumulate(np.zeros(3)),
    "plan": lambda grid, _: grid.plan(),
    "sum": lambda grid, _: grid.sum(3),
    "sum over an axis": lambda grid, _: grid.sum(grid.ones(), axis=7),
    "std": lambda grid, _: grid.std(3),
    "argmin": lambda grid, _: grid.argmin(grid.ones("c8")),
    "histogram": lambda grid, _: grid.histogram(grid.ones(), -1),
    "random": lambda grid, _: grid.random(-1),
    "locate": lambda grid, _: grid.locate([1]),
    "Points": lambda grid, _: halox.Points(grid, [1]),
    "get": lambda grid, _: halox.Points(grid, [(1, 1)]).get(3),
    "add": lambda grid, _: halox.Points(grid, [(1, 1)]).add(3, 1),
    "allreduce": lambda grid, _: grid.allreduce(np.zeros(3), "median"),
    "gather": lambda grid, _: grid.gather(3),
    "scatter": lambda grid, _: grid.scatter(np.zeros(3)),
    "save": lambda grid, path: grid.save(path / "a", u=3),
    "coarsen": lambda grid, _: grid.coarsen(0),
    "linear_operator": lambda grid, _: grid.linear_operator(print, 3),
    "load": lambda grid, path: grid.load(path / "none"),
    "Exchange": lambda grid, _: halox.Exchange([3], [], comm=grid.comm),
    "Allreduce": lambda grid, _: halox.Allreduce(grid.comm, 3, "f8", "median"),
    "Transpose": lambda grid, _: halox.Transpose(grid, 3),
    "FFT": lambda grid, _: halox.FFT(3),
}


def error_of(call: Callable[[halox.Grid, Path], Any], comm: MPI.Intracomm) -> HaloxError:
    with halox.Grid(SHAPE, comm=comm, device="cpu") as grid, pytest.raises(HaloxError) as caught:
        call(grid, Path("/none"))
    return caught.value


def frames(error: BaseException) -> list[str]:
    """Return the files of a traceback below the lambda that makes the call."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return files[files.index(__file__) + 2 :]


@pytest.mark.parametrize("name", CALLS)
def test_a_user_error_has_few_frames_and_no_second_traceback(
    name: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALOX_DEBUG", raising=False)
    error = error_of(CALLS[name], comm)
    assert len(frames(error)) <= 3
    assert error.__cause__ is None and error.__suppress_context__
    assert "".join(traceback.format_exception(error)).count("Traceback") == 1


def test_debugging_shows_everything(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_DEBUG", "1")
    error = error_of(CALLS["exchange"], comm)
    assert len(frames(error)) > 5 and isinstance(error.__cause__, HaloxError)


def test_an_error_of_users_code_stays_as_the_cause(comm: MPI.Intracomm) -> None:
    class Broken:
        def __dlpack_device__(self) -> Any:
            raise ZeroDivisionError("no device")

    error = error_of(lambda grid, _: grid.exchange(Broken()), comm)
    assert isinstance(error.__cause__, ZeroDivisionError)
    *_, last = traceback.extract_tb(error.__cause__.__traceback__)
    assert last.filename == __file__ and last.name == "__dlpack_device__"
