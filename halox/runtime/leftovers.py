"""Requests and memory of closed plans that MPI or other ranks may still use.

A plan is closed locally, possibly during an exchange. So two kinds of resources outlive the plan:

- Active requests with their buffers. MPI writes into the buffer of a receive when the peer's message arrives, however
  late, and this receive must match the message before a receive of a later plan does.
- Memory that other ranks access: shared blocks, staging memory on GPUs, events. Also the arrays of a plan that was
  closed between start and finish or after a failure. This memory is kept until all ranks have closed the plan. The
  ranks exchange this information when they make the next plan.

Until they are freed, `halox.runtime.finalizing` keeps these objects alive, also beyond the end of the interpreter.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from halox.runtime.communicator import Communicator
from halox.runtime.finalizing import drop, keep

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.runtime.device_arena import DeviceArena


class Closable(Protocol):
    """Memory that `close` releases."""

    def close(self) -> None:
        """Release the memory."""


class SharedPart(Protocol):
    """Part of a plan with memory that other ranks access, for example a channel."""

    @property
    def has_ended(self) -> bool:
        """Whether all exchanges that this rank has started are complete."""

    @property
    def has_failed(self) -> bool:
        """Whether an exchange has failed, possibly without an error in the caller."""

    def free(self) -> None:
        """Release the memory that other ranks accessed; local."""


@dataclass(eq=False)
class _ActiveRequests:
    """Active requests, and the memory of their transport buffers."""

    receives: list[MPI.Request]
    sends: list[MPI.Request]
    memory: Sequence[Closable]


@dataclass(eq=False)
class _ClosedPlan:
    """Channels of a plan that this rank has closed, and arrays that peers may still access."""

    channels: Sequence[SharedPart]
    arrays: Sequence[object]


class Leftovers:
    """Requests and memory of closed plans, of one communicator."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._active: list[_ActiveRequests] = []
        self._closed_plans: dict[int, _ClosedPlan] = {}
        self.arenas: weakref.WeakSet[DeviceArena] = weakref.WeakSet()
        """Open memory of this rank's GPUs; the work of these GPUs may access the memory of closed plans."""

    def keep(
        self,
        receives: Sequence[MPI.Request],
        sends: Sequence[MPI.Request],
        memory: Sequence[Closable],
    ) -> None:
        """Take over persistent requests and their memory, and free the inactive requests; local, does not block."""
        active = _ActiveRequests([*receives], [*sends], memory)
        keep(active)
        self._active.append(active)
        self.sweep()

    def sweep(self) -> None:
        """Free the completed requests; local, does not block."""
        if not self._active or self._ranks.mpi.Is_finalized():
            return
        # The garbage collector may append to the list meanwhile.
        previous, self._active = self._active, []
        for active in previous:
            active.receives = [*filter(_is_active, active.receives)]
            active.sends = [*filter(_is_active, active.sends)]
            if active.receives or active.sends:
                self._active.append(active)
                continue
            for buffer in active.memory:
                buffer.close()
            drop(active)

    def add(self, number: int, channels: Sequence[SharedPart], arrays: Sequence[object]) -> None:
        """Take over a plan that this rank has closed; free its channels, in order, once all ranks have closed it.

        Local. A plan with a channel that has not ended is never freed.
        """
        plan = _ClosedPlan(channels, arrays)
        if arrays or not all(channel.has_ended for channel in channels):
            keep(plan)
        if not all(channel.has_ended for channel in channels):
            return
        self._closed_plans[number] = plan
        if self._ranks.size == 1:
            self._free(number)

    def closed_plans(self) -> tuple[int, ...]:
        """Return the numbers of the plans that this rank has closed; wait until its GPUs do not use them. Local."""
        if self._closed_plans:
            for arena in list(self.arenas):
                arena.synchronize()
        return tuple(sorted(self._closed_plans))

    def reclaim(self, closed: Sequence[Sequence[int]]) -> None:
        """Free the plans that are in `closed_plans` of every rank, gathered in one call; local."""
        self.sweep()
        for number in sorted(set(closed[0]).intersection(*closed)):
            if number in self._closed_plans:
                self._free(number)

    def close(self) -> None:
        """Free the rest after all ranks have closed all plans; unmatched sends stay active. Collective."""
        for number in sorted(self._closed_plans):
            self._free(number)
        self.sweep()
        receives = [request for active in self._active for request in active.receives]
        for request in receives:
            request.Cancel()
        self._ranks.until(
            partial(self._ranks.mpi.Request.Testall, receives),
            lambda: "a collective close has waited for receives to be cancelled",
            tuple,
            receives,
        )
        for active in self._active:
            for request in active.receives:
                request.Free()
            active.receives = []
        self.sweep()

    def _free(self, number: int) -> None:
        plan = self._closed_plans.pop(number)
        for channel in plan.channels:
            channel.free()
        if plan.arrays:
            drop(plan)


def _is_active(request: MPI.Request) -> bool:
    """Return whether MPI may still use a request's memory, and free the request if not."""
    # After an error MPI may still use the memory, so the request counts as active.
    with suppress(Exception):
        if request.Test():
            request.Free()
            return False
    return True
