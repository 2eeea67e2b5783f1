"""Which path a message takes, decided alike by both of its ends from what each says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halox.decomposition import FieldLayout
from halox.messages import Message
from halox.transports.arena import SharedArena
from halox.transports.direct import Window, window_of

Way = Literal["copy", "direct", "shared", "mpi"]

DIRECT_BYTES = 256
"""Runs at least this long are read in place from a neighbour's window; shorter ones travel packed.

Another core's cache lines are fetched one by one where runs are short, but in streams once packed
(docs/performance/host.md has the measurements).
"""

HUGE_PAGE_BYTES = 4 << 20
"""From this size on NumPy asks for huge pages, which shared memory does not have; packing short runs from 4 KiB
pages misses the address cache at every run."""


@dataclass(frozen=True)
class End:
    """What one end says of a message when a plan is made.

    Attributes
    ----------
    node : int
    memory : {"host", "gpu"}
    block_bytes : int
        Mean bytes of a run.
    signatures : tuple
        Of each part.
    window : Window or None
        Where the parts lie in shared memory, if they do.
    """

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int
    signatures: tuple[Any, ...]
    window: Window | None


@dataclass(frozen=True)
class Route:
    """The path of a message, how it goes there and why."""

    path: str
    way: Way
    reason: str


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
        message.signatures,
        window_of(message, arrays, arena) if on_host else None,
    )


def choose_route(sender: End, receiver: End, *, to_self: bool, may_read: bool) -> Route:
    """Choose the path of one message.

    Parameters
    ----------
    sender, receiver : End
        What both ends said; both ends call this with the same arguments.
    to_self : bool
        Whether sender and receiver are the same rank.
    may_read : bool
        Whether the plan lets receivers read in place: not when values are added or cleared.
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
    if run < DIRECT_BYTES:
        why = f"same node, packed: runs of {run} B on average < {DIRECT_BYTES} B"
        return Route(path, "shared", why)
    if not _in_windows(sender, receiver):
        why = "same node, packed: arrays not in the grid's shared memory"
        return Route(path, "shared", why)
    return Route(path, "direct", f"same node, read in place: runs of {run} B on average")


def _in_windows(sender: End, receiver: End) -> bool:
    if sender.window is None or receiver.window is None:
        return False
    return [(w.counts, w.block_bytes) for w in sender.window.layouts] == [
        (w.counts, w.block_bytes) for w in receiver.window.layouts
    ]
