"""Records in time: xarray reads the whole fields of a serial computation, on any ranks, also after restarts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import CheckpointError, ClosedError, FieldError, HaloxError, MismatchError
from tests.limits import cut_shards, save_as_from_gpus
from tests.mpi.conftest import come_together, on_first
from tests.mpi.test_checkpoints import fails, in_between, names_in, small_disk
from tests.mpi.test_scatter import whole_array

pytestmark = pytest.mark.usually(3)

pytest.importorskip("tensorstore")
xarray = pytest.importorskip("xarray")
pytest.importorskip("zarr")

CELLS = (11, 12)
FIELDS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "h": ("f8", {}, (11, 12)),
    "q": (">f4", {"staggered": 1, "components": 2}, (2, 11, 13)),
    "n": ("i2", {"components": (..., 3)}, (11, 12, 3)),
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


def opened(path: Path, comm: MPI.Intracomm, look: Callable[[Any], object]) -> None:
    """Open an output by xarray on rank 0, after the calls of all ranks and before their next ones."""

    def open_here() -> None:
        with xarray.open_zarr(path, chunks=None) as ds:
            look(ds)

    come_together(comm)
    on_first(open_here, comm)


def check(
    path: Path,
    comm: MPI.Intracomm,
    times: Any,
    name: str = "h",
    every: int = 1,
    cut: Any = ...,
) -> None:
    """Assert that xarray reads these records."""

    def look(ds: Any) -> None:
        axis = "time" if every == 1 else f"time_{every}"
        assert ds[name].dims[0] == axis
        assert ds["time"].values.tolist() == list(times)
        assert ds[axis].values.tolist() == list(times)[::every]
        assert ds[name].dtype == np.dtype(FIELDS[name][0]).newbyteorder("=")
        expected = [whole(name, time)[cut] for time in list(times)[::every]]
        assert np.array_equal(ds[name], np.array(expected).reshape(ds[name].shape))

    opened(path, comm, look)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes", [300, 1 << 20])
@pytest.mark.usually(1, 3)
def test_xarray_reads_the_records(
    shard_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, shard_bytes, 100)
    times = [0.5 * n for n in range(5)]
    x = np.linspace(0, 1, 11)
    with grid(comm) as g:
        mine = fields(g)
        options: dict[str, Any] = {"coords": {"lon": x}, "dims": ("lon", "lat"), "attrs": {"a": 1}}
        with halox.Output(g, path, mine, every={"n": 3}, **options) as out:
            run(out, g, mine, times)
            assert 3 <= out.records <= 5
        assert out.records == 5
    for name, every in (("h", 1), ("q", 1), ("n", 3)):
        check(path, comm, times, name, every)

    def look(ds: Any) -> None:
        assert ds.attrs["a"] == 1 and np.array_equal(ds.lon, x)
        assert ds.h.dims == ("time", "lon", "lat")
        assert ds.q.dims == ("time", "q_component_0", "lon", "lat_face")
        with xarray.open_zarr(path, chunks=None, consolidated=False) as alone:
            assert ds.identical(alone)  # once closed, also single arrays have their length

    opened(path, comm, look)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usually(1, 3)
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
                    assert len(names_in(path / name / "c", few)) == most
                check(path, few, range(5))
                run(out, g, mine, [4.5, 5.5, 6.5])
                out.wait()
                check(path, few, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5])
                check(path, few, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5], "n", 3)
    few.Free()
    in_between((path / "h" / "c" / ".nfs01").touch, comm)  # of the file system
    with grid(comm) as g:
        mine = fields(g)
        out = halox.Output(g, path, mine, mode="a", every={"n": 3})
        run(out, g, mine, [7, 8])
    # Closing the grid has closed the output.
    assert out.records == 10
    check(path, comm, [0, 1, 2, 3, 4, 4.5, 5.5, 6.5, 7, 8], "n", 3)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usually(1, 3)
def test_regions_and_strides(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, 100, 50)
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
    check(path, comm, range(3), "h", cut=h)
    check(path, comm, range(3), "q", cut=(slice(None), *q))
    check(path, comm, range(3), "n")

    def look(ds: Any) -> None:
        assert ds.h.dims == ("time", "x_h", "y") and ds.x_h.values.tolist() == [3, 6, 9]
        assert ds.q.dims == ("time", "q_component_0", "x_q", "y_face_q")
        assert ds.y_face_q.values.tolist() == [18, 22]

    opened(path, comm, look)
    for name, before in (("h", ()), ("q", (slice(None),)), ("n", ())):
        cut = (*before, slice(None, None, 2), slice(1, 9))
        check(everywhere, comm, range(2), name, cut=cut)

    def look_everywhere(ds: Any) -> None:
        assert ds.n.dims[:3] == ("time", "x", "y")
        assert ds.x.values.tolist() == [0, 2, 4, 6, 8, 10]

    opened(everywhere, comm, look_everywhere)


def test_copies_of_fields_on_gpus(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made of host arrays, part by part; some ranks have no point of the region."""
    save_as_from_gpus(monkeypatch, 24)
    cut = (slice(1, None, 4), slice(2, 3))
    with grid(comm) as g:
        mine = fields(g)
        with halox.Output(g, path, mine, region={"h": cut}, compressors="zstd") as out:
            run(out, g, mine, range(3))
    check(path, comm, range(3), "h", cut=cut)
    check(path, comm, range(3), "q")


