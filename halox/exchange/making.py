"""Makes a plan together with the other ranks: compares both ends of every message, and chooses their routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from halox.errors import MismatchError, PathError, StateError
from halox.exchange.building import build_channels
from halox.exchange.calibration import costs_of
from halox.exchange.costs import Costs
from halox.exchange.draft import Draft, checked
from halox.exchange.measuring import Timer
from halox.exchange.plan import Plan
from halox.exchange.report import Report, Row
from halox.exchange.selection import choose_route, describe_end, wished_path
from halox.paths.base import EndpointInfo, Job, Key, Route, SelectionContext
from halox.paths.build import Build
from halox.paths.messages import check_match
from halox.runtime.arrays import borrow, describe
from halox.runtime.context import Context
from halox.runtime.gpu.streams import is_capturing
from halox.runtime.world import World

_MAKING = "the making of a plan"


@dataclass(frozen=True)
class _Said:
    """A rank's part of the agreement on a plan, as far as it does not belong to single messages.

    Attributes
    ----------
    wish : str or None
        Path asked for.
    on_gpu : bool
    sends : Counter
        Messages to each rank.
    operation : str
    numbers : tuple of int
        Of the arrays, where the grid has made them.
    specs : tuple of str
        For each field how its axes are read.
    closed : tuple of int
        Numbers of plans that it has closed, and others may not have.
    plans : int
        Number of the last plan that it has made on these ranks.
    """

    wish: str | None
    on_gpu: bool
    sends: Counter[int]
    operation: str
    numbers: tuple[int, ...]
    specs: tuple[str, ...]
    closed: tuple[int, ...]
    plans: int


def make_plan(
    context: Context,
    draft: Callable[[], Draft],
    *,
    keep: bool = True,
    path: str | None = None,
    call: str = "start of a plan",
) -> Plan:
    """Make a plan with the other ranks.

    Parameters
    ----------
    context : Context
        The ranks and their shared memory.
    draft : callable
        Returns this rank's `Draft`; may raise a `HaloxError`, which is then raised on all ranks.
    keep : bool
        Whether the plan keeps its arrays alive. If not, its owner must drop it with them.
    path : str, optional
        The path that messages to other ranks must take; by default that of HALOX_PATH, or else the fastest.
    call : str
        The collective call as which runs of the plan are counted.

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
    world = context.world
    wish: str | None = None

    drafted: Draft | None = None

    def prepared() -> _Said:
        nonlocal drafted, wish
        wish = wished_path(path)
        found = checked(draft())
        if found.device is not None and is_capturing(None):
            raise StateError(
                "the current stream is being captured, and making a plan needs the host; make the plan before the "
                "capture (grid.plan, or one grid.exchange of these fields) and call it in there"
            )
        drafted = found
        return _Said(
            wish,
            found.device is not None,
            Counter(m.peer for m in found.sends),
            found.operation,
            found.numbers,
            found.specs,
            context.leftovers.closed,
            world.ranks.plans,
        )

    said: list[_Said] = world.gather_result(prepared, _MAKING)
    assert drafted is not None
    # One more than any rank has reached: ranks whose calls differed may have begun other plans.
    number = world.ranks.plans = 1 + max(one.plans for one in said)
    _check_alike(said)
    described = [describe(array) for array in drafted.arrays]
    if drafted.device is not None:
        from halox.runtime.gpu.cuda import cupy

        context.use_device(drafted.device)
        cupy().cuda.Device(drafted.device).synchronize()
    _check_counts(world, drafted, said)
    if context.device_arena is not None:
        # All ranks' GPUs have been idle since the first of them came here.
        context.device_arena.reclaim()
    context.leftovers.reclaim([one.closed for one in said])
    on_gpu = any(one.on_gpu for one in said)
    selection = _selection(context, drafted, on_gpu)
    costs = context.once(costs_of) if on_gpu else Costs.default()
    ends = {m.key: describe_end(m, described, context) for m in (*drafted.sends, *drafted.receives)}
    choose = partial(choose_route, selection=selection, costs=costs, wish=wish)
    routes = _agree_routes(world, drafted, ends, choose)
    # Views must not keep the arrays alive, or a grid could never let go of a plan.
    arrays = [
        borrow(a) if d.device is None else d for a, d in zip(drafted.arrays, described, strict=True)
    ]
    whole = Job(arrays, drafted.sends, drafted.receives, drafted.operation)
    build = Build(context, whole, drafted.device, routes, number)
    made = build_channels(build)
    rows = [Row.of(m, build.routes[m.key][0]) for m in whole.messages]
    operation = "exchange" if drafted.operation == "copy" else "accumulation"
    names = drafted.names or tuple(f"{d.dtype}{list(d.shape)}" for d in described)
    report = Report(world.rank, operation, names, tuple(rows))
    channels = [one.channel for one in made]
    timer = Timer(world, drafted.device, made)
    # A run that is a launch and no more is not counted, on any rank.
    by_host = world.any_rank(any(channel.needs_host for channel in channels), _MAKING)
    tick = world.ticker(call, number) if by_host else None
    let_go = partial(context.leftovers.add, number)
    plan = Plan(
        channels,
        report,
        drafted.sends,
        world.check_open,
        let_go,
        timer,
        tick,
        guard=world.guard,
    )
    plan.hold(drafted.arrays, alive=keep)
    return plan


