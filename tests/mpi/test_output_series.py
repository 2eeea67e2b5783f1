"""Means, minima and maxima over windows of records, rounded mantissas, and dates: what xarray reads."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import CheckpointError, FieldError, HaloxError, MismatchError
from tests.mpi.conftest import come_together
from tests.mpi.test_checkpoints import names_in
from tests.mpi.test_output import grid, opened, path

pytestmark = pytest.mark.usually(3)

pytest.importorskip("tensorstore")
xarray = pytest.importorskip("xarray")
pytest.importorskip("zarr")

__all__ = ["path"]  # a fixture

FIELDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "h": ("f4", {}, (11, 12)),
    "q": (">f8", {"staggered": 1, "components": 2}, (2, 11, 13)),
    "n": ("i2", {"components": (..., 3)}, (11, 12, 3)),
    "z": ("c8", {}, (11, 12)),
}
EVERY = {"h": 3, "q": 2, "n": 3, "z": 3}
TIMES = [0.5 * n for n in range(8)]


def whole(name: str, number: int) -> np.ndarray:
    """Return a whole field at a record: random numbers, of which float32 sums would be inexact."""
    dtype, _, shape = FIELDS[name]
    random = np.random.default_rng([number, len(name), ord(name)])
    values = random.normal(1000, 300, shape)
    return (values + 1j * random.random(shape) if dtype == "c8" else values).astype(dtype)


def fields(g: halox.Grid) -> dict[str, Any]:
    return {name: g.zeros(np.dtype(d), **options) for name, (d, options, _) in FIELDS.items()}


def run(out: halox.Output, g: halox.Grid, mine: dict[str, Any], numbers: Any) -> None:
    for number in numbers:
        for name, u in mine.items():
            g.scatter(whole(name, number) if g.rank == 0 else None, out=u)
        out.append(time=TIMES[number])
        for u in mine.values():
            u[...] = 77  # the record has been added


def check_window(ds: Any, stored: str, window: int, cut: Any = ...) -> None:
    """Assert that a window has what NumPy computes from its records."""
    name, _, method = stored.rpartition("_")
    first = window * EVERY[name]
    records = np.array([whole(name, first + k)[cut] for k in range(EVERY[name])])
    exact = records.astype("c16" if records.dtype.kind == "c" else "f8")
    expected = getattr(exact, method)(axis=0)
    dtype = "f8" if records.dtype.kind == "i" else records.dtype.newbyteorder("=")
    found = ds[stored].values[window]
    assert found.dtype == dtype
    # NumPy adds in another order.
    assert np.allclose(found, expected.astype(dtype), rtol=2 * np.finfo(dtype).eps, atol=0)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usually(1, 3)
def test_means_minima_and_maxima(path: Path, comm: MPI.Intracomm) -> None:
    """Of fields with all layouts, on blocks that differ; the last windows are not whole."""
    cut = (slice(1, None, 4), slice(2, 3))  # some ranks have none of these points
    with grid(comm) as g:
        mine = fields(g)
        with halox.Output(
            g,
            path,
            mine | {"now": mine["h"]},
            mean=["h", "n", "q", "z"],
            min=["h", "n"],
            max="q",
            every=EVERY | {"now": 4},
            region={"n": cut},
        ) as out:
            run(out, g, mine, range(8))

    def look(ds: Any) -> None:
        names = {"h_mean", "n_mean", "q_mean", "z_mean", "h_min", "n_min", "q_max", "now"}
        assert names == {name for name in ds.data_vars if not name.endswith("_bnds")}
        for stored in names - {"now"}:
            for window in range(4 if stored[0] == "q" else 2):
                check_window(ds, stored, window, cut if stored[0] == "n" else ...)
        assert ds.h_mean.dims == ("time_window_3", "x", "y")
        assert ds.n_min.dims[:3] == ("time_window_3", "x_n", "y_n")
        assert np.array_equal(ds.now, [whole("h", 0), whole("h", 4)])
        methods = {name: ds[name].attrs.get("cell_methods") for name in ("h_mean", "h_min", "now")}
        assert methods == {"h_mean": "time: mean", "h_min": "time: minimum", "now": None}
        assert ds.time_window_2.attrs["bounds"] == "time_window_2_bnds"
        assert ds.time_window_2_bnds.values.tolist() == [
            [0, 0.5],
            [0.5, 1.5],
            [1.5, 2.5],
            [2.5, 3.5],
        ]
        assert ds.time_window_2.values.tolist() == [0.25, 1, 2, 3]
        assert ds.time_window_3_bnds.values.tolist() == [[0, 1], [1, 2.5]]
        with xarray.open_zarr(path, chunks=None, consolidated=False) as alone:
            assert ds.identical(alone)

    opened(path, comm, look)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usually(1, 3)
def test_arrays_of_one_record_without_order(path: Path, comm: MPI.Intracomm) -> None:
    """Programs that swap arrays; a permuted array, and one with another halo, in one and three dimensions."""
    for shape in ((13,), (5, 4, 6)):
        at = path.with_name(f"{len(shape)}.zarr")
        with halox.Grid(
            shape, comm=comm, device="cpu", proc_shape=(0, *[1] * (len(shape) - 1))
        ) as g:
            u, wide = g.zeros("f4"), g.zeros("f4", halo=2 if len(shape) == 1 else 1)
            with halox.Output(g, at, u=u, mean="u", max="u", every={"u": 2}) as out:
                for number in range(4):
                    new = wide if number % 2 else np.asfortranarray(u)
                    g.interior(wide)[...] = number
                    out.append(time=number, u=new)

        def look(ds: Any) -> None:
            assert [np.unique(u).tolist() for u in ds.u_mean.values] == [[0.5], [1.5]]
            assert [np.unique(u).tolist() for u in ds.u_max.values] == [[1], [3]]

        opened(at, comm, look)


@pytest.mark.ranks(1, 3)
def test_restarts(
    path: Path,
    comm: MPI.Intracomm,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of a window nothing is lost; inside a window its values are NaN, and the user is told."""
    monkeypatch.setattr("halox.io.checkpoint.records.TIMES", 2)
    options: dict[str, Any] = {"mean": ["h", "q"], "every": {"h": 3, "q": 2}, "mode": "a"}

    def part(numbers: range, time: float | None = None) -> str:
        with grid(comm) as g:
            mine = {name: u for name, u in fields(g).items() if name in "hq"}
            with halox.Output(g, path, mine, time=time, **options) as out:
                run(out, g, mine, numbers)
        come_together(comm)
        return capfd.readouterr().err

    assert "ends inside a window of h_mean," in "".join(comm.allgather(part(range(4))))
    assert "continues" not in "".join(comm.allgather(part(range(6), time=-1)))
    # The fifth record is computed again: the last windows of both begin before it.
    told = "".join(comm.allgather(part(range(5, 8), time=TIMES[4])))
    assert "continues inside a window of h_mean, q_mean" in told and "(5 records)" in told
    assert names_in(path / "h_mean" / "c", comm) == ["0", "1"]

    def look(ds: Any) -> None:
        assert ds.time.values.tolist() == TIMES
        for stored, window in (("h_mean", 0), ("q_mean", 0), ("q_mean", 1), ("q_mean", 3)):
            check_window(ds, stored, window)
        assert np.isnan(ds.h_mean[1]).all() and np.isnan(ds.q_mean[2]).all()
        assert ds.sizes["time_window_3"] == 2 and ds.sizes["time_window_2"] == 4
        assert ds.time_window_3_bnds.values.tolist() == [[0, 1], [1, 2.5]]

    opened(path, comm, look)


