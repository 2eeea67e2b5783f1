"""Calls of all public functions with unsuitable arguments of every kind must succeed or raise a halox error.

A TypeError from inside halox is a failure: it names neither the argument nor the remedy, and only some ranks raise it
if their arguments differ.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from typing import Any

import numpy as np
import pytest

import halox
from halox import datatypes as dt
from halox.errors import HaloxError
from tests import support
from tests.unit.odd_values import ODD

support.require("mpi")
from mpi4py import MPI  # noqa: E402

Call = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and valid keyword arguments."""

SELF = MPI.COMM_SELF


class _Bench:
    """Objects that calls need, created once."""

    def __init__(self) -> None:
        self.grid = halox.Grid((4, 5), comm=SELF, device="cpu", periodic=True)
        self.turned = halox.Grid((5, 4), comm=SELF, device="cpu")
        self.transpose = halox.Transpose(self.grid, self.turned, axes=(1, 0))
        self.reduce = halox.Allreduce(SELF, 3, "f8", device="cpu")
        self.u, self.v = self.grid.ones(), self.turned.ones()
        self.plan = self.grid.plan(self.u)
        self.fft = halox.FFT(self.grid)
        self.w = self.grid.zeros("c16")
        self.spectrum = self.fft.forward(self.w)
        self.grid.save("odd.zarr", u=self.u)

    def close(self) -> None:
        self.fft.close()
        for part in (self.plan, self.transpose, self.reduce, self.grid, self.turned):
            part.close()


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    return function, arguments


def closing(function: Callable[..., Any], **fixed: Any) -> Callable[..., None]:
    """Return a function that closes the object which ``function`` returns."""

    def made(*arguments: Any, **options: Any) -> None:
        function(*arguments, **fixed, **options).close()

    return made


def grid_of_entries(
    cells: Any, low: Any, width: Any, wraps: Any, ranks: Any, cut: Any, size: Any
) -> halox.Grid:
    """Make a grid from entries of its sequence arguments."""
    halo, periodic, blocks = ((low, 1), width), (wraps, True), [cut, (size,)]
    options: Any = {"halo": halo, "periodic": periodic, "blocks": blocks, "proc_shape": (ranks, 1)}
    return halox.Grid((cells, 5), comm=SELF, device="cpu", **options)


def message_to_self(send: dict[str, Any], receive: dict[str, Any]) -> halox.Exchange:
    """Make an exchange of one message to this rank itself; the options replace valid ones."""
    message: dict[str, Any] = {"datatype": "f8", "count": 2, "tag": 0}
    sends = [halox.Send(**{"array": np.zeros(4), "dest": 0} | message | send)]
    receives = [halox.Recv(**{"array": np.zeros(4), "source": 0} | message | receive)]
    return halox.Exchange(sends, receives, comm=SELF)


def grids(b: _Bench) -> dict[str, Call]:
    """Return calls that make and describe grids and fields."""
    g, u = b.grid, b.u
    new = {
        "components": 3,
        "components_after": (2,),
        "staggered": 0,
        "halo": ((1, 2), 0),
        "parity": None,
        "offsets": None,
    }
    return {
        "Grid": call(
            closing(lambda grid_shape, **options: halox.Grid(grid_shape, **options)),
            grid_shape=(4, 5),
            halo=1,
            periodic=True,
            proc_shape=(1, 1),
            blocks=[(4,), None],
            corners=True,
            device="cpu",
            placement=True,
            path="host",
            checkerboard=False,
            leave_sms=False,
            comm=SELF,
        ),
        "Grid entries": call(
            closing(grid_of_entries),
            cells=4,
            low=1,
            width=1,
            wraps=False,
            ranks=0,
            cut=None,
            size=5,
        ),
        "zeros": call(g.zeros, dtype="f8", **new),
        "ones": call(g.ones, dtype="f8", **new),
        "empty": call(g.empty, dtype="f8", **new),
        "full": call(g.full, value=2, dtype="f8", **new),
        "zeros_like": call(g.zeros_like, field=u, dtype="f8"),
        "ones_like": call(g.ones_like, field=u, dtype="f8"),
        "empty_like": call(g.empty_like, field=u, dtype="f8"),
        "full_like": call(g.full_like, field=u, value=1, dtype="f8"),
        "declare": call(g.declare, array=np.zeros((6, 7))),
        "declare options": call(
            lambda **options: g.declare(np.zeros((3, 7, 6, 2)), **options),
            components=3,
            components_after=2,
            staggered=(),
            halo=((1, 2), (1, 0)),
        ),
        "layout": call(g.layout, field=u),
        "interior": call(g.interior, field=u),
        "indices": call(g.indices, halo=True, parity=None),
        "gather": call(g.gather, field=u, root=0),
        "scatter": call(g.scatter, whole=np.zeros((4, 5)), root=0, out=u),
        "scatter options": call(
            lambda **options: g.scatter(np.zeros((3, 4, 5)), **options), components=3, halo=1
        ),
        "save": call(
            lambda path, field, **options: g.save(path, u=field, **options),
            path="saved.zarr",
            field=u,
            attrs={"a": 1},
            dims=("x", "y"),
            coords={"x": np.arange(4.0)},
            compressors=None,
            progress=None,
        ),
        "save fields": call(
            lambda path, fields: g.save(path, fields), path="saved.npy", fields={"u": u}
        ),
        "load": call(
            lambda path, into, **options: g.load(path, into, **options),
            path="odd.zarr",
            into={"u": u},
            names="u",
            progress=None,
        ),
    }


