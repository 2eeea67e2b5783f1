"""A rank stops or dies during exchanges by NCCL: halox aborts the exchange of the other rank, whose next call raises.

This includes exchanges in CUDA graphs. tests/gpu/test_failures_gpu.py kills ranks on all paths.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failing import Job, run
from tests.support import require

require("gpu")
require("mpi")

import cupy  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    ("form", "fault"),
    [("stream", "stalled"), ("graph", "stalled"), ("ahead", "stalled"), ("graph", "killed")],
)
def test_a_rank_that_stops(form: str, fault: str, tmp_path: Path) -> None:
    limits = {"HALOX_TIMEOUT": "4"}
    job = Job("tests.gpu.nccl_failing", [form, fault], limit_s=120, environment=limits)
    ended = run(job, tmp_path)
    said = ended.told.get("said 0", ended.said[-4000:])
    if said.startswith("none"):
        pytest.skip(said)
    assert said.startswith("after"), said
    assert "waited for rank 1" in said and "HALOX_TIMEOUT" in said, said
