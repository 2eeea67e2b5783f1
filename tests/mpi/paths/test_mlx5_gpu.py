"""Network adapters between nodes with fields on GPUs, both simulated; each rank has a node, an adapter and a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange
from halox.errors import HaloxError, StateError
from halox.runtime import device_arena
from tests.fakes import fake_verbs
from tests.fakes.fake_cupy import Array, Machine, MappedArena
from tests.fakes.fake_driver import fake_driver
from tests.mpi.conftest import agree
from tests.mpi.paths.test_mlx5_umr import (
    BLOCK,
    BLOCKS,
    PATH,
    check,
    ranks,
    ring,
    taken,
    values,
    wire,
)
from tests.support import require

require("cxx")
require("nvrtc")  # in the same package as the driver's bindings

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]

__all__ = ["ranks", "wire"]  # fixtures


class Event:
    """Event behind the pending work of a stream; the third query runs the work, and finds the event done."""

    work: list[Callable[[], None]]
    asked = 0

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing

    def record(self, stream: Any) -> None:
        type(self).asked = 0

    @property
    def done(self) -> bool:
        type(self).asked += 1
        if self.asked < 3:
            return False
        while self.work:
            self.work.pop(0)()
        return True


class Files:
    """Memory that the driver can export: the blocks of all arenas."""

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        for arena in MappedArena.arenas.values():
            for block in arena._blocks:
                yield block.pointer, block.nbytes, arena._files[block.place.segment[1]]


@pytest.fixture
def machine(ranks: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Simulate a GPU per rank; yield the driver."""
    gpu = Machine(ranks.rank, shared=False)
    gpu.install(monkeypatch)
    sys.modules["cupy"].cuda.Event = Event  # type: ignore[attr-defined]
    Event.work = []
    monkeypatch.setattr(device_arena, "DeviceArena", MappedArena)
    with fake_driver() as fake:
        fake.files = Files()  # type: ignore[assignment]
        fake.gpu = gpu
        yield fake
        fake_verbs.REFUSED.clear()


@pytest.fixture
def field(ranks: MPI.Intracomm, machine: Any) -> Iterator[Callable[[int], Any]]:
    """Yield a function that allocates n bytes by a grid."""
    with halox.Grid((ranks.size,), halo=0, comm=ranks.Dup(), device="gpu") as grid:

        def make(n: int) -> Any:
            return grid.zeros("u1", components=(n,)).reshape(n)

        yield make


@pytest.mark.parametrize("mixed", [False, True], ids=["GPUs", "a GPU and NumPy"])
def test_messages_as_mpi_packs_and_unpacks(
    mixed: bool, wire: Any, field: Any, ranks: MPI.Intracomm
) -> None:
    """Messages carry the values that a pending kernel writes, by calls and by start and finish."""
    sizes = 2 * BLOCK * BLOCKS, 3 * BLOCK * BLOCKS
    on_gpu = not mixed or ranks.rank == 0
    fields = [field(n + 700)[700:] for n in sizes]
    x, y = fields if on_gpu else (np.zeros(n, "u1") for n in sizes)
    into, came = (x.values, y.values) if on_gpu else (x, y)
    came[:] = 0xFF
    with ring(ranks, x, y) as exchange:
        assert taken(exchange, ranks) == {PATH}
        for step in range(4):

            def kernel(step: int = step) -> None:
                into[:] = values(ranks.rank, step)

            if on_gpu:
                Event.work.append(kernel)
            else:
                kernel()
            if step % 2:
                exchange()
            else:
                exchange.start()
                assert bool(Event.work) == on_gpu, "start waits for no stream"
                exchange.finish()
            assert not Event.work
            check(ranks, came, step)


def test_halos_of_grids(wire: Any, machine: Any, ranks: MPI.Intracomm) -> None:
    shape, procs = (4 * ranks.size, 20), (ranks.size, 1)
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 6)
    with halox.Grid(
        shape, periodic=(True, False), proc_shape=procs, comm=ranks, device="gpu", path=PATH
    ) as grid:
        fields = [grid.zeros("f8"), grid.zeros("i2")]
        plan = grid.plan(*fields)
        assert taken(plan, ranks) == {PATH}
        for step in range(3):
            whole = np.arange(np.prod(shape)).reshape(shape) % 1009 + step
            for u in fields:
                u.values[...] = -1
                u.values[1:-1, 1:-1] = whole[grid.owned]
            plan()
            around = np.pad(whole, ((1, 1), (0, 0)), mode="wrap")[rows]
            wanted = np.pad(around, ((0, 0), (1, 1)), constant_values=-1)
            assert agree(all(bool((u.values == wanted).all()) for u in fields), ranks)


@pytest.mark.parametrize("refusing", ["driver", "adapter"])
def test_one_rank_without_dmabufs(
    refusing: str, wire: Any, field: Any, machine: Any, ranks: MPI.Intracomm
) -> None:
    """All ranks raise an error that names the rank and the cause."""
    if ranks.rank == 1:
        machine.has_dmabufs = refusing != "driver"
        fake_verbs.REFUSED[:] = ["all"] if refusing == "adapter" else []
    x, y = field(2 * BLOCK * BLOCKS), field(3 * BLOCK * BLOCKS)
    said = {
        "driver": "rank 1: .* cannot be exported as a dmabuf: .*NOT_SUPPORTED",
        "adapter": "of rank 1 refuses to register .* by dmabuf",
    }[refusing]
    with pytest.raises(HaloxError, match=said):
        ring(ranks, x, y)


def test_an_array_whose_pages_cannot_be_exported(
    wire: Any, field: Any, ranks: MPI.Intracomm
) -> None:
    x, y = field(2 * BLOCK * BLOCKS), field(3 * BLOCK * BLOCKS)
    y = Array(np.zeros(3 * BLOCK * BLOCKS, "u1")) if ranks.rank == 1 else y
    with pytest.raises(
        HaloxError, match=r"rank 1: .* as a dmabuf: .*allocate the field by the grid"
    ):
        ring(ranks, x, y)


def test_captures_are_refused(wire: Any, field: Any, machine: Any, ranks: MPI.Intracomm) -> None:
    x, y = field(2 * BLOCK * BLOCKS), field(3 * BLOCK * BLOCKS)
    with ring(ranks, x, y) as exchange:
        machine.gpu.capturing = True
        with pytest.raises(StateError):
            exchange()
        machine.gpu.capturing = False
        x.values[:], y.values[:] = values(ranks.rank, 1), 0xFF
        exchange()
        check(ranks, y.values, 1)
    assert isinstance(exchange, Exchange)
