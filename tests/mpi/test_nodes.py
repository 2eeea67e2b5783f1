"""Ranks on several nodes: shared memory within a node, MPI between nodes. tests/test_nodes.py starts the ranks.

``HALOX_TEST_NODES`` gives the expected node of each rank ("0,0,1,1"); without it, a fixture names the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send, datatypes
from halox.cli import links
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.runtime import device_pointers
from halox.runtime.context import Context
from halox.runtime.device_pointers import Verdict
from halox.runtime.world import World
from tests.mpi.conftest import agree
from tests.mpi.limits import SHORT_S, short_waits

pytestmark = pytest.mark.geometry

NODES = os.environ.get("HALOX_TEST_NODES", "")


# Nodes of consecutive ranks, of alternate ranks, and of one rank each; with fewer than four ranks, one layout suffices.
SEVERAL = not NODES and MPI.COMM_WORLD.size > 3
LAYOUTS = ["halves", "turns", "each"] if SEVERAL else ["halves"]


@pytest.fixture(autouse=True, params=LAYOUTS)
def nodes(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, ...]:
    """Return the node of each rank, as started or as named here."""
    if NODES:
        return tuple(map(int, NODES.split(",")))
    ranks = range(comm.size)
    expected = {
        "halves": tuple(rank // max(2, comm.size // 2) for rank in ranks),
        "turns": tuple(rank % 2 for rank in ranks),
        "each": tuple(ranks),
    }[request.param]
    monkeypatch.setenv("HALOX_NODE", f"name of {expected[comm.rank]}")
    return expected


def test_who_is_where(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> None:
    world = World(comm)
    assert world.nodes == nodes
    mates = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
    assert [*world.node_ranks] == mates and world.node_size == world.node_comm.size == len(mates)
    assert world.node_rank == mates.index(comm.rank)
    assert world.machine_rank >= world.node_rank
    world.close()


@pytest.mark.ranks(4, 6, 8)
def test_names_that_cross(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any ranks may share a name; "rank" on one rank makes only this rank a node."""
    if NODES:
        return
    names = {0: "a", 1: "b", 2: "a", 3: "rank"}
    monkeypatch.setenv("HALOX_NODE", names.get(comm.rank, ""))
    world = World(comm)
    assert world.nodes[:4] == (0, 1, 0, 2)
    assert set(world.nodes[4:]) <= {3}
    assert world.machine_rank == comm.rank
    world.close()


def step_of(u: np.ndarray) -> np.ndarray:
    """Make a step in integers, so that the order of the additions does not matter."""
    total = sum(np.roll(u, s, axis) for axis in range(3) for s in (-1, 1))
    return (3 * u + total) % 10007


