"""Order of reductions up a tree, without a GPU: a check of the recorded work of all ranks' streams together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import ExchangeTimeoutError, StateError
from halox.reductions.device import tree_reduction as tree_allreduce
from halox.reductions.device.tree_reduction import children, make_tree_reduction
from halox.runtime.arena import SharedArena
from halox.runtime.gpu import cuda
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.world import World
from tests.fakes.cpu_allreduce import AtOnce
from tests.fakes.fake_gpu import FakeArena, FakeGpu, Work, judge, waits
from tests.mpi.conftest import on_first
from tests.mpi.limits import short_waits

pytestmark = [pytest.mark.ranks(2, 3, 4, 6, 8), pytest.mark.geometry]

ELEMENTS, EPOCHS = 50, 7
NBYTES = 8 * ELEMENTS
SHAPES: list[Any] = ["shared_buffer", "binomial"]


class FakeArrayKernels:
    """Records the work that a stream is given."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def combine_launch(self, total: int, first: int, value: int) -> Callable[[int], None]:
        assert first == total
        step = ("add", value + np.arange(NBYTES), total + np.arange(NBYTES), "f8")
        return lambda stream: self.gpu.run([step], stream)

    def copy(self, target: int, source: int, stream: int) -> None:
        self.gpu.run([("copy", source + np.arange(NBYTES), target + np.arange(NBYTES))], stream)


class Rig:
    """A reduction between the ranks on a GPU that runs nothing (`fake_gpu`)."""

    def __init__(self, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
        self.world = World(comm)
        self.shared = SharedArena(self.world.ranks)
        self.gpu = FakeGpu(self.world, self.shared)
        self.gpu.install(monkeypatch)
        monkeypatch.setattr(tree_allreduce, "cupy", cuda.cupy)
        monkeypatch.setattr(tree_allreduce, "StreamOrder", AtOnce)
        self.shape = shape
        self.arena, self.events = FakeArena(self.world), EventPool(0)
        self.source, self.target = (self.arena.field(ELEMENTS, True) for _ in range(2))
        self.random = np.random.default_rng([5, comm.rank])
        memory: Any = (self.arena, self.events, self.shared)
        self.reduction = make_tree_reduction(
            self.world, memory, shape, NBYTES, lambda: FakeArrayKernels(self.gpu)
        )

    def pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.choice([0.0005, 0.004]))

    def step(self, epoch: int, *, in_place: bool = False) -> None:
        """Fill, reduce, and put a kernel on the stream that asserts the result."""
        self.gpu.epoch = epoch
        self.pause()
        values = [sample(rank, epoch) for rank in range(self.world.size)]
        self._run("fill", self.source, values[self.world.rank])
        self.pause()
        target = self.source if in_place else self.target
        self.reduction(self.source.pointer, target.pointer)
        self._run("expect", target, wanted(self.shape, values))

    def _run(self, kind: str, array: Any, values: np.ndarray) -> None:
        self.gpu.run([(kind, array.pointer + np.arange(NBYTES), values.tobytes())])

    def logs(self) -> Any:
        return self.world.comm.gather(self.gpu.log)


def sample(rank: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((rank, epoch)).normal(size=ELEMENTS)


def wanted(shape: str, values: list[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of the tree, computed pair by pair, without the tree's own `children`."""
    if shape == "shared_buffer":
        total = values[0].copy()
        for value in values[1:]:
            total = total + value
        return total
    level = list(values)
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


@pytest.fixture(params=SHAPES)
def rig(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    made = Rig(comm, monkeypatch, request.param)
    yield made
    made.reduction.close()
    comm.Barrier()
    made.shared.close(is_last=True)
    made.world.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_order_and_results(rig: Rig, in_place: bool, comm: MPI.Intracomm) -> None:
    for epoch in range(EPOCHS):
        rig.step(epoch, in_place=in_place)
    logs = rig.logs()
    on_first(lambda: judge(logs), comm)


def test_every_wait_is_needed(rig: Rig, comm: MPI.Intracomm) -> None:
    """The check detects a race after the omission of any single wait."""
    for epoch in range(EPOCHS):
        rig.step(epoch)
    logs = rig.logs()

    def check() -> None:
        left = list(waits(logs, range(2, 4)))
        assert len(left) == 2 * 2 * (comm.size - 1)
        for one in left:
            with pytest.raises(AssertionError, match="race between"):
                Work(logs, without=one).check_order()

    on_first(check, comm)


def test_another_stream_each_time(rig: Rig, comm: MPI.Intracomm) -> None:
    for epoch in range(EPOCHS):
        last, rig.gpu.current = rig.gpu.current, rig.gpu.streams[epoch % 3]
        if last is not rig.gpu.current:  # the caller must order its kernels on the two streams
            event = rig.gpu.make_event()
            rig.gpu.record(event, last.ptr)
            rig.gpu.wait(rig.gpu.current.ptr, event)
        rig.step(epoch)
    logs = rig.logs()
    on_first(lambda: judge(logs), comm)


def test_a_capture_is_refused(rig: Rig) -> None:
    rig.gpu.capturing.add(rig.gpu.current.ptr)
    with pytest.raises(StateError):
        rig.reduction(rig.source.pointer, rig.target.pointer)
    rig.gpu.capturing.clear()
    rig.step(0)


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_does_not_come(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(comm.Dup(), monkeypatch, "binomial")
    rig.step(0)
    if comm.rank != comm.size - 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            rig.step(1)
    comm.Barrier()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16, 17])
def test_trees_reach_every_rank_once(shape: Any, ranks: int) -> None:
    found = [child for rank in range(ranks) for child in children(shape, rank, ranks)]
    assert sorted(found) == list(range(1, ranks))
    assert all(child > rank for rank in range(ranks) for child in children(shape, rank, ranks))
    steps = max(len(children(shape, rank, ranks)) for rank in range(ranks))
    assert steps == (ranks - 1 if shape == "shared_buffer" else (ranks - 1).bit_length())
