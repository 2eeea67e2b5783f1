"""A rank that stops in exchanges by NCCL: the others' exchange is aborted, in a graph too, and their next call raises.

tests/gpu/test_failures_gpu.py has ranks that are killed, on this path and others.
"""

from __future__ import annotations

import pytest

from halox.cli import launcher
from tests.launching import ROOT, run
from tests.support import require

require("gpu")
require("mpi")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["stream", "graph", "ahead"])
def test_a_rank_that_stops(form: str) -> None:
    environment = launcher.environment(2) | {"PYTHONPATH": str(ROOT), "HALOX_TIMEOUT": "4"}
    command = launcher.command(
        launcher.find(), 2, ["-m", "tests.gpu.nccl_failing", form, "stalled"]
    )
    said = run(command, environment, quiet_s=120).said
    if "NONE" in said:
        pytest.skip(said.strip().splitlines()[-1])
    assert "SAID after" in said and "waited for rank 1" in said and "HALOX_TIMEOUT" in said, said
