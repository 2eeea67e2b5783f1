"""GPUs that run nothing: they record the work that streams are given, and one rank checks the records afterwards.

The host of a rank completes a test although no kernel has run, which shows that it never waits for the GPU. Then
`judge` takes the records of all ranks. It follows the order that streams and events impose, finds unordered accesses
to the same bytes, and runs the work in several orders that streams and events allow, far from the recorded order.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.packing.refine import cut_parts
from halox.runtime.arrays import Described
from halox.runtime.device_arena import DeviceBlock, DevicePlace
from halox.runtime.place import Place
from tests.fakes.host_launches import side_of, touched
from tests.support import forget_captures

AREA = 1 << 32  # addresses of a block of memory
AREA_BYTES = 1 << 17  # bytes of it that tests use
MOST_EVENTS = 1000


@dataclass
class Op:
    """A piece of work on a stream: a kernel, a sequence of words, the record of an event, or a wait for an event.

    ``steps`` of a kernel are ("copy", source, target), ("add", source, target, dtype), ("fill", target, bytes) and
    ("expect", source, bytes), with the address of every byte. ``steps`` of "words" are ("wait", address, value) and
    ("write", address, value), in order.
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
        cuda = SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: self.current,
            Device=lambda number: contextlib.nullcontext(),
            Event=lambda disable_timing: FakeEvent(self),
        )
        forget_captures(monkeypatch)
        for module in (
            *(f"runtime.gpu.{name}" for name in ("cuda", "ipc_events", "streams")),
            "paths.scatter_gather.graph_flags",
        ):
            monkeypatch.setattr(f"halox.{module}.cupy", lambda: SimpleNamespace(cuda=cuda))
        packers = "halox.packing"
        monkeypatch.setattr(f"{packers}.device.fragment_launches", self.fragment_launches)
        monkeypatch.setattr(f"{packers}.device.launch_pack", self.launch_pack)
        monkeypatch.setattr(f"{packers}.device.launch_add", self.launch_add)
        monkeypatch.setattr(f"{packers}.device.launch_zeros", self.launch_zeros)

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

    def words(self, steps: Any, device: int) -> Any:
        """Take the place of `PreparedWords`."""
        found = [tuple(step) for step in steps]

        def launch(stream: int) -> None:
            if found:
                self._put(Op("words", stream, self.epoch, found))

        return SimpleNamespace(launch=launch)

    def run(self, steps: list[tuple[Any, ...]], stream: int | None = None) -> None:
        """Put a kernel on a stream, by default the current stream."""
        self._put(Op("kernel", stream or self.current.ptr, self.epoch, steps))

    def launch(self, steps: list[tuple[Any, ...]]) -> Any:
        def launch(stream: int, source: int = 0, target: int = 0) -> None:
            self.run([_shifted(step, source, target) for step in steps], stream)

        return SimpleNamespace(launch=launch)

    def fragment_launches(
        self, moves: Any, fragments: int, device: int, *, unpack: bool
    ) -> list[Any]:
        steps: list[list[Any]] = [[] for _ in range(fragments)]
        for (found, datatype, count), packed, ends in moves:
            parts = cut_parts(found.pointer, datatype, count, packed, ends, unpack=unpack)
            if isinstance(parts, int):
                both = _both((found, datatype, count), packed)
                steps[parts].append(("copy", *(both[::-1] if unpack else both)))
                continue
            for fragment, copies in zip(steps, parts, strict=True):
                fragment += [("copy", side_of(c.source), side_of(c.target)) for c in copies]
        return [self.launch(fragment) for fragment in steps]

    def launch_pack(self, moves: Any, device: int, mark: Any = None) -> Any:
        return self.launch([("copy", *_both(*move)) for move in moves])

    def launch_add(self, moves: Any, device: int, mark: Any = None) -> Any:
        return self.launch([("add", *_both(*move)[::-1], move[0][1].uniform) for move in moves])

    def launch_zeros(self, endpoints: Any, device: int) -> Any:
        targets = [touched(endpoint) for endpoint in endpoints]
        return self.launch([("fill", t, bytes(len(t))) for t in targets])


class FakeArena:
    """Arena whose memory has addresses but no bytes; each block is a segment."""

    def __init__(self, world: Any) -> None:
        self.world, self.device = world, 0
        self.sizes: dict[int, int] = {}
        self.released: list[int] = []
        self.opened: set[Any] = set()

    def allocate(self, nbytes: int) -> DeviceBlock:
        if self.released and self.sizes[self.released[-1]] >= nbytes:
            number = self.released.pop()
        else:
            number = len(self.sizes)
            self.sizes[number] = nbytes
        return DeviceBlock(Place((str(self.world.rank), number)), self._at(number), nbytes)

    def release(self, block: DeviceBlock) -> None:
        number = block.place.segment[1]
        assert number not in self.released
        self.released.append(number)

    def field(self, elements: int, foreign: bool = False) -> Described:
        """Describe a new array of float64, in the arena or outside it."""
        place = self.allocate(8 * elements).place
        pointer = self._at(place.segment[1]) + (AREA << 20 if foreign else 0)
        return Described(pointer, (elements,), (8,), np.dtype("f8"), 0, True)

    def locate(self, start: int, end: int) -> DevicePlace | None:
        number = start // AREA - 1000 * self.world.rank
        inside = number in self.sizes and end <= self._at(number) + self.sizes[number]
        return Place((str(self.world.rank), number), start % AREA) if inside else None

    def handles(self, places: Any) -> dict[Any, bytes]:
        return {place.segment: b"handle" for place in places}

    def open(self, handles: dict[Any, bytes]) -> None:
        assert all(arena != str(self.world.rank) for arena, _ in handles)
        self.opened |= set(handles)

    def pointer(self, place: DevicePlace) -> int:
        name, number = place.segment
        is_own = name == str(self.world.rank)
        assert is_own or place.segment in self.opened
        return (1000 * int(name) + number) * AREA + place.offset

    def _at(self, number: int) -> int:
        return self.pointer(Place((str(self.world.rank), number)))


