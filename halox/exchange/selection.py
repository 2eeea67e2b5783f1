"""Which path a message takes, decided alike by both of its ends from what each says of itself."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from halox.datatypes import StridedBlocks
from halox.decomposition import FieldLayout
from halox.errors import PathError
from halox.exchange.costs import Costs
from halox.paths.cuda_aware import decided_by_user
from halox.paths.host.direct import Window, window_of
from halox.paths.messages import Message
from halox.paths.peer.ends import PACKET_WORD, shortest_word
from halox.paths.peer.exported import Exported, exported_parts
from halox.paths.peer.table import pieces_between
from halox.runtime.arena import SharedArena
from halox.runtime.device_arena import DeviceArena
from halox.runtime.topology import Topology
from halox.values import shown

WAYS = {
    "peer": ("staging", "ll", "direct"),
    "ipc": ("staging", "into", "from"),
    "staged": ("shared", "mpi"),
    "cuda_aware": ("mpi",),
    "host": ("direct", "shared", "mpi"),
}
"""All paths between ranks and their ways, as ``path=`` and HALOX_PATH name them."""

MOST_PIECES = 16
"""Loop nests into which a part may fall where its two ends' layouts meet, to go straight from one to the other."""

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
    rank : int
        Whose end it is.
    word_bytes : int
        Shortest word in which a kernel walks the message on a GPU; 1 on the host.
    exported : Exported or None
        Where the parts lie in device memory that peers can map, if they do.
    nbytes : int
        Payload.
    layouts : tuple of StridedBlocks or None
        Of each part on a GPU; None if one is not strided as a whole.
    is_contiguous : bool
        Whether each part is one run in device memory that peers can map.
    """

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int
    signatures: tuple[Any, ...]
    window: Window | None
    rank: int = 0
    word_bytes: int = 1
    exported: Exported | None = None
    nbytes: int = 0
    layouts: tuple[StridedBlocks, ...] | None = None
    is_contiguous: bool = False


@dataclass(frozen=True)
class Option:
    """A path that a message can take, how it would go there, and why that is possible or good."""

    path: str
    way: str
    reason: str


@dataclass(frozen=True)
class Route:
    """The path of a message, how it goes there and why.

    Attributes
    ----------
    predicted_us : float or None
        What the cost model expects of an exchange of this message alone; None where it has no model.
    """

    path: str
    way: str
    reason: str
    predicted_us: float | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)
    """For each path that is impossible, the reason."""


@dataclass(frozen=True)
class Judge:
    """What both ends of every message choose by; the same on all ranks of a plan.

    Attributes
    ----------
    operation : {"copy", "add"}
    topology : Topology or None
        The GPUs of all ranks; None if no rank has one.
    costs : Costs
    wish : str or None
        The path that was asked for.
    cuda_aware : str or None
        Why MPI cannot be given device pointers; None if it can.
    """

    operation: Literal["copy", "add"] = "copy"
    topology: Topology | None = None
    costs: Costs = field(default_factory=Costs.default)
    wish: str | None = None
    cuda_aware: str | None = "no MPI library was asked"


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


def wished_path(path: str | None) -> str | None:
    """Return the path that is asked for: the argument's, or else HALOX_PATH's; None for the fastest.

    Raises
    ------
    PathError
        If there is no path, or no way of it, of that name, also where the other one of the two counts.
    HaloxError
        If HALOX_CUDA_AWARE is none of its values, also where no rank has a GPU.
    """
    decided_by_user()
    asked = [("path", path), ("HALOX_PATH", os.environ.get("HALOX_PATH"))]
    if path is not None and not isinstance(path, str):
        raise PathError(
            f"path: expected the name of a path, got {shown(path)}; paths are {', '.join(WAYS)}"
        )
    wishes = []
    for name, wish in asked:
        if not wish:
            continue
        found, separator, way = wish.partition("/")
        if found not in WAYS:
            raise PathError(
                f"{name}: there is no path {shown(wish)} between ranks; paths are {', '.join(WAYS)}"
            )
        if separator and way not in WAYS[found]:
            ways = ", ".join(f"{found}/{known}" for known in WAYS[found])
            raise PathError(
                f"{name}: there is no way {shown(wish)} of the path {found}; ways are {ways}"
            )
        wishes.append(wish)
    return wishes[0] if wishes else None


def describe_end(
    message: Message,
    arrays: Sequence[Any],
    arena: SharedArena | None,
    node: int,
    rank: int = 0,
    device_arena: DeviceArena | None = None,
) -> End:
    """Return what this rank says of its end of a message."""
    on_host = arrays[message.parts[0].array].device is None
    word, exported = 1, None
    layouts: tuple[StridedBlocks, ...] | None = None
    if not on_host:
        word = shortest_word(message, arrays)
        strided = [part.datatype.items(part.count).strided for part in message.parts]
        whole = tuple(found for found in strided if found is not None)
        layouts = whole if len(whole) == len(strided) else None
        if device_arena is not None:
            exported = exported_parts(message, arrays, device_arena)
    return End(
        node,
        "host" if on_host else "gpu",
        message.block_bytes,
        message.signatures,
        window_of(message, arrays, arena) if on_host and arena is not None else None,
        rank,
        word,
        exported,
        message.nbytes,
        layouts,
        exported is not None and all(not layout.counts for layout in layouts or ()),
    )


def choose_route(sender: End, receiver: End, *, to_self: bool, judge: Judge) -> Route:
    """Choose the path of one message.

    Parameters
    ----------
    sender, receiver : End
        What both ends said; both ends call this with the same arguments.
    to_self : bool
        Whether sender and receiver are the same rank.
    judge : Judge

    Raises
    ------
    PathError
        If the path that was asked for cannot be taken; says why.
    """
    if to_self:
        return Route("local", "copy", "the neighbour is this rank")
    possible, impossible = options(sender, receiver, judge)
    if judge.wish is not None:
        there_are = ", ".join(f"{option.path}/{option.way}" for option in possible)
        possible = [o for o in possible if judge.wish in (o.path, f"{o.path}/{o.way}")]
        if not possible:
            why = impossible.get(
                judge.wish.partition("/")[0], "it has no such way for this message"
            )
            raise PathError(
                f"path {judge.wish!r} cannot be taken from rank {sender.rank} to rank {receiver.rank}: {why}; leave "
                f"the choice to halox (no path=, no HALOX_PATH), or take one of {there_are}"
            )
    run = min(sender.block_bytes, receiver.block_bytes)
    shared = judge.topology is not None and any(
        judge.topology.sharers(end.rank) for end in (sender, receiver) if end.memory == "gpu"
    )
    best = judge.costs.best(possible, sender.nbytes, run, shared_gpu=shared)
    predicted = None
    if judge.costs.knows(best.path, best.way) and "host" not in (sender.memory, receiver.memory):
        predicted = judge.costs.predict(best.path, best.way, sender.nbytes, run, shared_gpu=shared)
    return Route(best.path, best.way, best.reason, predicted, impossible)


def options(sender: End, receiver: End, judge: Judge) -> tuple[list[Option], dict[str, str]]:
    """Return the ways that a message between two ranks can take, and why it cannot take other paths.

    Returns
    -------
    list of Option
        At least one.
    dict
        For each path that is impossible, the reason.
    """
    if "host" in (sender.memory, receiver.memory):
        return _host_options(sender, receiver, judge)
    possible: list[Option] = []
    impossible = {"host": "it is for NumPy arrays, and these are on a GPU"}
    a, b = sender.rank, receiver.rank
    signals: str | None = "the ranks' GPUs are not known"
    unmapped = signals
    if judge.topology is not None:
        signals = judge.topology.why_no_signals(a, b)
        unmapped = judge.topology.why_no_events(a, b)
    if signals is None:
        possible += _peer_options(sender, receiver, judge)
    else:
        impossible["peer"] = signals
    if unmapped is None:
        possible += _ipc_options(sender, receiver, judge)
    else:
        impossible["ipc"] = unmapped
    if judge.cuda_aware is None:
        possible.append(Option("cuda_aware", "mpi", "MPI takes device pointers"))
    else:
        impossible["cuda_aware"] = judge.cuda_aware
    if sender.node == receiver.node:
        possible.append(
            Option("staged", "shared", "same node, through host memory that both GPUs map")
        )
    else:
        possible.append(Option("staged", "mpi", "other node, through pinned host memory"))
    return possible, impossible


def _peer_options(sender: End, receiver: End, judge: Judge) -> list[Option]:
    found = [Option("peer", "staging", "a GPU each, peer access: packed, a flag a chunk")]
    if min(sender.word_bytes, receiver.word_bytes) >= PACKET_WORD:
        found.append(Option("peer", "ll", "a GPU each, peer access: data and epoch in one store"))
    if _is_straight(sender, receiver, judge):
        why = "a GPU each, peer access: straight into the receiver's array"
        found.append(Option("peer", "direct", why))
    return found


def _is_straight(sender: End, receiver: End, judge: Judge) -> bool:
    """Whether the sender may store into the receiver's array itself."""
    if judge.operation != "copy" or receiver.exported is None:
        return False
    if sender.layouts is None or receiver.layouts is None:
        return False
    if [a.nbytes for a in sender.layouts] != [b.nbytes for b in receiver.layouts]:
        return False  # they do not match, which the receiver finds
    pairs = zip(sender.layouts, receiver.layouts, strict=True)
    return all(pieces_between(a, b) <= MOST_PIECES for a, b in pairs)


