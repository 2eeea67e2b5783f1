"""Bad input: all ranks raise the expected error, and none hangs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

import halox
from halox import datatypes as dt
from halox.errors import (
    ClosedError,
    DatatypeError,
    DecompositionError,
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    MissingPackageError,
    PathError,
    StateError,
)
from halox.runtime.call_guard import alone_in_making
from tests.mpi.bad_input import Table, check_error, read_only
from tests.mpi.limits import short_waits

World = MPI.Intracomm


def grid(comm: World, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "cpu"} | options
    return halox.Grid(options.pop("shape", (4 * comm.size, 6)), comm=comm, **options)


def only_on(comm: World, rank: int, bad: Any, good: Any) -> Any:
    return bad if comm.rank == rank % comm.size else good


def on_cart(dims: tuple[int, ...], **options: Any) -> Callable[[World], None]:
    """Make a grid on a Cartesian communicator with periods (True, False); MPI chooses dims that are 0."""

    def call(comm: World) -> None:
        periods = (True, False)[: len(dims)]
        cart = comm.Create_cart(MPI.Compute_dims(comm.size, list(dims)), periods)
        try:
            halox.Grid((4 * comm.size, 6), comm=cart, device="cpu", **options)
        finally:
            cart.Free()

    return call


def send_of_type(make: Callable[[], MPI.Datatype], *, free: bool) -> Callable[[World], None]:
    """Give a send a datatype of mpi4py, perhaps after freeing it."""

    def call(comm: World) -> None:
        datatype = make()
        if free:
            datatype.Free()
        try:
            halox.Exchange([halox.Send(np.zeros(8), datatype, 0)], [], comm=comm)
        finally:
            if not free:
                datatype.Free()

    return call


def closed(comm: World) -> None:
    g = grid(comm)
    u = g.zeros()
    g.exchange(u)
    g.close()
    g.exchange(u)


def closed_plan(comm: World) -> None:
    with grid(comm) as g:
        plan = g.plan(g.zeros())
        plan.close()
        plan()


def plan_of_closed_grid(comm: World) -> None:
    g = grid(comm)
    plan = g.plan(g.zeros())
    plan()
    g.close()
    plan()


def with_field(make: Callable[[halox.Grid], Any]) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            g.exchange(make(g))

    return call


def with_call(method: str, **options: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            getattr(g, method)(g.zeros(), **options)

    return call


def coarsened(factor: Any = 2, even: Any = True, **options: Any) -> Callable[[World], None]:
    """Coarsen a grid; options of the grid may be functions of the number of ranks."""

    def call(comm: World) -> None:
        made = {k: value(comm.size) if callable(value) else value for k, value in options.items()}
        with grid(comm, **made) as g:
            g.coarsen(factor(comm) if callable(factor) else factor, even=even)

    return call


def operator(apply: Any, make: Callable[[halox.Grid], Any]) -> Callable[[World], None]:
    """Make a linear operator, and form a product."""

    def call(comm: World) -> None:
        with grid(comm) as g:
            made = g.linear_operator(apply, make(g))
            made @ np.ones(made.shape[0])

    return call


def exchange(
    sends: Callable[[World], list[halox.Send]], receives: Callable[[World], list[halox.Recv]]
) -> Callable[[World], None]:
    def call(comm: World) -> None:
        halox.Exchange(sends(comm), receives(comm), comm=comm)

    return call


def ring(datatype: Any, n: int = 8) -> Callable[[World], list[halox.Send]]:
    return lambda comm: [halox.Send(np.zeros(n), datatype, (comm.rank + 1) % comm.size)]


def from_left(datatype: Any, n: int = 8) -> Callable[[World], list[halox.Recv]]:
    return lambda comm: [halox.Recv(np.zeros(n), datatype, (comm.rank - 1) % comm.size)]


def using(method: str, *arguments: Any, **options: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            getattr(g, method)(*arguments, **options)

    return call


def reduce_structured(comm: World) -> None:
    with grid(comm) as g:
        g.sum(g.zeros([("a", "f8")]))


def reduce_unlike(comm: World) -> None:
    with grid(comm) as g:
        g.sum(g.zeros(only_on(comm, 0, "f8", "i8")))


def reduce_unlike_layouts(comm: World) -> None:
    with grid(comm) as g:
        g.sum(g.zeros(components=3) if comm.rank == 0 else g.zeros(components_after=3))


def gather_unlike(comm: World) -> None:
    with grid(comm) as g:
        g.gather(g.zeros(only_on(comm, 0, "f8", "f4")))


def gather_to_unlike_roots(comm: World) -> None:
    with grid(comm) as g:
        g.gather(g.zeros(), root=only_on(comm, 1, 1, 0))


def accumulate_twice(comm: World) -> None:
    with grid(comm) as g:
        u = g.zeros()
        g.accumulate(u, u)


def sum_that_overflows(comm: World) -> None:
    with grid(comm) as g, np.errstate(all="raise"):
        g.sum(g.full(np.finfo("f8").max))


class Raising:
    def __dlpack_device__(self) -> Any:
        raise ZeroDivisionError("no device")


def started_twice(comm: World) -> None:
    with grid(comm) as g:
        plan = g.plan(g.zeros())
        plan.start()
        try:
            plan.start()
        finally:
            plan.finish()


def finished_unstarted(comm: World) -> None:
    with grid(comm) as g:
        g.plan(g.zeros()).finish()


def with_variable(name: str, text: str) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, text)
            with grid(comm) as g:
                g.exchange(g.zeros())

    return call


def with_path(path: Any, other: Any = None) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm, path=path if comm.rank == 0 else other or path) as g:
            g.exchange(g.zeros())

    return call


def with_path_of_plan(comm: World) -> None:
    with grid(comm) as g:
        g.plan(g.zeros(), path="host" if comm.rank == 0 else None)


def with_plan(act: Callable[[halox.Plan, World], object]) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            act(g.plan(g.zeros()), comm)

    return call


def between(act: Callable[[halox.Plan], object]) -> Callable[[World], None]:
    """Act between the start and the finish of an exchange."""

    def call(plan: halox.Plan, comm: World) -> None:
        plan.start()
        try:
            act(plan)
        finally:
            plan.finish()

    return with_plan(call)


def measured_closed(plan: halox.Plan, comm: World) -> None:
    plan.close()
    plan.measure()


def different_calls(comm: World) -> None:
    g = grid(comm.Dup())
    u = g.zeros()
    g.exchange(u)
    g.exchange(u)
    with short_waits(20.0):
        (g.sum if comm.rank == 0 else g.exchange)(u)


def another_order(comm: World) -> None:
    with grid(comm) as g:
        u, v = g.zeros(), g.zeros()
        g.exchange(*((u, v) if comm.rank == 0 else (v, u)))


def read_in_different_ways(comm: World) -> None:
    with grid(comm) as g:
        shape = (2, *g.padded_shape) if comm.rank == 0 else (*g.padded_shape, 2)
        g.exchange(np.zeros(shape))


def _changed_later(comm: World, change: Callable[[np.ndarray], object]) -> None:
    with grid(comm) as g:
        u = np.zeros(g.padded_shape)
        g.exchange(u)
        change(u)
        g.exchange(u)


def _plan_in_two_threads(comm: World) -> None:
    with grid(comm) as g:
        plan = g.plan(g.zeros())
        plan._steps = (lambda: _in_another_thread(plan), *plan._steps)
        plan()


def _grid_in_two_threads(comm: World) -> None:
    with grid(comm) as g:
        plan = g.plan(g.zeros())
        plan._steps = (lambda: _in_another_thread(g.zeros), *plan._steps)
        plan()


def _grids_by_two_threads(comm: World) -> None:
    with alone_in_making():
        _in_another_thread(lambda: grid(comm))


def _in_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(call).result()


TABLE: Table = {
    "a grid with an odd extent, coarsened": (
        coarsened(shape=lambda size: (4 * size, 7), proc_shape=lambda size: (size, 1)),
        DecompositionError,
        "axis 1",
    ),
    "a grid with odd blocks, coarsened >1": (
        coarsened(blocks=lambda size: [[3, *[4] * (size - 2), 5], None]),
        DecompositionError,
        "blocks",
    ),
    "a grid with too small blocks, coarsened >1": (
        coarsened(
            even=False,
            shape=lambda size: (4 * size - 4, 6),
            blocks=lambda size: [[3, 1, *[4] * (size - 2)], None],
        ),
        DecompositionError,
        "fewer ranks",
    ),
    "a grid coarsened by a factor of zero": (coarsened(0), DecompositionError, "factor"),
    "a grid coarsened by different factors on its ranks >1": (
        coarsened(lambda comm: only_on(comm, 1, (2, 1), 2)),
        MismatchError,
        "factor",
    ),
    "a linear operator without a function": (
        operator(None, lambda g: g.zeros()),
        FieldError,
        "apply",
    ),
    "a linear operator of integers": (
        operator(print, lambda g: g.zeros("i4")),
        FieldError,
        "fields",
    ),
    "a linear operator of different numbers of fields >1": (
        operator(print, lambda g: [g.zeros()] * only_on(g.comm, 1, 1, 2)),
        MismatchError,
        "number of fields",
    ),
    "a product of a linear operator on several ranks >1": (
        operator(lambda u, out: None, lambda g: g.zeros()),
        StateError,
        "dot products",
    ),
    "grid_shape of no axes": (lambda c: grid(c, shape=()), DecompositionError, "grid_shape"),
    "grid_shape of 5 axes": (lambda c: grid(c, shape=(4,) * 5), DecompositionError, "grid_shape"),
    "grid_shape with a zero": (lambda c: grid(c, shape=(4, 0)), DecompositionError, "grid_shape"),
    "grid_shape of floats": (lambda c: grid(c, shape=(4.5, 4)), DecompositionError, "grid_shape"),
    "negative halo": (lambda c: grid(c, halo=-1), DecompositionError, "halo"),
    "halo for another number of axes": (
        lambda c: grid(c, halo=(1, 1, 1)),
        DecompositionError,
        "halo",
    ),
    "halo wider than a periodic axis": (
        lambda c: grid(c, halo=(1, 7), proc_shape=(c.size, 1)),
        DecompositionError,
        "widths of 6 or less",
    ),
    "periodic for another number of axes": (
        lambda c: grid(c, periodic=(True,) * 3),
        DecompositionError,
        "periodic",
    ),
    "proc_shape that does not multiply up": (
        lambda c: grid(c, proc_shape=(c.size + 1, 1)),
        DecompositionError,
        "proc_shape",
    ),
    "more ranks than cells": (
        lambda c: grid(c, shape=(1, 1), proc_shape=(c.size + 1, 0), halo=0),
        DecompositionError,
        "proc_shape",
    ),
    "blocks that do not sum to the grid": (
        lambda c: grid(c, blocks=((5,) * c.size, None)),
        DecompositionError,
        "blocks",
    ),
    "corners that are not a bool, in a grid": (
        lambda c: grid(c, corners="no"),
        DecompositionError,
        "corners",
    ),
    "an unknown device": (lambda c: grid(c, device="tpu"), DeviceError, "device"),
    "an int as communicator": (lambda c: halox.Grid((4, 4), comm=42), HaloxError, "comm"),
    "the null communicator": (
        lambda c: halox.Grid((4, 4), comm=MPI.COMM_NULL),
        HaloxError,
        "COMM_NULL",
    ),
    "a Cartesian communicator of another number of axes": (
        on_cart((0,)),
        DecompositionError,
        "comm",
    ),
    "periodic that contradicts a Cartesian communicator": (
        on_cart((0, 1), periodic=True),
        DecompositionError,
        "periodic",
    ),
    "proc_shape that contradicts a Cartesian communicator >1": (
        lambda c: on_cart((0, 1), proc_shape=(1, c.size))(c),
        DecompositionError,
        "proc_shape",
    ),
    "blocks that contradict a Cartesian communicator": (
        on_cart((0, 1), blocks=(None, (2, 4))),
        DecompositionError,
        "blocks[1]",
    ),
    "periodic flags that differ >1": (
        lambda c: grid(c, periodic=only_on(c, 1, False, True)),
        MismatchError,
        "periodic",
    ),
    "grid shapes that differ >1": (
        lambda c: grid(c, shape=only_on(c, 1, (4 * c.size, 7), (4 * c.size, 6))),
        MismatchError,
        "grid_shape",
    ),
    "halos that differ >1": (lambda c: grid(c, halo=only_on(c, 1, 2, 1)), MismatchError, "halo"),
    "a bad argument on one rank only >1": (
        lambda c: grid(c, halo=only_on(c, 1, -3, 1)),
        DecompositionError,
        "halo",
    ),
    "an object dtype": (using("zeros", object), FieldError, "dtype"),
    "an unknown dtype": (using("zeros", "no such type"), FieldError, "not a dtype"),
    "components of zero": (using("zeros", components=0), FieldError, "components"),
    "an axis to stagger out of range": (using("zeros", staggered=7), FieldError, "staggered"),
    "an unknown option of a field": (using("zeros", colour="red"), FieldError, "colour"),
    "a list in place of an array": (with_field(lambda g: [[0.0]]), FieldError, "numpy.ndarray"),
    "a list in place of an array on one rank >1": (
        lambda c: with_field(lambda g: only_on(c, 1, [[0.0]], g.zeros()))(c),
        FieldError,
        "numpy.ndarray",
    ),
    "an array of the wrong shape": (
        with_field(lambda g: np.zeros((3, 3, 3))),
        FieldError,
        "padded_shape",
    ),
    "the own cells of a field": (
        with_field(lambda g: g.interior(g.zeros(components=3))),
        FieldError,
        "halo",
    ),
    "an array whose shape several layouts have": (
        lambda c: _sum_of_several_layouts(c),
        FieldError,
        "grid.declare",
    ),
    "a shape in place of a dtype": (
        with_field(lambda g: g.zeros(g.grid_shape)),
        FieldError,
        "dtype",
    ),
    "a datatype of mpi4py in a constructor": (
        lambda comm: dt.vector(2, 1, 3, MPI.DOUBLE),
        DatatypeError,
        "mpi4py",
    ),
    "a freed datatype of mpi4py": (
        send_of_type(lambda: MPI.DOUBLE.Create_vector(2, 1, 3), free=True),
        DatatypeError,
        "sends[0].datatype",
    ),
    "a datatype of mpi4py without an equivalent": (
        send_of_type(
            lambda: MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_BLOCK], [8], [1]),
            free=False,
        ),
        DatatypeError,
        "sends[0].datatype",
    ),
    "an array of the wrong shape on one rank >1": (
        lambda c: with_field(lambda g: np.zeros(only_on(c, 1, (2, 2), g.padded_shape)))(c),
        FieldError,
        "[rank 1]",
    ),
    "an array of another dtype on one rank >1": (
        lambda c: with_field(lambda g: np.zeros(g.padded_shape, only_on(c, 1, "f4", "f8")))(c),
        MismatchError,
        "f8",
    ),
    "another number of fields on one rank >1": (lambda c: _fields_differ(c), MismatchError, "rank"),
    "an array one cell too long": (
        with_field(lambda g: np.zeros((g.padded_shape[0] + 1, *g.padded_shape[1:]))),
        FieldError,
        "does not fit",
    ),
    "a read-only array": (with_field(read_only), FieldError, "read-only"),
    "an array of which one row stands for all": (
        with_field(lambda g: as_strided(np.zeros(g.padded_shape[1]), g.padded_shape, (0, 8))),
        FieldError,
        "field",
    ),
    "a sliding window": (
        with_field(lambda g: as_strided(np.zeros(99), g.padded_shape, (8, 8))),
        FieldError,
        "field",
    ),
    "an array made read-only after its first exchange": (
        lambda c: _changed_later(c, lambda u: u.setflags(write=False)),
        FieldError,
        "read-only",
    ),
    "an array given another shape after its first exchange": (
        lambda c: _changed_later(c, lambda u: setattr(u, "shape", (-1,))),
        FieldError,
        "does not fit",
    ),
    "a masked array": (
        with_field(lambda g: np.ma.zeros(g.padded_shape)),
        FieldError,
        "masked array",
    ),
    "a new array of another dtype on one rank, after others >1": (
        lambda c: _new_dtype(c),
        MismatchError,
        "plan",
    ),
    "no field at all": (using("exchange"), FieldError, "field"),
    "corners that are not a bool": (lambda c: _corners(c), FieldError, "corners"),
    "accumulate of booleans": (lambda c: _accumulate_bool(c), FieldError, "accumulate"),
    "a closed grid": (closed, ClosedError, "closed"),
    "a plan of a closed grid": (plan_of_closed_grid, ClosedError, "closed"),
    "a closed plan": (closed_plan, ClosedError, "closed"),
    "a plan in two threads": (_plan_in_two_threads, StateError, "thread"),
    "a grid in two threads": (_grid_in_two_threads, StateError, "thread"),
    "grids made by two threads": (_grids_by_two_threads, StateError, "thread"),
    "start without finish": (started_twice, StateError, "finish"),
    "finish without start": (finished_unstarted, StateError, "start"),
    "the sum of a structured field": (reduce_structured, FieldError, "no meaning"),
    "a sum of unlike dtypes >1": (reduce_unlike, MismatchError, "int64"),
    "a sum of unlike layouts >1": (reduce_unlike_layouts, MismatchError, "components"),
    "a reproducible sum on one rank only >1": (
        lambda c: with_call("sum", reproducible=only_on(c, 0, True, False))(c),
        MismatchError,
        "reproducible",
    ),
    "reproducible that is not a bool": (
        lambda c: with_call("norm", reproducible="yes")(c),
        FieldError,
        "reproducible",
    ),
    "a reproducible product": (
        using("allreduce", 1.0, "prod", reproducible=True),
        FieldError,
        "reproducible",
    ),
    "a reproducible sum of each node": (
        lambda c: halox.Allreduce(
            c, 3, "f8", algorithm="hierarchical", device="cpu", reproducible=True
        ),
        FieldError,
        "algorithm",
    ),
    "a whole array that can be read in two ways": (
        lambda c: using("scatter", np.ones(2 * (4 * c.size, 6)))(c),
        FieldError,
        "grid.scatter",
    ),
    "a gather of unlike dtypes >1": (gather_unlike, MismatchError, "dtype"),
    "a gather to unlike roots >1": (gather_to_unlike_roots, MismatchError, "root"),
    "a gather to a rank out of range": (
        lambda c: with_call("gather", root=c.size)(c),
        FieldError,
        "root",
    ),
    "a value that the dtype cannot hold": (using("full", 300, "u1"), FieldError, "value"),
    "a complex value in a real field": (using("full", 1 + 2j), FieldError, "value"),
    "a value that the dtype of another field cannot hold": (
        lambda c: _full_like(c, 1j),
        FieldError,
        "value",
    ),
    "a value that does not broadcast": (using("full", [1] * 5), FieldError, "value"),
    "a field larger than the memory": (
        using("zeros", components=(10**6, 10**6)),
        HaloxError,
        "memory",
    ),
    "accumulate of the same cells twice": (accumulate_twice, FieldError, "share memory"),
    "an array that raises when asked for its memory": (
        with_field(lambda g: Raising()),
        FieldError,
        "ZeroDivisionError",
    ),
    "a sum that overflows where NumPy is told to raise": (
        sum_that_overflows,
        HaloxError,
        "FloatingPointError",
    ),
    "an unknown reduction": (using("allreduce", 1.0, op="median"), FieldError, "op"),
    "the minimum of complex numbers": (lambda c: _minimum_of_complex(c), FieldError, "min"),
    "allreduce of unlike shapes >1": (
        lambda c: using("allreduce", np.zeros(2 + c.rank))(c),
        MismatchError,
        "shape",
    ),
    "a send without its receive": (
        exchange(ring(dt.contiguous(8, "f8")), lambda c: []),
        MismatchError,
        "send",
    ),
    "signatures that differ": (
        exchange(ring(dt.contiguous(8, "f8")), from_left(dt.contiguous(16, "f4"))),
        MismatchError,
        "f8",
    ),
    "tags that differ": (
        exchange(
            lambda c: [
                halox.Send(np.zeros(2), dt.contiguous(2, "f8"), (c.rank + 1) % c.size, tag=1)
            ],
            from_left(dt.contiguous(2, "f8")),
        ),
        MismatchError,
        "tag",
    ),
    "a send to a rank out of range": (
        exchange(lambda c: [halox.Send(np.zeros(2), "f8", c.size)], lambda c: []),
        MismatchError,
        "sends[0].dest",
    ),
    "a negative count": (
        exchange(lambda c: [halox.Send(np.zeros(2), "f8", 0, count=-1)], lambda c: []),
        FieldError,
        "count",
    ),
    "a datatype that reaches outside its array": (
        exchange(ring(dt.vector(5, 1, 2, "f8")), from_left(dt.contiguous(5, "f8"))),
        FieldError,
        "bytes",
    ),
    "items between the elements of a view": (
        exchange(
            lambda c: [halox.Send(np.zeros((4, 6))[:, 1], "f8", (c.rank + 1) % c.size, count=4)],
            from_left(dt.contiguous(4, "f8")),
        ),
        FieldError,
        "sends[0].array",
    ),
    "an int as send": (
        exchange(lambda c: [3], lambda c: []),  # type: ignore[list-item]
        FieldError,
        "sends[0]",
    ),
    "a text as tag": (
        exchange(lambda c: [halox.Send(np.zeros(2), "f8", 0, tag="red")], lambda c: []),  # type: ignore[arg-type]
        MismatchError,
        "sends[0].tag",
    ),
    "a receive that touches a byte twice": (
        exchange(ring(dt.contiguous(4, "f8")), from_left(dt.hindexed_block(2, [0, 8], "f8"))),
        DatatypeError,
        "twice",
    ),
    "messages into bytes of one another": (
        exchange(
            lambda c: [],
            lambda c: [halox.Recv(array, "f8", c.rank, 4) for array in [np.zeros(4)] * 2],
        ),
        FieldError,
        "receives[1]",
    ),
    "a datatype of negative count": (lambda c: dt.vector(-1, 1, 1, "f8"), DatatypeError, "count"),
    "a datatype that reaches over 2**63 bytes": (
        lambda c: dt.indexed([5], [0], dt.resized("f8", 0, 2**62)),
        DatatypeError,
        "indexed",
    ),
    "a subarray that sticks out": (
        lambda c: dt.subarray((4, 4), (2, 2), (3, 0), "f8"),
        DatatypeError,
        "axis 0",
    ),
    "lengths and displacements that differ in number": (
        lambda c: dt.indexed([1, 2], [0], "f8"),
        DatatypeError,
        "displacements",
    ),
    "fields in another order >1": (another_order, MismatchError, "field"),
    "a field that ranks read in different ways >1": (
        read_in_different_ways,
        MismatchError,
        "field",
    ),
    "a text as `HALOX_TIMEOUT`": (
        with_variable("HALOX_TIMEOUT", "soon"),
        HaloxError,
        "HALOX_TIMEOUT",
    ),
    "`HALOX_DEBUG` that is neither 0 nor 1": (
        with_variable("HALOX_DEBUG", "off"),
        HaloxError,
        "HALOX_DEBUG",
    ),
    "`HALOX_DEBUG_HALO` that is neither 0 nor 1": (
        with_variable("HALOX_DEBUG_HALO", "yes"),
        HaloxError,
        "HALOX_DEBUG_HALO",
    ),
    "a path that does not exist": (with_path("pigeon"), PathError, "pigeon"),
    "a protocol that does not exist": (
        with_variable("HALOX_PATH", "host/ll"),
        PathError,
        "HALOX_PATH",
    ),
    "a path that arrays of this kind cannot take >1": (with_path("peer"), PathError, "peer"),
    "a grid's paths that differ between ranks >1": (
        with_path("ipc", "host"),
        MismatchError,
        "path",
    ),
    "a plan's paths that differ between ranks >1": (with_path_of_plan, MismatchError, "path"),
    "`measure` of no number of exchanges": (
        with_plan(lambda p, _: p.measure(0)),
        HaloxError,
        "repeats",
    ),
    "more exchanges than can be waited for": (
        with_plan(lambda p, _: p.measure(2147483648)),
        HaloxError,
        "repeats",
    ),
    "numbers of exchanges that differ between ranks >1": (
        with_plan(lambda p, comm: p.measure(3 + comm.rank)),
        HaloxError,
        "repeats",
    ),
    "`measure` between start and finish": (between(lambda p: p.measure()), StateError, "finish"),
    "`measure` of a closed plan": (with_plan(measured_closed), ClosedError, "closed"),
    "`plan.device` of NumPy arrays": (
        with_plan(lambda p, _: p.device),
        FieldError,
        "plan.device",
    ),
    "`plan.device` between start and finish": (between(lambda p: p.device), StateError, "finish"),
    "a sum of bools": (using("allreduce", np.ones(3, "?"), "sum"), FieldError, "sum"),
    "the truth of floats": (using("allreduce", np.ones(3), "logical_or"), FieldError, "logical_or"),
    "a reduction of another byte order": (using("allreduce", np.ones(3, ">f8")), FieldError, ">f8"),
    "a dtype with axes": (using("zeros", ("f8", (3,))), FieldError, "dtype"),
    "a masked value": (using("full", np.ma.masked), FieldError, "value"),
    "a reproducible sum over an axis": (
        lambda c: with_call("sum", axis=0, reproducible=True)(c),
        FieldError,
        "reproducible",
    ),
    "an FFT of integers": (
        lambda c: halox.FFT(grid(c), axes=1).forward(np.zeros((6, 8), "i8")),
        FieldError,
        "u",
    ),
}


def _new_dtype(comm: World) -> None:
    with grid(comm) as g:
        for dtypes in (("f8", "f8"), ("f4", "f8")):
            g.exchange(np.zeros(g.padded_shape, only_on(comm, 1, *dtypes)))


def _fields_differ(comm: World) -> None:
    with grid(comm) as g:
        u, v = g.zeros(), g.zeros()
        g.exchange(*only_on(comm, 1, (u,), (u, v)))


def _corners(comm: World) -> None:
    with grid(comm) as g:
        g.exchange(g.zeros(), corners="no")  # type: ignore[arg-type]


def _accumulate_bool(comm: World) -> None:
    with grid(comm) as g:
        g.accumulate(g.zeros("?"))


def _sum_of_several_layouts(comm: World) -> None:
    with grid(comm) as g:
        w, v = g.ones(halo=((2, 1), (1, 1))), g.ones(halo=((1, 2), (1, 1)))
        assert w.shape == v.shape
        g.sum(2 * w)


def _full_like(comm: World, value: object) -> None:
    with grid(comm) as g:
        g.full_like(g.zeros("f4"), value)


def _minimum_of_complex(comm: World) -> None:
    with grid(comm) as g:
        g.min(g.zeros("c16"))


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: World) -> None:
    check_error(TABLE, name, comm)


@pytest.mark.ranks(2)
def test_after_a_failure(comm: World) -> None:
    """A rank whose call has failed makes no other call, and a rank that waits for it raises at once."""
    g = grid(comm.Dup())
    u = np.zeros(g.padded_shape)
    g.exchange(u)
    if comm.rank == 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            g.exchange(u)
        with pytest.raises(StateError):
            g.zeros()
    comm.Barrier()
    if comm.rank == 0:
        g.exchange(u)  # rank 1 has sent its cells before its timeout
        with pytest.raises(ExchangeTimeoutError):
            g.exchange(u)
    comm.Barrier()


@pytest.mark.ranks(2)
def test_different_calls(comm: World) -> None:
    """A sum on one rank, an exchange on the other one."""
    with pytest.raises(MismatchError) as caught:
        different_calls(comm)
    assert "sum" in str(caught.value) and "exchange" in str(caught.value)


def test_gpu_asked_for_where_there_is_none(comm: World) -> None:
    from halox.runtime.gpu.cuda import why_no_gpu

    reason = why_no_gpu()
    if reason is None:
        return  # tests/gpu covers machines with a GPU
    with pytest.raises(DeviceError, match="device="):
        grid(comm, device="gpu")


def test_cupy_missing(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from halox.runtime.gpu import cuda

    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda.why_no_gpu.cache_clear()
    try:
        with pytest.raises(DeviceError, match="cupy"):
            grid(comm, device="gpu")
    finally:
        cuda.why_no_gpu.cache_clear()


def test_mpi_missing(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingPackageError, match="mpi4py"):
        grid(comm)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("allocate", ["by the grid", "by the user", "without shared memory"])
@pytest.mark.full
def test_a_neighbour_that_does_not_come(
    allocate: str, comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for an absent rank raises an error."""
    if allocate == "without shared memory":
        monkeypatch.setenv("HALOX_NODE", "rank")
    group = comm.Dup()
    g = grid(group, proc_shape=(comm.size, 1), shape=(4 * comm.size, 64))
    u = np.zeros(g.padded_shape) if allocate == "by the user" else g.zeros()
    g.exchange(u)
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            g.exchange(u)
    comm.Barrier()


@pytest.mark.ranks(2, 3)  # on more, ranks that are not neighbours need not notice
def test_a_rank_that_makes_another_call(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank makes a new plan while other ranks run the old plan: all raise, none hangs."""
    monkeypatch.setenv("HALOX_TIMEOUT", "30")
    g = grid(comm.Dup(), proc_shape=(comm.size, 1))
    u, v = g.zeros(), g.zeros()
    g.exchange(u)
    with pytest.raises(MismatchError if comm.size == 2 else HaloxError):
        g.exchange(v if comm.rank == 1 else u)
    comm.Barrier()
