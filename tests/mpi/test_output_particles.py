"""Particles in records: xarray reads each particle once, in any number of them, also after restarts on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import CheckpointError, FieldError, MismatchError
from tests.limits import cut_shards
from tests.mpi.conftest import agree
from tests.mpi.test_checkpoints import names_in
from tests.mpi.test_output import opened, path

pytestmark = pytest.mark.usually(1, 3, 4)

pytest.importorskip("tensorstore")
xarray = pytest.importorskip("xarray")
pytest.importorskip("zarr")

__all__ = ["path"]  # a fixture

CELLS = (8, 6)
TAG = np.dtype([("a", "i2"), ("b", "f8")], align=True)
NUMBERS = [3, 40, 0, 1, 90, 7]
"""Particles of each record."""


def whole(record: int) -> dict[str, np.ndarray]:
    """Return the particles of a record, by their keys."""
    key = np.arange(NUMBERS[record]) * 3 + record
    rng = np.random.default_rng(record)
    tag = np.full(len(key) * TAG.itemsize, 0xFF, "u1").view(TAG)
    tag["a"], tag["b"] = key, -key
    return {
        "position": rng.random((len(key), 2)) * CELLS - 0.5,
        "key": key,
        "v": rng.normal(size=(len(key), 2, 3)).astype(">f4"),
        "tag": tag,
    }


def particles(grid: halox.Grid, record: int, more: Any = ()) -> halox.Particles:
    """Return the particles of a record; the first ranks give none."""
    part = slice(grid.rank, None, grid.size) if NUMBERS[record] > 3 else slice(99 * grid.rank, None)
    given: dict[str, Any] = {name: values[part] for name, values in whole(record).items()}
    return halox.Particles(grid, **given, **dict(more))


def check(ds: Any, record: int, where: int) -> None:
    """Assert that a record has each particle once, with its attributes."""
    right, count = whole(record), int(ds.p_count[where])
    found = {name: ds[f"p.{name}"].values[where, :count] for name in right}
    order = np.argsort(found["key"])
    for name, values in right.items():
        mine = found[name][order]
        if name == "tag":
            assert not mine[:, 2:8].any()  # between the members
            mine = mine.view(TAG)[:, 0]
        assert np.array_equal(mine, values) and mine.dtype == values.dtype.newbyteorder("=")
        rest = ds[f"p.{name}"].values[where, count:]
        assert np.isnan(rest).all() if rest.dtype.kind == "f" else not rest.any()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes", [600, 1 << 25])
def test_xarray_reads_the_particles_of_each_record(
    shard_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other particles in each record, beside a field; a second table is stored less often, and rounded."""
    cut_shards(monkeypatch, shard_bytes)
    with halox.Grid(CELLS, device="cpu", comm=comm) as grid:
        u, p = grid.zeros(), particles(grid, 0)
        q = halox.Particles(grid, [(1.0, 2.0)], w=np.float32(1.2345678))
        options: dict[str, Any] = {
            "every": {"q": 4},
            "keepbits": {"q.w": 3},
            "region": [slice(2)] * 2,
        }
        with halox.Output(grid, path, u=u, p=p, q=q, **options) as out:
            for record in range(len(NUMBERS)):
                new = particles(grid, record)
                out.append(
                    {"p": new} if record % 2 else None,
                    time=record,
                    **{} if record % 2 else {"p": new},
                )
                new.position[...] = 0  # the record has been copied

    def look(ds: Any) -> None:
        assert ds.p_count.values.tolist() == NUMBERS and ds.sizes["p_row"] == 90
        for record in range(len(NUMBERS)):
            check(ds, record, record)
        assert ds["q.w"].dims == ("time_4", "q_row") and ds.u.shape == (6, 2, 2)
        assert ds.q_count.values.tolist() == [comm.size] * 2 and (ds["q.w"] == 1.25).all()

    opened(path, comm, look)


