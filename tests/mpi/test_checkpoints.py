"""Checkpoints: the same bits on other numbers of ranks and in other divisions; complete or absent; damage is found."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    CheckpointError,
    FieldError,
    HaloxError,
    MismatchError,
    MissingPackageError,
)
from tests.limits import cut_shards, move_in_parts, open_in_turn, refuse_swaps, save_as_from_gpus
from tests.mpi.conftest import come_together, on_first
from tests.mpi.test_gather import OUT_OF_ORDER, OVERLAPPING, WITH_HOLES
from tests.mpi.test_scatter import whole_array

pytestmark = pytest.mark.usually(3)

pytest.importorskip("tensorstore")
zarr = pytest.importorskip("zarr")

CELLS = (6, 12)
FIELDS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "rho": ("f8", {}, (6, 12)),
    "u": (">f4", {"staggered": 0}, (7, 12)),
    "w": ("i2", {"staggered": (0, 1)}, (7, 13)),
    "links": ("c8", {"components": (2, ..., 3, 1)}, (2, 6, 12, 3, 1)),
    "odd": ("u4", {"parity": "odd"}, (6, 6)),
    "holes": (WITH_HOLES, {}, (6, 12)),
    "gap": ({"names": ["a", "b"], "formats": ["f4", "f8"], "offsets": [0, 8]}, {}, (6, 12)),
    "overlapping": (OVERLAPPING, {"staggered": 1}, (6, 13)),
    "order": (OUT_OF_ORDER, {}, (6, 12)),
    "text": ("U2", {}, (6, 12)),
    "long": ("q", {}, (6, 12)),  # long long, beside long another type of C of the same numbers
}
"""Fields of a grid of `CELLS`: dtype, options, and the shape of the whole."""


@pytest.fixture
def path(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder of all ranks."""
    name = comm.bcast(tempfile.mkdtemp(prefix="halox-test-") if comm.rank == 0 else None)
    yield Path(name)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(name)


