"""Persistent plan of an exchange, started and finished in every step: what users see of a `Runner`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any

from halox.errors import FieldError
from halox.plans.runner import READY, UNFINISHED, Bound, Runner
from halox.runtime.call_guard import Unique

if TYPE_CHECKING:
    from halox.paths.peer.stores import StoreChannel
    from halox.plans.loops import Loops
    from halox.plans.regions import Cells
    from halox.plans.report import Report
    from halox.runtime.array_types import FieldLike
    from halox.runtime.world import World

_MOST_NAMES = 4


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

    Raises
    ------
    FieldError
        On all ranks, if other arrays of a call have another layout, dtype or strides than the plan's, or another
        argument of a method is invalid.
    StateError
        If `start` and `finish` do not alternate, or the last exchange has failed; if the current stream is being
        captured, and a path of the plan cannot be captured; if another thread is inside a call of this plan or its
        grid.
    ClosedError
        If the plan, the grid or the exchange was closed.
    ExchangeTimeoutError
        If a neighbour does not make the matching call within ``HALOX_TIMEOUT`` seconds; on the peer and nccl paths, if
        a neighbour missed an earlier exchange. Values received in that exchange and since are not valid.
    MismatchError
        On the nccl path, if ranks have earlier started plans in different orders.

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
    peer, nccl and local paths a call returns at once. On these paths a call can be captured in a CUDA graph and
    replayed: make the plan before the capture, make equally many exchanges on all ranks, and never replay on two
    streams at once. On the other paths the host takes part in an exchange, and a call under capture is refused before
    anything is put on the stream.
    """

    def __init__(
        self,
        runner: Runner,
        loops: Loops | None = None,
        make_stores: Callable[..., StoreChannel] | None = None,
    ) -> None:
        self._runner, self._loops, self._make_stores = runner, loops, make_stores
        self._stores: StoreChannel | None = None
        report = runner.report
        sent = [r.nbytes for r in report.rows if r.direction == "send" and r.peer != report.rank]
        self.bytes_sent, self.messages_sent = sum(sent), len(sent)

    def __call__(self, *fields: FieldLike) -> None:
        """Run one exchange, on a GPU on the current stream.

        A plan of `Grid.plan` also exchanges other arrays, ``plan(v)``, for example after a swap of names. Their
        layouts, dtypes and strides must be the same as for the plan's arrays. As for `Grid.exchange`, the first call
        with a new field of the grid, or with any array that the grid has not made, is collective over all ranks, and
        the grid keeps the plan that it makes.
        """
        if fields:
            runner, bound = self._find(fields)
            runner.run(bound)
        else:
            self._runner.run()

    def accumulate(self, *fields: FieldLike) -> None:
        """Add halo values to the cells of their owners, and clear them: the adjoint of the plan's exchange.

        Arguments are the same as for ``plan(*fields)``; the plan must be one of `Grid.plan`. See `Grid.accumulate`.
        """
        loops = self._get_loops()
        self._runner.check_state(READY, UNFINISHED)
        runner, bound = loops.find(fields or self._runner.arrays, "add")
        runner.run(bound)

    def _find(self, fields: tuple[object, ...]) -> tuple[Runner, Bound | None]:
        """Return the runner that exchanges the arrays of a call of this plan, and its argument."""
        own = self._runner.arrays
        if not fields or (len(fields) == len(own) and all(map(is_, fields, own))):
            return self._runner, None
        return self._get_loops().find(fields)

    def _get_loops(self) -> Loops:
        self._runner.check_open()
        if self._loops is None:
            raise FieldError(
                "only plans of grid.plan have loops and take other arrays; call this one without arrays"
            )
        return self._loops

    def start(self) -> None:
        """Begin an exchange.

        Notes
        -----
        On the peer path the exchange runs on a separate stream of high priority, concurrently with work that is put on
        the current stream until `finish`. On the other paths of a GPU the packing kernels run on the current stream.
        """
        self._runner.start()

    def finish(self) -> None:
        """End the exchange: the halos hold the neighbours' values, on a GPU for later work of the current stream."""
        self._runner.finish()

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
        The exchange also ends if the body leaves the loop by ``break`` or an error, at once if nothing else refers to
        the iterator, otherwise by its method ``close``. There is a rim at a wall only if a field of the plan has a
        boundary there. All cells are one region after the exchange if the block has no interior, or overlap is off: by
        the option ``overlap`` of `Grid.plan`, or because it is slower.

        On a GPU regions may run at the same time. A rim's work belongs on CuPy's current stream, which is a stream of
        its own while the loop yields it; regions must not write the same memory. The loop's end joins these streams.
        """
        return self._get_loops().overlap(width, field).loop(*self._find(fields), fields)

    def steps(self, *fields: FieldLike, field: int = 0) -> Iterator[Cells]:
        """Exchange, and return an iterator of the regions of the ``every`` steps until the next exchange.

        The last region is the owned cells. Each earlier region also has the halo cells that later steps read, but no
        cells outside the grid: the owned cells get the same bits as with an exchange before each step. Regions of a
        staggered field include the stored copy of the next rank's first point. Arguments are the same as for
        `overlap`, and ``every`` is an option of `Grid.plan`. After each step `fill_walls` fills the halo of fields with
        boundaries.
        """
        regions = self._get_loops().steps(field)
        runner, bound = self._find(fields)
        runner.run(bound)
        return iter(regions)

    def fill_walls(self, *fields: object) -> None:
        """Fill only the halo beyond walls, by the boundaries of the fields, between the steps of `steps`.

        Sends nothing. A rank that owns all cells along a periodic axis may fill the halo there, too. Arguments are the
        same as for ``plan(*fields)``.
        """
        runner, bound = self._find(fields)
        runner.fill_walls(bound)

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
        runner = self._runner
        runner.check_open()
        if self._stores is None:
            if self._make_stores is None:
                raise FieldError(
                    "plan.device_handle: this plan fills no halos; use a plan of grid.plan"
                )
            runner.check_state(
                READY, "plan.device_handle was used after start(); call finish() first"
            )
            with runner.world.guard:
                rows = [(row.peer, row.path, row.reason) for row in runner.report.rows]
                self._stores = self._make_stores(runner.arrays, rows)
            runner.add(self._stores)
        self._stores.check()
        return self._stores.argument

    def explain(self) -> Report:
        """Return, for each message, its bytes, blocks, path, the reason for it, and microseconds.

        Notes
        -----
        Not collective. Predicted times are present for arrays on a GPU, measured times after `measure`, and notes about
        `overlap` after its first call.
        """
        report = self._runner.report
        notes = () if self._loops is None else self._loops.notes()
        return replace(report, notes=notes)

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

        Notes
        -----
        Collective. Waits for the current stream, so that the call cannot be captured. Each of the some hundred
        exchanges moves the arrays' contents like a normal call: if received cells are also sent, their values move one
        rank further each time.
        """
        from halox.plans.measuring import check_repeats, measure

        runner = self._runner
        runner.check_open()
        with runner.world.guard:
            number = check_repeats(runner.world, repeats)

        def times() -> None:
            us = measure(runner.world, runner.device, runner.carried, number)
            runner.report = runner.report.measured(us)

        misuse = "measure() was called between start() and finish(); call finish() first"
        runner.call([times], misuse)
        return self.explain()

    def close(self) -> None:
        """Release buffers and requests; local, and harmless when repeated.

        Memory that other ranks may still access is released when these ranks have closed the plan, too.
        """
        self._runner.close()
        self._stores = None

    def __repr__(self) -> str:
        """Return the plan's arrays, message counts and state."""
        report, state = self._runner.report, self._runner.state
        names, more = ", ".join(report.arrays[:_MOST_NAMES]), len(report.arrays) - _MOST_NAMES
        return (
            f"<halox.Plan of rank {report.rank}: {report.operation} of {names or 'nothing'}"
            f"{f' and {more} more' if more > 0 else ''}, {self.messages_sent} message(s) of {self.bytes_sent} bytes to "
            f"other ranks{', ' if state else ''}{state}>"
        )


def place_of(plan: Plan) -> tuple[World, int | None]:
    """Return the ranks of a plan, and the GPU of its arrays or None."""
    return plan._runner.world, plan._runner.device
