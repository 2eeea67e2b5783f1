"""A rank is killed in the middle of a save; other numbers of ranks restart from the last checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.faults import checkpoints
from tests.faults.programs import start

zarr = pytest.importorskip("zarr")


def run(path: Path, ranks: int, steps: int, dies_at: int = -1) -> tuple[int, str, str]:
    words = ["-m", "tests.faults.checkpoints", str(path), str(steps), str(dies_at)]
    ended = start(words, ranks=ranks, limit_s=300)
    return ended.returncode, ended.stdout, ended.stderr


def check(path: Path, step: int) -> None:
    """zarr-python sees the whole field of that step."""
    group = zarr.open_group(str(path), mode="r")
    assert group.attrs["step"] == step
    assert np.array_equal(group["u"][...], checkpoints.serially(step))


def test_killed_in_a_save_and_restarted_on_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    status, said, errors = run(path, ranks=4, steps=30, dies_at=15)
    assert status != 0 and said.split()[0] == "0", errors[-3000:]
    check(path, 10)
    assert ".run.zarr.partial" in os.listdir(tmp_path), "it was killed outside a save"
    for ranks, begun, steps in ((3, 10, 20), (1, 20, 25)):
        status, said, errors = run(path, ranks, steps)
        assert status == 0 and said.split()[0] == str(begun), (said, errors[-3000:])
        assert os.listdir(tmp_path) == ["run.zarr"]
        check(path, steps)
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(path, chunks=None) as ds:
        assert ds.u.dims == ("x", "y") and np.array_equal(ds.u.x, np.arange(40))
        assert np.array_equal(ds.u, checkpoints.serially(25)) and ds.attrs["step"] == 25
