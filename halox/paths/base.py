"""The contract of a data path: one object, registered once in `halox.paths`.

A path answers seven questions, and code outside `halox.paths` never refers to a path by name:

1. `Path.name`, `Path.protocols`: names, shipped cost constants, and how ``halox tune`` measures each protocol.
2. `Path.survey`: facts about all ranks that the path needs (collective; most paths need nothing).
3. `Path.describe`: the path's share of the `EndpointInfo` that both ends of a message swap when a plan is made.
4. `Path.candidates`: the protocols by which the path can carry a message, each with a reason; or why it cannot.
5. `Path.carries_copies`: whether its channel can also carry a rank's messages to itself (most paths cannot).
6. `Path.negotiate`: the agreement of the ranks before channels are made (collective; most paths need nothing).
7. `Path.channels`: the `Channel` of the path's messages in one plan, started and finished in every exchange.

The answers do not depend on other paths. A `Build` is complete when `negotiate` and `channels` get it, and never
changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message, Part, PartSignature
from halox.runtime.communicator import FIRST_PLAN_TAG

if TYPE_CHECKING:
    from halox.decomposition import FieldLayout
    from halox.packing.device import Endpoint
    from halox.paths.node import NodeLink
    from halox.runtime.arrays import Described
    from halox.runtime.context import Context
    from halox.runtime.topology import Topology
    from halox.runtime.world import World

Operation = Literal["copy", "add"]
"""Action on arrival: values replace the target's values ("copy"), or are added to them and cleared at the source."""

Key = tuple[str, int, int]
"""Direction, peer and tag of a message."""

_TAGS_PER_PLAN = 256


@dataclass(frozen=True)
class Job:
    """The messages of one plan that take one path, with the arrays that their parts refer to."""

    arrays: Sequence[Any]  # the plan's, HostArray or Described
    sends: tuple[Message, ...]  # in the order of (peer, tag), like the receives
    receives: tuple[Message, ...]
    operation: Operation = "copy"

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.sends, *self.receives)

    @property
    def peers(self) -> list[int]:
        return sorted({message.peer for message in self.messages})

    @property
    def both_ways(self) -> set[int]:
        """Ranks that get messages from this rank and send messages to it."""
        return {m.peer for m in self.sends} & {m.peer for m in self.receives}

    def only(self, fits: Callable[[Message], bool]) -> Job:
        sends, receives = (
            tuple(filter(fits, messages)) for messages in (self.sends, self.receives)
        )
        return Job(self.arrays, sends, receives, self.operation)

    def pairs(self) -> Iterator[tuple[Part, Part]]:
        """Pair the parts that a rank sends to itself with the parts that it receives."""
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
        from halox.packing.device import Endpoint

        return Endpoint(self.arrays[part.array], part.datatype, part.count, part.array)


class Channel(ABC):
    """All messages of one plan that take one path.

    Notes
    -----
    `start` may return before any data has moved. Until `finish` returns (on a GPU: until the work that `finish` puts on
    the stream has run), nobody may write the parts that are sent or touch the parts that are received. A plan starts
    all its channels before it finishes any of them, and every rank finishes its channels in the same order of paths.

    A channel ends in two steps: each rank closes it at any time, and it is freed when all ranks have closed it.
    """

    needs_host = True  # the host takes part in an exchange, beyond launching kernels
    is_movable = False  # to other arrays of the same layouts, by `views` and `bind`
    is_measured = True  # `Plan.measure` runs it without the plan's other channels
    # Attributes called for its steps on the host, and names of the steps in a timeline; see `halox.timeline`.
    timeline: ClassVar[tuple[tuple[str, str], ...]] = (
        ("start", "send"),
        ("run", "send"),
        ("finish", "wait"),
    )
    # Of a closed channel:
    has_ended = True  # this rank has no work under way
    has_failed = False  # an exchange has failed, and no error has reached the caller

    def check(self) -> None:  # noqa: B027 - most paths can always begin
        """Raise if an exchange cannot begin now; no part of it has begun yet."""

    @abstractmethod
    def start(self) -> None:
        """Begin one exchange: send the parts that this rank sends."""

    def run(self) -> None:
        """Begin one exchange; `finish` follows at once, without other work in between."""
        self.start()

    def start_copied(self) -> None:
        """Begin one exchange; on a GPU later work on the current stream finds this rank's copies to itself complete."""
        self.start()

    def fill(self) -> None:  # noqa: B027 - most paths fill no walls
        """Fill halos beyond walls from cells of this rank alone, without an exchange."""

    def finish(self) -> None:  # noqa: B027 - plans leave out channels that end in `start`
        """End the exchange: on return everything received is in place."""

    def views(self, memories: Sequence[Any]) -> object:  # noqa: B027
        """Return views of other arrays of the same layouts, for `bind`; local, of a movable channel only.

        ``memories`` gives each array by its bytes on the host, and by its address on a GPU.
        """

    def bind(self, views: Any) -> None:  # noqa: B027 - most paths look at addresses
        """Use the arrays of some views from the next exchange on; local, of a movable channel only."""

    def close(self) -> None:  # noqa: B027 - most paths keep nothing
        """End the channel, and release resources that no other rank accesses; local."""

    def free(self) -> None:  # noqa: B027 - most paths share nothing
        """Release resources that other ranks accessed, after all ranks have closed the channel; local."""