def test_fields_that_zarr_stores_as_bytes(path: Path, comm: MPI.Intracomm) -> None:
    values = whole_array((6, 12), [("a", "i2"), ("b", "f8")])
    with halox.Grid((6, 12), comm=comm, device="cpu", checkerboard=True) as g:
        u, odd = g.zeros(values.dtype), g.zeros("u4", parity="odd")
        with halox.Output(g, path, u=u, odd=odd) as out:
            for n in range(3):
                g.scatter(values[::-1] if n else values, out=u)
                odd[...] = n
                out.append(time=n)

    def look(ds: Any) -> None:
        assert ds.u.dims == ("time", "x", "y", "u_byte") and ds.odd.dims == ("time", "x", "y_odd")
        assert ds.u[0].values.tobytes() == values.tobytes()
        assert ds.u[2].values.tobytes() == values[::-1].tobytes()
        assert [np.unique(record).tolist() for record in ds.odd.values] == [[0], [1], [2]]

    opened(path, comm, look)


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
        empty = path.with_name("b")
        again = halox.Output(g, empty, mine, mode="w")
        again.close()
        again.close()
        fails(lambda: again.append(time=0), comm, ClosedError)

    def look(ds: Any) -> None:
        for name, records in (("h", (0, 1, 1)), ("q", (0, 1, 1)), ("n", (0, 1, 0))):
            assert np.array_equal(ds[name], [whole(name, n) for n in records])

    opened(path, comm, look)
    check(empty, comm, [])


def test_many_records_in_chunks_of_times(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halox.io.checkpoint.records.TIMES", 2)
    with grid(comm) as g:
        mine, every = fields(g), {"n": 3}
        with halox.Output(g, path, mine, every=every) as out:
            for n in range(10):
                run(out, g, mine, [n])
                out.wait()
        with halox.Output(g, path, mine, mode="a", every=every, time=5) as out:
            run(out, g, mine, range(7, 11))
    for name, stride in (("h", 1), ("n", 3)):
        check(path, comm, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10], name, stride)


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
        from halox.io.checkpoint import output

        start = output.start_write
        late = lambda *a, **k: NeverDone(lambda: start(*a, **k))  # noqa: E731
        monkeypatch.setattr(output, "start_write", late)
    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h, buffer=2) as out:
            for n in range(5):
                run(out, g, {"h": h}, [n])
                count = max(0, n - 1)
                assert out.records == count

                def look(ds: Any, most: int = count) -> None:
                    assert ds.sizes["time"] <= most
                    for k in range(ds.sizes["time"]):
                        assert np.array_equal(ds.h[k], whole("h", k))

                opened(path, comm, look)
            out.wait()
            assert out.records == 5
            check(path, comm, range(5))


