"""Grids on Cartesian communicators of MPI, and on other communicators with a topology."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError, HaloxError, MismatchError

pytestmark = pytest.mark.usually(2, 4)

World = MPI.Intracomm


@contextmanager
def cartesian(comm: World, dims: tuple[int, ...], *periods: bool) -> Iterator[MPI.Cartcomm]:
    """Make a Cartesian communicator of ranks in reverse order, which MPI may reorder; MPI chooses dims that are 0."""
    reverse = comm.Split(0, comm.size - comm.rank)
    cart = reverse.Create_cart(MPI.Compute_dims(comm.size, list(dims)), periods, reorder=True)
    yield cart
    cart.Free()
    reverse.Free()


def sendrecv(cart: MPI.Cartcomm, u: np.ndarray) -> None:
    """Exchange the faces of a field with a halo of one cell, axis by axis, by MPI."""
    for axis in range(u.ndim):
        u_t = u.swapaxes(0, axis)
        below, above = cart.Shift(axis, 1)
        for dest, source, sent, received in ((above, below, -2, 0), (below, above, 1, -1)):
            packed = np.ascontiguousarray(u_t[sent])
            arrived = np.array(u_t[received])
            cart.Sendrecv(packed, dest, recvbuf=arrived, source=source)
            u_t[received] = arrived


@pytest.mark.parametrize(
    ("dims", "periods"), [((0, 0), (True, False)), ((0, 1), (True, True)), ((1, 0), (False, False))]
)
def test_neighbours_are_those_of_mpi(
    dims: tuple[int, ...], periods: tuple[bool, bool], comm: World
) -> None:
    with (
        cartesian(comm, dims, *periods) as cart,
        halox.Grid((7 + comm.size, 9 + comm.size), comm=cart, device="cpu") as grid,
    ):
        assert grid.proc_shape == tuple(cart.dims)
        assert grid.periodic == periods
        assert grid.proc_coords == tuple(cart.coords)
        decomposition = grid.domain.decomposition
        for rank in range(cart.size):
            assert list(decomposition.coords_of(rank)) == cart.Get_coords(rank)
        for axis in range(2):
            for side, peer in zip((-1, 1), cart.Shift(axis, 1), strict=True):
                there = [c + side * (n == axis) for n, c in enumerate(grid.proc_coords)]
                expected = decomposition.rank_at(there)
                assert peer == (MPI.PROC_NULL if expected is None else expected)
        u = grid.full(-1.0)
        cells = np.arange(float(np.prod(grid.rank_shape))).reshape(grid.rank_shape)
        grid.interior(u)[...] = 1000 * cart.rank + cells
        wanted = u.copy()
        sendrecv(cart, wanted)
        grid.exchange(u)
        faces = np.zeros(u.shape, bool)
        faces[1:-1, :] = faces[:, 1:-1] = True
        assert np.array_equal(u[faces], wanted[faces])


@pytest.mark.parametrize(
    "given",
    [
        {"periodic": (1, 0)},
        {"proc_shape": (0, 1), "placement": True},
        {"blocks": (None, (6,)), "periodic": (True, False)},
    ],
)
def test_arguments_that_agree(given: dict[str, Any], comm: World) -> None:
    with (
        cartesian(comm, (0, 1), True, False) as cart,
        halox.Grid((4 * comm.size, 6), comm=cart, device="cpu", **given) as grid,
    ):
        assert grid.proc_shape == (comm.size, 1)
        assert grid.periodic == (True, False)


def test_boundaries(comm: World) -> None:
    """Boundaries agree with the communicator's walls, or are refused."""
    options: dict[str, Any] = {"grid_shape": (4 * comm.size, 6), "device": "cpu"}
    with cartesian(comm, (0, 1), True, False) as cart:
        with halox.Grid(comm=cart, boundary=("periodic", "edge"), **options) as grid:
            assert grid.periodic == (True, False)
        with pytest.raises(DecompositionError):
            halox.Grid(comm=cart, boundary=(None, "periodic"), **options)


