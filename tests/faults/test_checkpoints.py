"""The last checkpoint survives a rank killed during a save, a full disk and a second job that saves to its path."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.faults import checkpoints, outputs
from tests.faults.programs import private_memory, result, start, why_no_private_memory
from tests.support import full

pytest.importorskip("tensorstore")
zarr = pytest.importorskip("zarr")


def run(path: Path, ranks: int, steps: int, dies_at: int = -1) -> tuple[int, str, str]:
    words = ["-m", "tests.faults.checkpoints", str(path), str(steps), str(dies_at)]
    ended = start(words, ranks=ranks, limit_s=300)
    return ended.returncode, ended.stdout, ended.stderr


def check(path: Path, step: int) -> None:
    """Assert that zarr-python reads the whole field of that step."""
    group = zarr.open_group(str(path), mode="r")
    assert group.attrs["step"] == step
    assert np.array_equal(group["u"][...], checkpoints.serially(step))


def test_killed_in_a_save_and_restarted_on_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    status, said, errors = run(path, ranks=3, steps=30, dies_at=15)
    assert status != 0 and said.split()[0] == "0", errors[-3000:]
    check(path, 10)
    assert len(os.listdir(tmp_path)) > 1, "it was killed outside a save"
    status, said, errors = run(path, ranks=2, steps=20)
    assert status == 0 and said.split()[0] == "10", (said, errors[-3000:])
    assert os.listdir(tmp_path) == ["run.zarr"]
    check(path, 20)


@pytest.mark.parametrize("killed", [[3], *full([4, 3, 2, 4])])
def test_an_output_killed_at_random_moments_and_continued_on_other_ranks(
    killed: list[int], tmp_path: Path
) -> None:
    """Readers see whole records only, and all that a wait has seen."""
    xarray = pytest.importorskip("xarray")
    path, kept = tmp_path / "run.zarr", 0
    delays = np.random.default_rng(37).integers(20, 700, len(killed)).tolist()
    for ranks, delay in zip((*killed, 1), (*delays, -1), strict=True):
        last = 100_000 if delay >= 0 else kept + 20
        words = ["-m", "tests.faults.outputs", str(path), str(last), str(delay)]
        ended = start(words, ranks=ranks, limit_s=300)
        assert (ended.returncode == 0) == (delay < 0), ended.stderr[-3000:]
        said = [int(word) for word in ended.stdout.split()]
        assert said[0] == kept, (said, kept)
        with xarray.open_zarr(path, chunks=None) as ds:
            assert ds.sizes["time"] >= said[-1]
            assert ds.time.values.tolist() == list(range(ds.sizes["time"]))
            expected = np.array([outputs.whole(n) for n in range(ds.sizes["time"])])
            assert np.array_equal(ds.u, expected.reshape(ds.u.shape)), (ranks, delay)
            for n in range(ds.sizes["time"]):
                found = ds["p.position"].values[n, : int(ds.p_count[n])]
                assert np.array_equal(found[found[:, 0].argsort()], outputs.positions(n)), n
            kept = ds.sizes["time"]
    assert kept == last and len(os.listdir(path / "u" / "c")) == last
    assert os.listdir(tmp_path) == ["run.zarr"]


def test_a_disk_without_room_for_the_next_one(tmp_path: Path) -> None:
    """The disk has 2 MiB; the second checkpoint would need 3."""
    reason = why_no_private_memory()
    if reason is not None:
        pytest.skip(f"needs a small disk: {reason}")
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["tests.faults.full_disk", str(disk)]
    small = private_memory("2m", str(disk))
    found, names = result(words, tmp_path / "found", ranks=3, limit_s=200, before=small)
    assert names == ["run.zarr", "u.npy"]
    for name, text in (
        ("run.zarr", "No space left"),
        ("u.npy", "No space left"),
    ):
        errors, is_right = found[name]
        assert is_right and len(set(errors)) == 1 and text in errors[0], errors


@pytest.mark.parametrize("ranks", [2, *full(3)])
def test_loads_while_two_jobs_save_to_the_same_path(ranks: int, tmp_path: Path) -> None:
    """Each load returns the whole of one save, or raises an error."""
    words = ["tests.faults.replaced", str(tmp_path)]
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(start, ["-m", *words, name], ranks=1) for name in ("first", "second")]
        try:
            found = result([*words, "load"], tmp_path / "found", ranks=ranks)
        finally:
            (tmp_path / "done").touch()
        for job in saves:
            ended = job.result()
            assert ended.returncode == 0, ended.stderr[-3000:]
    assert found["mixed"] == [] and found["succeeded"] >= 2, found
