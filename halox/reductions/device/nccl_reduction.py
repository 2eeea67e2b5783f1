"""Reductions between nodes by NCCL, all on the stream: the middle step of ``hierarchical``.

NCCL only moves bytes here. NCCL's allreduce chooses its order of combination, lacks some operations, and ignores NaN in
"min" and "max". The kernels here combine the nodes' values in the order of the nodes, so that all ranks get the same
bits.

The first messages of a call carry the reduction's name (`halox.runtime.nccl_ranks` says why). A small array is copied
behind its name, and one message carries both. A large array follows its name in a separate message.

Small arrays: each rank gets the value of every other node from one rank there, and combines them all. Large arrays are
cut into slices, as many as the smallest node has ranks; slice i belongs to rank i of each node. Each slice is cut into
pieces, one for each node::

    node 0, ranks 0 1    pieces  | s0 n0 | s0 n1 | s1 n0 | s1 n1 |       1. rank 0 gets s0 n0 of rank 2, rank 1 gets
    node 1, ranks 2 3                                                       s1 n0 of rank 3, 2 s0 n1 of 0, 3 s1 n1 of 1
                                                                         2. each combines its piece and returns it
                                                                         3. ranks of a node swap their slices
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from halox.errors import StateError
from halox.reductions.algorithms import NCCL_GATHERED_BYTES
from halox.reductions.device.tree_reduction import ArrayKernels
from halox.runtime.arrays import DType
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import Mark, MarkLaunch
from halox.runtime.gpu.nccl import NcclOp
from halox.runtime.gpu.streams import Stream, StreamOrder, is_capturing, refuse_loop
from halox.runtime.nccl_ranks import AHEAD_BYTES, NAME_BYTES, NcclRanks, Watch, write
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.reductions.device.kernel_reductions import Target
    from halox.reductions.prepared import Launch
    from halox.runtime.array_types import CupyArray
    from halox.runtime.segments import Block

_ALIGNMENT = 512
_COPIED_BYTES = 1 << 20
"""Most bytes of an array that is copied behind its name: a separate message of 16 bytes takes 1 to 4 us, a copy 1."""

_MAKING = "the making of an allreduce"
_MOST_STEPS = 64


class Transfer(NamedTuple):
    """Elements [start, stop) that a rank sends or receives; elements received in the first step go to a node's slot."""

    is_send: bool
    peer: int
    start: int
    stop: int
    slot: int = -1


@dataclass(frozen=True)
class NodeSchedule:
    """Transfers of one rank, between nodes and within its node."""

    before: tuple[Transfer, ...]  # between nodes, before anything is combined
    # Elements [start, stop) that this rank combines; all elements if arrays are not cut.
    piece: tuple[int, int]
    after: tuple[tuple[Transfer, ...], ...] = ()  # of the combined values, step by step


def schedule(nodes: Sequence[int], rank: int, elements: int, *, is_cut: bool) -> NodeSchedule:
    """Return the transfers of a rank, from the nodes of all ranks.

    Examples
    --------
    >>> schedule((0, 1), 0, 6, is_cut=False).before
    (Transfer(is_send=True, peer=1, start=0, stop=6, slot=-1), Transfer(is_send=False, peer=1, start=0, stop=6, slot=1))
    >>> schedule((0, 1), 1, 6, is_cut=True).piece
    (3, 6)
    """
    count = len(set(nodes))
    members = [[r for r, node in enumerate(nodes) if node == n] for n in range(count)]
    own = nodes[rank]
    mates, place = members[own], members[own].index(rank)
    others = [node for node in range(count) if node != own]
    if not is_cut:
        sends = [
            Transfer(True, peer, 0, elements)
            for node in others
            for at, peer in enumerate(members[node])
            if at % len(mates) == place
        ]
        receives = [
            Transfer(False, members[node][place % len(members[node])], 0, elements, node)
            for node in others
        ]
        return NodeSchedule((*sends, *receives), (0, elements))
    slices = min(map(len, members))

    def piece(at: int, node: int) -> tuple[int, int]:
        number, total = at * count + node, slices * count
        return number * elements // total, (number + 1) * elements // total

    def whole(at: int) -> tuple[int, int]:
        return piece(at, 0)[0], piece(at, count - 1)[1]

    before: list[Transfer] = []
    back: list[Transfer] = []
    within: list[Transfer] = []
    if place < slices:
        for node in others:
            peer = members[node][place]
            before.append(Transfer(True, peer, *piece(place, node)))
            before.append(Transfer(False, peer, *piece(place, own), node))
            back.append(Transfer(True, peer, *piece(place, own)))
            back.append(Transfer(False, peer, *piece(place, node)))
        within += [Transfer(True, mate, *whole(place)) for mate in mates if mate != rank]
    within += [
        Transfer(False, mate, *whole(at)) for at, mate in enumerate(mates[:slices]) if mate != rank
    ]
    mine = piece(place, own) if place < slices else (0, 0)
    return NodeSchedule(tuple(before), mine, tuple(tuple(step) for step in (back, within) if step))


