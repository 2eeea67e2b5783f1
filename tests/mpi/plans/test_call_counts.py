"""Number of Python calls in an exchange: a measure of overhead that does not depend on the load of the machine."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.paths.base import Channel
from tests.calls import calls_of

World = MPI.Intracomm


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own", [False, True])
def test_a_first_exchange_makes_few_calls(comm: World, own: bool) -> None:
    """A first exchange also makes the plan, with 26 neighbours and 52 parts."""
    with halox.Grid((64, 64, 64), halo=1, periodic=True, comm=comm, device="cpu") as grid:
        u = np.zeros(grid.padded_shape) if own else grid.zeros()
        calls = calls_of(lambda: grid.exchange(u))
    most = calls.most_common(12)
    assert 500 < calls.total() <= 5000, [(n, code.co_qualname) for code, n in most]


@pytest.mark.ranks(1, 2, 3)
def test_a_later_exchange_touches_no_channel_that_does_nothing(comm: World) -> None:
    idle = {Channel.start.__code__, Channel.finish.__code__, Channel.run.__code__}
    with halox.Grid((64, 64), halo=1, periodic=True, comm=comm, device="cpu") as grid:
        for u in (grid.zeros(), np.zeros(grid.padded_shape), grid.zeros("S300")):
            for _ in range(2):
                grid.exchange(u)
            calls = calls_of(lambda u=u: grid.exchange(u))  # type: ignore[misc]
            assert not idle & set(calls)
            # The calls of the user, the cache, the plan, and at most two channels.
            assert calls.total() < 60


@pytest.mark.ranks(1, 2, 3)
def test_a_new_array_makes_no_datatype_and_no_word(comm: World) -> None:
    """A new array with a known layout needs views only: no datatypes, and no messages besides the exchange."""
    with halox.Grid((24, 24, 24), halo=1, periodic=True, comm=comm, device="cpu") as grid:
        for u in (np.zeros(grid.padded_shape) for _ in range(2)):
            grid.exchange(u)
        new = np.ones(grid.padded_shape)
        calls = calls_of(lambda: grid.exchange(new))
        files = {code.co_filename.partition("halox/")[2] for code in calls}
        assert not [name for name in files if name.startswith(("datatypes", "decomposition"))]
        assert not {"gather", "swap", "begin"} & {code.co_name for code in calls}
        assert calls.total() < 110
