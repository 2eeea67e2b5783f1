"""Allocation of fields: communication between ranks, different fields on the ranks, and errors of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, HaloxError, MismatchError
from halox.runtime import arena as arena_module
from halox.runtime.communicator import Communicator

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# A field with so many components is large, and its faces have short blocks: it is not in shared memory.
LARGE = 400


@pytest.fixture(params=["one node", "a node each"])
def grid(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[halox.Grid]:
    if request.param == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    options: dict[str, Any] = {"proc_shape": (1, comm.size), "device": "cpu"}
    with halox.Grid((40, 40 * comm.size), comm=comm.Dup(), periodic=True, **options) as g:
        yield g


def free_bytes(grid: halox.Grid) -> int:
    arena = grid.domain.context.arena
    arena._sweep()
    return sum(length for own in arena._own.values() for _, length in own.free._ranges)


def test_known_layouts_are_allocated_in_one_meeting(
    grid: halox.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    u = grid.zeros(components=3)
    grid.zeros_like(u)
    met: list[str] = []
    reduce = Communicator.reduce

    def counted(self: Communicator, mine: object, step: str, *given: Any, **options: Any) -> Any:
        met.append(step)
        return reduce(self, mine, step, *given, **options)

    monkeypatch.setattr(Communicator, "reduce", counted)
    for make in (grid.zeros_like, grid.empty_like, grid.ones_like):
        v = make(u)
        assert grid.layout(v) is grid.layout(u)
        del v
    assert len(met) == (3 if grid.size > 1 else 0)


def test_ranks_may_differ_in_where_fields_are(grid: halox.Grid) -> None:
    """Ranks may allocate different fields; only their exchange compares them."""
    for _ in range(3):
        components = LARGE if grid.rank == 0 else 1
        u = grid.full(grid.rank, components=components)
        v = grid.full(7, components=components)
        assert u.shape == (components, *grid.padded_shape)
        assert (u == grid.rank).all() and (v == 7).all()
        if grid.size > 1:
            with pytest.raises(MismatchError):
                grid.exchange(u)
    w = grid.ones()
    grid.exchange(w)
    assert (w == 1).all()


def test_room_is_free_again_after_an_error_of_another_rank(grid: halox.Grid) -> None:
    u = grid.zeros()
    before, arena = free_bytes(grid), grid.domain.context.arena
    assert (before > 0) == arena.shares_memory
    for _ in range(20):
        with pytest.raises(FieldError, match="dtype"):
            grid.zeros_like(u, "f8" if grid.rank else object)
    assert free_bytes(grid) == before
    assert arena.segments == arena.shares_memory


def test_without_shared_memory_for_one_rank(
    grid: halox.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of the node then use private memory."""

    def full(name: str, nbytes: int) -> object:
        raise OSError(28, "No space left on device")

    if grid.rank == grid.size - 1:
        monkeypatch.setattr(arena_module.shared_memory, "create", full)
    u = grid.full(grid.rank + 1.0)
    grid.exchange(u)
    assert (u[:, 1:-1] == grid.rank + 1).all() and (u[:, 0] == (grid.rank or grid.size)).all()
    assert grid.domain.context.arena.segments == 0


def test_without_memory_on_one_rank(grid: halox.Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise MemoryError("none left")

    u = grid.zeros(components=LARGE)
    if grid.rank == 0:
        monkeypatch.setattr("halox.domain.allocation.allocate", full)
    with pytest.raises(HaloxError, match="no memory for a field of shape"):
        grid.zeros_like(u)
    monkeypatch.undo()
    assert np.array_equal(grid.ones_like(u), np.ones(u.shape))
