"""Draft of a plan: a rank's arrays and messages, its checks on the rank alone, and the agreement of all ranks.

`make_plan` calls `agree` as its first step; it is collective. The ranks compare digests of their `PlanRecord`, and of
the peers of their messages, in one sum. They gather records and counts only if a sum differs, so that the cost does not
depend on the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from halox.errors import FieldError, HaloxError, MismatchError, StateError
from halox.packing.host import overlapping
from halox.paths import HOST_PATHS, PATHS, requested_path
from halox.paths.base import Job, Operation, Path
from halox.paths.messages import Message
from halox.plans.wall_operations import FieldWalls
from halox.runtime.arrays import Described, HostArray, borrow
from halox.runtime.communicator import digest
from halox.runtime.context import Context
from halox.runtime.world import World, raise_together

MAKING = "the making of a plan"
_DIGESTS = 1 << 62

Borrowed: TypeAlias = Sequence[HostArray] | Sequence[Described]
"""Arrays in the form that paths use: memory of the host, or descriptions of arrays on a GPU."""


@dataclass(frozen=True)
class Draft:
    """Arrays, messages between them, and the operation on arrival: the input of a plan."""

    arrays: tuple[object, ...]  # all on the host, or all on this rank's GPU
    described: tuple[Described, ...]
    sends: tuple[Message, ...]  # in ascending order of (peer, tag), like the receives
    receives: tuple[Message, ...]
    operation: Operation = "copy"
    title: str = ""  # of the operation in the report
    names: tuple[str, ...] = ()  # of the arrays in the report; by default their dtypes and shapes
    # For each array the number of its field in the grid, 0 if the grid did not make it: the same on all ranks.
    numbers: tuple[int, ...] = ()
    # For each field the meaning of its axes; empty for arrays that are not fields.
    specs: tuple[str, ...] = ()
    # Whether the plan may serve other arrays of the same layouts: then no array belongs to the grid.
    relocatable: bool = False
    # Whether each exchange first fills the cells that it receives with NaN: `halox.plans.poison`.
    poisons: bool = False
    # Of the fields whose halo has to be filled at walls of the grid.
    walls: tuple[FieldWalls, ...] = ()

    @property
    def device(self) -> int | None:
        return self.described[0].device if self.described else None


def check_draft(draft: Draft) -> Borrowed:
    """Return the arrays of a draft in the form that paths use; `FieldError` if this rank's part alone is wrong."""
    for message in draft.receives:
        for part in message.parts:
            if not draft.described[part.array].writable:
                raise FieldError(
                    f"array {part.array} is read-only and cannot receive; give a writable array"
                )
            if draft.operation != "add" and part.datatype.overlaps(part.count):
                raise overlapping(part.datatype, part.count)
    if len({array.device is None for array in draft.described}) > 1:
        raise FieldError(
            "arrays of one exchange must all be NumPy arrays or all be on the GPU; exchange them apart"
        )
    parts = [part for message in (*draft.sends, *draft.receives) for part in message.parts]
    if draft.device is not None:
        from halox.packing.device import check_bounds

        for part in parts:
            check_bounds(draft.arrays[part.array], part.datatype, part.count)
        return draft.described
    if draft.relocatable:  # count on the layouts' own memory only, which every other array has, too
        borrowed = [array.borrowed() for array in draft.described]
    else:
        borrowed = [borrow(array) for array in draft.arrays]
    for part in parts:
        borrowed[part.array].check_inside(*part.datatype.reach(part.count))
    return borrowed


@dataclass(frozen=True)
class PlanRecord:
    """The facts about a rank's draft that all ranks compare; `Draft` explains the fields without a comment.

    Records may differ without an error, but only equal records cost the same on any number of ranks.
    """

    requested: str | None  # path
    operation: Operation
    numbers: tuple[int, ...]
    specs: tuple[str, ...]
    closed: tuple[int, ...]  # plans that this rank has closed, but other ranks perhaps have not
    plans: int  # number of the last plan that this rank has made on these ranks

    @cached_property
    def digest(self) -> int:
        """Digest of the record, the same on all ranks with equal records."""
        return digest(repr(self).encode())


@dataclass(frozen=True)
class Agreed:
    """The draft of a rank, and what all ranks have agreed on."""

    draft: Draft
    whole: Job  # all messages of this rank
    records: Sequence[PlanRecord]  # of all ranks, or one if they are equal
    number: int  # of the plan
    paths: Mapping[str, Path]  # of which the ranks choose
    relocatable: bool  # whether the plan must not depend on the addresses of these arrays


