"""Runs the tests in tests/mpi on several ranks; pytest itself runs them on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from halox.cli import launcher
from tests.support import require
from tests.unit.cpu_kernels import folder

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 420


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_on_ranks(ranks: int) -> None:
    require("mpi")
    # Ranks that wait for each other for ever print where, and end, before the limit here.
    pytest_command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    pytest_command += ["-o", "faulthandler_timeout=120", "tests/mpi"]
    command = launcher.command(launcher.find(), ranks, pytest_command)
    folder()  # of the compiled kernels, which the ranks share
    environment = launcher.environment(ranks) | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        pytest.fail(f"{ranks} ranks took longer than {LIMIT_S} s\n{said[-8000:]}")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    passed = [int(n) for n in re.findall(r"(\d+) passed", said)]
    assert len(passed) == ranks and min(passed) > 50, f"{sys.executable}: {said[-4000:]}"
