"""GPUs of all ranks, and the pairs of ranks that can map each other's memory; tested once per communicator.

CUDA_VISIBLE_DEVICES renumbers and hides GPUs differently on each rank, so device ordinals cannot be compared. Instead,
GPUs are compared by UUID, and each rank tries to map the memory of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halox.runtime.device_arena import Allocation, DeviceArena
from halox.runtime.gpu import cuda
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.world import World

_PROBE_BYTES = 4096
_SURVEYING = "the survey of GPUs"


@dataclass(frozen=True)
class Topology:
    """GPUs of all ranks: for each rank its GPU's UUID (None on the host) and its node.

    For pairs of ranks (a, b) on one node, ``unmapped`` has the reason why a cannot map the memory of b, and
    ``no_events`` the reason why a cannot wait for events of b.
    """

    gpus: tuple[str | None, ...]
    nodes: tuple[int, ...]
    unmapped: Mapping[tuple[int, int], str]
    no_events: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Return all further ranks that use the GPU of a rank."""
        own = self.gpus[rank]
        return tuple(
            other for other, gpu in enumerate(self.gpus) if own and gpu == own and other != rank
        )

    @property
    def all_map(self) -> bool:
        """Whether all ranks are on one node, and all ranks with GPUs can map each other's memory."""
        return not self.unmapped and len(set(self.nodes)) <= 1

    def why_unmapped(self, a: int, b: int) -> str | None:
        """Return why two ranks cannot map each other's device memory, None if they can."""
        for rank in (a, b):
            if self.gpus[rank] is None:
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
    """Gather the GPUs of all ranks, and try to map the memory and events of the ranks on this node; collective."""
    offer: tuple[Mapping[Allocation, bytes], Mapping[int, bytes]] = ({}, {})
    block, numbers = None, []
    if arena is not None and events is not None:
        block, numbers = arena.allocate(_PROBE_BYTES), events.acquire(1)
        offer = arena.handles([block.place]), events.handles(numbers)
    own = None if arena is None else _uuid(arena.device)
    failures: dict[tuple[int, int], str] = {}
    no_events_here: dict[tuple[int, int], str] = {}
    ranks = sorted(world.node_ranks, key=lambda rank: world.node_ranks[rank])
    offers = world.gather(offer, _SURVEYING)
    for rank in ranks:
        memory, signals = offers[rank]
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
    gathered = world.gather((own, failures, no_events_here), _SURVEYING)
    unmapped = {pair: why for _, reasons, _ in gathered for pair, why in reasons.items()}
    no_events = {pair: why for _, _, reasons in gathered for pair, why in reasons.items()}
    return Topology(tuple(gpu for gpu, _, _ in gathered), world.nodes, unmapped, no_events)


def _uuid(device: int) -> str:
    uuid = cuda.cupy().cuda.runtime.getDeviceProperties(device)["uuid"]
    return bytes(uuid).hex()
