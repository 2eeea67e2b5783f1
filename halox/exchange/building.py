"""Builds the channels of a plan, each from the messages whose routes lead there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halox.errors import HaloxError
from halox.exchange.draft import Draft
from halox.exchange.measuring import Cargo
from halox.exchange.report import Key
from halox.exchange.selection import End, Route
from halox.exchange.surroundings import Surroundings
from halox.paths.base import Channel, Job
from halox.paths.buffers import Carrier, RequestCarrier, SharedCarrier
from halox.paths.cuda_aware import DeviceCarrier
from halox.paths.fragments import ends_of, whole
from halox.paths.host.direct import DirectChannel
from halox.paths.host.packed import HostChannel
from halox.paths.ipc import make_ipc_channel, one_way_cutter
from halox.paths.local import LocalDeviceChannel, LocalHostChannel
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.peer.channel import make_peer_channel
from halox.paths.staged.channel import staged_channel
from halox.runtime.arrays import Described, HostArray

_FIRST_TAG = 16
_TAGS_PER_PLAN = 256
_BUILDING = "the making of a plan"


class Builder:
    """Makes the channels of a plan, in an order that is the same on all ranks.

    Parameters
    ----------
    surroundings : Surroundings
    draft : Draft
    arrays : sequence of HostArray or Described
        The draft's, borrowed.
    routes : mapping
        For each message, by its key, its route and what its other end said.
    number : int
        The plan's.

    Attributes
    ----------
    routes : dict
        As given, but for what `channels` had to turn to another path.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        draft: Draft,
        arrays: Sequence[HostArray] | Sequence[Described],
        routes: Mapping[Key, tuple[Route, End]],
        number: int,
    ) -> None:
        self.surroundings = surroundings
        self.draft, self.arrays, self.routes = draft, arrays, dict(routes)
        self.number = number
        self._copied = False
        """Whether the peer path's kernel moves this rank's messages to itself."""

    def channels(self, error: HaloxError | None = None) -> list[tuple[Channel, Cargo | None]]:
        """Make all channels, or raise on all ranks if one has an error; collective over all ranks.

        Sets ``needs_host`` and ``is_movable``: whether some channel of any rank needs the host, and whether all can
        work on other arrays of the same layout.
        """
        world = self.surroundings.world
        paths = {route.path for route, _ in self.routes.values()}
        mine = {"peer": "peer" in paths, "ipc": "ipc" in paths, "link": bool(self._near())}
        said = world.gather(mine, _BUILDING, error)
        self._wanted = {
            "peer": any(one["peer"] for one in said),
            "ipc": any(one["ipc"] for one in said),
            "link": any(said[rank]["link"] for rank in world.node_ranks),
        }
        peer = self._peer()
        link = self._link()
        ipc = self._ipc(link)

        channels: list[tuple[Channel, Cargo | None]] = []

        def made() -> tuple[bool, bool]:
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
            channels.extend((c, self._cargo(name)) for name, c in found if c is not None)
            return any(c.needs_host for c, _ in channels), all(c.is_movable for c, _ in channels)

        # Page-locking and compiling can fail on one rank alone.
        made_by = world.gather_result(made, _BUILDING)
        self.needs_host = any(needs_host for needs_host, _ in made_by)
        self.is_movable = all(is_movable for _, is_movable in made_by)
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
        if not self._wanted["peer"]:
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
        if not self._wanted["ipc"]:
            return None
        memory = None
        if around.device_arena is not None and around.events is not None:
            memory = around.device_arena, around.events
        ways: dict[Key, Any] = {key: route.way for key, (route, _) in self.routes.items()}
        sharers = around.topology.sharers(world.rank) if around.topology is not None else ()
        return make_ipc_channel(world, job, ways, memory, link, one_way_cutter(job, sharers))

    def _near(self) -> list[Key]:
        """Return the messages that need the node's shared memory."""
        return [
            key
            for key, (route, _) in self.routes.items()
            if route.path == "ipc"
            or (route.path in ("host", "staged") and route.way in ("shared", "direct"))
        ]

    def _link(self) -> NodeLink | None:
        """Make the plan's shared block; where there is too little shared memory, turn to MPI instead."""
        world, arena = self.surroundings.world, self.surroundings.arena
        near = self._near()
        if not self._wanted["link"]:
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
                world,
                job.sends,
                job.receives,
                self._mpi_tag,
                pinned=pinned,
                cut=self._cut,
                leftovers=self.surroundings.leftovers,
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
        left = self.surroundings.leftovers
        carrier = DeviceCarrier(
            world, job.sends, job.receives, self._mpi_tag, device, leftovers=left
        )
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
    """Holds a plan's shared block until all ranks have closed the plan."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    needs_host = False
    is_movable = True

    def views(self, memories: Sequence[memoryview]) -> None:
        """Need none."""

    def free(self) -> None:
        """Give the block back."""
        self._link.close()