def grid(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    return halox.Grid(CELLS, **({"comm": comm, "device": "cpu", "checkerboard": True} | options))


def filled(g: halox.Grid, names: Any = FIELDS) -> dict[str, Any]:
    """Fields of random bytes, the halo poisoned with others."""
    found = {}
    for name in names:
        dtype, options, shape = FIELDS[name]
        u = g.zeros(np.dtype(dtype), **options)
        u.view(np.uint8)[...] = 0xAA
        found[name] = g.scatter(whole_array(shape, dtype), out=u)
    return found


def check(g: halox.Grid, fields: dict[str, Any], names: Any = FIELDS) -> None:
    assert list(fields) == sorted(names)
    for name, u in fields.items():
        dtype, _, shape = FIELDS[name]
        whole = g.gather(u)
        expected = whole_array(shape, dtype)
        if g.rank == 0:
            assert whole is not None and whole.dtype == expected.dtype, name
            assert whole.shape == shape and whole.tobytes() == expected.tobytes(), name


def in_between(work: Callable[[], object], comm: MPI.Intracomm) -> None:
    """Run ``work`` on rank 0 after the calls of all ranks, and before their next ones."""
    come_together(comm)
    on_first(work, comm)


def fails(
    call: Callable[[], object], comm: MPI.Intracomm, kind: type[HaloxError] = CheckpointError
) -> str:
    """Assert that the ranks raise one error of a class; return its text."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert len(set(comm.allgather(text))) == 1
    return text


def names_in(path: Path, comm: MPI.Intracomm) -> list[str]:
    """The names in a folder, when rank 0 has removed what an earlier call left."""
    come_together(comm)
    found = sorted(os.listdir(path))
    come_together(comm)
    return found


def swap(first: Path, second: Path) -> None:
    """Exchange two names; no other rank looks meanwhile."""
    first.rename(first.with_name("third"))
    second.rename(first)
    first.with_name("third").rename(second)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes, compressors", [(300, "zstd"), (1 << 20, None)])
@pytest.mark.usually(3, 4)
def test_the_same_bits_on_other_ranks_and_divisions(
    shard_bytes: int,
    compressors: Any,
    path: Path,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_shards(monkeypatch, shard_bytes, 100)
    names = FIELDS if compressors is None else ("holes", "rho", "u", "w")
    with grid(comm) as g:
        g.save(path / "a", filled(g, names), compressors=compressors, attrs={"step": 3})
    # A part of the ranks, in other divisions, and uneven ones, with another halo.
    few = comm.Split(comm.rank < max(1, comm.size - 1))
    uneven = ([1] * (few.size - 1) + [CELLS[0] - few.size + 1], None)
    for on, options in (
        (comm, {"proc_shape": (1, 0)}),
        (few, {"blocks": uneven, "halo": 0, "proc_shape": (few.size, 1)}),
    ):
        with grid(on, **options) as g:
            found = g.load(path / "a")
            check(g, found, names)
            assert found.attrs == {"step": 3}
            if on is comm:
                g.save(path / "b", found, compressors=compressors)
    with grid(comm) as g:
        mine = {name: g.zeros_like(u) for name, u in filled(g, ("holes", "rho")).items()}
        found = g.load(path / "b", mine, names="u")
        assert all(found[name] is u for name, u in mine.items())
        check(g, found, ("holes", "rho", "u"))
    few.Free()


@pytest.mark.ranks(1, 2, 3, 4, 6)  # eight slabs would be thinner than the halo
def test_parts_in_buffers(path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of fields on GPUs, made of host arrays."""
    save_as_from_gpus(monkeypatch, 24)
    cut_shards(monkeypatch, 300)
    with grid(comm) as g:
        g.save(path / "a", filled(g))
    with grid(comm, proc_shape=(1, 0)) as g:
        check(g, g.load(path / "a"))


@pytest.mark.ranks(1, 3)
def test_fields_in_memory_of_any_alignment_and_stride(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        expected = whole_array(CELLS, "f8")
        packed = np.dtype([("a", "i4"), ("b", "f8")])
        for make in (
            lambda: np.zeros(g.padded_shape, packed)["b"],
            lambda: np.zeros(g.padded_shape)[::-1, ::-1],
            lambda: np.zeros(g.padded_shape, order="F"),
        ):
            g.save(path / "a", rho=g.scatter(expected, out=make()))
            check(g, g.load(path / "a", rho=make()), ("rho",))


@pytest.mark.usually(3, 4)
def test_zarr_reads_the_whole(path: Path, comm: MPI.Intracomm, monkeypatch: Any) -> None:
    """zarr-python's reading is the oracle of the files."""
    cut_shards(monkeypatch, 300, 100)
    with grid(comm) as g:
        g.save(path / "a", filled(g))
    if comm.rank:
        return
    group = zarr.open_group(str(path / "a"), mode="r")
    for name, (dtype, _, shape) in FIELDS.items():
        found = np.ascontiguousarray(group[name][...])
        if found.shape == shape:  # else structured: bytes along one more axis
            found = found.astype(dtype)
        assert found.tobytes() == whole_array(shape, dtype).tobytes(), name


LEVEL_3 = {"name": "zstd", "configuration": {"level": 3}}


@pytest.mark.parametrize("codec", ["blosc", ["zstd", "gzip"], LEVEL_3, "of zarr"])
def test_codecs(codec: Any, path: Path, comm: MPI.Intracomm) -> None:
    """By name, as JSON, or objects of zarr-python; also of chunks of zeros."""
    if codec == "of zarr":
        codec = [zarr.codecs.BloscCodec(), zarr.codecs.ZstdCodec(level=3)]
    with grid(comm) as g:
        g.save(path / "a", filled(g, ("rho", "text")), zeros=g.zeros(), compressors=codec)
        check(g, g.load(path / "a", names=["rho", "text"]), ("rho", "text"))
        assert g.norm(g.load(path / "a", zeros=g.ones())["zeros"]) == 0
    group = zarr.open_group(str(path / "a"), mode="r", use_consolidated=True)
    assert np.array_equal(group["rho"][...], whole_array(CELLS, "f8"), equal_nan=True)


def test_blocks_are_recorded(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(path / "a", w=g.zeros(staggered=(0, 1)))
        owned = comm.allgather(g.owned)
    attributes = json.loads((path / "a" / "zarr.json").read_text())["attributes"]
    first, second = attributes["halox_proc_shape"]
    sizes = np.split(attributes["halox_blocks"], [first])
    assert len(sizes[1]) == second
    for axis in (0, 1):
        assert np.cumsum(sizes[axis]).tolist() == sorted({cuts[axis].stop for cuts in owned})


def test_xarray_sees_one_labelled_whole(path: Path, comm: MPI.Intracomm) -> None:
    x, faces = np.linspace(0, 1, 6), np.arange(13, dtype="q")
    with grid(comm) as g:
        g.save(
            path / "a",
            filled(g),
            dims=("x", "z"),
            coords={"x": x, "z_face": faces},
            attrs={"time": np.float32(0.5), "steps": np.arange(2)},
        )
        check(g, g.load(path / "a"))
    if comm.rank:
        return
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(path / "a", chunks=None) as ds:
        assert ds["rho"].dims == ("x", "z") and ds["w"].dims == ("x_face", "z_face")
        assert ds["links"].dims[1:3] == ("x", "z") and ds["odd"].dims == ("x", "z_odd")
        assert np.array_equal(ds["rho"], whole_array((6, 12), "f8"), equal_nan=True)
        assert np.array_equal(ds.rho.x, x) and np.array_equal(ds.w.z_face, faces)
        assert (ds.attrs["time"], ds.attrs["steps"]) == (0.5, [0, 1])


@pytest.mark.parametrize(
    ("limit", "part_bytes"),
    [(move_in_parts, 24), (move_in_parts, 1 << 20), (save_as_from_gpus, 24)],
)
@pytest.mark.usually(3, 4)
def test_npy(
    limit: Callable[..., None],
    part_bytes: int,
    path: Path,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, part_bytes)
    one, told = path / "one.npy", list[tuple[int, int]]()
    with grid(comm) as g:
        fields = filled(g, ("u", "links", "gap"))
        for name, u in fields.items():
            g.save(one, {name: u}, progress=lambda *n: told.append(n))
            dtype, _, shape = FIELDS[name]
            assert np.load(one).tobytes() == whole_array(shape, dtype).tobytes()
            check(g, g.load(one, {name: g.zeros_like(u)}), (name,))
        assert told[-1][0] == told[-1][1]
        of_gap = np.dtype(FIELDS["gap"][0])
        assert "(7, 12)" in fails(lambda: g.load(one, u=g.zeros(of_gap, staggered=0)), comm)
        assert "dtype" in fails(lambda: g.load(one, u=g.zeros()), comm, FieldError)

        def damage() -> None:
            values = bytearray(one.read_bytes())
            values[12] = ord("(")
            (path / "no.npy").write_bytes(values)
            os.truncate(one, 200)

        in_between(damage, comm)
        for name in ("one.npy", "no.npy"):
            fails(lambda name=name: g.load(path / name), comm)
        fails(lambda: g.save(one, fields), comm, FieldError)
        fails(lambda: g.save(one, filled(g, ("holes",))), comm, FieldError)


def flip(file: Path) -> None:
    values = bytearray(file.read_bytes())
    values[len(values) // 2] ^= 4
    file.write_bytes(values)


def edit(**changes: Any) -> Callable[[Path], None]:
    """A change of the attributes of a group."""

    def change(file: Path) -> None:
        known = json.loads(file.read_text())
        known["attributes"].update(changes)
        file.write_text(json.dumps(known))

    return change


def describe(**changes: Any) -> Callable[[Path], None]:
    """A change of an array's own metadata, not of the group's."""
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes)) and None


def describe_in_group(**changes: Any) -> Callable[[Path], None]:
    """A change of the metadata of "rho" in the group's file alone."""

    def change(file: Path) -> None:
        known = json.loads(file.read_text())
        known["consolidated_metadata"]["metadata"]["rho"].update(changes)
        file.write_text(json.dumps(known))

    return change


def become(kind: str) -> Callable[[Path], None]:
    """A file becomes a folder, or a folder a file."""

    def change(file: Path) -> None:
        if kind == "folder":
            file.unlink()
            file.mkdir()
        else:
            shutil.rmtree(file)
            file.write_text("")

    return change


INTEGERS = {"data_type": "int64", "fill_value": 0}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CHUNKS = {"name": "regular", "configuration": {"chunk_shape": [1, 2]}}
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "bits": ("rho/c/0/0", flip, "rho/c/0/0"),
    "bits of a compressed chunk": ("z/c/0/0", flip, "z/c/0/0"),
    "cut off": ("rho/c/0/0", lambda file: os.truncate(file, 20), "rho/c/0/0"),
    "missing": ("rho/c/0/0", os.unlink, "rho/c/0/0"),
    "a folder for a shard": ("rho/c/0/0", become("folder"), "rho/c/0/0"),
    "dtype of a field": ("rho/zarr.json", describe(**INTEGERS), "rho"),
    "shape of a field": ("rho/zarr.json", describe(shape=[3, 12]), "rho"),
    "chunk shape of a field": ("rho/zarr.json", describe(chunk_grid=CHUNKS), "rho"),
    "byte order": ("rho/zarr.json", describe(codecs=[BIG, {"name": "crc32c"}]), "rho"),
    "metadata of a field": ("rho/zarr.json", os.unlink, "rho/zarr.json"),
    "dtype in the group": ("zarr.json", describe_in_group(**INTEGERS), "rho"),
    "shape in the group": ("zarr.json", describe_in_group(shape=[6, 11]), "rho"),
    "metadata": ("zarr.json", lambda file: file.write_text("{"), "metadata"),
    "version": ("zarr.json", edit(halox_format=1000), "version of halox"),
    "foreign": ("zarr.json", edit(halox_format=None), "grid.save"),
    "shape": ("zarr.json", edit(halox_grid_shape=[3, 4]), "(3, 4)"),
    "no checkpoint": ("", shutil.rmtree, "no checkpoint"),
    "a file": ("", become("file"), "is a file"),
}
"""By name: the file of a checkpoint, its change, and a word of the error."""


@pytest.mark.ranks(1, 2, 3, 4)
def test_damage_is_one_error_on_all_ranks(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_shards(monkeypatch, 200, 100)
    with grid(comm) as g:
        rho = filled(g, ("rho",))["rho"]
        g.save(path / "good", rho=rho)
        g.save(path / "compressed", z=rho, compressors="zstd")
        for name, (file, change, word) in DAMAGES.items():
            source = path / ("compressed" if "compressed" in name else "good")

            def damage(name: str = name, source: Path = source) -> None:
                shutil.copytree(source, path / name)

            in_between(damage, comm)
            in_between(lambda at=path / name / file, change=change: change(at), comm)
            assert word in fails(lambda name=name: g.load(path / name), comm), name
        check(g, g.load(path / "good"), ("rho",))


def test_damage_anywhere_is_found_by_another_division(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a shard of which each rank reads a part, of its checksums or of its index."""
    cut_shards(monkeypatch, chunk_bytes=100)
    with grid(comm, proc_shape=(0, 1) if comm.size <= 6 else None) as g:
        g.save(path / "a", filled(g, ("rho",)))
    file = path / "a" / "rho" / "c" / "0" / "0"
    size = file.stat().st_size

    def flip_at(place: int) -> None:
        values = bytearray(file.read_bytes())
        values[place] ^= 1
        file.write_bytes(values)

    with grid(comm, proc_shape=(1, 0) if comm.size <= 6 else None) as g:
        for place in (0, 7 * size // 12, size - 5, size - 4, size - 1):
            in_between(lambda place=place: flip_at(place), comm)
            fails(lambda: g.load(path / "a"), comm)
            in_between(lambda place=place: flip_at(place), comm)
        check(g, g.load(path / "a"), ("rho",))


def test_a_field_beside_one_with_damaged_metadata(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(path / "a", u=g.ones(), v=g.ones())
        in_between((path / "a" / "v" / "zarr.json").unlink, comm)
        assert g.sum(g.load(path / "a", names="u")["u"]) == 72


Call = Callable[[halox.Grid, Path, Any], Any]


def saving(fields: dict[str, Any] | None = None, **options: Any) -> Call:
    """Return a save of a field "u", or of given fields, to "b"."""
    return lambda g, p, u: g.save(p / "b", {"u": u} if fields is None else fields, **options)


def loading(**options: Any) -> Call:
    """Return a load of "a" into a new field with options."""
    return lambda g, p, u: g.load(p / "a", u=g.zeros(options.pop("dtype", "f8"), **options))


BAD: dict[str, tuple[Call, type[HaloxError], str]] = {
    "no field": (saving({}), FieldError, "field"),
    "path": (lambda g, p, u: g.save(3, u=u), CheckpointError, "path"),
    "netCDF": (lambda g, p, u: g.save(p / "b.nc", u=u), CheckpointError, "path"),
    "another store": (
        lambda g, p, u: g.save("gs://bucket/run.zarr", u=u),
        CheckpointError,
        "gs://bucket/run.zarr",
    ),
    "a bucket alone": (lambda g, p, u: g.load("s3://bucket"), CheckpointError, "s3://bucket"),
    "npy in a bucket": (lambda g, p, u: g.save("s3://b/u.npy", u=u), CheckpointError, ".npy"),
    "name": (saving({"a/b": 0}), FieldError, "name"),
    "name of a dimension": (
        lambda g, p, u: g.save(p / "b", x=u, dims=("x", "y")),
        FieldError,
        "dimension",
    ),
    "twice": (lambda g, p, u: g.save(p / "b", {"u": u}, u=u), FieldError, "u"),
    "array": (saving({"u": np.zeros(3)}), FieldError, "u: "),
    "attrs": (saving(attrs={"f": print}), FieldError, "attrs"),
    "own attrs": (saving(attrs={"halox_format": 1}), FieldError, "halox_"),
    "coords": (saving(coords={"x": np.zeros(5)}), FieldError, "coords['x']"),
    "dims": (saving(dims="xy"), FieldError, "dims"),
    "codec": (saving(compressors="zip"), CheckpointError, "compressors"),
    "keep": (saving(keep=0), FieldError, "keep"),
    "keep of npy": (lambda g, p, u: g.save(p / "b.npy", u=u, keep=2), FieldError, "keep"),
    "keep in a bucket": (lambda g, p, u: g.save("s3://b/b", u=u, keep=2), FieldError, "keep"),
    "progress": (saving(progress=3), FieldError, "progress"),
    "progress that raises": (
        lambda g, p, u: g.save(p / "a", u=u, progress=lambda done, total: 1 // 0),
        CheckpointError,
        "ZeroDivisionError",
    ),
    "another folder": (lambda g, p, u: g.save(p / "full", u=u), CheckpointError, "full"),
    "a file above": (lambda g, p, u: g.save(p / "file" / "b", u=u), CheckpointError, "file"),
    "unknown field": (lambda g, p, u: g.load(p / "a", names="q"), CheckpointError, "field q"),
    "dtype": (loading(dtype="f4"), FieldError, "dtype"),
    "layout": (loading(staggered=0), FieldError, "staggered"),
    "components": (loading(components=2), FieldError, "component"),
    "another grid": (
        lambda g, p, u: halox.Grid((8, 12), comm=g.comm, device="cpu").load(p / "a"),
        CheckpointError,
        "(8, 12)",
    ),
    "names differ": (
        lambda g, p, u: g.save(p / "b", {f"u{min(g.rank, 1)}": u}),
        MismatchError,
        "fields",
    ),
    "paths differ": (lambda g, p, u: g.load(p / f"a{min(g.rank, 1)}"), MismatchError, "path"),
}


def test_bad_input_is_one_error_on_all_ranks(path: Path, comm: MPI.Intracomm) -> None:
    """And leaves nothing behind."""
    if comm.rank == 0:
        (path / "full").mkdir()
        (path / "full" / "thesis.tex").write_text("")
        (path / "file").write_text("")
    with grid(comm) as g:
        u = g.ones()
        g.save(path / "a", u=u)
        before = names_in(path, comm)
        for name, (call, kind, word) in BAD.items():
            if name.endswith("differ") and comm.size == 1:
                continue
            with pytest.raises(HaloxError) as caught:
                call(g, path, u)
            assert type(caught.value) is kind and word in str(caught.value), name
            assert names_in(path, comm) == before, name
        assert g.sum(g.load(path / "a")["u"]) == 72


def test_attributes_that_json_lacks(path: Path, comm: MPI.Intracomm) -> None:
    """NaN and dates, of the group and of arrays, which xarray reads too."""
    xarray = pytest.importorskip("xarray")
    dates = {
        "python": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "day": datetime.date(2026, 1, 2),
        "numpy": np.datetime64("2026-01-02T03", "ns"),
        "many": np.array(["2026-01-02", "NaT"], "M8[D]"),
    }
    expected = {
        "python": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "numpy": "2026-01-02T03:00:00.000000000",
        "many": ["2026-01-02", "NaT"],
    }
    numbers = {"nan": np.nan, "limits": [1, -np.inf]}
    x = xarray.DataArray(np.arange(6.0), dims="x", attrs=dates | numbers)
    with grid(comm) as g:
        g.save(path / "a", u=g.ones(), coords={"x": x}, attrs=dates | numbers)
        attrs = g.load(path / "a").attrs
    with xarray.open_zarr(path / "a", chunks=None) as ds:
        for found in (attrs, ds.attrs, ds.x.attrs):
            assert expected.items() <= found.items()
            assert np.isnan(found["nan"]) and found["limits"] == [1, -np.inf]


def test_attributes_that_json_would_change(path: Path, comm: MPI.Intracomm) -> None:
    """Keys that are not text, and durations, whose unit would be lost."""
    with grid(comm) as g:
        for value in ({1: 2}, [{"a": {True: 1}}], np.timedelta64(5, "ns"), {"a": {None: 1}}):
            with pytest.raises(FieldError, match="attrs"):
                g.save(path / "a", u=g.ones(), attrs={"x": value})
        g.save(path / "a", u=g.ones(), attrs={"x": {"1": ({"b": np.arange(2)},)}})
        assert g.load(path / "a").attrs == {"x": {"1": [{"b": [0, 1]}]}}


def test_fields_called_like_the_default_dimensions(path: Path, comm: MPI.Intracomm) -> None:
    xarray = pytest.importorskip("xarray")
    with grid(comm) as g:
        x, y = g.scatter(whole_array(CELLS, "f8")), g.ones(staggered=1)
        g.save(path / "a", x=x, y_face=y, coords={"x_axis": np.arange(6)})
        assert g.norm(g.load(path / "a")["x"]) == g.norm(x)
    with xarray.open_zarr(path / "a", chunks=None) as ds:
        assert ds.x.dims == ("x_axis", "y_axis") and ds.y_face.dims == ("x_axis", "y_axis_face")
        assert np.array_equal(ds.x, whole_array(CELLS, "f8"))


def wall(slab: Any, axis: int, side: str, indices: Any) -> None:
    slab[...] = -1


def exchanged(g: halox.Grid, u: Any) -> Any:
    """A copy of a field's array after an exchange, with its halo."""
    g.exchange(u)
    return u.copy()


KEPT: dict[str, dict[str, Any]] = {
    "position": {"components": 2, "sign": {0: -1}, "position": ("center", "high")},
    "signs": {"components": (..., 3), "sign": {1: -1}},
    "walls": {
        "components": 2,
        "boundary": {
            0: (("antisymmetric", None), None),
            (): ((("constant", 2.5), None), None),
        },
    },
    "gradient": {"boundary": ((("gradient", -0.5), None), None)},
    "own": {"boundary": None},
}


@pytest.mark.ranks(1, 2, 3)
def test_options_of_fields_are_kept(path: Path, comm: MPI.Intracomm) -> None:
    """Halos after a restart are those of before; also from labelled arrays, if xarray is there."""
    options = {
        "connect": {(0, "high"): halox.Connection(flip=1)},
        "boundary": (("extrapolate", None), None),
        "periodic": (False, True),
        "checkerboard": False,
    }
    with grid(comm, **options) as g:
        fields = {name: g.zeros(**one) for name, one in KEPT.items()}
        for number, u in enumerate(fields.values()):
            g.interior(u)[...] = whole_values(g, u) + number
        expected = {name: exchanged(g, u) for name, u in fields.items()}
        g.save(path / "a", fields)
        found = g.load(path / "a")
        again = {name: g.zeros_like(u) for name, u in found.items()}
        for name, u in found.items():
            assert g.layout(u).spec == g.layout(fields[name]).spec == g.layout(again[name]).spec
            assert (exchanged(g, u) == expected[name]).all(), name
        pytest.importorskip("xarray")
        labelled = {name: g.dataarray(u, name=name, halo=True) for name, u in fields.items()}
        for name, array in labelled.items():
            spec = g.layout(fields[name]).spec
            assert g.layout(g.from_dataarray(array, part="halo")).spec == spec
            if name in ("position", "walls"):
                array.to_dataset().halox.to_zarr(path / name, g)
                (v,) = g.load(path / name).values()
                assert g.layout(v).spec == spec


def whole_values(g: halox.Grid, u: Any) -> Any:
    """Values that differ from cell to cell, and between the components behind."""
    values = sum(100.0**n * x for n, x in enumerate(g.indices(field=u)))
    after = g.layout(u).spec.components_after
    return np.stack([values * (n + 1) for n in range(after[0])], -1) if after else values


def test_a_wind_on_a_cubed_sphere_is_kept(path: Path, comm: MPI.Intracomm) -> None:
    with halox.CubedSphere(4, comm=comm, device="cpu") as g:
        u = g.zeros(components=2, sign="vector")
        g.interior(u)[...] = whole_values(g, u)
        g.save(path / "a", u=u)
        v = g.load(path / "a")["u"]
        assert (exchanged(g, v) == exchanged(g, u)).all()
    with halox.Grid((6, 4, 4), comm=comm, device="cpu") as g:
        with pytest.raises(FieldError, match=r"\bu\b.*sign"):
            g.load(path / "a")
        g.load(path / "a", u=g.zeros(components=2))


def test_complex_phases_are_kept(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm, periodic=True) as g:
        u = g.ones("c16", boundary=("phase", 1j))
        g.save(path / "a", u=u)
        v = g.load(path / "a")["u"]
        assert (exchanged(g, v) == exchanged(g, u)).all()


def test_a_boundary_function_must_be_given_again(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        u = g.full(2.0, boundary=wall)
        g.save(path / "a", u=u, v=g.full(3.0))
        for names in (None, "u", ["u", "v"]):
            with pytest.raises(FieldError, match=r"\bu\b.*\bwall\b"):
                g.load(path / "a", names=names)
        assert g.max(g.load(path / "a", names="v")["v"]) == 3
        found = g.load(path / "a", u=g.zeros(boundary=wall))["u"]
        assert (exchanged(g, found) == exchanged(g, u)).all()
        pytest.importorskip("xarray")
        with pytest.raises(FieldError, match=r"\bwall\b"):
            g.from_dataarray(g.dataarray(u), part="block")
    with grid(comm, boundary=wall) as g:  # the grid's boundary is no option of a field
        g.save(path / "a", u=g.full(2.0))
        assert g.max(g.load(path / "a")["u"]) == 2


def test_names_that_tensorstore_cannot_use(path: Path, comm: MPI.Intracomm) -> None:
    """A backslash, and bytes that are not UTF-8: an error, and nothing is written; .npy files can have them."""
    with grid(comm) as g:
        u = g.full(3.0)
        for name in ("out\\run.zarr", "out\\b/run.zarr", os.fsdecode(b"run\xff.zarr")):
            for call in (
                lambda at=path / name: g.save(at, u=u),
                lambda at=path / name: g.load(at),
                lambda at=path / name: halox.Output(g, at, u=u),
            ):
                assert "path" in fails(call, comm)
        assert names_in(path, comm) == []
        g.save(path / "out\\u.npy", u=u)
        assert names_in(path, comm) == ["out\\u.npy"]
        assert g.max(g.load(path / "out\\u.npy", v=g.zeros())["v"]) == 3
        g.save(path / "zeit\u00e9\u4e2d.zarr", u=u)
        assert g.max(g.load(path / "zeit\u00e9\u4e2d.zarr")["u"]) == 3


def test_a_path_below_the_home_folder(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(path))
    with grid(comm) as g:
        g.save("~/a.zarr", u=g.ones())
        g.save("~/a.npy", u=g.ones())
        assert names_in(path, comm) == ["a.npy", "a.zarr"]
        assert g.sum(g.load("~/a.npy")["a"]) == g.sum(g.load("~/a.zarr")["u"]) == 72


@pytest.mark.parametrize("name, swaps", [("run.zarr", True), ("run", False)])
def test_earlier_checkpoints_are_kept(
    name: str, swaps: bool, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last three, on file systems that can exchange names, and on others."""
    if not swaps:
        refuse_swaps(monkeypatch)
    stem, dot, suffix = name.partition(".")
    names = [name, *(f"{stem}.{n}{dot}{suffix}" for n in (1, 2))]
    expected = [[0], [1, 0], [2, 1, 0], [3, 2, 1], [4, 2, 1], [5, 4, 2]]
    with grid(comm) as g:
        for step, kept in enumerate(expected):
            g.save(path / name, u=g.full(step), keep=1 if step == 4 else 3)
            assert names_in(path, comm) == sorted(names[: len(kept)])
            for saved, value in zip(names, kept, strict=False):
                (u,) = g.load(path / saved).values()
                assert g.max(u) == g.min(u) == value


@pytest.mark.parametrize("own", ["a checkpoint", "a copy", "an empty folder", "of another name"])
def test_own_files_at_the_names_of_earlier_checkpoints(
    own: str, path: Path, comm: MPI.Intracomm
) -> None:
    """A save that keeps earlier checkpoints is an error, and leaves them as they are."""
    run, other = path / "run.zarr", path / "run.1.zarr"
    with grid(comm) as g:
        g.save(run, u=g.full(1))
        if own == "a checkpoint":
            g.save(other, u=g.full(7))
        elif own == "a copy":
            in_between(lambda: shutil.copytree(run, other), comm)
        elif own == "an empty folder":
            in_between(other.mkdir, comm)
        else:
            g.save(path / "a.zarr", u=g.full(7))
            g.save(path / "a.zarr", u=g.full(8), keep=2)
            in_between(lambda: (path / "a.1.zarr").rename(other), comm)
        before = files(path, comm)
        assert "keep" in fails(lambda: g.save(run, u=g.full(2), keep=2), comm)
        assert files(path, comm) == before


def files(path: Path, comm: MPI.Intracomm) -> dict[str, bytes]:
    """The contents of all files below a folder."""
    come_together(comm)
    found = {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    come_together(comm)
    return found


def test_a_name_that_is_taken_while_a_save_writes(path: Path, comm: MPI.Intracomm) -> None:
    run, other = path / "run.zarr", path / "run.1.zarr"
    with grid(comm) as g:
        g.save(run, u=g.full(1))

        def take(done: int, total: int) -> None:
            if comm.rank == 0:
                other.mkdir(exist_ok=True)
                (other / "thesis").write_text("long")

        assert "keep" in fails(lambda: g.save(run, u=g.full(2), keep=2, progress=take), comm)
        assert (other / "thesis").read_text() == "long"
        assert g.max(g.load(run)["u"]) == 1


@contextmanager
def small_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def remove_draft(path: Path) -> Callable[[int, int], None]:
    """Return a callback of progress that removes what a save has written, at its end."""

    def progress(done: int, total: int) -> None:
        if done == total:
            for draft in path.glob(".*.partial"):
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()

    return progress


@pytest.mark.ranks(1, 2, 3, 4)  # of six, the last one writes no chunk
@pytest.mark.parametrize("target", ["a", "one.npy"])
def test_a_failed_save_leaves_the_last_one(
    target: str, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk of the last rank or of all, and where the new files vanish before they take the name."""
    move_in_parts(monkeypatch, 24)  # so that all ranks write
    is_last, name = comm.rank == comm.size - 1, "u" if target == "a" else "one"
    cases = [(is_last, None), (True, None)]
    if comm.size == 1:  # other ranks could write them anew
        cases.append((False, remove_draft(path)))
    with grid(comm) as g:
        u, v = g.ones(), g.full(2.0)
        g.save(path / target, u=u)
        for is_small, progress in cases:
            with small_disk() if is_small else nullcontext():
                fails(lambda progress=progress: g.save(path / target, u=v, progress=progress), comm)
            assert names_in(path, comm) == [target]
            assert g.sum(g.load(path / target)[name]) == 72
        g.save(path / target, u=v)
        assert g.sum(g.load(path / target)[name]) == 144


@contextmanager
def as_nobody() -> Iterator[None]:
    """Lose the rights of root on files."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("target, mode", [("a", 0o700), ("one.npy", 0o755)])
def test_a_path_that_one_rank_cannot_write(
    mode: int, target: str, path: Path, comm: MPI.Intracomm
) -> None:
    """Nor see, or only see: one error on all ranks, and the last checkpoint stays."""
    name = "u" if target == "a" else "one"
    with grid(comm) as g:
        u, v = g.ones(), g.full(2.0)
        if comm.rank == 0:
            path.chmod(mode)
        g.save(path / target, u=u)
        with as_nobody() if comm.rank == comm.size - 1 else nullcontext():
            fails(lambda: g.save(path / target, u=v), comm)
        assert names_in(path, comm) == [target]
        assert g.sum(g.load(path / target)[name]) == 72


def test_two_runs_and_one_that_died(path: Path, comm: MPI.Intracomm) -> None:
    """Another run holds the lock and has begun to write; then it dies, and the kernel releases the lock."""
    half, held = path / f".a.{'0' * 32}.partial", list[int]()

    def begin() -> None:
        held.append(os.open(path / ".a.lock", os.O_RDWR | os.O_CREAT))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        half.mkdir()
        (half / "c.0").write_text("half")

    with grid(comm) as g:
        g.save(path / "a", u=g.ones())
        in_between(begin, comm)
        fails(lambda: g.save(path / "a", u=g.full(2.0)), comm)
        assert g.sum(g.load(path / "a")["u"]) == 72 and half.exists()
        in_between(lambda: os.close(held[0]), comm)
        g.save(path / "a", u=g.full(2.0))
        assert g.sum(g.load(path / "a")["u"]) == 144
        assert names_in(path, comm) == ["a"]


def test_a_file_system_that_cannot_exchange_names(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_swaps(monkeypatch)
    run, previous = path / "a", path / ".a.previous"
    with grid(comm) as g:
        for value in (1.0, 2.0):
            g.save(run, u=g.full(value))
            assert g.sum(g.load(run)["u"]) == 72 * value
        assert names_in(path, comm) == ["a"]
        # A run that died between the two renames: its last checkpoint is not lost, and not replaced.
        in_between(lambda: run.rename(previous), comm)
        fails(lambda: g.load(run), comm)
        fails(lambda: g.save(run, u=g.full(3.0)), comm)
        in_between(lambda: previous.rename(run), comm)
        assert g.sum(g.load(run)["u"]) == 144
        assert names_in(path, comm) == ["a"]


def test_a_checkpoint_that_is_replaced_while_it_is_read(path: Path, comm: MPI.Intracomm) -> None:
    """The values of one checkpoint, or an error, and never a mixture."""
    with grid(comm) as g:
        u, v = g.ones(), g.full(2.0)
        g.save(path / "a", u=u, v=u)
        g.save(path / "b", u=v, v=v)
        come_together(comm)
        replaced: list[int] = []

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and not replaced:
                replaced.append(1)
                swap(path / "a", path / "b")

        try:
            found = g.load(path / "a", progress=replace)
        except CheckpointError:
            return
        assert g.sum(found["u"]) == g.sum(found["v"]) == 72


def test_a_checkpoint_that_is_replaced_and_removed_while_it_is_read(
    path: Path, comm: MPI.Intracomm
) -> None:
    """The error tells that it is not damaged."""
    with grid(comm) as g:
        u = g.ones()
        g.save(path / "a", u=u, v=u)
        g.save(path / "b", u=u, v=u)
        come_together(comm)

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and (path / "b").exists():
                swap(path / "a", path / "b")
                shutil.rmtree(path / "b")

        assert "was replaced" in fails(lambda: g.load(path / "a", progress=replace), comm)
        assert g.sum(g.load(path / "a")["v"]) == 72


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("target", ["a", "one.npy"])
def test_a_checkpoint_that_is_replaced_while_ranks_open_it(
    target: str, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has opened the old one, the others open the new one."""
    run, other = path / target, path / f"b{Path(target).suffix}"
    name = "one" if target == "one.npy" else "u"
    with grid(comm) as g:
        for where, value in ((run, 1.0), (other, 2.0)):
            g.save(where, u=g.full(value))
        come_together(comm)
        with monkeypatch.context() as patched:
            open_in_turn(patched, comm, lambda: swap(run, other))
            assert "was replaced" in fails(lambda: g.load(run), comm)
        assert g.sum(g.load(run)[name]) == 144


def test_npy_into_which_another_program_writes(path: Path, comm: MPI.Intracomm) -> None:
    def write(done: int, total: int) -> None:
        if comm.rank == 0:
            np.save(path / "one.npy", np.full(CELLS, 3.0))

    with grid(comm) as g:
        g.save(path / "one.npy", u=g.ones())
        come_together(comm)
        fails(lambda: g.load(path / "one.npy", progress=write), comm)
        assert g.sum(g.load(path / "one.npy")["one"]) == 216


def resident_mib(*, reset: bool = False) -> float:
    """The most resident memory of this process since the last reset."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except PermissionError as error:  # as in some containers
            pytest.skip(f"the system does not measure the memory of a process: {error}")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def test_progress_and_memory(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little beside the field, also where another division reads it."""
    cut_shards(monkeypatch, 1 << 19, 1 << 16)
    shape, told, mib = (32 * comm.size + 1, 1 << 17), [], []
    for proc_shape in ((0, 1), (1, 0)):
        with halox.Grid(shape, proc_shape=proc_shape, comm=comm, device="cpu") as g:
            u = g.ones()
            if not mib:
                g.save(path / "a", u=u)  # its threads and buffers remain
                before = resident_mib(reset=True)
                g.save(path / "a", u=u, progress=lambda *n: told.append(n))
                assert told == sorted(told) and told[-1] == (told[-1][1], g.interior(u).nbytes)
            else:
                u[...] = 0
                before = resident_mib(reset=True)
                g.load(path / "a", u=u)
                assert g.sum(u) == shape[0] * shape[1]
            mib.append(resident_mib() - before)
    assert max(mib) < 20, mib  # of a block of 32 MiB


def test_without_tensorstore(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with grid(comm) as g:
        u = g.ones()
        for call in (lambda: g.save(path / "a", u=u), lambda: g.load(path / "a")):
            assert "tensorstore" in fails(call, comm, MissingPackageError)
        g.save(path / "u.npy", u=u)
        assert g.sum(g.load(path / "u.npy")["u"]) == 72


def test_one_thread(path: Path, comm: MPI.Intracomm) -> None:
    """The callback may not call the grid from another thread."""
    with grid(comm) as g:
        u, errors = g.ones(), []

        def call() -> None:
            try:
                g.save(path / "b", u=u)
            except HaloxError as error:
                errors.append(type(error).__name__)

        def progress(done: int, total: int) -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        g.save(path / "a", u=u, progress=progress)
        assert errors and set(errors) == {"StateError"}
