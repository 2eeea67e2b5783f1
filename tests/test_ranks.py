"""Runs the tests of tests/mpi on several ranks; the suite itself runs them on one."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections.abc import Callable

import pytest

from halox.cli import launcher
from tests.fakes.kept import folder
from tests.launching import PYTEST, SETTINGS, Ended, run
from tests.support import FULL, full, require

LEAST = {2: 600, 3: 900, 4: 80, 8: 50}
"""Least numbers of tests that pass, by the number of ranks."""

WHOLE = 2, 3, 4
"""Numbers of ranks on which the whole matrix has more cases."""


def on_ranks(ranks: int, *words: str) -> Ended:
    """Run tests of tests/mpi on ranks; ``words`` are pytest arguments that select fewer tests."""
    require("mpi")
    folder()  # create the folder of compiled kernels, which all ranks use
    is_whole = os.environ.get(FULL) and ranks in WHOLE
    selection = "(full or not full)" if is_whole else "not full"
    command = launcher.command(
        launcher.find(),
        ranks,
        [*PYTEST, "-m", f"{selection} and not elsewhere", *(words or ("tests/mpi",))],
    )
    return run(command, launcher.environment(ranks) | SETTINGS)


# Longest run first. On eight ranks every axis of a grid of three axes is divided.
@pytest.mark.parametrize("ranks", [3, *full(8), 2, 4])
def test_on_ranks(ranks: int) -> None:
    # Each of the hundreds of tests in a run on ranks has its own time limit.
    faulthandler.cancel_dump_traceback_later()
    ended = on_ranks(ranks)
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    passed = [int(n) for n in re.findall(r"(\d+) passed", ended.said)]
    assert len(passed) == 1 and passed[0] >= LEAST[ranks], f"{sys.executable}: {ended.said[-4000:]}"


def test_late_messages() -> None:
    """Separate processes, since messages that no rank receives stay in MPI."""
    faulthandler.cancel_dump_traceback_later()
    ended = on_ranks(3, "tests/mpi/late_messages.py")
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    assert re.search(r"\d+ passed", ended.said), ended.said[-4000:]


@pytest.mark.full
def test_128_ranks(record_property: Callable[[str, object], None]) -> None:
    """Exchange and sum of 128 ranks on the cores of this machine; the report has their times and memory."""
    require("mpi")
    faulthandler.cancel_dump_traceback_later()
    command = launcher.command(launcher.find(), 128, ["-m", "tests.many_ranks"])
    ended = run(command, launcher.environment(128) | SETTINGS)
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    line = re.search(r"128 ranks correct: .*", ended.said)
    assert line is not None, ended.said[-4000:]
    record_property("ranks", line[0])
    print(line[0])


@pytest.mark.full
def test_making_costs_as_much_on_40_ranks() -> None:
    require("mpi")
    faulthandler.cancel_dump_traceback_later()
    command = launcher.command(launcher.find(), 40, ["-m", "tests.calls"])
    ended = run(command, launcher.environment(40) | SETTINGS)
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    assert len(re.findall(r"calls on 8 ranks, \d+ on 40", ended.said)) == 2, ended.said[-4000:]
