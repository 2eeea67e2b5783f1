"""The copy engine's channel in CUDA graphs, whose streams wait for words of memory: all orders of the recorded work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

from halox.errors import HaloxError, StateError
from tests.fakes.fake_gpu import Work
from tests.mpi.conftest import agree, on_first
from tests.mpi.paths.channels import CopyRig, chain, mixed, ring

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(3)]

Make = Callable[..., CopyRig]

SHAPES: dict[str, Any] = {
    "put": lambda n: ring("put", n),
    "get one way": lambda n: chain("get", n, "triangle", "columns"),
    "mixed": mixed,
}
shapes = pytest.mark.parametrize("shape", SHAPES)
forms = pytest.mark.parametrize("form", ["run", "start and finish"])


@pytest.fixture
def rig(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made = []

    def make(shape: str, **options: Any) -> CopyRig:
        made.append(CopyRig(comm, monkeypatch, SHAPES[shape](comm.size), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def steps_of(made: CopyRig, graphs: list[Any], order: str) -> list[Any]:
    """Make a step per letter of ``order``: n for a normal exchange, g for the first graph, h for the second."""
    made.poison()
    for epoch, letter in enumerate(order):
        if letter == "n":
            made.channel.check()
            made.step(epoch)
        else:
            made.replay(graphs[ord(letter) - ord("g")], epoch)
    logs: Any = made.logs()
    return logs


@forms
@shapes
@pytest.mark.part(3)
def test_replays_and_normal_exchanges(
    shape: str, form: str, rig: Make, comm: MPI.Intracomm
) -> None:
    """Values are right in several random orders, also if all streams of a GPU share one hardware queue."""
    made = rig(shape)
    other = "run" if form != "run" else "start and finish"
    logs = steps_of(made, [made.capture(form), made.capture(other)], "ggnghng")

    def judge_words() -> None:
        for one_queue in (False, True):
            for seed in range(3):
                Work(logs, one_queue=one_queue).run(seed)

    on_first(judge_words, comm)


@forms
@shapes
@pytest.mark.part(3)
def test_no_order_of_a_graph_is_stuck(
    shape: str, form: str, rig: Make, comm: MPI.Intracomm
) -> None:
    """No order of the words deadlocks: in three replays and a normal exchange, on four ranks in two replays."""
    made = rig(shape)
    logs = steps_of(made, [made.capture(form)], "ggng" if comm.size < 4 else "gg")

    def explore() -> None:
        for one_queue in (False, True):
            assert Work(logs, one_queue=one_queue).explore() > 10

    on_first(explore, comm)


@shapes
@pytest.mark.part(3)
def test_every_word_is_needed(shape: str, rig: Make, comm: MPI.Intracomm) -> None:
    """The check fails if any single wait or write of a replay is omitted."""
    made = rig(shape)
    logs = steps_of(made, [made.capture()], "gggg")

    def is_noticed(without: tuple[int, ...]) -> bool:
        work = Work(logs, without)
        try:
            for seed in range(3):
                work.run(seed)
        except AssertionError:
            return True
        return False

    def all_needed() -> None:
        found = [
            (rank, at, step)
            for rank, log in enumerate(logs)
            for at, op in enumerate(log)
            if op.kind == "words" and op.epoch == 1
            for step in range(len(op.steps))
        ]
        assert len(found) >= 6 * (len(logs) - 1)
        assert all(map(is_noticed, found))

    on_first(all_needed, comm)


def test_a_capture_waits_for_no_rank(rig: Make, comm: MPI.Intracomm) -> None:
    """A graph has copies and words alone, since the driver captures no interprocess event."""
    made = rig("mixed")
    if comm.rank == 0:  # the others have not begun
        graph = made.capture()
    comm.Barrier()
    if comm.rank:
        graph = made.capture()
    kinds = {step[0] for op in graph for step in op.steps}
    assert agree(kinds == {"wait", "write", "copy"} and not made.gpu.log, comm)


def test_half_an_exchange_in_a_capture(rig: Make, comm: MPI.Intracomm) -> None:
    made = rig("mixed")
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
def test_refused_before_anything_happens(refusing: str, rig: Make, comm: MPI.Intracomm) -> None:
    """The driver of either end cannot capture words, or the stream cannot be captured: no work is enqueued."""
    is_refusing = refusing != "legacy stream" and (comm.rank == 0) == (refusing == "here")
    made = rig("put", refused="the driver does not want to" if is_refusing else None)
    made.poison()
    made.step(0)
    before = len(made.gpu.log)
    if refusing == "legacy stream":
        made.gpu.current.ptr = 0
    made.gpu.capturing.add(made.gpu.current.ptr)
    if refusing != "here" or comm.rank in (0, 1, comm.size - 1):  # a peer of rank 0, or rank 0
        with pytest.raises(StateError):
            made.channel.check()
    assert len(made.gpu.log) == before
    made.gpu.capturing.clear()
    made.gpu.current.ptr = made.gpu.current.ptr or 11
    made.step(1)
    assert made.is_right()


def test_flags_that_cannot_be_allocated(rig: Make, comm: MPI.Intracomm) -> None:
    """All ranks raise, and the events of the channel are free again."""
    made = rig("put")
    made.leave()
    before = made.events.acquire(4)
    made.events.release(before)
    made.arena.is_full = comm.rank == 1
    with pytest.raises((HaloxError, MemoryError)):
        made.make()
    made.arena.is_full = False
    assert sorted(made.events.acquire(4)) == sorted(before)
