"""Context of all plans and reductions of an object: its ranks, their shared memory and their GPUs.

A grid, exchange or allreduce makes one `Context` and passes it to the selection of paths and to all channels. The
context finds the GPUs and other properties of the ranks at first use, and frees all memory when the object is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from halox.errors import ExchangeTimeoutError, raising
from halox.runtime.arena import SharedArena
from halox.runtime.leftovers import Leftovers
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.device_arena import DeviceArena
    from halox.runtime.gpu.ipc_events import EventPool
    from halox.runtime.topology import Topology

GPUS = "GPUs"
"""Name of the survey of GPUs among the resources of a communicator."""

_CLOSING = "a collective close"

Result = TypeVar("Result")


class Context:
    """Shared state of all plans and reductions of a grid, of an exchange, or of an allreduce.

    ``arena`` is host memory that the ranks of the node share. ``leftovers`` keeps the memory of closed plans. All
    objects on the communicator share these two. ``device_arena`` is memory of this rank's GPU that the other ranks of
    the node can map. ``events`` are interprocess events, for which the streams of these ranks can wait.
    ``device_arena`` and ``events`` are None until the GPU of this rank is known. ``topology`` lists the GPUs of all
    ranks; it is None until any rank makes a plan or reduction for a GPU.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # Closed plans keep the world. It must not count as a user of the communicator when its object was dropped. The
        # memory of a GPU stays, since other ranks may have mapped it.
        self._dropped = weakref.finalize(self, world.close)
        self._dropped.atexit = False
        ranks = world.ranks
        if "arena" not in ranks.resources:
            ranks.resources["arena"] = SharedArena(ranks)
            ranks.resources["leftovers"] = Leftovers(ranks)
        self.arena: SharedArena = ranks.resources["arena"]
        self.leftovers: Leftovers = ranks.resources["leftovers"]
        self.device_arena: DeviceArena | None = None
        self.events: EventPool | None = None
        self.topology: Topology | None = None
        self._results: dict[Callable[[Context], object], Any] = {}
        self._of_gpus: dict[Callable[[Context], object], Any] = {}

    @property
    def device(self) -> int | None:
        return None if self.device_arena is None else self.device_arena.device

    def use_device(self, device: int) -> DeviceArena:
        """Set this rank's GPU, and return its exportable memory; local."""
        if self.device_arena is None:
            from halox.runtime.device_arena import DeviceArena
            from halox.runtime.gpu.ipc_events import EventPool

            self._dropped.detach()
            self.device_arena = DeviceArena(device)
            self.events = EventPool(device)
            self.leftovers.arenas.add(self.device_arena)
        return self.device_arena

    def find_gpus(self) -> Topology:
        """Return the GPUs of all ranks; collective.

        The survey and the results of `of_gpus` stay on the communicator. The next survey is made once any rank has
        another GPU.
        """
        if self.topology is None:
            from halox.runtime.topology import survey

            kept, key = self.world.ranks.resources, self.device
            is_new = GPUS not in kept or kept[GPUS][0] != key
            _, (ranks_new,) = self.world.total(lambda: (None, [is_new]), "the search for GPUs")
            if ranks_new:
                kept[GPUS] = key, survey(self.world, self.device_arena, self.events), {}
            _, self.topology, self._of_gpus = kept[GPUS]
        return self.topology

    def of_gpus(self, find: Callable[[Context], Result]) -> Result:
        """Return ``find(self)``, which depends on GPUs and libraries only: once per survey; collective."""
        self.find_gpus()
        if find not in self._of_gpus:
            self._of_gpus[find] = find(self)
        result: Result = self._of_gpus[find]
        return result

    def once(self, find: Callable[[Context], Result]) -> Result:
        """Return ``find(self)``, computed on the first call only; collective if ``find`` is."""
        if find not in self._results:
            self._results[find] = find(self)
        result: Result = self._results[find]
        return result

    def close(self) -> None:
        """Free the memory of plans, and end the use of the communicator; collective, and harmless when repeated.

        Local after a failed call, when the ranks may be out of step.
        """
        if self.world.closed:
            return
        watch = self.world.ranks.watch
        try:
            if not self.world.failed and watch.find_failed(()) is None:
                self._free()
        except ExchangeTimeoutError:
            if watch.find_failed(()) is None:
                raise
        if watch.find_failed(()) is not None:
            watch.fail("a call has failed on another rank")
        self.world.close()

    def _free(self) -> None:
        """Free the memory, which other ranks may have mapped; collective."""
        world, arena = self.world, self.device_arena
        world.begin("close")
        mine = world.ranks.users == 1, self.leftovers.closed_plans(), arena is not None
        answers = world.gather(lambda: (None, mine), _CLOSING)[1].distinct
        are_last, closed, have_arenas = zip(*answers, strict=True)
        is_last = all(are_last)
        self.leftovers.reclaim(closed)
        if is_last:
            self.leftovers.close()
        # Memory must not be freed while a peer has it mapped.
        if any(have_arenas):
            names = world.ranks.gather(arena.name if arena else "", _CLOSING, of_node=True)
            if arena is not None:
                arena.unmap([name for name in names if name])
            world.attempt(raising(None), _CLOSING)
        if arena is not None:
            arena.free()
            self.leftovers.arenas.discard(arena)
        if self.events is not None:
            self.events.close()
        self.arena.close(is_last=is_last)

    def close_after(self, error: BaseException) -> None:
        """Free all resources after an error in construction, if all ranks have raised this error."""
        self.world.guard.fail(error)
        if not self.world.failed:
            self.close()
