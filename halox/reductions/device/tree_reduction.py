"""Reductions up a tree of ranks, through memory that the ranks map; events order their streams.

For ranks with kernels that cannot wait for one another, for example on a shared GPU. As on the ``ipc`` path, the host
never waits for the GPU; it waits only for flags, which say that an event *has been recorded* (`halox.paths.ipc`). After
Faraji and Afsahi 2014: the star is their shared buffer (3.1), with rank 0 combining all arrays; the binomial tree is
their binomial reduce and broadcast (3.2). As in their design, the directory of flags is in the node's host memory.

Every rank has in its GPU memory a buffer for each of its children, and two for totals. In call e, rank r::

    source -> total[e % 2]
    for each child, the lowest first:    waits for "packed" of the child;   total = total op buffer of the child
    has a parent:                        total -> its buffer for r; records and sets "packed"
                                         waits for "consumed" of rank 0;     total of rank 0 -> target
    is rank 0:                           records and sets "consumed";      total -> target

The star combines in the order of the ranks, the binomial tree ``(a0 op a1) op (a2 op a3)``; each has a fixed order.

No rank acknowledges that a buffer is free, since each call goes up and down the whole tree. A rank stores its next
total into its parent's buffer behind its wait for "consumed", which rank 0 recorded behind all combinations of the
previous call. Rank 0 writes the total of call e again in call e + 2, behind its waits for "packed" of call e + 1. Each
child of rank 0 recorded this "packed" after it had copied the total of call e, and behind the "packed" of its own
children. One event per rank is enough. A rank records its event again only when its host has seen a flag that other
hosts set after they had made their streams wait for the last record: for "packed" this flag is "consumed" of the same
call, for "consumed" it is "packed" of the next call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Self

from halox.errors import HaloxError, raising
from halox.paths.node import NodeLink
from halox.reductions.operations import element, find_operation
from halox.runtime.arena import SharedArena
from halox.runtime.arrays import DType
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.streams import Stream, StreamOrder, refuse_capture
from halox.runtime.handshake import handshake
from halox.runtime.segments import Block, Place, SegmentKey
from halox.runtime.world import World
from halox.values import rounded_up

Shape = Literal["shared_buffer", "binomial"]

_MAKING = "the making of a reduction"
_REDUCING = "an allreduce"
_ALIGNMENT = 256
_THREADS = 256
_TOTALS = 2


def children(shape: Shape, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks whose totals a rank combines, in their order.

    Examples
    --------
    >>> [children("shared_buffer", rank, 4) for rank in range(4)]
    [(1, 2, 3), (), (), ()]
    >>> [children("binomial", rank, 6) for rank in range(6)]
    [(1, 2, 4), (), (3,), (), (5,), ()]
    """
    if shape == "shared_buffer":
        return tuple(range(1, ranks)) if rank == 0 else ()
    senders, distance = [], 1
    while rank % (2 * distance) == 0 and rank + distance < ranks:
        senders.append(rank + distance)
        distance *= 2
    return tuple(senders)


