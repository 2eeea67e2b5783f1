"""Selection of a message's path, identical on both ends: candidates from the registry, compared by the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from halox.errors import PathError
from halox.paths import HOST_PATHS, PATHS
from halox.paths.base import Candidate, EndpointInfo, MessageEnds, Route, SelectionContext
from halox.paths.messages import Message
from halox.plans.costs import Costs
from halox.runtime.arrays import Described
from halox.runtime.context import Context


def describe_end(
    message: Message,
    arrays: Sequence[Described],
    context: Context,
    *,
    relocatable: bool = False,
    is_one_way: bool = False,
) -> EndpointInfo:
    """Return this rank's description of its end of a message; `Path.describe` explains ``relocatable``."""
    world = context.world
    paths: dict[str, object] = {}
    on_host = arrays[message.parts[0].array].device is None
    if message.peer != world.rank:
        for name, path in (HOST_PATHS if on_host else PATHS).items():
            if on_host and path.memory == "gpu":
                continue
            description = path.describe(message, arrays, context, relocatable=relocatable)
            if description is not None:
                paths[name] = description
    return EndpointInfo(
        world.node,
        "host" if on_host else "gpu",
        message.block_bytes if on_host else message.row_bytes,
        message.signatures,
        world.rank,
        message.nbytes,
        paths,
        is_one_way,
    )


def choose_route(
    sender: EndpointInfo,
    receiver: EndpointInfo,
    *,
    to_self: bool,
    selection: SelectionContext,
    costs: Costs | None = None,
    requested: str | None = None,
) -> Route:
    """Choose the path of one message; both ends call this with the same arguments.

    Between arrays on the host the first preferred protocol is taken, or else the first possible one. With an array on a
    GPU ``costs`` decide. ``requested`` is the requested path or "path/protocol"; if it cannot be taken, a `PathError`
    gives the reason.
    """
    ends = MessageEnds(sender, receiver, selection)
    possible, impossible = candidates(ends, to_self=to_self)
    if to_self:
        chosen = possible[0]
        return Route(chosen.path, chosen.protocol, chosen.reason)
    if requested is not None:
        names = ", ".join(f"{offer.path}/{offer.protocol}" for offer in possible)
        name = requested.partition("/")[0]
        others = ", ".join(
            f"{offer.protocol} ({offer.reason})" for offer in possible if offer.path == name
        )
        possible = [
            offer
            for offer in possible
            if requested in (offer.path, f"{offer.path}/{offer.protocol}")
        ]
        if not possible:
            why = impossible.get(name) or f"it has no such protocol for this message, but {others}"
            raise PathError(
                f"path {requested!r} cannot be taken from rank {sender.rank} to rank {receiver.rank}: {why}; leave "
                f"the choice to halox (no path=, no HALOX_PATH), or take one of {names}"
            )
    if ends.are_on_host:
        best = next((offer for offer in possible if offer.preferred), possible[0])
        return Route(best.path, best.protocol, best.reason, None, impossible)
    costs = Costs.default() if costs is None else costs
    block, topology = ends.block_bytes, selection.topology
    shared = topology is not None and any(
        topology.sharers(end.rank) for end in (sender, receiver) if end.memory == "gpu"
    )
    best = costs.best(possible, sender.nbytes, block, shared_gpu=shared)
    path, protocol, predicted = best.path, best.protocol, None
    if costs.knows(path, protocol) and "host" not in (sender.memory, receiver.memory):
        predicted = costs.predict(path, protocol, sender.nbytes, block, shared_gpu=shared)
    return Route(path, protocol, best.reason, predicted, impossible)


def candidates(
    ends: MessageEnds, *, to_self: bool = False
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the protocols by which a message can travel, at least one, and for every other path the reason why not."""
    possible: list[Candidate] = []
    impossible: dict[str, str] = {}
    usable = HOST_PATHS if ends.are_on_host else PATHS
    for name in PATHS:
        if name not in usable:
            impossible[name] = str(ends.host_reason)
        elif usable[name].to_self == to_self:
            offers = usable[name].candidates(ends)
            if isinstance(offers, str):
                impossible[name] = offers
            else:
                possible += offers
    return possible, impossible
