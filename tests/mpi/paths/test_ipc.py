"""Order of the `ipc` path, without a GPU: a check of the recorded work of all ranks' streams together."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, StateError
from halox.paths.base import Job
from halox.paths.fragments import cutter, whole
from halox.paths.ipc import (
    IpcChannel,
    contiguous_places,
    make_ipc_channel,
    one_way_cutter,
)
from halox.paths.messages import Message, Part
from halox.paths.node import NodeLink
from halox.runtime.arena import SharedArena
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.leftovers import Leftovers
from halox.runtime.world import World
from tests.fakes.fake_gpu import FakeArena, FakeGpu, Op, Work, judge, touched, waits
from tests.mpi.conftest import agree, on_first
from tests.mpi.limits import short_waits
from tests.mpi.test_typed import TYPES

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(2)]

ELEMENTS = 130
LARGE = {
    "large": dt.contiguous(4096, "f8"),
    "large columns": dt.vector(512, 8, 9, "f8"),
    "large scattered": dt.indexed_block(8, np.random.default_rng(1).permutation(512) * 9, "f8"),
}
ALL_TYPES = TYPES | LARGE
EPOCHS = 7


@dataclass(frozen=True)
class Wire:
    """One message: source, target, types of its parts at both ends, protocol (``way``) and tag."""

    source: int
    target: int
    sent: tuple[str, ...] = ("vector",)
    received: tuple[str, ...] = ("columns",)
    way: str = "staging"
    tag: int = 0


class Rig:
    """A channel between the ranks on a GPU that runs nothing (`fake_gpu`), and its caller."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        monkeypatch: pytest.MonkeyPatch,
        wires: Sequence[Wire],
        operation: Any = "copy",
        cut: Any = whole,
    ) -> None:
        self.world = World(comm)
        self.shared = SharedArena(self.world.ranks)
        self.gpu = FakeGpu(self.world, self.shared)
        self.gpu.install(monkeypatch)
        self.arena, self.events = FakeArena(self.world), EventPool(0)
        self.wires, self.operation, self.cut = wires, operation, cut
        rank = comm.rank
        self.out = [w for w in wires if w.source == rank]
        self.into = [w for w in wires if w.target == rank]
        # Only arrays that a peer accesses directly are in the arena. All other arrays are private to this rank.
        self.sources = {w: self._arrays(w.sent, w.way != "get") for w in self.out}
        self.targets = {w: self._arrays(w.received, w.way != "put") for w in self.into}
        self.held = {
            w: [np.full(ELEMENTS if n not in LARGE else 5000, -1.0) for n in w.received]
            for w in self.into
        }
        self.random = np.random.default_rng([7, rank])
        self.channel = self.make()

    def _arrays(self, names: Sequence[str], foreign: bool) -> list[Any]:
        sizes = [5000 if name in LARGE else ELEMENTS for name in names]
        return [self.arena.field(n, foreign) for n in sizes]

    def make(self) -> IpcChannel:
        arrays: list[Any] = []

        def message(wire: Wire, direction: Any) -> Message:
            sends = direction == "send"
            found = (self.sources if sends else self.targets)[wire]
            names = wire.sent if sends else wire.received
            parts = []
            for array, name in zip(found, names, strict=True):
                arrays.append(array)
                parts.append(Part(len(arrays) - 1, ALL_TYPES[name]))
            return Message(wire.target if sends else wire.source, direction, tuple(parts), wire.tag)

        sends = [(w, message(w, "send")) for w in self.out]
        receives = [(w, message(w, "receive")) for w in self.into]
        ways: Any = {m.key: w.way for w, m in (*sends, *receives)}
        job = Job(
            arrays,
            tuple(sorted((m for _, m in sends), key=lambda m: (m.peer, m.tag))),
            tuple(sorted((m for _, m in receives), key=lambda m: (m.peer, m.tag))),
            self.operation,
        )
        peers = sorted({m.peer for m in (*job.sends, *job.receives)})
        self.link = NodeLink(self.world, self.shared, [], peers)
        assert not self.link.failed
        made = self.channel_of(job, ways)
        if made is None:
            made = IdleChannel()
        return made

    def channel_of(self, job: Job, ways: Any) -> Any:
        memory: Any = (self.arena, self.events)
        return make_ipc_channel(self.world, job, ways, memory, self.link, self.cut)

    def move(self, offset: int) -> None:
        """Bind the channel to other arrays, at addresses ``offset`` bytes beyond a multiple of 256."""

        def others(found: list[Any]) -> list[Any]:
            fresh = [self.arena.field(one.shape[0] + 32, True) for one in found]
            return [
                replace(one, pointer=other.pointer + offset)
                for one, other in zip(found, fresh, strict=True)
            ]

        self.sources = {w: others(found) for w, found in self.sources.items()}
        self.targets = {w: others(found) for w, found in self.targets.items()}
        found = [*self.sources.values(), *self.targets.values()]
        pointers = [one.pointer for arrays in found for one in arrays]
        if self.channel.is_movable:  # false on a rank without messages
            self.channel.bind(self.channel.views(pointers))

    def pause(self) -> None:
        """Sleep at random, so that ranks run ahead or fall behind."""
        if self.random.random() < 0.4:
            time.sleep(self.random.choice([0.0005, 0.004]))

    def values(self, wire: Wire, part: int, epoch: int) -> np.ndarray:
        """Return the contents of a part's source in an epoch."""
        n = 5000 if wire.sent[part] in LARGE else ELEMENTS
        number = self.wires.index(wire) * 10 + part
        return np.arange(n) + 1e4 * number + 1e7 * (epoch + 1)

    def fill(self, epoch: int) -> None:
        for wire, arrays in self.sources.items():
            for part, array in enumerate(arrays):
                values = self.values(wire, part, epoch)
                target = array.pointer + np.arange(8 * len(values))
                self.gpu.run([("fill", target, values.tobytes())])

    def poison(self) -> None:
        for wire, arrays in self.targets.items():
            for array, values in zip(arrays, self.held[wire], strict=True):
                self.gpu.run([("fill", array.pointer + np.arange(values.nbytes), values.tobytes())])

    def expect(self, epoch: int) -> None:
        """Put a kernel on the stream that asserts this rank's bytes; MPI's own transfer of the types gives them."""
        for wire, arrays in self.targets.items():
            for part, array in enumerate(arrays):
                held = self.held[wire][part]
                came = packed(wire.sent[part], self.values(wire, part, epoch))
                if self.operation == "add":
                    came = packed(wire.received[part], held) + came
                unpack(wire.received[part], came, held)
                self.gpu.run([("expect", array.pointer + np.arange(held.nbytes), held.tobytes())])
        if self.operation == "add":
            for wire, arrays in self.sources.items():
                for part, array in enumerate(arrays):
                    sent = touched((array, ALL_TYPES[wire.sent[part]], 1))
                    self.gpu.run([("expect", sent, bytes(len(sent)))])

    def step(self, epoch: int, fill: bool = True) -> None:
        self.gpu.epoch = epoch
        if fill:
            self.fill(epoch)
        self.pause()
        self.channel.start()
        self.pause()
        self.channel.finish()
        self.expect(epoch if fill else 0)

    def logs(self) -> Any:
        """Return the recorded work of all ranks' streams on rank 0, None elsewhere."""
        return self.world.comm.gather(self.gpu.log)

    def leave(self) -> None:
        """Close the plan on all ranks, then free it."""
        self.channel.close()
        self.world.comm.Barrier()
        self.channel.free()
        self.link.close()

    def close(self) -> None:
        self.leave()
        self.world.comm.Barrier()
        self.shared.close(is_last=True)
        self.world.close()


