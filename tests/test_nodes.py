"""Runs tests of tests/mpi on ranks of two nodes, which are network namespaces."""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path

import pytest

from tests import netns
from tests.launching import PYTEST, SETTINGS, run
from tests.support import require

RANKS = 4
LINK_MBIT = 400

# An empty addopts removes the default selection. The words contain nothing that a shell would expand.
ON_EACH = [*PYTEST, "-o", "addopts="]


def passing(command: list[str], environment: dict[str, str]) -> str:
    """Run ranks to their end, and return their output."""
    faulthandler.cancel_dump_traceback_later()
    ended = run(command, environment | SETTINGS)
    assert ended.status == 0, f"status {ended.status}\n{ended.said[-8000:]}"
    return ended.said


def check_passed(said: str, least: int) -> None:
    passed = [int(n) for n in re.findall(r"(\d+) passed", said)]
    assert len(passed) == 1 and passed[0] >= least, said[-4000:]


def test_two_hosts(tmp_path: Path) -> None:
    """Two namespaces: shared memory within each, TCP through the cable between them."""
    require("mpi")
    require("netns")
    with netns.two_hosts(tmp_path) as hosts:
        environment = hosts.environment(RANKS) | {"HALOX_TEST_NODES": "0,0,1,1"}
        environment.pop("HALOX_NODE", None)
        before = hosts.bytes_sent()
        said = passing(hosts.command(RANKS, [*ON_EACH, "tests/mpi/test_nodes.py"]), environment)
        check_passed(said, 6)
        # One step of the largest test sends 3 MiB from each rank, half of it to the other host.
        assert hosts.bytes_sent() - before > 3 << 20


@pytest.mark.full
@pytest.mark.parametrize("delay_ms", [0, 10])
def test_limited_link(delay_ms: int, tmp_path: Path) -> None:
    """Two namespaces with a link of known rate and delay between them: bytes that cross it, and least times."""
    for need in ("mpi", "netns", "rate", *(["delay"] if delay_ms else [])):
        require(need)
    with netns.two_hosts(tmp_path, delay_ms) as hosts:
        hosts.limit_rate(LINK_MBIT)
        environment = hosts.environment(RANKS) | {
            "HALOX_TEST_NODES": "0,0,1,1",
            "HALOX_TEST_LINK": f"{LINK_MBIT},{delay_ms}",
        }
        environment.pop("HALOX_NODE", None)
        said = passing(hosts.command(RANKS, [*ON_EACH, "tests/mpi/limited_link.py"]), environment)
        check_passed(said, 4)
