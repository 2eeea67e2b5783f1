"""Runs exchanges: the steps of a plan's channels, one after another, and the state of the plan.

`Runner.run` is the only loop over the steps: of whole exchanges, of their halves, and of what else moves a plan's
arrays. A record of times belongs there. The state lets calls in a wrong order, from two threads, or after a failure
raise errors. `making.make_plan` makes runners, `PlanCache` holds those of a grid's calls, and `Plan` shows one to a
user.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from halox.errors import ClosedError, StateError
from halox.paths.base import Channel, ChannelMessages
from halox.plans.report import Report
from halox.runtime.arrays import Described, owner, sharing, span
from halox.runtime.finalizing import FORKED, keep
from halox.runtime.world import World

_MemoryAt: TypeAlias = Callable[[int], memoryview]
"""Makes an array of bytes at an address: the method ``from_address`` of a ctypes array."""

READY, STARTED, RUNNING, FAILED, CLOSED = range(5)
_MOST_BOUND = 32

Step: TypeAlias = Callable[[], object]

Bound: TypeAlias = list[object]
"""For each movable channel of a plan its views of other arrays."""


Release: TypeAlias = Callable[[Sequence[Channel], Sequence[object]], None]
"""Receives a closed plan's channels, to free later, and its arrays, to keep while other ranks may access them."""

UNFINISHED = "called between start() and finish(); call finish() first"


@dataclass(slots=True)
class _Phase:
    """Steps between two states of a plan; a check may refuse them, and the state is then the same as before."""

    before: int
    after: int
    checks: tuple[Step, ...]
    steps: tuple[Step, ...]
    misuse: str  # the error if the state is another one


class _Life:
    """State of a plan, and the arrays that must live during an exchange; shared with the plan's finalizer."""

    __slots__ = ("arrays", "state", "watched")

    def __init__(self) -> None:
        self.state = READY
        self.arrays: tuple[object, ...] = ()
        self.watched: tuple[weakref.ref[object], ...] = ()

    def fail(self) -> None:
        """Keep the arrays alive, since peers may still access them."""
        if not self.arrays:
            self.arrays = tuple(array for ref in self.watched if (array := ref()) is not None)


