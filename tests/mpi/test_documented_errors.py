"""Errors of docs/errors.md that need different calls on two ranks, an environment variable or a plan.

Each error has the text on the page; only numbers may differ: seconds, counts of calls, process ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    PathError,
    StateError,
)
from tests.mpi.bad_input import documented
from tests.mpi.limits import short_waits

World = MPI.Intracomm


def grid(comm: World, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "cpu"} | options
    return halox.Grid((4 * comm.size, 6), comm=comm, **options)


@contextmanager
def variable(name: str, text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, text)
        yield


def with_variable(name: str, text: str) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with variable(name, text), grid(comm) as g:
            g.exchange(g.zeros())

    return call


def different_calls(comm: World) -> None:
    g = grid(comm)
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


def late_rank(comm: World) -> halox.Grid:
    """Let rank 0 time out in a gather that rank 1 never makes."""
    g = grid(comm)
    u = g.zeros()
    if comm.rank == 0:
        with short_waits(), suppress(ExchangeTimeoutError):
            g.gather(u)
    comm.Barrier()
    return g


def after_a_failure(comm: World) -> None:
    g = late_rank(comm)
    if comm.rank == 0:
        g.zeros()
    raise StateError


def on_first_only(make: Callable[[World], object]) -> Callable[[World], None]:
    def call(comm: World) -> None:
        if comm.rank == 0:
            with short_waits():
                make(comm)

    return call


def no_neighbour(comm: World) -> None:
    g = grid(comm)
    u = np.zeros(g.padded_shape)
    g.exchange(u)
    if comm.rank == 0:
        with short_waits():
            g.exchange(u)


def with_path(path: Any, other: Any = None) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm, path=path if comm.rank == 0 else other or path) as g:
            g.exchange(g.zeros())

    return call


def with_path_of_plan(first: Any, other: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            g.plan(g.zeros(), path=first if comm.rank == 0 else other)

    return call


def with_plan(act: Callable[[Any, World], object]) -> Callable[[World], None]:
    def call(comm: World) -> None:
        with grid(comm) as g:
            act(g.plan(g.zeros()), comm)

    return call


def measured_between(plan: Any, comm: World) -> None:
    plan.start()
    try:
        plan.measure()
    finally:
        plan.finish()


def measured_closed(plan: Any, comm: World) -> None:
    plan.close()
    plan.measure()


def device_between(plan: Any, comm: World) -> None:
    plan.start()
    try:
        _ = plan.device
    finally:
        plan.finish()


TABLE: dict[str, tuple[Callable[[World], None], type[HaloxError]]] = {
    "calls that differ between ranks: a sum on one, an exchange on the other": (
        different_calls,
        MismatchError,
    ),
    "fields in another order": (another_order, MismatchError),
    "a field that ranks read in different ways": (read_in_different_ways, MismatchError),
    "another call after one that has failed in the middle": (after_a_failure, StateError),
    "a grid made on some ranks only": (on_first_only(grid), ExchangeTimeoutError),
    "a neighbour that does not arrive, or makes another call": (no_neighbour, ExchangeTimeoutError),
    "a text as `HALOX_TIMEOUT`": (with_variable("HALOX_TIMEOUT", "soon"), HaloxError),
    "`HALOX_DEBUG` that is neither 0 nor 1": (with_variable("HALOX_DEBUG", "off"), HaloxError),
    "`HALOX_DEBUG_HALO` that is neither 0 nor 1": (
        with_variable("HALOX_DEBUG_HALO", "yes"),
        HaloxError,
    ),
    "a path that there is not, in `path=` or `HALOX_PATH`": (with_path("pigeon"), PathError),
    "an unknown protocol, in `path=` or `HALOX_PATH`": (
        with_variable("HALOX_PATH", "host/ll"),
        PathError,
    ),
    "a path that arrays of this kind cannot take": (with_path("peer"), PathError),
    "a grid's paths that differ between ranks": (with_path("ipc", "host"), MismatchError),
    "a plan's, or HALOX_PATH's": (with_path_of_plan("host", None), MismatchError),
    "`measure` of no number of exchanges": (with_plan(lambda p, _: p.measure(0)), HaloxError),
    "more exchanges than can be waited for": (
        with_plan(lambda p, _: p.measure(2147483648)),
        HaloxError,
    ),
    "numbers that differ between ranks": (
        with_plan(lambda p, comm: p.measure(3 + comm.rank)),
        HaloxError,
    ),
    "`measure` between start and finish": (with_plan(measured_between), StateError),
    "`measure` of a closed plan": (with_plan(measured_closed), ClosedError),
    "`plan.device` of NumPy arrays": (with_plan(lambda p, _: p.device), FieldError),
    "`plan.device` between start and finish": (with_plan(device_between), StateError),
}

ON_FIRST = {
    "another call after one that has failed in the middle",
    "a grid made on some ranks only",
    "a neighbour that does not arrive, or makes another call",
}
"""Errors that rank 0 alone raises."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", TABLE)
def test_the_text_of_the_page(name: str, comm: World) -> None:
    call, kind = TABLE[name]
    error: HaloxError | None = None
    try:
        call(comm.Dup())
    except HaloxError as caught:
        error = caught
    comm.Barrier()
    if comm.rank == 0 or name not in ON_FIRST:
        assert type(error) is kind
        said, _, _ = str(error).partition("\n[rank 1]")
        assert comm.rank or re.fullmatch(with_any_numbers(documented(name)), said), said


@pytest.mark.ranks(2)
def test_a_wait_for_a_rank_whose_call_has_failed(comm: World) -> None:
    """The wait ends at once, long before HALOX_TIMEOUT."""
    g = grid(comm.Dup())
    u = np.zeros(g.padded_shape)
    g.exchange(u)
    error: HaloxError | None = None
    if comm.rank == 1:
        with short_waits(), suppress(ExchangeTimeoutError):
            g.exchange(u)
    comm.Barrier()
    if comm.rank == 0:
        g.exchange(u)  # rank 1 has sent its cells before its timeout
        try:
            g.exchange(u)
        except ExchangeTimeoutError as caught:
            error = caught
    comm.Barrier()
    page = documented("a wait for a rank where another call has failed")
    assert comm.rank or re.fullmatch(with_any_numbers(page), str(error)), str(error)


def with_any_numbers(pattern: str) -> str:
    """Replace each number in a pattern by a pattern of any number."""
    return re.sub(r"\d+", lambda _: r"[\d.]+", pattern)