class ChannelMessages(NamedTuple):
    """A channel with the messages that it carries.

    Within a plan the name identifies the channel on all ranks; a rank may lack channels that other ranks have.
    """

    name: str
    channel: Channel
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Protocol:
    """A protocol of a path, as named by ``path="peer/ll"``."""

    name: str
    # Shipped constants for messages with an end on a GPU; None for a protocol that is chosen by fixed rules.
    cost: ProtocolCost | None = None
    shared_gpu_cost: ProtocolCost | None = None  # the same for ranks that share a GPU
    # For a protocol that needs a `NodeLink`: the "path/protocol" that replaces it on a node with too little shared
    # memory. The path of the replacement must not use `Path.negotiate`.
    fallback: str | None = None
    is_packed: bool = False  # messages are packed into the shared block of the link
    # Partner in measurements: the rank itself, a rank of its node, or a rank of another node where possible.
    reach: Literal["self", "node", "nodes"] = "node"
    in_field: bool = False  # measured on a grid's field, in memory that other ranks can map
    memory: Literal["host", "gpu"] | None = None  # of its arrays, if different from its path's
    is_tuned: bool = True  # by ``halox tune``, if its path is tuned


@dataclass(frozen=True)
class EndpointInfo:
    """Description of one end of a message, sent to the other end when a plan is made."""

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int  # mean; on a GPU, mean row of tiles if kernels move tiles
    signatures: tuple[PartSignature, ...]
    rank: int = 0
    nbytes: int = 0
    paths: Mapping[str, Any] = field(default_factory=dict)  # by path, from its `Path.describe`
    is_one_way: bool = False  # the plan has no message in the opposite direction


@dataclass(frozen=True)
class SelectionContext:
    """Selection inputs common to all messages, identical at both ends of each message."""

    operation: Operation = "copy"
    topology: Topology | None = None  # None if no rank has a GPU
    surveys: Mapping[str, Any] = field(default_factory=dict)  # by path, from its `Path.survey`
    leave_sms: bool = False  # prefer protocols that do not use a GPU's multiprocessors


class MessageEnds(NamedTuple):
    """Both ends of a message, and the selection inputs common to all messages of a plan."""

    sender: EndpointInfo
    receiver: EndpointInfo
    selection: SelectionContext

    @property
    def are_near(self) -> bool:
        return self.sender.node == self.receiver.node

    @property
    def are_on_host(self) -> bool:
        return self.sender.memory == self.receiver.memory == "host"

    @property
    def block_bytes(self) -> int:
        """Mean bytes of a block, at the end with the shorter blocks."""
        return min(self.sender.block_bytes, self.receiver.block_bytes)

    def described(self, path: Path) -> tuple[Any, Any]:
        """Return the results of a path's `Path.describe` at both ends, None for an end without a result."""
        return self.sender.paths.get(path.name), self.receiver.paths.get(path.name)

    @property
    def host_reason(self) -> str | None:
        """Reason against paths between GPUs: an end's array is NumPy's; None if both are on GPUs."""
        count = (self.sender.memory, self.receiver.memory).count("host")
        return (None, "one end's array is NumPy's", "these arrays are NumPy's")[count]

    def why_not_gpus(self, why: Callable[[Topology, int, int], str | None]) -> str | None:
        """Return why a path between GPUs cannot carry the message, None if it can; ``why`` compares the ranks' GPUs."""
        if self.host_reason is not None:
            return self.host_reason
        if self.selection.topology is None:
            return "the ranks' GPUs are not known"
        return why(self.selection.topology, self.sender.rank, self.receiver.rank)


@dataclass(frozen=True)
class Candidate:
    """A path and protocol that can carry a message, and the reason for them.

    ``preferred`` candidates are taken before all other candidates, even if the cost model predicts longer times.
    """

    path: str
    protocol: str
    reason: str
    preferred: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Route(Candidate):
    """The chosen path and protocol of a message, and the reason for the choice."""

    predicted_us: float | None = None  # of an exchange of this message alone; None without a model
    why_not: Mapping[str, str] = field(default_factory=dict)  # for each path that is impossible


