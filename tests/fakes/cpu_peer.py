"""Runs whole exchanges by ``peer.cu`` on the CPU, with one thread per rank.

Only the GPU is simulated: ``paths.peer.negotiation`` lays out the (host) memory and creates the segments,
``paths.peer.table`` builds the table, and g++ compiles the kernel. A rank has one or more multiprocessors; each runs
its blocks one after another.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import numpy as np

from halox.paths.base import Job, Operation
from halox.paths.messages import Message, Part
from halox.paths.peer import negotiation
from halox.paths.peer.endpoints import peer_info
from halox.paths.peer.table import (
    EPOCH_SHIFT,
    TABLE_BYTES,
    Kind,
    PeerPlan,
    Segment,
    plan,
    segment_dtype,
)
from halox.runtime.gpu.compiler import preamble, source
from halox.runtime.segments import Block, Place
from tests.fakes.cpu_kernels import FLAGS, aligned, compiled_once, own_copy
from tests.fakes.host_cuda import HostCuda, host_cuda
from tests.fakes.host_launches import host_launches
from tests.fakes.layouts import Layout

HEADER = "cpu_peer.h"
GUARD = 0xA5
LIMIT_S = 200.0
"""Generous: only a deadlock takes longer."""

MEMORY = """
static State load_state(u64 at)
{
    return {__atomic_load_n(checked<u64>(at), __ATOMIC_RELAXED),
            __atomic_load_n(checked<u64>(at + 8), __ATOMIC_RELAXED)};
}

static Word16 load_wide(u64 at)
{
    const auto packet = __atomic_load_n(checked<unsigned __int128>(at), __ATOMIC_RELAXED);
    return {u64(packet), u64(packet >> 64)};
}

extern "C" void delay(u64 seed, u32 permille)
{
    delays = {seed * 2654435761u + 88172645463325252ull, permille};
}
"""
"""Definitions that use the kernel's structs and therefore follow the kernel, outside of the header."""

_RUN = """
extern "C" void run(u32 grid, u32 threads, int backwards, const u32* blocks, u32 count, const void* segments,
                    const void* exchange)
{
    launch_blocks(grid, threads, backwards != 0, blocks, count, peer_exchange, *(const Segments*)segments,
                  *(const Exchange*)exchange);
}
"""


def built(defines: tuple[tuple[str, str], ...], extra: str = "") -> Path:
    """Compile the kernel to a shared library, which acts as one multiprocessor."""
    head = f'{preamble(defines)}#define POLLS 2\n#define HELP_NS 0\n#include "{HEADER}"\n'
    text = f"{head}{source('peer')}{MEMORY}{_RUN}{extra}"
    return compiled_once(text, *FLAGS, "-Og", "-Wl,--no-as-needed", "-latomic")


@cache
def multiprocessor(defines: tuple[tuple[str, str], ...], rank: int, number: int) -> ctypes.CDLL:
    """Load one copy of the library per multiprocessor and rank, so that each has its own blockIdx and fibers."""
    return own_copy(built(defines))


