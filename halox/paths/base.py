"""The contract of a data path: one object, registered once in `halox.paths`.

A path answers six questions, and nothing outside `halox.paths` asks for it by name:

1. `Path.name`, `Path.protocols`: its names, shipped cost constants, and how ``halox tune`` probes each protocol.
2. `Path.survey`: what it must know of all ranks (collective; most paths need nothing).
3. `Path.describe`: its share of the `EndpointInfo` that both ends of a message swap when a plan is made.
4. `Path.candidates`: the protocols by which it can carry a message, each with a reason; or why it cannot.
5. `Path.negotiate`: what its ranks agree on before channels are made (collective; most paths need nothing).
6. `Path.channels`: the `Channel` of its messages in one plan, started and finished in every exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message, Part, PartSignature
from halox.paths.node import NodeLink
from halox.runtime.communicator import FIRST_PLAN_TAG

if TYPE_CHECKING:
    from halox.decomposition import FieldLayout
    from halox.packing.device import Endpoint
    from halox.runtime.arrays import Described
    from halox.runtime.context import Context
    from halox.runtime.topology import Topology

Operation = Literal["copy", "add"]
"""Received values replace the target's; or are added to them, and what was sent is set to zero."""

Key = tuple[str, int, int]
"""Direction, peer and tag of a message."""

_TAGS_PER_PLAN = 256

NODE_MEMORY_IS_FULL = "same node, but /dev/shm has too little space for shared memory"


@dataclass(frozen=True)
class Job:
    """The messages of one plan that go one path, with the arrays they name."""

    arrays: Sequence[Any]  # the plan's, HostArray or Described
    sends: tuple[Message, ...]  # in the order of (peer, tag), as the receives
    receives: tuple[Message, ...]
    operation: Operation = "copy"

    @property
    def messages(self) -> tuple[Message, ...]:
        """Sends, then receives."""
        return (*self.sends, *self.receives)

    @property
    def peers(self) -> list[int]:
        """All ranks with a message in the job, in ascending order."""
        return sorted({message.peer for message in self.messages})

    @property
    def both_ways(self) -> set[int]:
        """Ranks to which messages go, and from which some come."""
        return {m.peer for m in self.sends} & {m.peer for m in self.receives}

    def only(self, fits: Callable[[Message], bool]) -> Job:
        """Return the job of some of the messages."""
        sends, receives = (tuple(filter(fits, found)) for found in (self.sends, self.receives))
        return Job(self.arrays, sends, receives, self.operation)

    def pairs(self) -> Iterator[tuple[Part, Part]]:
        """Pair what a rank sends to itself with what it receives, part by part."""
        for send, receive in zip(self.sends, self.receives, strict=True):
            yield from zip(send.parts, receive.parts, strict=True)

    @property
    def cleared(self) -> tuple[Part, ...]:
        """Parts that are set to zero as soon as they have been sent."""
        if self.operation == "copy":
            return ()
        return tuple(part for message in self.sends for part in message.parts)

    def endpoint(self, part: Part) -> Endpoint:
        """Return the array of a part, with the datatype and count at its first element."""
        return self.arrays[part.array], part.datatype, part.count


