"""Makes a plan together with the other ranks: compares both ends of every message, and chooses their routes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halox.engine.arrays import borrow, describe
from halox.engine.capture import is_capturing
from halox.errors import MismatchError, PathError, StateError
from halox.exchange.building import Builder
from halox.exchange.draft import Draft, checked
from halox.exchange.measuring import Stopwatch
from halox.exchange.plan import Plan
from halox.exchange.report import Key, Report, Row
from halox.exchange.selection import (
    End,
    Judge,
    Route,
    choose_route,
    describe_end,
    wished_path,
)
from halox.exchange.surroundings import Surroundings
from halox.messages import check_match

_MAKING = "the making of a plan"


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
        found = checked(draft())
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
    build = Builder(surroundings, drafted, arrays, routes, number)
    made = build.channels()
    messages = (*drafted.sends, *drafted.receives)
    rows = [Row.of(m, route, route.why_not) for m in messages for route, _ in [build.routes[m.key]]]
    operation = "exchange" if drafted.operation == "copy" else "accumulation"
    names = drafted.names or tuple(f"{d.dtype}{list(d.shape)}" for d in described)
    report = Report(world.rank, operation, names, tuple(rows))
    channels, cargoes = [c for c, _ in made], [cargo for _, cargo in made]
    stopwatch = Stopwatch(world, drafted.device, cargoes)
    plan = Plan(channels, report, drafted.sends, world.check_open, stopwatch, guard=world.guard)
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
