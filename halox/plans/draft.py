"""Draft of a plan, and the checks that each rank makes alone before the ranks compare their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from halox.errors import FieldError
from halox.packing.host import overlapping
from halox.paths.base import Operation
from halox.paths.messages import Message
from halox.plans.wall_operations import FieldWalls
from halox.runtime.arrays import Described, HostArray, borrow

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
