"""Scatters and checkpoints of GPU fields: the same bits as on the CPU, and stream order after queued work."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.io.checkpoint import moving
from tests.limits import cut_shards
from tests.support import require

require("gpu")
pytest.importorskip("tensorstore")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 4)]

CELLS = (24, 20, 36)
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "b": ("?", {}),
    "c": ("c8", {"components": (2, ..., 3)}),
    "f": ("f8", {"staggered": (0, 2)}),
    "p": ("u4", {"parity": "odd"}),
}


@pytest.fixture
def path(comm: MPI.Intracomm) -> Iterator[Path]:
    name = comm.bcast(tempfile.mkdtemp(prefix="halox-test-") if comm.rank == 0 else None)
    yield Path(name)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(name)


def whole(g: halox.Grid, name: str) -> np.ndarray:
    """Values of the whole field, identical on all ranks."""
    dtype, options = FIELDS[name]
    shape = g.layout(g.zeros(dtype, **options)).global_shape
    return np.random.default_rng(3).integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)


@pytest.mark.parametrize("part_bytes", [1 << 10, 8 << 20])
def test_bits_through_a_file_and_another_device(
    part_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PART_BYTES", part_bytes)
    cut_shards(monkeypatch, 1 << 14)
    options: dict[str, Any] = {"comm": comm, "checkerboard": True}
    with (
        halox.Grid(CELLS, device="gpu", **options) as gpu,
        halox.Grid(CELLS, device="cpu", proc_shape=(1, 1, comm.size), **options) as cpu,
    ):
        fields = {name: gpu.scatter(whole(gpu, name), **FIELDS[name][1]) for name in FIELDS}
        assert all(isinstance(u, cupy.ndarray) for u in fields.values())
        gpu.save(path / "a", fields)
        on_host = cpu.load(path / "a")
        cpu.save(path / "b", on_host, compressors="zstd")
        back = gpu.load(path / "b")
        expected = {name: whole(gpu, name) for name in FIELDS}
        for name, u in back.items():
            assert isinstance(u, cupy.ndarray)
            for grid, field in ((gpu, u), (cpu, on_host[name])):
                found = grid.gather(field)
                assert found is None or np.array_equal(found, expected[name]), name
        gpu.save(path / "f.npy", f=fields["f"])
        gpu.load(path / "f.npy", f=back["f"])
        found = gpu.gather(back["f"])
        assert found is None or np.array_equal(found, np.load(path / "f.npy"))


def test_save_follows_the_work_of_the_stream(path: Path, comm: MPI.Intracomm) -> None:
    from tests.gpu.guarded import stall

    with halox.Grid((64 * comm.size, 256, 64), comm=comm, device="gpu") as grid:
        u, v = grid.zeros("f8"), grid.zeros("f8")
        with cupy.cuda.Stream(non_blocking=True):
            stall()
            u += 1
            grid.save(path / "a", u=u)
            stall()
            v += 7
            grid.load(path / "a", u=v)
            cells = grid.interior(v)
            assert float(cells.min()) == float(cells.max()) == 1


def test_records_follow_the_work_of_the_stream(path: Path, comm: MPI.Intracomm) -> None:
    """Whole fields, every third point, and a plane that one rank has; the fields change right after each record."""
    from tests.gpu.guarded import stall

    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    thin, plane = (slice(1, None, 3),) * 3, (slice(4, 5), slice(None), slice(None))
    with halox.Grid(CELLS, comm=comm, device="gpu", checkerboard=True) as grid:
        fields = {name: grid.scatter(whole(grid, name), **FIELDS[name][1]) for name in FIELDS}
        fields |= {"thin": grid.zeros("f8"), "plane": grid.zeros("f4")}
        expected = {name: whole(grid, name) for name in FIELDS}
        regions = {"thin": thin, "plane": plane}
        with (
            halox.Output(grid, path / "a", fields, region=regions, every={"c": 2}) as out,
            cupy.cuda.Stream(non_blocking=True),
        ):
            for n in range(4):
                stall()
                for name in ("thin", "plane", "f"):
                    fields[name] += 1
                out.append(time=n)
                for name in ("thin", "plane"):
                    fields[name] += 100
        comm.Barrier()
        with xarray.open_zarr(path / "a", chunks=None) as ds:
            assert ds.sizes["time"] == 4 and ds.sizes["time_2"] == 2
            for name in ("b", "p", "c"):
                assert all(np.array_equal(u, expected[name]) for u in ds[name].values), name
            for n in range(4):
                assert np.array_equal(ds.f[n], expected["f"] + n + 1)
                assert (ds.thin[n] == 101 * n + 1).all() and (ds.plane[n] == 101 * n + 1).all()
            assert ds.thin.shape == (4, 8, 7, 12) and ds.plane.shape == (4, 1, 20, 36)
        comm.Barrier()


def test_records_of_particles(path: Path, comm: MPI.Intracomm) -> None:
    """They have changed by work of a stream before each record, and move right after it."""
    from tests.gpu.guarded import stall

    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    key = np.arange(1000 * (comm.rank == 0))
    with halox.Grid(CELLS, comm=comm, device="gpu", periodic=True) as grid:
        p = halox.Particles(grid, key[:, None] * [0.25, 0.5, 1], key=key, v=np.float32(0.1))
        with (
            halox.Output(grid, path / "a", p=p, keepbits={"p.v": 9}) as out,
            cupy.cuda.Stream(non_blocking=True),
        ):
            for n in range(3):
                stall()
                p["key"] += 1
                out.append(time=n)
                p.position += 1
                p.migrate()
        comm.Barrier()
        with xarray.open_zarr(path / "a", chunks=None) as ds:
            for n in range(3):
                order = np.argsort(ds["p.key"].values[n])
                assert np.array_equal(ds["p.key"].values[n, order], np.arange(1000) + n + 1)
                x = (np.arange(1000)[:, None] * [0.25, 0.5, 1] + n + 0.5) % CELLS - 0.5
                assert np.array_equal(ds["p.position"].values[n, order], x)
            assert abs(ds["p.v"] - 0.1).max() < 1e-4
        comm.Barrier()


def test_windows_and_rounding_on_streams_that_change(path: Path, comm: MPI.Intracomm) -> None:
    """Each record has arrays of its own, on a stream of its own that is stalled; the arrays change right after it."""
    import tensorstore

    from tests.gpu.guarded import stall

    def stored(name: str) -> Any:
        store = {"driver": "file", "path": f"{path}/a/{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
        return array.read().result().reshape(2, -1)

    with halox.Grid(CELLS, comm=comm, device="gpu", halo=1) as grid:
        fields = {
            "f": grid.zeros("f4", staggered=1, components=2),
            "c": grid.zeros("c8"),
            "n": grid.zeros("i2"),
        }
        options: dict[str, Any] = {"mean": ["c", "f", "n"], "max": ["f", "n"], "keepbits": {"c": 6}}
        every = dict.fromkeys(fields, 3)
        with halox.Output(grid, path / "a", fields, every=every, **options) as out:
            for number in range(6):
                new = {name: grid.zeros_like(u) for name, u in fields.items()}
                cupy.cuda.get_current_stream().synchronize()
                with cupy.cuda.Stream(non_blocking=True):
                    stall()
                    new["f"][...] = 1.75 - number**2
                    new["n"][...] = -(number**2)
                    new["c"][...] = 1 + 0.3j * number
                    out.append(new, time=number)
                    for u in new.values():
                        u[...] = 77
        comm.Barrier()
    squares = np.array([[0, 1, 4], [9, 16, 25]])
    for name, constant in (("f", 1.75), ("n", 0)):
        values = constant - squares
        for method, expected in (("mean", values.mean(1)), ("max", values.max(1))):
            assert np.allclose(stored(f"{name}_{method}"), expected[:, None], rtol=1e-6), name
    imag = np.round([0.3 * 256, 1.2 * 64]) / [256, 64]  # 6 bits
    assert (stored("c_mean") == (1 + 1j * imag)[:, None].astype("c8")).all()
    comm.Barrier()
