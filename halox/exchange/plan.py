"""Persistent plan of an exchange, started and finished in every step.

A plan runs the steps of its channels, one after another. It also keeps its state, so that calls in a wrong order, from
two threads, or after a failure raise errors.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from halox.errors import ClosedError, FieldError, StateError
from halox.exchange.report import Report
from halox.paths.base import Channel
from halox.paths.messages import Message
from halox.runtime.arrays import Described, owner, sharing, span
from halox.runtime.call_guard import CallGuard, Unique
from halox.runtime.finalizing import FORKED, keep

if TYPE_CHECKING:
    from halox.exchange.loops import Loops
    from halox.exchange.measuring import Timer
    from halox.exchange.regions import Cells
    from halox.paths.peer.stores import StoreChannel
    from halox.runtime.array_types import FieldLike

# Or a function that returns an array of ctypes, which NumPy accepts, too.
_MemoryAt: TypeAlias = Callable[[int], memoryview]

# _READY must be 0: a call tests the state and the guard's user together.
_READY, _STARTED, _RUNNING, _FAILED, _CLOSED = range(5)
_MOST_NAMES = 4
_MOST_BOUND = 32

Bound: TypeAlias = list[object]
"""For each movable channel of a plan its views of other arrays."""


Release: TypeAlias = Callable[[Sequence[Channel], Sequence[object]], None]
"""Receives a closed plan's channels, to free later, and its arrays, to keep while other ranks may access them."""


class _Life:
    """State of a plan, and the arrays that must live during an exchange; shared with the plan's finalizer."""

    __slots__ = ("arrays", "state", "watched")

    def __init__(self) -> None:
        self.state = _READY
        self.arrays: tuple[object, ...] = ()
        self.watched: tuple[weakref.ref[object], ...] = ()

    def fail(self) -> None:
        """Keep the arrays alive, since peers may still access them."""
        if not self.arrays:
            self.arrays = tuple(array for ref in self.watched if (array := ref()) is not None)


