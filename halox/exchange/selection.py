"""Which path a message takes, decided alike by both of its ends from what each says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halox.messages import Message
from halox.transports.arena import SharedArena
from halox.transports.direct import Window, window_of

Way = Literal["copy", "direct", "shared", "mpi"]

DIRECT_BYTES = 256
"""Runs at least this long are read in place from a neighbour's window; shorter ones travel packed.

Another core's cache lines are fetched one by one where runs are short, but in streams once packed
(docs/performance/host.md has the measurements).
"""


@dataclass(frozen=True)
class End:
    """What one end says of a message when a plan is made."""

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int
    nbytes: int
    signatures: tuple[Any, ...]
    window: Window | None


@dataclass(frozen=True)
class Route:
    """The path of a message, how it goes there, and why."""

    path: str
    way: Way
    reason: str


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
    if not may_read:
        return Route(path, "shared", "same node, packed: accumulate needs a copy")
    if not _in_windows(sender, receiver):
        return Route(path, "shared", "same node, packed: arrays not allocated by the grid")
    shortest = min(sender.block_bytes, receiver.block_bytes)
    if shortest < DIRECT_BYTES:
        return Route(path, "shared", f"same node, packed: runs of {shortest} B < {DIRECT_BYTES} B")
    return Route(path, "direct", f"same node, read in place: runs of {shortest} B")


def _in_windows(sender: End, receiver: End) -> bool:
    if sender.window is None or receiver.window is None:
        return False
    return [(w.counts, w.block_bytes) for w in sender.window.layouts] == [
        (w.counts, w.block_bytes) for w in receiver.window.layouts
    ]
