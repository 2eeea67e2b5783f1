"""``halox bench checkpoint``: its rows and verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import halox
from halox_bench.checkpoint import run
from tests.support import halox_bench, require

GIB = (512, 512, 512)


@pytest.mark.parametrize(
    "name, seconds, extra, shape, verdict",
    [
        (run.SAVE, 1.2, 255.0, GIB, "1.3 x met"),
        (run.SAVE, 1.4, 300.0, GIB, "1.3 x missed, 256 MiB missed"),
        (f"{run.LOAD} on 1x1x4", 2.5, 1.0, GIB, "1.3 x met"),
        (run.LOAD, 2.7, None, GIB, "1.3 x missed, MiB unknown"),
        (f"{run.SAVE}, zstd", 9.0, 1.0, GIB, ""),
        (run.WRITE, 1.0, 1.0, GIB, ""),
        (run.SAVE, 9.0, 1.0, (8, 8, 8), ""),
    ],
)
def test_verdicts(name: str, seconds: float, extra: float, shape: tuple, verdict: str) -> None:
    times = {run.WRITE: [1.0], run.READ: [2.0]} | {name: [seconds]}
    assert run.row_of(run.CheckpointCase(shape), name, 4, times, [extra, 0.0]).verdict == verdict


def test_copies_that_take_longer_are_the_measure_of_a_gpu() -> None:
    times = {run.WRITE: [1.0], run.TO_HOST: [2.0], run.SAVE: [2.3]}
    row = run.row_of(run.CheckpointCase(GIB), run.SAVE, 1, times, [0.0])
    assert (row.ratio, row.target, row.verdict) == (1.15, run.GPU_TARGET, "1.2 x met")


def test_the_signature_depends_on_every_bit_and_place() -> None:
    require("mpi")
    with halox.Grid((4, 6, 5), device="cpu") as grid:
        values = np.random.default_rng(0).random(grid.grid_shape)
        bits = values.view("u8").reshape(-1).tolist()
        expected = sum(one * (2 * place + 1) for place, one in enumerate(bits)) % (1 << 64)
        assert run._signature(grid, grid.scatter(values)) == expected


def test_loads_on_other_process_grids_are_rows(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    place = tmp_path / "found.json"
    words = [
        "checkpoint",
        "-n",
        "2",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--cells",
        "9x8x7",
        "--onto",
        "1x1x2,1x2x1",
    ]
    ended = halox_bench(*words, "--folder", str(tmp_path), "--json", str(place))
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [row["name"] for row in json.loads(place.read_text())["rows"]]
    others = [f"{run.LOAD} on {division}" for division in ("1x1x2", "1x2x1")]
    assert rows == [run.WRITE, run.SAVE, run.READ, run.LOAD, *others]
    assert list(tmp_path.iterdir()) == [place]
