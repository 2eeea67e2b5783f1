"""Thousands of simulated ranks: exact exchanges, and errors that name a rank with other arguments or settings."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError, MismatchError, PathError
from tests.calls import calls_of
from tests.fakes.simulated import SimulatedRanks, simulated

CELLS = 8
"""Cells of a block along each axis."""


def make_grid(comm: MPI.Intracomm, torus: Sequence[int], **options: Any) -> halox.Grid:
    """Return a periodic grid of equal blocks on the ranks of the torus."""
    given = {"halo": 1, "periodic": True, "proc_shape": torus, "comm": comm, "device": "cpu"}
    return halox.Grid([CELLS * parts for parts in torus], **(given | options))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("torus", [(5,), (3, 1, 2), (10, 25)])
def test_exchanges_wrap_the_block(torus: tuple[int, ...]) -> None:
    """All blocks have equal contents, so that the halo of a block continues it periodically."""
    with simulated(torus) as comm, make_grid(comm, torus, halo=2) as grid:
        inside = np.random.default_rng(len(torus)).random(grid.rank_shape)
        for u in (grid.zeros(), np.zeros(grid.padded_shape)):
            grid.interior(u)[...] = inside
            for _ in range(2):
                grid.exchange(u)
                assert np.array_equal(u, np.pad(inside, 2, mode="wrap"))
        assert {row.protocol for row in grid.explain(u).rows} <= {"mpi", "copy"}
        assert grid.sum(np.ones_like(u)) == CELLS ** len(torus) * comm.size


@pytest.mark.ranks(1)
@pytest.mark.parametrize("torus", [(65,), (25, 40, 100)])
def test_reductions_of_many_ranks(torus: tuple[int, ...]) -> None:
    """Numbers of equal blocks, and so multiples of the numbers of one block; with partial sums of all sizes."""
    with simulated(torus) as comm, make_grid(comm, torus) as grid:
        u = grid.zeros()
        inside = np.random.default_rng(3).integers(-99, 99, grid.rank_shape) / 4
        grid.interior(u)[...] = inside
        ranks = comm.size
        assert grid.sum(u) == grid.sum(u, reproducible=True) == ranks * inside.sum()
        assert grid.norm(u) == np.sqrt(ranks * (inside**2).sum())
        assert grid.min(u) == inside.min()
        found = grid.reduce({"a": "u + 1", "b": "u"}, {"a": "sum", "b": "max"}, u=u)
        assert list(found.values()) == [ranks * (inside + 1).sum(), inside.max()]
        assert grid.allreduce(np.arange(3)).tolist() == [0, ranks, 2 * ranks]
        with halox.Allreduce(comm, 3, "f8", device="cpu") as reduce:
            assert reduce(np.arange(3.0)).tolist() == [0, ranks, 2 * ranks]


@pytest.mark.ranks(1)
def test_transposes_take_pieces_of_the_block() -> None:
    """Rank -r sends to rank 0 what rank 0 sends to rank r, and so for every rank."""
    n, cells = 6, 4
    options: dict[str, Any] = {"halo": 0, "device": "cpu"}
    shape = (n * cells, n * cells)
    with (
        simulated((n,)) as comm,
        halox.Grid(shape, proc_shape=(n, 1), comm=comm, **options) as rows,
        halox.Grid(shape, proc_shape=(1, n), comm=comm, **options) as columns,
    ):
        u, v = rows.zeros(), columns.zeros()
        u[...] = np.random.default_rng(n).random(u.shape)
        halox.Transpose(rows, columns).forward(u, v)
        pieces = np.split(u, n, axis=1)
        assert np.array_equal(v, np.concatenate([pieces[-rank % n] for rank in range(n)]))


@pytest.mark.ranks(2, 3, 4)
def test_real_ranks_make_the_same_calls(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The simulation leads a rank through the code that it runs among real ranks, each of them a node."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    torus = (comm.size, 1)

    def calls(ranks: MPI.Intracomm) -> Counter[str]:
        make_grid(ranks, torus).close()  # imports and caches
        grids: list[halox.Grid] = []
        found = calls_of(lambda: grids.append(make_grid(ranks, torus)))
        (grid,) = grids
        u = grid.zeros()
        grid.plan(u)
        found += calls_of(lambda: grid.plan(u)) + calls_of(grid.close)
        by_name: Counter[str] = Counter()
        for code, number in found.items():
            if "/halox/" in code.co_filename:
                by_name[code.co_qualname] += number
        return by_name

    # A collection could call finalizers of other tests' objects.
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    own = comm.Dup()  # on which no other test has made a grid
    real = calls(own)
    own.Free()
    del real["load_mpi"]  # replaced in the simulation
    with simulated(torus, [comm.rank]) as ranks:
        assert calls(ranks) == real


TORUS = 16, 16, 16
MODEL, NEAR, ODD = 0, 2183, 2184
"""Played ranks: the model of the images, a neighbour of the rank that differs, and the rank that differs."""


@pytest.fixture
def ranks() -> Iterator[SimulatedRanks]:
    with simulated(TORUS, (MODEL, NEAR, ODD), MPI.COMM_WORLD) as comm:
        yield comm


def raised(action: Callable[[], object], kind: type[HaloxError]) -> str:
    """Return the text of the error that an action raises, the same on all ranks."""
    with pytest.raises(kind) as caught:
        action()
    texts = MPI.COMM_WORLD.allgather(str(caught.value))
    assert texts.count(texts[0]) == len(texts)
    return texts[0]


@pytest.mark.ranks(3)
class TestOneOfManyDiffers:
    """One rank of 4,096; every error names it."""

    def test_halo(self, ranks: SimulatedRanks) -> None:
        halo = 2 if ranks.rank == ODD else 1
        text = raised(lambda: make_grid(ranks, TORUS, halo=halo), MismatchError)
        assert text.startswith(f"[rank {ODD}] halo differs between ranks")

    def test_dtype(self, ranks: SimulatedRanks) -> None:
        dtype = "f4" if ranks.rank == ODD else "f8"
        with make_grid(ranks, TORUS) as grid:
            u = np.zeros(grid.padded_shape, dtype)
            text = raised(lambda: grid.exchange(u), MismatchError)
        assert f"[rank {NEAR}] " in text and f"[rank {ODD}] " in text

    def test_path(self, ranks: SimulatedRanks) -> None:
        path = "staged" if ranks.rank == ODD else None
        with make_grid(ranks, TORUS) as grid:
            u = grid.zeros()
            text = raised(lambda: grid.plan(u, path=path), MismatchError)
        assert "path differs between ranks" in text and "staged" in text

    def test_environment(self, ranks: SimulatedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
        if ranks.rank == ODD:
            monkeypatch.setenv("HALOX_PATH", "perhaps")
        text = raised(lambda: make_grid(ranks, TORUS), PathError)
        assert text.startswith(f"[rank {ODD}] HALOX_PATH")
        if ranks.rank == ODD:
            monkeypatch.setenv("HALOX_TIMEOUT", "soon")
        text = raised(lambda: make_grid(ranks, TORUS), HaloxError)
        assert text.startswith(f"[rank {ODD}] HALOX_TIMEOUT='soon'")

    def test_call(self, ranks: SimulatedRanks) -> None:
        with make_grid(ranks, TORUS) as grid:
            u = grid.zeros()
            text = raised(lambda: grid.sum(u) if ranks.rank == ODD else grid.max(u), MismatchError)
        assert f"rank {ODD}: sum (call" in text and "(4095): max (call" in text

    def test_operation(self, ranks: SimulatedRanks) -> None:
        op = "max" if ranks.rank == ODD else "sum"
        text = raised(lambda: halox.Allreduce(ranks, 4, "f8", op, device="cpu"), MismatchError)
        assert text.startswith(f"[rank {ODD}] op differs between ranks")
