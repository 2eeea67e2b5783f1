"""Calls of all public functions with unsuitable arguments of every kind must succeed or raise a halox error.

A TypeError from inside halox is a failure: it names neither the argument nor the remedy, and only some ranks raise it
if their arguments differ. HALOX_ODD_SEED=n runs 20,000 calls with several odd arguments at once.
"""

from __future__ import annotations

import importlib.util
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from functools import partial
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

Call = tuple[Callable[..., Any], dict[str, Callable[[], Any]]]
SELF = MPI.COMM_SELF
LONG_PATH = ODD["long text"]()


class _Bench:
    """Objects that calls need, created once."""

    def __init__(self) -> None:
        self.grid = halox.Grid((4, 5), comm=SELF, device="cpu", periodic=True)
        self.turned = halox.Grid((5, 4), comm=SELF, device="cpu")
        self.transpose = halox.Transpose(self.grid, self.turned, axes=(1, 0))
        self.reduce = halox.Allreduce(SELF, 3, "f8", device="cpu")
        self.u, self.v = self.grid.ones(), self.turned.ones()
        self.plan = self.grid.plan(self.u)
        self.face = dt.vector(3, 1, 2, "f8")
        self.fft = halox.FFT(self.grid)
        self.w = self.grid.zeros("c16")
        self.spectrum = self.fft.forward(self.w)
        self.grid.save("odd.zarr", u=self.u)

    def close(self) -> None:
        self.fft.close()
        for part in (self.plan, self.transpose, self.reduce, self.grid, self.turned):
            part.close()


def value(given: Any) -> Callable[[], Any]:
    return lambda: given


def keep(given: Any) -> Any:
    """Close the object that a call returned, if it needs to be closed."""
    kinds = halox.Grid, halox.Transpose, halox.Exchange, halox.Allreduce, halox.Plan, halox.FFT
    if isinstance(given, kinds):
        given.close()
    return given


def exchanged(role: str, **options: Any) -> None:
    """Create an exchange of one message to this rank itself, with options of its `Send` or `Recv` replaced."""
    a, b = np.zeros(4), np.zeros(4)
    send: dict[str, Any] = {"array": a, "datatype": "f8", "dest": 0, "count": 2, "tag": 0}
    recv: dict[str, Any] = {"array": b, "datatype": "f8", "source": 0, "count": 2, "tag": 0}
    (send if role == "send" else recv).update(options)
    keep(halox.Exchange([halox.Send(**send)], [halox.Recv(**recv)], comm=SELF))


