"""Records in time: xarray reads the whole fields of a serial computation, on any ranks, also after restarts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.checkpoint import moving, output, store
from halox.errors import CheckpointError, ClosedError, FieldError, HaloxError, MismatchError
from tests.limits import cut_shards
from tests.mpi.test_checkpoints import small_disk
from tests.mpi.test_scatter import whole_array

pytestmark = pytest.mark.usually(1, 3)

pytest.importorskip("tensorstore")
xarray = pytest.importorskip("xarray")
pytest.importorskip("zarr")

CELLS = (11, 12)
FIELDS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "h": ("f8", {}, (11, 12)),
    "q": (">f4", {"staggered": 1, "components": 2}, (2, 11, 13)),
    "n": ("i2", {"components_after": 3}, (11, 12, 3)),
}


@pytest.fixture
def path(comm: MPI.Intracomm) -> Iterator[Path]:
    """A path that does not exist, in a folder of all ranks."""
    name = comm.bcast(tempfile.mkdtemp(prefix="halox-test-") if comm.rank == 0 else None)
    yield Path(name) / "run.zarr"
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(name)


def grid(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    return halox.Grid(CELLS, **({"comm": comm, "device": "cpu"} | options))


def whole(name: str, time: float) -> np.ndarray:
    """Return the whole field at a time, other values at each time."""
    dtype, _, shape = FIELDS[name]
    return (whole_array(shape, "u1") * 3 + int(10 * time)).astype(dtype)


def fields(g: halox.Grid) -> dict[str, Any]:
    return {name: g.zeros(np.dtype(d), **options) for name, (d, options, _) in FIELDS.items()}


def fill(g: halox.Grid, mine: dict[str, Any], time: float) -> None:
    for name, u in mine.items():
        g.scatter(whole(name, time) if g.rank == 0 else None, out=u)


def run(out: halox.Output, g: halox.Grid, mine: dict[str, Any], times: Any) -> None:
    for time in times:
        fill(g, mine, time)
        out.append(time=time)
        for u in mine.values():
            u[...] = 77  # the record has been copied


def check(path: Path, times: Any, name: str = "h", every: int = 1, cut: Any = ...) -> None:
    """Assert that xarray reads these records."""
    axis = "time" if every == 1 else f"time_{every}"
    with xarray.open_zarr(path, chunks=None) as ds:
        assert ds[name].dims[0] == axis
        assert ds["time"].values.tolist() == list(times)
        assert ds[axis].values.tolist() == list(times)[::every]
        assert ds[name].dtype == np.dtype(FIELDS[name][0]).newbyteorder("=")
        expected = [whole(name, time)[cut] for time in list(times)[::every]]
        assert np.array_equal(ds[name], np.array(expected).reshape(ds[name].shape))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes", [300, 1 << 20])
def test_xarray_reads_the_records(
    shard_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, shard_bytes, 100)
    times = [0.5 * n for n in range(7)]
    x = np.linspace(0, 1, 11)
    with grid(comm) as g:
        mine = fields(g)
        options: dict[str, Any] = {"coords": {"lon": x}, "dims": ("lon", "lat"), "attrs": {"a": 1}}
        with halox.Output(g, path, mine, every={"n": 3}, **options) as out:
            run(out, g, mine, times)
            assert 5 <= out.records <= 7
        assert out.records == 7
    comm.Barrier()
    for name, every in (("h", 1), ("q", 1), ("n", 3)):
        check(path, times, name, every)
    with (
        xarray.open_zarr(path, chunks=None) as ds,
        xarray.open_zarr(path, chunks=None, consolidated=False) as alone,
    ):
        assert ds.attrs["a"] == 1 and np.array_equal(ds.lon, x)
        assert ds.h.dims == ("time", "lon", "lat")
        assert ds.q.dims == ("time", "q_component_0", "lon", "lat_face")
        assert ds.identical(alone)  # once closed, also single arrays have their length


@pytest.mark.ranks(1, 2, 3, 4)
def test_continued_on_other_ranks(path: Path, comm: MPI.Intracomm) -> None:
    """The records after the restart are replaced, and their files removed."""
    with grid(comm) as g:
        mine = fields(g)
        with halox.Output(g, path, mine, mode="a", every={"n": 3}) as out:
            run(out, g, mine, range(8))
    few = comm.Split(comm.rank < max(1, comm.size - 1))
    if comm.rank < few.size or comm.size == 1:
        with grid(few, proc_shape=(0, 1), halo=2) as g:
            mine = fields(g)
            with halox.Output(g, path, mine, mode="a", time=4.5, every={"n": 3}) as out:
                assert out.records == 5
                for name, most in (("h", 5), ("n", 2)):
                    assert len(os.listdir(path / name / "c")) == most
                few.Barrier()
                check(path, range(5))
                few.Barrier()
                run(out, g, mine, [4.5, 5.5, 6.5])
                out.wait()
                few.Barrier()
                check(path, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5])
                check(path, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5], "n", 3)
                few.Barrier()
    few.Free()
    if comm.rank == 0:
        (path / "h" / "c" / ".nfs01").touch()  # of the file system
    comm.Barrier()
    with grid(comm) as g:
        mine = fields(g)
        out = halox.Output(g, path, mine, mode="a", every={"n": 3})
        run(out, g, mine, [7, 8])
    # Closing the grid has closed the output.
    assert out.records == 10
    comm.Barrier()
    check(path, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5, 7, 8], "n", 3)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes", [100, 1 << 20])
def test_regions_and_strides(
    shard_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, shard_bytes, 50)
    h, q = (slice(3, 10, 3), slice(None)), (slice(0, 2), slice(-4, None, 2))
    with grid(comm) as g:
        mine = fields(g)
        y = np.arange(13) * 2.0
        with halox.Output(
            g, path, mine, region={"h": h, "q": q}, coords={"y_face": y}, attrs={"x": np.nan}
        ) as out:
            run(out, g, mine, range(3))
        # One region for all fields: the dimensions keep their names.
        everywhere = path.with_name("coarse.zarr")
        with halox.Output(g, everywhere, mine, region=(slice(None, None, 2), slice(1, 9))) as out:
            run(out, g, mine, range(2))
    comm.Barrier()
    check(path, range(3), "h", cut=h)
    check(path, range(3), "q", cut=(slice(None), *q))
    check(path, range(3), "n")
    with xarray.open_zarr(path, chunks=None) as ds:
        assert ds.h.dims == ("time", "x_h", "y") and ds.x_h.values.tolist() == [3, 6, 9]
        assert ds.q.dims == ("time", "q_component_0", "x_q", "y_face_q")
        assert ds.y_face_q.values.tolist() == [18, 22]
    for name, cut in (("h", ()), ("q", (slice(None),)), ("n", ())):
        check(everywhere, range(2), name, cut=(*cut, slice(None, None, 2), slice(1, 9)))
    with xarray.open_zarr(everywhere, chunks=None) as ds:
        assert ds.n.dims[:3] == ("time", "x", "y")
        assert ds.x.values.tolist() == [0, 2, 4, 6, 8, 10]


def test_copies_of_fields_on_gpus(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made of host arrays, part by part; some ranks have no point of the region."""
    monkeypatch.setattr(moving, "is_device_array", lambda _: True)
    monkeypatch.setattr(moving, "DEVICE_PART_BYTES", 24)
    cut = (slice(1, None, 4), slice(2, 3))
    with grid(comm) as g:
        mine = fields(g)
        with halox.Output(g, path, mine, region={"h": cut}, compressors="zstd") as out:
            run(out, g, mine, range(3))
    comm.Barrier()
    check(path, range(3), "h", cut=cut)
    check(path, range(3), "q")


