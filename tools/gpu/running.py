"""Runs commands in the root of the checkout, on ranks or in one process, under a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from halox.cli import launcher
from tests.launching import descendants

ROOT = Path(__file__).resolve().parents[2]
STEP_LIMIT_S = 200
DUMPING_S = 2


def run(
    command: Sequence[str],
    ranks: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    limit_s: float = STEP_LIMIT_S,
) -> tuple[int, str]:
    """Run a Python command on ``ranks`` ranks, or in one process if None; return its exit status and output."""
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), HALOX_REQUIRE="gpu,mpi", HALOX_TIMEOUT="30", **variables
    )
    if ranks is None:
        command = [sys.executable, *command]
    else:
        environment |= launcher.environment(ranks)
        command = launcher.command(launcher.find(), ranks, command)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as started:
        try:
            said, _ = started.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # On SIGABRT the pytest of each rank prints its stacks; SIGKILL ends every rank.
            pids = descendants(started.pid)
            for signalled in (signal.SIGABRT, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signalled)
                time.sleep(DUMPING_S)
            started.kill()
            said, _ = started.communicate()
            return 124, said + f"\ntook longer than {limit_s} s"
    return started.returncode, said