def _shifted(step: tuple[Any, ...], source: int, target: int) -> tuple[Any, ...]:
    """Return a step with shifted addresses."""
    kind, *rest = step
    shifts = (target,) if kind == "fill" else (source, target)
    moved = [at + ((s + (1 << 63)) % (1 << 64) - (1 << 63)) for at, s in zip(rest, shifts)]  # noqa: B905
    return kind, *moved, *rest[len(moved) :]


def _both(endpoint: Any, packed: int) -> tuple[np.ndarray, np.ndarray]:
    array = touched(endpoint)
    return array, packed + np.arange(len(array))


def judge(logs: list[list[Op]], seeds: int = 4) -> None:
    """Assert that the work of all ranks terminates, has no race, and gives the expected values."""
    work = Work(logs)
    work.check_order()
    for seed in range(seeds):
        work.execute(random.Random(seed))


class Work:
    """Work on the streams of all ranks; ``without`` omits one wait, given by rank and index in the log."""

    def __init__(self, logs: list[list[Op]], without: tuple[int, int] | None = None) -> None:
        self.ops: list[Op] = []
        self.owners: list[tuple[int, int]] = []
        self.before: list[list[int]] = []
        last: dict[tuple[int, int], int] = {}
        records: dict[tuple[int, int], int] = {}
        for rank, log in enumerate(logs):
            for at, op in enumerate(log):
                if (rank, at) == without:
                    continue
                number = len(self.ops)
                self.ops.append(op)
                self.owners.append((rank, op.stream))
                previous = last.get((rank, op.stream))
                self.before.append([] if previous is None else [previous])
                last[rank, op.stream] = number
                if op.kind == "record":
                    records[op.event] = number
        for number, op in enumerate(self.ops):
            if op.kind == "wait":
                self.before[number].append(records[op.event])
        self.order = self._sorted(random.Random(0))

    def _sorted(self, rng: random.Random) -> list[int]:
        """Return a random order that streams and events allow, in which some streams run far ahead."""
        after = defaultdict(list)
        for number, before in enumerate(self.before):
            for other in before:
                after[other].append(number)
        missing = [len(before) for before in self.before]
        haste: dict[tuple[int, int], float] = defaultdict(rng.random)
        ready = [number for number, n in enumerate(missing) if not n]
        order = []
        while ready:
            if rng.random() < 0.05:
                haste.clear()
            number = max(ready, key=lambda n: haste[self.owners[n]])
            ready.remove(number)
            order.append(number)
            for other in after[number]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        assert len(order) == len(self.ops), "streams wait for one another for ever"
        return order

    def check_order(self) -> None:
        """Assert that two kernels are ordered if they access the same bytes and one of them writes."""
        ancestors = [0] * len(self.ops)
        for number in self.order:
            for other in self.before[number]:
                ancestors[number] |= ancestors[other] | 1 << other
        masks = self._masks()
        kernels = [number for number, op in enumerate(self.ops) if op.kind == "kernel"]
        for i, a in enumerate(kernels):
            for b in kernels[:i]:
                if ancestors[a] >> b & 1 or ancestors[b] >> a & 1:
                    continue
                (ra, wa), (rb, wb) = masks[a], masks[b]
                assert not (wa & (rb | wb) or ra & wb), (
                    f"race between {self._text(a)} and {self._text(b)}"
                )

    def _text(self, number: int) -> str:
        op = self.ops[number]
        return f"{[step[0] for step in op.steps]} on stream {op.stream} of epoch {op.epoch}"

    def _masks(self) -> dict[int, tuple[int, int]]:
        """Return for each kernel the bytes that it reads and writes, as masks with a bit per byte."""
        found = {n: op.accesses() for n, op in enumerate(self.ops) if op.kind == "kernel"}
        sizes: dict[int, int] = defaultdict(int)
        for pair in found.values():
            for a in (*pair[0], *pair[1]):
                area = int(a[0]) // AREA
                assert a.max() // AREA == a.min() // AREA == area
                sizes[area] = max(sizes[area], int(a.max()) % AREA + 1)
        starts, total = {}, 0
        for area, size in sizes.items():
            starts[area] = total
            total += size

        def mask(addresses: list[np.ndarray]) -> int:
            bits = np.zeros(total, bool)
            for a in addresses:
                bits[starts[int(a[0]) // AREA] + a % AREA] = True
            return int.from_bytes(np.packbits(bits).tobytes(), "big")

        return {number: (mask(reads), mask(writes)) for number, (reads, writes) in found.items()}

    def execute(self, rng: random.Random) -> None:
        """Run all work in a random allowed order, and assert the values that the tests expect."""
        memory = Memory()
        for number in self._sorted(rng):
            memory.run(self.ops[number], self._text(number))


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
