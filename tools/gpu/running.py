"""Runs commands in the root of the checkout, on ranks or in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from halox.cli import launcher
from tests import launching

ROOT = launching.ROOT
QUIET_S = 200.0
"""Seconds without output after which a command counts as stuck."""


def run(
    command: Sequence[str],
    ranks: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    quiet_s: float = QUIET_S,
) -> tuple[int, str]:
    """Run a Python command on ``ranks`` ranks, or in one process if None; return its exit status and output.

    A command that prints nothing for ``quiet_s`` seconds is ended, with exit status 124; its ranks print their stacks.
    """
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), HALOX_REQUIRE="gpu,mpi", HALOX_TIMEOUT="30", **variables
    )
    if ranks is None:
        command = [sys.executable, *command]
    else:
        environment |= launcher.environment(ranks)
        command = launcher.command(launcher.find(), ranks, command)
    ended = launching.run(command, environment, quiet_s)
    if ended.status is None:
        return 124, f"{ended.said}\nprinted nothing for {quiet_s} s"
    return ended.status, ended.said