def _ipc_options(sender: End, receiver: End, judge: Judge) -> list[Option]:
    found = [Option("ipc", "staging", "mapped memory, streams ordered by events")]
    if judge.operation == "copy" and receiver.is_contiguous:
        why = "mapped memory, packed straight into the receiver's contiguous array"
        found.append(Option("ipc", "into", why))
    if judge.operation == "copy" and sender.is_contiguous:
        why = "mapped memory, unpacked straight from the sender's contiguous array"
        found.append(Option("ipc", "from", why))
    return found


def _host_options(sender: End, receiver: End, judge: Judge) -> tuple[list[Option], dict[str, str]]:
    """Return the one way of a message of which an end is on the host; it follows fixed rules."""
    path = "host" if sender.memory == receiver.memory else "staged"
    where = "these arrays are NumPy's" if path == "host" else "one end's array is NumPy's"
    impossible = {name: where for name in WAYS if name != path}
    return [_host_option(path, sender, receiver, judge)], impossible


def _host_option(path: str, sender: End, receiver: End, judge: Judge) -> Option:
    if sender.node != receiver.node:
        return Option(path, "mpi", "other node")
    if path == "staged":
        return Option(path, "shared", "same node, through host memory that the GPU maps")
    run = min(sender.block_bytes, receiver.block_bytes)
    if judge.operation == "add":
        return Option(path, "shared", "same node, packed: accumulate needs a copy")
    if run < DIRECT_BYTES:
        why = f"same node, packed: runs of {run} B on average < {DIRECT_BYTES} B"
        return Option(path, "shared", why)
    if not _in_windows(sender, receiver):
        why = "same node, packed: arrays not in the grid's shared memory"
        return Option(path, "shared", why)
    return Option(path, "direct", f"same node, read in place: runs of {run} B on average")


def _in_windows(sender: End, receiver: End) -> bool:
    if sender.window is None or receiver.window is None:
        return False
    return [(w.counts, w.block_bytes) for w in sender.window.layouts] == [
        (w.counts, w.block_bytes) for w in receiver.window.layouts
    ]