def test_fields_that_zarr_stores_as_bytes(path: Path, comm: MPI.Intracomm) -> None:
    dtype = np.dtype([("a", "i2"), ("b", "f8")])
    with halox.Grid((6, 12), comm=comm, device="cpu", checkerboard=True) as g:
        u, odd = g.zeros(dtype), g.zeros("u4", parity="odd")
        with halox.Output(g, path, u=u, odd=odd) as out:
            for n in range(3):
                g.scatter(
                    whole_array((6, 12), dtype)[::-1] if n else whole_array((6, 12), dtype), out=u
                )
                odd[...] = n
                out.append(time=n)
    comm.Barrier()
    with xarray.open_zarr(path, chunks=None) as ds:
        assert ds.u.dims == ("time", "x", "y", "u_byte") and ds.odd.dims == ("time", "x", "y_odd")
        assert ds.u[0].values.tobytes() == whole_array((6, 12), dtype).tobytes()
        assert ds.u[2].values.tobytes() == whole_array((6, 12), dtype)[::-1].tobytes()
        assert [np.unique(record).tolist() for record in ds.odd.values] == [[0], [1], [2]]


def test_arrays_of_one_record(path: Path, comm: MPI.Intracomm) -> None:
    """Programs that swap arrays give the current one."""
    with grid(comm) as g:
        mine, other = fields(g), fields(g)
        fill(g, mine, 0)
        fill(g, other, 1)
        with halox.Output(g, path, mine, buffer=1) as out:
            out.append(time=0)
            out.append(other, time=1)
            out.append({"h": other["h"]}, time=2, q=other["q"])
        again = halox.Output(g, path.with_name("b"), mine, mode="w")
        again.close()
        again.close()
        with pytest.raises(ClosedError):
            again.append(time=0)
    comm.Barrier()
    with xarray.open_zarr(path, chunks=None) as ds:
        assert np.array_equal(ds.h, [whole("h", n) for n in (0, 1, 1)])
        assert np.array_equal(ds.q, [whole("q", n) for n in (0, 1, 1)])
        assert np.array_equal(ds.n, [whole("n", n) for n in (0, 1, 0)])
    assert xarray.open_zarr(path.with_name("b"), chunks=None).sizes["time"] == 0


