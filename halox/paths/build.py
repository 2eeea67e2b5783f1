"""A plan under construction, as its paths see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from halox.paths.base import NODE_MEMORY_IS_FULL, EndpointInfo, Job, Key, Path, Route
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.runtime.context import Context

_FIRST_TAG = 16
_TAGS_PER_PLAN = 256


class Build:
    """The messages of a plan with their routes, and the means from which paths make its channels.

    Attributes
    ----------
    routes : dict
        As given, but for messages that `link` had to turn to another protocol.
    taken : set
        Keys of messages that the channel of a path carries to which they were not routed.
    near : sequence of collection of str
        For each rank, the paths on which it has messages that need the node's shared memory; set before `link`.
    """

    def __init__(
        self,
        context: Context,
        whole: Job,
        device: int | None,
        routes: Mapping[Key, tuple[Route, EndpointInfo]],
        number: int,
    ) -> None:
        self.context, self.world = context, context.world
        self.whole, self.device, self.number = whole, device, number
        self.routes = dict(routes)
        self.taken: set[Key] = set()
        self.near: list[Collection[str]] = []

    def job(self, path: Path, *protocols: str) -> Job:
        """Return the messages that go a path, by any of some protocols, or by any at all."""

        def fits(message: Message) -> bool:
            route = self.routes[message.key][0]
            return route.path == path.name and (not protocols or route.protocol in protocols)

        whole = self.whole
        return Job(
            whole.arrays,
            tuple(filter(fits, whole.sends)),
            tuple(filter(fits, whole.receives)),
            whole.operation,
        )

    def protocols(self, job: Job) -> dict[Key, str]:
        """Return the protocol of each message of a job."""
        return {m.key: self.routes[m.key][0].protocol for m in job.messages}

    def peer_info(self, path: Path, message: Message) -> Any:
        """Return what the other end of a message said for a path."""
        return self.routes[message.key][1].paths.get(path.name)

    def link(self, path: Path) -> NodeLink | None:
        """Make the shared block of a path's messages; where there is too little memory, turn to their fallbacks.

        None where this rank has no messages for it. The path's channels free it.

        Collective over the ranks of the node.
        """
        if not any(path.name in self.near[rank] for rank in self.world.node_ranks):
            return None
        near = self.messages_near(path)
        packed = [m for m in near if m.direction == "send" and self._protocol(path, m).is_packed]
        peers = sorted({m.peer for m in near})
        link = NodeLink(self.world, self.context.arena, packed, peers)
        if link.failed:
            for message in near:
                name, _, protocol = str(self._protocol(path, message).fallback).partition("/")
                other = self.routes[message.key][1]
                self.routes[message.key] = Route(name, protocol, NODE_MEMORY_IS_FULL), other
            return None
        if not near:
            link.close()  # made for the others of the node
            return None
        return link

    def messages_near(self, path: Path) -> list[Message]:
        """Return a path's messages that need the node's shared memory."""
        job = self.job(path)
        return [m for m in job.messages if self._protocol(path, m).fallback]

    def _protocol(self, path: Path, message: Message) -> Any:
        return path.protocol(self.routes[message.key][0].protocol)

    def mpi_tag(self, message: Message) -> int:
        """Return a tag that tells a message from others between its ranks, in this plan and in others."""
        same = self.whole.sends if message.direction == "send" else self.whole.receives
        tags = sorted(m.tag for m in same if m.peer == message.peer)
        most = int(self.world.comm.Get_attr(self.world.mpi.TAG_UB) or 32767) - _FIRST_TAG
        return _FIRST_TAG + (self.number * _TAGS_PER_PLAN + tags.index(message.tag)) % most
