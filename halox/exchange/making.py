"""Makes a plan together with the other ranks: compares both ends of every message, and builds the channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halox.engine.arrays import Described, borrow, describe
from halox.engine.capture import is_capturing
from halox.engine.device_packing import overlapping
from halox.errors import FieldError, MismatchError, PathError, StateError
from halox.exchange.measuring import Cargo, Stopwatch
from halox.exchange.plan import Plan
from halox.exchange.report import Report, Row
from halox.exchange.selection import (
    End,
    Judge,
    Route,
    choose_route,
    describe_end,
    wished_path,
)
from halox.exchange.surroundings import Surroundings
from halox.messages import Message, check_match
from halox.transports.base import Channel, Job, Operation
from halox.transports.carriers import Carrier, RequestCarrier, SharedCarrier
from halox.transports.cuda_aware import DeviceCarrier
from halox.transports.direct import DirectChannel
from halox.transports.fragments import ends_of, whole
from halox.transports.host import HostChannel
from halox.transports.ipc import make_ipc_channel, one_way_cutter
from halox.transports.local import LocalDeviceChannel, LocalHostChannel
from halox.transports.node import NodeLink
from halox.transports.peer import make_peer_channel
from halox.transports.staged import staged_channel

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
    surroundings: Surroundings,
    draft: Callable[[], Draft],
    number: int,
    *,
    keep: bool = True,
    path: str | None = None,
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
    path : str, optional
        The path that messages to other ranks must take; by default that of HALOX_PATH, or else the fastest.

    Raises
    ------
    PathError
        On all ranks, if that path cannot be taken.
    HaloxError
        On all ranks, if any of them cannot make its part or two ends of a message do not match.

    Notes
    -----
    Collective. Arrays on a GPU are made idle.
    """
    world = surroundings.world
    wish: str | None = None

    def prepared() -> Draft:
        nonlocal wish
        wish = wished_path(path)
        found = _checked(draft())
        if found.device is not None and is_capturing(None):
            raise StateError(
                "the current stream is being captured, and making a plan needs the host; make the plan before the "
                "capture (grid.plan, or one grid.exchange of these fields) and call it in there"
            )
        return found

    drafted: Draft = world.guarded(prepared, _MAKING)
    described = [describe(array) for array in drafted.arrays]
    if drafted.device is not None:
        from halox.engine.cuda import cupy

        surroundings.use_device(drafted.device)
        cupy().cuda.Device(drafted.device).synchronize()
    _check_counts(surroundings, drafted, wish)
    if surroundings.device_arena is not None:
        # All ranks' GPUs have been idle since the first of them came here.
        surroundings.device_arena.reclaim()
    judge = _judge(surroundings, drafted, wish)
    ends = {
        m.key: describe_end(
            m,
            described,
            surroundings.arena,
            world.nodes[world.rank],
            world.rank,
            surroundings.device_arena,
        )
        for m in (*drafted.sends, *drafted.receives)
    }
    routes = _agree_routes(surroundings, drafted, ends, judge)
    # Views must not keep the arrays alive, or a grid could never let go of a plan.
    arrays = [
        borrow(a) if d.device is None else d for a, d in zip(drafted.arrays, described, strict=True)
    ]
    build = _Builder(surroundings, drafted, arrays, routes, number)
    made = build.channels()
    messages = (*drafted.sends, *drafted.receives)
    rows = [Row.of(m, route, route.why_not) for m in messages for route, _ in [build.routes[m.key]]]
    operation = "exchange" if drafted.operation == "copy" else "accumulation"
    names = drafted.names or tuple(f"{d.dtype}{list(d.shape)}" for d in described)
    report = Report(world.rank, operation, names, tuple(rows))
    channels, cargoes = [c for c, _ in made], [cargo for _, cargo in made]
    stopwatch = Stopwatch(world, drafted.device, cargoes)
    plan = Plan(channels, report, drafted.sends, world.check_open, stopwatch)
    if keep:
        plan.arrays = drafted.arrays
    return plan