def exchanges(b: _Bench) -> dict[str, Call]:
    """Return calls that move or combine values."""
    g, u, v = b.grid, b.u, b.v
    three, one = np.zeros(3), np.zeros(1)
    send, receive = halox.Send(np.zeros(2), "f8", 0), halox.Recv(np.zeros(2), "f8", 0)
    message = {"array": np.zeros(4), "datatype": "f8", "count": 2, "tag": 0}
    reductions = {
        name: call(getattr(g, name), field=u, out=one) for name in ("sum", "min", "max", "norm")
    }
    return reductions | {
        "exchange": call(
            lambda field, corners: g.exchange(field, corners=corners), field=u, corners=True
        ),
        "accumulate": call(
            lambda field, corners: g.accumulate(field, corners=corners), field=u, corners=True
        ),
        "plan": call(
            closing(lambda field, **options: g.plan(field, **options)),
            field=u,
            corners=True,
            path="host",
        ),
        "explain": call(lambda field: str(g.explain(field)), field=u),
        "measure": call(b.plan.measure, repeats=1),
        "dot": call(g.dot, field=u, other=u, out=one),
        "Grid.allreduce": call(g.allreduce, array=three, op="max", out=np.zeros(3)),
        "Exchange": call(closing(halox.Exchange), sends=[], receives=[], path="host", comm=SELF),
        "Exchange entries": call(
            closing(lambda send, receive: halox.Exchange([send], [receive], comm=SELF)),
            send=send,
            receive=receive,
        ),
        "Send": call(closing(lambda **options: message_to_self(options, {})), **message, dest=0),
        "Recv": call(closing(lambda **options: message_to_self({}, options)), **message, source=0),
        "Transpose": call(
            closing(halox.Transpose), grid_a=g, grid_b=b.turned, axes=(1, 0), path="host"
        ),
        "forward": call(b.transpose.forward, u=u, v=v),
        "backward": call(b.transpose.backward, v=v, u=u),
        "Transpose.plan": call(closing(b.transpose.plan), u=u, v=v, backward=False, path="host"),
        "Allreduce": call(
            closing(halox.Allreduce),
            comm=SELF,
            shape=(2, 3),
            dtype="f8",
            op="sum",
            algorithm="host",
            device="cpu",
        ),
        "Allreduce call": call(b.reduce, array=three, out=np.zeros(3)),
        "FFT": call(
            closing(halox.FFT),
            grid=g,
            axes=(0, 1),
            real=True,
            norm="ortho",
            dealias=False,
            path="host",
        ),
        "FFT.forward": call(b.fft.forward, u=b.w, out=b.spectrum),
        "FFT.backward": call(b.fft.backward, s=b.spectrum, out=b.w),
        "wavenumbers": call(b.fft.wavenumbers, lengths=(1.0, 2.0)),
    }


def built(constructor: Callable[..., dt.Datatype]) -> Callable[..., None]:
    """Return a function that constructs a datatype, prints it, and packs an array with it."""

    def made(**arguments: Any) -> None:
        datatype = constructor(**arguments)
        repr(datatype)
        datatype.overlaps(2)
        halox.pack(np.zeros(90)[30:], datatype, 2)

    return made


def datatypes() -> dict[str, Call]:
    """Return calls that make and use datatypes."""
    face = dt.vector(3, 1, 2, "f8")
    source, packed = np.zeros(20), np.zeros(48, "u1")
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
            length=1,
            place=8,
            old="f8",
        ),
        "pack": call(halox.pack, source=source, out=packed, **method),
        "unpack": call(halox.unpack, packed=packed, target=np.zeros(20), **method),
        "packing_method": call(
            halox.packing_method, source=source, datatype="f8", count=2, out=None
        ),
        "items": call(face.items, count=3),
        "blocks": call(face.blocks, count=3),
        "overlaps": call(face.overlaps, count=3),
        "same_layout": call(face.same_layout, other=face),
        "from_mpi": call(dt.from_mpi, mpi_datatype=MPI.INT),
    }