@pytest.mark.parametrize("on_all", [False, True])
def test_files_that_cannot_grow(on_all: bool, path: Path, comm: MPI.Intracomm) -> None:
    """All ranks raise the error of one rank in the next call; a new output continues after the complete records."""
    is_small = on_all or comm.rank == comm.size - 1
    with grid(comm) as g:
        h = g.zeros()
        out = halox.Output(g, path, h=h)
        run(out, g, {"h": h}, range(3))
        out.wait()
        with small_disk() if is_small else nullcontext():
            out.append(time=3)
            fails(out.wait, comm)
        for call in (out.wait, lambda: out.append(time=4)):
            fails(call, comm)
        out.close()
        check(path, comm, range(3))
        with halox.Output(g, path, h=h, mode="a") as out:
            assert out.records == 3
            run(out, g, {"h": h}, [3])
        with halox.Output(g, path, h=h, mode="a") as out, small_disk():
            out.append(time=4)
            fails(out.close, comm)
        assert names_in(path.parent, comm) == ["run.zarr"]  # and no lock
    check(path, comm, range(4))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_output_that_is_removed(is_renamed: bool, path: Path, comm: MPI.Intracomm) -> None:
    """All ranks raise an error in the next call, and no group without its earlier records remains."""
    elsewhere, other = path.with_name("elsewhere.zarr"), path.with_name("other.zarr")
    with grid(comm) as g:
        h = g.zeros()
        out = halox.Output(g, path, h=h)
        run(out, g, {"h": h}, range(3))
        out.wait()
        in_between(lambda: path.rename(elsewhere) if is_renamed else shutil.rmtree(path), comm)
        first = (lambda: out.append(time=3)) if is_renamed else out.wait
        for call in (first, lambda: out.append(time=4), out.wait):
            fails(call, comm)
        out.close()
        come_together(comm)
        assert not (path / "zarr.json").exists()
        with halox.Output(g, other, h=h) as out:
            run(out, g, {"h": h}, range(2))
    check(other, comm, range(2))
    if is_renamed:
        check(elsewhere, comm, range(3))


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
    check(path, comm, range(4))


def test_modes(path: Path, comm: MPI.Intracomm) -> None:
    part, other = ((slice(n, n + 4), slice(None)) for n in (0, 4))
    with grid(comm) as g:
        h = g.zeros()
        g.save(path, h=h)
        fails(lambda: halox.Output(g, path, h=h), comm)
        fails(lambda: halox.Output(g, path, h=h, mode="a"), comm)
        with halox.Output(g, path, h=h, mode="w") as out:
            with pytest.raises(CheckpointError, match="this program"):
                halox.Output(g, path, h=h, mode="a")
            run(out, g, {"h": h}, [0])
        fails(lambda: g.save(path, h=h), comm)
        fails(lambda: g.load(path), comm)
        assert names_in(path.parent, comm) == ["run.zarr"]
        check(path, comm, [0])
        halox.Output(g, path, h=h, mode="w", region=part).close()
        fails(lambda: halox.Output(g, path, h=h, mode="a", region=other), comm)


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
        come_together(comm)


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


def test_coordinates_of_a_continued_output_are_the_same(path: Path, comm: MPI.Intracomm) -> None:
    x, y = np.arange(11.0), np.arange(12.0) ** 2
    zstd = {"name": "zstd", "configuration": {"level": 1}}
    made = {"attrs": {"a": 1, "b": float("nan")}, "coords": {"x": x}, "compressors": zstd}
    region = (slice(2, 9), slice(0, 12, 2))
    with grid(comm) as g:
        h = g.zeros()
        halox.Output(g, path, h=h, region=region, **made).close()
        for same in ({}, made, {"attrs": {"a": 2}}, {"compressors": "gzip"}):
            halox.Output(g, path, h=h, mode="a", region=region, **same).close()
        for other in ({"x": x + 1}, {"y": y}):
            with pytest.raises(CheckpointError, match="coords"):
                halox.Output(g, path, h=h, mode="a", region=region, coords=other)
    opened(path, comm, lambda ds: np.testing.assert_equal(ds.attrs["a"], 1))


TIMES: list[Any] = [
    np.timedelta64(5, "ns"),
    np.datetime64("NaT"),
    np.datetime64(10_000, "Y"),
    np.array(5, "m8[ns]"),
    10**400,
    "now",
    np.nan,
]