class Runner:
    """The channels of a plan in the order of their steps, with the plan's report.

    ``tick`` counts an exchange. A runner that is ``relocatable`` also exchanges other arrays of the same layouts: calls
    then give their views, which `views` makes. Attribute ``carried`` has the channels with their messages.
    """

    def __init__(
        self,
        world: World,
        device: int | None,
        carried: Sequence[ChannelMessages],
        report: Report,
        release_memory: Release,
        tick: Step | None = None,
        *,
        relocatable: bool = False,
    ) -> None:
        self.world, self.device, self.report = world, device, report
        self.relocatable = relocatable
        self.carried = [*carried]
        self._channels = channels = [each.channel for each in carried]
        self._guard, self._life = world.guard, _Life()
        release = partial(_close, channels, self._life, release_memory)
        # Not at exit, when MPI and CUDA may already be finalized.
        self._collected = weakref.finalize(self, world.guard.outside, release)
        self._collected.atexit = False
        counted = () if tick is None else (tick,)
        # Leave out steps of channels that do nothing in them.
        checks = tuple(c.check for c in channels if type(c).check is not Channel.check)
        starts = [c for c in channels if type(c).start is not Channel.start]
        finishes = tuple(c.finish for c in channels if type(c).finish is not Channel.finish)
        whole = (*counted, *map(_run_of, starts), *finishes)
        first = (*counted, *(channel.start for channel in starts))
        copied = (*counted, *(channel.start_copied for channel in starts))
        twice = "start() was called twice; call finish() between two starts"
        unstarted = "finish() was called without start(); call start() first"
        self._whole = _Phase(READY, READY, checks, whole, UNFINISHED)
        self._start = _Phase(READY, STARTED, checks, first, twice)
        self._start_copied = _Phase(READY, STARTED, checks, copied, twice)
        self._finish = _Phase(STARTED, READY, checks, finishes, unstarted)
        self._phases = self._whole, self._start, self._start_copied, self._finish
        self._movable = tuple(channel for channel in channels if channel.is_movable)
        # Of each array: the number of bytes before its first element, and the function that maps memory at an address.
        self._spans: list[tuple[int, _MemoryAt]] = []
        # Views by the addresses of the arrays: of memory in use, and of memory that may be used again.
        self._bounds: dict[tuple[int, ...], Bound] = {}
        self._bound: Bound | None = None
        self.arrays: tuple[object, ...] = ()

    def run(self, bound: Bound | None = None, phase: _Phase | None = None) -> None:
        """Run an exchange, or another phase; ``bound`` has the views of arrays that are not the plan's own."""
        if phase is None:
            phase = self._whole
        guard, life = self._guard, self._life
        outer = guard.user
        if life.state != phase.before or outer:
            self.check_state(phase.before, phase.misuse)
        guard.user = life.state = RUNNING
        if phase.checks:
            self._check(phase, outer)
        try:
            if bound is not self._bound:  # not earlier: until here another thread may be inside
                self._move(bound)
            for step in phase.steps:
                step()
        except BaseException as error:
            self._fail(error, outer)
            raise
        guard.user, life.state = outer, phase.after

    def start(self, bound: Bound | None = None, arrays: tuple[object, ...] = ()) -> None:
        """Begin an exchange of the plan's arrays, or of ``arrays`` with their views."""
        self.run(bound, self._start)
        # Neighbours may still read or write the arrays, even if this rank drops the plan.
        self._life.arrays = self.arrays or arrays

    def start_copied(self, bound: Bound | None, arrays: tuple[object, ...]) -> None:
        """Begin an exchange; see `Channel.start_copied`."""
        self.run(bound, self._start_copied)
        self._life.arrays = self.arrays or arrays

    def finish(self) -> None:
        self.run(self._bound, self._finish)
        self._life.arrays = ()

    def fill_walls(self, bound: Bound | None = None) -> None:
        self.call([channel.fill for channel in self._channels], UNFINISHED, bound)

    def call(self, steps: Sequence[Step], misuse: str, bound: Bound | None = None) -> None:
        """Run other steps, as the plan runs its own."""
        self.run(bound, _Phase(READY, READY, (), tuple(steps), misuse))

    def add(self, channel: Channel) -> None:
        """Check another channel before each exchange, and close it with the plan."""
        self._channels.append(channel)
        for phase in self._phases:
            phase.checks = (*phase.checks, channel.check)

    def hold(self, arrays: Sequence[object], *, alive: bool) -> None:
        """Keep the plan's arrays alive: always, or only after a failure."""
        if alive:
            self.arrays = tuple(arrays)
        watched = []
        for array in arrays:
            with suppress(TypeError):  # arrays of other libraries may not support weak references
                watched.append(weakref.ref(owner(array)))
        self._life.watched = tuple(watched)

    def _move(self, bound: Bound | None) -> None:
        """Work on other arrays of the same layouts from now on."""
        if bound is not None:
            for channel, views in zip(self._movable, bound, strict=True):
                channel.bind(views)
        self._bound = bound

    def views(self, described: Sequence[Described]) -> Bound | None:
        """Return views of other arrays for a call; None if the plan must not exchange these arrays together.

        Views know only addresses, so that they serve every array of the layout at that address.
        """
        places = tuple([one.pointer for one in described])
        bound = self._bounds.get(places)
        if bound is None:
            bound = self._views(described)
            if bound is not None:
                if len(self._bounds) >= _MOST_BOUND:
                    self._bounds.clear()
                self._bounds[places] = bound
        return bound

    def _views(self, described: Sequence[Described]) -> Bound | None:
        if sharing(described):
            return None
        if described[0].device is not None:
            pointers = [one.pointer for one in described]
            return [channel.views(pointers) for channel in self._movable]
        if not self._spans:
            for one in described:
                before, behind = span(one.shape, one.strides, one.dtype.itemsize)
                memory = ctypes.c_char * (before + behind)
                self._spans.append((before, cast("_MemoryAt", memory.from_address)))
        memories = [
            memory_at(one.pointer - before)
            for one, (before, memory_at) in zip(described, self._spans, strict=True)
        ]
        return [channel.views(memories) for channel in self._movable]

    def _fail(self, error: BaseException, outer: int) -> None:
        """Mark the exchange as failed, and keep the arrays alive, since peers may still access them."""
        life = self._life
        life.state, life.arrays = FAILED, self.arrays
        life.fail()
        self._guard.leave(error, outer)

    def _check(self, phase: _Phase, outer: int) -> None:
        """Let the channels refuse the exchange; the state is then the same as before the call."""
        try:
            for check in phase.checks:
                check()
        except BaseException:
            self._guard.user, self._life.state = outer, phase.before
            raise

    def check_state(self, before: int, misuse: str) -> None:
        """Raise unless the plan is in a state, and no other thread is inside a call on the communicator."""
        state = self._life.state
        if state == before and self._guard.user >= 0:
            self._guard.check_thread()  # an enclosing call of this thread is allowed
            return
        self.check_open()
        if state == RUNNING:
            raise StateError(
                "another thread is inside this plan; call it from one thread, or make a plan for each thread, on a "
                "grid with a duplicate of the communicator"
            )
        if state == FAILED:
            misuse = "an exchange of this plan has failed on the way; make a new grid to go on"
        elif state == before:
            self._guard.refuse()
        raise StateError(misuse)

    def check_open(self) -> None:
        """Raise `ClosedError` if the plan or its communicator is closed."""
        if self._life.state == CLOSED:
            raise ClosedError("the plan is closed; make a new one")
        self.world.check_open()

    @property
    def state(self) -> str:
        """The state of the plan in a word; empty if it is ready."""
        return ("", "started", "running", "failed", "closed")[self._life.state]

    def close(self) -> None:
        """Release buffers and requests; `StateError` if another thread is inside the plan."""
        if self._life.state == RUNNING:
            self.check_state(READY, "")
        detached = self._collected.detach()
        if detached is not None:
            _, _, (release,), _ = detached
            release()
        self._life.state = CLOSED
        for phase in self._phases:
            phase.checks = phase.steps = ()
        self._channels, self.carried, self._movable = [], [], ()


def _close(channels: Sequence[Channel], life: _Life, release_memory: Release) -> None:
    if FORKED:  # any call of MPI could take the parent's messages
        keep(channels, life)
        return
    # Later channels may depend on earlier channels.
    backwards = channels[::-1]
    for channel in backwards:
        channel.close()
    if life.state != READY or any(channel.has_failed for channel in channels):
        life.fail()
    release_memory(backwards, life.arrays)


def _run_of(channel: Channel) -> Callable[[], None]:
    return channel.start if type(channel).run is Channel.run else channel.run
