"""GPUs that run nothing: they record the work that streams are given, and one rank checks the records afterwards.

The host of a rank completes a test although no kernel has run, which shows that it never waits for the GPU. Then
`judge` takes the records of all ranks. It follows the order that streams and events impose, finds unordered accesses
to the same bytes, and runs the work in several orders that streams and events allow, far from the recorded order.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.runtime.arrays import Described
from halox.runtime.segments import Block, Place
from tests.fakes.host_launches import FAKES, HostLaunch
from tests.support import forget_captures

AREA = 1 << 32  # addresses of a block of memory
AREA_BYTES = 1 << 19  # bytes of it that tests use
MOST_EVENTS = 1000

Queue = tuple[int, int]
"""Rank and number of a stream."""
Mask = dict[int, int]
"""For each area the accessed bytes, a bit each."""
Clock = dict[Queue, int]
"""For each stream the number of its kernels that are known to have run."""


@dataclass
class Op:
    """A piece of work on a stream: a kernel, the record of an event, or a wait for an event.

    ``steps`` of a kernel are ("copy", source, target), ("add", source, target, dtype), ("fill", target, bytes) and
    ("expect", source, bytes), with the address of every byte.
    """

    kind: str
    stream: int
    epoch: int
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    event: tuple[int, int] = (0, 0)
    """Number of the event, and count of its records up to this one."""

    def accesses(self) -> tuple[list[Any], list[Any]]:
        """Return the addresses read and the addresses written."""
        reads, writes = [], []
        for kind, *rest in self.steps:
            if kind in ("copy", "add", "expect"):
                reads.append(rest[0])
            if kind != "expect":
                writes.append(rest[1] if kind in ("copy", "add") else rest[0])
            if kind == "add":
                reads.append(rest[1])
        return reads, writes


class FakeStream:
    def __init__(self, gpu: FakeGpu, ptr: int) -> None:
        self.gpu, self.ptr, self.done = gpu, ptr, True

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.wait(self.ptr, event.ptr)

    def __enter__(self) -> FakeStream:
        self.gpu.outer.append(self.gpu.current)
        self.gpu.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.gpu.current = self.gpu.outer.pop()


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.ptr = gpu, gpu.make_event()

    def record(self, stream: FakeStream) -> None:
        self.gpu.record(self.ptr, stream.ptr)


class FakeGpu:
    """Recorder of a rank's GPU work, in the place of CuPy and of kernel launches.

    Notes
    -----
    Construction is collective. The counts of event records are in shared memory of the node. So a wait takes the
    latest record at that moment, also for an event of another rank, as with the driver.
    """

    def __init__(self, world: Any, arena: Any) -> None:
        self.rank = world.rank
        self.log: list[Op] = []
        self.epoch = 0
        self.capturing: set[int] = set()
        self._graph: list[Op] | None = None
        self._shared_events: set[int] = set()
        self._replays = 0
        self.streams = [FakeStream(self, 11 + number) for number in range(3)]
        self.current = self.streams[0]
        self.outer: list[FakeStream] = []
        block = arena.allocate(8 * MOST_EVENTS)
        places = world.comm.allgather(block.place)
        self.counts = [arena.memory(p)[: 8 * MOST_EVENTS].view("i8") for p in places]
        self.counts[self.rank][:] = 0
        self.made = 0
        world.comm.Barrier()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = SimpleNamespace(
            eventDisableTiming=2,
            eventInterprocess=4,
            eventCreateWithFlags=self._create_event,
            ipcGetEventHandle=lambda event: event.to_bytes(64, "little"),
            ipcOpenEventHandle=self._open_event,
            eventRecord=self.record,
            streamWaitEvent=self.wait,
            eventDestroy=lambda event: None,
            streamIsCapturing=lambda stream: stream in self.capturing,
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
            memset=lambda *_: None,
            deviceSynchronize=lambda: None,
        )
        cupy: Any = ModuleType("cupy")
        cupy.cuda = SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: self.current,
            Device=lambda number: contextlib.nullcontext(),
            Event=lambda disable_timing: FakeEvent(self),
            Stream=self.side_stream,
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        forget_captures(monkeypatch)
        replaced = [("halox.runtime.gpu.cuda.why_no_gpu", lambda: None)]
        for name, fake in FAKES.items():
            replaced.append((f"halox.packing.device.{name}", self._recorded(fake)))
        for name, fake in replaced:
            monkeypatch.setattr(name, fake)

    def side_stream(self, non_blocking: bool, priority: int) -> FakeStream:
        """Return a stream for halox alone, listed after the streams of the caller."""
        self.streams.append(FakeStream(self, 100 + len(self.streams)))
        return self.streams[-1]

    def make_event(self) -> int:
        self.made += 1
        return self.rank * MOST_EVENTS + self.made

    def _create_event(self, flags: int) -> int:
        event = self.make_event()
        if flags & 4:
            self._shared_events.add(event)
        return event

    def _open_event(self, handle: bytes) -> int:
        event = int.from_bytes(handle, "little")
        assert event // MOST_EVENTS != self.rank, "an event's own process cannot open it"
        return event

    def record(self, event: int, stream: int) -> None:
        assert event // MOST_EVENTS == self.rank
        if stream in self.capturing:
            assert event not in self._shared_events, "the driver captures no interprocess events"
            self._put(Op("record", stream, self.epoch, event=(event, 0)))
            return
        count = self.counts[self.rank]
        self._put(
            Op("record", stream, self.epoch, event=(event, int(count[event % MOST_EVENTS]) + 1))
        )
        count[event % MOST_EVENTS] += 1

    def wait(self, stream: int, event: int) -> None:
        if any(op.event[0] == event for op in self._graph or ()):
            self.capturing.add(stream)
            self._put(Op("wait", stream, self.epoch, event=(event, 0)))
            return
        assert stream not in self.capturing, "a captured stream waits for what is not captured"
        count = int(self.counts[event // MOST_EVENTS][event % MOST_EVENTS])
        assert count, "a stream was made to wait for an event that has not been recorded"
        self._put(Op("wait", stream, self.epoch, event=(event, count)))

    def _put(self, op: Op) -> None:
        if op.stream not in self.capturing:
            self.log.append(op)
            return
        assert self._graph is not None, "a stream is captured, and no graph was begun"
        self._graph.append(op)

    def begin_capture(self) -> None:
        """Capture the current stream."""
        self._graph = []
        self.capturing = {self.current.ptr}

    def end_capture(self) -> list[Op]:
        """Return the captured graph; all captured streams must have joined the current stream."""
        graph, streams = self._graph, self.capturing
        assert graph is not None
        self._graph, self.capturing = None, set()
        for stream in streams - {self.current.ptr}:
            at = max(n for n, op in enumerate(graph) if op.stream == stream)
            joined = [op for op in graph[at:] if op.kind == "wait" and op.event == graph[at].event]
            assert graph[at].kind == "record" and joined, "a stream of the capture was not joined"
        return graph

    def replay(self, graph: list[Op]) -> None:
        """Launch a graph on the current stream, with its branches on new streams."""
        self._replays += 1
        count = self.counts[self.rank]
        for op in graph:
            stream = op.stream
            if stream != self.current.ptr:
                stream += 1000 * self._replays
            event, at = op.event[0], op.event[0] % MOST_EVENTS
            if op.kind == "record":
                count[at] += 1
            self.log.append(Op(op.kind, stream, self.epoch, op.steps, (event, int(count[at]))))

    def run(self, steps: list[tuple[Any, ...]], stream: int | None = None) -> None:
        """Put a kernel on a stream, by default the current stream."""
        self._put(Op("kernel", stream or self.current.ptr, self.epoch, steps))

    def launch(self, steps: list[tuple[Any, ...]]) -> Any:
        return SimpleNamespace(launch=lambda stream: self.run(steps, stream))

    def _recorded(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `halox.packing.device` whose launches are recorded instead of run."""

        def launch_of(made: HostLaunch) -> Any:
            def launch(stream: int) -> None:
                steps: list[tuple[Any, ...]]
                if made.keep is not None:
                    steps = [("fill", to, bytes(len(to))) for _, to, _ in made.steps]
                else:
                    steps = [
                        ("copy", of, to) if dtype is None else ("add", of, to, dtype)
                        for of, to, dtype in made.steps
                    ]
                self.run(steps, stream)

            return SimpleNamespace(launch=launch, at=launch, bases=made.bases)

        def call(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            return [*map(launch_of, made)] if isinstance(made, list) else launch_of(made)

        return call


class FakeArena:
    """Arena whose memory has addresses but no bytes; each block is a segment. ``is_full``: allocations fail."""

    def __init__(self, world: Any) -> None:
        self.world, self.device = world, 0
        self.sizes: dict[int, int] = {}
        self.released: list[int] = []
        self.opened: set[Any] = set()
        self.is_full = False

    def allocate(self, nbytes: int) -> Block:
        if self.is_full:
            raise MemoryError("no such luck")
        if self.released and self.sizes[self.released[-1]] >= nbytes:
            number = self.released.pop()
        else:
            number = len(self.sizes)
            self.sizes[number] = nbytes
        return Block(Place((str(self.world.rank), number)), self._at(number), nbytes)

    def release(self, block: Block) -> None:
        number = block.place.segment[1]
        assert number not in self.released
        self.released.append(number)

    def field(self, elements: int, foreign: bool = False) -> Described:
        """Describe a new array of float64, in the arena or outside it."""
        place = self.allocate(8 * elements).place
        pointer = self._at(place.segment[1]) + (AREA << 20 if foreign else 0)
        return Described(pointer, (elements,), (8,), np.dtype("f8"), 0, True)

    def locate(self, start: int, end: int) -> Place | None:
        number = start // AREA - 1000 * self.world.rank
        inside = number in self.sizes and end <= self._at(number) + self.sizes[number]
        return Place((str(self.world.rank), number), start % AREA) if inside else None

    def handles(self, places: Any) -> dict[Any, bytes]:
        return {place.segment: b"handle" for place in places}

    def open(self, handles: dict[Any, bytes]) -> None:
        assert all(arena != str(self.world.rank) for arena, _ in handles)
        self.opened |= set(handles)

    def pointer(self, place: Place) -> int:
        name, number = place.segment
        is_own = name == str(self.world.rank)
        assert is_own or place.segment in self.opened
        return (1000 * int(name) + number) * AREA + place.offset

    def _at(self, number: int) -> int:
        return self.pointer(Place((str(self.world.rank), number)))


def judge(logs: list[list[Op]], seeds: int = 4) -> None:
    """Assert that the work of all ranks terminates, has no race, and gives the expected values."""
    work = Work(logs)
    for seed in range(seeds):
        work.run(seed)


class Work:
    """Work on the streams of all ranks, to run in many orders.

    ``without`` omits an operation, given by rank and index in the log.

    Each stream has a vector clock: after a wait it knows all work that the record of the event knew. If two kernels
    access the same bytes and one writes, the later kernel must know the earlier kernel.
    """

    def __init__(
        self,
        logs: list[list[Op]],
        without: tuple[int, int] | None = None,
    ) -> None:
        self.ops: list[Op] = []
        self.owners: list[Queue] = []
        self._queues: dict[Queue, list[int]] = defaultdict(list)
        self._records: dict[tuple[int, int], int] = {}
        for rank, log in enumerate(logs):
            for at, op in enumerate(log):
                if (rank, at) == without:
                    continue
                number = len(self.ops)
                self.ops.append(op)
                self.owners.append((rank, op.stream))
                self._queues[rank, op.stream].append(number)
                if op.kind == "record":
                    self._records[op.event] = number

    def check_order(self) -> None:
        """Assert that the work terminates, and that two kernels are ordered that access the same bytes."""
        self.run(0, values=False)

    def run(self, seed: int, *, values: bool = True) -> None:
        """Run all work in a random order, in which some streams run far ahead; assert its order and its values."""
        rng, memory, masks = random.Random(seed), Memory(), self._masks()
        next_op = dict.fromkeys(self._queues, 0)
        recorded: dict[int, Clock] = {}
        known: dict[Queue, Clock] = {owner: {} for owner in self.owners}
        ran: list[tuple[int, Queue, int]] = []
        left, haste = len(self.ops), [*self._queues]
        rng.shuffle(haste)

        def can_run(queue: Queue) -> bool:
            if next_op[queue] == len(self._queues[queue]):
                return False
            op = self.ops[self._queues[queue][next_op[queue]]]
            return op.kind != "wait" or self._records[op.event] in recorded

        while left:
            if rng.random() < 0.05:
                rng.shuffle(haste)
            queue = next((queue for queue in haste if can_run(queue)), None)
            assert queue is not None, "streams wait for one another for ever"
            number = self._queues[queue][next_op[queue]]
            op, owner = self.ops[number], self.owners[number]
            clock = known[owner]
            if op.kind == "wait":
                _join(clock, recorded[self._records[op.event]])
            elif op.kind == "record":
                recorded[number] = dict(clock)
            elif op.kind == "kernel":
                for other, place, tick in ran:
                    if clock.get(place, 0) < tick:
                        assert not _collide(masks[number], masks[other]), (
                            f"race between {self._text(number)} and {self._text(other)}"
                        )
                clock[owner] = clock.get(owner, 0) + 1
                ran.append((number, owner, clock[owner]))
                if values:
                    memory.run(op, self._text(number))
            next_op[queue] += 1
            left -= 1

    def _text(self, number: int) -> str:
        op = self.ops[number]
        return f"{[step[0] for step in op.steps]} on stream {op.stream} of epoch {op.epoch}"

    def _masks(self) -> dict[int, tuple[Mask, Mask]]:
        """Return for each kernel the bytes that it reads and the bytes that it writes."""
        accesses = {n: op.accesses() for n, op in enumerate(self.ops) if op.kind == "kernel"}
        return {n: (_mask(reads), _mask(writes)) for n, (reads, writes) in accesses.items()}


def _mask(addresses: list[np.ndarray]) -> Mask:
    found: Mask = defaultdict(int)
    for some in addresses:
        area, places = int(some[0]) // AREA, some % AREA
        assert int(some.max()) // AREA == int(some.min()) // AREA == area
        bits = np.zeros(int(places.max()) + 1, bool)
        bits[places] = True
        found[area] |= int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
    return found


def _collide(a: tuple[Mask, Mask], b: tuple[Mask, Mask]) -> bool:
    """Whether two kernels access the same bytes, and one of them writes."""
    (reads_a, writes_a), (reads_b, writes_b) = a, b
    return any(
        mask & other.get(area, 0)
        for writes, others in ((writes_a, (reads_b, writes_b)), (writes_b, (reads_a,)))
        for area, mask in writes.items()
        for other in others
    )


def _join(clock: Clock, other: Clock) -> None:
    for place, tick in other.items():
        clock[place] = max(clock.get(place, 0), tick)


class Memory:
    """Bytes of all GPUs during a run of the work."""

    def __init__(self) -> None:
        self._areas: dict[int, np.ndarray] = defaultdict(
            lambda: np.full(AREA_BYTES, 0xEE, np.uint8)
        )

    def _at(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._areas[int(addresses[0]) // AREA], addresses % AREA

    def run(self, op: Op, text: str) -> None:
        """Run the steps of a kernel, and assert the bytes in its "expect" steps."""
        for kind, first, *rest in op.steps if op.kind == "kernel" else ():
            memory, index = self._at(first)
            if kind == "fill":
                memory[index] = np.frombuffer(rest[0], np.uint8)
            elif kind == "expect":
                assert memory[index].tobytes() == rest[0], f"wrong: {text}"
            else:
                target, to = self._at(rest[0])
                if kind == "copy":
                    target[to] = memory[index]
                else:
                    total = target[to].view(rest[1]) + memory[index].view(rest[1])
                    target[to] = total.view(np.uint8)


def waits(logs: list[list[Op]], epochs: range) -> Iterator[tuple[int, int]]:
    """Yield the waits of some epochs, as rank and index in the log."""
    for rank, log in enumerate(logs):
        for at, op in enumerate(log):
            if op.kind == "wait" and op.epoch in epochs:
                yield rank, at