def test_rounded_fields(path: Path, comm: MPI.Intracomm) -> None:
    """As the filter of numcodecs rounds them; compressed files become much smaller."""
    bitround = pytest.importorskip("numcodecs.bitround")
    x = np.linspace(0, 3, 64)
    smooth = np.add.outer(np.sin(x), np.cos(2 * x)).astype("f4")
    sizes = {}
    for bits in (None, 6):
        with halox.Grid((64, 64), comm=comm, device="cpu") as g:
            u = g.scatter(smooth if g.rank == 0 else None)
            keepbits = bits and {"u": bits, "v": bits}
            at, both = path.with_name(f"{bits}.zarr"), {"u": u, "v": u}
            with halox.Output(
                g, at, both, mean=["v"], every={"v": 2}, keepbits=keepbits, compressors="zstd"
            ) as out:
                for time in range(2):
                    out.append(time=time)
        come_together(comm)
        sizes[bits] = sum(
            file.stat().st_size for file in (at / "u" / "c").rglob("*") if file.is_file()
        )

    def look(ds: Any) -> None:
        expected = bitround.BitRound(6).encode(smooth.copy()).view("f4").reshape(64, 64)
        assert np.array_equal(ds.u[1], expected) and np.array_equal(ds.v_mean[0], expected)
        for name in ("u", "v_mean"):
            assert ds[name].attrs["_QuantizeBitRoundNumberOfSignificantBits"] == 6

    opened(at, comm, look)
    assert sizes[6] < sizes[None] / 2


