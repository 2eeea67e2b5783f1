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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.checkpoint import folder, loading, moving, npy, saving, store
from halox.errors import (
    CheckpointError,
    FieldError,
    HaloxError,
    MismatchError,
    MissingPackageError,
)
from tests.limits import cut_shards
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
    "links": ("c8", {"components": 2, "components_after": (3, 1)}, (2, 6, 12, 3, 1)),
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


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shard_bytes", [300, 1 << 20])
@pytest.mark.parametrize("compressors", [None, "zstd"])
@pytest.mark.usually(3, 4)
def test_the_same_bits_on_other_ranks_and_divisions(
    shard_bytes: int,
    compressors: Any,
    path: Path,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_shards(monkeypatch, shard_bytes, 100)
    names = FIELDS if compressors is None and shard_bytes > 300 else ("holes", "rho", "u", "w")
    with grid(comm) as g:
        g.save(path / "a", filled(g, names), compressors=compressors, attrs={"step": 3})
    # A part of the ranks, in other divisions, and uneven ones, with another halo.
    few = comm.Split(comm.rank < max(1, comm.size - 1))
    uneven = ([1] * (few.size - 1) + [CELLS[0] - few.size + 1], None) if few.size <= 6 else None
    for on, options in ((comm, {"proc_shape": (1, 0)}), (few, {"blocks": uneven, "halo": 0})):
        if options.get("blocks"):
            options["proc_shape"] = (few.size, 1)
        elif on.size > CELLS[1] // 2:
            options = {}
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
@pytest.mark.parametrize("part_bytes", [24, 1 << 20])
@pytest.mark.usually(3, 4)
def test_parts_in_buffers(
    part_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of fields on GPUs, made of host arrays."""
    monkeypatch.setattr(moving, "is_device_array", lambda _: True)
    monkeypatch.setattr(moving, "DEVICE_PART_BYTES", part_bytes)
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
        expected = whole_array(shape, dtype)
        found = np.ascontiguousarray(group[name][...])
        assert (
            found.astype(dtype).tobytes() == expected.tobytes()
            if found.shape == shape
            else (found.tobytes() == expected.tobytes())
        ), name


LEVEL_3 = {"name": "zstd", "configuration": {"level": 3}}


@pytest.mark.parametrize("codec", ["blosc", "gzip", ["zstd", "gzip"], LEVEL_3, "of zarr"])
def test_codecs(codec: Any, path: Path, comm: MPI.Intracomm) -> None:
    """By name, as JSON, or objects of zarr-python."""
    if codec == "of zarr":
        codec = [zarr.codecs.BloscCodec(), zarr.codecs.ZstdCodec(level=3)]
    with grid(comm) as g:
        g.save(path / "a", filled(g, ("rho", "text")), compressors=codec)
        check(g, g.load(path / "a"), ("rho", "text"))
    group = zarr.open_group(str(path / "a"), mode="r", use_consolidated=True)
    assert np.array_equal(group["rho"][...], whole_array(CELLS, "f8"), equal_nan=True)


def test_compressed_chunks_of_zeros(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(path / "a", u=g.zeros(), compressors="zstd")
        assert g.norm(g.load(path / "a", u=g.ones())["u"]) == 0


def test_blocks_are_recorded(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(path / "a", w=g.zeros(staggered=(0, 1)))
        owned = comm.allgather(g.owned)
        found = store.read(store.Store.of_folder(path / "a", "a", 60)).blocks
    for axis, sizes in enumerate(found):
        ends = {cuts[axis].stop for cuts in owned}
        assert set(np.cumsum(sizes)) == ends and len(sizes) == len(ends)
    assert len(found) == 2


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


@pytest.mark.parametrize("part_bytes", [24, 1 << 20])
@pytest.mark.usually(3, 4)
def test_npy(
    part_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy, "PART_BYTES", part_bytes)
    told: list[tuple[int, int]] = []
    with grid(comm) as g:
        fields = filled(g, ("u", "links", "gap"))
        for name, u in fields.items():
            g.save(path / "one.npy", {name: u}, progress=lambda *n: told.append(n))
            dtype, _, shape = FIELDS[name]
            assert np.load(path / "one.npy").tobytes() == whole_array(shape, dtype).tobytes()
            comm.Barrier()
            mine = g.zeros_like(u)
            check(g, g.load(path / "one.npy", {name: mine}), (name,))
        assert told[-1][0] == told[-1][1]
        text = r"(?s)one\.npy has an array of shape \(6, 12\), and the whole field has \(7, 12\)"
        with pytest.raises(HaloxError, match=text):
            g.load(path / "one.npy", u=g.zeros(np.dtype(FIELDS["gap"][0]), staggered=0))
        with pytest.raises(FieldError, match="dtype"):
            g.load(path / "one.npy", u=g.zeros())
        if comm.rank == 0:
            shutil.copy(path / "one.npy", path / "no.npy")
            with open(path / "no.npy", "r+b") as file:
                file.seek(12)
                file.write(b"(")
            os.truncate(path / "one.npy", 200)
        comm.Barrier()
        with pytest.raises(CheckpointError):
            g.load(path / "one.npy")
        with pytest.raises(CheckpointError):
            g.load(path / "no.npy")
        with pytest.raises(FieldError):
            g.save(path / "one.npy", fields)
        with pytest.raises(FieldError):
            g.save(path / "one.npy", filled(g, ("holes",)))


def damage(name: str, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A change of the file of a checkpoint that sorts first among those that match."""
    return lambda path: change(sorted((path / "a").glob(name))[0])


SHARD = "c/*/*"


def flip(file: Path) -> None:
    values = bytearray(file.read_bytes())
    values[len(values) // 2] ^= 4
    file.write_bytes(values)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        known = json.loads(file.read_text())
        known["attributes"].update(changes)
        file.write_text(json.dumps(known))

    return change


def described(**changes: Any) -> Callable[[Path], None]:
    """A change of an array's own metadata, not of the group's."""
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes)) and None


def described_in_group(name: str, **changes: Any) -> Callable[[Path], None]:
    """A change of an array's metadata in the group's file alone."""

    def change(file: Path) -> None:
        known = json.loads(file.read_text())
        known["consolidated_metadata"]["metadata"][name].update(changes)
        file.write_text(json.dumps(known))

    return change


INTEGERS = {"data_type": "int64", "fill_value": 0}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CHUNKS = {"name": "regular", "configuration": {"chunk_shape": [1, 2]}}

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bits": (
        damage(f"rho/{SHARD}", flip),
        r"rho cannot be read: DATA_LOSS: .* in local file \".*/a/rho/c/0/0\": .*; use an earlier",
    ),
    "bits of a compressed chunk": (damage(f"z/{SHARD}", flip), r"z cannot be read: .*z/c/0/0"),
    "cut off": (
        damage(f"rho/{SHARD}", lambda f: os.truncate(f, 20)),
        r"rho cannot be read: DATA_LOSS: .*rho/c/0/0.*; use an earlier",
    ),
    "missing": (
        damage(f"rho/{SHARD}", os.unlink),
        r"rho cannot be read: NOT_FOUND: .*rho/c/0/0\" is missing; use an earlier",
    ),
    "a folder for a shard": (
        damage(f"rho/{SHARD}", lambda f: (f.unlink(), f.mkdir())),
        r"rho cannot be read: .*rho/c/0/0",
    ),
    "dtype of a field": (
        damage("rho/zarr.json", described(**INTEGERS)),
        r'rho cannot be read: .* Expected "data_type" of .*float64.* but received: .*int64',
    ),
    "shape of a field": (
        damage("rho/zarr.json", described(shape=[3, 12])),
        r'rho cannot be read: .* Expected "shape" of \[6,12\] but received: \[3,12\]',
    ),
    "chunk shape of a field": (
        damage("rho/zarr.json", described(chunk_grid=CHUNKS)),
        "rho cannot be read: .*chunk",
    ),
    "byte order": (
        damage("rho/zarr.json", described(codecs=[BIG, {"name": "crc32c"}])),
        "rho cannot be read: .*Cannot merge zarr codec constraints",
    ),
    "metadata of a field": (
        damage("rho/zarr.json", os.unlink),
        r"rho cannot be read: NOT_FOUND: .*a/rho/zarr\.json\" does not exist; use an earlier",
    ),
    "dtype in the group": (
        damage("zarr.json", described_in_group("rho", **INTEGERS)),
        r"a/zarr\.json is damaged .*rho has dtype int64, expected float64",
    ),
    "shape in the group": (
        damage("zarr.json", described_in_group("rho", shape=[6, 11])),
        r"rho does not fit this grid: shape \(6, 11\) in the checkpoint, \(6, 12\) in the field",
    ),
    "metadata": (damage("zarr.json", lambda f: f.write_text("{")), "no Zarr group"),
    "version": (damage("zarr.json", edit(halox_format=store.FORMAT + 1)), "newer version of halox"),
    "foreign": (damage("zarr.json", edit(halox_format=None)), "grid.save has written"),
    "shape": (damage("zarr.json", edit(halox_grid_shape=[3, 4])), r"a grid of \(3, 4\) cells"),
    "no checkpoint": (lambda path: shutil.rmtree(path / "a"), "there is no checkpoint"),
    "a file": (
        lambda path: (shutil.rmtree(path / "a"), (path / "a").write_text("")),
        "is a file, and a checkpoint is a folder",
    ),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.part(2)
