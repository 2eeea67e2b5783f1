"""GPUs of all ranks, and the pairs of ranks that can map each other's memory; tested once per communicator.

CUDA_VISIBLE_DEVICES renumbers and hides GPUs differently on each rank, so device ordinals cannot be compared. Instead,
GPUs are compared by UUID, and each rank tries to map the memory of the other ranks of its node. A rank keeps records of
its node only, and one number of every rank: with HALOX_NODE, ranks of different nodes may share a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from halox.runtime.communicator import digest
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu import cuda
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.segments import SegmentKey
from halox.runtime.world import World

_PROBE_BYTES = 4096
_SURVEYING = "the survey of GPUs"


@dataclass(frozen=True, eq=False)
class Topology:
    """GPUs of all ranks: for each rank a digest of its GPU's UUID (0 on the host) and its node.

    For pairs of ranks (a, b) of this node, ``unmapped`` has the reason why a cannot map the memory of b, and
    ``no_events`` the reason why a cannot wait for events of b. ``pairs`` counts, on all nodes, the pairs of ranks that
    can map each other's memory, and the pairs that cannot.
    """

    gpus: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int32]
    unmapped: Mapping[tuple[int, int], str]
    no_events: Mapping[tuple[int, int], str] = field(default_factory=dict)
    pairs: tuple[int, int] = (0, 0)

    def sharers(self, rank: int) -> tuple[int, ...]:
        users = np.flatnonzero(self.gpus == self.gpus[rank]).tolist() if self.gpus[rank] else []
        return tuple(user for user in users if user != rank)

    @cached_property
    def users(self) -> npt.NDArray[np.int64]:
        """Number of ranks that use the GPU of each rank, 0 for a rank on the host."""
        _, inverse, counts = np.unique(self.gpus, return_inverse=True, return_counts=True)
        return np.where(self.gpus == 0, 0, counts[inverse])

    @property
    def is_shared(self) -> bool:
        return bool((self.users > 1).any())

    @property
    def all_map(self) -> bool:
        """Whether all ranks are on one node, and all ranks with GPUs can map each other's memory."""
        return not self.unmapped and not self.nodes.any()

    def why_unmapped(self, a: int, b: int) -> str | None:
        """Return why two ranks cannot map each other's device memory, None if they can.

        At least one of the ranks is on this node.
        """
        for rank in (a, b):
            if not self.gpus[rank]:
                return f"rank {rank} has no arrays on a GPU"
        if self.nodes[a] != self.nodes[b]:
            return f"ranks {a} and {b} are on different nodes"
        return self.unmapped.get((a, b)) or self.unmapped.get((b, a))

    def why_no_events(self, a: int, b: int) -> str | None:
        """Return why two ranks cannot map memory, or why their streams cannot wait for each other; else None."""
        why = self.why_unmapped(a, b)
        return why or self.no_events.get((a, b)) or self.no_events.get((b, a))

    def why_no_signals(self, a: int, b: int) -> str | None:
        """Return why kernels of two ranks cannot wait for each other, None if they can.

        A kernel that waits for another rank must not keep that rank from running.
        """
        for rank in (a, b):
            sharers = self.sharers(rank)
            if sharers:
                return (
                    f"rank {rank} shares its GPU with rank {', '.join(map(str, sharers))}: kernels "
                    "of ranks that take turns on a GPU cannot wait for one another"
                )
        return self.why_unmapped(a, b)


def survey(world: World, arena: DeviceArena | None, events: EventPool | None) -> Topology:
    """Find the GPUs of all ranks, and try to map the memory and events of the ranks on this node; collective."""
    offer: tuple[Mapping[SegmentKey, bytes], Mapping[int, bytes]] = ({}, {})
    block, numbers = None, []
    if arena is not None and events is not None:
        block, numbers = arena.allocate(_PROBE_BYTES), events.acquire(1)
        offer = arena.handles([block.place]), events.handles(numbers)
    own = 0 if arena is None else _identity(arena.device)
    failures: dict[tuple[int, int], str] = {}
    no_events_here: dict[tuple[int, int], str] = {}
    ranks = world.ranks
    offers = ranks.gather(offer, _SURVEYING, of_node=True)
    for rank, (memory, signals) in zip(world.node_ranks, offers, strict=True):
        if arena is None or events is None or rank == world.rank or not memory:
            continue
        try:
            arena.open(memory)
        except RuntimeError as error:
            failures[world.rank, rank] = (
                f"rank {world.rank} cannot map the GPU memory of rank {rank} ({error}): both GPUs "
                "must be visible to both processes, in one container, with peer access"
            )
        try:
            events.open(rank, signals)
        except RuntimeError as error:
            no_events_here[world.rank, rank] = (
                f"rank {world.rank} cannot wait for events of rank {rank} ({error}): the processes "
                "must share /dev/shm and the IPC namespace"
            )
    if arena is not None and block is not None and events is not None:
        arena.release(block)
        events.release(numbers)
    gathered = ranks.gather((failures, no_events_here), _SURVEYING, of_node=True)
    unmapped, no_events = (
        {pair: why for reasons in column for pair, why in reasons.items()}
        for column in zip(*gathered, strict=True)
    )
    gpus = ranks.gather_numbers(own, _SURVEYING)
    found = Topology(gpus, ranks.node_of, unmapped, no_events)
    others = [other for other in world.node_ranks if other > world.rank]
    mapped = sum(found.why_unmapped(world.rank, other) is None for other in others)
    _, pairs = world.total(lambda: (None, [mapped, len(others) - mapped]), _SURVEYING)
    return replace(found, pairs=(pairs[0], pairs[1]))


def _identity(device: int) -> int:
    """Return a digest of a GPU's UUID, not 0."""
    return digest(bytes(cuda.cupy().cuda.runtime.getDeviceProperties(device)["uuid"])) | 1
