"""Status of the ranks of a communicator: the latest collective calls of each rank, and whether it waits or has failed.

Each rank has a block in the shared memory of its node. Only this rank writes to its block, except for the word
`ANY_FAILED`::

    | count | wait | calls: a ring of 64 words | slot 0 | slot 1 |

``count`` and the slots carry the objects that ranks gather (`halox.runtime.communicator`). A word of the ring has the
number of a call and its code. The numbers count the collective calls on one communicator, of all grids, exchanges and
allreduces on it, so ranks that make the same calls have equal words. A rank that has waited long compares its words
with the words of other ranks. Two different words with the same number mean that the ranks made different calls, and
that a wait between them cannot end.

After a second of waiting, a rank also sends its word to ranks of other nodes, once in a call to each,
and with at most one pending message to each: a slow rank must not collect the words of many calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from halox.errors import ExchangeTimeoutError, MismatchError
from halox.runtime.shared_memory import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

    from halox.runtime.dlpack import Array

CALLS = (
    "a call",
    "making a grid",
    "zeros",
    "ones",
    "full",
    "empty",
    "gather",
    "scatter",
    "from_dataarray",
    "to_zarr",
    "exchange",
    "accumulate",
    "plan",
    "start of a plan",
    "explain",
    "measure",
    "sum",
    "sum over axes",
    "min",
    "max",
    "norm",
    "dot",
    "allreduce",
    "making an Allreduce",
    "making an Exchange",
    "making a Transpose",
    "making an FFT",
    "forward",
    "backward",
    "tune",
    "close",
    "save",
    "load",
    "std",
    "argmin",
    "argmax",
    "histogram",
    "random",
    "making Points",
    "get",
    "collect",
    "coarsen",
    "linear_operator",
    "making an Output",
    "append",
    "wait",
    "stopping",
    "loop",
    "reduce",
)
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
# Words of `StatusBlock.wait`: whether the rank waits; the word of its call if it has found a mismatch in this call, the
# other rank, and the differing words of both ranks; the call for which it has printed a notice; whether a call has
# failed on it. The last word is used only in the block of the node's first rank: whether a call has failed on any rank
# of the node.
_FIELDS = range(8)
_WAITING, _MISMATCH, _OTHER_RANK, _MINE, _THEIRS, _NOTIFIED, _FAILED, ANY_FAILED = _FIELDS
_NOTICE_S = 10.0  # a wait of this length prints a notice
_NOTE_AFTER_S = 1.0
_NOTE_TAG = 3
_MOST_NOTES = 64
# A note has three words: a rank, the word of its call, and whether a call has failed on it. A rank that finds a
# mismatch also passes on the other rank's note, so that ranks in its own call learn of it.

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


def word_text(word: int, *, with_object: bool = False, with_plan: bool = False) -> str:
    """Return a call as errors show it: "exchange on grid 2 by plan 3 (call 42)"."""
    kind, number = divmod(_object_of(word), 1 << _NUMBER_BITS)
    on = f" on {OBJECTS[kind]} {number}" if with_object else ""
    plan = _plan_of(word)
    by = "" if not with_plan else f" by plan {plan}" if plan else " by a new plan"
    return f"{name_of(word)}{on}{by} (call {word >> CODE_BITS})"


def calls_text(words: Sequence[tuple[int, int]]) -> str:
    """Return the call of each rank as errors show it: "rank 0: sum (call 41), ranks 1, 2: exchange (call 41)".

    Calls of the same name are told apart by their objects, and by their plans if the objects are the same.
    """
    by_call: dict[int, list[int]] = {}
    for rank, word in words:
        by_call.setdefault(word, []).append(rank)
    alike = len({word_text(word) for word in by_call}) < len(by_call)
    on_one = len({_object_of(word) for word in by_call}) == 1
    return ", ".join(
        f"{ranks_text(ranks)}: {word_text(word, with_object=alike and not on_one, with_plan=alike and on_one)}"
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
        self.wait = memory[_WAIT : _WAIT + 8 * len(_FIELDS)].data.cast("B").cast("q")
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
    of the ranks in the same PID namespace. After a wait of ``note_after_s`` seconds, this rank exchanges notes with
    ranks of other nodes. ``failed`` is the reason why no further call is possible; it is empty as long as no call has
    failed. ``own`` is the block of this rank. ``first`` has the status words of the node's first rank.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: MPI.Intracomm,
        memory: Bytes,
        near: Sequence[int],
        pids: dict[int, int],
    ) -> None:
        self.note_after_s = _NOTE_AFTER_S
        self._mpi, self._comm, self.rank = mpi, comm, comm.rank
        self._memory, self._near, self._pids = memory, near, pids
        self.own = self._own = StatusBlock(memory[near.index(comm.rank)])
        self.first = StatusBlock(memory[0]).wait
        self.number = 0
        self.word = 0
        self.failed = ""
        self._failed_ranks: set[int] = set()  # on other nodes
        # Notes about failures and mismatches, and by rank the latest word that it was sent, with the note.
        self._notes: list[tuple[MPI.Request, Array]] = []
        self._told: dict[int, tuple[int, MPI.Request, Array]] = {}
        self._received: dict[int, int] = {}
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
        for words, end in ((self._own.ring, RING_WORDS), (self._own.wait, _FAILED)):
            for n in range(end):
                words[n] = 0

    # Failures

    def fail(self, why: str) -> None:
        """Disable all further calls, and notify the ranks that may wait for this rank; local, does not block."""
        if self.failed:
            return
        self.failed = why
        self._own.wait[_FAILED] = self.first[ANY_FAILED] = 1
        with suppress(self._mpi.Exception):
            self._send_notes(self.rank, self.word, 1)

    def find_failed(self, ranks: Sequence[int]) -> int | None:
        """Return a rank among ``ranks`` (all if empty) on which a call has failed, None if no failure is known."""
        if not (self._failed_ranks or self.first[ANY_FAILED]):
            return None
        for rank in ranks or range(self._comm.size):
            block = self.blocks.get(rank)
            if rank in self._failed_ranks or (block is not None and block.wait[_FAILED]):
                return rank
        return None

    def has_failed_before(self) -> bool:
        """Whether a call has failed on another rank that, to this rank's knowledge, has not made the current call."""
        for rank in range(self._comm.size):
            if rank == self.rank or self.find_failed((rank,)) is None:
                continue
            block = self.blocks.get(rank)
            last = self._received.get(rank, 0) if block is None else block.last()
            if last != self.word and last >> CODE_BITS <= self.number:
                return True
        return False

    def look_for_failed(self, ranks: Sequence[int]) -> None:
        """Raise `ExchangeTimeoutError` if a call has failed on one of ``ranks`` (all if empty)."""
        rank = self.find_failed(ranks)
        if rank is not None:
            why = f"rank {self.rank} has waited in {word_text(self.word)} for rank {rank}, where a call has failed"
            self.fail(why)
            raise ExchangeTimeoutError(
                f"{why}; make a new grid (or exchange, or allreduce) on all ranks to go on"
            )

    # Waits

    def publish(self, *, waits: bool) -> None:
        self._is_notified = False
        self._own.wait[_WAITING] = waits

    def look(self, ranks: Sequence[int], waited_s: float) -> None:
        """Raise `MismatchError` if ranks are in different calls, `ExchangeTimeoutError` if one ended or failed."""
        for rank, block in self.blocks.items():
            if rank != self.rank:
                self._compare(rank, block)
        if waited_s > _NOTE_AFTER_S:
            self._find_ended(ranks)
        if waited_s > self.note_after_s and len(self.blocks) < self._comm.size:
            self._exchange_notes(ranks)
        self.look_for_failed(ranks)
        if waited_s > _NOTICE_S and not self._is_notified:
            self._print_notice(ranks, waited_s)

    def _compare(self, rank: int, block: StatusBlock) -> None:
        """Raise `MismatchError` if a rank of this node has found a mismatch in this call, or is in another call."""
        found_in = block.wait[_MISMATCH]
        if found_in == self.word and found_in:
            calls = (rank, block.wait[_MINE]), (block.wait[_OTHER_RANK], block.wait[_THEIRS])
            raise self._record_mismatch(calls)
        theirs = block.call(self.number)
        mine: int | None = self.word
        if theirs is None:
            theirs = block.last()
            if theirs >> CODE_BITS > self.number:
                return
            mine = self._own.call(theirs >> CODE_BITS)
        self._check(rank, mine, theirs)

    def _check(self, rank: int, mine: int | None, theirs: int) -> None:
        """Raise `MismatchError` if this rank and another rank have different words of the same number."""
        if not mine or not theirs or mine == theirs:
            return
        if name_of(mine) == name_of(theirs) == "start of a plan":
            return  # plans started in a different order may still complete
        wait = self._own.wait
        wait[_OTHER_RANK], wait[_MINE], wait[_THEIRS] = rank, mine, theirs
        wait[_MISMATCH] = self.word  # written last: it publishes the words above
        raise self._record_mismatch([(self.rank, mine), (rank, theirs)])

    def _record_mismatch(self, words: Sequence[tuple[int, int]]) -> MismatchError:
        """Return the `MismatchError`, and record it as the failure of the communicator."""
        error = mismatch(sorted(words))
        self.failed = str(error)
        return error

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
        if len(self.blocks) < self._comm.size:
            self._exchange_notes(ranks)
        others = [self._progress_of(rank) for rank in (list(ranks) or self._behind())[:3]]
        there = "".join(f", {other_call}" for other_call in others)
        return f" in {word_text(self.word)}{there}"

    def _behind(self) -> list[int]:
        """Return the ranks that, to this rank's knowledge, have not reached its call."""
        number = self.number
        near = {rank for rank, block in self.blocks.items() if block.last() >> CODE_BITS < number}
        far = set(range(self._comm.size)) - set(self.blocks)
        received = {rank for rank, word in self._received.items() if word >> CODE_BITS >= number}
        return sorted(near | (far - received))

    def _progress_of(self, rank: int) -> str:
        block = self.blocks.get(rank)
        last = self._received.get(rank, 0) if block is None else block.last()
        if block is None and (not last or last >> CODE_BITS < self.number):
            return f"rank {rank} has not arrived"
        if not last:
            return f"rank {rank} has made no call yet"
        if block is None or block.wait[_WAITING]:
            return f"rank {rank} waits in {word_text(last)}"
        return f"the last call of rank {rank} is {word_text(last)}"

    def _print_notice(self, ranks: Sequence[int], waited_s: float) -> None:
        """Print the ranks that are waited for, on the first waiting rank only."""
        for rank, block in self.blocks.items():
            if rank < self.rank and block.wait[_WAITING]:
                return
            if rank != self.rank and block.wait[_NOTIFIED] == self.word:
                return  # another rank has printed it
        if any(
            rank < self.rank and received == self.word for rank, received in self._received.items()
        ):
            return
        self._is_notified = True
        self._own.wait[_NOTIFIED] = self.word
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
        """Send the word of this rank's call to the ranks that it waits for, all if empty, and receive notes."""
        for rank in self._far(ranks):
            told = self._told.get(rank)
            if told is None or (told[0] != self.word and told[1].Test()):
                note = np.array([self.rank, self.word, 0], "i8")
                self._told[rank] = self.word, self._comm.Issend(note, rank, _NOTE_TAG), note
        for source, (rank, theirs, failed) in self._receive_notes():
            self._received[rank] = theirs
            if failed:
                self._failed_ranks.add(rank)
                continue
            number = theirs >> CODE_BITS
            mine = self._own.call(number) if number <= self.number else None
            try:
                self._check(rank, mine, theirs)
            except MismatchError:
                if source == rank:
                    self._send_notes(rank, theirs, 0)
                    self._send_notes(self.rank, mine or 0, 0)
                raise

    def _far(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks (all if empty) that are on other nodes, and are sent notes."""
        return [r for r in ranks or range(self._comm.size) if r not in self.blocks][:_MOST_NOTES]

    def _send_notes(self, *words: int) -> None:
        note = np.array(words, "i8")
        for rank in self._far(()):
            self._notes.append((self._comm.Isend(note, rank, _NOTE_TAG), note))

    def _receive_notes(self) -> Iterator[tuple[int, list[int]]]:
        """Receive the notes that have arrived, with their senders."""
        note, status = np.zeros(3, "i8"), self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _NOTE_TAG, status):
            self._comm.Recv(note, status.Get_source(), _NOTE_TAG)
            yield status.Get_source(), note.tolist()

    def drain(self) -> None:
        for _ in self._receive_notes():
            pass
        self._mpi.Request.Testall([request for _, request, _ in self._told.values()])


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        with suppress(OSError):
            os.kill(pid, 0)
        return False
