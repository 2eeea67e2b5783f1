"""Collective plan construction: `make_plan` turns the ranks' drafts into plans, on all ranks or on no rank.

The steps, each of which is collective:

1. Every rank makes and checks its `Draft`, and the ranks agree that these match (`agree`).
2. The two ends of every message swap their descriptions, compare signatures, and choose the same route.
3. The ranks of each node make the shared memory that their routes need (`NodeLink`).
4. The paths negotiate, and make their channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from halox.domain import Domain
from halox.errors import MismatchError
from halox.paths import PATHS
from halox.paths.base import (
    Build,
    ChannelMessages,
    EndpointInfo,
    Job,
    Key,
    Path,
    Protocol,
    Route,
    SelectionContext,
)
from halox.paths.messages import check_match
from halox.paths.node import NodeLink
from halox.plans.draft import MAKING, Agreed, Draft, agree
from halox.plans.report import Report, Row
from halox.plans.runner import Runner
from halox.plans.selection import choose_route, describe_end
from halox.plans.walls import WallChannel
from halox.runtime.context import Context

NODE_MEMORY_IS_FULL = "same node, but /dev/shm has too little space for shared memory"

Routes = dict[Key, tuple[Route, EndpointInfo]]
"""For each message its route, and the description of its other end."""


Named = tuple[str, str]
"""Names of a path and of its protocol."""


class _Made(NamedTuple):
    """The channels of this rank, and what holds for the channels of all ranks."""

    channels: list[ChannelMessages]
    need_host: bool
    are_movable: bool


def make_plan(
    context: Context,
    draft: Callable[[], Draft],
    *,
    keep: bool = True,
    path: str | None = None,
    leave_sms: bool = False,
    call: str = "start of a plan",
) -> Runner:
    """Make a plan; collective. Waits until the GPU of the arrays is idle.

    ``draft`` returns this rank's `Draft`, or raises a `HaloxError`. With ``keep`` the plan keeps its arrays alive;
    otherwise the owner of the plan must drop the plan together with the arrays. ``path`` is the path of all messages to
    other ranks, by default the value of HALOX_PATH, or else the fastest path. ``leave_sms``, the same on all ranks,
    prefers paths that do not use a GPU's multiprocessors. ``call`` is the name under which the check of collective
    calls counts runs of the plan.

    Raises on all ranks a `PathError` if the requested path cannot be taken, and a `HaloxError` if any rank cannot make
    its part or the two ends of a message do not match.
    """
    world = context.world
    agreed = agree(context, draft, path)
    _reclaim(context, agreed)
    routes, chosen = _choose_routes(context, agreed, leave_sms=leave_sms)
    build = _build(context, agreed, routes, chosen)
    made = _make_channels(build, agreed.draft)
    runner = Runner(
        world,
        agreed.draft.device,
        made.channels,
        _report(world.rank, agreed.draft, build),
        partial(context.leftovers.add, agreed.number),
        # A run without host work is only a launch, and no rank counts it.
        world.ticker(call, agreed.number) if made.need_host else None,
        relocatable=agreed.relocatable and made.are_movable,
    )
    runner.hold(agreed.draft.arrays, alive=keep)
    return runner


def make_domain_plan(
    domain: Domain,
    draft: Callable[[], Draft],
    *,
    keep: bool,
    path: str | None,
    call: str,
    partner: Domain | None = None,
) -> Runner:
    """Make a plan between fields of a domain, with the domain's options; see `make_plan`.

    ``partner`` is a second domain on the same communicator if fields of both take part. The plan is closed with each
    domain.
    """
    domain.world.check_open()
    division = domain.division
    path = division.path if path is None else path
    leave_sms = division.leave_sms
    runner = make_plan(domain.context, draft, keep=keep, path=path, leave_sms=leave_sms, call=call)
    for owner in (domain, partner):
        if owner is not None:
            owner.dependents.add(runner)
    return runner


def _reclaim(context: Context, agreed: Agreed) -> None:
    """Free what closed plans have left behind, once no rank uses it."""
    if context.device_arena is not None:
        # The GPUs of all ranks were idle before the first rank returned from `agree`.
        context.device_arena.reclaim()
    context.leftovers.reclaim([record.closed for record in agreed.records])


def _report(rank: int, drafted: Draft, build: Build) -> Report:
    rows = [Row.of(m, build.routes[m.key][0]) for m in build.whole.messages]
    operation = drafted.title or ("exchange" if drafted.operation == "copy" else "accumulation")
    names = drafted.names or tuple(map(str, drafted.described))
    return Report(rank, operation, names, tuple(rows))


def _choose_routes(
    context: Context, agreed: Agreed, *, leave_sms: bool
) -> tuple[Routes, list[Named]]:
    """Swap both ends' descriptions with every peer, compare signatures, and choose each message's route; collective.

    Also returns the protocols of the messages of any rank. Errors of paths, which may be code of users, are raised on
    all ranks.
    """
    world, whole = context.world, agreed.whole
    requested = agreed.records[0].requested
    topology, costs = None, None
    if agreed.paths is PATHS:
        from halox.plans.calibration import costs_of

        topology, costs = context.find_gpus(), context.once(costs_of)
    named = (requested or "").partition("/")[0]
    surveys = {n: path.survey(context, is_named=n == named) for n, path in agreed.paths.items()}
    selection = SelectionContext(whole.operation, topology, surveys, leave_sms)

    def describe() -> dict[int, dict[tuple[str, int], EndpointInfo]]:
        both_ways = whole.both_ways
        ends: dict[int, dict[tuple[str, int], EndpointInfo]] = {m.peer: {} for m in whole.messages}
        for m in whole.messages:
            ends[m.peer][m.direction, m.tag] = describe_end(
                m,
                agreed.draft.described,
                context,
                relocatable=agreed.relocatable,
                is_one_way=m.peer not in both_ways,
            )
        return ends

    records = world.attempt(describe, MAKING)
    theirs = world.swap(
        {peer: ends for peer, ends in records.items() if peer != world.rank},
        sorted(records.keys() - {world.rank}),
        MAKING,
    )
    theirs[world.rank] = records.get(world.rank, {})

    def choose() -> tuple[Routes, list[Named]]:
        routes: Routes = {}
        for message in whole.messages:
            mine = records[message.peer][message.direction, message.tag]
            other = theirs[message.peer].get(message.opposite)
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
                selection=selection,
                costs=costs,
                requested=requested,
            )
            routes[message.key] = (route, other)
        return routes, sorted({(route.path, route.protocol) for route, _ in routes.values()})

    routes, protocols = world.gather(choose, MAKING)
    return routes, sorted(set[Named]().union(*protocols.distinct))


def _build(context: Context, agreed: Agreed, routes: Routes, chosen: list[Named]) -> Build:
    """Link the ranks of each node for the plan's paths; collective over all ranks."""
    # Also paths that only other ranks link: making a link is collective over the node.
    linked = dict.fromkeys(path for path, name in chosen if _protocol(path, name).fallback)
    routes, links = _link(context, agreed.whole, routes, linked)
    build = Build(context, agreed.number, agreed.whole, agreed.draft.device, routes, chosen, links)
    return replace(build, copies_path=_copies_path(build))