@dataclass(frozen=True)
class Build:
    """A plan under construction: its messages with their routes, and the resources for its channels."""

    context: Context
    number: int  # of the plan, the same on all ranks
    whole: Job  # all messages of this rank
    device: int | None  # GPU of the arrays; None for NumPy arrays
    routes: Mapping[Key, tuple[Route, EndpointInfo]]  # with the description of the other end
    # Paths and protocols that any rank chose, the same on all ranks; a node may have changed some to their fallbacks.
    chosen: Collection[tuple[str, str]]
    links: Mapping[str, NodeLink]  # by path; its channels free the shared block
    copies_path: str | None = None  # path whose channel carries this rank's messages to itself, too

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def copies(self) -> Job:
        return self.whole.only(lambda message: message.peer == self.world.rank)

    def job(self, path: Path, *protocols: str) -> Job:
        """Return the messages on a path: with one of the given protocols, or with any protocol if none is given.

        Messages of this rank to itself are not among them if another path's channel carries them.
        """

        def fits(message: Message) -> bool:
            route = self.routes[message.key][0]
            is_carried = self.copies_path is not None and message.peer == self.world.rank
            return (
                route.path == path.name
                and not is_carried
                and (not protocols or route.protocol in protocols)
            )

        return self.whole.only(fits)

    def carried(self, path: Path) -> Job:
        """Return this rank's messages to itself that a path's channel carries; see `Path.carries_copies`."""
        return self.copies if path.name == self.copies_path else self.whole.only(lambda _: False)

    def protocols(self, job: Job) -> dict[Key, str]:
        return {m.key: self.routes[m.key][0].protocol for m in job.messages}

    def peer_info(self, path: Path, message: Message) -> Any:
        """Return the result of a path's `Path.describe` at the other end of a message."""
        return self.routes[message.key][1].paths.get(path.name)

    def mpi_tag(self, message: Message) -> int:
        """Return a tag that distinguishes a message from all other messages between its ranks, in all plans."""
        same = self.whole.sends if message.direction == "send" else self.whole.receives
        tags = sorted(m.tag for m in same if m.peer == message.peer)
        most = int(self.world.comm.Get_attr(self.world.mpi.TAG_UB) or 32767) - FIRST_PLAN_TAG
        return FIRST_PLAN_TAG + (self.number * _TAGS_PER_PLAN + tags.index(message.tag)) % most


class Path(ABC):
    """A data path; the module describes its methods."""

    name: ClassVar[str]  # in ``path=``, HALOX_PATH and ``explain``
    protocols: ClassVar[tuple[Protocol, ...]]
    summary: ClassVar[str]  # for ``halox info``: conditions of its use
    # Kind of arrays that it moves and describes; without a GPU, arrays of kind "gpu" do not exist.
    memory: ClassVar[Literal["host", "gpu"]] = "gpu"
    to_self: ClassVar[bool] = False  # only a rank's messages to itself; no valid ``path=``
    is_tuned: ClassVar[bool] = True  # by ``halox tune``

    def check_settings(self) -> None:  # noqa: B027 - most paths have none
        """Raise a `HaloxError` if the path's environment variable has an invalid value; local.

        The variable is HALOX_ with the name of the path in capitals. Called only if it is set.
        """

    def survey(self, context: Context, *, is_named: bool) -> object:
        """Find facts about all ranks that `candidates` needs, the same on all ranks; collective.

        ``is_named`` says whether the path was requested. Called for each plan; if no rank's arrays are on a GPU, only
        for paths with a protocol for arrays on the host.
        """
        return None

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> object | None:
        """Return this path's share of an `EndpointInfo`, which must be picklable; None if it has none. Local.

        If the plan may serve other arrays of the same layouts (``relocatable``), the result must not depend on the
        addresses of these arrays.
        """
        return None

    @abstractmethod
    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Return the protocols by which the path can carry a message, or a text that says why it cannot.

        Local: both ends call this with the same argument, and must get the same answer.
        """

    def carries_copies(self, job: Job, copies: Job) -> bool:
        """Whether the channel for ``job`` can also carry ``copies``, the rank's messages to itself; local.

        The first path of a plan for which this is True carries them (`Build.carried`).
        """
        return False

    def wants_shared_fields(self, layout: FieldLayout, itemsize: int) -> bool:
        """Whether a grid's field on the host should be in shared memory; the same on all ranks.

        Called for paths with a protocol for arrays on the host.
        """
        return False

    def negotiate(self, build: Build) -> object:
        """Agree with all ranks on a plan's channels; most paths need nothing.

        Collective over all ranks; called if any rank has messages on this path.
        """
        return None

    @abstractmethod
    def channels(self, build: Build, agreed: Any) -> Sequence[ChannelMessages]:
        """Make the channels of this rank's messages on the path, of which there is at least one.

        ``agreed`` is the result of `negotiate`. Local; an error raised here is raised on all ranks.
        """

    def moves(self, memory: Literal["host", "gpu"]) -> bool:
        """Whether any protocol of the path is made for arrays of a kind."""
        return any((protocol.memory or self.memory) == memory for protocol in self.protocols)

    def protocol(self, name: str) -> Protocol | None:
        """Return the protocol of a name; None if the path has no such protocol."""
        return next((p for p in self.protocols if p.name == name), None)

    def candidate(self, protocol: str, reason: str, *, preferred: bool = False) -> Candidate:
        return Candidate(self.name, protocol, reason, preferred=preferred)
