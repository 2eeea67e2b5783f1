"""Runs the tests in tests/mpi on several ranks, beside the other tests; pytest itself runs them on one."""

from __future__ import annotations

import re
import sys

import pytest

from halox.cli import launcher
from tests.beside import ROOT, Ended, run
from tests.support import require
from tests.unit.kept import folder

RANKS = [2, 3, 4, 6, 8]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
# Ranks that wait for each other for ever print where, and end.
PYTEST += ["-o", "faulthandler_timeout=600"]


def on_ranks(ranks: int, selection: str = "not full") -> Ended:
    """Run tests/mpi on some ranks."""
    require("mpi")
    folder()  # of the compiled kernels, which the ranks share
    command = launcher.command(launcher.find(), ranks, [*PYTEST, "-m", selection, "tests/mpi"])
    return run(command, launcher.environment(ranks) | {"PYTHONPATH": str(ROOT)})


def check(ended: Ended, ranks: int, least: int) -> None:
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    passed = [int(n) for n in re.findall(r"(\d+) passed", ended.said)]
    assert not least or (len(passed) == ranks and min(passed) >= least), (
        f"{sys.executable}: {ended.said[-4000:]}"
    )


@pytest.mark.beside(call=on_ranks)
@pytest.mark.parametrize("ranks", RANKS)
def test_on_ranks(ranks: int, beside: Ended) -> None:
    check(beside, ranks, 500 if ranks < 4 else 100)


@pytest.mark.full
@pytest.mark.beside(call=on_ranks)
@pytest.mark.parametrize("selection", ["full"])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_rest_of_the_matrix_on_ranks(ranks: int, selection: str, beside: Ended) -> None:
    check(beside, ranks, 0 if ranks < 4 else 300)