def _selection(context: Context, draft: Draft, on_gpu: bool) -> SelectionContext:
    """Return the selection inputs; collective if any rank's arrays are on a GPU."""
    if not on_gpu:
        return SelectionContext(draft.operation)
    topology = context.find_gpus()
    return SelectionContext(draft.operation, topology, context.why_no_device_pointers())


def _check_alike(said: Sequence[_Said]) -> None:
    """Compare what does not belong to single messages; raises on all ranks alike."""
    wishes = [one.wish for one in said]
    if len(set(wishes)) > 1:
        raise MismatchError(
            f"the ranks ask for different paths: {wishes}; give path= and HALOX_PATH alike on all ranks"
        )
    first = said[0]
    for rank, one in enumerate(said):
        if one.operation != first.operation:
            raise MismatchError(
                f"the ranks make different calls: rank 0 makes a plan to {first.operation} halos, rank {rank} one to "
                f"{one.operation} them; make the same call on all ranks"
            )
        for place, (mine, other) in enumerate(zip(first.numbers, one.numbers, strict=False)):
            if mine and other and mine != other:
                raise MismatchError(
                    f"the ranks give different fields: argument {place} is field number {mine} of the grid on rank 0, "
                    f"number {other} on rank {rank}; give the same fields in the same order, on all ranks"
                )
        for place, (spec, theirs) in enumerate(zip(first.specs, one.specs, strict=False)):
            if spec != theirs:
                raise MismatchError(
                    f"the ranks read argument {place} in different ways: rank 0 as {spec}, rank {rank} as {theirs}; "
                    "give the same field on all ranks, and declare it alike"
                )


def _check_counts(world: World, draft: Draft, said: Sequence[_Said]) -> None:
    """Compare numbers of messages between every two ranks, so that later steps cannot deadlock."""
    expected = Counter(m.peer for m in draft.receives)
    error = None
    for peer, one in enumerate(said):
        coming = one.sends[world.rank]
        if coming != expected[peer]:
            error = MismatchError(
                f"rank {peer} sends {coming} message(s) to rank {world.rank}, which receives "
                f"{expected[peer]} from it; every send needs a receive with the same tag"
            )
            break
    world.agree(error, _MAKING)


def _agree_routes(
    world: World,
    draft: Draft,
    ends: Mapping[Key, EndpointInfo],
    choose: Callable[..., Route],
) -> dict[Key, tuple[Route, EndpointInfo]]:
    """Swap both ends' descriptions with every peer, compare signatures, and choose each message's route."""
    peers = sorted({m.peer for m in (*draft.sends, *draft.receives)})
    records: dict[int, dict[tuple[str, int], EndpointInfo]] = {peer: {} for peer in peers}
    for (direction, peer, tag), end in ends.items():
        records[peer][direction, tag] = end
    theirs = world.swap(records, peers, _MAKING)
    routes: dict[Key, tuple[Route, EndpointInfo]] = {}
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
            route = choose(sender, receiver, to_self=to_self)
            routes[message.key] = (route, other)
    except (MismatchError, PathError) as caught:
        error = caught
    world.agree(error, _MAKING)
    return routes
