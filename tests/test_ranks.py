"""Runs the tests in tests/mpi on several ranks; pytest itself runs them on one."""

from __future__ import annotations

import faulthandler
import os
import re
import sys

import pytest

from halox.cli import launcher
from tests.launching import PYTEST, SETTINGS, Ended, run
from tests.support import FULL, full, require
from tests.unit.kept import folder


def on_ranks(ranks: int, *words: str) -> Ended:
    """Run tests on some ranks; ``words`` select those that run without the whole matrix."""
    require("mpi")
    folder()  # of the compiled kernels, which the ranks share
    selection = "full or not full" if os.environ.get(FULL) and not words else "not full"
    command = launcher.command(
        launcher.find(), ranks, [*PYTEST, "-m", selection, *(words or ("tests/mpi",))]
    )
    return run(command, launcher.environment(ranks) | SETTINGS)


# The longest first. Six are a grid of unlike sides, as three are, and a tree with a rest.
@pytest.mark.parametrize("ranks", [8, *full(6, 4), 3, 2])
def test_on_ranks(ranks: int) -> None:
    # A rank run has hundreds of tests, and limits of its own.
    faulthandler.cancel_dump_traceback_later()
    ended = on_ranks(ranks)
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    passed = [int(n) for n in re.findall(r"(\d+) passed", ended.said)]
    least = 500 if ranks < 4 else 100
    assert len(passed) == ranks and min(passed) >= least, f"{sys.executable}: {ended.said[-4000:]}"


@pytest.mark.parametrize("ranks", [3, 2])
def test_late_messages(ranks: int) -> None:
    """In processes of their own, since messages that nobody receives stay in MPI."""
    faulthandler.cancel_dump_traceback_later()
    ended = on_ranks(ranks, "tests/mpi/late_messages.py", "-k", "stopped and (gather or scatter)")
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    assert len(re.findall(r"(\d+) passed", ended.said)) == ranks, ended.said[-4000:]
