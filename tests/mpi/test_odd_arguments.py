"""An odd value for any argument of a public function, on one rank: all ranks return, or raise an error of one class.

An error is halox's own: a TypeError from inside halox would name neither the argument nor the remedy.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, HaloxError
from tests.support import FULL

World = MPI.Intracomm
Call = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and valid keyword arguments."""

_NUMBERS = [True, 0, -3, 2**31, 2**62, 2**63, 10**30, 2.5, float("nan"), 1 + 2j, np.float32(1.5)]
_TEXTS = ["no", "", b"\xff", np.str_("f8"), np.datetime64("2026-01-01")]
_LISTS = [
    *([], [1, "a", None], [[1, 2], [3]], [2**62, 2**63], [-1, -1], [True, False], [1.0, 2.0]),
    *([None, None], [1] * 100, {"a": 1}, {1, 2}, range(3), slice(None)),
]
_OBJECTS = [None, ..., int, len, np, ValueError("odd"), object()]
_DTYPES = [np.dtype(one) for one in ("f4", "i4,f8", "O", ("f4", (2, 3)))]
_ARRAYS = [
    *(np.array(3), np.array(True), np.zeros((0, 3)), np.zeros(5), np.array([3])),
    *(np.zeros((2,) * 5), np.array([True, False]), np.array([1, "a", None], object)),
    *(np.array(["a", "bc"]), np.zeros(3, "i4,f8"), np.ma.masked_array([1.0, 2.0], [True, False])),
    np.broadcast_to(1.0, (6, 7)),
]
_STRIDES = itertools.count(1)


class New:
    """An array with a field's shape on two ranks that no plan knows; ``make`` takes an unused number of columns."""

    def __init__(self, make: Callable[[int], np.ndarray]) -> None:
        self.make = make


_NEW = [
    New(lambda n: np.zeros((6, 14 * n))[:, : 14 * n : 2 * n]),
    New(lambda n: np.zeros((6, 7 + n))[::-1, :7]),
    New(lambda n: np.zeros((6, 7 + n), ">f8")[:, :7]),
]
ODD: list[Any] = [*_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS, *_DTYPES, *_ARRAYS, *_NEW]


class Fresh:
    """A field that no plan knows: a known one on one rank alone would be a call that differs."""

    def __init__(self, dtype: str = "f8") -> None:
        self.dtype = dtype

    def of(self, grid: halox.Grid) -> np.ndarray:
        *shape, last = grid.padded_shape
        return np.ones((*shape, last + next(_STRIDES)), self.dtype)[..., :last]


class Bench:
    """Objects that the calls need, on all ranks."""

    def __init__(self, comm: World) -> None:
        self.comm, n = comm, 4 * comm.size
        self.grid = halox.Grid((n, 5), comm=comm, device="cpu", periodic=True)
        self.turned = halox.Grid((5, n), comm=comm, device="cpu", proc_shape=(1, 0))
        self.transpose = halox.Transpose(self.grid, self.turned, axes=(1, 0))
        self.reduce = halox.Allreduce(comm, 3, "f8", device="cpu")
        self.fft = halox.FFT(self.grid, axes=1)
        self.u, self.v = self.grid.ones(), self.turned.ones()
        self.plan = self.grid.plan(self.u)
        self.spectrum = self.fft.forward(self.fft.physical.zeros("c16"))
        self.grid.save("odd.zarr", u=self.u)

    def close(self) -> None:
        for part in (self.plan, self.fft, self.transpose, self.reduce, self.turned, self.grid):
            part.close()


LOCAL = {"declare", "declare options", "layout", "interior", "indices", "dataarray", "wavenumbers"}
LOCAL |= {"FFT.forward"}
"""Calls that need no other rank, the FFT along an axis that is not divided."""


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    return function, arguments


def closing(function: Callable[..., Any], **fixed: Any) -> Callable[..., None]:
    """Return a function that closes the object which ``function`` returns."""

    def made(*arguments: Any, **options: Any) -> None:
        function(*arguments, **fixed, **options).close()

    return made