def calls(b: _Bench) -> dict[str, Call]:
    made = grids(b) | exchanges(b) | datatypes()
    if importlib.util.find_spec("xarray"):
        made["dataarray"] = call(b.grid.dataarray, field=b.u, name="u", dims=("x", "y"))
    return made


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """Return None if a call succeeds or raises a proper halox error, otherwise a description of the failure."""
    try:
        with quiet():
            function(**arguments)
    except HaloxError as error:
        cause = error.__cause__
        if type(error) is HaloxError and not isinstance(
            cause, (HaloxError, MemoryError, type(None))
        ):
            return f"masked {cause!r}"  # the ranks agreed on an unexpected error
        return None if 10 < len(str(error)) < 3000 else f"a text of {len(str(error))} characters"
    except MemoryError:
        return None  # the argument is valid, only too large for this machine
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"[:300]
    return None


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Bench]:
    with chdir(tmp_path_factory.mktemp("odd")):  # odd texts may be used as names of files
        made = _Bench()
        yield made
        made.close()


def test_the_calls_are_valid(bench: _Bench) -> None:
    for function, arguments in calls(bench).values():
        with quiet():
            function(**arguments)


def test_each_argument_in_turn(bench: _Bench) -> None:
    wrong = []
    for name, (function, arguments) in calls(bench).items():
        for changed in arguments:
            for kind, odd in ODD.items():
                found = outcome(function, arguments | {changed: odd})
                if found is not None:
                    wrong.append(f"{name}({changed}={kind}): {found}")
    bench.grid.exchange(bench.u)  # the grid still works
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong[:200])


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64, lambda n: np.array(n, "i2")])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any]) -> None:
    """Every count, rank, width, tag, axis and component may be a NumPy integer."""
    a = np.arange(6.0)
    assert halox.pack(a, "f8", kind(3)).view("f8").tolist() == [0, 1, 2]
    b = np.zeros(6)
    halox.unpack(a.view("u1"), dt.contiguous(kind(2), "f8"), b, kind(3))
    assert b.tolist() == a.tolist()
    assert halox.packing_method(a, "f8", kind(3)).method == "host"
    made = dt.vector(kind(2), kind(1), kind(3), "f8")
    assert made == dt.vector(2, 1, 3, "f8")
    assert all(type(n) is int for n in (made.size, made.extent, *made.arguments))
    assert dt.subarray([kind(4)], [kind(2)], [kind(1)], "f8") == dt.subarray([4], [2], [1], "f8")
    send = halox.Send(a, "f8", kind(0), kind(2), tag=kind(3))
    recv = halox.Recv(b[3:], "f8", kind(0), kind(2), tag=3)
    with halox.Exchange([send], [recv], comm=SELF) as exchange:
        exchange()
        exchange.measure(kind(2))
    assert b.tolist() == [0, 1, 2, 0, 1, 5]
    options = {"halo": (kind(1), (kind(0), kind(2))), "proc_shape": (kind(1), kind(0))}
    blocks = ([kind(4)], None)
    with halox.Grid((kind(4), kind(5)), comm=SELF, device="cpu", blocks=blocks, **options) as grid:
        assert grid.halo == ((1, 1), (0, 2))
        assert all(type(n) is int for n in (*grid.grid_shape, *grid.proc_shape, *grid.halo[1]))
        u = grid.zeros(components=kind(3), components_after=[kind(2)], staggered=kind(1))
        assert u.shape == (3, 6, 8, 2)
        whole = grid.gather(u, kind(0))
        assert whole is not None and whole.shape == (3, 4, 6, 2)
        with halox.Transpose(grid, grid, axes=(kind(0), kind(1))) as transpose:
            assert transpose.axes == (0, 1)
    with halox.Allreduce(SELF, (kind(2), kind(3)), "f8", device="cpu") as reduce:
        assert reduce.shape == (2, 3)


@pytest.mark.parametrize("corners", ["no", 1, 0, [], np.array([True])])
def test_what_is_no_bool_is_no_bool(corners: Any, bench: _Bench) -> None:
    """1 is refused although it equals True and a plan for True exists."""
    grid, u = bench.grid, bench.u
    grid.exchange(u, corners=np.True_)
    grid.accumulate(u, corners=False)
    for call in (grid.exchange, grid.accumulate, grid.plan):
        with pytest.raises(halox.errors.FieldError, match="corners: expected True or False, got"):
            call(u, corners=corners)
    with pytest.raises(halox.errors.DecompositionError, match="corners: expected True or False"):
        halox.Grid((4, 4), comm=SELF, corners=corners)
    with pytest.raises(halox.errors.DecompositionError, match="placement: expected True or False"):
        halox.Grid((4, 4), comm=SELF, placement=corners)
