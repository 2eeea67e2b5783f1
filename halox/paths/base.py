"""The contract of a data path: one object, registered once in `halox.paths`.

A path answers five questions, and nothing outside `halox.paths` asks for it by name:

1. `Path.name`, `Path.protocols`: its names, shipped cost constants, and how ``halox tune`` probes each protocol.
2. `Path.describe`: its share of the `EndpointInfo` that both ends of a message swap when a plan is made.
3. `Path.candidates`: the protocols by which it can carry a message, each with a reason; or why it cannot.
4. `Path.negotiate`: what its ranks agree on before channels are made (collective; most paths need nothing).
5. `Path.channels`: the `Channel` of its messages in one plan, started and finished in every exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message, Part

if TYPE_CHECKING:
    from halox.decomposition import FieldLayout
    from halox.packing.device import Endpoint
    from halox.paths.build import Build
    from halox.runtime.arrays import Described
    from halox.runtime.context import Context
    from halox.runtime.topology import Topology

Operation = Literal["copy", "add"]

Key = tuple[str, int, int]
"""Direction, peer and tag of a message."""

NODE_MEMORY_IS_FULL = "same node, but /dev/shm has too little space for shared memory"


@dataclass(frozen=True)
class Job:
    """The messages of one plan that go one path, with the arrays they name.

    Attributes
    ----------
    arrays : sequence of HostArray or Described
        The plan's arrays, borrowed: on the host or on this rank's GPU.
    sends, receives : tuple of Message
        Messages of this path, in the order of (peer, tag).
    operation : {"copy", "add"}
        Received values replace the target's; or are added to them, and what was sent is set to zero.
    """

    arrays: Sequence[Any]
    sends: tuple[Message, ...]
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

    Attributes
    ----------
    needs_host : bool
        Whether the host takes part in an exchange, beyond launching kernels.
    is_movable : bool
        Whether the channel can work on other arrays of the same layouts, by `views` and `bind`.
    has_ended : bool
        Whether nothing that this rank has begun is under way any more. Asked once it is closed.
    has_failed : bool
        Whether an exchange has failed of which the caller may not have been told. Asked once it is closed.
    """

    needs_host = True
    is_movable = False
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

    def views(self, memories: Sequence[Any]) -> Any:  # noqa: B027
        """Return views of other arrays of the same layouts, for `bind`; local, of a movable channel alone.

        The arrays are given as their bytes on the host, and by their addresses on a GPU.
        """

    def bind(self, views: Any) -> None:  # noqa: B027 - most paths look at addresses
        """Work on the arrays of some views from the next exchange on; local, of a movable channel alone."""

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
    """One way in which a path moves a message, as ``path="peer/ll"`` names it.

    Attributes
    ----------
    name : str
    cost, shared_gpu_cost : ProtocolCost or None
        Shipped constants, also for ranks that share a GPU; None for protocols that follow fixed rules.
    fallback : str or None
        The protocol that replaces this one where the shared memory of a node is too small, as "path/protocol"; None
        if this one needs none.
    is_packed : bool
        Whether messages travel packed through the node's shared memory.
    reach : {"self", "node", "nodes"}
        The partner with whom it is measured: the rank itself, one of its node, or one of another node where possible.
    in_field : bool
        Whether it is measured on a grid's own field, whose memory other ranks can map.
    former : str or None
        Earlier name, still accepted.
    """

    name: str
    cost: ProtocolCost | None = None
    shared_gpu_cost: ProtocolCost | None = None
    fallback: str | None = None
    is_packed: bool = False
    reach: Literal["self", "node", "nodes"] = "node"
    in_field: bool = False
    former: str | None = None


@dataclass(frozen=True)
class EndpointInfo:
    """Description of a message by one of its ends, exchanged when a plan is made.

    Attributes
    ----------
    node, rank : int
    memory : {"host", "gpu"}
    block_bytes : int
        Mean bytes of a block.
    signatures : tuple
        Of each part.
    nbytes : int
        Payload.
    paths : mapping of str to object
        By path, the result of its `Path.describe`, where there is one.
    """

    node: int
    memory: Literal["host", "gpu"]
    block_bytes: int
    signatures: tuple[Any, ...]
    rank: int = 0
    nbytes: int = 0
    paths: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SelectionContext:
    """Selection inputs beside the two ends of a message, identical on all ranks of a plan.

    Attributes
    ----------
    operation : {"copy", "add"}
    topology : Topology or None
        The GPUs of all ranks; None if no rank has one.
    no_device_pointers : str or None
        Why MPI cannot be given device pointers; None if it can.
    """

    operation: Operation = "copy"
    topology: Topology | None = None
    no_device_pointers: str | None = "no MPI library was asked"


