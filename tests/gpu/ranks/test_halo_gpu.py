"""Stores from a kernel into the halos of other ranks' fields, bit for bit like exchanges."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ExchangeTimeoutError, PathError
from tests.gpu.ranks.paths import why_not
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.halo_steps import Steps, graph_of  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fused.py"

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


@pytest.fixture(autouse=True)
def peers(comm: MPI.Intracomm) -> None:
    reason = why_not(Way("peer/staging"), comm)
    if reason is not None:
        pytest.skip(f"no peer path: {reason}")


def grid(comm: MPI.Intracomm, shape: tuple[int, ...], halo: int = 1, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "gpu", "path": "peer"} | options
    return halox.Grid(shape, halo=halo, comm=comm, **options)


@pytest.mark.parametrize(
    ("shape", "halo", "options", "dtype"),
    [
        ((256, 256), 1, {}, "u4"),
        ((37, 71), 2, {"periodic": (True, False)}, "i2"),
        ((37, 71), 1, {"periodic": False}, "u4"),
        ((20, 25, 28), 1, {}, "u8"),
        ((12, 9, 13), 2, {"periodic": (False, True, True)}, "u4"),
    ],
)
def test_fused_steps(
    shape: tuple[int, ...], halo: int, options: Any, dtype: str, comm: MPI.Intracomm
) -> None:
    with grid(comm, shape, halo, **options) as g:
        steps = Steps(g, dtype)
        steps.fill()
        for number in range(50):
            steps.fused(number)
        for number in range(50):
            steps.alone(number)
        assert agree(steps.same(), comm)


def test_ranks_that_are_late_at_random(comm: MPI.Intracomm) -> None:
    """Hosts and GPUs are late, and exchanges are made between the steps."""
    rng, common = np.random.default_rng(comm.rank), np.random.default_rng(99)
    count = 4000
    with grid(comm, (64, 40)) as g:
        steps = Steps(g)
        steps.fill()
        exchanges = common.integers(0, 20, count) == 0
        for number in range(count):
            if rng.integers(50) == 0:
                steps.spin(float(rng.random() * 200))
            if rng.integers(500) == 0:
                time.sleep(rng.random() * 0.001)
            steps.fused(number)
            if exchanges[number]:
                steps.plan()
        for number in range(count):
            steps.alone(number)
        assert agree(steps.same(), comm)


def test_replays_of_a_graph(comm: MPI.Intracomm) -> None:
    with grid(comm, (128, 64)) as g, cupy.cuda.Stream(non_blocking=True) as stream:
        steps = Steps(g)
        steps.fill()
        graph = graph_of(steps, (0, 1), stream)
        for replay in range(1000):
            graph.launch(stream)
            if replay % 100 == 7:
                steps.plan()
        for number in range(2000):
            steps.alone(number)
        assert agree(steps.same(), comm)


def test_a_rank_that_does_not_step(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours name it; later steps end at once."""
    monkeypatch.setenv("HALOX_TIMEOUT", "2")
    with grid(comm, (64, 8 * comm.size)) as g:
        steps = Steps(g)
        steps.fill()
        steps.fused(0)
        if comm.rank != 1:
            for number in range(1, 6):
                steps.fused(number)
        begin = time.perf_counter()
        cupy.cuda.runtime.deviceSynchronize()
        assert time.perf_counter() - begin < 15
        late = None
        try:
            _ = steps.plan.device_handle
        except ExchangeTimeoutError as error:
            late = str(error)
        found = comm.allgather(late)
        assert found[1] is None
        assert re.search(r"rank 0 has waited for rank 1, beyond the (low|high) side", found[0])


def test_a_path_that_kernels_cannot_take(comm: MPI.Intracomm) -> None:
    with grid(comm, (16, 16), path="staged") as g:
        plan = g.plan(g.zeros())
        with pytest.raises(PathError):
            _ = plan.device_handle
        plan()  # still works


def test_example(comm: MPI.Intracomm) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert main(["--cells", "64", "48", "--steps", "100", "--mode", "fused"]) < 1e-13