def _judge(surroundings: Surroundings, draft: Draft, wish: str | None) -> Judge:
    """Return what both ends of every message choose by; collective."""
    world = surroundings.world
    on_gpu = world.comm.allreduce(draft.device is not None, op=world.mpi.LOR)
    if not on_gpu:
        return Judge(draft.operation, wish=wish)
    surroundings.look_around()
    return Judge(
        draft.operation,
        surroundings.topology,
        surroundings.costs,
        wish,
        surroundings.no_cuda_aware,
    )


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


def _check_counts(surroundings: Surroundings, draft: Draft, wish: str | None) -> None:
    """Compare wishes, and numbers of messages between every two ranks, so that later steps cannot wait in vain."""
    world = surroundings.world
    wishes = world.comm.allgather(wish)
    if len(set(wishes)) > 1:
        raise MismatchError(
            f"the ranks ask for different paths: {wishes}; give path= and HALOX_PATH alike on all ranks"
        )
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
    surroundings: Surroundings, draft: Draft, ends: dict[Key, End], judge: Judge
) -> dict[Key, tuple[Route, End]]:
    """Swap both ends' descriptions with every peer, compare signatures, and choose each message's route."""
    world = surroundings.world
    peers = sorted({m.peer for m in (*draft.sends, *draft.receives)})
    records: dict[int, dict[tuple[str, int], End]] = {peer: {} for peer in peers}
    for (direction, peer, tag), end in ends.items():
        records[peer][direction, tag] = end
    theirs = world.swap(records, peers, _MAKING)
    routes: dict[Key, tuple[Route, End]] = {}
    error: MismatchError | PathError | None = None
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
            to_self = message.peer == world.rank
            route = choose_route(sender, receiver, to_self=to_self, judge=judge)
            routes[message.key] = (route, other)
    except (MismatchError, PathError) as caught:
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
        self._copied = False
        """Whether the peer path's kernel moves this rank's messages to itself."""

    def channels(self) -> list[tuple[Channel, Cargo | None]]:
        """Make all channels; collective over all ranks."""
        peer = self._peer()
        link = self._link()
        ipc = self._ipc(link)

        def made() -> list[tuple[Channel, Cargo | None]]:
            found = (
                # Kernels that wait for other ranks come first: what other channels do on the host can then go on.
                ("peer", peer),
                ("link", None if link is None else _LinkKeeper(link)),
                ("ipc", ipc),
                ("local", self._local()),
                ("direct", self._direct(link)),
                ("shared", self._carried("shared", link)),
                ("mpi", self._carried("mpi", link)),
                ("cuda_aware", self._cuda_aware()),
            )
            return [(c, self._cargo(name)) for name, c in found if c is not None]

        # Page-locking and compiling can fail on one rank alone.
        channels: list[tuple[Channel, Cargo | None]] = self.surroundings.world.guarded(
            made, _MAKING
        )
        return channels

    def _cargo(self, name: str) -> Cargo | None:
        """Return what the channel of a name carries."""
        carried = tuple(
            m
            for m in (*self.draft.sends, *self.draft.receives)
            if self._channel_of(self.routes[m.key][0]) == name
        )
        return Cargo(name, carried) if carried else None

    def _channel_of(self, route: Route) -> str:
        """Return the name of the channel that carries the messages of a route."""
        if route.path == "local":
            return "peer" if self._copied else "local"
        if route.path in ("host", "staged"):
            return route.way
        return route.path

    def _peer(self) -> Channel | None:
        """Make the channel of one kernel, which takes messages to this rank itself along where it can."""
        world, draft = self.surroundings.world, self.draft
        wanted = any(route.path == "peer" for route, _ in self.routes.values())
        if not world.comm.allreduce(wanted, op=world.mpi.LOR):
            return None
        job = self._job(lambda route: route.path == "peer")
        copies = self._job(lambda route: False)
        if wanted and draft.operation == "copy":
            own = self._job(lambda route: route.way == "copy")
            if all(m.is_strided for m in (*own.sends, *own.receives)):
                copies = own
        self._copied = bool(copies.sends)
        arena = self.surroundings.device_arena
        ways = {key: route.way for key, (route, _) in self.routes.items()}
        exported = {(m.peer, m.tag): self.routes[m.key][1].exported for m in job.sends}
        return make_peer_channel(world, arena, job, copies, ways, exported)

    def _ipc(self, link: NodeLink | None) -> Channel | None:
        """Make the channel of mapped memory and events."""
        around, world = self.surroundings, self.surroundings.world
        job = self._job(lambda route: route.path == "ipc")
        if not world.comm.allreduce(bool(job.sends or job.receives), op=world.mpi.LOR):
            return None
        memory = None
        if around.device_arena is not None and around.events is not None:
            memory = around.device_arena, around.events
        ways: dict[Key, Any] = {key: route.way for key, (route, _) in self.routes.items()}
        sharers = around.topology.sharers(world.rank) if around.topology is not None else ()
        return make_ipc_channel(world, job, ways, memory, link, one_way_cutter(job, sharers))

    def _link(self) -> NodeLink | None:
        """Make the plan's shared block; where there is too little shared memory, turn to MPI instead."""
        world, arena = self.surroundings.world, self.surroundings.arena
        near = [
            key
            for key, (route, _) in self.routes.items()
            if route.path == "ipc"
            or (route.path in ("host", "staged") and route.way in ("shared", "direct"))
        ]
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
            path = "staged" if route.path == "ipc" else route.path
            self.routes[key] = (Route(path, "mpi", reason), other)
        return None

    def _job(self, fits: Callable[[Route], bool]) -> Job:
        def chosen(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(m for m in messages if fits(self.routes[m.key][0]))

        draft = self.draft
        return Job(self.arrays, chosen(draft.sends), chosen(draft.receives), draft.operation)

    def _local(self) -> Channel | None:
        job, device = self._job(lambda route: route.way == "copy"), self.draft.device
        if not job.sends or self._copied:
            return None
        return LocalHostChannel(job) if device is None else LocalDeviceChannel(job, device)

    def _direct(self, link: NodeLink | None) -> Channel | None:
        job = self._job(lambda route: route.path == "host" and route.way == "direct")
        if link is None or not (job.sends or job.receives):
            return None
        windows = {(m.peer, m.tag): self.routes[m.key][1].window for m in job.receives}
        return DirectChannel(job, self.surroundings.arena, link, windows)

    def _carried(self, way: str, link: NodeLink | None) -> Channel | None:
        """Make the channel of packed messages; the peers' arrays may lie in another kind of memory."""
        job = self._job(lambda route: route.path in ("host", "staged") and route.way == way)
        device = self.draft.device
        if not (job.sends or job.receives):
            return None
        world, arena = self.surroundings.world, self.surroundings.arena
        carrier: Carrier
        if way == "shared" and link is not None:
            carrier = SharedCarrier(arena, link, job.sends, job.receives, self._cut)
        else:
            pinned = device is not None
            carrier = RequestCarrier(
                world, job.sends, job.receives, self._mpi_tag, pinned=pinned, cut=self._cut
            )
        if device is None:
            return HostChannel(job, carrier)
        return staged_channel(world, job, carrier, device)

    def _cuda_aware(self) -> Channel | None:
        """Make the channel of messages that MPI takes from device memory."""
        job = self._job(lambda route: route.path == "cuda_aware")
        device, world = self.draft.device, self.surroundings.world
        if device is None or not (job.sends or job.receives):
            return None
        carrier = DeviceCarrier(world, job.sends, job.receives, self._mpi_tag, device)
        return staged_channel(world, job, carrier, device, "cuda_aware")

    def _cut(self, message: Message) -> tuple[int, ...]:
        """Cut a message with an end on a GPU into fragments, alike on both ends."""
        is_staged = self.routes[message.key][0].path == "staged"
        return ends_of(message.packed_bytes) if is_staged else whole(message)

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
