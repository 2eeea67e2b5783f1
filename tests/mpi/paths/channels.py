"""The table of channels, each with its arrays and its caller, for the contract in `test_channels`.

A test describes messages by `Wire`, and a rig makes their channel between the ranks. `step` fills the sources, runs an
exchange, and compares the targets with MPI's own transfer of the same types. Channels of GPU arrays run on
`tests.fakes.fake_gpu`, which records all work and lets rank 0 judge the records of all ranks.
"""

from __future__ import annotations

import copy
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pytest
from mpi4py import MPI

from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.packing.common_blocks import CommonBlocks
from halox.paths.base import Job
from halox.paths.buffers import (
    Buffer,
    RequestBuffers,
    SharedBuffers,
    TransportBuffers,
    host_buffer,
)
from halox.paths.fragments import cutter, whole
from halox.paths.host.packed import HostChannel
from halox.paths.ipc import make_ipc_channel
from halox.paths.messages import Message, Part
from halox.paths.node import NodeLink
from halox.paths.scatter_gather.copy_engine import make_channel as make_copy_channel
from halox.paths.staged.pipeline import StagedPipeline, Work
from halox.runtime.arena import SharedArena
from halox.runtime.arrays import borrow
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.pools import Pool, SideStream
from halox.runtime.world import World
from tests.fakes.cpu_kernels import aligned
from tests.fakes.fake_cupy import Array
from tests.fakes.fake_gpu import AREA, FakeArena, FakeGpu, judge
from tests.fakes.fake_nccl import machine_with_nccl
from tests.fakes.host_launches import host_launches, touched
from tests.mpi.conftest import agree, on_first
from tests.mpi.test_typed import TYPES

ELEMENTS, LARGE_ELEMENTS = 130, 5000
LARGE = {
    "large": dt.contiguous(4096, "f8"),
    "large columns": dt.vector(512, 8, 9, "f8"),
    "large scattered": dt.indexed_block(8, np.random.default_rng(1).permutation(512) * 9, "f8"),
}
ALL_TYPES = TYPES | LARGE
FRAGMENT_BYTES = 4096
"""A message of a large type has eight fragments of this size."""


@dataclass(frozen=True)
class Wire:
    """One message: source, target, types of its parts at both ends, protocol (``way``) and tag."""

    source: int
    target: int
    sent: tuple[str, ...] = ("vector",)
    received: tuple[str, ...] = ("columns",)
    way: str = "staging"
    tag: int = 0


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


def mixed(size: int) -> list[Wire]:
    """Messages to both neighbours, with different types at each end; put to the lower one, get to the higher one."""
    return [
        Wire(r, (r + s) % size, ("columns", "vector"), ("vector", "scattered"), way, s + 1)
        for r in range(size)
        for s, way in ((-1, "put"), (1, "get"))
    ]


