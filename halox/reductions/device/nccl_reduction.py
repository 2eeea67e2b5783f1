"""Reductions between nodes by NCCL, all on the stream: the middle step of ``hierarchical``.

NCCL only moves bytes here. NCCL's allreduce chooses its order of combination, lacks some operations, and ignores NaN in
"min" and "max". Each rank gets the values of every other node from one rank there. The kernels here combine all values
in the order of the nodes, so that all ranks get the same bits.

The reduction's name is ahead of the values in each message (`halox.runtime.nccl_ranks` says why). So a rank that is
alone on its node copies its array behind the name; on other ranks the reduction within the node writes it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from halox.reductions.device.kernel_reductions import RESUMING, Target, check_resuming
from halox.reductions.device.tree_reduction import ArrayKernels
from halox.runtime.arrays import DType
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import MarkLaunch
from halox.runtime.gpu.nccl import NcclOp
from halox.runtime.gpu.streams import Stream, StreamOrder, is_capturing, refuse_loop
from halox.runtime.nccl_ranks import AHEAD_BYTES, NcclRanks, Watch, write
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.reductions.prepared import Launch
    from halox.runtime.array_types import CupyArray
    from halox.runtime.segments import Block

_ALIGNMENT = 512
_MAKING = "the making of an allreduce"
_MOST_STEPS = 64


def partners(nodes: Sequence[int], rank: int) -> tuple[list[int], dict[int, int]]:
    """Return the ranks to which a rank sends its node's values, and for each other node the rank that sends its values.

    Examples
    --------
    >>> [partners((0, 0, 1), rank) for rank in range(3)]
    [([2], {1: 2}), ([], {1: 2}), ([0, 1], {0: 0})]
    """
    members: dict[int, list[int]] = {node: [] for node in range(max(nodes) + 1)}
    for other, node in enumerate(nodes):
        members[node].append(other)
    mates = members.pop(nodes[rank])
    place = mates.index(rank)
    targets = [
        ranks[at] for ranks in members.values() for at in range(place, len(ranks), len(mates))
    ]
    return targets, {node: ranks[place % len(ranks)] for node, ranks in members.items()}


class DeviceAlgorithm(Protocol):
    """Combines contiguous arrays of one length on the GPUs of all ranks, or of the ranks of a node."""

    captures: bool  # whether a call may be captured in a CUDA graph

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        """Combine arrays at two addresses (the same array or disjoint) on the current stream; collective.

        With an error, raise it instead. If the host takes part in a call, all ranks raise it. Kernels do not: the
        remaining ranks wait for this rank until their time limit.
        """

    def close(self) -> None:
        """Release memory and communicators; collective."""


class NcclHierarchicalReduction:
    """``hierarchical`` with NCCL as the middle step; see the module. Collective to make.

    ``within`` combines the ranks of this node; it is None if the rank is alone on its node.
    """

    captures = True

    def __init__(
        self,
        context: Context,
        ranks: NcclRanks,
        op: str,
        dtype: DType,
        elements: int,
        kernels: Callable[[], ArrayKernels],
        within: DeviceAlgorithm | None,
    ) -> None:
        world, arena = context.world, context.device_arena
        assert arena is not None
        self._world, self._arena, self._within = world, arena, within
        self._node, nodes = world.node, world.node_count
        targets, sources = partners(world.nodes, world.rank)
        nbytes = AHEAD_BYTES + elements * dtype.itemsize
        slot = rounded_up(nbytes, _ALIGNMENT)

        def make() -> tuple[Block, ArrayKernels]:
            return arena.allocate((1 + nodes) * slot + 8 * len(sources)), kernels()

        # Allocate on all ranks or on none, before the ranks connect.
        self._block, self._kernels = world.attempt(make, _MAKING)
        own = int(arena.pointer(self._block.place))
        slots = [own + (1 + node) * slot for node in range(nodes)]
        table, places = own + (1 + nodes) * slot, [slots[node] for node in sources]
        self._own, self._slots = own + AHEAD_BYTES, [at + AHEAD_BYTES for at in slots]
        watches: list[Watch] = []
        self._begin: list[Callable[[int], None]] = []

        def mark() -> None:
            device = arena.device
            write(device, {own: np.array([name], "u4"), table: np.array(places, "u8")})
            what, peers = f"a reduction (op={op!r})", sorted({*targets, *sources.values()})
            watch = Watch(ranks, what, peers, name, table, [*sources.values()], world.limit_s)
            watches.append(watch)
            # The copy marks the start of a call, or a launch of its own; nothing does without a time limit.
            if within is not None and watch.begin is not None:
                self._begin.append(MarkLaunch(watch.begin, device).at)

        try:
            name = ranks.connect(world, targets, sources.values())
            world.attempt(mark, _MAKING)
        except Exception:
            for watch in watches:
                watch.close()
            arena.release(self._block)
            raise
        (self._watch,) = watches
        sends = [NcclOp(True, own, nbytes, peer) for peer in targets]
        receives = [NcclOp(False, slots[node], nbytes, peer) for node, peer in sources.items()]
        self._group = ranks.prepared([*sends, *receives])
        self._steps: dict[tuple[int, int], Sequence[Callable[[int], None]]] = {}
        self._order = StreamOrder()
        self._has_refused = False  # the last call

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        """Combine, or raise an error; this rank's next call then waits for all ranks on the host."""
        self._watch.check()
        refuse_loop("a reduction by NCCL")
        if error is not None:
            self._has_refused |= not is_capturing(stream)
            raise error
        if self._has_refused:
            self._world.attempt(check_resuming, RESUMING)
            self._has_refused = False
        self._order.follow(stream)
        pointer = stream.ptr
        if self._within is not None:
            self._within.reduce(source, self._own, stream, None)
            source = self._own
        for step in self._steps.get((source, target)) or self._steps_of(source, target):
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

    def _steps_of(self, source: int, target: int) -> Sequence[Callable[[int], None]]:
        """Return the launches of a call, for an array at one address and a result at another or the same address."""
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        steps = [*self._begin]
        kernels, watch = self._kernels, self._watch
        if self._within is None:
            steps.append(kernels.copy_launch(self._own, source, watch.begin))
        steps.append(self._group)
        values = [*self._slots]
        values[self._node] = self._own
        total, last = values[0], len(values) - 1
        for number, added in enumerate(values[1:], 1):
            # Intermediate totals are not in the result, which may be the array.
            to = target if number == last else self._slots[self._node]
            end = watch.end if number == 1 else None  # the messages have come when it starts
            steps.append(kernels.combine_launch(to, total, added, end))
            total = to
        self._steps[source, target] = steps
        return steps

    def close(self) -> None:
        """Wait for the last call, and release memory and communicators; collective."""
        self._order.synchronize()
        self._watch.close()
        if self._within is not None:
            self._within.close()
        self._arena.release(self._block)