class Channel(ABC):
    """All messages of one plan that go one path.

    Notes
    -----
    `start` may return before anything has moved; the parts sent must not be written, and those received must not
    be touched, until `finish` returns (on a GPU: until what `finish` put on the stream has run). A plan starts all
    its channels before it finishes any, and every rank finishes its channels in the same order of paths.

    A channel ends in two steps: each rank closes it when it likes, and it is freed when all have closed it.
    """

    needs_host = True  # the host takes part in an exchange, beyond launching kernels
    is_movable = False  # to other arrays of the same layouts, by `views` and `bind`
    # Arrays to work on in the next exchange in place of those bound; given by the plan, and forgotten at its end.
    lent: Sequence[Any] = ()
    # Asked of a closed channel: nothing that this rank has begun is under way; an exchange has failed of which the
    # caller may not have been told.
    has_ended = True
    has_failed = False

    def check(self) -> None:  # noqa: B027 - most paths can always begin
        """Raise if an exchange cannot begin as things are; nothing has begun yet."""

    @abstractmethod
    def start(self) -> None:
        """Begin one exchange: send what this rank has to send."""

    def run(self) -> None:
        """Begin one exchange that `finish` ends without other work in between."""
        self.start()

    def finish(self) -> None:  # noqa: B027 - plans leave out channels that end in `start`
        """End it: everything received is in place."""

    def views(self, memories: Sequence[Any]) -> object:  # noqa: B027
        """Return views of other arrays of the same layouts, for `bind`; local, of a movable channel alone.

        The arrays are given as their bytes on the host, and by their addresses on a GPU.
        """

    def bind(self, views: Any) -> None:  # noqa: B027 - most paths look at addresses
        """Work on the arrays of some views from the next exchange on; local, of a movable channel alone."""

    def accepts(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays that are like these but for their addresses can be `lent`; local, of a movable channel."""
        return False

    def close(self) -> None:  # noqa: B027 - most paths keep nothing
        """End it, and release what no other rank reaches; local."""

    def free(self) -> None:  # noqa: B027 - most paths share nothing
        """Release what other ranks reached, when all have closed it; local."""


class Carried(NamedTuple):
    """A channel with the messages that it carries, under a name that only this channel of the plan has on any rank."""

    name: str
    channel: Channel
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Protocol:
    """One way in which a path moves a message, as ``path="peer/ll"`` names it."""

    name: str
    # Shipped constants; None for protocols that follow fixed rules.
    cost: ProtocolCost | None = None
    shared_gpu_cost: ProtocolCost | None = None  # the same for ranks that share a GPU
    # "path/protocol" in its place where a node's shared memory is too small.
    fallback: str | None = None
    is_packed: bool = False  # through the node's shared memory
    # The partner with whom it is measured: the rank itself, one of its node, or one of another node where possible.
    reach: Literal["self", "node", "nodes"] = "node"
    in_field: bool = False  # measured on a grid's own field, whose memory other ranks can map
    former: str | None = None  # earlier name, still accepted
    memory: Literal["host", "gpu"] | None = None  # of its arrays, if not that of its path
    is_tuned: bool = True  # by ``halox tune``, if its path is


@dataclass(frozen=True)
class EndpointInfo:
    """Description of a message by one of its ends, exchanged when a plan is made."""

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int  # mean; on a GPU, of a row of tiles where kernels move those
    signatures: tuple[PartSignature, ...]
    rank: int = 0
    nbytes: int = 0
    paths: Mapping[str, Any] = field(default_factory=dict)  # by path, from its `Path.describe`
    is_one_way: bool = False  # the plan has no message the other way between the two ranks


@dataclass(frozen=True)
class SelectionContext:
    """Selection inputs beside the two ends of a message, identical on all ranks of a plan."""

    operation: Operation = "copy"
    topology: Topology | None = None  # None if no rank has a GPU
    surveys: Mapping[str, Any] = field(default_factory=dict)  # by path, from its `Path.survey`
    leave_sms: bool = False  # protocols that leave a GPU's multiprocessors alone are preferred


class MessageEnds(NamedTuple):
    """Both ends of a message, and the selection inputs that all messages of a plan share."""

    sender: EndpointInfo
    receiver: EndpointInfo
    selection: SelectionContext

    @property
    def are_near(self) -> bool:
        """Whether both are on one node."""
        return self.sender.node == self.receiver.node

    @property
    def block_bytes(self) -> int:
        """Mean bytes of a block at the end where they are shorter."""
        return min(self.sender.block_bytes, self.receiver.block_bytes)

    def described(self, path: Path) -> tuple[Any, Any]:
        """Return the results of a path's `Path.describe` at both, None where there is none."""
        return self.sender.paths.get(path.name), self.receiver.paths.get(path.name)

    @property
    def on_host(self) -> str | None:
        """Reason of paths between GPUs that arrays are NumPy's; None if both ends are on GPUs."""
        count = (self.sender.memory, self.receiver.memory).count("host")
        return (None, "one end's array is NumPy's", "these arrays are NumPy's")[count]

    def why_not_gpus(self, why: Callable[[Topology, int, int], str | None]) -> str | None:
        """Return why the message cannot go between two GPUs, in the end what ``why`` says of them; None if it can."""
        if self.on_host is not None:
            return self.on_host
        if self.selection.topology is None:
            return "the ranks' GPUs are not known"
        return why(self.selection.topology, self.sender.rank, self.receiver.rank)


@dataclass(frozen=True)
class Candidate:
    """A path and protocol by which a message can travel, and the reason why that is possible or good.

    Those that are ``preferred`` are taken before all others, whatever the cost model expects.
    """

    path: str
    protocol: str
    reason: str
    preferred: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Route(Candidate):
    """The path and protocol of a message, and the reason for them."""

    predicted_us: float | None = None  # of an exchange of this message alone; None without a model
    why_not: Mapping[str, str] = field(default_factory=dict)  # for each path that is impossible


class Build:
    """A plan under construction: its messages with their routes, and the means to make its channels."""

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
        # As given, but for messages that `link` had to turn to another protocol.
        self.routes = dict(routes)
        # Messages that the channel of a path carries to which they were not routed.
        self.taken: set[Key] = set()
        # For each rank the paths on which it has messages that need the node's shared memory; set before `link`.
        self.near: list[Collection[str]] = []
        # Paths and protocols on which any rank has messages.
        self.protocols_used: set[tuple[str, str]] = set()

    def job(self, path: Path, *protocols: str) -> Job:
        """Return the messages that go a path, by any of some protocols, or by any at all."""

        def fits(message: Message) -> bool:
            route = self.routes[message.key][0]
            return route.path == path.name and (not protocols or route.protocol in protocols)

        return self.whole.only(fits)

    def protocols(self, job: Job) -> dict[Key, str]:
        """Return the protocol of each message of a job."""
        return {m.key: self.routes[m.key][0].protocol for m in job.messages}

    def peer_info(self, path: Path, message: Message) -> Any:
        """Return the result of a path's `Path.describe` at the other end of a message."""
        return self.routes[message.key][1].paths.get(path.name)

    def link(self, path: Path, words: int = 0) -> NodeLink | None:
        """Make the shared block of a path's messages; where there is too little memory, turn to their fallbacks.

        ``words`` are numbers that this rank has for its peers in it. None where this rank has no messages for it. The
        path's channels free it.

        Collective over the ranks of the node.
        """
        if not any(path.name in self.near[rank] for rank in self.world.node_ranks):
            return None
        near = self.messages_near(path)
        packed = [m for m in near if m.direction == "send" and self._protocol(path, m).is_packed]
        peers = sorted({m.peer for m in near})
        link = NodeLink(self.world, self.context.arena, packed, peers, words)
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

    def _protocol(self, path: Path, message: Message) -> Protocol:
        found = path.protocol(self.routes[message.key][0].protocol)
        assert found is not None
        return found

    def mpi_tag(self, message: Message) -> int:
        """Return a tag that tells a message from others between its ranks, in this plan and in others."""
        same = self.whole.sends if message.direction == "send" else self.whole.receives
        tags = sorted(m.tag for m in same if m.peer == message.peer)
        most = int(self.world.comm.Get_attr(self.world.mpi.TAG_UB) or 32767) - FIRST_PLAN_TAG
        return FIRST_PLAN_TAG + (self.number * _TAGS_PER_PLAN + tags.index(message.tag)) % most


class Path(ABC):
    """A data path; see the module."""

    name: ClassVar[str]  # as ``path=``, HALOX_PATH and ``explain`` have it
    protocols: ClassVar[tuple[Protocol, ...]]
    summary: ClassVar[str]  # for ``halox info``: when it serves
    # The arrays for which it is made, and which it describes; without a GPU, those of the second kind do not exist.
    memory: ClassVar[Literal["host", "gpu"]] = "gpu"
    to_self: ClassVar[bool] = False  # only a rank's messages to itself; never asked for by name
    is_tuned: ClassVar[bool] = True  # by ``halox tune``

    def check_settings(self) -> None:  # noqa: B027 - most paths have none
        """Raise a `HaloxError` if an environment variable of the path has none of its values; local."""

    def survey(self, context: Context, *, is_named: bool) -> object:
        """Find out what `candidates` must know of all ranks, alike on all of them; collective.

        ``is_named`` says whether the path was asked for. Called for each plan; of arrays on the host only for paths
        that are made for those.
        """
        return None

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, floats: bool
    ) -> object | None:
        """Return this path's share of an `EndpointInfo`, to be pickled; None for nothing. Local.

        Where the plan may serve other arrays of the same layouts (``floats``), nothing in it depends on addresses in
        these.
        """
        return None

    @abstractmethod
    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Return the protocols by which a message can go this path, or else why it cannot.

        Local: both ends ask, with the same argument, and must get the same answer.
        """

    def why_not(self, protocol: str, ends: MessageEnds) -> str | None:
        """Return why a message cannot go by one protocol, where it can by others; None for no reason in particular."""
        return None

    def wants_shared_fields(self, layout: FieldLayout, itemsize: int) -> bool:
        """Whether a grid's field on the host should be in shared memory; alike on all ranks."""
        return False

    def negotiate(self, build: Build) -> object:
        """Agree with the other ranks on a plan's channels, by default on the node's shared block where it is needed.

        Collective over them all if one has messages here.
        """
        return build.link(self)

    @abstractmethod
    def channels(self, build: Build, agreed: Any) -> Sequence[Carried]:
        """Make the channels of this rank's messages, from the result of `negotiate`; none where it has none.

        Local; an error here is raised on all ranks.
        """

    def moves(self, memory: Literal["host", "gpu"]) -> bool:
        """Whether a protocol is made for arrays of a kind."""
        return any((one.memory or self.memory) == memory for one in self.protocols)

    def protocol(self, name: str) -> Protocol | None:
        """Return the protocol of a name, today's or an earlier one; None if there is none."""
        return next((p for p in self.protocols if name in (p.name, p.former)), None)

    def offer(self, protocol: str, reason: str, *, preferred: bool = False) -> Candidate:
        """Return a candidate of this path."""
        return Candidate(self.name, protocol, reason, preferred=preferred)