class HostArena:
    """Takes the place of DeviceArena: host memory between guards; all ranks use the same addresses."""

    device = 0
    _names = count()
    _arenas: ClassVar[WeakValueDictionary[str, HostArena]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.name = f"arena {next(self._names)}"
        self._arenas[self.name] = self
        self._memory: list[np.ndarray] = []

    def allocate(self, nbytes: int, offset: int = 0) -> Block:
        memory = aligned(nbytes + 2 * 512, offset)
        memory[:] = GUARD
        self._memory.append(memory)
        place = Place((self.name, len(self._memory) - 1))
        return Block(place, memory.ctypes.data + 512, nbytes)

    def bytes_of(self, block: Block) -> np.ndarray:
        return self._memory[block.place.segment[1]][512:-512]

    def release(self, block: Block) -> None:
        pass

    def locate(self, start: int, end: int) -> Place | None:
        for number, memory in enumerate(self._memory):
            first = memory.ctypes.data + 512
            if first <= start and end <= first + memory.size - 1024:
                return Place((self.name, number), start - first)
        return None

    def handles(self, places: Any) -> dict[Any, bytes]:
        return {}

    def open(self, handles: Any) -> None:
        pass

    def pointer(self, place: Place) -> int:
        name, number = place.segment
        memory = self._arenas[name]._memory[number]
        return int(memory.ctypes.data) + 512 + place.offset

    def synchronize(self) -> None:
        pass

    def check_guards(self) -> None:
        for memory in self._memory:
            assert (memory[:512] == GUARD).all() and (memory[-512:] == GUARD).all()


@dataclass(frozen=True)
class Flow:
    """A message with several parts: each has a layout at the sender and one at the receiver, of equal size.

    ``way`` is the protocol; "copy" is the protocol of a rank's messages to itself.
    """

    sender: int
    receiver: int
    way: str
    parts: Sequence[tuple[Layout, Layout]]
    tag: int = 0


@dataclass
class Array:
    data: np.ndarray
    pointer: int


@dataclass
class Launch:
    """Takes the place of `PreparedLaunch`."""

    defines: tuple[tuple[str, str], ...]
    blocks: int
    threads: int
    args: list[Any]

    def run(
        self,
        rank: int,
        order: np.ndarray,
        *,
        multiprocessors: int = 1,
        delays: int = 0,
        seed: int = 0,
    ) -> None:
        """Launch on a rank and wait for the end; the multiprocessors take the blocks in turn, in the given order."""
        parameters = []
        for argument in self.args:
            parameters.append(aligned(ctypes.sizeof(argument)))
            parameters[-1][:] = np.frombuffer(argument, np.uint8)

        def on(number: int) -> None:
            library = multiprocessor(self.defines, rank, number)
            mine = np.ascontiguousarray(order[number::multiprocessors], np.uint32)
            library.delay(ctypes.c_uint64(seed * 8 + number + 1), ctypes.c_uint(delays))
            library.run(
                ctypes.c_uint(self.blocks),
                ctypes.c_uint(self.threads),
                ctypes.c_int(seed % 2),
                ctypes.c_void_p(mine.ctypes.data),
                ctypes.c_uint(mine.size),
                *(ctypes.c_void_p(p.ctypes.data) for p in parameters),
            )

        at_once(on, range(multiprocessors))


def at_once(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Call a function with each item at the same time, such as the work of each rank; raise its errors."""
    if len(items) == 1:
        work(items[0])
        return
    with ThreadPoolExecutor(len(items)) as pool:
        for future in [pool.submit(work, item) for item in items]:
            future.result()


@dataclass
class Rank:
    """A rank with its arrays, its negotiation (``draft``) and its launch."""

    number: int
    flows: Sequence[Flow]
    multiprocessors: int
    operation: Operation = "copy"
    concurrent: bool = False
    """Whether to use the launch that leaves multiprocessors free for other work (``start`` and ``finish``)."""
    apart: bool = False
    """Whether to use two launches: of the copies within the rank alone, and of all other chunks (``start_copied``)."""
    arena: HostArena = field(default_factory=HostArena)
    arrays: list[Array] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    places: dict[tuple[int, int, str], int] = field(default_factory=dict)
    """Index of each array, by flow, part and direction."""

    def __post_init__(self) -> None:
        messages: dict[str, list[tuple[Flow, Message]]] = {"send": [], "receive": []}
        for at, flow in enumerate(self.flows):
            for end, direction, mine, other in (
                (0, "send", flow.sender, flow.receiver),
                (1, "receive", flow.receiver, flow.sender),
            ):
                if mine == self.number:
                    parts = [
                        Part(self._array(at, i, direction, ends[end]), ends[end].datatype)
                        for i, ends in enumerate(flow.parts)
                    ]
                    message = Message(other, direction, tuple(parts), flow.tag)
                    messages[direction].append((flow, message))

        def job(is_copy: bool) -> Job:
            chosen = [
                [message for flow, message in found if (flow.way == "copy") == is_copy]
                for found in messages.values()
            ]
            sends, receives = (tuple(sorted(m, key=lambda m: (m.peer, m.tag))) for m in chosen)
            return Job(self.arrays, sends, receives, operation=self.operation)

        self.job, self.copies = job(False), job(True)
        everything = [pair for found in messages.values() for pair in found]
        self.ways = {m.key: flow.way for flow, m in everything if flow.way != "copy"}

    def _array(self, flow: int, part: int, direction: str, layout: Layout) -> int:
        block = self.arena.allocate(layout.span, layout.offset)
        self.arrays.append(Array(self.arena.bytes_of(block), block.pointer))
        self.layouts.append(layout)
        self.places[flow, part, direction] = len(self.arrays) - 1
        return len(self.arrays) - 1

    def exported(self) -> dict[tuple[int, int], Any]:
        """Return the addresses that senders need to put directly into this rank's arrays, by (sender, tag)."""
        return {(m.peer, m.tag): peer_info(m, self.arrays, self.arena) for m in self.job.receives}

    def prepare(self, draft: Any) -> None:
        self.draft = draft
        with patch.object(negotiation, "plan", self._plan):
            made = draft.prepared()
        self.before, self.after = made.before, made.after
        self.launch: Launch = made.concurrent if self.concurrent else made.alone
        self.only_copies: Launch | None = made.copies if self.apart else None
        if self.apart:
            self.launch = made.remote
        self.exchange = np.frombuffer(self.launch.args[1], negotiation.EXCHANGE)[0]
        self.own = self.arena.bytes_of(draft._own[0]).copy()
        self.gaps = draft._memory.gaps(self.arena.bytes_of(draft._block))
        for gap in self.gaps:
            gap[:] = GUARD

    def _plan(self, segments: Sequence[Segment], *, sms: int) -> PeerPlan:
        self.planned = plan(segments, sms=sms)
        return self.planned

    def begin_at(self, epoch: int) -> None:
        """Set the state and the flags to their values after epoch - 1 exchanges."""
        draft, last = self.draft, (epoch - 1) % 2**32
        block = self.arena.bytes_of(draft._block)
        at = draft._memory.at
        block[at["state"] :][:8].view("u8")[:] = (epoch - 1) << EPOCH_SHIFT
        for key, start in at.items():
            if key[0] == "begun":
                block[start:][:4].view("u4")[:] = last
            if key[0] == "flags":
                block[start:][: draft._memory.sizes[key]].view("u4")[:] = last
        self.begun_chunks[:] = last

    @property
    def begun_chunks(self) -> np.ndarray:
        """The kernel's record of the chunks that it has begun to send, as a view."""
        memory = self.arena.bytes_of(self.draft._own[0])
        start = int(self.exchange["begun_chunk"]) - self.draft._own[0].pointer
        return memory[start:][: 4 * int(self.exchange["send_chunks"])].view("u4")

    @property
    def kinds(self) -> set[Kind]:
        return {Kind(kind) for kind in self.planned.segments["kind"].tolist()}

    def limit(self, seconds: float) -> None:
        """Set the time limit of later launches."""
        self.exchange["limit_ns"] = int(seconds * 1e9)

    def fill(self, epoch: int) -> None:
        """Fill the arrays with their contents before an exchange."""
        for array, values in zip(self.arrays, contents(self, epoch), strict=True):
            array.data[:] = values

    @property
    def failure(self) -> tuple[int, int]:
        """Index of a missing message + 1 and the epoch; zeros if no message is missing."""
        return tuple(self.draft.failure.words[:2])

    @property
    def epochs(self) -> int:
        """Number of launches that have ended."""
        at = self.draft._memory.at["state"]
        state = int(self.arena.bytes_of(self.draft._block)[at:][:8].view("u8")[0])
        assert state % (1 << EPOCH_SHIFT) == 0
        return state >> EPOCH_SHIFT

    def run(self, order: np.ndarray | None = None, *, delays: int = 0, seed: int = 0) -> None:
        """Launch and wait for the end; the blocks run in the given order, or in ascending order.

        Launches before and after the kernel move types that it does not support, and add.
        """
        blocks = np.arange(self.launch.blocks) if order is None else order
        mps = self.multiprocessors
        for launches in self.before:
            launches.launch(0)
        copies = self.only_copies
        if copies is not None and seed % 2:  # before the other chunks, or after them
            copies.run(
                self.number, np.arange(copies.blocks), multiprocessors=mps, delays=delays, seed=seed
            )
        self.launch.run(self.number, blocks, multiprocessors=mps, delays=delays, seed=seed)
        if copies is not None and not seed % 2:
            copies.run(
                self.number, np.arange(copies.blocks), multiprocessors=mps, delays=delays, seed=seed
            )
        for launches in self.after:
            launches.launch(0)

    def check(self) -> None:
        """Check that the kernel wrote only to arrays, staging memory and the words of the protocol."""
        self.arena.check_guards()
        assert all((gap == GUARD).all() for gap in self.gaps)
        own = self.arena.bytes_of(self.draft._own[0])
        first = int(self.exchange["begun_chunk"]) - self.draft._own[0].pointer
        last = first + 4 * int(self.exchange["send_chunks"])
        assert (own[:first] == self.own[:first]).all() and (own[last:] == self.own[last:]).all()


class _Memory(negotiation._Memory):
    """Also records the sizes of its parts, to find the gaps between them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[Any, int] = {}

    def reserve(self, key: Any, nbytes: int) -> None:
        self.sizes[key] = nbytes
        super().reserve(key, nbytes)

    def gaps(self, block: np.ndarray) -> list[np.ndarray]:
        ends = [*list(self.at.values())[1:], self.size]
        return [
            block[start + self.sizes[key] : end]
            for (key, start), end in zip(self.at.items(), ends, strict=True)
        ]


@contextmanager
def without_gpu(sms: int, adapt: Callable[..., Any]) -> Iterator[HostCuda]:
    """Let negotiations use host memory, and make launches by ``adapt``."""

    def prepared(
        defines: Any, blocks: int, threads: int, arguments: Any, *, device: int, dependent: bool
    ) -> Launch:
        return adapt(defines, blocks, threads, arguments)

    with (
        host_cuda() as gpu,
        host_launches(),
        patch.multiple(
            negotiation,
            kernel=lambda name, function, device, defines: defines,
            multiprocessors=lambda device: sms,
            PreparedLaunch=prepared,
            _Memory=_Memory,
        ),
    ):
        yield gpu


def as_planned(defines: Any, blocks: int, threads: int, arguments: Any) -> Launch:
    """Return the launch with the defines that a GPU would use."""
    return Launch(defines, blocks, threads, arguments)


def few_kernels(defines: Any, blocks: int, threads: int, arguments: Any) -> Launch:
    """Return the launch with the most general defines, so that tests compile few kernels."""
    found = dict(defines)
    found.update(WORD_BYTES="0", IN_FLIGHT="2", KINDS="0x1ff")
    if found["TABLE_SEGMENTS"] != "0":
        item = segment_dtype(int(found["MAX_LEVELS"])).itemsize
        most = TABLE_BYTES // item
        found["TABLE_SEGMENTS"] = str(most)
        table = bytes(arguments[0]).ljust(most * item, b"\0")
        arguments = [(ctypes.c_char * len(table)).from_buffer_copy(table), arguments[1]]
    return Launch(tuple(found.items()), blocks, threads, arguments)


def connect(
    flows: Sequence[Flow],
    *,
    sms: int = 1,
    multiprocessors: int = 1,
    limit_s: float = LIMIT_S,
    adapt: Callable[..., Launch] = few_kernels,
    operation: Operation = "copy",
    concurrent: Sequence[int] = (),
    apart: Sequence[int] = (),
) -> list[Rank]:
    """Create the ranks of some messages and their launches, and for some ranks the launches of overlapped steps."""
    n = 1 + max(max(flow.sender, flow.receiver) for flow in flows)
    ranks = [
        Rank(number, flows, multiprocessors, operation, number in concurrent, number in apart)
        for number in range(n)
    ]
    exported = [rank.exported() for rank in ranks]
    with without_gpu(sms, adapt):
        drafts = []
        for rank in ranks:
            world: Any = SimpleNamespace(rank=rank.number, limit_s=limit_s)
            theirs = {(m.peer, m.tag): exported[m.peer][rank.number, m.tag] for m in rank.job.sends}
            drafts.append(
                negotiation.Negotiation(world, rank.arena, rank.job, rank.copies, rank.ways, theirs)
            )
        requests = _swapped(drafts, [draft.request(None) for draft in drafts])
        replies = [draft.reply(told) for draft, told in zip(drafts, requests, strict=True)]
        for draft, answers in zip(drafts, _swapped(drafts, replies), strict=True):
            draft.open(answers)
        for rank, draft in zip(ranks, drafts, strict=True):
            if rank.job.sends or rank.job.receives:
                rank.prepare(draft)
    return [rank for rank in ranks if rank.job.sends or rank.job.receives]


def _swapped(drafts: Sequence[Any], told: Sequence[Mapping[int, Any]]) -> list[dict[int, Any]]:
    """Return, for each rank, the records that its peers made for it, by peer."""
    return [
        {other: told[other][rank] for other in draft.peers} for rank, draft in enumerate(drafts)
    ]


def content(rank: int, array: int, epoch: int, nbytes: int) -> np.ndarray:
    """Return an array's bytes before an exchange; they differ between epochs."""
    return np.random.default_rng((rank, array, epoch)).integers(0, 256, nbytes, np.uint8)


ORDERS = ("forward", "backward", "random")


def exchange(
    ranks: Sequence[Rank],
    epochs: int = 4,
    *,
    first: int = 1,
    order: str | Sequence[str] = "random",
    delays: int = 0,
    late_s: Mapping[int, float] | None = None,
    seed: int = 0,
) -> None:
    """Run exchanges ``first``, ``first + 1``, ... on all ranks at once, without synchronization between them.

    Each rank fills its arrays, launches, and compares every byte with the result that NumPy computes.
    """
    if first != 1:
        for rank in ranks:
            rank.begin_at(first)
    by_number = {rank.number: rank for rank in ranks}

    def work(rank: Rank) -> None:
        rng = np.random.default_rng((seed, rank.number))
        mine = order if isinstance(order, str) else order[rank.number]
        for epoch in range(first, first + epochs):
            rank.fill(epoch)
            if late_s:
                time.sleep(late_s.get(rank.number, 0))
                # Other ranks must not write to the arrays of a rank that has not launched yet.
                compare(rank, epoch, [array.data for array in rank.arrays], contents(rank, epoch))
            blocks = np.arange(rank.launch.blocks)[:: -1 if mine == "backward" else 1]
            if mine == "random":
                blocks = rng.permutation(blocks)
            rank.run(blocks, delays=delays, seed=seed * 1000 + int(rng.integers(1000)))
            assert rank.failure == (0, 0), f"rank {rank.number}, epoch {epoch}"
            check_received(rank, by_number, epoch)
        assert rank.epochs == first + epochs - 1

    at_once(work, ranks)
    for rank in ranks:
        rank.check()


def contents(rank: Rank, epoch: int) -> list[np.ndarray]:
    return [content(rank.number, i, epoch, a.data.size) for i, a in enumerate(rank.arrays)]


def check_received(rank: Rank, ranks: Mapping[int, Rank], epoch: int) -> None:
    """Compare all arrays of a rank with the expected result of the exchange."""
    expected = contents(rank, epoch)
    for at, flow in enumerate(rank.flows):
        if flow.receiver != rank.number:
            continue
        sender = ranks[flow.sender]
        for part, (sent, received) in enumerate(flow.parts):
            number = sender.places[at, part, "send"]
            nbytes = sender.arrays[number].data.size
            values = content(sender.number, number, epoch, nbytes)[sent.bytes]
            target = expected[rank.places[at, part, "receive"]]
            if rank.operation == "add":
                dtype = received.datatype.uniform
                values = (target[received.bytes].view(dtype) + values.view(dtype)).view("u1")
            target[received.bytes] = values
    compare(rank, epoch, [array.data for array in rank.arrays], expected)


def compare(rank: Rank, epoch: int, found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for number, (array, want) in enumerate(zip(found, expected, strict=True)):
        if array.tobytes() != want.tobytes():
            wrong = np.flatnonzero(array != want)
            raise AssertionError(
                f"rank {rank.number}, array {number}, epoch {epoch}: {wrong.size} bytes differ, from {wrong[0]} on"
            )
