"""What a plan is made from, and what one rank can check of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halox.errors import FieldError
from halox.packing.pack_device import overlapping
from halox.paths.base import Operation
from halox.paths.messages import Message
from halox.runtime.arrays import Described, describe


@dataclass(frozen=True)
class Draft:
    """What a plan is made from: arrays, messages between them, and what is done with what arrives.

    Attributes
    ----------
    arrays : tuple of array
        All on the host or all on this rank's GPU.
    sends, receives : tuple of Message
        In ascending order of (peer, tag).
    operation : {"copy", "add"}
        Replace the receivers' values; or add to them and set what was sent to zero.
    device : int or None
        The GPU that runs the kernels, None for NumPy arrays.
    numbers : tuple of int
        For each array which of its grid's fields it is, 0 if the grid did not make it: the same on all ranks.
    specs : tuple of str
        For each field how its axes are read; empty for arrays that are no fields.
    """

    arrays: tuple[Any, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    operation: Operation = "copy"
    device: int | None = None
    names: tuple[str, ...] = field(default=())
    numbers: tuple[int, ...] = ()
    specs: tuple[str, ...] = ()


def checked(draft: Draft) -> Draft:
    """Return a draft of whose rank alone nothing is wrong: receives into writable arrays, all in one kind of memory.

    Raises
    ------
    FieldError
        If an array or a datatype does not fit.
    """
    described: list[Described] = [describe(array) for array in draft.arrays]
    for message in draft.receives:
        for part in message.parts:
            if not described[part.array].writable:
                raise FieldError(
                    f"array {part.array} is read-only and cannot receive; give a writable array"
                )
            if draft.operation != "add" and part.datatype.overlaps(part.count):
                raise overlapping(part.datatype, part.count)
    if len({d.device is None for d in described}) > 1:
        raise FieldError(
            "arrays of one exchange must all be NumPy arrays or all be on the GPU; exchange them apart"
        )
    _check_inside(draft, described)
    return draft


def _check_inside(draft: Draft, described: Sequence[Described]) -> None:
    for message in (*draft.sends, *draft.receives):
        for part in message.parts:
            if described[part.array].device is None:
                from halox.packing.host import HostPacker

                HostPacker(draft.arrays[part.array], part.datatype, part.count)
            else:
                from halox.packing.device import check_bounds

                check_bounds(draft.arrays[part.array], part.datatype, part.count)
