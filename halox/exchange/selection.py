"""Which path a message takes, decided alike by both of its ends from what each says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halox.decomposition import FieldLayout
from halox.messages import Message, Part
from halox.transports.arena import SharedArena
from halox.transports.direct import Window, window_of

Way = Literal["copy", "direct", "shared", "mpi"]

DIRECT_BYTES = 256
"""Runs at least this long are read in place from a neighbour's window; shorter ones travel packed.

Another core's cache lines are fetched one by one where runs are short, but in streams once packed
(docs/performance/host.md has the measurements).
"""

FRAGMENTED_BYTES = 1 << 20
"""Messages at least this long are packed and unpacked in turns, so that unpacking finds cache lines that packing
has just brought in."""


@dataclass(frozen=True)
class End:
    """What one end says of a message when a plan is made.

    Attributes
    ----------
    node : int
    memory : {"host", "gpu"}
    block_bytes, nbytes : int
        Mean bytes of a run, and bytes of the whole message.
    signatures : tuple
        Of each part.
    window : Window or None
        Where the parts lie in shared memory, if they do.
    outer_counts : tuple of int
        Count of each part's outermost level, 0 where it has none: along it a message is cut into fragments.
    """

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int
    nbytes: int
    signatures: tuple[Any, ...]
    window: Window | None
    outer_counts: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The path of a message, how it goes there, why, and whether it is cut into fragments."""

    path: str
    way: Way
    reason: str
    fragmented: bool = False


HUGE_PAGE_BYTES = 4 << 20
"""From this size on NumPy asks for huge pages, which shared memory does not have; packing short runs from 4 KiB
pages misses the address cache at every run."""


def reads_in_place(layout: FieldLayout, itemsize: int) -> bool:
    """Whether a field should lie in shared memory, for neighbours to read it in place.

    Decided alike on all ranks, from what they all know.

    Parameters
    ----------
    layout : FieldLayout
        The field's layout on any rank.
    itemsize : int
        Bytes an element.
    """
    spec, axes = layout.spec, layout.decomposition.axes
    inner = itemsize * math.prod(spec.components_after)
    cells = math.prod(
        max(axis.sizes) + low + high for axis, (low, high) in zip(axes, spec.halo, strict=True)
    )
    is_large = cells * inner * math.prod(spec.components_before) >= HUGE_PAGE_BYTES
    width = max(spec.halo[-1])
    has_short_runs = axes[-1].parts > 1 and 0 < width * inner < DIRECT_BYTES
    return not (is_large and has_short_runs)


def describe_end(message: Message, arrays: Sequence[Any], arena: SharedArena, node: int) -> End:
    """Return what this rank says of its end of a message."""
    on_host = arrays[message.parts[0].array].device is None
    return End(
        node,
        "host" if on_host else "gpu",
        message.block_bytes,
        message.nbytes,
        message.signatures,
        window_of(message, arrays, arena) if on_host else None,
        tuple(map(_outer_count, message.parts)),
    )


def _outer_count(part: Part) -> int:
    strided = part.datatype.strided
    return strided.counts[0] if part.count == 1 and strided is not None and strided.counts else 0


def choose_route(
    sender: End, receiver: End, *, to_self: bool, may_read: bool, may_fragment: bool
) -> Route:
    """Choose the path of one message.

    Parameters
    ----------
    sender, receiver : End
        What both ends said; both ends call this with the same arguments.
    to_self : bool
        Whether sender and receiver are the same rank.
    may_read : bool
        Whether the plan lets receivers read in place: not when values are added or cleared.
    may_fragment : bool
        Whether long messages may go in fragments: not where ranks share cores, and each wait is a switch.
    """
    if to_self:
        return Route("local", "copy", "the neighbour is this rank")
    path = "host" if sender.memory == receiver.memory == "host" else "staged"
    if sender.node != receiver.node:
        where = "other node" if path == "host" else "other node, through pinned host memory"
        return Route(path, "mpi", where)
    if path == "staged":
        return Route(path, "shared", "same node, through host memory that both GPUs map")
    run = min(sender.block_bytes, receiver.block_bytes)
    if not may_read:
        return Route(path, "shared", "same node, packed: accumulate needs a copy")
    fragmented = (
        may_fragment
        and sender.nbytes >= FRAGMENTED_BYTES
        and sender.outer_counts == receiver.outer_counts
        and min(sender.outer_counts) > 0
    )
    if run < DIRECT_BYTES:
        why = f"same node, packed: runs of {run} B on average < {DIRECT_BYTES} B"
        return Route(path, "shared", why, fragmented)
    if not _in_windows(sender, receiver):
        why = "same node, packed: arrays not in the grid's shared memory"
        return Route(path, "shared", why, fragmented)
    return Route(path, "direct", f"same node, read in place: runs of {run} B on average")


def _in_windows(sender: End, receiver: End) -> bool:
    if sender.window is None or receiver.window is None:
        return False
    return [(w.counts, w.block_bytes) for w in sender.window.layouts] == [
        (w.counts, w.block_bytes) for w in receiver.window.layouts
    ]
