"""DDTBench between two ranks: every method of every pattern is right, phases are there, and wrong bytes are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halox.exchange.typed import Exchange
from halox_bench.ddtbench import baselines
from halox_bench.ddtbench.cases import PATTERNS, select
from halox_bench.ddtbench.run import DdtBench
from halox_bench.pingpong.baselines import BY_HAND, MPI_TYPES
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing

pytestmark = pytest.mark.usually(2)

OPTIONS = Options("cpu", timing=Timing(batches=1, batch_s=1e-5))

SMALL = {
    "WRF": "8x8",
    "MILC": "8x8x8x8",
    "NAS_LU": "12",
    "NAS_MG": "34x18x18",
    "LAMMPS_full": "1907-1662",
    "LAMMPS_atomic": "1217-114",
    "SPECFEM3D_mt": "c3",
    "SPECFEM3D": "c1",
    "FFT2": "256",
}
PHASED = (BY_HAND, baselines.MPI_PACK, baselines.HALOX_PACK)
OURS = ("selected", "host", "scatter_gather")
NAMES = [*OURS, MPI_TYPES, *PHASED, baselines.REFERENCE]


def small(pattern: str) -> str:
    return f"{pattern}/{next(size for start, size in SMALL.items() if pattern.startswith(start))}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_method_is_right(pattern: str, comm: Any) -> None:
    (case,) = select([small(pattern)])
    rows = DdtBench(comm, "host", OPTIONS).measure(case)
    assert [row.name for row in rows] == NAMES
    assert all(row.checked and row.us for row in rows), [row.error for row in rows]
    for row in rows:
        assert (row.communicate_us is not None) == (row.name in (*PHASED, baselines.REFERENCE))
        assert (row.pack_us is not None) == (row.unpack_us is not None) == (row.name in PHASED)
        said = row.as_dict()
        assert said["half_us"] == row.us and said["nbytes"] == case.nbytes


def spoilt(rows: Any) -> set[str]:
    assert all("4-byte words" in row.error and row.us is None for row in rows if row.failed)
    return {row.name for row in rows if row.failed}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", ["LAMMPS_atomic", "NAS_MG_x", "MILC_su3_zdown", "FFT2"])
def test_wrong_bytes_are_seen(pattern: str, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = select([small(pattern)])
    bench = DdtBench(comm, "host", OPTIONS)
    move: Callable[..., Any] = baselines.Packed._go

    def beside(self: Any, direction: int) -> None:
        move(self, direction)
        if isinstance(self, baselines.MpiPacked) and comm.rank == 1 and direction == 1:
            self._array[-1] ^= 1

    monkeypatch.setattr(baselines.Packed, "_go", beside)
    assert spoilt(bench.measure(case)) == {baselines.MPI_PACK}
    monkeypatch.setattr(baselines.Packed, "_go", move)
    # What moves nothing at all, one way or both.
    monkeypatch.setattr(baselines.MpiTypes, "back", lambda self: None)
    monkeypatch.setattr(Exchange, "__call__", lambda self: None)
    assert spoilt(bench.measure(case)) == {*OURS, MPI_TYPES}


@pytest.mark.ranks(2)
def test_the_transpose_of_fft2_is_one(comm: Any) -> None:
    """Both ranks' rows together, seen as a matrix, against NumPy's transpose."""
    (case,) = select(["FFT2/256"])
    n, rows = 256, 128
    whole = np.arange(2 * n * n, dtype="f8").view("c16").reshape(n, n)
    slab = np.zeros(case.slab_bytes, np.uint8)
    matrix, turned = (part.view("c16").reshape(rows, n) for part in case.of_slab(slab))
    mine = slice(rows * comm.rank, rows * (comm.rank + 1))
    matrix[:] = whole[mine]
    trip = baselines.HaloxPacked(comm, case, slab, None)
    trip.there()
    np.testing.assert_array_equal(turned, whole.T[mine])
    matrix[:] = 0
    trip.back()
    np.testing.assert_array_equal(matrix, whole[mine])