def test_damage_is_one_error_on_all_ranks(
    name: str, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, text = DAMAGES[name]
    cut_shards(monkeypatch, 200, 100)
    with grid(comm) as g:
        rho = filled(g, ("rho",))["rho"]
        g.save(path / "good", rho=rho)
        g.save(path / "a", z=rho, compressors="zstd") if " compressed" in name else g.save(
            path / "a", rho=rho
        )
        comm.Barrier()
        if comm.rank == 0:
            change(path)
        comm.Barrier()
        with pytest.raises(CheckpointError, match=text):
            g.load(path / "a")
        check(g, g.load(path / "good"), ("rho",))
        g.save(path / "b", rho=rho)
        check(g, g.load(path / "b"), ("rho",))


@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
def test_damage_anywhere_is_found_by_another_division(
    chunk_bytes: int, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a shard of which each rank reads a part, of its checksums or of its index."""
    cut_shards(monkeypatch, chunk_bytes=chunk_bytes)
    with grid(comm, proc_shape=(0, 1) if comm.size <= 6 else None) as g:
        fields = filled(g, ("rho",))
        g.save(path / "a", fields)
        g.save(path / "good", fields)
    file = path / "a" / "rho" / "c" / "0" / "0"
    size = file.stat().st_size
    with grid(comm, proc_shape=(1, 0) if comm.size <= 6 else None) as g:
        for place in (0, 7 * size // 12, size - 5, size - 4, size - 1):
            comm.Barrier()
            if comm.rank == 0:
                values = bytearray(file.read_bytes())
                values[place] ^= 1
                file.write_bytes(values)
            comm.Barrier()
            with pytest.raises(CheckpointError) as caught:
                g.load(path / "a")
            assert len(set(comm.allgather(str(caught.value)))) == 1
            comm.Barrier()
            if comm.rank == 0:
                values[place] ^= 1
                file.write_bytes(values)
        comm.Barrier()
        check(g, g.load(path / "a"), ("rho",))
        check(g, g.load(path / "good"), ("rho",))


Case = Callable[[halox.Grid, Path, Any], Any]
BAD: dict[str, tuple[Case, type[HaloxError], str]] = {
    "no field": (lambda g, p, u: g.save(p / "b"), FieldError, "no field given"),
    "path": (lambda g, p, u: g.save(3, u=u), CheckpointError, "path: expected a str or a path"),
    "netCDF": (
        lambda g, p, u: g.save(p / "b.nc", u=u),
        CheckpointError,
        r"b\.nc is a name of netCDF or HDF5, .* named \.zarr, .*xarray.open_zarr\('b\.zarr'\)\.to_netcdf\('b\.nc'\)",
    ),
    "another store": (
        lambda g, p, u: g.save("gs://bucket/run.zarr", u=u),
        CheckpointError,
        "expected a path, or s3://BUCKET/NAME, got gs://bucket/run.zarr",
    ),
    "a bucket alone": (
        lambda g, p, u: g.load("s3://bucket"),
        CheckpointError,
        "expected a path, or s3://BUCKET/NAME, got s3://bucket",
    ),
    "npy in a bucket": (
        lambda g, p, u: g.save("s3://bucket/u.npy", u=u),
        CheckpointError,
        ".npy files are written to file systems only",
    ),
    "load of netCDF": (
        lambda g, p, u: g.load(p / "b.H5"),
        CheckpointError,
        r"b\.H5 is a name of netCDF or HDF5, .*xarray\.open_dataset",
    ),
    "name": (lambda g, p, u: g.save(p / "b", {"a/b": u}), FieldError, "no name for a field"),
    "name of a dimension": (
        lambda g, p, u: g.save(p / "b", x=u, dims=("x", "y")),
        FieldError,
        "x is the name of a field and of a dimension",
    ),
    "twice": (lambda g, p, u: g.save(p / "b", {"u": u}, u=u), FieldError, "given both"),
    "array": (lambda g, p, u: g.save(p / "b", u=np.zeros(3)), FieldError, "u: .*does not fit"),
    "attrs": (
        lambda g, p, u: g.save(p / "b", u=u, attrs={"f": g}),
        FieldError,
        "attrs: f has no place in JSON",
    ),
    "own attrs": (
        lambda g, p, u: g.save(p / "b", u=u, attrs={"halox_format": 1}),
        FieldError,
        "do not begin with 'halox_'",
    ),
    "coords": (
        lambda g, p, u: g.save(p / "b", u=u, coords={"x": np.zeros(5)}),
        FieldError,
        r"coords\['x'\] must have one axis of 6 values",
    ),
    "dims": (lambda g, p, u: g.save(p / "b", u=u, dims="xy"), FieldError, "dims must name 2"),
    "codec": (
        lambda g, p, u: g.save(p / "b", u=u, compressors="zip"),
        CheckpointError,
        "compressors: expected Zarr codecs .* got 'zip'",
    ),
    "keep": (lambda g, p, u: g.save(p / "b", u=u, keep=0), FieldError, "keep: expected a number"),
    "keep in a bucket": (
        lambda g, p, u: g.save("s3://bucket/b", u=u, keep=2),
        FieldError,
        "keep: s3://bucket/b: only Zarr groups",
    ),
    "progress": (
        lambda g, p, u: g.save(p / "b", u=u, progress=3),
        FieldError,
        "progress: expected",
    ),
    "another folder": (
        lambda g, p, u: g.save(p / "full", u=u),
        CheckpointError,
        "full exists and is not a checkpoint",
    ),
    "a file above": (lambda g, p, u: g.save(p / "file" / "b", u=u), CheckpointError, "writing .*"),
    "unknown field": (
        lambda g, p, u: g.load(p / "a", names="q"),
        CheckpointError,
        "has no field q; it has u",
    ),
    "dtype": (
        lambda g, p, u: g.load(p / "a", u=g.zeros("f4")),
        FieldError,
        "u: dtype float64 in the checkpoint, float32 in the field",
    ),
    "layout": (
        lambda g, p, u: g.load(p / "a", u=g.zeros(staggered=0)),
        FieldError,
        "u: staggered axes",
    ),
    "components": (
        lambda g, p, u: g.load(p / "a", u=g.zeros(components=2)),
        FieldError,
        "u: component axes",
    ),
    "another grid": (
        lambda g, p, u: halox.Grid((8, 12), comm=g.comm, device="cpu").load(p / "a"),
        CheckpointError,
        r"a grid of \(6, 12\) cells, and this grid has \(8, 12\)",
    ),
    "names differ": (
        lambda g, p, u: g.save(p / "b", {f"u{min(g.rank, 1)}": u}),
        MismatchError,
        "fields differs between ranks",
    ),
    "paths differ": (
        lambda g, p, u: g.load(p / f"a{min(g.rank, 1)}"),
        MismatchError,
        "path differs between ranks",
    ),
    "progress that raises": (
        lambda g, p, u: g.save(p / "a", u=u, progress=lambda done, total: 1 // 0),
        CheckpointError,
        "ZeroDivisionError",
    ),
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
        comm.Barrier()
        before = sorted(os.listdir(path))
        for name, (call, kind, text) in BAD.items():
            if name.endswith("differ") and comm.size == 1:
                continue
            with pytest.raises(kind, match=rf"(?s){text}"):
                call(g, path, u)
            comm.Barrier()
            assert sorted(os.listdir(path)) == before, name
            comm.Barrier()
        assert g.sum(g.load(path / "a")["u"]) == 72


@pytest.mark.parametrize("suffix", [".nc", ".nc4", ".cdf", ".h5", ".hdf5", ".NC"])
def test_names_of_other_formats(suffix: str, path: Path, comm: MPI.Intracomm) -> None:
    """No save makes a folder of such a name; one that is a checkpoint is loaded."""
    with grid(comm) as g:
        u = g.ones()
        with pytest.raises(CheckpointError) as caught:
            g.save(path / f"a{suffix}", u=u)
        assert len(set(comm.allgather(str(caught.value)))) == 1 and not os.listdir(path)
        with pytest.raises(CheckpointError):
            g.load(path / f"a{suffix}")
        comm.Barrier()
        g.save(path / "a", u=u)
        comm.Barrier()
        if comm.rank == 0:
            os.rename(path / "a", path / f"a{suffix}")
        comm.Barrier()
        assert g.sum(g.load(path / f"a{suffix}")["u"]) == 72


@contextmanager
def small_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    "signs": {"components_after": 3, "sign": {1: -1}},
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
        for name, u in fields.items():
            labelled = g.dataarray(u, name=name, halo=True)
            v = g.from_dataarray(labelled)
            assert g.layout(v).spec == g.layout(u).spec
            labelled.to_dataset().halox.to_zarr(path / name, g)
            (v,) = g.load(path / name).values()
            assert g.layout(v).spec == g.layout(u).spec


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
            g.from_dataarray(g.dataarray(u))
    with grid(comm, boundary=wall) as g:  # the grid's boundary is no option of a field
        g.save(path / "a", u=g.full(2.0))
        assert g.max(g.load(path / "a")["u"]) == 2


def test_attributes_that_json_would_change(path: Path, comm: MPI.Intracomm) -> None:
    """Keys that are not text, and durations, whose unit would be lost."""
    with grid(comm) as g:
        for value in ({1: 2}, [{"a": {True: 1}}], np.timedelta64(5, "ns"), {"a": {None: 1}}):
            with pytest.raises(FieldError, match="attrs"):
                g.save(path / "a", u=g.ones(), attrs={"x": value})
        g.save(path / "a", u=g.ones(), attrs={"x": {"1": ({"b": np.arange(2)},)}})
        assert g.load(path / "a").attrs == {"x": {"1": [{"b": [0, 1]}]}}


def test_names_that_tensorstore_cannot_use(path: Path, comm: MPI.Intracomm) -> None:
    """A backslash, and bytes that are not UTF-8: an error, and nothing is written; .npy files can have them."""
    with grid(comm) as g:
        u = g.full(3.0)
        for name in ("out\\run.zarr", "out\\b/run.zarr", os.fsdecode(b"run\xff.zarr")):
            with pytest.raises(CheckpointError, match="path"):
                g.save(path / name, u=u)
            with pytest.raises(CheckpointError, match="path"):
                g.load(path / name)
            with pytest.raises(CheckpointError, match="path"):
                halox.Output(g, path / name, u=u)
        comm.Barrier()
        assert os.listdir(path) == []
        comm.Barrier()
        g.save(path / "out\\u.npy", u=u)
        comm.Barrier()
        assert os.listdir(path) == ["out\\u.npy"]
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
        comm.Barrier()
        assert sorted(os.listdir(path)) == ["a.npy", "a.zarr"]
        assert g.sum(g.load("~/a.npy")["a"]) == g.sum(g.load("~/a.zarr")["u"]) == 72


@pytest.mark.parametrize("name", ["run.zarr", "run"])
@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.part(2)
def test_earlier_checkpoints_are_kept(
    name: str, swaps: bool, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last three, on file systems that can exchange names, and on others."""
    if not swaps:
        monkeypatch.setattr(folder, "_swap_names", lambda first, second: False)
    stem, dot, suffix = name.partition(".")
    names = [name, *(f"{stem}.{n}{dot}{suffix}" for n in (1, 2))]
    with grid(comm) as g:
        for step in range(6):
            g.save(path / name, u=g.full(step), keep=1 if step == 4 else 3)
            comm.Barrier()
            kept = {0: [0], 1: [1, 0], 2: [2, 1, 0], 3: [3, 2, 1], 4: [4, 2, 1], 5: [5, 4, 2]}[step]
            assert sorted(os.listdir(path)) == sorted(names[: len(kept)])
            for saved, value in zip(names, kept, strict=False):
                (u,) = g.load(path / saved).values()
                assert g.max(u) == g.min(u) == value
            comm.Barrier()


@pytest.mark.parametrize(
    "own", ["a checkpoint", "a copy", "a file", "an empty folder", "of another name"]
)
def test_own_files_at_the_names_of_earlier_checkpoints(
    own: str, path: Path, comm: MPI.Intracomm
) -> None:
    """A save that keeps earlier checkpoints is an error, and leaves them as they are."""
    run, other = path / "run.zarr", path / "run.1.zarr"
    with grid(comm) as g:
        g.save(run, u=g.full(1))
        if own == "a checkpoint":
            g.save(other, u=g.full(7))
        elif own == "of another name":
            g.save(path / "a.zarr", u=g.full(7))
            g.save(path / "a.zarr", u=g.full(8), keep=2)
        comm.Barrier()
        if comm.rank == 0:
            if own == "a copy":
                shutil.copytree(run, other)
            elif own == "a file":
                other.write_text("thesis")
            elif own == "an empty folder":
                other.mkdir()
            elif own == "of another name":
                (path / "a.1.zarr").rename(other)
        comm.Barrier()
        before = files(path)
        comm.Barrier()
        for keep in (2, 3):
            with pytest.raises(CheckpointError, match="keep"):
                g.save(run, u=g.full(2), keep=keep)
        comm.Barrier()
        assert files(path) == before
        with pytest.raises(FieldError, match="keep"):
            g.save(path / "run.npy", u=g.ones(), keep=2)


def test_a_name_that_is_taken_while_a_save_writes(path: Path, comm: MPI.Intracomm) -> None:
    run, other = path / "run.zarr", path / "run.1.zarr"
    with grid(comm) as g:
        g.save(run, u=g.full(1))

        def take(done: int, total: int) -> None:
            if comm.rank == 0:
                other.mkdir(exist_ok=True)
                (other / "thesis").write_text("long")

        with pytest.raises(CheckpointError, match="keep"):
            g.save(run, u=g.full(2), keep=2, progress=take)
        assert (other / "thesis").read_text() == "long"
        assert g.max(g.load(run)["u"]) == 1


def files(path: Path) -> dict[str, bytes]:
    """The contents of all files below a folder."""
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(1, 2, 3, 4)  # of six, the last one writes no chunk
@pytest.mark.parametrize(
    "where, target",
    list(product(["last rank", "all ranks", "metadata", "commit"], ["a", "one.npy"])),
)
def test_a_full_disk_leaves_the_last_one(
    where: str, target: str, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, name = comm.rank == comm.size - 1, "u" if target == "a" else "one"
    with grid(comm) as g:
        u, v = g.ones(), g.full(2.0)
        g.save(path / target, u=u)
        with monkeypatch.context() as patched:
            if where == "metadata":
                patched.setattr(saving if target == "a" else npy.npy, METADATA[target], full)
            elif where == "commit":
                patched.setattr(folder, "_sync_tree", full)
            limited = where == "all ranks" or (where == "last rank" and last)
            with (
                small_disk() if limited else nullcontext(),
                pytest.raises(CheckpointError) as caught,
            ):
                g.save(path / target, u=v)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        comm.Barrier()  # rank 0 has removed what was written
        assert os.listdir(path) == [target]
        assert g.sum(g.load(path / target)[name]) == 72
        comm.Barrier()
        g.save(path / target, u=v)
        assert g.sum(g.load(path / target)[name]) == 144


@pytest.mark.ranks(2, 3)
def test_a_failed_write_leaves_no_lock(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH keeps its lock of the file if a write fails; the others' writes wait for it."""
    descriptors = []

    def write(*_: Any, **__: Any) -> None:
        (partial,) = path.glob(".*.partial")
        descriptors.append(os.open(partial, os.O_RDWR))
        if comm.rank == comm.size - 1:
            fcntl.lockf(descriptors[0], fcntl.LOCK_EX)
            comm.Barrier()
            raise MPI.Exception(MPI.ERR_NO_SPACE)
        comm.Barrier()
        end = time.monotonic() + 60
        while True:
            try:
                fcntl.lockf(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fcntl.lockf(descriptors[0], fcntl.LOCK_UN)
            except BlockingIOError:
                assert time.monotonic() < end, "the lock is never released"
                time.sleep(0.01)

    monkeypatch.setattr(npy, "_move", write)
    with grid(comm) as g, pytest.raises(CheckpointError) as caught:
        try:
            g.save(path / "one.npy", u=g.ones())
        finally:
            os.close(descriptors[0])
    assert "never released" not in str(caught.value)


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
@pytest.mark.parametrize("target", ["a", "one.npy"])
@pytest.mark.parametrize("mode", [0o700, 0o755])
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
        with (
            as_nobody() if comm.rank == comm.size - 1 else nullcontext(),
            pytest.raises(CheckpointError) as caught,
        ):
            g.save(path / target, u=v)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        comm.Barrier()
        assert os.listdir(path) == [target]
        assert g.sum(g.load(path / target)[name]) == 72


METADATA = {"a": "create", "one.npy": "write_array_header_2_0"}


def test_two_runs_and_one_that_died(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        u = g.ones()
        g.save(path / "a", u=u)
        comm.Barrier()
        other = None
        if comm.rank == 0:
            other = folder.Replacement(path / "a", saving.may_replace, is_folder=True)
            (other.partial / "c.0").write_text("half")
        with pytest.raises(CheckpointError):
            g.save(path / "a", u=g.full(2.0))
        assert g.sum(g.load(path / "a")["u"]) == 72
        if other is not None and other._lock._handle is not None:
            os.close(other._lock._handle)  # as the kernel does when a run dies
        g.save(path / "a", u=g.full(2.0))
        assert g.sum(g.load(path / "a")["u"]) == 144
        comm.Barrier()
        assert sorted(os.listdir(path)) == ["a"]


def test_a_file_system_that_cannot_exchange_names(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_swap_names", lambda *names: False)
    with grid(comm) as g:
        for value in (1.0, 2.0):
            g.save(path / "a", u=g.full(value))
            assert g.sum(g.load(path / "a")["u"]) == 72 * value
        comm.Barrier()
        assert sorted(os.listdir(path)) == ["a"]
        comm.Barrier()
        if comm.rank == 0:
            os.rename(path / "a", folder.beside(path / "a", "previous"))
        comm.Barrier()
        with pytest.raises(CheckpointError):
            g.load(path / "a")
        with pytest.raises(CheckpointError):
            g.save(path / "a", u=g.full(3.0))
        if comm.rank == 0:
            os.rename(folder.beside(path / "a", "previous"), path / "a")
        comm.Barrier()
        assert g.sum(g.load(path / "a")["u"]) == 144
        assert os.listdir(path) == ["a"]


def test_a_checkpoint_that_is_replaced_while_it_is_read(path: Path, comm: MPI.Intracomm) -> None:
    """The values of one checkpoint, or an error, and never a mixture."""
    with grid(comm) as g:
        u, v = g.ones(), g.full(2.0)
        g.save(path / "a", u=u, v=u)
        g.save(path / "b", u=v, v=v)
        comm.Barrier()
        replaced: list[int] = []

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and not replaced:
                replaced.append(folder._swap_names(path / "a", path / "b"))

        try:
            found = g.load(path / "a", progress=replace)
        except CheckpointError:
            return
        assert g.sum(found["u"]) == g.sum(found["v"]) == 72


def forget_id(path: Path) -> None:
    """Make a checkpoint one of an earlier version."""
    known = json.loads((path / "zarr.json").read_text())
    del known["attributes"]["halox_id"]
    (path / "zarr.json").write_text(json.dumps(known))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("target", ["a", "of an earlier version", "one.npy"])
def test_a_checkpoint_that_is_replaced_while_ranks_open_it(
    target: str, path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has opened the old one, the others open the new one."""
    opened, name = folder.opened, "one" if target == "one.npy" else "u"
    other = path / f"b{Path(target).suffix}"

    @contextmanager
    def opened_in_turn(where: Path, **options: Any) -> Iterator[Path]:
        if comm.rank:
            comm.Barrier()
        with opened(where, **options) as link:
            if comm.rank == 0:
                assert folder._swap_names(where, other)
                comm.Barrier()
            yield link

    with grid(comm) as g:
        for where, value in ((path / target, 1.0), (other, 2.0)):
            g.save(where, u=g.full(value))
            if comm.rank == 0 and target.startswith("of"):
                forget_id(where)
        comm.Barrier()
        with monkeypatch.context() as patched:
            for module in (loading, npy):
                patched.setattr(module, "opened", opened_in_turn)
            text = "was replaced or removed while it was read; load it again"
            with pytest.raises(CheckpointError, match=text) as caught:
                g.load(path / target)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert g.sum(g.load(path / target)[name]) == 144


@pytest.mark.ranks(2, 3, 4)
def test_npy_that_is_replaced_before_its_cells_are_read(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks read the file that they have agreed on; one into which another program writes is an error."""
    open_file = MPI.File.Open

    class Late(MPI.File):
        @classmethod
        def Open(cls, *arguments: Any) -> MPI.File:
            comm.Barrier()
            if comm.rank == comm.size - 1:
                assert folder._swap_names(path / "one.npy", path / "b.npy")
            comm.Barrier()
            return open_file(*arguments)

    class Written(MPI.File):
        @classmethod
        def Open(cls, *arguments: Any) -> MPI.File:
            found = open_file(*arguments)
            if comm.rank == 0:
                np.save(path / "one.npy", np.full(CELLS, 3.0))
            return found

    with grid(comm) as g:
        g.save(path / "one.npy", u=g.ones())
        g.save(path / "b.npy", u=g.full(2.0))
        comm.Barrier()
        with monkeypatch.context() as patched:
            patched.setattr(MPI, "File", Late)
            assert g.sum(g.load(path / "one.npy")["one"]) == 72
            patched.setattr(MPI, "File", Written)
            with pytest.raises(CheckpointError):
                g.load(path / "one.npy")
        comm.Barrier()
        assert g.sum(g.load(path / "one.npy")["one"]) == 216


def test_a_field_beside_one_with_damaged_metadata(path: Path, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        g.save(path / "a", u=g.ones(), v=g.ones())
        comm.Barrier()
        if comm.rank == 0:
            (path / "a" / "v" / "zarr.json").unlink()
        comm.Barrier()
        assert g.sum(g.load(path / "a", names="u")["u"]) == 72


def test_a_checkpoint_that_is_replaced_and_removed_while_it_is_read(
    path: Path, comm: MPI.Intracomm
) -> None:
    """The error tells that it is not damaged."""
    with grid(comm) as g:
        u = g.ones()
        g.save(path / "a", u=u, v=u)
        g.save(path / "b", u=u, v=u)
        comm.Barrier()

        def replace(done: int, total: int) -> None:
            if comm.rank == 0 and (path / "b").exists():
                folder._swap_names(path / "a", path / "b")
                shutil.rmtree(path / "b")

        text = "a was replaced or removed while it was read; load it again"
        with pytest.raises(CheckpointError, match=text) as caught:
            g.load(path / "a", progress=replace)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert g.sum(g.load(path / "a")["v"]) == 72


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
    cut_shards(monkeypatch, 1 << 20, 1 << 17)
    shape, told, mib = (64 * comm.size + 1, 1 << 17), [], []
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
    assert max(mib) < 32, mib  # of a block of 64 MiB


def test_without_tensorstore(
    path: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with grid(comm) as g:
        u = g.ones()
        with pytest.raises(MissingPackageError):
            g.save(path / "a", u=u)
        with pytest.raises(MissingPackageError, match="tensorstore"):
            g.load(path / "a")
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


def earlier(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The values of the checkpoints in tests/data, which the first format of halox wrote on three ranks."""
    return (np.arange(np.prod(shape)) * 7 % 101).reshape(shape).astype(dtype)


@pytest.mark.ranks(1, 2, 3, 4)
def test_checkpoints_of_earlier_versions(comm: MPI.Intracomm) -> None:
    folder = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
    gap = np.dtype({"names": ["a", "b"], "formats": ["f4", "f8"], "offsets": [0, 8]})
    structured = np.zeros(CELLS, gap)
    for name in gap.names or ():
        structured[name] = earlier(CELLS, gap[name])
    expected = {
        "gap": structured,
        "links": earlier((2, *CELLS, 3), "c8"),
        "odd": earlier((6, 6), "u4"),
        "rho": earlier(CELLS, "f8"),
        "u": earlier((7, 12), ">f4"),
    }
    with grid(comm) as g:
        for name, step, fields in (("plain", 3, list(expected)), ("zstd", 4, ["gap", "rho"])):
            found = g.load(folder / f"{name}.zarr")
            assert list(found) == fields and found.attrs == {"step": step}
            for field, u in found.items():
                whole = g.gather(u)
                if whole is not None:
                    assert whole.dtype == expected[field].dtype
                    assert whole.tobytes() == expected[field].tobytes(), field