def of_grids(b: Bench) -> dict[str, Call]:
    """Return calls that make and describe grids and fields."""
    g, n = b.grid, 4 * b.comm.size
    new = {"components": (3, ..., 2), "staggered": 0, "halo": ((1, 2), 0)}
    new |= {"parity": None, "offsets": None}

    def of_entries(cells: Any, low: Any, width: Any, wraps: Any, ranks: Any, cut: Any) -> Any:
        halo, periodic = ((low, 1), width), (wraps, True)
        options: Any = {"blocks": [cut, (5,)], "proc_shape": (ranks, 1), "comm": b.comm}
        return halox.Grid((cells, 5), halo=halo, periodic=periodic, device="cpu", **options)

    made: dict[str, Call] = {
        "Grid": call(
            closing(halox.Grid, comm=b.comm),
            **{"grid_shape": (n, 5), "halo": 1, "periodic": True, "proc_shape": (0, 1)},
            **{"blocks": [(4,) * b.comm.size, None], "corners": True, "device": "cpu"},
            **{"placement": True, "path": "host", "checkerboard": False, "leave_sms": False},
        ),
        "Grid entries": call(
            closing(of_entries), cells=n, low=1, width=1, wraps=False, ranks=0, cut=None
        ),
        "Grid weights": call(
            closing(halox.Grid, comm=b.comm, device="cpu"),
            **{"grid_shape": (n, 5), "weights": np.ones((n, 5))},
        ),
        "full": call(g.full, value=2, dtype="f8", **new),
        "full_like": call(g.full_like, field=Fresh(), value=1, dtype="f8"),
        "declare": call(g.declare, array=Fresh()),
        "declare options": call(
            lambda **o: g.declare(np.zeros((3, g.rank_shape[0] + 3, 6, 2)), **o),
            **{"components": (3, ..., 2), "staggered": (), "halo": ((1, 2), (1, 0))},
        ),
        "layout": call(g.layout, field=Fresh()),
        "interior": call(g.interior, field=Fresh()),
        "indices": call(g.indices, halo=True, parity=None),
        "gather": call(g.gather, field=Fresh(), root=0),
        "scatter": call(g.scatter, whole=np.zeros((n, 5)), root=0, out=b.u),
        "save": call(
            lambda path, field, **options: g.save(path, u=field, **options),
            **{"path": "saved.zarr", "field": Fresh(), "attrs": {"a": 1}, "dims": ("x", "y")},
            **{"coords": {"x": np.arange(1.0 * n)}, "compressors": None, "progress": None},
        ),
        "save fields": call(lambda fields: g.save("saved.npy", fields), fields={"u": b.u}),
        "load": call(
            lambda path, into, **options: g.load(path, into, **options),
            **{"path": "odd.zarr", "into": {"u": b.u}, "names": "u", "progress": None},
        ),
    }
    made |= {name: call(getattr(g, name), dtype="f8", **new) for name in ("zeros", "ones", "empty")}
    for name in ("zeros_like", "ones_like", "empty_like"):
        made[name] = call(getattr(g, name), field=Fresh(), dtype="f8")
    if importlib.util.find_spec("xarray"):
        made["dataarray"] = call(g.dataarray, field=Fresh(), name="u", dims=("x", "y"))
    return made