@dataclass(frozen=True)
class Candidate:
    """A path and protocol by which a message can travel, and the reason why that is possible or good."""

    path: str
    protocol: str
    reason: str


@dataclass(frozen=True)
class Route:
    """The path and protocol of a message, and the reason for them.

    Attributes
    ----------
    predicted_us : float or None
        Time that the cost model expects of an exchange of this message alone; None where it has no model.
    why_not : mapping of str to str
        For each path that is impossible, the reason.
    """

    path: str
    protocol: str
    reason: str
    predicted_us: float | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)


class Path(ABC):
    """A data path; see the module.

    Attributes
    ----------
    name : str
        As ``path=``, HALOX_PATH and ``explain`` have it.
    protocols : tuple of Protocol
    summary : str
        When it serves, for ``halox info``.
    memory : {"host", "gpu"}
        The arrays for which it is made: without a GPU, those of the second kind do not exist.
    to_self : bool
        Whether it carries the messages of a rank to itself, and no others; it is then never asked for by name.
    is_tuned : bool
        Whether ``halox tune`` measures it.
    """

    name: ClassVar[str]
    protocols: ClassVar[tuple[Protocol, ...]]
    summary: ClassVar[str]
    memory: ClassVar[Literal["host", "gpu"]] = "gpu"
    to_self: ClassVar[bool] = False
    is_tuned: ClassVar[bool] = True

    def check_settings(self) -> None:  # noqa: B027 - most paths have none
        """Raise a `HaloxError` if an environment variable of the path has none of its values; local."""

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context
    ) -> Any | None:
        """Return this path's share of what an end says of a message between ranks, None for nothing.

        Notes
        -----
        Not collective. Pickled, and sent to the other end.
        """
        return None

    @abstractmethod
    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Return the protocols by which a message can go this path, or else why it cannot.

        Notes
        -----
        Not collective: both ends ask, with the same arguments, and must get the same answer.
        """

    def wants_shared_fields(self, layout: FieldLayout, itemsize: int) -> bool:
        """Whether a grid's field on the host should be in shared memory; alike on all ranks."""
        return False

    def negotiate(self, build: Build) -> Any:
        """Agree with the other ranks on a plan's channels; collective over them all if one has messages here."""
        return None

    @abstractmethod
    def channels(self, build: Build, agreed: Any) -> Sequence[Carried]:
        """Make the channels of this rank's messages, none where it has none.

        Parameters
        ----------
        build : Build
            The plan under construction.
        agreed : object
            The result of `negotiate`.

        Notes
        -----
        Not collective; an error here is raised on all ranks.
        """

    def protocol(self, name: str) -> Protocol | None:
        """Return the protocol of a name, today's or an earlier one; None if there is none."""
        return next((p for p in self.protocols if name in (p.name, p.former)), None)

    def offer(self, protocol: str, reason: str) -> Candidate:
        """Return a candidate of this path."""
        return Candidate(self.name, protocol, reason)


def why_not_gpus(
    sender: EndpointInfo,
    receiver: EndpointInfo,
    selection: SelectionContext,
    why: Callable[[Topology, int, int], str | None],
) -> str | None:
    """Return why a message cannot go between two GPUs, in the end what ``why`` says of them; None if it can."""
    on_host, topology = numpy_ends(sender, receiver), selection.topology
    if on_host is not None:
        return on_host
    if topology is None:
        return "the ranks' GPUs are not known"
    return why(topology, sender.rank, receiver.rank)


def numpy_ends(sender: EndpointInfo, receiver: EndpointInfo) -> str | None:
    """Say that arrays of a message are NumPy's, for paths between GPUs; None if both ends are on GPUs."""
    count = (sender.memory, receiver.memory).count("host")
    return (None, "one end's array is NumPy's", "these arrays are NumPy's")[count]