def calls(b: _Bench) -> dict[str, Call]:
    g, u, v = b.grid, value(b.u), value(b.v)
    f8, three = value("f8"), value(3)
    grid = partial(halox.Grid, comm=SELF, device="cpu")
    new: dict[str, Callable[[], Any]] = {
        "dtype": f8,
        "components": three,
        "components_after": value((2,)),
        "staggered": value(0),
        "halo": value(((1, 2), 0)),
    }
    path, corners, nothing = value("host"), value(True), value(None)
    made: dict[str, Call] = {
        "Grid": (
            lambda grid_shape, **options: keep(halox.Grid(grid_shape, comm=SELF, **options)),
            {
                "grid_shape": value((4, 5)),
                "halo": value(1),
                "periodic": value(True),
                "proc_shape": value((1, 1)),
                "blocks": value([(4,), None]),
                "corners": corners,
                "device": value("cpu"),
                "placement": value(True),
                "path": path,
            },
        ),
        "Grid entries": (
            lambda cells, low, width, wraps, ranks, cut, size: keep(
                grid(
                    (cells, 5),
                    halo=((low, 1), width),
                    periodic=(wraps, True),
                    proc_shape=(ranks, 1),
                    blocks=[cut, (size,)],
                )
            ),
            {
                "cells": value(4),
                "low": value(1),
                "width": value(1),
                "wraps": value(False),
                "ranks": value(0),
                "cut": nothing,
                "size": value(5),
            },
        ),
        "zeros": (g.zeros, new),
        "ones": (g.ones, new),
        "empty": (g.empty, new),
        "full": (partial(g.full, 2), new),
        "declare": (g.declare, {"array": lambda: np.zeros((6, 7))}),
        "declare options": (
            lambda **options: g.declare(np.zeros((3, 7, 6, 2)), **options),
            {
                "components": three,
                "components_after": value(2),
                "staggered": value(()),
                "halo": value(((1, 2), (1, 0))),
            },
        ),
        "layout": (g.layout, {"field": u}),
        "interior": (g.interior, {"field": u}),
        "indices": (g.indices, {"halo": value(True)}),
        "gather": (g.gather, {"field": u, "root": value(0)}),
        "exchange": (
            lambda field, corners: g.exchange(field, corners=corners),
            {"field": u, "corners": corners},
        ),
        "accumulate": (
            lambda field, corners: g.accumulate(field, corners=corners),
            {"field": u, "corners": corners},
        ),
        "plan": (
            lambda field, **options: keep(g.plan(field, **options)),
            {"field": u, "corners": corners, "path": path},
        ),
        "explain": (lambda field: str(g.explain(field)), {"field": u}),
        "measure": (b.plan.measure, {"repeats": value(1)}),
        "dot": (g.dot, {"field": u, "other": u, "out": lambda: np.zeros(1)}),
        "Grid.allreduce": (
            g.allreduce,
            {"array": lambda: np.zeros(3), "op": value("max"), "out": lambda: np.zeros(3)},
        ),
        "Exchange": (
            lambda **options: keep(halox.Exchange(**options, comm=SELF)),
            {"sends": list, "receives": list, "path": path},
        ),
        "Exchange entries": (
            lambda send, receive: keep(halox.Exchange([send], [receive], comm=SELF)),
            {
                "send": lambda: halox.Send(np.zeros(2), "f8", 0),
                "receive": lambda: halox.Recv(np.zeros(2), "f8", 0),
            },
        ),
        "Send": (
            partial(exchanged, "send"),
            {
                "array": lambda: np.zeros(4),
                "datatype": f8,
                "dest": value(0),
                "count": value(2),
                "tag": value(0),
            },
        ),
        "Recv": (
            partial(exchanged, "recv"),
            {
                "array": lambda: np.zeros(4),
                "datatype": f8,
                "source": value(0),
                "count": value(2),
                "tag": value(0),
            },
        ),
        "Transpose": (
            lambda grid_a, grid_b, **options: keep(halox.Transpose(grid_a, grid_b, **options)),
            {"grid_a": value(g), "grid_b": value(b.turned), "axes": value((1, 0)), "path": path},
        ),
        "forward": (b.transpose.forward, {"u": u, "v": v}),
        "backward": (b.transpose.backward, {"v": v, "u": u}),
        "Transpose.plan": (
            lambda u, v, **options: keep(b.transpose.plan(u, v, **options)),
            {"u": u, "v": v, "backward": value(True), "path": path},
        ),
        "Allreduce": (
            lambda shape, dtype, op, algorithm, device: keep(
                halox.Allreduce(SELF, shape, dtype, op, algorithm, device=device)
            ),
            {
                "shape": value((2, 3)),
                "dtype": f8,
                "op": value("sum"),
                "algorithm": value("host"),
                "device": value("cpu"),
            },
        ),
        "Allreduce call": (b.reduce, {"array": lambda: np.zeros(3), "out": lambda: np.zeros(3)}),
        "pack": (
            halox.pack,
            {
                "source": lambda: np.zeros(20),
                "datatype": value(b.face),
                "count": value(2),
                "out": lambda: np.zeros(48, "u1"),
                "method": value("host"),
                "max_blocks": nothing,
            },
        ),
        "unpack": (
            halox.unpack,
            {
                "packed": lambda: np.zeros(48, "u1"),
                "datatype": value(b.face),
                "target": lambda: np.zeros(20),
                "count": value(2),
                "method": value("host"),
                "max_blocks": nothing,
            },
        ),
        "packing_method": (
            halox.packing_method,
            {"source": lambda: np.zeros(20), "datatype": f8, "count": value(2), "out": nothing},
        ),
        "items": (b.face.items, {"count": three}),
        "blocks": (b.face.blocks, {"count": three}),
        "overlaps": (b.face.overlaps, {"count": three}),
        "same_layout": (b.face.same_layout, {"other": value(b.face)}),
        "from_mpi": (dt.from_mpi, {"mpi_datatype": value(MPI.INT)}),
    }
    one = {"field": u}
    made |= {
        "full": (g.full, {"value": value(2), **new}),
        "zeros offsets": (g.zeros, {"parity": nothing, "offsets": value((1,))}),
        **{
            f"{name}_like": (getattr(g, f"{name}_like"), {**one, "dtype": f8})
            for name in ("zeros", "ones", "empty")
        },
        "full_like": (g.full_like, {**one, "value": value(1), "dtype": f8}),
        "Grid.explain": (g.explain, {}),
        "scatter": (
            lambda whole, **options: g.scatter(whole, **options),
            {"whole": lambda: np.zeros((4, 5)), "root": value(0), "out": u},
        ),
        "scatter options": (
            lambda **options: g.scatter(np.zeros((3, 4, 5)), **options),
            {"components": three, "halo": value(1)},
        ),
        "save": (
            lambda path, field, **options: g.save(path, u=field, **options),
            {
                "path": value("saved.zarr"),
                "field": u,
                "attrs": value({"a": 1}),
                "dims": value(("x", "y")),
                "coords": lambda: {"x": np.arange(4.0)},
                "compressors": nothing,
                "progress": nothing,
            },
        ),
        "save fields": (
            lambda path, fields: g.save(path, fields),
            {"path": value("saved.npy"), "fields": lambda: {"u": b.u}},
        ),
        "load": (
            lambda path, into, **options: g.load(path, into, **options),
            {
                "path": value("odd.zarr"),
                "into": lambda: {"u": b.u},
                "names": value("u"),
                "progress": nothing,
            },
        ),
        "FFT": (
            lambda grid, axes, **options: keep(halox.FFT(grid, axes, **options)),
            {
                "grid": value(g),
                "axes": value((0, 1)),
                "real": value(True),
                "norm": value("ortho"),
                "dealias": value(False),
                "path": path,
            },
        ),
        "FFT.forward": (b.fft.forward, {"u": value(b.w), "out": value(b.spectrum)}),
        "FFT.backward": (b.fft.backward, {"s": value(b.spectrum), "out": value(b.w)}),
        "wavenumbers": (b.fft.wavenumbers, {"lengths": value((1.0, 2.0))}),
        "comm": (
            lambda comm: keep(halox.Grid((4, 5), comm=comm, device="cpu")),
            {"comm": value(SELF)},
        ),
        "Exchange comm": (
            lambda comm: keep(halox.Exchange([], [], comm=comm)),
            {"comm": value(SELF)},
        ),
        "Allreduce comm": (
            lambda comm: keep(halox.Allreduce(comm, 3, "f8", device="cpu")),
            {"comm": value(SELF)},
        ),
        "leave_sms": (
            lambda **options: keep(grid((4, 6), **options)),
            {"checkerboard": value(True), "leave_sms": value(False)},
        ),
    }
    for name in ("sum", "min", "max", "norm"):
        made[name] = (getattr(g, name), {"field": u, "out": lambda: np.zeros(1)})
    if importlib.util.find_spec("xarray"):
        options = {"name": value("u"), "dims": value(("x", "y"))}
        made["dataarray"] = (g.dataarray, {"field": u, **options})
    pair = value([2, 1])
    constructors: dict[str, dict[str, Callable[[], Any]]] = {
        "primitive": {"dtype": f8},
        "as_datatype": {"old": f8},
        "dup": {"old": f8},
        "contiguous": {"count": three, "old": f8},
        "vector": {"count": three, "blocklength": three, "stride": value(-4), "old": f8},
        "hvector": {"count": three, "blocklength": three, "stride_bytes": value(-40), "old": f8},
        "indexed": {"blocklengths": pair, "displacements": value([4, 0]), "old": f8},
        "hindexed": {"blocklengths": pair, "byte_displacements": value([40, 0]), "old": f8},
        "indexed_block": {"blocklength": three, "displacements": value([4, 0]), "old": f8},
        "hindexed_block": {"blocklength": three, "byte_displacements": value([40, 0]), "old": f8},
        "struct": {
            "blocklengths": pair,
            "byte_displacements": value([40, 0]),
            "types": value(["f8", "i4"]),
        },
        "subarray": {
            "sizes": value((4, 5)),
            "subsizes": value((2, 2)),
            "starts": value((1, 1)),
            "old": f8,
            "order": value("F"),
        },
        "slab": {
            "shape": value((4, 5)),
            "strides": value((80, 16)),
            "starts": value((1, 1)),
            "subsizes": value((2, 2)),
            "dtype": f8,
        },
        "resized": {"old": f8, "lb": value(-8), "extent": value(32)},
    }
    for name, arguments in constructors.items():
        made[name] = (partial(built, getattr(dt, name)), arguments)
    made["struct entries"] = (
        lambda length, place, old: built(
            dt.struct, blocklengths=[length, 1], byte_displacements=[place, 0], types=[old, "f8"]
        ),
        {"length": value(1), "place": value(8), "old": f8},
    )
    return made


