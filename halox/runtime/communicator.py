"""Private duplicates of users' communicators, with collective checks that all ranks make the same call.

All control messages between ranks go through `Communicator.reduce`, which compares one object of every rank. If all
ranks are on one node, it uses shared memory, otherwise MPI. The cost does not depend on the number of ranks as long as
the objects are equal; only otherwise each rank reads the objects of all ranks. Each
object is sent with the collective call of its rank. Ranks in different calls therefore detect the mismatch together,
before they read any other part of the records.

Between nodes, every round begins with one reduction of `_TOTALS` words, so that MPI matches it in any call::

    equal objects    | Iallreduce: digest, numbers |
    other objects    | Iallreduce                  | Iallgather: heads, objects | Iallgatherv: long objects |
    values           | Iallreduce and Iallgather together                       |

All objects on a user's communicator use the same duplicate (`halox.runtime.duplicates`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from halox.errors import HaloxError, MismatchError, StateError
from halox.runtime import shared_memory
from halox.runtime.call_guard import CallGuard
from halox.runtime.finalizing import keep
from halox.runtime.shared_memory import Bytes
from halox.runtime.status import (
    ANY_FAILED,
    BLOCK_BYTES,
    CODE_BITS,
    HEAD_WORDS,
    HEADS,
    MOST_NUMBERS,
    RING_WORDS,
    SLOT_BYTES,
    SLOTS,
    CallWatch,
    mismatch,
    ranks_text,
)
from halox.runtime.waiting import SPINS, Ranks, Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_RECORD_BYTES = 256
_HEAD = np.dtype([("word", "i8"), ("size", "i8"), ("kind", "i8")])
_INLINE_BYTES = _RECORD_BYTES - _HEAD.itemsize
_TOTALS = 1 + MOST_NUMBERS
_SIZE, _KIND, _NUMBERS, _FLAG = 0, 1, 2, HEAD_WORDS - 1  # words of a slot's head
_NAME_BYTES = 64
_MOST_CORES = 8192  # of a machine with Linux
MAKING = "the making of a communicator"

HANDSHAKE, CELLS = range(2)
"""Kinds of messages inside calls: handshake records of peers, and parts of gathered or scattered arrays."""

_CALL_TAGS, _FIRST_CALL_TAG = 4096, 16
FIRST_PLAN_TAG = _FIRST_CALL_TAG + 2 * _CALL_TAGS
"""Smallest tag of the messages of plans. Smaller tags belong to calls, or are constants of their modules."""

VALUES = "values", None
"""Placeholder for the object of a rank that gathers values instead of objects."""

Record = tuple[int, bytes]
"""Record of a rank: its kind, and the bytes.

