"""Many ranks simulated by a few processes: a communicator of, for example, 100,000 ranks in one process.

Each process of the communicator below plays one rank. All other ranks are images of the first played rank: they make
the same calls, with the same arguments. The ranks form a torus, so that an image sends to its neighbours what the first
played rank sends to its own neighbours::

    rank     r-1        r        r+1
              |  a ->   |  a ->   |         r sends a to r+1, so its image r-1 sends a to r,
              |   <- b  |   <- b  |         and its image r+1 sends b to r

Therefore grids must be periodic, with equal blocks, on the process grid of the torus. Every rank is a node
(``HALOX_NODE=rank``), so that all communication uses MPI. With a second process, a rank can differ from the others: it
gives another argument, or has another environment.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import wraps
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from mpi4py import MPI

from halox.plans import draft as drafts
from halox.runtime import communicator, gathered_values, world

Call = TypeVar("Call", bound=Callable[..., Any])

_combine = gathered_values.combine


@dataclass
class Traffic:
    """Messages and collectives of a played rank, their bytes, and the time that the simulation itself took."""

    collectives: int = 0
    messages: int = 0  # sent to other ranks
    bytes_sent: int = 0
    bytes_received: int = 0
    simulation_s: float = 0.0


@dataclass
class Cast:
    """The torus of ranks, and the ranks that the processes of ``processes`` play."""

    processes: MPI.Intracomm
    played: Sequence[int]
    torus: tuple[int, ...]
    traffic: Traffic = field(default_factory=Traffic)
    tags: dict[object, int] = field(default_factory=dict)  # of messages to itself
    # By tag the pickled objects for each rank: of all played ranks, and not yet exchanged with them.
    boxes: dict[int, list[dict[int, bytes]]] = field(default_factory=dict)
    outbox: dict[int, dict[int, bytes]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.torus)

    @property
    def rank(self) -> int:
        """The rank that this process plays."""
        return self.played[self.processes.rank]

    def player(self, rank: int) -> int:
        """Return the process with the arguments of a rank."""
        return self.played.index(rank) if rank in self.played else 0

    def shift(self, start: int, end: int) -> tuple[int, ...]:
        """Return the steps on the torus from one rank to another."""
        a, b = (np.unravel_index(rank, self.torus) for rank in (start, end))
        return tuple(int((j - i) % n) for i, j, n in zip(a, b, self.torus, strict=True))

    def digest(self, ends: bytes) -> int:
        """Return the digest that stands for a message in a sum over all ranks.

        An image would send messages with other ends. With steps in place of ends, the sum over one rank is zero if the
        sum over all ranks is.
        """
        if not ends[:1].isdigit():  # a record of a plan
            return communicator.digest(ends)
        start, end = map(int, ends.split())
        return communicator.digest(repr(self.shift(start, end)).encode())

    def gathered(self, mine: Any) -> list[Any]:
        """Return the objects of all played ranks."""
        return self.processes.allgather(mine) if len(self.played) > 1 else [mine]

    def received(self, source: int, tag: int) -> tuple[bytes, ...]:
        """Return the pickled object that ``source`` has sent to this rank, in a tuple; an empty tuple if there is none.

        Collective over the processes, at the first call with a tag.
        """
        if tag not in self.boxes:
            self.boxes[tag] = self.gathered(self.outbox.pop(tag, {}))
        player = self.player(source)
        steps = self.shift(source, self.rank)
        for peer, sent in self.boxes[tag][player].items():
            if self.shift(self.played[player], peer) == steps:
                return (sent,)
        return ()


def timed(call: Call) -> Call:
    """Count the time of an outermost call as time of the simulation."""

    @wraps(call)
    def counted(self: SimulatedRanks, *arguments: Any, **named: Any) -> Any:
        traffic, start = self.cast.traffic, time.perf_counter()
        before = traffic.simulation_s
        try:
            return call(self, *arguments, **named)
        finally:
            traffic.simulation_s = before + time.perf_counter() - start

    return counted  # type: ignore[return-value]


class SimulatedRanks(MPI.Intracomm):
    """Communicator of the ranks of a `Cast`; its MPI handle has only this process.

    Collectives are complete when they return, and return a null request. Other messages are real messages to itself.
    """

    cast: Cast

    def __new__(cls, comm: MPI.Intracomm | None = None, cast: Cast | None = None) -> SimulatedRanks:
        """Wrap a communicator of one process; or copy a simulated communicator."""
        made = super().__new__(cls, comm)
        if cast is None and isinstance(comm, SimulatedRanks):
            cast = comm.cast
        if cast is not None:
            made.cast = cast
        return made

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank that this process plays."""
        return self.cast.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of simulated ranks."""
        return self.cast.size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    # Communicators

    def Idup(self, info: Any = None) -> tuple[SimulatedRanks, MPI.Request]:
        return self.Dup(), MPI.Request()

    def Dup(self, info: Any = None) -> SimulatedRanks:
        return SimulatedRanks(MPI.Intracomm(self).Dup(), self.cast)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Each rank is alone if its color is its rank or its node, else all ranks are together."""
        self._count(0, 0)
        if color == MPI.UNDEFINED:
            return MPI.COMM_NULL
        return MPI.COMM_SELF.Dup() if color == self.rank else self.Dup()

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """Each rank is alone on its machine."""
        self._count(0, 0)
        return MPI.COMM_SELF.Dup()

    # Collectives

    @timed
    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> MPI.Request:
        sent = np.asarray(sendbuf)
        parts = self.cast.gathered(sent)
        rows = np.asarray(recvbuf).reshape(self.size, -1)
        rows[...] = parts[0].reshape(-1)
        for rank, part in zip(self.cast.played[1:], parts[1:], strict=True):
            rows[rank] = part.reshape(-1)
        if sent.dtype == np.int64 and sent.shape == (4,):
            # Digests of machine, node and PID namespace, and a process: each image is another node.
            rows[:, 1] += np.arange(self.size) - self.rank
            rows[self.cast.played, 1] = [part[1] for part in parts]
        self._count(sent.nbytes, rows.nbytes)
        return MPI.Request()

    @timed
    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> MPI.Request:
        sent = np.asarray(sendbuf[0]).reshape(-1).view(np.uint8)
        whole, (counts, starts) = recvbuf[0].reshape(-1).view(np.uint8), recvbuf[1]
        parts = self.cast.gathered(sent)
        for rank, (count, start) in enumerate(zip(counts, starts, strict=True)):
            # An image of the first played rank may own one element less than that rank.
            whole[start : start + count] = parts[self.cast.player(rank)][:count]
        self._count(sent.nbytes, whole.nbytes)
        return MPI.Request()

    @timed
    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> MPI.Request:
        sent, (counts, starts) = np.asarray(sendbuf[0]).view(np.uint8), sendbuf[1]
        whole, (there, at) = recvbuf[0].view(np.uint8), recvbuf[1]
        parts = self.cast.gathered(sent)
        mine = slice(starts[self.rank], starts[self.rank] + counts[self.rank])
        for rank, (count, start) in enumerate(zip(there, at, strict=True)):
            whole[start : start + count] = parts[self.cast.player(rank)][mine][:count]
        self._count(sent.nbytes, whole.nbytes)
        return MPI.Request()

    @timed
    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> MPI.Request:
        target = np.asarray(recvbuf[0] if isinstance(recvbuf, list | tuple) else recvbuf)
        source = sendbuf[0] if isinstance(sendbuf, list | tuple) else sendbuf
        sent = target.copy() if source is MPI.IN_PLACE else np.asarray(source)
        parts = self.cast.gathered(sent)
        images = self.size - len(parts)
        if op == MPI.SUM:
            target[...] = images * parts[0] + sum(parts)
        else:  # the images change nothing
            assert op == MPI.BOR
            target[...] = np.bitwise_or.reduce(parts, axis=0)
        self._count(sent.nbytes, sent.nbytes)
        return MPI.Request()

    @timed
    def Ibcast(self, buf: Any, root: int = 0) -> MPI.Request:
        whole = np.asarray(buf)
        whole[...] = self.cast.gathered(whole)[self.cast.player(root)]
        self._count(*((whole.nbytes, 0) if root == self.rank else (0, whole.nbytes)))
        return MPI.Request()

    @timed
    def Ibarrier(self) -> MPI.Request:
        self.cast.gathered(None)
        self._count(0, 0)
        return MPI.Request()

    def _count(self, sent: int, received: int) -> None:
        traffic = self.cast.traffic
        traffic.collectives += 1
        traffic.bytes_sent += sent
        traffic.bytes_received += received

    # Messages of objects

    @timed
    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        sent = pickle.dumps(obj)
        self.cast.outbox.setdefault(tag, {})[dest] = sent
        self.cast.boxes.pop(tag, None)
        self.cast.traffic.messages += 1
        self.cast.traffic.bytes_sent += len(sent)
        return MPI.Request()

    @timed
    def iprobe(self, source: int = MPI.ANY_SOURCE, tag: int = 0, status: Any = None) -> bool:
        return bool(self.cast.received(source, tag))

    @timed
    def recv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = 0, status: Any = None
    ) -> Any:
        (sent,) = self.cast.received(source, tag)
        self.cast.traffic.bytes_received += len(sent)
        return as_from(source, pickle.loads(sent))

    # Messages of buffers, which this process sends to itself

    def _tag(self, start: int, end: int, tag: int) -> int:
        """Return a tag for the messages with the same tag that go the same steps on the torus."""
        tags = self.cast.tags
        return tags.setdefault((tag, self.cast.shift(start, end)), 1 + len(tags))

    @timed
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Prequest:
        return super().Send_init(buf, 0, self._tag(self.rank, dest, tag))

    @timed
    def Recv_init(self, buf: Any, source: int, tag: int = 0) -> MPI.Prequest:  # type: ignore[override]
        return super().Recv_init(buf, 0, self._tag(source, self.rank, tag))

    @timed
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        if tag == gathered_values.TREE_TAG:
            self.cast.traffic.messages += 1
            self.cast.traffic.bytes_sent += buf.nbytes
            return MPI.Request()
        return super().Isend(buf, 0, self._tag(self.rank, dest, tag))

    @timed
    def Irecv(self, buf: Any, source: int, tag: int = 0) -> MPI.Request:  # type: ignore[override]
        if tag == gathered_values.TREE_TAG:  # `combined_copies` fills the buffer
            self.cast.traffic.bytes_received += buf.nbytes
            return MPI.Request()
        return super().Irecv(buf, 0, self._tag(source, self.rank, tag))