def test_periodic_steps_equal_the_serial_ones(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> None:
    shape = (18, 20, 22)
    i, j, k = np.indices(shape)
    serial = (i * 31 + j * 17 + k * 7 + i * j * k) % 10007
    with halox.Grid(shape, periodic=True, comm=comm, device="cpu") as grid:
        u, other = grid.zeros("i8"), grid.zeros("i8")
        grid.interior(u)[...] = serial[grid.owned]
        for _ in range(8):
            grid.exchange(u)
            total = sum(
                u[tuple(slice(1 + d, n - 1 + d) for d, n in zip(offset, u.shape, strict=True))]
                for offset in product((-1, 0, 1), repeat=3)
                if sum(map(abs, offset)) == 1
            )
            grid.interior(other)[...] = (3 * grid.interior(u) + total) % 10007
            u, other = other, u
            serial = step_of(serial)
        assert agree(np.array_equal(grid.interior(u), serial[grid.owned]), comm)
        for row in grid.explain(u).rows:
            near = nodes[row.peer] == nodes[comm.rank]
            wanted = (
                {"copy"} if row.peer == comm.rank else {"shared", "direct"} if near else {"mpi"}
            )
            assert row.protocol in wanted, row


def test_accumulate_equals_the_serial_one(comm: MPI.Intracomm) -> None:
    shape = (12, 13, 14)
    with halox.Grid(shape, periodic=True, comm=comm, device="cpu") as grid:
        u = grid.zeros("i8")
        u[...] = np.random.default_rng(comm.rank).integers(1, 100, u.shape)
        at = np.meshgrid(
            *(
                np.arange(own.start - 1, own.stop + 1) % n
                for own, n in zip(grid.owned, shape, strict=True)
            ),
            indexing="ij",
        )
        mine = np.zeros(shape, "i8")
        np.add.at(mine, tuple(at), u)
        serial = np.empty_like(mine)
        comm.Allreduce(mine, serial)
        grid.accumulate(u)
        assert agree(np.array_equal(grid.interior(u), serial[grid.owned]), comm)


@pytest.mark.parametrize("nbytes", [48, 3 << 20])
def test_typed_messages_between_all(nbytes: int, comm: MPI.Intracomm) -> None:
    """Every rank sends every second element of an array to every rank, compared with Alltoall."""
    n, size = nbytes // 8, comm.size
    n = n // size if n > size else n
    source = np.arange(2.0 * n * size) + 1e7 * comm.rank
    target, wanted = np.full((size, n), -1.0), np.empty((size, n))
    sends = [Send(source[2 * n * r :], datatypes.vector(n, 1, 2, "f8"), r) for r in range(size)]
    receives = [Recv(target[r], datatypes.contiguous(n, "f8"), r) for r in range(size)]
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(3):
            source += step
            comm.Alltoall(np.ascontiguousarray(source[::2]), wanted)
            target[...] = -1
            comm.Barrier()
            exchange()
            assert agree(np.array_equal(target, wanted), comm), step
            comm.Barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_stays_away_is_named(comm: MPI.Intracomm) -> None:
    """The last rank makes no exchange; the error of its neighbour names it."""
    size, last = comm.size, comm.size - 1
    # Neighbours in the order of their ranks, on any nodes.
    grid = halox.Grid(
        (4 * size, 6), proc_shape=(size, 1), comm=comm.Dup(), device="cpu", placement=False
    )
    u = grid.zeros()
    grid.exchange(u)
    if comm.rank == last - 1:
        text = rf"rank {comm.rank} has waited .*\b{last}\b"
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            grid.exchange(u)
    elif comm.rank != last:
        # The neighbour may have timed out, too.
        with short_waits(3 * SHORT_S), contextlib.suppress(ExchangeTimeoutError):
            grid.exchange(u)
    comm.Barrier()


def test_transposes_between_nodes(comm: MPI.Intracomm) -> None:
    shape = (8, 10, 12)
    rows = halox.Grid(shape, halo=0, proc_shape=(comm.size, 1, 1), comm=comm, device="cpu")
    columns = halox.Grid(shape, halo=0, proc_shape=(1, 1, comm.size), comm=comm, device="cpu")
    whole = np.arange(8 * 10 * 12.0).reshape(shape)
    u, v = rows.zeros(), columns.zeros()
    u[...] = whole[rows.owned]
    turn = halox.Transpose(rows, columns)
    turn.forward(u, v)
    assert agree(np.array_equal(v, whole[columns.owned]), comm)
    u[...] = 0
    turn.backward(v, u)
    assert agree(np.array_equal(u, whole[rows.owned]), comm)
    for item in (turn, columns, rows):
        item.close()


def test_all_nodes_must_take_device_pointers(
    comm: MPI.Intracomm, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank per node checks, and a refusal on one node holds for all nodes."""
    asked: list[int] = []
    refusing = max(nodes)

    def ask(device: int, **_: Any) -> Verdict:
        asked.append(device)
        return Verdict(nodes[comm.rank] != refusing, f"found on node {nodes[comm.rank]}")

    monkeypatch.setattr(device_pointers, "asked_before", ask)
    monkeypatch.delenv("HALOX_CUDA_AWARE", raising=False)
    world = World(comm)
    found = device_pointers.find_out(world, device=0)
    assert not found.takes and f"found on node {refusing}" in found.reason
    assert comm.allgather(found) == [found] * comm.size
    assert asked == ([0] if world.node_rank == 0 else [])
    refusing = -1
    assert device_pointers.find_out(world, device=0).takes
    assert not device_pointers.find_out(world, device=None).takes, "no GPU at all"
    # A setting on one rank holds for all ranks; an invalid setting on one rank is an error on all.
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("HALOX_CUDA_AWARE", "0")
    assert not device_pointers.find_out(world, device=0).takes
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("HALOX_CUDA_AWARE", "perhaps")
    with pytest.raises(HaloxError, match="'perhaps'"):
        device_pointers.find_out(world, device=0)
    world.close()


@pytest.mark.ranks(2, 4)
def test_check_of_links(
    comm: MPI.Intracomm,
    nodes: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Any network is slow beside an adapter of a terabyte a second, which /sys claims here."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("8000 Gb/sec (4X)\n")
    monkeypatch.setattr(links, "_MOST_BYTES", 1 << 20)
    status = links.show(comm, as_json=True, root=tmp_path)
    said = capsys.readouterr().out
    assert comm.allgather(status) == [status] * comm.size
    if comm.rank > 0:
        assert said == ""
        return
    figures = json.loads(said)
    rows = {row["link"]: row for row in figures["rows"]}
    assert figures["ranks"] == comm.size and not figures["cut_short"]
    is_several = len(set(nodes)) > 1
    assert ("network" in rows) == is_several
    assert ("shared memory" in rows) == (len(set(nodes)) < comm.size)
    assert all(row["slowest_GB/s"] > 0 and row["by"].count("/") == 1 for row in rows.values())
    named = [line for line in figures["findings"] if "mlx5_0 port 1" in line]
    assert len(named) == is_several
    if is_several:
        assert rows["network"]["expected_GB/s"] == 1000 and rows["network"]["ratio"] < 1 / 3
        assert named[0].startswith(("TCP in place of RDMA, ranks ", "unused adapter, ranks "))
        assert status == 1


def test_a_failed_exchange_leaves_no_memory(comm: MPI.Intracomm) -> None:
    """Memory allocated before the error is freed, on all ranks together."""
    for error in HaloxError("on all ranks"), ExchangeTimeoutError("on this rank"):
        world = World(comm)
        around = Context(world)
        block = around.arena.allocate(1000)
        assert (block is not None) == (world.node_size > 1)
        assert around.arena.segments == (block is not None)
        comm.Barrier()
        around.close_after(error)
        is_common = type(error) is HaloxError or comm.size == 1
        assert world.closed == is_common and bool(world.failed) != is_common
        assert around.arena.segments == (block is not None and not is_common)