class IdleChannel(IpcChannel):
    """Channel of a rank without messages."""

    is_movable = False

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def free(self) -> None:
        pass


def packed(name: str, values: np.ndarray) -> np.ndarray:
    made = ALL_TYPES[name].to_mpi()
    buffer = np.empty(ALL_TYPES[name].size // 8)
    MPI.COMM_SELF.Sendrecv([values, 1, made], 0, 0, buffer, 0, 0)
    made.Free()
    return buffer


def unpack(name: str, buffer: np.ndarray, values: np.ndarray) -> None:
    made = ALL_TYPES[name].to_mpi()
    MPI.COMM_SELF.Sendrecv(buffer, 0, 0, [values, 1, made], 0, 0)
    made.Free()


@pytest.fixture
def rig(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(comm, monkeypatch, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ring(way: str, size: int) -> list[Wire]:
    """Messages to both neighbours on a ring; on two ranks these are the same peer."""
    return [
        Wire(r, (r + s) % size, ("contiguous",), ("contiguous",), way, s + 1)
        for r in range(size)
        for s in (-1, 1)
    ]


def chain(
    way: str, size: int, sent: str = "contiguous", received: str = "contiguous"
) -> list[Wire]:
    """Messages from each rank to the next, none in the other direction."""
    return [Wire(r, r + 1, (sent,), (received,), way) for r in range(size - 1)]


def _kinds(op: Op) -> set[str]:
    return {step[0] for step in op.steps}


def judged(logs: Any, comm: MPI.Intracomm) -> None:
    """Check the work of all streams on rank 0, and fail on all ranks."""
    on_first(lambda: judge(logs), comm)


def check_waits(made: Rig, comm: MPI.Intracomm) -> None:
    """Assert that the work is ordered, and that any omitted wait causes a race, which the check would detect."""
    made.poison()
    for epoch in range(EPOCHS):
        made.step(epoch)
    logs = made.logs()
    judged(logs, comm)
    idle, found = [], []
    if logs is not None:
        found = list(waits(logs, range(3, EPOCHS - 2)))
        for wait in found:
            try:
                Work(logs, without=wait).check_order()
            except AssertionError:
                continue
            idle.append(wait)
    assert agree(not idle, comm), idle
    assert agree(comm.rank > 0 or len(found) >= 2 * (comm.size - 1), comm)


@pytest.mark.parametrize("shape", [ring, chain])
@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_every_wait_is_there_and_needed(
    way: str, shape: Any, rig: Callable[..., Rig], comm: MPI.Intracomm
) -> None:
    check_waits(rig(shape(way, comm.size)), comm)


@pytest.mark.parametrize("operation", ["copy", "add"])
def test_moved_to_other_arrays(
    operation: Any, rig: Callable[..., Rig], comm: MPI.Intracomm
) -> None:
    """The channel can be bound to other arrays while an exchange is pending; this exchange keeps its arrays."""
    wires = [
        Wire(a, (a + s) % comm.size, ("vector", "contiguous"), ("columns", "contiguous"), tag=s + 1)
        for a in range(comm.size)
        for s in (-1, 1)
    ]
    made = rig(wires, operation)
    assert made.channel.is_movable
    made.poison()
    for epoch, offset in enumerate((None, 0, 16, 8 * (1 + comm.rank), None, 8, 64)):
        if offset is not None:
            made.move(offset)
            made.held = {
                w: [np.full(len(a), -1.0) for a in found] for w, found in made.held.items()
            }
            made.poison()
        made.step(epoch)
    judged(made.logs(), comm)


def test_arrays_that_peers_reach_stay(rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    for way in ("put", "get"):
        assert not rig(ring(way, comm.size)).channel.is_movable


@pytest.mark.parametrize("number", range(25))
@pytest.mark.part(3)
def test_random_messages(number: int, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """Random messages, types, parts and protocols in one exchange."""
    rng = np.random.default_rng([number, comm.size])
    wires = []
    for tag in range(rng.integers(1, 9)):
        a, b = rng.choice(comm.size, 2, replace=False)
        way = rng.choice(["staging", "staging", "put", "get"])
        parts = rng.integers(1, 4)
        sent, received = (tuple(rng.choice(list(TYPES), parts)) for _ in range(2))
        if way == "get":
            sent = ("contiguous",) * parts
        if way == "put":
            received = ("contiguous",) * parts
        wires.append(Wire(int(a), int(b), sent, received, str(way), tag))
    made = rig(wires)
    made.poison()
    for epoch in range(EPOCHS):
        made.step(epoch)
    judged(made.logs(), comm)


@pytest.mark.parametrize("sent", LARGE)
@pytest.mark.parametrize("received", LARGE)
def test_fragments(sent: str, received: str, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """A large message one way takes several launches; the receiver unpacks each fragment separately."""
    size, rank = comm.size, comm.rank
    wires = [*chain("staging", size, sent, received), Wire(0, 1, tag=5)]
    if size > 2:  # one fragment to a rank that receives eight from another rank
        wires.append(Wire(2, 1, tag=6))
    made = rig(wires, cut=cutter(4096))
    made.poison()
    for epoch in range(4):
        made.step(epoch)
    logs = made.logs()
    first = [op for op in made.gpu.log if op.epoch == 0]
    launches = [op for op in first if op.kind == "kernel" and "fill" not in _kinds(op)]
    launches = [op for op in launches if "expect" not in _kinds(op)]
    came = [op for op in first if op.kind == "wait"]
    packs = 8 if rank < size - 1 else size > 2 and rank == 2
    unpacks = 8 if rank else 0
    assert agree(len(launches) == packs + unpacks, comm)
    assert agree(len(came) == unpacks + (size > 2 and rank == 1), comm)
    judged(logs, comm)


@pytest.mark.parametrize("shape", [ring, chain])
def test_accumulate(shape: Any, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """Several ranks add to the same cells, in order; sent cells are cleared after the packing."""
    made = rig(shape("staging", comm.size), operation="add", cut=cutter(4096))
    made.poison()
    for epoch in range(EPOCHS):
        made.step(epoch)
    judged(made.logs(), comm)


@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_the_caller_changes_streams(way: str, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """An exchange is ordered behind the last exchange, whichever streams start and finish use."""
    made = rig(ring(way, comm.size))
    made.poison()
    made.fill(0)
    for epoch in range(EPOCHS):
        made.gpu.epoch = epoch
        made.channel.start()
        made.gpu.current = made.gpu.streams[made.random.integers(3)]
        made.channel.finish()
        made.expect(0)
    judged(made.logs(), comm)


def test_capture_is_refused_before_anything_happens(
    rig: Callable[..., Rig], comm: MPI.Intracomm
) -> None:
    made = rig(ring("staging", comm.size))
    made.poison()
    made.step(0)
    before = len(made.gpu.log)
    made.gpu.capturing.add(made.gpu.current.ptr)
    with pytest.raises(StateError):
        made.channel.check()
    assert len(made.gpu.log) == before
    made.gpu.capturing.clear()
    made.step(1)
    judged(made.logs(), comm)


@pytest.mark.parametrize("way", ["staging", "put", "get"])
@pytest.mark.part(3)
def test_a_rank_that_does_not_come(way: str, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    made = rig(ring(way, comm.size))
    made.step(0)
    comm.Barrier()
    caught = None
    if comm.rank != 1:
        with short_waits():
            try:
                made.step(1)
            except ExchangeTimeoutError as error:
                caught = str(error)
            made.channel.close()
    named = caught is not None and f"rank {comm.rank} has waited for rank 1" in caught
    assert agree(comm.rank not in (0, 2) or named, comm), caught
    # Memory that peers may still write to is not released.
    assert agree(caught is None or not made.arena.released, comm)
    comm.Barrier()


def test_a_stream_that_does_not_end_keeps_its_memory(
    rig: Callable[..., Rig], comm: MPI.Intracomm
) -> None:
    made = rig(ring("staging", comm.size))
    made.step(0)
    comm.Barrier()
    made.gpu.current.done = False
    with short_waits(0.2):
        made.channel.close()
    assert not made.channel.has_ended and not made.arena.released
    comm.Barrier()


@pytest.mark.parametrize("way", ["staging", "put", "get"])
@pytest.mark.parametrize("started", [False, True])
def test_memory_stays_until_all_have_closed(
    started: bool, way: str, rig: Callable[..., Rig], comm: MPI.Intracomm
) -> None:
    """Memory stays until all ranks have closed; rank 0 closes first, after finish or between start and finish."""
    made = rig(ring(way, comm.size))
    left, array = Leftovers(made.world.ranks), np.zeros(3)
    made.poison()
    made.step(0)
    held = sys.getrefcount(array)
    if started:
        made.channel.start()
    if comm.rank == 0:
        made.channel.close()
        left.add(1, [made.channel], [array] if started else [])
    left.reclaim(made.world.gather(left.closed_plans(), "a test"))
    assert made.arena.released == [] and not made.events._free
    assert agree(sys.getrefcount(array) == held + (started and comm.rank == 0), comm)
    if comm.rank != 0:
        made.channel.close()
        left.add(1, [made.channel], [])
    left.reclaim(made.world.gather(left.closed_plans(), "a test"))
    assert agree(sys.getrefcount(array) == held, comm)
    assert len(made.arena.released) == (way == "staging") and made.events._free
    made.channel = IdleChannel()


def test_plans_grow_nothing(rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """Blocks of memory, opened handles and events do not grow in number while plans are made and closed."""
    made = rig([*ring("staging", comm.size), *ring("put", comm.size)[:0]])
    sizes = []
    for _ in range(6):
        made.step(0)
        made.leave()
        made.channel = made.make()
        sizes.append((len(made.arena.sizes), len(made.arena.opened), made.gpu.made))
    assert len(set(sizes)) == 1


def test_a_failure_on_one_rank_is_raised_on_all(
    rig: Callable[..., Rig], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halox.errors import HaloxError

    made = rig(ring("staging", comm.size))
    made.channel.close()

    def fail(*_: Any) -> None:
        raise MemoryError("no such luck")

    if comm.rank == 1:
        monkeypatch.setattr(made.arena, "allocate", fail)
    with pytest.raises(HaloxError, match=r"\[rank 1\] .*MemoryError: no such luck"):
        made.channel = made.make()
    made.channel = IdleChannel()


def test_contiguous_places(rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    made = rig(ring("staging", comm.size))
    arena: Any = made.arena
    inside, outside = arena.field(ELEMENTS), arena.field(ELEMENTS, foreign=True)

    def places(array: Any, *types: Any) -> Any:
        parts = tuple(Part(0, one) for one in types)
        return contiguous_places(Message(0, "send", parts), [array], arena)

    whole_field, end = TYPES["contiguous"], dt.indexed([5], [100], "f8")
    found = places(inside, whole_field, end)
    assert [p.offset for p in found] == [0, 800] and {p.segment[0] for p in found} == {
        str(comm.rank)
    }
    assert places(outside, whole_field) is None
    assert places(inside, whole_field, TYPES["vector"]) is None
    assert places(inside, dt.contiguous(ELEMENTS + 1, "f8")) is None


def test_only_one_way_traffic_between_two_gpus_is_cut() -> None:
    large = Part(0, dt.contiguous(1 << 20, "f8"))
    there = tuple(Message(peer, "send", (large,)) for peer in (1, 2, 3))
    back = (Message(3, "receive", (large,)),)
    cut = one_way_cutter(Job([], there, back), sharers=(2,), fragment_bytes=1 << 20)
    assert [len(cut(m)) for m in (*there, *back)] == [8, 1, 1, 1]
    cut = one_way_cutter(Job([], there, back, "add"), sharers=())
    assert len(cut(there[0])) == 1