def agree(context: Context, draft: Callable[[], Draft], path: str | None) -> Agreed:
    """Make the ranks' drafts, and compare them; collective."""
    world = context.world

    def prepare() -> tuple[tuple[Draft, Borrowed, PlanRecord], list[int]]:
        mine = drafted, _, record = _prepare(context, draft, path)
        # A message adds the digest of its ranks where it is sent, and subtracts it where it is received.
        unmatched = sum(digest(b"%d %d" % (world.rank, m.peer)) for m in drafted.sends)
        unmatched -= sum(digest(b"%d %d" % (m.peer, world.rank)) for m in drafted.receives)
        is_on_gpu, is_fixed = drafted.device is not None, not drafted.relocatable
        return mine, [is_on_gpu, is_fixed, unmatched % _DIGESTS, record.digest]

    (drafted, arrays, record), sums = world.total(prepare, MAKING)
    on_gpu, fixed, unmatched, digests = sums
    # A sum of other digests, which are random, is wrong with a probability below 2**-40.
    is_alike = (digests - world.size * record.digest) % 2**64 == 0
    records: Sequence[PlanRecord] = [record]
    if not is_alike:
        records = world.gather(lambda: (None, record), MAKING)[1]
    # Above every rank's number: ranks whose calls differed may have begun different plans.
    number = world.ranks.plans = 1 + max(record.plans for record in records)
    _check_alike(world, records)
    if unmatched % _DIGESTS:
        _check_counts(world, drafted)
    whole = Job(arrays, drafted.sends, drafted.receives, drafted.operation)
    paths: Mapping[str, Path] = PATHS if on_gpu else HOST_PATHS
    return Agreed(drafted, whole, records, number, paths, relocatable=not fixed)


def _prepare(
    context: Context, draft: Callable[[], Draft], path: str | None
) -> tuple[Draft, Borrowed, PlanRecord]:
    """Make and check this rank's draft. If its arrays are on a GPU, the GPU is then idle."""
    requested = requested_path(path)
    drafted = draft()
    arrays = check_draft(drafted)
    if drafted.device is not None:
        from halox.runtime.gpu.cuda import cupy
        from halox.runtime.gpu.streams import is_capturing

        if is_capturing(None):
            raise StateError(
                "the current stream is being captured, and making a plan needs the host; make the plan before "
                "the capture (grid.plan, or one grid.exchange of these fields) and call it in there"
            )
        context.use_device(drafted.device)
        cupy().cuda.Device(drafted.device).synchronize()
    record = PlanRecord(
        requested,
        drafted.operation,
        drafted.numbers,
        drafted.specs,
        context.leftovers.closed_plans(),
        context.world.ranks.plans,
    )
    return drafted, arrays, record


def _check_alike(world: World, records: Sequence[PlanRecord]) -> None:
    """Compare the inputs that concern no single message; raises the same error on all ranks."""
    first = records[0]
    for rank, record in enumerate(records):
        for place, (mine, other) in enumerate(zip(first.numbers, record.numbers, strict=False)):
            if mine and other and mine != other:
                raise MismatchError(
                    f"the ranks give different fields: argument {place} is field number {mine} of the grid on rank 0, "
                    f"number {other} on rank {rank}; give the same fields in the same order, on all ranks"
                )
    names = [f"the layout of argument {n}" for n in range(min(len(r.specs) for r in records))]
    world.check_alike(
        [
            {"path": record.requested, "the operation": record.operation}
            | dict(zip(names, record.specs, strict=False))
            for record in records
        ],
        remedies=dict.fromkeys(names, "give the same field on all ranks, and declare it alike")
        | {"path": "give path= and HALOX_PATH alike on all ranks"},
    )


def _check_counts(world: World, drafted: Draft) -> None:
    """Compare the numbers of messages between every two ranks, so that no step can deadlock; raises on all ranks."""
    counts = [Counter(m.peer for m in messages) for messages in (drafted.sends, drafted.receives)]
    _, records = world.gather(lambda: (None, counts), MAKING)
    errors: list[tuple[int, type[HaloxError], str]] = []
    for rank, (_, receives) in enumerate(records):
        for peer, (sends, _) in enumerate(records):
            if sends[rank] != receives[peer]:
                text = (
                    f"rank {peer} sends {sends[rank]} message(s) to rank {rank}, which receives "
                    f"{receives[peer]} from it; every send needs a receive with the same tag"
                )
                errors.append((rank, MismatchError, text))
                break
    if errors:
        raise_together(errors, len(records), None)