@pytest.mark.ranks(1, 2, 3, 4)
def test_restarts_on_other_ranks(path: Path, comm: MPI.Intracomm) -> None:
    """Two lines make the particles of a record again, each once; later records are replaced, and their files go."""
    dates = np.datetime64("2026-03-01T06") + np.arange(6) * np.timedelta64(90, "m")
    with halox.Grid(CELLS, device="cpu", comm=comm) as grid:
        out = halox.Output(grid, path, p=particles(grid, 0), mode="a")
        for record in (0, 1, 4, 4):
            out.append(time=dates[record if out.records < 3 else 5], p=particles(grid, record))
            out.wait()
    half = comm.Split(comm.rank % 2)
    if comm.rank % 2 == 0:
        with halox.Grid(CELLS, device="cpu", comm=half, proc_shape=(1, 0)) as grid:
            with xarray.open_zarr(path, chunks=None) as ds:
                part = slice(grid.rank, int(ds.p_count[1]), grid.size)
                q = halox.Particles(
                    grid, **{n: ds[f"p.{n}"][1, part] for n in ("position", "key", "v")}
                )
            right = whole(1)
            there = [
                *zip(right["key"], right["position"].tolist(), right["v"].tolist(), strict=True)
            ]
            here = half.allgather(
                [*zip(q["key"], q.position.tolist(), q["v"].tolist(), strict=True)]
            )
            assert agree(sorted(one for each in here for one in each) == there, half)
            p = particles(grid, 0)
            with halox.Output(grid, path, p=p, mode="a", time=dates[1]) as out:
                assert agree(out.records == 2, half)
                assert names_in(path / "p.v" / "c", half) == ["0", "1"]
                for record in (2, 3):
                    out.append(time=dates[record], p=particles(grid, record))
    half.Free()

    def look(ds: Any) -> None:
        assert np.array_equal(ds.time.values, dates[:4]) and ds.sizes["p_row"] == 40
        for record in range(4):
            check(ds, record, record)

    opened(path, comm, look)


def test_particles_that_move_and_grow(path: Path, comm: MPI.Intracomm) -> None:
    """A time loop of one and of three axes, whose arrays are others after each step; ranks without particles."""
    for shape in ((12,), (2, 6, 3)):
        at = path.with_name(f"{len(shape)}.zarr")
        procs = (0, *[1] * (len(shape) - 1)) if len(shape) == 1 else (1, 0, 1)
        with halox.Grid(shape, periodic=True, device="cpu", comm=comm, proc_shape=procs) as grid:
            p = halox.Particles(grid, np.zeros((1000 * (grid.rank == 0), len(shape))))
            p["key"] = np.arange(len(p))
            with halox.Output(grid, at, p=p) as out:
                for step in range(12):
                    out.append(time=step)
                    p.position += 1
                    p.migrate()

        def look(ds: Any, shape: Any = shape) -> None:
            assert (ds.p_count == 1000).all() and ds.sizes["time"] == 12
            assert (np.sort(ds["p.key"], axis=1) == np.arange(1000)).all()
            for step in range(12):
                assert (ds["p.position"][step].values == [step % n for n in shape]).all()

        opened(at, comm, look)


def test_bad_input_is_one_error_on_all_ranks(path: Path, comm: MPI.Intracomm) -> None:
    with halox.Grid(CELLS, device="cpu", comm=comm) as grid:
        u, p = grid.zeros(), particles(grid, 0)
        windows = {"every": {"p": 2}}
        for options, words in (
            ({"mean": ["p"], **windows}, "mean: 'p' is no field; the fields are u"),
            ({"max": "p.v", **windows}, "max: 'p.v' is no field"),
            ({"region": {"p": [slice(1)] * 2}}, "region: 'p' is no field"),
            ({"keepbits": {"p.key": 3}}, "keepbits: p.key "),
            ({"every": {"p.v": 2}}, "every: 'p.v' is no field"),
            ({"p_count": u}, "p_count "),
            ({"p.v": u}, "p.v is the name of"),
        ):
            with pytest.raises(FieldError, match=words):
                halox.Output(grid, path, u=u, p=p, **options)
        with halox.Output(grid, path, u=u, p=p) as out:
            out.append(time=0)
            for new, words in (
                ({"p": u}, "p.position is missing"),
                ({"u": p}, "u.position is no field"),
                ({"p": particles(grid, 0, {"more": 1})}, "p.more is no field"),
                ({"p": halox.Particles(grid, [(1, 1)], key=1, v=1)}, "p.tag is missing"),
            ):
                with pytest.raises(FieldError, match=words):
                    out.append(new, time=1)
            if comm.rank == comm.size - 1:
                p["more"] = 1
            with pytest.raises((FieldError, MismatchError), match="more"):
                out.append(time=1)
            p["more"] = 1
            del p["more"]
            out.append(time=1)
            with halox.Grid(CELLS, device="cpu", comm=comm) as other, pytest.raises(FieldError):
                out.append(time=2, p=particles(other, 0))
        p["v"] = p["v"] * 0
        p["more"] = 1
        with pytest.raises(CheckpointError, match=r"p\.more is nothing"):
            halox.Output(grid, path, u=u, p=p, mode="a")
    opened(path, comm, lambda ds: np.testing.assert_array_equal(ds.p_count, [3, 3]))
