"""``halox info --paths``: the path of messages between every two ranks, and why other paths are not possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import halox
from halox import datatypes
from halox.cli import report
from halox.runtime.gpu.devices import array_module, choose_device
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES = 64 << 10
_PAIRS_SHOWN = 6

Hop = tuple[int, int, Any]
"""Sender, receiver, and the row of a report on the message between them."""


def show(comm: MPI.Intracomm, *, as_json: bool) -> int:
    """Print the matrix on rank 0; collective."""
    hops = collect(comm)
    if hops is not None:
        figures = figures_of(comm.size, hops)
        print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return 0


def collect(comm: MPI.Intracomm) -> list[Hop] | None:
    """Plan messages between all ranks, and return the path of each message on rank 0.

    Collective. Only the messages that make a plan are sent.
    """
    world = World(comm, "tune")
    device = world.attempt(lambda: choose_device("auto", world.turn), "the choice of GPUs")
    world.close()
    count = MESSAGE_BYTES // 8
    xp = array_module(device)
    source, target = xp.zeros((comm.size, count)), xp.zeros((comm.size, count))
    whole = datatypes.contiguous(count, "f8")
    sends = [halox.Send(source[peer], whole, peer) for peer in range(comm.size)]
    receives = [halox.Recv(target[peer], whole, peer) for peer in range(comm.size)]
    with halox.Exchange(sends, receives, comm=comm) as exchange:
        rows = exchange.explain().rows
    gathered = comm.gather([(comm.rank, row.peer, row) for row in rows if row.direction == "send"])
    return None if gathered is None else [hop for hops in gathered for hop in hops]


def figures_of(ranks: int, hops: Iterable[Hop]) -> dict[str, Any]:
    """Return a row for each sender, with "path/protocol" by receiver, and the reasons for and against paths."""
    rows = [{"from \\ to": str(n), **dict.fromkeys(map(str, range(ranks)))} for n in range(ranks)]
    why: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    refused: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for sender, receiver, route in sorted(hops, key=lambda hop: hop[:2]):
        name = rows[sender][str(receiver)] = f"{route.path}/{route.protocol}"
        why[f"{name}: {route.reason}"].append((sender, receiver))
        for path, reason in route.why_not.items():
            refused[f"{path}: {reason}"].append((sender, receiver))
    return {
        "ranks": ranks,
        "message": f"{MESSAGE_BYTES} bytes in one run, of an array that halox has not allocated",
        "rows": rows,
        "why": [f"{reason} ({_pairs(pairs)})" for reason, pairs in why.items()],
        "not_possible": [f"{reason} ({_pairs(pairs)})" for reason, pairs in refused.items()],
    }


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{sender} to {receiver}" for sender, receiver in pairs[:_PAIRS_SHOWN])
    more = len(pairs) - _PAIRS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