def test_times_that_are_no_numbers(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g, halox.Output(g, path, h=g.zeros()) as out:
        for time in TIMES:
            with pytest.raises(FieldError, match="time"):
                out.append(time=time)
        with pytest.raises(FieldError, match="time"):
            halox.Output(g, path, h=g.zeros(), mode="a", time=TIMES[0])
        out.append(time=2**53)
        out.append(time=np.int64(2**53 + 2))


Call = Callable[[halox.Grid, Path, Any], Any]


def making(mode: str = "w", **options: Any) -> Call:
    """Return a call that makes an output of a field "h"."""
    return lambda g, p, h: halox.Output(g, p, h=h, mode=mode, **options)


def made_at(path: str) -> Call:
    return lambda g, p, h: halox.Output(g, path, h=h)


def on_another_grid(g: halox.Grid, path: Path, h: Any) -> None:
    with halox.Grid((11, 13), comm=g.comm, device="cpu") as other:
        halox.Output(other, path, h=other.zeros(), mode="a")


def with_two_dimensions_of_one_name(g: halox.Grid, path: Path, h: Any) -> None:
    both = {"face": h, "w": g.zeros(staggered=0)}
    halox.Output(g, path, both, region={"face": (slice(3), slice(None))}, mode="w")


BAD: dict[str, tuple[Call, type[HaloxError], str]] = {
    "grid": (lambda g, p, h: halox.Output(3, p, h=h), HaloxError, "grid"),
    "no field": (lambda g, p, h: halox.Output(g, p), FieldError, "field"),
    "netCDF": (made_at("b.nc"), CheckpointError, "Zarr group"),
    "npy": (made_at("b.npy"), CheckpointError, "Zarr group"),
    "bucket": (made_at("s3://bucket/run.zarr"), CheckpointError, "Zarr group"),
    "exists": (making("w-"), CheckpointError, "mode"),
    "mode": (making("r"), FieldError, "mode"),
    "time without a": (making(time=1), FieldError, "mode"),
    "buffer": (making(buffer=0), FieldError, "buffer"),
    "every": (making(every=2), FieldError, "every"),
    "every of none": (making(every={"h": 0}), FieldError, "every"),
    "every of another": (making(every={"u": 2}), FieldError, "'u'"),
    "region": (making(region=(slice(3),)), FieldError, "2 slices"),
    "region of nothing": (making(region=(slice(3, 3), slice(None))), FieldError, "region"),
    "field called time": (
        lambda g, p, h: halox.Output(g, p, {"time": h}, mode="w"),
        FieldError,
        "time",
    ),
    "dimension called time": (making(dims=("time", "y")), FieldError, "dims"),
    "two dimensions of one name": (with_two_dimensions_of_one_name, FieldError, "x_face"),
    "another grid": (on_another_grid, CheckpointError, "[11, 13]"),
    "other fields": (lambda g, p, h: halox.Output(g, p, q=h, mode="a"), CheckpointError, "h is"),
    "another dtype": (
        lambda g, p, h: halox.Output(g, p, h=h.astype("f4"), mode="a"),
        CheckpointError,
        "<f4",
    ),
    "modes differ": (
        lambda g, p, h: halox.Output(g, p, h=h, mode="wa"[min(g.rank, 1)]),
        MismatchError,
        "mode",
    ),
}
BAD_RECORDS: dict[str, tuple[Any, type[HaloxError], str]] = {
    "backwards": (lambda g, o, h: o.append(time=1), FieldError, "time"),
    "times differ": (lambda g, o, h: o.append(time=3 + g.rank), MismatchError, "time"),
    "shape": (lambda g, o, h: o.append(time=3, h=h[1:-1]), FieldError, "h: "),
    "layout": (lambda g, o, h: o.append(time=3, h=g.zeros(staggered=0)), FieldError, "h: "),
    "dtype": (lambda g, o, h: o.append(time=3, h=h.astype("f4")), FieldError, "h: "),
    "another field": (lambda g, o, h: o.append(time=3, q=h), FieldError, "q "),
    "shapes differ": (
        lambda g, o, h: o.append(time=3, h=h if g.rank == 0 else h[1:]),
        FieldError,
        "[rank 1] h: ",
    ),
}


def test_bad_input_is_one_error_on_all_ranks(path: Path, comm: MPI.Intracomm) -> None:
    """And leaves the output as it was."""

    def check_bad(table: dict[str, Any], *given: Any) -> None:
        for name, (call, kind, word) in table.items():
            if not name.endswith("differ") or comm.size > 1:
                with pytest.raises(HaloxError) as caught:
                    call(*given)
                assert set(comm.allgather(type(caught.value))) == {kind}, name
                assert word in str(caught.value), name

    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h) as out:
            run(out, g, {"h": h}, range(3))
        check_bad(BAD, g, path, h)
        check(path, comm, range(3))
        with halox.Output(g, path, h=h, mode="a") as out:
            check_bad(BAD_RECORDS, g, out, h)
            run(out, g, {"h": h}, [3])
    assert names_in(path.parent, comm) == ["run.zarr"]
    check(path, comm, range(4))
