"""Tests in this folder run on several ranks: ``mpiexec -n 4 python -m pytest -p halox.testing tests/mpi``.

`halox.testing` lets a test that fails on one rank fail on all. tests/test_ranks.py starts the ranks.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest

from tests.mpi.limits import sleeping_waits
from tests.support import others, require

require("mpi")

from mpi4py import MPI  # noqa: E402

HERE = Path(__file__).parent
_NAPS_S = 0.00005, 0.001
T = TypeVar("T")


@pytest.fixture
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(autouse=True, scope="session")
def long_waits_leave_the_core() -> Iterator[None]:
    with sleeping_waits():
        yield


def come_together(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, asleep: a rank that waits in MPI keeps a core busy, which the others need."""
    request, nap_s = comm.Ibarrier(), _NAPS_S[0]
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(1.2 * nap_s, _NAPS_S[1])


def agree(ok: bool, comm: MPI.Intracomm) -> bool:
    """Return whether ``ok`` is true on all ranks, which wait for one another: they then fail in the same place."""
    come_together(comm)
    return bool(comm.allreduce(ok, op=MPI.LAND))


def by_first(make: Callable[[], T], comm: MPI.Intracomm) -> T:
    """Return the result of ``make`` on rank 0 to all ranks, since a reference of the whole grid is expensive."""
    found, error = None, None
    if comm.rank == 0:
        try:
            found = make()
        except Exception as caught:
            error = caught
    come_together(comm)
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
    come_together(comm)
    error = comm.bcast(error)
    assert error is None, error


def mapped_bytes() -> int:
    """Return the bytes of halox's shared memory that this process maps."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "/halox-" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


SMALL = (1, 2, 3)
"""Numbers of ranks on which tests run by default.

Tests marked ``geometry`` run by default on any number of ranks, tests marked ``usually`` on the numbers in their mark.
"""

ALL_CASES = 3
"""The number of ranks with all cases of a test, which has a part of them on other numbers."""

PART = 8
"""One of so many cases is in the part."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test for this number of ranks, since their imports take time on each rank."""
    selects = "not elsewhere" in config.option.markexpr
    if not selects or collection_path.suffix != ".py" or _is_given(collection_path, config):
        return None
    text = collection_path.read_text()
    sizes = {int(n) for mark in re.findall(r"usually\(([\d, ]+)\)", text) for n in mark.split(",")}
    if re.search(r"^pytestmark = .*usually\(", text, re.MULTILINE) is None:
        sizes |= {*SMALL}
    is_for_all = "mark.geometry" in text or not collection_path.name.startswith("test_")
    return None if MPI.COMM_WORLD.size in sizes or is_for_all else True


def _is_given(path: Path, config: pytest.Config) -> bool:
    """Whether the command line names a file."""
    here = config.invocation_params.dir
    return any((here / words.partition("::")[0]).resolve() == path for words in config.args)


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, rather than skip, tests that cannot run on this number of ranks, and mark those that need not."""
    size = MPI.COMM_WORLD.size
    kept, left, parted = [], [], []
    for item in items:
        (kept if _can_run(item, size) else left).append(item)
        if HERE not in item.path.parents:
            continue
        if not _is_usual(item, size):
            item.add_marker(pytest.mark.elsewhere)
        elif size > ALL_CASES or (size < ALL_CASES and _has_all_cases(item)):
            parted.append(item)
            if item.get_closest_marker("full") is not None and _has_all_cases(item):
                item.add_marker(pytest.mark.elsewhere)
    for item in others(parted, PART):
        item.add_marker(pytest.mark.elsewhere)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def _can_run(item: pytest.Item, size: int) -> bool:
    mark = item.get_closest_marker("ranks")
    return mark is None or size in mark.args


def _has_all_cases(item: pytest.Item) -> bool:
    return _can_run(item, ALL_CASES) and _is_usual(item, ALL_CASES)


def _is_usual(item: pytest.Item, size: int) -> bool:
    usual = item.get_closest_marker("usually")
    if usual is not None:
        return size in usual.args
    return size in SMALL or item.get_closest_marker("geometry") is not None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Succeed if no test is for this number of ranks."""
    if MPI.COMM_WORLD.size > 1 and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HALOX_TIMEOUT", "60")
