"""Order of the copy engine's channel, without a GPU: a check of the recorded work of all ranks' streams together."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import ExchangeTimeoutError, StateError
from halox.packing.copy_boxes import Blocks
from halox.paths.base import Job
from halox.paths.scatter_gather import copy_channel, copy_engine, graph_flags
from halox.paths.scatter_gather.agreement import make_with_peers
from halox.paths.scatter_gather.copy_channel import CopyChannel
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.keys import Keys
from halox.runtime.gpu.pools import Pool
from halox.runtime.leftovers import Leftovers
from tests.fakes.fake_gpu import AREA, FakeEvent, FakeStream
from tests.mpi.conftest import agree, on_first
from tests.mpi.limits import short_waits
from tests.mpi.paths.test_ipc import EPOCHS, Rig, Wire, chain, check_waits, judged, ring
from tests.mpi.paths.word_order import WordWork
from tests.mpi.test_typed import TYPES

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(3)]


class CopyRig(Rig):
    """A copy channel on a GPU that runs nothing (`fake_gpu`), and its caller.

    ``refused`` is the reason why the driver cannot capture, None if it can.
    """

    refused: str | None = None

    def __init__(self, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
        monkeypatch.setattr(copy_engine, "PreparedCopies", self.prepared)
        monkeypatch.setattr(copy_channel, "SIDE_STREAMS", Pool(self.side_stream))
        monkeypatch.setattr(copy_channel, "why_not_captured", lambda device: self.refused)
        monkeypatch.setattr(graph_flags, "PreparedWords", lambda *a: self.gpu.words(*a))
        self.keys: Keys | None = None
        self.mapped = 0
        super().__init__(comm, monkeypatch, *args)

    def side_stream(self, device: int) -> Any:
        """Return a stream for the channel alone, listed after the streams of the caller."""
        self.gpu.streams.append(FakeStream(self.gpu, 100 + len(self.gpu.streams)))
        before, after = FakeEvent(self.gpu), FakeEvent(self.gpu)
        return SimpleNamespace(stream=self.gpu.streams[-1], before=before, after=after)

    def map(self, key: Any, window: Any) -> None:
        self.mapped += 1
        key.window = window

    def prepared(self, blocks: Blocks, device: int) -> Any:
        source, target = (
            np.concatenate(
                [at + np.arange(n) for at, n in zip(starts, blocks.lengths, strict=True)]
            )
            for starts in (blocks.source, blocks.target)
        )
        areas = source // AREA * (1 << 20) + target // AREA
        steps = [("copy", source[areas == a], target[areas == a]) for a in np.unique(areas)]
        made = self.gpu.launch(steps)
        return SimpleNamespace(launch=made.launch, calls=1)

    def capture(self, form: str = "run") -> list[Any]:
        """Capture an exchange in a graph, as a call of the plan or as start and finish."""
        self.gpu.begin_capture()
        self.channel.check()
        if form == "run":
            self.channel.run()
        else:
            self.channel.start()
            self.channel.check()
        self.channel.finish()
        graph = self.gpu.end_capture()
        self.channel.check()
        return graph

    def replay(self, graph: list[Any], epoch: int) -> None:
        """Make a step by a replay of a graph, without a wait of the host."""
        self.gpu.epoch = epoch
        self.fill(epoch)
        self.gpu.replay(graph)
        self.expect(epoch)

    def channel_of(self, job: Job, ways: Any) -> Any:
        if self.keys is None:
            arena: Any = self.arena
            self.engine = CopyEngine(arena)
            self.engine.map = self.map  # type: ignore[method-assign]
            self.keys = Keys(self.engine)
        engine = self.keys, self.engine, self.events
        return make_with_peers(self.world, lambda: CopyChannel(job, ways, *engine, self.link), job)


@pytest.fixture
def rig(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CopyRig]]:
    made = []

    def make(*args: Any) -> CopyRig:
        made.append(CopyRig(comm, monkeypatch, *args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def mixed(size: int) -> list[Wire]:
    """Messages to both neighbours, with different types at each end; put to the lower one, get to the higher one."""
    return [
        Wire(r, (r + s) % size, ("columns", "vector"), ("vector", "scattered"), way, s + 1)
        for r in range(size)
        for s, way in ((-1, "put"), (1, "get"))
    ]


SHAPES = {
    "put": lambda n: ring("put", n),
    "get": lambda n: ring("get", n),
    "put one way": lambda n: chain("put", n, "vector", "columns"),
    "get one way": lambda n: chain("get", n, "triangle", "columns"),
    "mixed": mixed,
}
shapes = pytest.mark.parametrize("shape", SHAPES)
forms = pytest.mark.parametrize("form", ["run", "start and finish"])


@pytest.mark.parametrize(
    "wires",
    SHAPES.values(),
    ids=SHAPES,
)
@pytest.mark.part(2)
def test_every_wait_is_there_and_needed(
    wires: Any, rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    check_waits(rig(wires(comm.size)), comm)


@pytest.mark.parametrize("number", range(15))
@pytest.mark.part(3)
def test_random_messages(number: int, rig: Callable[..., CopyRig], comm: MPI.Intracomm) -> None:
    """Random messages, types and numbers of parts in one exchange."""
    rng = np.random.default_rng([number, comm.size])
    wires = []
    for tag in range(rng.integers(1, 9)):
        a, b = rng.choice(comm.size, 2, replace=False)
        parts = rng.integers(1, 4)
        sent, received = (tuple(rng.choice(list(TYPES), parts)) for _ in range(2))
        wires.append(Wire(int(a), int(b), sent, received, str(rng.choice(["put", "get"])), tag))
    made = rig(wires)
    made.poison()
    for epoch in range(4):
        made.step(epoch)
    judged(made.logs(), comm)


def test_the_caller_changes_streams(rig: Callable[..., CopyRig], comm: MPI.Intracomm) -> None:
    made = rig(mixed(comm.size))
    made.poison()
    made.fill(0)
    for epoch in range(EPOCHS):
        made.gpu.epoch = epoch
        made.channel.start()
        made.gpu.current = made.gpu.streams[made.random.integers(3)]
        made.channel.finish()
        made.expect(0)
    judged(made.logs(), comm)


def test_two_plans_are_finished_in_any_order(
    rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    """Ranks finish two plans in different orders: a rank that waits in one plan also progresses the other plan."""
    with short_waits(20):
        made = rig(mixed(comm.size))
        links = [made.link]
        plans = [(made.channel, made.sources, made.targets, made.held)]
        made.sources = {w: made._arrays(w.sent, w.way != "get") for w in made.out}
        made.targets = {w: made._arrays(w.received, w.way != "put") for w in made.into}
        made.held = {w: [a.copy() for a in held] for w, held in made.held.items()}
        plans.append((made.make(), made.sources, made.targets, made.held))
        links.append(made.link)

        def each(call: Callable[..., None], *args: Any) -> None:
            for _, made.sources, made.targets, made.held in plans:
                call(*args)

        each(made.poison)
        for epoch in range(EPOCHS):
            made.gpu.epoch = epoch
            each(made.fill, epoch)
            for channel, *_ in plans:
                channel.start()
                made.pause()
            for channel, *_ in plans if (epoch + comm.rank) % 2 else plans[::-1]:
                channel.finish()
            each(made.expect, epoch)
        judged(made.logs(), comm)
        plans[1][0].close()
        comm.Barrier()
        plans[1][0].free()
        made.link = links[0]


@pytest.mark.parametrize("shape", ["mixed", "get one way"])
def test_more_blocks_than_a_key_holds(
    shape: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message then needs several windows, in normal exchanges and in replays."""
    few = dataclasses.replace(CopyEngine.limits, entries=4)
    monkeypatch.setattr(CopyEngine, "limits", few)
    made = rig(SHAPES[shape](comm.size))
    steps_of(made, [made.capture()], "ngng")
    assert made.keys is not None
    windows = [len(found.windows) for found in made.keys._local.values()]
    assert agree(min(windows) > 1, comm), windows
    logs = made.logs()
    on_first(lambda: WordWork(logs).run(0), comm)