def as_from(rank: int, sent: Any) -> Any:
    """Return an object as the image ``rank`` would send it: with its own number as ``rank`` and ``node``."""
    if isinstance(sent, dict):
        return {key: as_from(rank, value) for key, value in sent.items()}
    if is_dataclass(sent) and not isinstance(sent, type):
        own = {name: rank for name in ("rank", "node") if hasattr(sent, name)}
        return replace(sent, **own)
    return sent


def combined_copies(
    comm: SimulatedRanks, pair: Sequence[Any], join: Callable[[Any, Any], None], *waiting: Any
) -> None:
    """Combine an array of each rank as halox does; another rank's array is a copy of this rank's array."""
    total, other = pair
    powers: list[Any] = []  # combinations of 2**n arrays

    def join_copies(*_: Any) -> None:
        start = time.perf_counter()
        copies = min(1 << len(powers), comm.size - comm.rank - (1 << len(powers)))
        powers.append(total.copy())
        parts = [power for n, power in enumerate(powers) if copies >> n & 1]
        total[...] = parts[0]
        for part in parts[1:]:
            other[...] = part
            join(*pair)
        other[...] = total
        total[...] = powers[-1]
        comm.cast.traffic.simulation_s += time.perf_counter() - start
        join(*pair)

    _combine(comm, pair, join_copies, *waiting)