class Combiner(Protocol):
    """Combines contiguous arrays of one length on the GPUs of all ranks, or of the ranks of a node."""

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        """Combine arrays at two addresses (the same array or disjoint) on the current stream; collective.

        With an error, raise it instead. If the host takes part in a call, all ranks raise it. Kernels do not: the
        remaining ranks wait for this rank until their time limit.
        """

    def close(self) -> None:
        """Release memory and communicators; collective."""


class NcclHierarchicalReduction:
    """``hierarchical`` with NCCL as the middle step; see the module. Collective to make.

    ``kernels`` makes the kernels for arrays of some number of elements. ``within`` combines the ranks of this node; it
    is None if the rank is alone on its node.
    """

    captures = True

    def __init__(
        self,
        context: Context,
        ranks: NcclRanks,
        op: str,
        dtype: DType,
        elements: int,
        kernels: Callable[[int], ArrayKernels],
        within: Combiner | None,
    ) -> None:
        world, arena = context.world, context.device_arena
        assert arena is not None
        self._ranks, self._arena, self._within = ranks, arena, within
        self._item = dtype.itemsize
        nodes = world.node_count
        nbytes = elements * self._item
        slices = min(Counter(world.nodes).values())
        # Between two ranks, pieces would be as many bytes in total, in two steps.
        pays = nbytes * (nodes - 1) > NCCL_GATHERED_BYTES and nodes * slices > 2
        is_cut = pays and elements >= world.size
        self._schedule = plan = schedule(world.nodes, world.rank, elements, is_cut=is_cut)
        self._node, self._nodes = world.nodes[world.rank], nodes
        # Whether a message carries both name and array, the same on all ranks. A rank alone on its node copies its
        # array behind the name for that; on other ranks the reduction within the node writes it there.
        self._is_named = not is_cut and (slices > 1 or nbytes <= _COPIED_BYTES)
        start, stop = plan.piece
        slot = rounded_up(AHEAD_BYTES + (stop - start) * self._item, _ALIGNMENT)
        own = rounded_up(AHEAD_BYTES + nbytes, _ALIGNMENT)
        receives = [transfer for transfer in plan.before if not transfer.is_send]
        assert arena.device is not None

        def make() -> tuple[Block, ArrayKernels | None]:
            piece = kernels(stop - start) if stop > start else None
            return arena.allocate(own + nodes * slot + 8 * len(receives)), piece

        # Allocate on all ranks or on none, before the ranks connect.
        self._block, self._piece = world.attempt(make, _MAKING)
        begin = int(arena.pointer(self._block.place))
        self._own = begin + AHEAD_BYTES
        self._slots = [self._own + own + node * slot for node in range(nodes)]
        transfers = [*plan.before, *(transfer for step in plan.after for transfer in step)]
        targets = {transfer.peer for transfer in transfers if transfer.is_send}
        sources = {transfer.peer for transfer in transfers if not transfer.is_send}
        table = begin + own + nodes * slot
        places = np.array([self._slots[transfer.slot] - AHEAD_BYTES for transfer in receives], "u8")
        self._copies = within is None and self._is_named
        watches: list[Watch] = []

        def mark() -> None:
            device = arena.device
            write(device, {begin: np.array([name], "u4"), table: places})
            what, peers = f"a reduction (op={op!r})", sorted(targets | sources)
            watch = Watch(
                ranks,
                what,
                peers,
                name,
                table,
                [transfer.peer for transfer in receives],
                world.limit_s,
            )
            watches.append(watch)
            # A launch marks the start of a call, except without a time limit, or if the copy sets the mark.
            marks = [] if watch.begin is None or self._copies else [MarkLaunch(watch.begin, device)]
            self._begin = [mark.at for mark in marks]
            self._end = MarkLaunch(watch.end, device).at

        try:
            name = ranks.connect(world, targets, sources)
            world.attempt(mark, _MAKING)
        except Exception:
            for watch in watches:
                watch.close()
            arena.release(self._block)
            raise
        (self._watch,) = watches
        self._steps: dict[tuple[int, int], Sequence[Callable[[int], None]]] = {}
        self._order = StreamOrder()
        self._world = world
        self._has_refused = False  # the last call

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        """Combine, or raise an error; this rank's next call then waits for all ranks on the host."""
        self._watch.check()
        refuse_loop("a reduction by NCCL")
        if error is not None:
            self._has_refused |= not is_capturing(stream)
            raise error
        if self._has_refused:
            self._resume()
        self._order.follow(stream)
        pointer, value = stream.ptr, source
        if self._within is not None:
            value = self._own
            self._within.reduce(source, value, stream, None)
        for step in self._steps.get((value, target)) or self._steps_of(value, target):
            step(pointer)

    def bind(self, source: int, target: Target) -> Launch:
        """Prepare calls on CuPy's current stream, to one address, or to new arrays for the results."""
        reduce, current_stream = self.reduce, cupy().cuda.get_current_stream
        if not callable(target):
            return lambda _: reduce(source, target, current_stream(), None)

        def call(_: Sequence[object]) -> CupyArray:
            stream = current_stream()
            try:
                result = target()
            except Exception as error:
                reduce(0, 0, stream, error)
                raise
            reduce(source, result.data.ptr, stream, None)
            return result

        return call

    def _resume(self) -> None:
        """Continue after a call that all ranks have refused; collective."""

        def check() -> None:
            if is_capturing():
                raise StateError(
                    "the current stream is being captured, and this rank has refused the last reduction; take one "
                    "before the capture"
                )

        self._world.attempt(check, "a reduction after one that was refused")
        self._has_refused = False

    def _steps_of(self, source: int, target: int) -> Sequence[Callable[[int], None]]:
        """Return the launches of a call, for an array at one address and a result at another or the same address."""
        value = source
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        plan = self._schedule
        begin: Sequence[Callable[[int], None]] = self._begin
        if self._copies:
            assert self._piece is not None
            begin, value = (
                [self._piece.copy_launch(self._own, source, self._watch.begin)],
                self._own,
            )
        ends_early = not plan.after and self._piece is not None
        combining = self._combining(value, target, self._watch.end if ends_early else None)
        steps = self._steps[source, target] = [
            *begin,
            *self._grouped(self._named(self._ops(plan.before, value))),
            *combining,
            *(launch for step in plan.after for launch in self._grouped(self._ops(step, target))),
            *([] if ends_early else [self._end]),
        ]
        return steps

    def _combining(
        self, value: int, target: int, mark: Mark | None
    ) -> Sequence[Callable[[int], None]]:
        """Return launches that combine this rank's piece in the order of the nodes; the first launch sets a mark."""
        kernels = self._piece
        if kernels is None:
            return []
        offset = self._schedule.piece[0] * self._item
        values = [*self._slots]
        values[self._node] = value + offset
        launches = []
        total = values[0]
        for number, added in enumerate(values[1:], 1):
            # Intermediate totals are not in the result, which may be the array whose values are still needed.
            to = target + offset if number == self._nodes - 1 else self._slots[self._node]
            is_first = number == 1
            addresses = to, total, added
            launches.append(
                kernels.pair_launch(addresses, is_first=is_first, mark=mark if is_first else None)
            )
            total = to
        return launches

    def _grouped(self, ops: Sequence[NcclOp]) -> Sequence[Callable[[int], None]]:
        return [self._ranks.prepared(ops)] if ops else []

    def _named(self, ops: Sequence[NcclOp]) -> list[NcclOp]:
        """Add names to the first step's sends and receives: in the same messages, or in separate messages ahead."""
        if self._is_named:
            return [
                op._replace(pointer=op.pointer - AHEAD_BYTES, nbytes=op.nbytes + AHEAD_BYTES)
                for op in ops
            ]
        return [
            both
            for op in ops
            for both in (
                NcclOp(
                    op.is_send,
                    (self._own if op.is_send else op.pointer) - AHEAD_BYTES,
                    NAME_BYTES,
                    op.peer,
                ),
                op,
            )
        ]

    def _ops(self, transfers: Sequence[Transfer], array: int) -> list[NcclOp]:
        item = self._item
        return [
            NcclOp(
                transfer.is_send,
                array + transfer.start * item if transfer.slot < 0 else self._slots[transfer.slot],
                (transfer.stop - transfer.start) * item,
                transfer.peer,
            )
            for transfer in transfers
            if transfer.stop > transfer.start
        ]

    def close(self) -> None:
        """Wait for the last call, and release memory and communicators; collective."""
        self._order.synchronize()
        self._watch.close()
        if self._within is not None:
            self._within.close()
        self._arena.release(self._block)