class ArrayKernels:
    """Kernels and copies for arrays of the reduction's length; arguments are addresses."""

    def __init__(self, dtype: DType, op: str, elements: int, device: int) -> None:
        operation = find_operation(op, dtype)
        defines = (("ELEMENT", element(dtype)), ("OP", operation.kernel_name))
        blocks = max(1, min(-(-elements // _THREADS), 8 * multiprocessors(device)))
        self._combine, self._copy = (
            kernel("combine", name, device, defines) for name in ("combine", "copy_marked")
        )
        self._shape, self._device, self._elements = (blocks, _THREADS), device, elements
        self._runtime = cupy().cuda.runtime
        self._nbytes = elements * dtype.itemsize

    def combine_launch(
        self, total: int, first: int, value: int, mark: Mark | None = None
    ) -> Callable[[int], None]:
        """Return the launch that combines two arrays, and sets a mark as it starts; it takes a stream's address.

        The total may be one of the arrays.
        """
        marked = (mark or Mark(0, is_end=False)).arguments
        args = [*map(ctypes.c_uint64, (total, first, value, self._elements)), *marked]
        return PreparedLaunch(self._combine, *self._shape, args, device=self._device).launch

    def copy_launch(self, target: int, source: int, mark: Mark | None) -> Callable[[int], None]:
        numbers = map(ctypes.c_uint64, (target, source, self._elements))
        args = [*numbers, *(mark or Mark(0, is_end=False)).arguments]
        return PreparedLaunch(self._copy, *self._shape, args, device=self._device).launch

    def copy(self, target: int, source: int, stream: int) -> None:
        runtime = self._runtime
        runtime.memcpyAsync(target, source, self._nbytes, runtime.memcpyDefault, stream)


class _TreeRecord(NamedTuple):
    """Description of a rank for its peers: its memory, and the event that it records."""

    handles: Mapping[SegmentKey, bytes]
    place: Place
    events: Mapping[int, bytes]


class TreeReduction:
    """A reduction for any number of calls; made by :func:`make_tree_reduction`."""

    captures = False

    def __init__(
        self,
        world: World,
        memory: tuple[DeviceArena, EventPool],
        link: NodeLink,
        kernels: ArrayKernels,
        shape: Shape,
        nbytes: int,
    ) -> None:
        self._world, (self._arena, self._pool) = world, memory
        self._link, self._kernels = link, kernels
        self._runtime = cupy().cuda.runtime
        self._current_stream = cupy().cuda.get_current_stream
        self._tree = [children(shape, rank, world.size) for rank in range(world.size)]
        self._slot = rounded_up(nbytes, _ALIGNMENT)
        self._shape = shape
        mine = self._tree[world.rank]
        self._block: Block | None = self._arena.allocate(self._slot * (_TOTALS + len(mine)))
        self._numbers = self._pool.acquire(1)
        self._epoch = 0
        self._order = StreamOrder()

    def record(self) -> _TreeRecord:
        """Return this rank's description for its peers."""
        assert self._block is not None
        place = self._block.place
        return _TreeRecord(self._arena.handles([place]), place, self._pool.handles(self._numbers))

    def open(self, records: list[_TreeRecord]) -> Self:
        """Map the memory and events of this rank's parent and children, and of rank 0, whose total is the result."""
        rank, tree = self._world.rank, self._tree
        parent = next((r for r, ranks in enumerate(tree) if rank in ranks), None)
        mapped = {r for r in (parent, 0) if r is not None and r != rank}
        for other in mapped:
            self._arena.open(records[other].handles)
        for other in {*tree[rank], *({0} - {rank})}:
            self._pool.open(other, records[other].events)

        def total_of(other: int) -> int:
            return self._arena.pointer(records[other].place)

        self._own, self._first = total_of(rank), total_of(0)
        incoming = [self._own + self._slot * (_TOTALS + i) for i in range(len(tree[rank]))]
        combine = self._kernels.combine_launch
        self._combining = [
            [combine(total, total, buffer) for buffer in incoming]
            for total in (self._own, self._own + self._slot)
        ]
        self._to_parent: int | None = None
        if parent is not None:
            place = _TOTALS + tree[parent].index(rank)
            self._to_parent = total_of(parent) + self._slot * place
        numbers = [next(iter(record.events)) for record in records]
        self._event = self._pool.own(self._numbers[0])
        self._event_of = {
            other: self._pool.opened(other, numbers[other])
            for other in {*tree[rank], *({0} - {rank})}
        }
        self._packed = {child: self._link.flag("packed", [child]) for child in tree[rank]}
        self._own_packed = self._link.flag("packed", [])
        self._consumed = self._link.flag("consumed", [0] if rank else [])
        return self

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        """Agree that all ranks take part, and put a call on the current stream."""
        self._world.attempt(raising(error), _REDUCING)
        self(source, target)

    def __call__(self, source: int, target: int) -> None:
        """Put a call on the current stream.

        Collective. Waits for the hosts of the ranks, not for GPUs.
        """
        stream = self._current_stream()
        refuse_capture(stream.ptr, self._shape)
        self._order.follow(stream)
        self._epoch += 1
        kernels, at = self._kernels, stream.ptr
        wait, record = self._runtime.streamWaitEvent, self._runtime.eventRecord
        number = self._epoch % _TOTALS
        total, result = (start + number * self._slot for start in (self._own, self._first))
        kernels.copy(total, source, at)
        for (child, packed), combine in zip(
            self._packed.items(), self._combining[number], strict=True
        ):
            packed.wait(self._epoch)
            wait(at, self._event_of[child])
            combine(at)
        if self._to_parent is None:
            record(self._event, at)
            self._consumed.signal(self._epoch)
        else:
            kernels.copy(self._to_parent, total, at)
            record(self._event, at)
            self._own_packed.signal(self._epoch)
            self._consumed.wait(self._epoch)
            wait(at, self._event_of[0])
        kernels.copy(target, result, at)

    def close(self) -> None:
        """Release memory and events, when the GPUs of all ranks have ended the last call; collective."""
        if self._block is None:
            return
        self._order.synchronize()
        # Other ranks may still be copying rank 0's total.
        self._world.attempt(raising(None), "the closing of a reduction")
        self._link.close()
        self.abandon()

    def abandon(self) -> None:
        """Release memory and events that no other rank uses; local."""
        if self._block is not None:
            self._arena.release(self._block)
            self._pool.release(self._numbers)
            self._block = None


def make_tree_reduction(
    world: World,
    memory: tuple[DeviceArena, EventPool, SharedArena],
    shape: Shape,
    nbytes: int,
    kernels: Callable[[], ArrayKernels],
) -> TreeReduction:
    """Make a reduction of arrays up a tree.

    Collective over the world.
    """
    arena, events, shared = memory
    link = NodeLink(world, shared, [], [r for r in range(world.size) if r != world.rank])

    def draft() -> TreeReduction:
        if link.failed:
            raise HaloxError("the node has too little shared memory for the flags of a reduction")
        return TreeReduction(world, (arena, events), link, kernels(), shape, nbytes)

    rounds = [lambda new, _: new.record(), lambda new, records: new.open(records)]
    try:
        reduction: TreeReduction = handshake(world, draft, rounds, _MAKING)
    except HaloxError:
        link.close()
        raise
    return reduction