def _protocol(path: str, name: str) -> Protocol:
    protocol = PATHS[path].protocol(name)
    assert protocol is not None
    return protocol


def _link(
    context: Context, whole: Job, chosen: Routes, paths: Iterable[str]
) -> tuple[Routes, dict[str, NodeLink]]:
    """Make the shared blocks of paths for the messages that need them; collective over the ranks of the node.

    Returns the links by path, and the routes: if the node has too little shared memory for a path, its ranks change the
    path's messages to their fallback protocols.
    """
    protocols = {key: _protocol(route.path, route.protocol) for key, (route, _) in chosen.items()}
    routes, links = dict(chosen), {}
    for name in paths:
        messages = [
            m for m in whole.messages if chosen[m.key][0].path == name and protocols[m.key].fallback
        ]
        packed = [m for m in messages if m.direction == "send" and protocols[m.key].is_packed]
        peers = sorted({m.peer for m in messages})
        link = NodeLink(context.world, context.arena, packed, peers, words=len(whole.arrays))
        if link.failed:
            for m in messages:
                path, _, fallback = str(protocols[m.key].fallback).partition("/")
                routes[m.key] = Route(path, fallback, NODE_MEMORY_IS_FULL), routes[m.key][1]
        elif messages:
            links[name] = link
        else:
            link.close()  # only other ranks of the node need it
    return routes, links


def _copies_path(build: Build) -> str | None:
    """Return the first path of the registry whose channel can carry this rank's messages to itself, too."""
    copies = build.copies
    if copies.messages:
        for path in _paths_of(build):
            if not path.to_self and path.carries_copies(build.job(path), copies):
                return path.name
    return None


def _paths_of(build: Build) -> list[Path]:
    """Return the paths of this rank's messages, in the order of the registry."""
    mine = {route.path for route, _ in build.routes.values()}
    return [PATHS[name] for name in PATHS if name in mine]


def _make_channels(build: Build, drafted: Draft) -> _Made:
    """Make all channels of a plan, path by path in the order of the registry; collective over all ranks.

    The channel of walls is the last one to finish, or the first one to start. On a GPU it also copies this rank's
    messages to itself, if there are no others.
    """
    anywhere = {path for path, _ in build.chosen}
    agreed = {name: PATHS[name].negotiate(build) for name in PATHS if name in anywhere}

    def make_all() -> tuple[list[ChannelMessages], Sequence[int]]:
        paths, walls = _paths_of(build), None
        if drafted.walls:
            walls = WallChannel(
                drafted.walls,
                drafted.described,
                build.whole.arrays,
                drafted.operation,
                build.world.guard,
                is_alone=all(path.to_self for path in paths),
            )
            if walls.has_copies:
                paths = []
        carried = [
            channel_messages
            for path in paths
            if build.job(path).messages
            for channel_messages in path.channels(build, agreed.get(path.name))
        ]
        if drafted.poisons:
            from halox.plans.poison import PoisonChannel

            poison = PoisonChannel(build.whole, drafted.walls, drafted.described, drafted.device)
            carried.insert(0, ChannelMessages("poison", poison, ()))
        if walls is not None:
            place = 0 if drafted.operation == "add" else len(carried)
            messages = build.whole.messages if walls.has_copies else ()
            carried.insert(place, ChannelMessages("walls", walls, messages))
        channels = [each.channel for each in carried]
        counts = sum(c.needs_host for c in channels), sum(not c.is_movable for c in channels)
        return carried, counts

    # Page-locking and compiling can fail on one rank alone.
    channels, (needing_host, fixed) = build.world.total(make_all, MAKING)
    return _Made(channels, bool(needing_host), not fixed)