def test_plans_use_the_same_keys(rig: Callable[..., CopyRig], comm: MPI.Intracomm) -> None:
    """Later plans of the same arrays map no window, receive no key and create no event."""
    made = rig(mixed(comm.size))
    assert made.keys is not None
    counts = []
    for _ in range(4):
        made.step(0)
        made.leave()
        made.channel = made.make()
        counts.append((made.mapped, len(made.keys._remote), made.gpu.made))
    assert agree(len(set(counts)) == 1 and counts[0][0] == 4, comm), counts


def steps_of(made: CopyRig, graphs: list[Any], order: str) -> None:
    """Make a step per letter of ``order``: n for a normal exchange, g for the first graph, h for the second."""
    made.poison()
    for epoch, letter in enumerate(order):
        if letter == "n":
            made.channel.check()
            made.step(epoch)
        else:
            made.replay(graphs[ord(letter) - ord("g")], epoch)


@forms
@shapes
@pytest.mark.part(3)
def test_replays_and_normal_exchanges(
    shape: str, form: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    """Values are right in several random orders, also if all streams of a GPU share one hardware queue."""
    made = rig(SHAPES[shape](comm.size))
    other = "run" if form != "run" else "start and finish"
    graphs = [made.capture(form), made.capture(other)]
    steps_of(made, graphs, "gggnghghnngg")

    def judged_words(logs: Any) -> None:
        for one_queue in (False, True):
            work = WordWork(logs, one_queue=one_queue)
            for seed in range(4):
                work.run(seed)

    logs = made.logs()
    on_first(lambda: judged_words(logs), comm)


@forms
@pytest.mark.parametrize("shape", ["put", "get one way", "mixed"])
def test_no_order_of_a_graph_is_stuck(
    shape: str, form: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    """No order of the words deadlocks: in three replays and a normal exchange, on four ranks in two replays."""
    made = rig(SHAPES[shape](comm.size))
    steps_of(made, [made.capture(form)], "ggng" if comm.size < 4 else "gg")

    def explored(logs: Any) -> None:
        for one_queue in (False, True):
            assert WordWork(logs, one_queue=one_queue).explore() > 10

    logs = made.logs()
    on_first(lambda: explored(logs), comm)


@shapes
@pytest.mark.part(2)
def test_every_word_is_needed(shape: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm) -> None:
    """The check fails if any single wait or write of a replay is omitted."""
    made = rig(SHAPES[shape](comm.size))
    steps_of(made, [made.capture()], "gggg")

    def all_needed(logs: Any) -> None:
        idle = []
        found = [
            (rank, at, step)
            for rank, log in enumerate(logs)
            for at, op in enumerate(log)
            if op.kind == "words" and op.epoch == 1
            for step in range(len(op.steps))
        ]
        assert len(found) >= 6 * (len(logs) - 1)
        for without in found:
            work = WordWork(logs, without)
            try:
                for seed in range(3):
                    work.run(seed)
            except AssertionError:
                continue
            idle.append(without)
        assert not idle, idle

    logs = made.logs()
    on_first(lambda: all_needed(logs), comm)


def test_a_graph_holds_copies_and_words_alone(
    rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    """A graph has no interprocess event, which the driver cannot capture; the host waits for no rank."""
    made = rig(mixed(comm.size))
    if comm.rank == 0:  # the others have not begun
        graph = made.capture()
    comm.Barrier()
    if comm.rank:
        graph = made.capture()
    kinds = [op.kind for op in graph]
    copies = kinds.count("kernel")
    assert agree(kinds == ["words"] * 2 + ["kernel"] * copies + ["words"], comm) and copies
    assert {step[0] for op in graph for step in op.steps} == {"wait", "write", "copy"}
    assert made.gpu.log == []


def test_half_an_exchange_in_a_capture(rig: Callable[..., CopyRig], comm: MPI.Intracomm) -> None:
    made = rig(mixed(comm.size))
    made.channel.check()
    made.channel.start()
    made.gpu.begin_capture()
    with pytest.raises(StateError):
        made.channel.check()
    assert made.gpu.end_capture() == []
    made.channel.check()
    made.channel.finish()
    made.gpu.begin_capture()
    made.channel.check()
    made.channel.start()
    current, made.gpu.current = made.gpu.current, made.gpu.streams[1]
    with pytest.raises(StateError):
        made.channel.check()
    made.gpu.current = current
    made.channel.check()
    made.channel.finish()
    assert made.gpu.end_capture()


@pytest.mark.parametrize("refusing", ["here", "there", "legacy stream"])
def test_capture_is_refused_before_anything_happens(
    refusing: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of either end cannot capture words, or the stream cannot be captured: no work is enqueued."""
    if refusing != "legacy stream" and (comm.rank == 0) == (refusing == "here"):
        monkeypatch.setattr(CopyRig, "refused", "the driver does not want to")
    made = rig(ring("put", comm.size))
    made.poison()
    made.step(0)
    before = len(made.gpu.log)
    if refusing == "legacy stream":
        made.gpu.current.ptr = 0
    made.gpu.capturing.add(made.gpu.current.ptr)
    said = {
        "here": "on rank 0 the driver does not" if comm.rank else "here: the driver does not",
        "there": "here: the driver does not" if comm.rank else r"on rank \d the driver does not",
        "legacy stream": "another stream is captured",
    }[refusing]
    if refusing == "here" and comm.rank not in (0, 1, comm.size - 1):
        made.gpu.capturing.clear()  # this rank and rank 0 exchange no message
    else:
        with pytest.raises(StateError, match=said):
            made.channel.check()
    assert len(made.gpu.log) == before
    made.gpu.capturing.clear()
    made.gpu.current.ptr = made.gpu.current.ptr or 11
    made.step(1)
    judged(made.logs(), comm)


@pytest.mark.parametrize("way", ["put", "get"])
@pytest.mark.part(2)
def test_a_rank_that_does_not_come(
    way: str, rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
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
    comm.Barrier()


@pytest.mark.parametrize("started", [False, True])
def test_memory_stays_until_all_have_closed(
    started: bool, rig: Callable[..., CopyRig], comm: MPI.Intracomm
) -> None:
    made = rig(ring("put", comm.size))
    left, array = Leftovers(made.world.ranks), np.zeros(3)
    made.step(0)
    held = sys.getrefcount(array)
    if started:
        made.channel.start()
    if comm.rank == 0:
        made.channel.close()
        left.add(1, [made.channel], [array] if started else [])
    left.reclaim(made.world.gather(left.closed_plans(), "a test"))
    assert not made.events._free
    assert agree(sys.getrefcount(array) == held + (started and comm.rank == 0), comm)
    if comm.rank != 0:
        made.channel.close()
        left.add(1, [made.channel], [])
    left.reclaim(made.world.gather(left.closed_plans(), "a test"))
    assert agree(sys.getrefcount(array) == held, comm)
    assert made.events._free
    made.channel = SimpleNamespace(close=lambda: None, free=lambda: None)
    made.link = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]


def test_an_error_of_one_rank_is_raised_on_all(
    rig: Callable[..., CopyRig], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halox.errors import HaloxError

    made = rig(ring("put", comm.size))
    made.channel.close()
    comm.Barrier()
    made.channel.free()

    def fail(*_: Any) -> None:
        raise RuntimeError("no such luck")

    if comm.rank == 1:
        monkeypatch.setattr(copy_engine, "PreparedCopies", fail)
    with pytest.raises(HaloxError, match=r"\[rank 1\] .*RuntimeError: no such luck"):
        made.channel = made.make()
    assert made.events._free, traceback.format_exc()
    made.channel = SimpleNamespace(close=lambda: None, free=lambda: None)
    made.link = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