def test_many_records_in_chunks_of_times(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halox.checkpoint.records.TIMES", 4)
    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h) as out:
            run(out, g, {"h": h}, range(10))
        with halox.Output(g, path, h=h, mode="a", time=5) as out:
            run(out, g, {"h": h}, range(7, 11))
    comm.Barrier()
    check(path, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10])


class NeverDone:
    """Future of a write that lasts until somebody waits for it."""

    def __init__(self, begin: Any) -> None:
        self._begin = begin

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        return self._begin().result(timeout=timeout)


def test_readers_see_complete_records_only(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes at once, the last rank as late as possible: its file of a record appears in a later call."""
    if comm.rank == comm.size - 1:
        start = output.start_write
        late = lambda *a, **k: NeverDone(lambda: start(*a, **k))  # noqa: E731
        monkeypatch.setattr(output, "start_write", late)
    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h, buffer=2) as out:
            for n in range(5):
                run(out, g, {"h": h}, [n])
                comm.Barrier()
                count = max(0, n - 1)
                assert out.records == count
                with xarray.open_zarr(path, chunks=None) as ds:
                    assert ds.sizes["time"] <= count
                    for k in range(ds.sizes["time"]):
                        assert np.array_equal(ds.h[k], whole("h", k))
                comm.Barrier()
            out.wait()
            assert out.records == 5
            comm.Barrier()
            check(path, range(5))


def test_a_write_that_fails(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise the error of one rank in the next call, and earlier records stay."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with grid(comm) as g:
        h = g.zeros()
        out = halox.Output(g, path, h=h)
        run(out, g, {"h": h}, range(3))
        out.wait()
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(output, "start_write", full)
            out.append(time=3)
        for call in (lambda: out.append(time=4), out.wait, lambda: out.append(time=4)):
            with pytest.raises(CheckpointError):
                call()
        out.close()
        comm.Barrier()
        check(path, range(3))
        comm.Barrier()
        with halox.Output(g, path, h=h, mode="a") as out:
            run(out, g, {"h": h}, [3])
        with halox.Output(g, path, h=h, mode="a") as out:
            with monkeypatch.context() as patch:
                if comm.rank == comm.size - 1:
                    patch.setattr(output, "start_write", full)
                out.append(time=4)
            with pytest.raises(CheckpointError):
                out.close()
            comm.Barrier()
            assert not os.path.exists(path.with_name(".run.zarr.lock"))
    comm.Barrier()
    check(path, range(4))


def test_files_that_cannot_grow(path: Path, comm: MPI.Intracomm) -> None:
    """TensorStore's own error, on all ranks, and a new output continues after the last complete record."""
    with grid(comm) as g:
        h = g.zeros()
        out = halox.Output(g, path, h=h)
        run(out, g, {"h": h}, range(3))
        out.wait()
        with small_disk():
            out.append(time=3)
            with pytest.raises(CheckpointError):
                out.wait()
        out.close()
        with halox.Output(g, path, h=h, mode="a") as out:
            assert out.records == 3
            run(out, g, {"h": h}, [3])
    comm.Barrier()
    check(path, range(4))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_output_that_is_removed(is_renamed: bool, path: Path, comm: MPI.Intracomm) -> None:
    """All ranks raise an error in the next call, and no group without its earlier records remains."""
    with grid(comm) as g:
        h = g.zeros()
        out = halox.Output(g, path, h=h)
        run(out, g, {"h": h}, range(3))
        out.wait()
        comm.Barrier()
        if comm.rank == 0 and is_renamed:
            path.rename(path.with_name("elsewhere.zarr"))
        elif comm.rank == 0:
            shutil.rmtree(path)
        comm.Barrier()
        first = (lambda: out.append(time=3)) if is_renamed else out.wait
        for call in (first, lambda: out.append(time=4), out.wait):
            with pytest.raises(CheckpointError):
                call()
        out.close()
        comm.Barrier()
        assert not (path / "zarr.json").exists()
        with halox.Output(g, path.with_name("other.zarr"), h=h) as out:
            run(out, g, {"h": h}, range(2))
    comm.Barrier()
    check(path.with_name("other.zarr"), range(2))
    if is_renamed:
        check(path.with_name("elsewhere.zarr"), range(3))


def test_an_error_in_the_block(path: Path, comm: MPI.Intracomm) -> None:
    """The output ends without the other ranks, and another one can continue."""
    with grid(comm) as g:
        h = g.zeros()
        with pytest.raises(ZeroDivisionError), halox.Output(g, path, h=h) as out:
            run(out, g, {"h": h}, range(3))
            out.wait()
            1 / 0  # noqa: B018
        comm.Barrier()
        with halox.Output(g, path, h=h, mode="a") as out:
            run(out, g, {"h": h}, [3])
    comm.Barrier()
    check(path, range(4))


def test_modes(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        h = g.zeros()
        g.save(path, h=h)
        comm.Barrier()
        with pytest.raises(CheckpointError):
            halox.Output(g, path, h=h)
        with pytest.raises(CheckpointError):
            halox.Output(g, path, h=h, mode="a")
        with halox.Output(g, path, h=h, mode="w") as out:
            with pytest.raises(CheckpointError, match="this program"):
                halox.Output(g, path, h=h, mode="a")
            run(out, g, {"h": h}, [0])
        with pytest.raises(CheckpointError):
            g.save(path, h=h)
        with pytest.raises(CheckpointError):
            g.load(path)
        comm.Barrier()
        assert sorted(os.listdir(path.parent)) == ["run.zarr"]
        check(path, [0])
        comm.Barrier()
        out = halox.Output(g, path, h=h, mode="w", region=(slice(4), slice(None)))
        with pytest.raises(FieldError):
            out.append(time=10**400)
        out.close()
        with pytest.raises(CheckpointError):
            halox.Output(g, path, h=h, mode="a", region=(slice(4, 8), slice(None)))


def test_complete_records_count_without_another_call(path: Path, comm: MPI.Intracomm) -> None:
    """A program that computes for long after its records are complete."""
    with grid(comm) as g, halox.Output(g, path, h=g.zeros()) as out:
        for step in range(1000):
            out.append(time=step)
            if out.records:  # the ranks find out in a call
                break
            sleep(0.01)
        limit = monotonic() + 60
        while comm.rank == 0:
            metadata = json.loads((path / "zarr.json").read_text())
            shape = metadata["consolidated_metadata"]["metadata"]["h"]["shape"]
            if shape[0] == out.records:
                break
            assert monotonic() < limit
            sleep(0.01)
        comm.Barrier()


def test_an_output_that_is_dropped_can_be_made_again(path: Path, comm: MPI.Intracomm) -> None:
    """After the error says that this program has it open, and its grid has been closed."""
    g = grid(comm)

    def cell() -> None:
        h = g.zeros()
        halox.Output(g, path, h=h, mode="a").append(time=0)

    cell()
    with pytest.raises(CheckpointError, match=r"this program.*\bclose"):
        cell()
    g.close()
    with grid(comm) as g, halox.Output(g, path, h=g.zeros(), mode="a") as out:
        assert out.records == 1


def test_what_a_continued_output_is_given_is_the_same(path: Path, comm: MPI.Intracomm) -> None:
    x, y = np.arange(11.0), np.arange(12.0) ** 2
    zstd = {"name": "zstd", "configuration": {"level": 1}}
    made = {"attrs": {"a": 1, "b": float("nan")}, "coords": {"x": x}, "compressors": zstd}
    region = (slice(2, 9), slice(0, 12, 2))
    with grid(comm) as g:
        h = g.zeros()
        halox.Output(g, path, h=h, region=region, **made).close()
        for same in (
            {},
            made,
            {"attrs": {"a": 1}},
            {"coords": {"x": x}},
            {"compressors": "zstd"},
        ):
            halox.Output(g, path, h=h, mode="a", region=region, **same).close()
        for name, other in (
            ("attrs", {"a": 2}),
            ("attrs", {"a": 1, "c": 1}),
            ("coords", {"x": x + 1}),
            ("coords", {"y": y}),
            ("compressors", "gzip"),
            ("compressors", ["zstd", "gzip"]),
            ("compressors", {"name": "zstd", "configuration": {"level": 2}}),
        ):
            with pytest.raises(CheckpointError, match=name):
                halox.Output(g, path, h=h, mode="a", region=region, **{name: other})
        halox.Output(g, path, h=h, mode="w").close()
        with pytest.raises(CheckpointError, match="compressors"):
            halox.Output(g, path, h=h, mode="a", compressors="zstd")


@pytest.mark.parametrize(
    "time",
    [
        np.datetime64(5, "ns"),
        np.timedelta64(5, "ns"),
        np.datetime64(5, "Y"),
        np.array(5, "m8[ns]"),
        2**53 + 1,
    ],
)
def test_times_that_are_no_numbers(time: Any, path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g, halox.Output(g, path, h=g.zeros()) as out:
        with pytest.raises(FieldError, match="time"):
            out.append(time=time)
        with pytest.raises(FieldError, match="time"):
            halox.Output(g, path, h=g.zeros(), mode="a", time=time)
        out.append(time=2**53)
        out.append(time=np.int64(2**53 + 2))


BAD: dict[str, tuple[Any, type[HaloxError], str]] = {
    "grid": (lambda g, p, h: halox.Output(3, p, h=h), HaloxError, "grid must be a halox.Grid"),
    "no field": (lambda g, p, h: halox.Output(g, p), FieldError, "no field given"),
    "netCDF": (
        lambda g, p, h: halox.Output(g, p.with_name("b.nc"), h=h),
        CheckpointError,
        "halox writes a Zarr group",
    ),
    "npy": (
        lambda g, p, h: halox.Output(g, p.with_name("b.npy"), h=h),
        CheckpointError,
        "an output is a Zarr group on a file system",
    ),
    "bucket": (
        lambda g, p, h: halox.Output(g, "s3://bucket/run.zarr", h=h),
        CheckpointError,
        "an output is a Zarr group on a file system",
    ),
    "exists": (lambda g, p, h: halox.Output(g, p, h=h), CheckpointError, 'give mode="a"'),
    "mode": (lambda g, p, h: halox.Output(g, p, h=h, mode="r"), FieldError, "mode: expected one"),
    "time without a": (
        lambda g, p, h: halox.Output(g, p, h=h, time=1, mode="w"),
        FieldError,
        'needs mode="a"',
    ),
    "buffer": (lambda g, p, h: halox.Output(g, p, h=h, buffer=0), FieldError, "buffer: expected"),
    "every": (
        lambda g, p, h: halox.Output(g, p, h=h, every=2),
        FieldError,
        "every: expected a map",
    ),
    "every of none": (
        lambda g, p, h: halox.Output(g, p, h=h, every={"h": 0}),
        FieldError,
        "1 or more, got 0",
    ),
    "every of another": (
        lambda g, p, h: halox.Output(g, p, h=h, every={"u": 2}),
        FieldError,
        "'u' is no field; the fields are h",
    ),
    "region": (
        lambda g, p, h: halox.Output(g, p, h=h, region=(slice(3),)),
        FieldError,
        "h needs 2 slices of global indices",
    ),
    "region of nothing": (
        lambda g, p, h: halox.Output(g, p, h=h, region=(slice(3, 3), slice(None))),
        FieldError,
        "at least one point",
    ),
    "field called time": (
        lambda g, p, h: halox.Output(g, p, {"time": h}, mode="w"),
        FieldError,
        "time is the name of a field and of a dimension",
    ),
    "dimension called time": (
        lambda g, p, h: halox.Output(g, p, h=h, mode="w", dims=("time", "y")),
        FieldError,
        "dims: time is the name of the axis of the records",
    ),
    "two dimensions of one name": (
        lambda g, p, h: halox.Output(
            g,
            p,
            {"face": h, "w": g.zeros(staggered=0)},
            region={"face": (slice(3), slice(None))},
            mode="w",
        ),
        FieldError,
        "x_face would be the name of two dimensions",
    ),
    "another grid": (
        lambda g, p, h: _on_another_grid(g, p),
        CheckpointError,
        r"the grid is \[11, 12\] in the output, and \[11, 13\] here",
    ),
    "other fields": (
        lambda g, p, h: halox.Output(g, p, q=h, mode="a"),
        CheckpointError,
        "h is <f8 along time, x of 11, y of 12, of the region .* in the output, and nothing here",
    ),
    "another dtype": (
        lambda g, p, h: halox.Output(g, p, h=h.astype("f4"), mode="a"),
        CheckpointError,
        "h is <f8 along .* in the output, and <f4 along .* here",
    ),
    "modes differ": (
        lambda g, p, h: halox.Output(g, p, h=h, mode="wa"[min(g.rank, 1)]),
        MismatchError,
        "mode differs between ranks",
    ),
}
BAD_RECORDS: dict[str, tuple[Any, type[HaloxError], str]] = {
    "time that goes backwards": (
        lambda g, o, h: o.append(time=1),
        FieldError,
        "1 does not follow 2",
    ),
    "time of text": (lambda g, o, h: o.append(time="now"), FieldError, "expected a finite number"),
    "time of nan": (lambda g, o, h: o.append(time=np.nan), FieldError, "expected a finite number"),
    "times differ": (
        lambda g, o, h: o.append(time=3 + g.rank),
        MismatchError,
        "time differs between ranks",
    ),
    "record of another shape": (
        lambda g, o, h: o.append(time=3, h=h[1:-1]),
        FieldError,
        "does not fit the grid",
    ),
    "record of another layout": (
        lambda g, o, h: o.append(time=3, h=g.zeros(staggered=0)),
        FieldError,
        r"h: the field has whole shape \(11, 12\), and this record \(12, 12\)",
    ),
    "record of another dtype": (
        lambda g, o, h: o.append(time=3, h=h.astype("f4")),
        FieldError,
        "h: the field has dtype float64, and this record float32",
    ),
    "record of another field": (
        lambda g, o, h: o.append(time=3, q=h),
        FieldError,
        "q is no field of this output; it has h",
    ),
    "bad record on one rank": (
        lambda g, o, h: o.append(time=3, h=h if g.rank == 0 else h[1:]),
        FieldError,
        r"\[rank 1\] h: array: shape",
    ),
}


def _on_another_grid(g: halox.Grid, path: Path) -> None:
    with halox.Grid((11, 13), comm=g.comm, device="cpu") as other:
        halox.Output(other, path, h=other.zeros(), mode="a")


def test_bad_input_is_one_error_on_all_ranks(path: Path, comm: MPI.Intracomm) -> None:
    """And leaves the output as it was."""
    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h) as out:
            run(out, g, {"h": h}, range(3))
        for name, (call, kind, text) in BAD.items():
            if name.endswith("differ") and comm.size == 1:
                continue
            with pytest.raises(kind, match=rf"(?s){text}") as caught:
                call(g, path, h)
            assert len(set(comm.allgather(str(caught.value)))) == 1 or name == "grid", name
        comm.Barrier()
        check(path, range(3))
        comm.Barrier()
        with halox.Output(g, path, h=h, mode="a") as out:
            for name, (call, kind, text) in BAD_RECORDS.items():
                if ("differ" in name or "one rank" in name) and comm.size == 1:
                    continue
                with pytest.raises(kind, match=rf"(?s){text}") as caught:
                    call(g, out, h)
                assert len(set(comm.allgather(str(caught.value)))) == 1, name
            run(out, g, {"h": h}, [3])
    comm.Barrier()
    assert os.listdir(path.parent) == ["run.zarr"]
    check(path, range(4))


def test_the_group_is_replaced_by_rename(path: Path, comm: MPI.Intracomm) -> None:
    """A reader never finds a group that is half written."""
    assert comm.size >= 1
    if comm.rank == 0:
        path.mkdir()
        one = store.Store.of_folder(path, path, 0)
        one.write_json({"a": "x" * 100_000})
        with open(path / "zarr.json", encoding="ascii") as before:
            one.write_json({"a": "y"})
            assert before.read().count("x") == 100_000
        assert one.read_json() == {"a": "y"} and os.listdir(path) == ["zarr.json"]