def test_a_contradiction_on_one_rank(comm: World) -> None:
    shape = (4 * comm.size, 6)
    with cartesian(comm, (0, 1), True, False) as cart:
        periodic = True if comm.rank == 0 else None
        with pytest.raises(DecompositionError):
            halox.Grid(shape, comm=cart, periodic=periodic, device="cpu")
        if comm.size > 1:
            other = MPI.Intracomm(cart) if comm.rank == 0 else cart
            with pytest.raises(MismatchError):
                halox.Grid(shape, comm=other, proc_shape=(0, 1), device="cpu")


@pytest.mark.parametrize("dims", [(0,), (0, 1, 1)])
def test_another_number_of_axes(dims: tuple[int, ...], comm: World) -> None:
    with (
        cartesian(comm, dims, *[False for _ in dims]) as cart,
        pytest.raises(DecompositionError),
    ):
        halox.Grid((4 * comm.size, 6), comm=cart, device="cpu")


@pytest.mark.usually(2)
def test_no_axes(comm: World) -> None:
    cart = MPI.COMM_SELF.Create_cart([])
    with pytest.raises(DecompositionError):
        halox.Grid(8, comm=cart, device="cpu")
    cart.Free()


def test_the_topology_can_be_ignored(comm: World) -> None:
    """Grids with and without the topology have the same ranks for a transpose; the private duplicate has none."""
    shape = (4 * comm.size, 4 * comm.size)
    options: dict[str, Any] = {"proc_shape": (1, comm.size), "periodic": True, "device": "cpu"}
    with (
        cartesian(comm, (0, 1), False, False) as cart,
        halox.Grid(shape, comm=cart, device="cpu") as grid,
        halox.Grid(shape, comm=MPI.Intracomm(cart), **options) as other,
        halox.Transpose(grid, other) as transpose,
    ):
        assert other.proc_shape == (1, comm.size)
        u, v = grid.ones(), other.zeros()
        transpose.forward(u, v)
        assert other.sum(v) == np.prod(shape)
        with halox.Grid(shape, comm=grid.comm, **options) as third:
            assert third.proc_shape == (1, comm.size)


def test_rows_of_a_cartesian_communicator(comm: World) -> None:
    with cartesian(comm, (0, 0), False, True) as cart:
        row = cart.Sub([False, True])
        with halox.Grid(3 * row.size, comm=row, device="cpu") as grid:
            assert grid.periodic == (True,)
            assert grid.proc_coords == (cart.coords[1],)
        row.Free()


def test_graphs_are_plain_communicators(comm: World) -> None:
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    after = [(rank + 1) % comm.size for rank in range(comm.size)]
    graph = comm.Create_graph(list(range(1, comm.size + 1)), after)
    adjacent = comm.Create_dist_graph_adjacent([low], [high])
    for topology in (graph, adjacent):
        with halox.Grid((2 * comm.size, 6), comm=topology, periodic=True, device="cpu") as grid:
            u = grid.full(-1.0)
            grid.interior(u)[...] = 1
            grid.exchange(u)
            assert (u == 1).all()
        topology.Free()


def test_a_freed_cartesian_communicator(comm: World) -> None:
    cart = comm.Create_cart((comm.size,))
    cart.Free()
    with pytest.raises(HaloxError, match="COMM_NULL"):
        halox.Grid(4 * comm.size, comm=cart, device="cpu")


def test_ranks_of_several_nodes_keep_their_coordinates(
    comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks stay in rank order where halox would otherwise place the ranks of each node together."""
    monkeypatch.setenv("HALOX_NODE", str(comm.rank % 2))
    cart = comm.Create_cart((comm.size, 1))
    with halox.Grid((16, 16), comm=cart, device="cpu", placement=True) as grid:
        assert grid.proc_coords == tuple(cart.coords)
    if comm.size == 4:
        plain, proc_shape = MPI.Intracomm(cart), (comm.size, 1)
        with halox.Grid((16, 16), comm=plain, proc_shape=proc_shape, device="cpu") as grid:
            assert comm.allgather(grid.proc_coords) == [(0, 0), (2, 0), (1, 0), (3, 0)]
    cart.Free()