class Plan(Unique):
    """An exchange ready to run: ``plan()``, or ``plan.start()`` and ``plan.finish()`` around other work.

    Made by `Grid.plan`, `Transpose.plan` and `Exchange`. Between `start` and `finish` do not write the cells that
    are sent, and do not touch the halos.

    Attributes
    ----------
    bytes_sent : int
        Payload that this rank sends to other ranks in one exchange.
    messages_sent : int
        Number of messages that this rank sends to other ranks in one exchange.

    Notes
    -----
    Every rank that made the plan must call it. The plan keeps its arrays alive.

    Several plans may be under way at once, and each rank may start and finish them in any order. (On the nccl path all
    ranks must start them in the same order, or a later call raises `MismatchError`.) But `finish` may also wait for the
    neighbours' `finish`, if the neighbours read this rank's cells in place (``explain`` says "direct"). So between
    `start` and `finish` a rank must not wait for anything that a neighbour does only after its `finish`, such as a
    reduction or a message of the caller's program.

    When a plan is closed or dropped between `start` and `finish`, or after an exchange has failed, it ends on this rank
    alone: halox keeps memory for the messages still under way, and neighbours can finish their exchanges.

    On a GPU an exchange runs after the work that CuPy's current stream holds at the call, and before the work that is
    put on that stream later. Calls on changing streams run in sequence; nothing else orders streams. On the
    peer, nccl and local paths a call returns at once. On these paths, and on scatter_gather/copy_engine where the
    driver allows it, a call can be captured in a CUDA graph and replayed: make the plan before the capture, make
    equally many exchanges on all ranks, and never replay on two streams at once. On the other paths the host takes part
    in an exchange, and a call under capture is refused before anything is put on the stream.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        report: Report,
        messages: Sequence[Message],
        check_open: Callable[[], None],
        release_memory: Release,
        timer: Timer | None = None,
        tick: Callable[[], None] | None = None,
        *,
        guard: CallGuard,
    ) -> None:
        self._channels = [*channels]
        self._life = _Life()
        release = partial(_close, self._channels, self._life, release_memory)
        # Not at exit, when MPI and CUDA may already be finalized.
        self._collected = weakref.finalize(self, guard.outside, release)
        self._collected.atexit = False
        self._checks = tuple(c.check for c in channels if type(c).check is not Channel.check)
        counted = () if tick is None else (tick,)
        # Leave out steps of channels that do nothing in them.
        starts = [c for c in channels if type(c).start is not Channel.start]
        self._starts = (*counted, *(channel.start for channel in starts))
        self._finishes = tuple(c.finish for c in channels if type(c).finish is not Channel.finish)
        self._steps = (*counted, *map(_run_of, starts), *self._finishes)
        self._movable = tuple(channel for channel in channels if channel.is_movable)
        # Of each array: the number of bytes before its first element, and the function that maps memory at an address.
        self._spans: list[tuple[int, _MemoryAt]] = []
        # Views by the addresses of the arrays: of memory in use, and of memory that may be used again.
        self._bounds: dict[tuple[int, ...], Bound] = {}
        self.bound: Bound | None = None
        self.relocatable = False
        self._loops: Loops | None = None
        self._make_stores: Callable[..., StoreChannel] | None = None
        self._stores: StoreChannel | None = None
        self._report = report
        self._timer = timer
        self._check_open = check_open
        self._guard = guard
        self.arrays: tuple[object, ...] = ()
        sent = [m for m in messages if m.direction == "send" and m.peer != report.rank]
        self.bytes_sent = sum(m.nbytes for m in sent)
        self.messages_sent = len(sent)

    def __call__(self, *fields: FieldLike) -> None:
        """Run one exchange, on a GPU on the current stream, with the errors of `start` and `finish`.

        A plan of `Grid.plan` also exchanges other arrays, ``plan(v)``, for example after a swap of names. All ranks
        raise `FieldError` if the layouts, dtypes and strides are not the same as for the plan's arrays. As for
        `Grid.exchange`, the first call with a new field of the grid, or with any array that the grid has not made, is
        collective over all ranks, and the grid keeps the plan that it makes.
        """
        if fields:
            plan, bound = self._plan_of(fields)
            plan.run(bound)
            return
        # The same code as `run` and `_advance`, to save the time of another call.
        guard, life = self._guard, self._life
        outer = guard.user
        if life.state or outer:
            self._check_state(_READY, "called between start() and finish(); call finish() first")
        guard.user = life.state = _RUNNING
        if self._checks:
            self._check(_READY, outer)
        try:
            for step in self._steps:
                step()
        except BaseException as error:
            self._fail(error, outer)
            raise
        guard.user, life.state = outer, _READY

    def run(self, bound: Bound | None) -> None:
        """Run one exchange of other arrays, of which ``bound`` has the views; of the plan's arrays if it is None."""
        guard, life = self._guard, self._life
        outer = guard.user
        if life.state or outer:
            self._check_state(_READY, "called between start() and finish(); call finish() first")
        guard.user = life.state = _RUNNING
        if self._checks:
            self._check(_READY, outer)
        try:
            if bound is not self.bound:  # not earlier: until here another thread may be inside
                self._move(bound)
            for step in self._steps:
                step()
        except BaseException as error:
            self._fail(error, outer)
            raise
        guard.user, life.state = outer, _READY

    def serve(
        self,
        loops: Loops,
        check: Callable[[], None] | None,
        make_stores: Callable[..., StoreChannel] | None = None,
    ) -> None:
        """Allow loops, calls with other arrays, and `device_handle`; ``check`` is the first step of each exchange."""
        self._loops, self._make_stores = loops, make_stores
        if check is not None:
            self._starts, self._steps = (check, *self._starts), (check, *self._steps)

    def _get_loops(self) -> Loops:
        self._check_open()
        if self._loops is None:
            raise FieldError(
                "only plans of grid.plan have loops and take other arrays; call this one without arrays"
            )
        return self._loops

    def _plan_of(self, fields: tuple[object, ...]) -> tuple[Plan, Bound | None]:
        """Return the plan that exchanges some arrays in a call of this plan, and its argument."""
        if not fields or (len(fields) == len(self.arrays) and all(map(is_, fields, self.arrays))):
            return self, None
        return self._get_loops().find(fields)

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
        self.bound = bound

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

    def start(self) -> None:
        """Begin an exchange.

        Raises
        ------
        StateError
            If the last exchange was not finished, or has failed; if the current stream is being captured, and a path
            of the plan cannot be captured; if another thread is inside a call of this plan, or of its grid.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not make the matching call within ``HALOX_TIMEOUT`` seconds; on the peer and nccl paths,
            if a neighbour missed an earlier exchange. Values received in that exchange and since are not valid.
        MismatchError
            On the nccl path, if ranks have earlier started plans in different orders.

        Notes
        -----
        On the peer path the exchange runs on a separate stream of high priority, concurrently with work that is put on
        the current stream until `finish`. On the other paths of a GPU the packing kernels run on the current stream.
        """
        misuse = "start() was called twice; call finish() between two starts"
        self._advance((_READY, _STARTED), self._starts, misuse)
        # Neighbours may still read or write the arrays, even if this rank drops the plan.
        self._life.arrays = self.arrays

    def finish(self) -> None:
        """End the exchange: the halos hold the neighbours' values, on a GPU for work put on the current stream later.

        Raises
        ------
        StateError
            If no exchange was started, or it has failed; if the current stream is being captured, and a path of the
            plan cannot be captured; if another thread is inside a call of this plan, or of its grid.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not make the matching call within ``HALOX_TIMEOUT`` seconds.
        """
        misuse = "finish() was called without start(); call start() first"
        self._advance((_STARTED, _READY), self._finishes, misuse)
        self._life.arrays = ()

    def start_on(self, bound: Bound | None, arrays: tuple[object, ...]) -> None:
        """Begin an exchange of other arrays; ``bound`` is the same as for `run`."""
        if bound is not None:
            misuse = "called between start() and finish(); call finish() first"
            self._advance((_READY, _READY), (partial(self._move, bound),), misuse)
        self.start()
        self._life.arrays = self.arrays or arrays

    def overlap(
        self, *fields: FieldLike, width: int | None = None, field: int = 0
    ) -> Iterator[Cells]:
        """Exchange, and yield regions that cover each owned cell once: the interior during the exchange, then the rims.

        Parameters
        ----------
        *fields : array, optional
            Other arrays to exchange, as in ``plan(*fields)``.
        width : int, optional
            Number of cells that the body of the loop reads on each side of a cell; by default the halo's width.
        field : int
            Number of the plan's field whose cells are yielded.

        Yields
        ------
        Cells
            An index of the field's array. `explain` has the sizes of all regions.

        Notes
        -----
        Raises the errors of ``plan(*fields)``, and `FieldError` for invalid arguments. The exchange also ends if the
        body leaves the loop by ``break`` or an error, at once if nothing else refers to the iterator, otherwise by its
        method ``close``. There is a rim at a wall only if a field of the plan has a boundary there. All cells are one
        region after the exchange if the block has no interior, or overlap is off: by the option ``overlap`` of
        `Grid.plan`, or because it was slower.
        """
        return self._get_loops().overlap(width, field).loop(*self._plan_of(fields), fields)

    def steps(self, *fields: FieldLike, field: int = 0) -> Iterator[Cells]:
        """Exchange, and return an iterator of the regions of the ``every`` steps until the next exchange.

        The last region is the owned cells. Each earlier region also has the halo cells that later steps read, but no
        cells outside the grid: the owned cells get the same bits as with an exchange before each step. Regions of a
        staggered field include the stored copy of the next rank's first point. Arguments and errors are the same as for
        `overlap`, and ``every`` is an option of `Grid.plan`. After each step `fill_walls` fills the halo of fields with
        boundaries.
        """
        regions = self._get_loops().steps(field)
        plan, bound = self._plan_of(fields)
        plan.run(bound)
        return iter(regions)

    def fill_walls(self, *fields: object) -> None:
        """Fill only the halo beyond walls, by the boundaries of the fields, between the steps of `steps`.

        Sends nothing. A rank that owns all cells along a periodic axis may fill the halo there, too. Arguments and
        errors are the same as for ``plan(*fields)``.
        """
        plan, bound = self._plan_of(fields)
        plan._fill_walls(bound)

    def _fill_walls(self, bound: Bound | None) -> None:
        move = () if bound is self.bound else (partial(self._move, bound),)
        fills = [channel.fill for channel in self._channels]
        misuse = "called between start() and finish(); call finish() first"
        self._advance((_READY, _READY), (*move, *fills), misuse, is_exchange=False)

    def _advance(
        self,
        states: tuple[int, int],
        steps: Sequence[Callable[[], object]],
        misuse: str,
        *,
        is_exchange: bool = True,
    ) -> None:
        """Run the steps between two states; keeps other threads out, and marks the plan as failed on an error."""
        before, after = states
        guard, life = self._guard, self._life
        outer = guard.user
        if life.state != before or outer:
            self._check_state(before, misuse)
        guard.user = life.state = _RUNNING
        if is_exchange and self._checks:
            self._check(before, outer)
        try:
            for step in steps:
                step()
        except BaseException as error:
            self._fail(error, outer)
            raise
        guard.user, life.state = outer, after

    def _fail(self, error: BaseException, outer: int) -> None:
        """Mark the exchange as failed, and keep the arrays alive, since peers may still access them."""
        life = self._life
        life.state, life.arrays = _FAILED, self.arrays
        life.fail()
        self._guard.leave(error, outer)

    def _check(self, before: int, outer: int) -> None:
        """Let the channels refuse the exchange; the state is then the same as before the call."""
        try:
            for check in self._checks:
                check()
        except BaseException:
            self._guard.user, self._life.state = outer, before
            raise

    def _check_state(self, before: int, misuse: str) -> None:
        """Raise unless the plan is in a state, and no other thread is inside a call on the communicator."""
        if self._life.state != before or self._guard.user < 0:
            self._refuse(before, misuse)
        self._guard.check_thread()  # an enclosing call of this thread is allowed

    def _refuse(self, before: int, misuse: str) -> NoReturn:
        """Raise the reason why the call is not allowed in this state."""
        self._check_open()
        if self._life.state == _RUNNING:
            raise StateError(
                "another thread is inside this plan; call it from one thread, or make a plan for each thread, on a "
                "grid with a duplicate of the communicator"
            )
        if self._life.state == _FAILED:
            misuse = "an exchange of this plan has failed on the way; make a new grid to go on"
        elif self._life.state == before:
            self._guard.refuse()
        raise StateError(misuse)

    @property
    def device_handle(self) -> Any:
        """Argument ``halox::Halo<N>`` of a `cupy.RawKernel` that stores cells into the neighbours' halos.

        `halox.device_header` has the type, and the guide "Inside your kernels" the rules. A cell is an index of the
        array, halo included:

        - ``halo.wait({y, x})``, once for each cell, before the kernel reads around it or stores it;
        - ``halo.store(field, {y, x}, value, component = 0)`` stores to field number ``field`` of the plan, in this
          rank's array and in every copy of the cell.

        The first use is collective, and waits for the GPU. Call the plan before the first step: it fills the halos.
        Raises `FieldError` if kernels cannot store to the fields, `PathError` if a message does not take the peer path,
        and `ExchangeTimeoutError` if a kernel has waited for a neighbour for ``HALOX_TIMEOUT`` seconds.
        """
        self._check_open()
        if self._stores is None:
            if self._make_stores is None:
                raise FieldError(
                    "plan.device_handle: this plan fills no halos; use a plan of grid.plan"
                )
            self._check_state(
                _READY, "plan.device_handle was used after start(); call finish() first"
            )
            with self._guard:
                rows = [(row.peer, row.path, row.reason) for row in self._report.rows]
                self._stores = self._make_stores(self.arrays, rows)
            self._channels.append(self._stores)
            self._checks = (*self._checks, self._stores.check)
        self._stores.check()
        return self._stores.argument

    def explain(self) -> Report:
        """Return, for each message, its bytes, blocks, path, the reason for it, and microseconds.

        Notes
        -----
        Not collective. Predicted times are present for arrays on a GPU, measured times after `measure`, and notes about
        `overlap` after its first call. After `measure`, a note says for which steps deep halos pay; see `steps`.
        """
        rows = self._report.rows
        us = {(row.path, row.protocol): row.measured_us or 0.0 for row in rows}
        notes = () if self._loops is None else self._loops.notes(sum(us.values()))
        if not notes:
            return self._report
        return replace(self._report, notes=(*self._report.notes, *notes))

    def measure(self, repeats: int = 20) -> Report:
        """Measure how long exchanges take, path by path, and return the report with the times in it.

        Parameters
        ----------
        repeats : int
            Exchanges in a row between two readings of the clock; the same on all ranks.

        Returns
        -------
        Report
            The report that `explain` returns from now on. The measured time of a message is the time of all messages
            that take its path together, in both directions, on the slowest rank.

        Raises
        ------
        HaloxError
            On all ranks, if ``repeats`` is not a valid number of exchanges, or differs between ranks.
        StateError
            If the last exchange was not finished, or has failed; if another thread is inside a call of the same grid.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not make the matching call within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective. Waits for the current stream, so that the call cannot be captured. Each of the some hundred
        exchanges moves the arrays' contents like a normal call: if received cells are also sent, their values move one
        rank further each time.
        """
        self._check_open()
        if self._timer is None:
            raise StateError("this plan was made without a timer; make it with grid.plan()")
        timer = self._timer

        channels = [channel for channel in self._channels if channel is not self._stores]

        def measure() -> None:
            self._report = self._report.measured(timer.measure(channels, number))

        with self._guard:
            number = timer.check(repeats)
        misuse = "measure() was called between start() and finish(); call finish() first"
        self._advance((_READY, _READY), (measure,), misuse)
        return self.explain()

    def close(self) -> None:
        """Release buffers and requests; local, and harmless when repeated.

        Memory that other ranks may still access is released when these ranks have closed the plan, too.

        Raises
        ------
        StateError
            If another thread is inside this plan.
        """
        if self._life.state == _RUNNING:
            self._refuse(_RUNNING, "")
        detached = self._collected.detach()
        if detached is not None:
            _, _, (release,), _ = detached
            release()
        self._life.state = _CLOSED
        self._checks = self._starts = self._steps = self._finishes = ()
        self._channels, self._stores = [], None
        self._check_open = _raise_closed

    def __repr__(self) -> str:
        """Return the plan's arrays, message counts and state."""
        return f"<halox.Plan of {self._summary()}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return self.explain()._repr_html_()

    def _summary(self) -> str:
        states = ("", ", started", ", running", ", failed", ", closed")
        report, more = self._report, len(self._report.arrays) - _MOST_NAMES
        names = ", ".join(report.arrays[:_MOST_NAMES]) or "nothing"
        names += f" and {more} more" if more > 0 else ""
        return (
            f"rank {report.rank}: {report.operation} of {names}, {self.messages_sent} message(s) of "
            f"{self.bytes_sent} bytes to other ranks{states[self._life.state]}"
        )


def _close(channels: Sequence[Channel], life: _Life, release_memory: Release) -> None:
    if FORKED:  # any call of MPI could take the parent's messages
        keep(channels, life)
        return
    # Later channels may depend on earlier channels.
    backwards = channels[::-1]
    for channel in backwards:
        channel.close()
    if life.state != _READY or any(channel.has_failed for channel in channels):
        life.fail()
    release_memory(backwards, life.arrays)


def _run_of(channel: Channel) -> Callable[[], None]:
    return channel.start if type(channel).run is Channel.run else channel.run


def _raise_closed() -> None:
    raise ClosedError("the plan is closed; make a new one")
