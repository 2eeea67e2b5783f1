"""Tests in this folder run on several ranks: ``mpiexec -n 4 python -m pytest tests/mpi``, or tests/test_ranks.py."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest

from halox.runtime import waiting
from tests.support import require

require("mpi")

from mpi4py import MPI  # noqa: E402

HERE = Path(__file__).parent
_NAP_S = 0.00005
T = TypeVar("T")


@pytest.fixture
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(autouse=True, scope="session")
def long_waits_leave_the_core() -> Iterator[None]:
    """Make a waiting rank sleep early: in many tests a rank waits for long while others need its core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_BUSY_S", 0.02)
        yield


@pytest.fixture(autouse=True)
def ranks_end_together() -> Iterator[None]:
    """End every test with a barrier, so that a test that fails on one rank receives no messages of the next test."""
    yield
    together = MPI.COMM_WORLD.Ibarrier()
    while not together.Test():
        time.sleep(_NAP_S)


def agree(ok: bool, comm: MPI.Intracomm) -> bool:
    """Return whether ``ok`` is true on all ranks: they then fail together."""
    return bool(comm.allreduce(ok, op=MPI.LAND))


def by_first(make: Callable[[], T], comm: MPI.Intracomm) -> T:
    """Return the result of ``make`` on rank 0 to all ranks, since a reference of the whole grid is expensive."""
    found, error = None, None
    if comm.rank == 0:
        try:
            found = make()
        except Exception as caught:
            error = caught
    found, error = comm.bcast((found, error))
    if error is not None:
        raise error
    return cast(T, found)


def on_first(work: Callable[[], object], comm: MPI.Intracomm) -> None:
    """Run ``work`` on rank 0; if it fails, fail on all ranks with the traceback."""
    error = None
    if comm.rank == 0:
        try:
            work()
        except Exception:
            error = traceback.format_exc()
    error = comm.bcast(error)
    assert error is None, error


SMALL = (1, 2, 3)
"""Numbers of ranks on which tests run by default.

Tests marked ``geometry`` run by default on any number of ranks, tests marked ``usually`` on the numbers in their mark.
"""


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, rather than skip, tests for another number of ranks."""
    size = MPI.COMM_WORLD.size
    kept, left = [], []
    for item in items:
        mark = item.get_closest_marker("ranks")
        (kept if mark is None or size in mark.args else left).append(item)
        usual = item.get_closest_marker("usually")
        is_usual = (
            size in usual.args if usual else size in SMALL or item.get_closest_marker("geometry")
        )
        if HERE in item.path.parents and not is_usual:
            item.add_marker(pytest.mark.full)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Succeed if no test is for this number of ranks."""
    if MPI.COMM_WORLD.size > 1 and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HALOX_TIMEOUT", "60")
