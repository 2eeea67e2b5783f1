"""``halox bench`` between ranks on GPUs: results are right, and every method that should has a time."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from halox_bench import command
from halox_bench.bench import Bench
from halox_bench.clock import Timing
from halox_bench.rows import right
from tests.support import require

require("gpu")

pytestmark = pytest.mark.gpu

BRIEF = Timing(batches=2, batch_s=1e-4)
NCCL, ZERO_COPY = "pack + NCCL + unpack", "zero-copy + mpi4py"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "words", "shared", "apart"),
    [
        ("exchange", "--sizes 64 --faces x", {ZERO_COPY, "staged", "ipc"}, {NCCL, "peer"}),
        ("exchange", "--sizes 12x10x14 --faces all --fields 3 --dtype f4", {ZERO_COPY}, {NCCL}),
        ("exchange", "--sizes 8x6x4x10 --faces faces --dtype c8 --paths=", {ZERO_COPY}, {NCCL}),
        ("allreduce", "--sizes 8,8KiB,1MiB --dtype f8,c8", {"D2H + MPI_Allreduce + H2D"}, {"NCCL"}),
        (
            *("transpose", "--sizes 20x33x40 --axes 210,120 --dtype c16 --divisions slabs,pencils"),
            *({"staged"}, {NCCL}),
        ),
        ("reductions", "--cells 24 --of fields", {"one reduction"}, set()),
        ("reductions", "--of arrays", {"halox.Allreduce"}, set()),
        ("ddtbench", "--patterns WRF_x_vec/8x8,LAMMPS_full/1907-1662", {ZERO_COPY}, {NCCL}),
        ("ddtbench", "--patterns FFT2/256 --paths=", {ZERO_COPY}, set()),
        ("scatter_gather", "--patterns vector-1KiB/16,arrays-64KiB/*", {ZERO_COPY}, {NCCL}),
        ("steps", "--cells 32 --stencils 7-point", {"one rank"}, set()),
        ("steps", "--cells 32 --stencils fused", set(), {"stencil and exchange"}),
        ("fft", "--cells 16", {"halox.FFT backward"}, set()),
        ("checkpoint", "--cells 16x16x16 --repeats 1", {"grid.load", "copy to the GPU"}, set()),
    ],
)
def test_kinds(
    kind: str, words: str, shared: set[str], apart: set[str], comm: MPI.Intracomm
) -> None:
    bench, given = Bench(comm, "gpu", BRIEF), command.KINDS[kind].parsed(words)
    for case in command.KINDS[kind].cases(given):
        rows = right(command.KINDS[kind].measure(bench, given, case))
        timed = {row.name for row in rows if row.us}
        wanted = shared if bench.shared_gpu else shared | apart
        why = {row.name: row.error for row in rows if row.us is None}
        refused = {name for name in wanted if "NCCL" in why.get(name, "")}  # not installed
        assert wanted - refused <= timed, (case.name, why)
        if not bench.shared_gpu and kind in ("exchange", "transpose"):
            assert any(row.name == "selected" and row.mode == "graph" and row.us for row in rows)