def of_exchanges(b: Bench) -> dict[str, Call]:
    """Return calls that move or combine values."""
    g, comm, one = b.grid, b.comm, np.zeros(1)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    message = {"array": np.zeros(4), "datatype": "f8", "count": 2, "tag": 0}

    target = message | {"array": np.zeros(4)}

    def ring(send: dict[str, Any], receive: dict[str, Any]) -> halox.Exchange:
        sends = [halox.Send(**{**message, "dest": right} | send)]
        receives = [halox.Recv(**{**target, "source": left} | receive)]
        return halox.Exchange(sends, receives, comm=comm)

    def reduction(name: str) -> Any:  # whose field is given by its place only
        return lambda field, **options: getattr(g, name)(field, **options)

    reductions = {
        name: call(reduction(name), field=Fresh(), out=one)
        for name in ("sum", "min", "max", "norm")
    }
    return reductions | {
        "exchange": call(
            lambda field, **o: g.exchange(field, **o), field=Fresh(), corners=True, axes="x"
        ),
        "accumulate": call(
            lambda field, **o: g.accumulate(field, **o), field=Fresh(), corners=True, axes="x"
        ),
        "plan": call(
            closing(lambda field, **o: g.plan(field, **o)),
            field=Fresh(),
            corners=True,
            axes=("x", 1),
            path="host",
        ),
        "explain": call(lambda field: str(g.explain(field)), field=Fresh()),
        "measure": call(b.plan.measure, repeats=1),
        "dot": call(
            lambda field, other, **o: g.dot(field, other, **o),
            field=Fresh(),
            other=Fresh(),
            out=one,
        ),
        "Grid.allreduce": call(g.allreduce, array=np.zeros(3), op="max", out=np.zeros(3)),
        "Exchange": call(closing(halox.Exchange, comm=comm), sends=[], receives=[], path="host"),
        "Send": call(closing(lambda **options: ring(options, {})), **message, dest=right),
        "Recv": call(closing(lambda **options: ring({}, options)), **target, source=left),
        "Transpose": call(
            closing(halox.Transpose, grid_a=g, grid_b=b.turned), axes=(1, 0), path="host"
        ),
        "forward": call(b.transpose.forward, u=Fresh(), v=b.v),
        "backward": call(b.transpose.backward, v=b.v, u=Fresh()),
        "Transpose.plan": call(
            closing(b.transpose.plan), u=Fresh(), v=b.v, backward=False, path="host"
        ),
        "Allreduce": call(
            closing(halox.Allreduce, comm=comm),
            **{"shape": (2, 3), "dtype": "f8", "op": "sum", "algorithm": "host", "device": "cpu"},
        ),
        "Allreduce call": call(b.reduce, array=np.zeros(3), out=np.zeros(3)),
        "FFT": call(
            closing(halox.FFT, grid=g),
            **{"axes": 1, "real": True, "norm": "ortho", "dealias": False, "path": "host"},
        ),
        "FFT.forward": call(b.fft.forward, u=Fresh("c16"), out=b.spectrum),
        "wavenumbers": call(b.fft.wavenumbers, lengths=(1.0, 2.0)),
    }


def of_datatypes() -> dict[str, Call]:
    """Return calls that make and use datatypes, on one rank."""

    def built(constructor: Callable[..., dt.Datatype]) -> Callable[..., None]:
        def made(**arguments: Any) -> None:
            datatype = constructor(**arguments)
            repr(datatype)
            datatype.overlaps(2)
            halox.pack(np.zeros(90)[30:], datatype, 2)

        return made

    face = dt.vector(3, 1, 2, "f8")
    method = {"datatype": face, "count": 2, "method": "host", "max_blocks": None}
    lengths, places, boxes = [2, 1], [40, 0], {"starts": (1, 1), "subsizes": (2, 2)}
    constructors: dict[str, dict[str, Any]] = {
        "primitive": {"dtype": "f8"},
        "as_datatype": {"old": "f8"},
        "dup": {"old": "f8"},
        "contiguous": {"count": 3, "old": "f8"},
        "vector": {"count": 3, "blocklength": 3, "stride": -4, "old": "f8"},
        "hvector": {"count": 3, "blocklength": 3, "stride_bytes": -40, "old": "f8"},
        "indexed": {"blocklengths": lengths, "displacements": [4, 0], "old": "f8"},
        "hindexed": {"blocklengths": lengths, "byte_displacements": places, "old": "f8"},
        "indexed_block": {"blocklength": 3, "displacements": [4, 0], "old": "f8"},
        "hindexed_block": {"blocklength": 3, "byte_displacements": places, "old": "f8"},
        "struct": {"blocklengths": lengths, "byte_displacements": places, "types": ["f8", "i4"]},
        "subarray": {"sizes": (4, 5), **boxes, "old": "f8", "order": "F"},
        "slab": {"shape": (4, 5), "strides": (80, 16), **boxes, "dtype": "f8"},
        "resized": {"old": "f8", "lb": -8, "extent": 32},
    }
    return {
        **{name: call(built(getattr(dt, name)), **made) for name, made in constructors.items()},
        "struct entries": call(
            built(lambda length, place, old: dt.struct([length, 1], [place, 0], [old, "f8"])),
            **{"length": 1, "place": 8, "old": "f8"},
        ),
        "pack": call(halox.pack, source=np.zeros(20), out=np.zeros(48, "u1"), **method),
        "unpack": call(halox.unpack, packed=np.zeros(48, "u1"), target=np.zeros(20), **method),
        "packing_method": call(
            halox.packing_method, source=np.zeros(20), datatype="f8", count=2, out=None
        ),
        "items": call(face.items, count=3),
        "blocks": call(face.blocks, count=3),
        "overlaps": call(face.overlaps, count=3),
        "same_layout": call(face.same_layout, other=face),
        "from_mpi": call(dt.from_mpi, mpi_datatype=MPI.INT),
    }


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Return the class of halox's error, or describe an outcome that is no proper one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
    except ExchangeTimeoutError:
        return "wrong: waited"
    except HaloxError as error:
        cause = error.__cause__
        proper = isinstance(cause, (HaloxError, MemoryError, type(None)))
        if type(error) is HaloxError and not proper:
            return f"wrong: masked {cause!r}"  # the ranks agreed on an unexpected error
        length = len(str(error))
        return type(error).__name__ if 10 < length < 3000 else f"wrong: a text of {length}"
    except MemoryError:
        return "MemoryError"  # the argument is valid, only too large for this machine
    except Exception as error:
        return f"wrong: raw {type(error).__name__}: {error}"[:300]
    return "returned"