def built(constructor: Callable[..., dt.Datatype], **arguments: Any) -> None:
    """Construct a datatype, print it, and pack an array with it."""
    made = constructor(**arguments)
    repr(made)
    made.overlaps(2)
    halox.pack(np.zeros(90)[30:], made, 2)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """Return None if a call succeeds or raises a proper halox error, otherwise a description of the failure."""
    try:
        with quiet():
            call(**arguments)
    except HaloxError as error:
        cause = error.__cause__
        if type(error) is HaloxError and not isinstance(
            cause, (HaloxError, MemoryError, type(None))
        ):
            return f"masked {cause!r}"  # the ranks agreed on an unexpected error
        text = str(error)
        path = arguments.get("path")
        is_path = isinstance(path, str) and path == LONG_PATH  # the error quotes it in full
        return None if 10 < len(text) < 3000 or is_path else f"a text of {len(text)} characters"
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
    for name, (call, arguments) in calls(bench).items():
        with quiet():
            call(**{key: make() for key, make in arguments.items()})
        assert name


def test_each_argument_in_turn(bench: _Bench) -> None:
    wrong = []
    for name, (call, arguments) in calls(bench).items():
        for changed in arguments:
            for kind, odd in ODD.items():
                given = {key: make() for key, make in arguments.items()}
                given[changed] = odd()
                found = outcome(call, given)
                if found is not None:
                    wrong.append(f"{name}({changed}={kind}): {found}")
    bench.grid.exchange(bench.u)  # the grid still works
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong[:200])


def test_several_at_once(bench: _Bench) -> None:
    """Calls with several odd arguments; more calls if the environment has a seed."""
    seed = os.environ.get("HALOX_ODD_SEED")
    rng, every = random.Random(seed or 0), calls(bench)
    wrong = []
    for _ in range(20_000 if seed else 1_000):
        name = rng.choice(list(every))
        call, arguments = every[name]
        kinds = {changed: rng.choice(list(ODD)) for changed in arguments if rng.random() < 0.6}
        given = {
            key: ODD[kinds[key]]() if key in kinds else make() for key, make in arguments.items()
        }
        found = outcome(call, given)
        if found is not None:
            wrong.append(f"{name}({kinds}): {found}")
    assert not wrong, f"{len(wrong)} calls, seed {seed}:\n" + "\n".join(wrong[:200])


INTEGERS = [int, np.int8, np.int32, np.uint16, np.int64, np.uint64, lambda n: np.array(n, "i2")]


@pytest.mark.parametrize("kind", INTEGERS)
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


@pytest.mark.parametrize("corners", ["no", 1, 0, [], None.__class__, np.array([True])])
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
