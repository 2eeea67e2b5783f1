"""Runs tests on ranks of several nodes: two network namespaces, names given by hand, and every rank its own node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halox.cli import launcher
from tests import netns
from tests.support import require

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800
RANKS = 4

PYTEST = [
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
    # Without a selection, in words that a shell leaves as they are.
    *("-o", "faulthandler_timeout=600", "-o", "addopts="),
]


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run ranks to their end, bounded in time, and return what they said."""
    ranks = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = ranks.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)
        said, _ = ranks.communicate()
        pytest.fail(f"took longer than {LIMIT_S} s\n{said[-8000:]}")
    assert ranks.returncode == 0, said[-8000:]
    return said


def check_passed(said: str, least: int) -> None:
    passed = [int(n) for n in re.findall(r"(\d+) passed", said)]
    assert len(passed) == RANKS and min(passed) >= least, said[-4000:]


def test_two_hosts(tmp_path: Path) -> None:
    """Two namespaces: shared memory within each, TCP through the cable between them."""
    require("mpi")
    require("netns")
    files = ["tests/mpi/test_nodes.py", "tests/mpi/test_typed.py"]
    with netns.two_hosts(tmp_path) as hosts:
        environment = hosts.environment(RANKS) | {"HALOX_TEST_NODES": "0,0,1,1"}
        environment.pop("HALOX_NODE", None)
        before = hosts.bytes_sent()
        said = run(hosts.command(RANKS, [*PYTEST, *files]), environment)
        check_passed(said, 60)
        # One step of the largest test alone: 3 MiB from each rank, half of it for the other host.
        assert hosts.bytes_sent() - before > 3 << 20


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        ("a b a b", "0,1,0,1"),
        # Ranks that name their nodes themselves, in tests/mpi/test_nodes.py, have these as well.
        pytest.param("left left right right", "0,0,1,1", marks=pytest.mark.full),
        pytest.param("rank rank rank rank", "0,1,2,3", marks=pytest.mark.full),
    ],
)
def test_named_nodes(names: str, nodes: str) -> None:
    """Nodes by ``HALOX_NODE``, another on each rank: needs nothing of the machine."""
    require("mpi")
    arguments = [*PYTEST, "tests/mpi/test_nodes.py"]
    command = launcher.command(launcher.find(), RANKS, arguments)
    at = command.index(sys.executable)
    # The launcher tells each rank its number; a shell turns that into the name of its node.
    script = (
        f'set -- {names}; shift "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"; export HALOX_NODE="$1"; '
        'exec "$0" $ARGUMENTS'
    )
    command[at:] = ["sh", "-c", script, command[at]]
    environment = launcher.environment(RANKS) | {
        "ARGUMENTS": " ".join(["-P", "-m", "mpi4py", *arguments]),
        "HALOX_TEST_NODES": nodes,
    }
    check_passed(run(command, environment), 8)