@pytest.fixture
def bench(comm: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("HALOX_TIMEOUT", "20")
    with chdir(comm.bcast(tmp_path)):  # odd texts may be used as names of files
        made = Bench(comm)
        yield made
        made.close()


@pytest.mark.ranks(1, 2)
def test_each_argument_in_turn(bench: Bench, comm: World) -> None:
    """On one rank every third value, on two every fifteenth, in turn; all values in the whole matrix."""
    calls = of_grids(bench) | of_exchanges(bench) | (of_datatypes() if comm.size == 1 else {})
    part = 1 if os.environ.get(FULL) else 3 if comm.size == 1 else 15
    turn, wrong = itertools.count(), []
    for name, (function, arguments) in calls.items():
        if comm.size > 1 and name in LOCAL:
            continue
        for changed in ("", *arguments):
            values = ODD[next(turn) % part :: part] if changed else [None]
            for odd in values:
                given = {
                    key: one.of(bench.grid) if isinstance(one, Fresh) else one
                    for key, one in arguments.items()
                }
                if changed and comm.rank == comm.size - 1:
                    given[changed] = odd.make(next(_STRIDES)) if isinstance(odd, New) else odd
                found = comm.allgather(outcome(function, given))
                good = {"returned"} if not changed else {*found[:1]}
                if set(found) != good or found[0].startswith("wrong"):
                    wrong.append(f"{name}({changed}={repr(odd)[:60]}): {found}")
                assert "wrong: waited" not in found, wrong[-1]
    bench.grid.exchange(bench.u)  # the grid still works
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong[:100])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [np.int8, lambda n: np.array(n, "u8")])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any], comm: World) -> None:
    """Every count, rank, width, tag, axis and component may be a NumPy integer."""
    a, b = np.arange(6.0), np.zeros(6)
    assert halox.pack(a, "f8", kind(3)).view("f8").tolist() == [0, 1, 2]
    halox.unpack(a.view("u1"), dt.contiguous(kind(2), "f8"), b, kind(3))
    assert b.tolist() == a.tolist()
    made = dt.vector(kind(2), kind(1), kind(3), "f8")
    assert made == dt.vector(2, 1, 3, "f8")
    assert all(type(n) is int for n in (made.size, made.extent, *made.arguments))
    assert dt.subarray([kind(4)], [kind(2)], [kind(1)], "f8") == dt.subarray([4], [2], [1], "f8")
    send = halox.Send(a, "f8", kind(0), kind(2), tag=kind(3))
    recv = halox.Recv(b[3:], "f8", kind(0), kind(2), tag=3)
    with halox.Exchange([send], [recv], comm=comm) as exchange:
        exchange()
        exchange.measure(kind(2))
    assert b.tolist() == [0, 1, 2, 0, 1, 5]
    options = {"halo": (kind(1), (kind(0), kind(2))), "proc_shape": (kind(1), kind(0))}
    blocks = ([kind(4)], None)
    with halox.Grid((kind(4), kind(5)), comm=comm, device="cpu", blocks=blocks, **options) as grid:
        assert grid.halo == ((1, 1), (0, 2))
        assert all(type(n) is int for n in (*grid.grid_shape, *grid.proc_shape, *grid.halo[1]))
        u = grid.zeros(components=[kind(3), ..., kind(2)], staggered=kind(1))
        assert u.shape == (3, 6, 8, 2)
        whole = grid.gather(u, kind(0))
        assert whole is not None and whole.shape == (3, 4, 6, 2)
        with halox.Transpose(grid, grid, axes=(kind(0), kind(1))) as transpose:
            assert transpose.axes == (0, 1)
    with halox.Allreduce(comm, (kind(2), kind(3)), "f8", device="cpu") as reduce:
        assert reduce.shape == (2, 3)
