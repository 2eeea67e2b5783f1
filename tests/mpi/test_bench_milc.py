"""The MILC benchmark between ranks: tables of fewer ranks, lattices that they cannot divide, targets."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from halox_bench.milc import targets
from halox_bench.milc.cases import MilcCase
from halox_bench.milc.run import MilcBench
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from tests.mpi.conftest import agree

pytestmark = pytest.mark.usually(2)

TIMING = Timing(batches=1, batch_s=1e-5)
OPTIONS = Options("cpu", timing=TIMING)


@pytest.mark.ranks(2, 3)
def test_strong_and_weak(comm: MPI.Intracomm) -> None:
    bench = MilcBench(comm, OPTIONS)
    case = MilcCase((8, 6, 6, 12), "naive")
    found = [row for one in bench.suited([case]) for row in bench.measure(one)]
    ours = [row for row in found if row.name == "halox"]
    counts = [1, 2, 3][: comm.size]
    expected = [("strong", n) for n in counts] + [("weak", n) for n in counts[1:]]
    ok = [(row.scaling, row.ranks) for row in ours] == expected
    ok = ok and all(row.us and row.checked and not row.error for row in found)
    alone = ours[0].us or 0.0
    for row in ours:
        parts = row.ranks if row.scaling == "strong" else 1
        ok = ok and row.efficiency == pytest.approx(alone / (parts * (row.us or 0.0)))
    ok = ok and len([row for row in found if row.kind == "baseline"]) == 2
    assert agree(ok and comm.bcast(found) == found, comm)


@pytest.mark.ranks(2)
def test_a_lattice_that_is_too_thin(comm: MPI.Intracomm) -> None:
    bench = MilcBench(comm, OPTIONS)
    (row,) = bench.measure(MilcCase((2, 2, 2, 2)))
    ok = row.us is None and not row.failed and "left out: --lattice 2 2 2 2 on 2 rank" in row.error
    (after, *_) = bench.measure(MilcCase((6, 6, 6, 6), "naive", "single"))
    assert agree(ok and after.us is not None, comm)


@pytest.mark.ranks(1, 2)
def test_figures_with_targets(comm: MPI.Intracomm) -> None:
    bench = MilcBench(comm, OPTIONS)
    found = [
        figure for group in targets.groups_on(bench, [(8, 6, 6, 6)]).values() for figure in group()
    ]
    if comm.size == 1:
        ok = len(found) == 8 and all(one["target"] == 1.5 and one["at_most"] for one in found)
    else:
        ok = [one["met"] for one in found] == [None] * 3
    assert agree(ok and all(one["value"] > 0 for one in found), comm)
