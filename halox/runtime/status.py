"""Status of the ranks of a communicator: the latest collective calls of each rank, and whether it waits or has failed.

Each rank has a block in the shared memory of its node. Only this rank writes to its block, except for the word
`ANY_FAILED`::

    | count | wait | calls: a ring of 64 words | slot 0 | slot 1 |

``count`` and the slots carry the objects that ranks gather (`halox.runtime.communicator`). A word of the ring has the
number of a call and its code. The numbers count the collective calls on one communicator, of all grids, exchanges and
allreduces on it, so ranks that make the same calls have equal words. A rank that has waited long compares its words
with the words of other ranks. Two different words with the same number mean that the ranks made different calls, and
that a wait between them cannot end.

In a long wait, a rank also sends its word to ranks of other nodes, once in a call to each, and with at most one pending
message to each: a slow rank must not collect the words of many calls. A rank that has found a mismatch, or that has
failed, marks its block and sends the mark to other nodes, so that no rank waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from halox.errors import ExchangeTimeoutError, MismatchError
from halox.runtime.shared_memory import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.runtime.dlpack import Array

# fmt: off
CALLS = (
    "a call", "making a grid", "zeros", "ones", "full", "empty", "gather", "scatter",
    "from_dataarray", "to_zarr", "exchange", "accumulate", "plan", "start of a plan",
    "explain", "measure", "sum", "sum over axes", "min", "max", "norm", "dot", "allreduce",
    "making an Allreduce", "making an Exchange", "making a Transpose", "making an FFT",
    "forward", "backward", "tune", "close", "save", "load", "std", "argmin", "argmax",
    "histogram", "random", "making Points", "get", "collect", "coarsen", "linear_operator",
    "making an Output", "append", "wait", "stopping", "loop", "reduce", "making Particles",
    "migrate", "count",
)
# fmt: on
"""Names of the counted calls; the index of a name is its code."""

OBJECTS = ("grid", "Exchange", "Allreduce", "object")
"""Kinds of objects that make calls; the index of a kind is part of a call's code."""

CODE_BITS = 24
"""Bits of a call's word that hold its code: 6 for its name, 8 for its object, 10 for its plan."""

BLOCK_BYTES = 8192
SLOT_BYTES = 3520
"""Bytes of a slot without its head."""

MOST_NUMBERS = 4
"""Numbers in the head of a slot, behind the size of the whole object and its kind; the flag is the last word."""