class _SimulatedMPI:
    """``mpi4py.MPI``, except that its intracommunicators are simulated."""

    Intracomm = SimulatedRanks

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI, name)


_MPI = _SimulatedMPI()


@contextmanager
def simulated(
    torus: Sequence[int],
    played: Sequence[int] = (0,),
    processes: MPI.Intracomm = MPI.COMM_SELF,
) -> Iterator[SimulatedRanks]:
    """Context manager: a communicator whose ranks form a torus, with the ranks that the processes play.

    Inside, halox uses it like any communicator of mpi4py. The first played rank is the model of all ranks that are not
    played.
    """
    cast = Cast(processes, tuple(played), tuple(torus))
    comm = SimulatedRanks(MPI.COMM_SELF.Dup(), cast)
    hook = sys.excepthook
    try:
        with (
            mock.patch.object(world, "load_mpi", lambda: _MPI),
            mock.patch.object(drafts, "digest", cast.digest),
            mock.patch.object(gathered_values, "combine", combined_copies),
            mock.patch.dict(os.environ, HALOX_NODE="rank"),
        ):
            yield comm
    finally:
        sys.excepthook = hook
        comm.Free()


def torus_of(ranks: int, ndim: int = 3) -> tuple[int, ...]:
    """Return the process grid of ``ndim`` axes with the sides closest to each other.

    Examples
    --------
    >>> torus_of(64), torus_of(4096), torus_of(100_000)
    ((4, 4, 4), (16, 16, 16), (40, 50, 50))
    """
    sides = [d for d in range(1, ranks + 1) if ranks % d == 0]
    fits = (
        s for s in itertools.combinations_with_replacement(sides, ndim) if math.prod(s) == ranks
    )
    return min(fits, key=lambda s: s[-1] - s[0])