def packed(name: str, values: np.ndarray) -> np.ndarray:
    """Return the elements of a type, as MPI sends them."""
    made = ALL_TYPES[name].to_mpi()
    buffer = np.empty(ALL_TYPES[name].size // 8)
    MPI.COMM_SELF.Sendrecv([values, 1, made], 0, 0, buffer, 0, 0)
    made.Free()
    return buffer


def unpack(name: str, buffer: np.ndarray, values: np.ndarray) -> None:
    """Write the elements of a type, as MPI receives them."""
    made = ALL_TYPES[name].to_mpi()
    MPI.COMM_SELF.Sendrecv(buffer, 0, 0, [values, 1, made], 0, 0)
    made.Free()


def elements(name: str) -> int:
    """Return the elements of an array that a part of this type is in."""
    return LARGE_ELEMENTS if name in LARGE else ELEMENTS


class Rig:
    """An exchange of some messages between the ranks, and its caller; ``channel`` is the channel under test.

    A subclass says how to make arrays and the channel (`set_up`, `array`, `make`), how to `write` an array before an
    exchange and `compare` it after one, whether all comparisons so far `is_right` (collective), and how to `leave` the
    channel and `close` everything.
    """

    operation: Any = "copy"
    set_up: Callable[..., None]
    array: Callable[[int, bool], Any]
    make: Callable[[], Any]
    write: Callable[[Any, np.ndarray], None]
    compare: Callable[[Any, np.ndarray], None]
    is_right: Callable[[], bool]
    leave: Callable[[], None]
    close: Callable[[], None]

    def __init__(
        self,
        comm: MPI.Intracomm,
        monkeypatch: pytest.MonkeyPatch,
        wires: Sequence[Wire],
        **options: Any,
    ) -> None:
        self.comm, self.wires = comm, wires
        self.ranks = comm.Dup()  # a test that ends early leaves no message for the next test
        self.out = [w for w in wires if w.source == comm.rank]
        self.into = [w for w in wires if w.target == comm.rank]
        self.random = np.random.default_rng([7, comm.rank])
        self.set_up(monkeypatch, **options)
        self.new_arrays()
        self.channel = self.make()

    def new_arrays(self) -> None:
        """Allocate all arrays; only arrays that a peer accesses directly need be where peers can map them."""
        self.sources = {
            w: [self.array(elements(n), w.way == "get") for n in w.sent] for w in self.out
        }
        self.targets = {
            w: [self.array(elements(n), w.way == "put") for n in w.received] for w in self.into
        }
        self.held = {w: [np.full(elements(n), -1.0) for n in w.received] for w in self.into}

    def twin(self) -> Self:
        """Return a second exchange of the same messages, over other arrays; the caller must `leave` it."""
        other = copy.copy(self)
        other.new_arrays()
        other.channel = other.make()
        return other

    def pause(self) -> None:
        """Sleep at random, so that ranks run ahead or fall behind."""
        if self.random.random() < 0.4:
            time.sleep(self.random.choice([0.0005, 0.004]))

    def values(self, wire: Wire, part: int, epoch: int) -> np.ndarray:
        """Return the contents of a part's source in an epoch."""
        number = self.wires.index(wire) * 10 + part
        return np.arange(elements(wire.sent[part])) + 1e4 * number + 1e7 * (epoch + 1)

    def fill(self, epoch: int) -> None:
        for wire, arrays in self.sources.items():
            for part, array in enumerate(arrays):
                self.write(array, self.values(wire, part, epoch))

    def poison(self) -> None:
        """Fill the targets with values that no source has."""
        for wire, arrays in self.targets.items():
            for array, values in zip(arrays, self.held[wire], strict=True):
                self.write(array, values)

    def expect(self, epoch: int) -> None:
        """Compare all cells of the targets with MPI's own transfer of the types."""
        for wire, arrays in self.targets.items():
            for part, array in enumerate(arrays):
                held = self.held[wire][part]
                came = packed(wire.sent[part], self.values(wire, part, epoch))
                if self.operation == "add":
                    came = packed(wire.received[part], held) + came
                unpack(wire.received[part], came, held)
                self.compare(array, held)

    def begin(self, epoch: int) -> None:
        """Fill the sources, and start an exchange."""
        self.fill(epoch)
        self.pause()
        self.channel.start()
        self.pause()

    def end(self, epoch: int) -> None:
        """Finish the exchange, and compare."""
        self.channel.finish()
        self.expect(epoch)

    def step(self, epoch: int) -> None:
        """Make an exchange."""
        self.begin(epoch)
        self.end(epoch)


class Idle:
    """Channel of a rank without messages."""

    is_movable = False
    start = finish = check = close = free = lambda self: None


class ChannelRig(Rig):
    """An exchange by a channel of halox/paths, with its flags in shared memory."""

    def set_up(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.world = World(self.ranks)
        self.shared = SharedArena(self.world.ranks)

    def job(self) -> tuple[Job, dict[Any, str]]:
        """Return the messages over the present arrays, and their protocols."""
        arrays: list[Any] = []
        ways = {}

        def messages(direction: Any, found: dict[Wire, list[Any]]) -> tuple[Message, ...]:
            made = []
            for wire, of in found.items():
                sends = direction == "send"
                parts = []
                for array, name in zip(of, wire.sent if sends else wire.received, strict=True):
                    arrays.append(array)
                    parts.append(Part(len(arrays) - 1, ALL_TYPES[name]))
                peer = wire.target if sends else wire.source
                made.append(Message(peer, direction, tuple(parts), wire.tag))
                ways[made[-1].key] = wire.way
            return tuple(sorted(made, key=lambda m: (m.peer, m.tag)))

        sends, receives = messages("send", self.sources), messages("receive", self.targets)
        return Job(arrays, sends, receives, self.operation), ways

    def leave(self) -> None:
        self.channel.close()
        self.comm.Barrier()
        self.channel.free()
        self.channel = Idle()

    def close(self) -> None:
        self.leave()
        self.comm.Barrier()
        self.shared.close(is_last=True)
        self.world.close()


class RecordedRig(ChannelRig):
    """A channel on a GPU that runs nothing (`fake_gpu`).

    ``channel_of(job, ways, link)`` returns a new channel, None on a rank without messages.
    """

    channel_of: Callable[..., Any]

    def set_up(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        super().set_up(monkeypatch)
        self.gpu = FakeGpu(self.world, self.shared)
        self.gpu.install(monkeypatch)
        self.arena, self.events = FakeArena(self.world), EventPool(0)

    def array(self, elements: int, mapped: bool) -> Any:
        return self.arena.field(elements, foreign=not mapped)

    def write(self, array: Any, values: np.ndarray) -> None:
        self.gpu.run([("fill", array.pointer + np.arange(values.nbytes), values.tobytes())])

    def compare(self, array: Any, values: np.ndarray) -> None:
        self.gpu.run([("expect", array.pointer + np.arange(values.nbytes), values.tobytes())])

    def begin(self, epoch: int) -> None:
        self.gpu.epoch = epoch
        super().begin(epoch)

    def expect(self, epoch: int) -> None:
        super().expect(epoch)
        if self.operation == "add":  # sent cells are cleared
            for wire, arrays in self.sources.items():
                for array, name in zip(arrays, wire.sent, strict=True):
                    sent = touched((array, ALL_TYPES[name], 1))
                    self.gpu.run([("expect", sent, bytes(len(sent)))])

    def make(self) -> Any:
        job, ways = self.job()
        peers = sorted({m.peer for m in (*job.sends, *job.receives)})
        link = NodeLink(self.world, self.shared, [], peers)
        assert not link.failed
        made = self.channel_of(job, ways, link)
        return Idle() if made is None else made

    def logs(self) -> Any:
        """Return the recorded work of all ranks' streams on rank 0, None elsewhere."""
        return self.comm.gather(self.gpu.log)

    def is_right(self) -> bool:
        logs = self.logs()
        on_first(lambda: judge(logs), self.comm)
        return True


class IpcRig(RecordedRig):
    """The `ipc` path."""

    def set_up(self, monkeypatch: pytest.MonkeyPatch, adds: bool = False) -> None:
        super().set_up(monkeypatch)
        self.operation = "add" if adds else "copy"

    def channel_of(self, job: Job, ways: Any, link: NodeLink) -> Any:
        memory: Any = (self.arena, self.events)
        return make_ipc_channel(self.world, job, memory, link)

    def move(self, offset: int) -> None:
        """Bind the channel to new arrays, at addresses ``offset`` bytes beyond a multiple of 256."""
        lists = [*self.sources.values(), *self.targets.values()]
        for arrays in lists:
            for n, array in enumerate(arrays):
                room = self.arena.field(array.shape[0] + 32, foreign=True)
                arrays[n] = replace(array, pointer=room.pointer + offset)
        if self.channel.is_movable:  # false on a rank without messages
            pointers = [array.pointer for arrays in lists for array in arrays]
            self.channel.bind(self.channel.views(pointers))
        self.held = {w: [np.full(len(a), -1.0) for a in found] for w, found in self.held.items()}


class CopyRig(RecordedRig):
    """The copy engine."""

    def set_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().set_up(monkeypatch)
        room = "halox.paths.scatter_gather.copy_engine"
        for name, fake in {
            "boxes_of": lambda blocks: blocks,
            "PreparedCopies": self.prepared,
            "SIDE_STREAMS": Pool(SideStream),
        }.items():
            monkeypatch.setattr(f"{room}.{name}", fake)

    def prepared(self, blocks: CommonBlocks, device: int) -> Any:
        """Record the copies between two areas as one kernel."""
        source, target = (
            np.concatenate(
                [at + np.arange(n) for at, n in zip(starts, blocks.lengths, strict=True)]
            )
            for starts in (blocks.source, blocks.target)
        )
        areas = source // AREA * (1 << 20) + target // AREA
        steps = [("copy", source[areas == a], target[areas == a]) for a in np.unique(areas)]
        return self.gpu.launch(steps)

    def channel_of(self, job: Job, ways: Any, link: NodeLink) -> Any:
        memory: Any = (self.arena, self.events)
        return make_copy_channel(self.world, job, ways, memory, link)


class StagedRig(ChannelRig):
    """Transport buffers between GPUs, between hosts, or between both (``hosts``: "none", "all" or "odd" ranks).

    ``buffers`` are "shared", sent by "mpi", or on a "device", where only MPI and the GPU access them.
    """

    def set_up(self, monkeypatch: pytest.MonkeyPatch, buffers: str, hosts: str = "none") -> None:
        super().set_up(monkeypatch)
        self.buffers, self.wrong = buffers, 0
        self.has_gpu = hosts == "none" or (hosts == "odd" and self.comm.rank % 2 == 0)
        self.gpu: LateGpu | None = None

    def new_arrays(self) -> None:
        super().new_arrays()
        self.later: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # comparisons that are still to be made

    def array(self, elements: int, mapped: bool) -> np.ndarray:
        return np.zeros(elements)

    def make(self) -> Any:
        job, _ = self.job()
        job = Job([borrow(array) for array in job.arrays], job.sends, job.receives)
        self.carrier = self._carrier(job)
        if not self.has_gpu:
            return HostChannel(job, self.carrier)
        self.gpu = LateGpu(job, self.carrier, self.comm.rank)
        return StagedPipeline(self.world, self.carrier, self.gpu)

    def _carrier(self, job: Job) -> TransportBuffers:
        cut = cutter(FRAGMENT_BYTES)
        if self.buffers == "shared":
            peers = sorted({m.peer for m in (*job.sends, *job.receives)})
            link = NodeLink(self.world, self.shared, job.sends, peers)
            return SharedBuffers(self.shared, link, job.sends, job.receives, cut)
        allocate = {"mpi": host_buffer, "device": on_device}[self.buffers]
        cut = whole if self.buffers == "device" else cut
        ends = job.sends, job.receives
        return RequestBuffers(self.world, *ends, lambda m: 20 + m.tag, allocate, cut)

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        array[...] = values

    def compare(self, array: np.ndarray, values: np.ndarray) -> None:
        self.later.append((array, values.copy()))

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._look()  # `start` has waited for the unpacking of the last exchange

    def end(self, epoch: int) -> None:
        super().end(epoch)
        if self.random.random() < 0.5:
            self._settle()

    def _settle(self) -> None:
        if self.gpu is not None:
            self.gpu.wait_until_read()
        self._look()

    def _look(self) -> None:
        self.wrong += sum(not np.array_equal(array, values) for array, values in self.later)
        self.later.clear()

    def is_right(self) -> bool:
        self._settle()
        return agree(not self.wrong, self.comm)


def on_device(nbytes: int) -> Buffer:
    """Allocate memory that only MPI and the simulated GPU access."""
    owner = np.zeros(max(1, nbytes), np.uint8)
    pointer = owner.ctypes.data
    return Buffer(MPI.memory.fromaddress(pointer, nbytes), pointer, owner)


def buffers_of(carrier: TransportBuffers) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Return the send buffers and the receive buffers by slot, in host or device memory."""
    if any(carrier.outgoing) or any(carrier.incoming):
        return carrier.outgoing, carrier.incoming

    def views(pointers: list[int], all_ends: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        return [
            np.frombuffer((ctypes.c_char * ends[-1]).from_address(pointer), np.uint8)
            for pointer, ends in zip(pointers, all_ends, strict=True)
        ]

    outgoing, incoming = carrier.device_pointers()
    return (
        [views(row, carrier.outgoing_ends) for row in outgoing],
        [views(row, carrier.incoming_ends) for row in incoming],
    )


class LateGpu(Work):
    """Packs and unpacks fragments as late as possible, so that a buffer that is reused too early has wrong bytes.

    The work on its streams runs only when the host waits for it, or after several queries.
    """

    def __init__(self, job: Job, carrier: TransportBuffers, seed: int) -> None:
        self._random = random.Random(seed)
        self._job, self._carrier = job, carrier
        self._packs: list[Callable[[], None]] = []
        self._unpacks: list[Callable[[], None]] = []
        self._done = self.unpacked_ahead = 0
        self._rows = buffers_of(carrier)
        parts = [part for message in job.messages for part in message.parts]
        self._places = {
            p.array: touched((job.arrays[p.array], p.datatype, p.count))
            - job.arrays[p.array].pointer
            for p in parts
        }

    def begin(self, slot: int) -> None:
        assert not self._packs
        stages = range(self._carrier.stages_out)
        self._packs = [self._moves(slot, stage, packs=True) for stage in stages]
        self._done = 0

    def is_packed(self, stage: int) -> bool:
        assert stage <= self._done, "stages are asked for in turn"
        if self._random.random() < 0.7:
            time.sleep(0)
            return False
        while self._done <= stage:
            self._packs.pop(0)()
            self._done += 1
        return True

    def unpack(self, slot: int, stage: int) -> None:
        self._unpacks.append(self._moves(slot, stage, packs=False))
        self.unpacked_ahead += bool(self._packs)

    def end(self) -> None:
        pass

    def wait_until_read(self) -> None:
        for call in self._unpacks:
            call()
        self._unpacks = []

    def wait_for_all(self) -> None:
        while self._packs:
            self._packs.pop(0)()
        self.wait_until_read()

    def _moves(self, slot: int, stage: int, *, packs: bool) -> Callable[[], None]:
        """Return the copies of one stage of all messages."""
        job, carrier = self._job, self._carrier
        messages = job.sends if packs else job.receives
        all_ends = carrier.outgoing_ends if packs else carrier.incoming_ends

        def move() -> None:
            row = self._rows[not packs][slot]
            for message, buffer, ends in zip(messages, row, all_ends, strict=True):
                if stage >= len(ends):
                    continue
                low, high = ends[stage - 1] if stage else 0, ends[stage]
                for part, offset in zip(message.parts, message.offsets, strict=True):
                    cells = np.frombuffer(job.arrays[part.array].memory, np.uint8)
                    at = self._places[part.array]
                    to = offset + np.arange(at.size)
                    here = (to >= low) & (to < high)
                    if packs:
                        buffer[to[here]] = cells[at[here]]
                    else:
                        cells[at[here]] = buffer[to[here]]

        return move


class PathRig(Rig):
    """A public exchange by a path, with `Exchange`; ``nodes`` puts each rank on a node of its own."""

    def set_up(
        self, monkeypatch: pytest.MonkeyPatch, path: str, nodes: bool = False, gpus: bool = False
    ) -> None:
        self.path, self.gpus, self.wrong = path, gpus, 0
        self.stack = ExitStack()
        if nodes:
            monkeypatch.setenv("HALOX_NODE", "rank")
        if gpus:
            self.stack.enter_context(host_launches())
            machine_with_nccl(self.ranks, monkeypatch)

    def array(self, elements: int, mapped: bool) -> Any:
        values = aligned(8 * elements).view("f8")
        return Array(values) if self.gpus else values

    def make(self) -> Exchange:
        sends = [
            Send(array, ALL_TYPES[name], w.target, tag=w.tag)
            for w, arrays in self.sources.items()
            for array, name in zip(arrays, w.sent, strict=True)
        ]
        receives = [
            Recv(array, ALL_TYPES[name], w.source, tag=w.tag)
            for w, arrays in self.targets.items()
            for array, name in zip(arrays, w.received, strict=True)
        ]
        made = Exchange(sends, receives, comm=self.ranks, path=self.path)
        rows = made.explain().rows
        taken = {f"{row.path}/{row.protocol}" for row in rows}
        assert all(one.startswith(self.path) for one in taken), taken
        return made

    def write(self, array: Any, values: np.ndarray) -> None:
        array[...] = values

    def compare(self, array: Any, values: np.ndarray) -> None:
        found = array.values if self.gpus else array
        self.wrong += not np.array_equal(found, values)

    def is_right(self) -> bool:
        return agree(not self.wrong, self.comm)

    def leave(self) -> None:
        self.channel.close()

    def close(self) -> None:
        self.leave()
        self.comm.Barrier()
        self.stack.close()
        self.comm.Barrier()


@dataclass(frozen=True)
class Kind:
    """A way to make a channel.

    ``ways`` are its protocols, of which random messages take any. ``is_large``: messages may have several fragments.
    ``most`` is the largest number of random messages. ``needs_all``: each rank must have a message.
    """

    rig: type[Rig]
    ways: tuple[str, ...] = ("staging",)
    is_large: bool = False
    most: int = 8
    needs_all: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        comm: MPI.Intracomm,
        monkeypatch: pytest.MonkeyPatch,
        wires: Sequence[Wire],
        **more: Any,
    ) -> Any:
        return self.rig(comm, monkeypatch, wires, **self.options, **more)

    def random_wires(self, rng: Any, size: int) -> list[Wire]:
        """Return messages between random ranks, with random types, numbers of parts and protocols."""
        wires = [*ring(self.ways[0], size)] if self.needs_all else []
        for tag in range(3, 3 + rng.integers(1, self.most + 1)):
            a, b = rng.choice(size, 2, replace=False)
            way = str(rng.choice(self.ways))
            types = LARGE if self.is_large and rng.random() < 0.4 else TYPES
            parts = rng.integers(1, 4)
            sent, received = (tuple(rng.choice(list(types), parts).tolist()) for _ in range(2))
            wires.append(Wire(int(a), int(b), sent, received, way, tag))
        return wires


def staged(buffers: str, hosts: str = "none") -> Kind:
    """Return the kind of some transport buffers."""
    return Kind(StagedRig, is_large=True, options={"buffers": buffers, "hosts": hosts})


RECORDED = {
    "ipc": Kind(IpcRig),
    "copy engine": Kind(CopyRig, ("put", "get")),
}
STAGED = {
    "staged/shared": staged("shared"),
    "staged/mpi": staged("mpi"),
    "cuda_aware": staged("device"),
    "host/shared": staged("shared", "all"),
    "host/mpi": staged("mpi", "all"),
    "staged and host, shared": staged("shared", "odd"),
    "staged and host, mpi": staged("mpi", "odd"),
}
CHANNELS = {
    **RECORDED,
    "ipc, adding": Kind(IpcRig, options={"adds": True}),
    **STAGED,
    "process_vm": Kind(PathRig, options={"path": "scatter_gather/process_vm"}),
    "nccl": Kind(PathRig, needs_all=True, options={"path": "nccl", "nodes": True, "gpus": True}),
}
