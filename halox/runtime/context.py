"""Context of all plans and reductions of a grid: its ranks, their shared memory and their GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from halox.errors import ExchangeTimeoutError
from halox.runtime.arena import HostPlace, SharedArena, arena_of
from halox.runtime.leftovers import Leftovers
from halox.runtime.place import Place
from halox.runtime.shared_memory import Bytes
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.device_arena import DeviceArena
    from halox.runtime.gpu.ipc_events import EventPool
    from halox.runtime.topology import Topology

_CLOSING = "a collective close"

Found = TypeVar("Found")


class Context:
    """Shared state of all plans and reductions of a grid, of an exchange, or of an allreduce.

    ``arena`` is host memory that the ranks of the node share. ``device_arena`` is memory of this rank's GPU that the
    other ranks of the node can map. ``events`` are interprocess events, for which the streams of these ranks can wait.
    ``device_arena`` and ``events`` are None until the GPU of this rank is known. ``topology`` lists the GPUs of all
    ranks; it is None until any rank makes a plan or reduction for a GPU.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.arena: SharedArena = arena_of(world)
        self.leftovers = Leftovers(world)
        self.device_arena: DeviceArena | None = None
        self.events: EventPool | None = None
        self.topology: Topology | None = None
        self._arenas: tuple[SharedArena, ...] = (self.arena,)
        self._kept: dict[Callable[[Context], object], Any] = {}

    @contextmanager
    def borrowing(self, other: Context) -> Iterator[None]:
        """Locate arrays in the shared memory of a second context too, while a plan is constructed.

        Both contexts have the same ranks in the same order, and all ranks enter the block. The plan must be closed
        before the context ``other``.
        """
        self._arenas = (self.arena, other.arena)
        try:
            yield
        finally:
            self._arenas = (self.arena,)

    def locate(self, start: int, end: int) -> HostPlace | None:
        """Return the place of memory [start, end) of this rank if it is in an arena of this context."""
        for number, arena in enumerate(self._arenas):
            place = arena.locate(start, end)
            if place is not None:
                return (
                    Place(place.segment._replace(arena=number), place.offset) if number else place
                )
        return None

    def segment_of(self, place: HostPlace) -> Bytes:
        """Return the bytes of the whole segment that contains a place from `locate`, of any rank of the node."""
        segment = place.segment
        return self._arenas[segment.arena].memory(Place(segment._replace(arena=0)))

    @property
    def device(self) -> int | None:
        """The GPU of this rank, once it is known."""
        return None if self.device_arena is None else self.device_arena.device

    def use_device(self, device: int) -> DeviceArena:
        """Set this rank's GPU, and return its exportable memory; local."""
        if self.device_arena is None:
            from halox.runtime.device_arena import DeviceArena
            from halox.runtime.gpu.ipc_events import EventPool

            self.device_arena = DeviceArena(device)
            self.events = EventPool(device)
        return self.device_arena

    def find_gpus(self) -> Topology:
        """Return the GPUs of all ranks, after a survey on the first call; collective."""
        if self.topology is None:
            from halox.runtime.topology import survey

            self.topology = survey(self.world, self.device_arena, self.events)
        return self.topology

    def once(self, find: Callable[[Context], Found]) -> Found:
        """Return ``find(self)``, computed on the first call only; collective if ``find`` is."""
        if find not in self._kept:
            self._kept[find] = find(self)
        found: Found = self._kept[find]
        return found

    def close(self) -> None:
        """Free the memory of plans and release the communicator; collective, and harmless when repeated.

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
        self.world.begin("close")
        self.leftovers.close()
        # Memory must not be freed while a peer has it mapped.
        names = self.world.gather(
            None if self.device_arena is None else self.device_arena.name, _CLOSING
        )
        if any(names):
            if self.device_arena is not None:
                self.device_arena.unmap([name for name in names if name is not None])
            self.world.gather(None, _CLOSING)
        if self.device_arena is not None:
            self.device_arena.free()
        if self.events is not None:
            self.events.close()
        self.arena.close()

    def close_after(self, error: BaseException) -> None:
        """Free all resources after an error in construction, if all ranks have raised this error."""
        self.world.guard.fail(error)
        if not self.world.failed:
            self.close()