The kind is an even digest of a pickled object, or an odd digest of the meaning of values
(`halox.runtime.gathered_values`).
"""

Value = TypeVar("Value")

_left_to_mpi: list[bool] = []
"""Not empty once MPI is being finalized; then halox no longer frees communicators."""


def leave_to_mpi() -> None:
    """Stop freeing communicators, since MPI is being finalized."""
    _left_to_mpi.append(True)


class Communicator:
    """A duplicate of a user's communicator, with the resources that its ranks share; `World` documents most attributes.

    ``data_comm`` is ``comm`` itself if the ranks gather in shared memory. ``node_comm`` is ``comm`` itself if all ranks
    are on one node. ``node_name`` is this rank's ``HALOX_NODE``. ``guard`` is the `CallGuard` of all collective
    calls. ``users`` is the number of open objects on the communicator.

    Collective over ``parent``. Raises `ExchangeTimeoutError` if a rank does not enter the constructor within
    ``limit_s`` seconds; 0 means no limit.
    """

    def __init__(self, mpi: ModuleType, parent: MPI.Intracomm, limit_s: float) -> None:
        self.mpi = mpi
        self.plans = 0
        """Number of plans made so far, by all objects on this communicator; plan numbers distinguish messages."""
        self.resources: dict[str, Any] = {}
        """Shared resources of all objects on this communicator, by name."""
        self.users = 0
        self._counts: dict[str, int] = {}
        self._is_parent_freed = False
        self.waiter = Waiter(limit_s, True)
        # Without the topology of a Cartesian communicator, which determines only the grids of its user.
        self.comm: MPI.Intracomm = self._duplicate(mpi.Intracomm(parent))
        self.rank, self.size = self.comm.rank, self.comm.size
        self.shares_memory = False
        """Whether this node has several ranks, and they share memory."""
        memory = np.zeros((1, BLOCK_BYTES), np.uint8)
        self.watch = CallWatch(mpi, self.comm, memory, [self.rank], {})
        self.guard = CallGuard()
        self.crowded = False
        self._find_nodes()
        self.node_comm: MPI.Intracomm = self.comm
        if not self.is_one_node:
            # Split now, when all ranks take part: later, only the ranks of some nodes may need ``node_comm``.
            within: Any = self.comm.Split(self.node, self.rank)
            self.node_comm = within
        if self.size > 1:
            self._share_status()
            self.guard.watch = self.watch
        self.data_comm: MPI.Intracomm = self.comm
        if not (self.is_one_node and self.shares_memory):
            self.data_comm = self._duplicate(self.comm)
        self.looks = range(1 if self.crowded else SPINS)
        self.set_limit(limit_s)

    def _duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return a duplicate of a communicator; collective over its ranks."""
        duplicate, request = comm.Idup()
        try:
            self.waiter.until(
                request.Test, lambda: f"rank {comm.rank} has waited in {MAKING} for ranks of comm"
            )
        except BaseException:
            keep(duplicate, request)
            raise
        return duplicate

    def _find_nodes(self) -> None:
        """Group the ranks into nodes: ranks that share memory and have the same ``HALOX_NODE``."""
        self.node_name = node_name()
        name = f"rank {self.rank}" if self.node_name == "rank" else f"name {self.node_name}"
        machine, namespace = repr(_machine()), _pid_namespace()
        texts = [machine, f"{machine} {name}", namespace or ""]
        mine = np.array([*(digest(text.encode()) for text in texts), os.getpid()])
        all_ranks = np.empty((self.size, 4), "i8")
        self._wait_mpi([self.comm.Iallgather(mine, all_ranks)], MAKING, mine, all_ranks)
        machines, nodes, namespaces, pids = all_ranks.T
        _, first_ranks, inverse = np.unique(nodes, return_index=True, return_inverse=True)
        # Nodes are numbered in the order of their first ranks.
        numbers = np.unique(first_ranks[inverse], return_inverse=True)[1]
        self.node_of: npt.NDArray[np.int32] = numbers.astype(np.int32)
        self.node, self.node_count = int(numbers[self.rank]), len(first_ranks)
        mates = np.flatnonzero(nodes == mine[1])
        self.node_ranks: dict[int, int] = {rank: n for n, rank in enumerate(mates.tolist())}
        self.machine_rank = int(np.count_nonzero(machines[: self.rank] == mine[0]))
        known = mates[namespaces[mates] == mine[2]] if namespace else mates[:0]
        self._pids: dict[int, int] = dict(zip(known.tolist(), pids[known].tolist(), strict=True))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank; `node_of` is an array of the same numbers."""
        return tuple(self.node_of.tolist())

    def _share_status(self) -> None:
        """Map the shared memory in which the ranks of this node publish their status, if shared memory works.

        Also finds out whether some node has more ranks than cores.
        """
        mates = list(self.node_ranks)
        segment, name, comm, mpi = None, "", self.node_comm, self.mpi
        state = np.zeros(1 + _MOST_CORES, np.uint8)
        if len(mates) > 1:
            sent = np.zeros(_NAME_BYTES, np.uint8)
            try:
                with suppress(OSError):
                    if self.rank == mates[0]:
                        name = shared_memory.new_name()
                        segment = shared_memory.create(name, len(mates) * BLOCK_BYTES)
                        sent[: len(name)] = np.frombuffer(name.encode(), np.uint8)
                self._wait_mpi([comm.Ibcast(sent, 0)], MAKING, sent)
                with suppress(OSError):
                    if sent.any() and segment is None:
                        segment = shared_memory.attach(sent.tobytes().rstrip(b"\0").decode())
                # Whether the memory is missing on any rank, and the cores of all ranks, to which a launcher may have
                # bound each rank.
                state[0] = segment is None
                state[[1 + core for core in os.sched_getaffinity(0)]] = 1
                self._wait_mpi([comm.Iallreduce(mpi.IN_PLACE, state, mpi.BOR)], MAKING, state)
            finally:
                if name:
                    shared_memory.unlink(name)
        crowded = np.array([len(mates) > 1 and state[1:].sum() < len(mates)], np.uint8)
        request = self.comm.Iallreduce(mpi.IN_PLACE, crowded, mpi.BOR)
        self._wait_mpi([request], MAKING, crowded)
        self.crowded = bool(crowded[0])
        if segment is None or state[0]:
            return
        self.shares_memory = True
        memory = segment.memory[: len(mates) * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
        self.watch = CallWatch(mpi, self.comm, memory, mates, self._pids)
        self._own, words = self.watch.own, memory.view("i8")
        self._round_counts = words[:, 0].data
        heads = [words[:, at : at + HEAD_WORDS] for at in HEADS]
        self._sizes, self._kinds, self.flags = (
            [head[:, column].data for head in heads] for column in (_SIZE, _KIND, _FLAG)
        )
        self._numbers = [head[:, _NUMBERS:_FLAG] for head in heads]
        self.slots = [memory[:, at : at + SLOT_BYTES] for at in SLOTS]
        self.rounds, self._first = 0, self.watch.first
        self._sent_kinds = [0, 0]

    @property
    def is_one_node(self) -> bool:
        return len(self.node_ranks) == self.size

    @property
    def gathers_in_memory(self) -> bool:
        return self.shares_memory and len(self.node_ranks) == self.size

    # Waits

    def until(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        ranks: Ranks,
        kept: Sequence[object] = (),
    ) -> None:
        """Wait for a step of all ranks. After an error no further call is possible.

        ``kept`` are then kept alive: the requests, and their buffers, which mpi4py's requests do not keep.
        """
        try:
            self.waiter.until(ready, what, ranks)
        except BaseException as error:
            if not isinstance(error, MismatchError):  # the other ranks raise it too
                self.watch.fail(f"{error}" or type(error).__name__)
            keep(*kept)
            if isinstance(error, self.mpi.Exception):
                raise HaloxError(f"MPI has failed where {what()}: {error}") from error
            raise

    def check(self) -> None:
        """Raise `StateError` after a failed call, since the ranks may be out of step."""
        if self.watch.failed:
            raise StateError(
                f"an earlier call has failed on rank {self.rank}, and the ranks may be out of step; make a new grid "
                f"(or exchange, or allreduce) to go on. The error was: {self.watch.failed}"
            )

    def call_tag(self, kind: int) -> int:
        """Return the message tag of the current call, so that a late message never matches a later call."""
        return _FIRST_CALL_TAG + kind * _CALL_TAGS + self.watch.number % _CALL_TAGS

    # Gathering

    def gather(self, mine: object, step: str, *, of_node: bool = False) -> list[Any]:
        """Return an object of every rank, or of every rank of the node, in the order of the ranks; collective, blocks.

        Raises `MismatchError` on all ranks if they are in different calls, `ExchangeTimeoutError` if a rank is
        missing, and `StateError` if an earlier call has failed.
        """
        ranks = len(self.node_ranks) if of_node else self.size
        return self.reduce(mine, step, of_node=of_node)[1] or [mine] * ranks

    def gather_numbers(self, mine: int, step: str) -> npt.NDArray[np.int64]:
        """Return an integer of every rank, in the order of the ranks; collective, only after a `reduce` of the call."""
        numbers, own = np.empty(self.size, "i8"), np.array([mine])
        self._wait_mpi([self.comm.Iallgather(own, numbers)], step, own, numbers)
        return numbers

    def swap_numbers(self, mine: npt.NDArray[np.int64], step: str) -> npt.NDArray[np.int64]:
        """Send each rank a row of integers, and return a row of each; collective, only after a `reduce` of the call."""
        numbers = np.empty_like(mine)
        self._wait_mpi([self.comm.Ialltoall(mine, numbers)], step, mine, numbers)
        return numbers

    def swap_rows(
        self, sent: Bytes, received: Bytes, counts: Any, incoming: Any, step: str
    ) -> None:
        """Send each rank rows of bytes, and receive rows, both in order of the ranks; as `swap_numbers`."""
        row = self.mpi.BYTE.Create_contiguous(sent.shape[1]).Commit()
        ends = [
            [rows, (n.tolist(), (n.cumsum() - n).tolist()), row]
            for rows, n in ((sent, counts), (received, incoming))
        ]
        self._wait_mpi([self.comm.Ialltoallv(*ends)], step, sent, received)
        row.Free()

    def broadcast(self, data: bytearray, step: str) -> bytearray:
        """Return the bytes of rank 0, equally many on all ranks; collective, only after a `reduce` of the call."""
        self._wait_mpi([self.comm.Ibcast([data, self.mpi.BYTE], 0)], step, data)
        return data

    def reduce(
        self,
        mine: object,
        step: str,
        numbers: Sequence[int] = (),
        *,
        of_node: bool = False,
    ) -> tuple[list[int], list[Any] | None]:
        """Return the sums of some numbers over all ranks, and the objects of all ranks if any two of them differ.

        The objects are None if the pickled objects of all ranks are equal. All ranks give the same number of integers,
        at most `MOST_NUMBERS`; sums are modulo 2**64. With ``of_node`` the ranks are those of the node. Collective,
        blocks; raises the errors of `gather`.
        """
        if (len(self.node_ranks) if of_node else self.size) == 1:
            return [*numbers], None
        self.check()
        sent = b"" if mine is None else pickle.dumps(mine, pickle.HIGHEST_PROTOCOL)
        kind = digest(sent) << 1
        if self.gathers_in_memory or (of_node and self.shares_memory):
            slot = self.rounds + 1 & 1
            part = sent[:SLOT_BYTES]
            self._own.slots[slot][: len(part)] = part
            alike = self.round(kind, len(sent), step, numbers)
            sums = self._numbers[slot][:, : len(numbers)].sum(0).tolist() if numbers else []
            if alike:
                return sums, None
            return sums, objects(self.read(slot, sent, step))
        sums, records = self.by_mpi(kind, sent, step, numbers, of_node=of_node)
        return sums, None if records is None else objects(records)

    def read(self, slot: int, sent: bytes, step: str) -> list[Record]:
        """Read the records of a round; run more rounds if an object is longer than a slot."""
        rows, kinds = self.slots[slot], self._kinds[slot].tolist()
        flags, n = self.flags[slot].tolist(), self.rounds
        words = [flag - kind - n for flag, kind in zip(flags, kinds, strict=True)]
        if len(set(words)) > 1:
            self._compare(dict(zip(self.node_ranks, words, strict=True)))
        # Only objects have sizes.
        sizes = [
            0 if kind & 1 else size
            for kind, size in zip(kinds, self._sizes[slot].tolist(), strict=True)
        ]
        objects = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
        longest = max(sizes)
        if longest <= SLOT_BYTES:
            return list(zip(kinds, objects, strict=True))
        pieces = [[start] for start in objects]
        for start in range(SLOT_BYTES, longest, SLOT_BYTES):
            slot = self.rounds + 1 & 1
            part = sent[start : start + SLOT_BYTES]
            self._own.slots[slot][: len(part)] = part
            self.round(0, len(sent), step)
            for piece, row, whole in zip(pieces, self.slots[slot], sizes, strict=True):
                piece.append(row[: max(whole - start, 0)].tobytes())
        return [(kind, b"".join(piece)) for kind, piece in zip(kinds, pieces, strict=True)]

    def gatherer(
        self,
        kind: int,
        mine: Sequence[npt.NDArray[Any]],
        gathered: Sequence[Value],
        differ: Callable[[int, str], Value],
        code: int | None = None,
    ) -> Callable[[Any, str], Value]:
        """Return a function that gathers values of one kind in shared memory with little overhead; collective, blocks.

        It takes this rank's values, which it writes to ``mine[slot]``, and the step in the text of a timeout. It
        returns ``gathered[slot]``, valid until the next round of this rank, or ``differ(slot, step)`` if not all ranks
        gather values of this kind in this call. With a ``code``, it first counts a call, as `CallWatch.call` does.

        A rank publishes a record by its flag: the sum of its call, kind and round. The flags of all ranks are equal
        once all have published records of one call and one kind. Until then, and otherwise, they are not, since kinds
        are digests: two have equal flags with a probability of 2**-61.
        """
        watch, looks, size, flags = self.watch, self.looks, len(self.node_ranks), self.flags
        heads, count, sent_kinds = self._own.heads, self._own.count, self._sent_kinds
        needs_fence, fence = shared_memory.NEEDS_FENCE, shared_memory.fence
        ring, mask = self._own.ring, RING_WORDS - 1
        peer = (list(self.node_ranks).index(self.rank) + 1) % size

        def gather(values: Any, step: str) -> Value:
            if code is not None:
                n = watch.number = watch.number + 1
                watch.word = ring[n & mask] = n << CODE_BITS | code
            n = self.rounds + 1
            slot = n & 1
            mine[slot][...] = values
            self.rounds, head = n, heads[slot]
            if sent_kinds[slot] is not kind:
                head[_KIND] = sent_kinds[slot] = kind
            if needs_fence:
                fence()
            flag = head[_FLAG] = watch.word + kind + n
            if needs_fence:
                fence()
            count[0] = n
            found = flags[slot]
            for _ in looks:
                # One flag first, since a list of all takes longer.
                if found[peer] == flag and (size == 2 or found.tolist().count(flag) == size):
                    if needs_fence:
                        fence()
                    return gathered[slot]
            return gathered[slot] if self._wait_for_records(flag, step) else differ(slot, step)

        return gather

    def round(self, kind: int, size: int, step: str, numbers: Sequence[int] = ()) -> bool:
        """Publish the record of an object, and wait for the records of all ranks of the node; see `gatherer`.

        Returns whether they are of one call and one kind. Otherwise `read` returns them.
        """
        n = self.rounds = self.rounds + 1
        slot = n & 1
        head = self._own.heads[slot]
        head[_SIZE], head[_KIND] = size, kind
        self._sent_kinds[slot] = kind
        for place, number in enumerate(numbers, _NUMBERS):
            head[place] = number
        if shared_memory.NEEDS_FENCE:
            shared_memory.fence()
        flag, flags = self.watch.word + kind + n, self.flags[slot]
        head[_FLAG] = flag
        if shared_memory.NEEDS_FENCE:
            shared_memory.fence()
        self._own.count[0] = n
        for _ in self.looks:
            if flags.tolist().count(flag) == len(flags):
                if shared_memory.NEEDS_FENCE:
                    shared_memory.fence()
                return True
        return self._wait_for_records(flag, step)

    def _wait_for_records(self, flag: int, step: str) -> bool:
        """Wait until all ranks of the node have published their records, of which this rank's has ``flag``."""
        flags = self.flags[self.rounds & 1]
        self._wait_for(self.rounds, step)
        if shared_memory.NEEDS_FENCE:
            shared_memory.fence()
        if self._first[ANY_FAILED]:  # the record of a failed rank may belong to an earlier call
            self.watch.look_for_failed(())
        return flags.tolist().count(flag) == len(flags)

    def _wait_for(self, n: int, step: str) -> None:
        counts = self._round_counts

        def missing() -> list[int]:
            pairs = zip(self.node_ranks, counts.tolist(), strict=True)
            return [rank for rank, count in pairs if count < n]

        self.until(
            lambda: min(counts) >= n,
            lambda: f"rank {self.rank} has waited in {step} for {ranks_text(missing())}",
            missing,
        )

    def by_mpi(
        self,
        kind: int,
        sent: bytes,
        step: str,
        numbers: Sequence[int] = (),
        *,
        of_node: bool = False,
    ) -> tuple[list[int], list[Record] | None]:
        """Reduce by MPI, and gather the records if they differ or have to be read; see `reduce`."""
        comm, ranks = (
            (self.node_comm, self.node_ranks) if of_node else (self.comm, range(self.size))
        )
        # Values with bytes always need the records: their ranks reduce 0, and wait only once.
        reads = bool(kind & 1 and sent)
        mine, totals = np.zeros((2, _TOTALS), "u8")
        mine[0] = 0 if reads else digest(b"%d %d" % (self.watch.word, kind)) | 1
        mine[1 : 1 + len(numbers)] = np.array(numbers, "i8").view("u8")
        requests = [comm.Iallreduce(mine, totals)]
        record = np.zeros(_RECORD_BYTES, np.uint8)
        head = record[: _HEAD.itemsize].view(_HEAD)
        head["word"], head["size"], head["kind"] = self.watch.word, len(sent), kind
        inline = np.frombuffer(sent[:_INLINE_BYTES], np.uint8)
        record[_HEAD.itemsize : _HEAD.itemsize + len(inline)] = inline

        def gather() -> Bytes:
            records = np.zeros((len(ranks), _RECORD_BYTES), np.uint8)
            requests.append(comm.Iallgather(record, records))
            return records

        records = gather() if reads else None
        self._wait_mpi(requests, step, mine, totals, record, records)
        sums = totals[1 : 1 + len(numbers)].view("i8").tolist()
        if records is None:
            # The sum of other digests, which are random, is wrong with a probability below 2**-40.
            if int(totals[0]) == int(mine[0]) * len(ranks) % 2**64:
                return sums, None
            records = gather()
            self._wait_mpi(requests[1:], step, record, records)
        heads = records[:, : _HEAD.itemsize].copy().view(_HEAD)[:, 0]
        self._compare(dict(zip(ranks, heads["word"].tolist(), strict=True)))
        return sums, self._read_gathered(comm, records, heads, sent, step)

    def _read_gathered(
        self, comm: MPI.Intracomm, records: Bytes, heads: npt.NDArray[Any], sent: bytes, step: str
    ) -> list[Record]:
        """Return the records gathered by MPI; gather their ends if an object exceeds a record."""
        sizes, kinds = heads["size"].tolist(), heads["kind"].tolist()
        objects = [
            row[_HEAD.itemsize : _HEAD.itemsize + min(size, _INLINE_BYTES)].tobytes()
            for row, size in zip(records, sizes, strict=True)
        ]
        rests = [max(size - _INLINE_BYTES, 0) for size in sizes]
        if not any(rests):
            return list(zip(kinds, objects, strict=True))
        rest = np.frombuffer(sent[_INLINE_BYTES:], np.uint8)
        starts = np.cumsum([0, *rests]).tolist()
        all_rests = np.zeros(starts[-1], np.uint8)
        byte = self.mpi.BYTE
        request = comm.Iallgatherv([rest, len(rest), byte], [all_rests, (rests, starts[:-1]), byte])
        self._wait_mpi([request], step, rest, all_rests)
        return [
            (kind, start + all_rests[a : a + n].tobytes())
            for kind, start, a, n in zip(kinds, objects, starts, rests, strict=False)
        ]

    def _wait_mpi(self, requests: Sequence[MPI.Request], step: str, *buffers: object) -> None:
        self.until(
            partial(self.mpi.Request.Testall, requests),
            lambda: f"rank {self.rank} has waited in {step} for the other ranks",
            tuple,
            [*requests, *buffers],
        )

    def _compare(self, words: dict[int, int]) -> None:
        """Raise `MismatchError` if ranks are in different calls; all gathering ranks raise it together."""
        if len(set(words.values())) == 1:
            return
        error = mismatch(list(words.items()))
        if len(words) == self.size:
            self.watch.renumber(max(words.values()) >> CODE_BITS)
        else:  # the ranks of other nodes do not know of the mismatch
            self.watch.fail_by_mismatch(error)
        raise error

    # Life

    def set_limit(self, limit_s: float) -> None:
        self.waiter = Waiter(limit_s, self.crowded, self.watch if self.size > 1 else None)

    def add_user(self, kind: str) -> int:
        """Count an object, of a kind of `halox.runtime.status.OBJECTS`, and return its number among its kind."""
        self.users += 1
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        return number

    def remove_user(self) -> None:
        """Note that an object was closed or collected; local."""
        self.users -= 1
        if self._is_parent_freed:
            self.destroy()

    def destroy(self) -> None:
        """Free the communicators, once no object uses them; called when the user's communicator is freed."""
        self._is_parent_freed = True
        # After a failure, late messages may arrive on the communicators.
        if self.users or self.watch.failed or _left_to_mpi:
            return
        with suppress(Exception):
            self.watch.drain()
            for comm in (self.node_comm, self.data_comm):
                if comm is not self.comm:
                    comm.Free()
            self.comm.Free()


def objects(records: Sequence[Record]) -> list[Any]:
    """Return the objects that gathered records hold; `VALUES` for the record of a rank that gathers values."""
    return [
        VALUES if kind & 1 else pickle.loads(pickled) if pickled else None
        for kind, pickled in records
    ]


def digest(meaning: bytes) -> int:
    """Return a digest of 61 bits, the same on all ranks; a kind has one more, and a flag is below 2**63."""
    return int.from_bytes(blake2b(meaning, digest_size=8).digest(), "little") >> 3


def node_name() -> str:
    """Return ``HALOX_NODE``, the node name that the user has set for this rank."""
    return os.environ.get("HALOX_NODE", "")


def _machine() -> tuple[object, ...]:
    """Return an identity of the machine, equal on ranks that can share memory."""
    boot, device = "", -1
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    with suppress(OSError):
        device = os.stat(shared_memory.FOLDER).st_dev
    return boot, os.uname().nodename, device


def _pid_namespace() -> str | None:
    """Return the name of this process's PID namespace, None if it is unknown."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
