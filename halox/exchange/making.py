"""Makes a plan together with the other ranks: compares both ends of every message, and chooses their routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from halox.errors import HaloxError, MismatchError, PathError, StateError
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
from halox.runtime.arrays import Described, HostArray
from halox.runtime.context import Context
from halox.runtime.gpu.streams import is_capturing
from halox.runtime.world import World, raise_together

_MAKING = "the making of a plan"


@dataclass(frozen=True)
class _Said:
    """A rank's part of the agreement on a plan, as far as it does not belong to single messages.

    Attributes
    ----------
    wish : str or None
        Path asked for.
    on_gpu : bool
    sends, receives : Counter
        Messages to and from each rank.
    operation : str
    numbers : tuple of int
        Of the arrays, where the grid has made them.
    specs : tuple of str
        For each field how its axes are read.
    closed : tuple of int
        Numbers of plans that it has closed, and others may not have.
    plans : int
        Number of the last plan that it has made on these ranks.
    floats : bool
        Whether the plan may serve other arrays, as of `Draft`.
    """

    wish: str | None
    on_gpu: bool
    sends: Counter[int]
    receives: Counter[int]
    operation: str
    numbers: tuple[int, ...]
    specs: tuple[str, ...]
    closed: tuple[int, ...]
    plans: int
    floats: bool


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
    drafted: Draft | None = None
    arrays: Sequence[HostArray] | Sequence[Described] = ()

    def prepared() -> _Said:
        nonlocal drafted, arrays
        wish = wished_path(path)
        found = draft()
        arrays = checked(found)
        if found.device is not None:
            if is_capturing(None):
                raise StateError(
                    "the current stream is being captured, and making a plan needs the host; make the plan before "
                    "the capture (grid.plan, or one grid.exchange of these fields) and call it in there"
                )
            from halox.runtime.gpu.cuda import cupy

            context.use_device(found.device)
            cupy().cuda.Device(found.device).synchronize()
        drafted = found
        return _Said(
            wish,
            found.device is not None,
            Counter([m.peer for m in found.sends]),
            Counter([m.peer for m in found.receives]),
            found.operation,
            found.numbers,
            found.specs,
            context.leftovers.closed,
            world.ranks.plans,
            found.floats,
        )

    said: list[_Said] = world.gather_result(prepared, _MAKING)
    assert drafted is not None
    # One more than any rank has reached: ranks whose calls differed may have begun other plans.
    number = world.ranks.plans = 1 + max(one.plans for one in said)
    _check_alike(said)
    _check_counts(said)
    if context.device_arena is not None:
        # All ranks' GPUs have been idle since the first of them came here.
        context.device_arena.reclaim()
    context.leftovers.reclaim([one.closed for one in said])
    on_gpu = any(one.on_gpu for one in said)
    selection = _selection(context, drafted, on_gpu)
    costs = context.once(costs_of) if on_gpu else Costs.default()
    # What other arrays of the layout shall use cannot depend on where these lie.
    floats = all(one.floats and (world.size == 1 or not one.on_gpu) for one in said)
    whole = Job(arrays, drafted.sends, drafted.receives, drafted.operation)
    ends = {
        m.key: describe_end(m, drafted.described, context, floats=floats) for m in whole.messages
    }
    choose = partial(choose_route, selection=selection, costs=costs, wish=said[0].wish)
    routes, error = _choose_routes(world, whole, ends, choose)
    build = Build(context, whole, drafted.device, routes, number)
    built = build_channels(build, error)
    rows = [Row.of(m, build.routes[m.key][0]) for m in whole.messages]
    operation = "exchange" if drafted.operation == "copy" else "accumulation"
    names = drafted.names or tuple(f"{d.dtype}{list(d.shape)}" for d in drafted.described)
    report = Report(world.rank, operation, names, tuple(rows))
    plan = Plan(
        [one.channel for one in built.channels],
        report,
        drafted.sends,
        world.check_open,
        partial(context.leftovers.add, number),
        Timer(world, drafted.device, built.channels),
        # A run that is a launch and no more is not counted, on any rank.
        world.ticker(call, number) if built.needs_host else None,
        guard=world.guard,
    )
    plan.floats = floats and built.is_movable
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


def _check_counts(said: Sequence[_Said]) -> None:
    """Compare numbers of messages between every two ranks, so that no step can deadlock; raises on all alike."""
    errors: list[tuple[int, type[Exception], str]] = []
    for rank, one in enumerate(said):
        for peer, other in enumerate(said):
            if other.sends[rank] != one.receives[peer]:
                text = (
                    f"rank {peer} sends {other.sends[rank]} message(s) to rank {rank}, which receives "
                    f"{one.receives[peer]} from it; every send needs a receive with the same tag"
                )
                errors.append((rank, MismatchError, text))
                break
    if errors:
        raise_together(errors, len(said), None)


def _choose_routes(
    world: World,
    whole: Job,
    ends: Mapping[Key, EndpointInfo],
    choose: Callable[..., Route],
) -> tuple[dict[Key, tuple[Route, EndpointInfo]], HaloxError | None]:
    """Swap both ends' descriptions with every peer, compare signatures, and choose each message's route.

    Returns
    -------
    dict
        For each message its route and what its other end said.
    HaloxError or None
        What is wrong with a message, for the ranks to agree on.
    """
    records: dict[int, dict[tuple[str, int], EndpointInfo]] = {m.peer: {} for m in whole.messages}
    for (direction, peer, tag), end in ends.items():
        records[peer][direction, tag] = end
    own = {world.rank: records.pop(world.rank)} if world.rank in records else {}
    theirs = own | world.swap(records, sorted(records), _MAKING)
    routes: dict[Key, tuple[Route, EndpointInfo]] = {}
    opposite = {"send": "receive", "receive": "send"}
    try:
        for message in whole.messages:
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
    except (MismatchError, PathError) as error:
        return routes, error
    return routes, None
