"""Tuning on GPUs: `halox tune` measures the available paths and stores constants, which the next plan uses."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

import halox
from halox.cli import links, paths, tune
from halox.plans import calibration
from halox.runtime.gpu import cuda
from tests.support import require

require("gpu")

pytestmark = pytest.mark.gpu

SYS = Path("/sys")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a cache folder that only this rank uses."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        yield Path(name)


def grid_of(comm: MPI.Intracomm) -> halox.Grid:
    n = comm.size
    return halox.Grid(
        (16 * n, 24, 24), halo=1, periodic=True, proc_shape=(n, 1, 1), comm=comm, device="gpu"
    )


def test_plans_are_predicted_and_measured(folder: Path, comm: MPI.Intracomm) -> None:
    with grid_of(comm) as grid:
        u = grid.full(float(comm.rank), "f8")
        plan = grid.plan(u)
        for row in plan.measure(repeats=20).rows:
            if row.peer == comm.rank:
                continue
            assert row.predicted_us is not None and row.predicted_us > 0
            assert row.measured_us is not None and row.measured_us > 0
        low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        assert bool((u[0] == low).all()) and bool((u[-1] == high).all())


def test_the_next_plan_uses_the_measured_constants(
    folder: Path, comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    if comm.size == 1:
        return
    args = argparse.Namespace(device="gpu", dry_run=False, json=True)
    assert tune.tune_on_ranks(args, comm) == 0
    said = comm.bcast(capsys.readouterr().out if comm.rank == 0 else None)
    figures = json.loads(said)
    after = [row for row in figures["rows"] if row["constants"] == "after"]
    found = {row["protocol"].split(",")[0] for row in after}
    assert "staged/shared" in found, figures["not_measured"]
    assert found | set(figures["not_measured"]) == set(tune.probing.tuned_protocols("gpu"))
    assert figures["seconds"] < 60
    set_up = calibration.Fingerprint(*(figures[k] for k in ("gpu", "driver", "topology", "mpi")))
    assert calibration.tuning_file(set_up).exists() == (comm.rank == 0)
    costs = comm.bcast(calibration.load(set_up))
    assert costs is not None
    shared = "shared by ranks" in figures["topology"]
    with grid_of(comm) as grid:
        rows = [r for r in grid.plan(grid.zeros("f8")).explain().rows if r.peer != comm.rank]
        for row in rows:
            wanted = costs.predict(
                row.path, row.protocol, row.nbytes, row.block_bytes, shared_gpu=shared
            )
            assert row.predicted_us == pytest.approx(wanted)


def test_the_matrix_of_paths(folder: Path, comm: MPI.Intracomm) -> None:
    hops = paths.collect(comm)
    if hops is None:
        return
    figures = paths.figures_of(comm.size, hops)
    for sender, row in enumerate(figures["rows"]):
        for receiver in range(comm.size):
            cell = row[str(receiver)]
            assert cell is not None and (cell == "local/copy") == (sender == receiver)
    if comm.size > 1:
        assert any(text.startswith("host: ") for text in figures["not_possible"])


def test_the_check_of_links(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links between GPUs are of the kind that CUDA and nvidia-smi show; copies by HALOX_PATH=staged are named."""
    if comm.size == 1:
        return
    gpus = comm.allgather(
        links.info.machine(comm.rank % cuda.gpu_count(), SYS, asks_nvlinks=False).gpu
    )
    monkeypatch.setattr(links, "_MOST_BYTES", 1 << 22)
    for path in ("", "staged"):
        monkeypatch.setenv("HALOX_PATH", path)
        links.show(comm, as_json=True)
        figures = json.loads(comm.bcast(capsys.readouterr().out if comm.rank == 0 else None))
        kinds = {row["link"]: row for row in figures["rows"]}
        assert ("same GPU" in kinds) == (len(set(gpus)) < comm.size)
        assert (kinds.keys() & {"NVLink", "PCIe"} != set()) == (len(set(gpus)) > 1)
        assert all(row["slowest_GB/s"] > 0 and row["expected_GB/s"] > 0 for row in kinds.values())
        named = {line.partition(",")[0] for line in figures["findings"]}
        if path == "staged":
            assert named & {"staged copies", "missing peer access"}
        else:
            assert "staged copies" not in named