HEAD_WORDS = 8
_HEAD_BYTES = 8 * HEAD_WORDS  # a cache line, so that values in slots are aligned alike on all ranks
_WAIT, _RING, _SLOTS = 128, 256, 1024
_STARTS = [_SLOTS + (_HEAD_BYTES + SLOT_BYTES) * slot for slot in range(2)]
HEADS = [start // 8 for start in _STARTS]
"""Places of the slots' heads in a block, in words."""
SLOTS = [start + _HEAD_BYTES for start in _STARTS]
"""Places of the slots in a block, in bytes."""

RING_WORDS = 64
"""Words of the ring of calls, a power of two."""

_PLAN_BITS, _KIND_BITS, _NUMBER_BITS = 10, 2, 6
_NAME_SHIFT = _PLAN_BITS + _KIND_BITS + _NUMBER_BITS
# Words of `StatusBlock.wait`: whether the rank waits, its failure, and on the node's first rank whether any has failed.
_WAITING, _FAILED, ANY_FAILED = range(3)
_CALL_FAILED, _CALLS_DIFFER = 1, 2  # kinds of failures
_NOTICE_S = 10.0  # a wait of this length prints a notice
_NOTE_TAG = 3
_MOST_NOTES = 64
# A note has two words: the word of the sender's call, and its failure.

_CODES = {name: number << _NAME_SHIFT for number, name in enumerate(CALLS)}


def object_code(kind: str, number: int) -> int:
    """Return the code of an object: ``number`` counts the objects of its kind, one of `OBJECTS`, on a communicator."""
    return OBJECTS.index(kind) << _NUMBER_BITS | number % (1 << _NUMBER_BITS)


def code_of(name: str, who: int = 0, plan: int = 0) -> int:
    """Return the code of a call; ``who`` is the code of its object, ``plan`` the number of its plan, if it has one."""
    return _CODES[name] | who << _PLAN_BITS | plan % (1 << _PLAN_BITS)


def name_of(word: int) -> str:
    """Return the name of the call that a word encodes."""
    number = (word & ((1 << CODE_BITS) - 1)) >> _NAME_SHIFT
    return CALLS[number] if number < len(CALLS) else CALLS[0]


def _object_of(word: int) -> int:
    return (word & ((1 << _NAME_SHIFT) - 1)) >> _PLAN_BITS


def _plan_of(word: int) -> int:
    return word & ((1 << _PLAN_BITS) - 1)


def word_text(word: int, *, in_full: bool = False) -> str:
    """Return a call as errors show it: "exchange (call 42)", or in full "exchange on grid 2 by plan 3 (call 42)"."""
    kind, number = divmod(_object_of(word), 1 << _NUMBER_BITS)
    on = f" on {OBJECTS[kind]} {number}" if in_full and number else ""
    by = f" by plan {_plan_of(word)}" if in_full and _plan_of(word) else ""
    return f"{name_of(word)}{on}{by} (call {word >> CODE_BITS})"


def calls_text(words: Sequence[tuple[int, int]]) -> str:
    """Return the call of each rank as errors show it: "rank 0: sum (call 41), ranks 1, 2: exchange (call 41)".

    If the calls of all ranks have one name, their objects and plans are shown, too.
    """
    by_call: dict[int, list[int]] = {}
    for rank, word in words:
        by_call.setdefault(word, []).append(rank)
    in_full = len({*map(name_of, by_call)}) == 1
    return ", ".join(
        f"{ranks_text(ranks)}: {word_text(word, in_full=in_full)}"
        for word, ranks in by_call.items()
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as errors show them.

    Examples
    --------
    >>> ranks_text([3]), ranks_text([0, 2]), ranks_text(range(20))
    ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20)')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f", ... ({len(ranks)})" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


def mismatch(words: Sequence[tuple[int, int]]) -> MismatchError:
    """Return the error for ranks that have made different calls."""
    plans = [_plan_of(word) for _, word in words]
    hint = ""
    if len({name_of(word) for _, word in words}) == 1:
        if len({_object_of(word) for _, word in words}) > 1:
            hint = "; the objects are numbered in the order of their construction"
        elif any(plans) and not all(plans):
            hint = (
                "; a plan is new where fields come in another order than before, or arrays of another dtype, shape or "
                "strides (the view of a larger buffer has others than a new array)"
            )
    return MismatchError(
        f"the ranks have made different calls: {calls_text(words)}; all ranks must make the same collective "
        f"calls, in the same order, and give the same arrays{hint}"
    )


class StatusBlock:
    """Status of one rank of the node, as int64 views of shared memory; see the module's docstring."""

    def __init__(self, memory: Bytes) -> None:
        self.count = memory[:8].data.cast("B").cast("q")
        self.wait = memory[_WAIT : _WAIT + 8 * (ANY_FAILED + 1)].data.cast("B").cast("q")
        self.ring = memory[_RING : _RING + 8 * RING_WORDS].data.cast("B").cast("q")
        self.heads = [memory[at : at + _HEAD_BYTES].data.cast("B").cast("q") for at in _STARTS]
        self.slots = [memory[at : at + SLOT_BYTES].data for at in SLOTS]

    def last(self) -> int:
        return max(self.ring)

    def call(self, number: int) -> int | None:
        """Return the word of call ``number``, None if the ring does not contain it."""
        word = self.ring[number % RING_WORDS]
        return word if word >> CODE_BITS == number and word else None


class CallWatch:
    """Progress of this rank through the collective calls of a communicator, and its view of the other ranks.

    ``memory`` has the blocks of ``near``, the ranks of this node, as bytes: one block a row. ``pids`` are the processes
    of the ranks in the same PID namespace. ``failed`` is the reason why no further call is possible; it is empty as
    long as no call has failed. ``own`` is the block of this rank. ``first`` has the status words of the node's first
    rank.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: MPI.Intracomm,
        memory: Bytes,
        near: Sequence[int],
        pids: dict[int, int],
    ) -> None:
        self._mpi, self._comm, self.rank = mpi, comm, comm.rank
        self._memory, self._near, self._pids = memory, near, pids
        self.own = self._own = StatusBlock(memory[near.index(comm.rank)])
        self.first = StatusBlock(memory[0]).wait
        self.number = 0
        self.word = 0
        self.failed = ""
        self._far_failures: dict[int, int] = {}  # of ranks on other nodes
        # By rank the latest word that it was sent, with the note, and the latest word that was received from it.
        self._told: dict[int, tuple[int, MPI.Request, Array]] = {}
        self._received: dict[int, int] = {}
        self._notes: list[tuple[MPI.Request, Array]] = []  # of this rank's failure
        self._is_notified = False

    @cached_property
    def blocks(self) -> dict[int, StatusBlock]:
        """The blocks of the ranks of this node, for long waits and errors."""
        return {rank: StatusBlock(row) for rank, row in zip(self._near, self._memory, strict=True)}

    # Calls

    def call(self, code: int) -> None:
        n = self.number = self.number + 1
        self.word = self._own.ring[n % RING_WORDS] = n << CODE_BITS | code

    def ticker(self, code: int) -> Callable[[], None]:
        """Return a fast function that counts and publishes calls of one kind."""
        ring = self._own.ring
        mask = RING_WORDS - 1

        def tick() -> None:
            n = self.number = self.number + 1
            self.word = ring[n & mask] = n << CODE_BITS | code

        return tick

    def renumber(self, number: int) -> None:
        """Continue from another number, the same on all ranks."""
        self.number, self.word = number, 0
        self._received.clear()
        for n in range(RING_WORDS):
            self._own.ring[n] = 0

    # Failures

    def fail(self, why: str) -> None:
        """Disable all further calls, and notify the ranks that may wait for this rank; local, does not block."""
        self._fail(why, _CALL_FAILED, self.word)

    def fail_by_mismatch(self, error: MismatchError, mine: int = 0) -> None:
        """Disable all further calls, since ranks are in different calls; ``mine`` is this rank's word among theirs."""
        self._fail(str(error), _CALLS_DIFFER, mine)

    def _fail(self, why: str, kind: int, word: int) -> None:
        if self.failed:
            return
        self.failed = why
        self._own.wait[_FAILED], self.first[ANY_FAILED] = kind, 1
        note = np.array([word, kind], "i8")
        with suppress(self._mpi.Exception):
            for rank in self._far([*self._told]):
                self._notes.append((self._comm.Isend(note, rank, _NOTE_TAG), note))

    def _failure_of(self, rank: int) -> int:
        block = self.blocks.get(rank)
        return self._far_failures.get(rank, 0) if block is None else block.wait[_FAILED]

    def find_failed(self, ranks: Sequence[int]) -> int | None:
        """Return a rank among ``ranks`` (all if empty) on which a call has failed, None if no failure is known."""
        if not (self._far_failures or self.first[ANY_FAILED]):
            return None
        return next(filter(self._failure_of, ranks or range(self._comm.size)), None)

    def has_failed_before(self) -> bool:
        """Whether a call has failed on another rank that, to this rank's knowledge, has not made the current call."""
        for rank in range(self._comm.size):
            if rank == self.rank or self.find_failed((rank,)) is None:
                continue
            last = self._last_of(rank)
            if last != self.word and last >> CODE_BITS <= self.number:
                return True
        return False

    def look_for_failed(self, ranks: Sequence[int]) -> None:
        """Raise an error if a call has failed on one of ``ranks`` (all if empty).

        `MismatchError` if this rank was in another call than other ranks, otherwise `ExchangeTimeoutError`.
        """
        rank = self.find_failed(ranks)
        if rank is None:
            return
        kind = self._failure_of(rank)
        reason = (
            "where a call has failed" if kind == _CALL_FAILED else "where the calls of ranks differ"
        )
        why = f"rank {self.rank} has waited in {word_text(self.word)} for rank {rank}, {reason}"
        self._fail(why, kind, self.word)
        error = ExchangeTimeoutError if kind == _CALL_FAILED else MismatchError
        raise error(f"{why}; make a new grid (or exchange, or allreduce) on all ranks to go on")

    # Waits

    def publish(self, *, waits: bool) -> None:
        self._is_notified = False
        self._own.wait[_WAITING] = waits

    def look(self, ranks: Sequence[int], waited_s: float) -> None:
        """Raise `MismatchError` if ranks are in different calls, `ExchangeTimeoutError` if one ended or failed."""
        for rank, block in self.blocks.items():
            if rank != self.rank:
                self._compare(rank, block)
        self._exchange_notes(ranks)
        self.look_for_failed(ranks)
        self._find_ended(ranks)
        if waited_s > _NOTICE_S and not self._is_notified:
            self._print_notice(ranks, waited_s)

    def _compare(self, rank: int, block: StatusBlock) -> None:
        """Raise `MismatchError` if a rank of this node is in another call."""
        theirs = block.call(self.number)
        if theirs is not None:
            self._check(rank, self.word, theirs)
        elif block.last() >> CODE_BITS < self.number:
            self._check(rank, self._own.call(block.last() >> CODE_BITS), block.last())

    def _check(self, rank: int, mine: int | None, theirs: int) -> None:
        """Raise `MismatchError` if this rank and another rank have different words of the same number."""
        if not mine or not theirs or mine == theirs:
            return
        if name_of(mine) == name_of(theirs) == "start of a plan":
            return  # plans started in a different order may still complete
        error = mismatch(sorted([(self.rank, mine), (rank, theirs)]))
        self.fail_by_mismatch(error, mine)
        raise error

    def _find_ended(self, ranks: Sequence[int]) -> None:
        """Raise `ExchangeTimeoutError` if the process of one of ``ranks`` (all if empty) has ended."""
        for rank in ranks or self._pids:
            pid = self._pids.get(rank)
            if pid is not None and rank != self.rank and has_ended(pid):
                raise ExchangeTimeoutError(
                    f"rank {self.rank} has waited in {word_text(self.word)} for rank {rank}, whose process (pid {pid}) "
                    f"has ended; its last call here was {word_text(self.blocks[rank].last())}"
                )

    def report(self, ranks: Sequence[int]) -> str:
        """Return the call of this rank and the calls of the ranks that it waits for, as text."""
        if not self.word:
            return ""
        self._exchange_notes(ranks)
        others = [self._progress_of(rank) for rank in (list(ranks) or self._behind())[:3]]
        there = "".join(f", {other_call}" for other_call in others)
        return f" in {word_text(self.word)}{there}"

    def _last_of(self, rank: int) -> int:
        """Return the word of a rank's last known call, 0 if none is known."""
        block = self.blocks.get(rank)
        return self._received.get(rank, 0) if block is None else block.last()

    def _behind(self) -> list[int]:
        """Return the ranks that, to this rank's knowledge, have not reached its call."""
        ranks = range(self._comm.size)
        return [rank for rank in ranks if self._last_of(rank) >> CODE_BITS < self.number]

    def _progress_of(self, rank: int) -> str:
        last = self._last_of(rank)
        # The last word of a rank of another node may be old.
        if not last or (rank not in self.blocks and last >> CODE_BITS < self.number):
            return f"rank {rank} has not arrived"
        return f"the last call of rank {rank} is {word_text(last)}"

    def _print_notice(self, ranks: Sequence[int], waited_s: float) -> None:
        """Print the ranks that are waited for, on the first waiting rank only."""
        near = (rank for rank, block in self.blocks.items() if block.wait[_WAITING])
        far = (rank for rank, word in self._received.items() if word == self.word)
        if any(rank < self.rank for rank in chain(near, far)):
            return
        self._is_notified = True
        waited_for = list(ranks) or self._behind()
        whom = ranks_text(waited_for) if waited_for else "another rank"
        print(
            f"halox: rank {self.rank} has waited for {waited_s:.0f} s for {whom}{self.report(ranks)}; it goes on "
            "waiting, up to HALOX_TIMEOUT",
            file=sys.stderr,
            flush=True,
        )

    # Ranks of other nodes

    def _exchange_notes(self, ranks: Sequence[int]) -> None:
        """Send the word of this rank's call to ranks of other nodes, ``ranks`` first, and receive notes."""
        for rank in self._far(ranks):
            told = self._told.get(rank)
            if told is None or (told[0] != self.word and told[1].Test()):
                note = np.array([self.word, 0], "i8")
                self._told[rank] = self.word, self._comm.Issend(note, rank, _NOTE_TAG), note
        for rank, theirs, failure in self._receive_notes():
            self._received[rank] = max(theirs, self._received.get(rank, 0))
            if failure:
                self._far_failures[rank] = failure
            number = theirs >> CODE_BITS
            if failure != _CALL_FAILED and number <= self.number:
                self._check(rank, self._own.call(number), theirs)

    def _far(self, first: Sequence[int]) -> list[int]:
        """Return the ranks of other nodes that are sent notes, beginning with the ranks ``first``."""
        if len(self._near) == self._comm.size:
            return []
        far = (rank for rank in chain(first, range(self._comm.size)) if rank not in self.blocks)
        return list(islice(dict.fromkeys(islice(far, 2 * _MOST_NOTES)), _MOST_NOTES))

    def _receive_notes(self) -> Iterator[tuple[int, int, int]]:
        """Receive the notes that have arrived: their senders, words and failures."""
        note, status = np.zeros(2, "i8"), self._mpi.Status()
        while len(self._near) < self._comm.size and self._comm.Iprobe(
            self._mpi.ANY_SOURCE, _NOTE_TAG, status
        ):
            self._comm.Recv(note, status.Get_source(), _NOTE_TAG)
            yield status.Get_source(), int(note[0]), int(note[1])

    def drain(self) -> None:
        for _ in self._receive_notes():
            pass
        self._mpi.Request.Testall([request for _, request, _ in self._told.values()])


def has_ended(pid: int) -> bool:
    """Whether a process of this PID namespace has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False
