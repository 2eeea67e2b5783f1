"""Makes a plan together with the other ranks: compares both ends of every message, and builds the channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halox.engine.arrays import Described, borrow, describe
from halox.engine.device_packing import overlapping
from halox.errors import FieldError, MismatchError
from halox.exchange.plan import Plan
from halox.exchange.report import Report, Row
from halox.exchange.selection import End, Route, Way, choose_route, describe_end
from halox.messages import Message, check_match
from halox.transports.base import Channel, Job, Operation, Surroundings
from halox.transports.carriers import Carrier, RequestCarrier, SharedCarrier
from halox.transports.direct import DirectChannel
from halox.transports.host import HostChannel
from halox.transports.local import LocalDeviceChannel, LocalHostChannel
from halox.transports.node import NodeLink
from halox.transports.staged import StagedChannel

_FIRST_TAG = 16
_TAGS_PER_PLAN = 256
_MAKING = "the making of a plan"

Key = tuple[str, int, int]
"""Direction, peer and tag: what tells the messages of a plan apart."""


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
    """

    arrays: tuple[Any, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    operation: Operation = "copy"
    device: int | None = None
    names: tuple[str, ...] = field(default=())


def make_plan(
    surroundings: Surroundings, draft: Callable[[], Draft], number: int, *, keep: bool = True
) -> Plan:
    """Make a plan with the other ranks.

    Parameters
    ----------
    surroundings : Surroundings
        The ranks and their shared memory.
    draft : callable
        Returns this rank's `Draft`; may raise a `HaloxError`, which is then raised on all ranks.
    number : int
        The same on all ranks, another for each plan.
    keep : bool
        Whether the plan keeps its arrays alive. If not, its owner must drop it with them.

    Raises
    ------
    HaloxError
        On all ranks, if any of them cannot make its part or two ends of a message do not match.

    Notes
    -----
    Collective. Arrays on a GPU are made idle.
    """
    world = surroundings.world
    drafted: Draft = world.guarded(lambda: _checked(draft()), _MAKING)
    described = [describe(array) for array in drafted.arrays]
    if drafted.device is not None:
        from halox.engine.cuda import cupy

        cupy().cuda.Device(drafted.device).synchronize()
    _check_counts(surroundings, drafted)
    ends = {
        m.key: describe_end(m, described, surroundings.arena, world.nodes[world.rank])
        for m in (*drafted.sends, *drafted.receives)
    }
    routes = _agree_routes(surroundings, drafted, ends)
    # Views must not keep the arrays alive, or a grid could never let go of a plan.
    arrays = [
        borrow(a) if d.device is None else d for a, d in zip(drafted.arrays, described, strict=True)
    ]
    build = _Builder(surroundings, drafted, arrays, routes, number)
    channels = build.channels()
    rows = [Row.of(m, build.routes[m.key][0]) for m in (*drafted.sends, *drafted.receives)]
    operation = "exchange" if drafted.operation == "copy" else "accumulation"
    names = drafted.names or tuple(f"{d.dtype}{list(d.shape)}" for d in described)
    report = Report(world.rank, operation, names, tuple(rows))
    plan = Plan(channels, report, drafted.sends, world.check_open)
    if keep:
        plan.arrays = drafted.arrays
    return plan


def _checked(draft: Draft) -> Draft:
    """Check what one rank can see alone: receives into writable arrays, all in one kind of memory."""
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
                from halox.engine.packers.host import HostPacker

                HostPacker(draft.arrays[part.array], part.datatype, part.count)
            else:
                from halox.engine.packers.device import check_bounds

                check_bounds(draft.arrays[part.array], part.datatype, part.count)


def _check_counts(surroundings: Surroundings, draft: Draft) -> None:
    """Compare the numbers of messages between every two ranks, so that later steps cannot wait in vain."""
    world = surroundings.world
    sent = np.zeros(world.size, "i4")
    for message in draft.sends:
        sent[message.peer] += 1
    coming = np.empty_like(sent)
    world.wait([world.comm.Ialltoall(sent, coming)], f"in {_MAKING} for the other ranks")
    expected = np.zeros_like(sent)
    for message in draft.receives:
        expected[message.peer] += 1
    wrong = np.flatnonzero(expected != coming)
    error = None
    if len(wrong):
        peer = int(wrong[0])
        error = MismatchError(
            f"rank {peer} sends {coming[peer]} message(s) to rank {world.rank}, which receives "
            f"{expected[peer]} from it; every send needs a receive with the same tag"
        )
    world.agree(error, _MAKING)


def _agree_routes(
    surroundings: Surroundings, draft: Draft, ends: dict[Key, End]
) -> dict[Key, tuple[Route, End]]:
    """Swap both ends' descriptions with every peer, compare signatures, and choose each message's route."""
    world = surroundings.world
    peers = sorted({m.peer for m in (*draft.sends, *draft.receives)})
    records: dict[int, dict[tuple[str, int], End]] = {peer: {} for peer in peers}
    for (direction, peer, tag), end in ends.items():
        records[peer][direction, tag] = end
    theirs = world.swap(records, peers, _MAKING)
    routes: dict[Key, tuple[Route, End]] = {}
    error = None
    opposite = {"send": "receive", "receive": "send"}
    try:
        for message in (*draft.sends, *draft.receives):
            mine = ends[message.key]
            other = theirs[message.peer].get((opposite[message.direction], message.tag))
            if other is None:
                raise MismatchError(
                    f"rank {world.rank} has a {message.direction} with rank {message.peer} under tag "
                    f"{message.tag}, which that rank does not have; use the same tag on both ends"
                )
            sender, receiver = (mine, other) if message.direction == "send" else (other, mine)
            if message.direction == "receive":
                check_match(world.rank, message.peer, sender.signatures, receiver.signatures)
            route = choose_route(
                sender,
                receiver,
                to_self=message.peer == world.rank,
                may_read=draft.operation == "copy",
            )
            routes[message.key] = (route, other)
    except MismatchError as caught:
        error = caught
    world.agree(error, _MAKING)
    return routes


class _Builder:
    """Makes the channels of a plan, in an order that is the same on all ranks."""

    def __init__(
        self,
        surroundings: Surroundings,
        draft: Draft,
        arrays: Sequence[Any],
        routes: dict[Key, tuple[Route, End]],
        number: int,
    ) -> None:
        self.surroundings = surroundings
        self.draft, self.arrays, self.routes = draft, arrays, routes
        self.number = number

    def channels(self) -> list[Channel]:
        link = self._link()

        def made() -> list[Channel]:
            found = (
                None if link is None else _LinkKeeper(link),
                self._local(),
                self._direct(link),
                self._carried("shared", link),
                self._carried("mpi", link),
            )
            return [channel for channel in found if channel is not None]

        # Page-locking and compiling can fail on one rank alone.
        channels: list[Channel] = self.surroundings.world.guarded(made, _MAKING)
        return channels

    def _link(self) -> NodeLink | None:
        """Make the plan's shared block; where there is too little shared memory, turn to MPI instead."""
        world, arena = self.surroundings.world, self.surroundings.arena
        near = [key for key, (route, _) in self.routes.items() if route.way in ("shared", "direct")]
        wanted = world.node_comm.allreduce(bool(near), op=world.mpi.LOR)
        if not wanted:
            return None
        packed = [m for m in self.draft.sends if self.routes[m.key][0].way == "shared"]
        link = NodeLink(world, arena, packed, sorted({peer for _, peer, _ in near}))
        if not link.failed:
            return link
        for key in near:
            route, other = self.routes[key]
            reason = "same node, but /dev/shm has too little space for shared memory"
            self.routes[key] = (Route(route.path, "mpi", reason), other)
        return None

    def _job(self, way: Way) -> Job:
        def chosen(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(m for m in messages if self.routes[m.key][0].way == way)

        draft = self.draft
        return Job(self.arrays, chosen(draft.sends), chosen(draft.receives), draft.operation)

    def _local(self) -> Channel | None:
        job, device = self._job("copy"), self.draft.device
        if not job.sends:
            return None
        return LocalHostChannel(job) if device is None else LocalDeviceChannel(job, device)

    def _direct(self, link: NodeLink | None) -> Channel | None:
        job = self._job("direct")
        if link is None or not (job.sends or job.receives):
            return None
        windows = {(m.peer, m.tag): self.routes[m.key][1].window for m in job.receives}
        return DirectChannel(job, self.surroundings.arena, link, windows)

    def _carried(self, way: Way, link: NodeLink | None) -> Channel | None:
        """Make the channel of packed messages; the peers' arrays may lie in another kind of memory."""
        job, device = self._job(way), self.draft.device
        if not (job.sends or job.receives):
            return None
        world, arena = self.surroundings.world, self.surroundings.arena
        carrier: Carrier
        if way == "shared" and link is not None:
            carrier = SharedCarrier(arena, link, job.sends, job.receives)
        else:
            on_gpu = device is not None
            carrier = RequestCarrier(world, job.sends, job.receives, self._mpi_tag, pinned=on_gpu)
        return HostChannel(job, carrier) if device is None else StagedChannel(job, carrier, device)

    def _mpi_tag(self, message: Message) -> int:
        """Tell messages between two ranks apart, within this plan and from those of other plans."""
        same = self.draft.sends if message.direction == "send" else self.draft.receives
        tags = sorted(m.tag for m in same if m.peer == message.peer)
        world = self.surroundings.world
        most = int(world.comm.Get_attr(world.mpi.TAG_UB) or 32767) - _FIRST_TAG
        return _FIRST_TAG + (self.number * _TAGS_PER_PLAN + tags.index(message.tag)) % most


class _LinkKeeper(Channel):
    """Holds a plan's shared block until the plan is closed."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    def start(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Give the block back."""
        self._link.close()
