"""The halo benchmark and the ping-pong on GPUs: every way that can be had is right and has a figure."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from halox.cli.bench.exchange_cases import ExchangeCase
from halox.cli.bench.exchange_rivals_gpu import NCCL, ZERO_COPY
from halox.cli.bench.exchange_run import Bench, ExchangeOptions
from halox.cli.bench.gpu_aware import why_not_gpu_aware
from halox.cli.bench.pingpong_cases import PATTERNS, select
from halox.cli.bench.pingpong_run import PingPongBench, PingPongOptions
from halox.cli.bench.ranks_clock import Timing
from halox.errors import PathError
from tests.support import require

require("gpu")

pytestmark = pytest.mark.gpu

BRIEF = Timing(batches=2, batch_s=1e-4)
CASES = [
    ExchangeCase((64, 64, 64), "x"),
    ExchangeCase((12, 10, 14), "all", 2, "f4", 3),
    ExchangeCase((8, 6, 4, 10), "faces", 1, "c8", 1, (3,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exchange(case: ExchangeCase, comm: MPI.Intracomm) -> None:
    options = ExchangeOptions("gpu", timing=BRIEF, no_gpu_aware=why_not_gpu_aware(comm, "gpu"))
    bench = Bench(comm, options)
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.mode) for row in rows if row.us and row.checked}
    assert {("selected", "stream"), (ZERO_COPY, "stream"), ("staged", "stream")} <= timed
    if not bench.shared_gpu and comm.size > 1:
        refused = {row.name: row.error for row in rows if row.us is None}
        assert ("peer", "graph") in timed and ("selected", "graph") in timed, refused
        assert (NCCL, "stream") in timed or "NCCL" in refused[NCCL]
    # A path that needs the host cannot be captured, and says so.
    (staged,) = [row for row in rows if row.name == "staged" and row.mode == "graph"]
    assert staged.us is None and "captured" in staged.error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["1gpu", "2gpus"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pingpong(pattern: str, place: str, comm: Any) -> None:
    options = PingPongOptions(timing=BRIEF, no_gpu_aware="not tried here")
    try:
        bench = PingPongBench(comm, place, options)
    except PathError as error:
        assert place == "2gpus" and "GPUs" in str(error)
        return
    for rows in bench.run(select([pattern], [16, 300])):
        assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
        timed = {(row.name, row.mode) for row in rows if row.half_us}
        assert {("selected", "stream"), (ZERO_COPY, "stream")} <= timed
