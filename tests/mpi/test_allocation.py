"""Allocation of fields: contents, different fields on the ranks, and memory that is used again or missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.limits import fill_shared_memory
from tests.mpi.conftest import agree, mapped_bytes

# A field with so many components is large, and its faces have short blocks: it is not in shared memory.
LARGE = 400


@pytest.fixture(params=["", "rank"], ids=["one node", "a node each"])
def grid(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[halox.Grid]:
    monkeypatch.setenv("HALOX_NODE", request.param)
    options: dict[str, Any] = {"proc_shape": (1, comm.size), "device": "cpu"}
    with halox.Grid((40, 40 * comm.size), comm=comm.Dup(), periodic=True, **options) as g:
        yield g


@pytest.mark.usually(1)
def test_contents_are_numpy_s(comm: MPI.Intracomm) -> None:
    gaps = np.dtype({"names": ["a", "b"], "formats": ["f8", "f4"], "offsets": [16, 4]})
    with halox.Grid((4, 6), comm=comm, device="cpu") as grid:
        shape = grid.padded_shape
        for dtype in ["S3", "U2", "M8[s]", "m8[D]", "?", "V5", "c8", "f8,S2", gaps]:
            dirty = grid.full(255, "u1", components=(..., np.dtype(dtype).itemsize))
            del dirty  # its memory is used again
            value = np.ones((), dtype)[()]
            assert not any(grid.zeros(dtype).tobytes())
            assert (grid.ones(dtype) == np.ones(shape, dtype)).all()
            assert (grid.full(value, dtype) == np.full(shape, value, dtype)).all()
        assert np.isnan(grid.full(None)).all()
        assert (grid.full([1.0, 2, 3], components=(..., 3)) == [1, 2, 3]).all()


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


@pytest.mark.ranks(2, 3)
def test_room_is_free_again_after_an_error_of_another_rank(grid: halox.Grid) -> None:
    """Twelve MiB in all, without which the last field would need new memory."""
    u = grid.zeros("V96")
    grid.zeros_like(u)  # its memory is used again
    before = mapped_bytes()
    for _ in range(70):
        with pytest.raises(FieldError):
            grid.zeros_like(u, object if grid.rank == 0 else None)
    v = grid.zeros_like(u)
    assert agree(v.shape == u.shape and mapped_bytes() <= before, grid.comm)


def test_without_shared_memory_for_one_rank(
    grid: halox.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of the node then use private memory."""
    before = mapped_bytes()
    if grid.rank == grid.size - 1:
        fill_shared_memory(monkeypatch)
    u = grid.full(grid.rank + 1.0)
    grid.exchange(u)
    assert (u[:, 1:-1] == grid.rank + 1).all() and (u[:, 0] == (grid.rank or grid.size)).all()
    assert mapped_bytes() <= before