def test_an_accumulator_that_fails(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise the error of one rank in the next call, also where the blocks share files."""

    def none_left(*_: object, **__: object) -> None:
        raise MemoryError("none left")

    with grid(comm) as g:
        mine = fields(g)
        out = halox.Output(g, path, mine, mean=["h", "q"], every={"h": 2, "q": 2})
        run(out, g, mine, range(3))
        out.wait()
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(np, "add", none_left)
        run(out, g, mine, [3])
        with pytest.raises(CheckpointError, match="none left"):
            out.append(time=5)
        out.close()

    def look(ds: Any) -> None:
        assert ds.sizes["time"] == 3 and ds.sizes["time_window_2"] == 1

    opened(path, comm, look)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mean of no field": ({"mean": ["u"], "every": {"h": 2}}, "mean: 'u' is no field"),
    "mean of a number": ({"mean": 3}, "mean: "),
    "no window": ({"max": ["h"]}, "max: h needs a number of records"),
    "no record": ({"mean": ["h"], "every": {"h": 0}}, "every: h: "),
    "two of one name": ({"mean": ["h"], "every": {"h": 2}}, "mean: h .* no field h_mean"),
    "complex": ({"min": ["z"], "every": {"z": 2}}, "min: z "),
    "structured": ({"mean": ["s"], "every": {"s": 2}}, "mean: s "),
    "bits of an integer": ({"keepbits": {"n": 5}}, "keepbits: n "),
    "too many bits": ({"keepbits": {"h": 24}}, "keepbits: h .* 23 "),
    "no bits": ({"keepbits": {"h": 0}}, "keepbits: h "),
    "bits of no number": ({"keepbits": {"h": 7.0}}, "keepbits: h "),
    "bits of no field": ({"keepbits": {"u": 5}}, "keepbits: 'u' is no field"),
    "bits of all": ({"keepbits": 5}, "keepbits: "),
}


def test_bad_input_is_one_error_on_all_ranks(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        mine = fields(g) | {"s": g.zeros(np.dtype([("a", "f4")]))}
        for name, (options, words) in BAD.items():
            more = {"h_mean": mine["h"]} if name == "two of one name" else {}
            with pytest.raises(FieldError, match=words):
                halox.Output(g, path, mine | more, **options)
        window = {"every": {"h": 2}}
        halox.Output(g, path, h=mine["h"], mean="h", **window).close()
        others: list[dict[str, Any]] = [window, {"mean": "h", "every": {"h": 4}}]
        others += [{"max": "h", **window}, {"mean": "h", "keepbits": {"h": 3}, **window}]
        for options in others:
            with pytest.raises(CheckpointError, match=r"\bh(_\w+)? is "):
                halox.Output(g, path, h=mine["h"], mode="a", **options)
        if comm.size > 1:
            mismatch = {"mean": ["h"][: g.rank], "every": {"h": 2}}
            with pytest.raises(MismatchError, match="mean"):
                halox.Output(g, path, h=mine["h"], mode="w", **mismatch)


START = np.datetime64("2026-01-31T12:00:00.25")
HOUR = np.timedelta64(1, "h")


def as_datetime(date: np.datetime64) -> datetime.datetime:
    return date.astype("M8[us]").item()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", [np.datetime64, as_datetime])
def test_dates(kind: Callable[[Any], Any], path: Path, comm: MPI.Intracomm) -> None:
    """xarray decodes the times, the bounds of windows and coordinates; an output continues from a date."""
    dates = START + 6 * HOUR * np.arange(8)
    days = np.datetime64("2025-12-30") + np.arange(12)
    options: dict[str, Any] = {"mean": ["v"], "every": {"v": 2, "w": 3}, "mode": "a"}
    for numbers, last in ((range(6), None), (range(4, 8), kind(dates[3] + HOUR))):
        with grid(comm, dims=("y", "day"), coords={"day": days}) as g:
            u = g.zeros()
            with halox.Output(g, path, u=u, v=u, w=u, time=last, **options) as out:
                assert out.records == numbers[0]
                for number in numbers:
                    u[...] = number
                    out.append(time=kind(dates[number]))
            if last is not None:
                g.save(path.with_name("b"), u=u, attrs={"time": kind(dates[7])})
                found = g.load(path.with_name("b")).attrs["time"]
                assert np.datetime64(found) == dates[7]

    def look(ds: Any) -> None:
        assert np.array_equal(ds.time.values, dates) and np.array_equal(
            ds.time_3.values, dates[::3]
        )
        assert np.array_equal(ds.day.values, days)
        assert ds.time.encoding["calendar"] == "proleptic_gregorian"
        assert np.array_equal(
            ds.time_window_2_bnds.values[1:], np.stack([dates[1:-1:2], dates[3::2]], -1)
        )
        assert ds.time_window_2.values[1] == dates[1] + 6 * HOUR
        assert ds.u.sel(time="2026-02-01")[:, 0, 0].values.tolist() == [2, 3, 4, 5]
        assert ds.v_mean[:, 0, 0].values.tolist() == [0.5, 2.5, 4.5, 6.5]

    opened(path, comm, look)
    opened(path.with_name("b"), comm, lambda ds: np.testing.assert_array_equal(ds.day.values, days))


def test_dates_of_a_model_calendar(path: Path, comm: MPI.Intracomm) -> None:
    cftime = pytest.importorskip("cftime")
    first = cftime.datetime(2001, 2, 27, 18, calendar="noleap")
    dates = [first + datetime.timedelta(hours=12 * n) for n in range(4)]
    for last in (None, dates[1]):
        with grid(comm) as g, halox.Output(g, path, u=g.zeros(), mode="a", time=last) as out:
            for date in dates[out.records :]:
                out.append(time=date)
            with pytest.raises(FieldError, match=r"time: .*noleap"):
                out.append(time=np.datetime64("2001-03-02"))
    opened(path, comm, lambda ds: np.testing.assert_array_equal(ds.time.values, dates))


def test_an_error_shows_a_date_and_all_digits_of_times(path: Path, comm: MPI.Intracomm) -> None:
    """Two dates of a long run whose seconds have seven equal digits."""
    last, before = (np.datetime64(f"2036-01-31T00:00:{second}") for second in ("02", "01"))
    with grid(comm) as g, halox.Output(g, path, h=g.zeros()) as out:
        out.append(time=START)
        out.append(time=last)
        with pytest.raises(FieldError, match=r"2036-01-31T00:00:01.*315532801\.0 .*315532802\.0"):
            out.append(time=before)


def test_times_of_two_kinds(path: Path, comm: MPI.Intracomm) -> None:
    """One error on all ranks, and the output goes on."""
    finer = START + np.timedelta64(1, "ns")

    def fails(call: Callable[[], object], kind: type[HaloxError]) -> None:
        with pytest.raises(kind, match="time"):
            call()

    with grid(comm) as g:
        h = g.zeros()
        with halox.Output(g, path, h=h) as out:
            if comm.size > 1:
                fails(lambda: out.append(time=START if g.rank else 0.5), MismatchError)
                fails(lambda: out.append(time=START + g.rank * 24 * HOUR), MismatchError)
            out.append(time=START)
            fails(lambda: out.append(time=7.0), FieldError)
            fails(lambda: out.append(time=START - HOUR), FieldError)
            for time in (
                finer,
                type("Timestamp", (datetime.datetime,), {"nanosecond": 7})(2099, 1, 1),
            ):
                fails(lambda time=time: out.append(time=time), FieldError)
            if comm.size > 1:
                fails(lambda: out.append(time=7.0 if g.rank else START + HOUR), FieldError)
            out.append(time=START + HOUR)
        fails(lambda: halox.Output(g, path, h=h, mode="a", time=1.0), FieldError)
        other = path.with_name("numbers.zarr")
        with halox.Output(g, other, h=h) as out:
            out.append(time=1.0)
            fails(lambda: out.append(time=START), FieldError)
        for bad in (np.datetime64("NaT"), finer):
            days = np.append(START + 24 * HOUR * np.arange(10), bad)
            with pytest.raises(FieldError, match=r"coords\['x'\] has NaT"):
                grid(comm, coords={"x": days})
    opened(
        path, comm, lambda ds: np.testing.assert_array_equal(ds.time.values, [START, START + HOUR])
    )
