"""``halox info --paths``: the path of messages between every two ranks, and why other paths are not possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import halox
from halox import datatypes
from halox.cli import report
from halox.paths.base import Route
from halox.runtime.gpu.devices import array_module, choose_device
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES = 64 << 10
_PAIRS_SHOWN = 6


Hop = tuple[int, int, Route]
"""Sender, receiver, and the route between them."""


class Reason(TypedDict):
    """Reason for or against a path, with the pairs of ranks."""

    path: str
    why: str
    pairs: list[tuple[int, int]]


class Figures(TypedDict):
    """Matrix and reasons as plain values.

    ``matrix[sender][receiver]`` is "path/protocol", None for pairs without a hop.
    """

    ranks: int
    message: str
    matrix: list[list[str | None]]
    predicted_us: list[list[float | None]]
    why: list[Reason]
    not_possible: list[Reason]


def show(comm: MPI.Intracomm, *, as_json: bool) -> int:
    """Print the matrix on rank 0; collective."""
    hops = collect(comm)
    if hops is not None:
        figures = figures_of(comm.size, hops)
        print(report.as_json(figures) if as_json else as_text(figures), flush=True)
    return 0


def collect(comm: MPI.Intracomm) -> list[Hop] | None:
    """Plan messages between all ranks, and return the path of each message on rank 0.

    Collective. Only the messages that make a plan are sent.
    """
    world = World(comm, "tune")
    device = world.guarded(lambda: choose_device("auto", world.turn), "the choice of GPUs")
    world.close()
    count = MESSAGE_BYTES // 8
    xp = array_module(device)
    source, target = xp.zeros((comm.size, count)), xp.zeros((comm.size, count))
    whole = datatypes.contiguous(count, "f8")
    sends = [halox.Send(source[peer], whole, peer) for peer in range(comm.size)]
    receives = [halox.Recv(target[peer], whole, peer) for peer in range(comm.size)]
    with halox.Exchange(sends, receives, comm=comm) as exchange:
        rows = exchange.explain().rows
    mine = [
        (comm.rank, r.peer, Route(r.path, r.protocol, r.reason, r.predicted_us, r.why_not))
        for r in rows
        if r.direction == "send"
    ]
    gathered = comm.gather(mine)
    return None if gathered is None else [hop for hops in gathered for hop in hops]


def figures_of(ranks: int, hops: Iterable[Hop]) -> Figures:
    """Return the matrix and the reasons."""
    matrix: list[list[str | None]] = [[None] * ranks for _ in range(ranks)]
    predicted: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
    why: dict[tuple[str, str], list[tuple[int, int]]] = {}
    refused: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for sender, receiver, route in sorted(hops, key=lambda hop: hop[:2]):
        name, pair = f"{route.path}/{route.protocol}", (sender, receiver)
        matrix[sender][receiver], predicted[sender][receiver] = name, route.predicted_us
        why.setdefault((name, route.reason), []).append(pair)
        for path, reason in route.why_not.items():
            refused.setdefault((path, reason), []).append(pair)

    def listed(found: Mapping[tuple[str, str], list[tuple[int, int]]]) -> list[Reason]:
        return [
            {"path": path, "why": reason, "pairs": pairs} for (path, reason), pairs in found.items()
        ]

    return {
        "ranks": ranks,
        "message": f"{MESSAGE_BYTES} bytes in one run, of an array that halox has not allocated",
        "matrix": matrix,
        "predicted_us": predicted,
        "why": listed(why),
        "not_possible": listed(refused),
    }


def as_text(figures: Figures) -> str:
    """Return the figures as text: the matrix with one row per sender, and the reasons below."""
    rows = [
        {"from \\ to": str(sender)} | {str(to): cell or "-" for to, cell in enumerate(row)}
        for sender, row in enumerate(figures["matrix"])
    ]
    lines = [f"ranks: {figures['ranks']}", f"message: {figures['message']}", ""]
    lines += report.table(rows)
    for title, entries in (("why", figures["why"]), ("not possible", figures["not_possible"])):
        if entries:
            lines += ["", f"{title}:"]
            lines += [f"  {e['path']}: {e['why']} ({_pairs(e['pairs'])})" for e in entries]
    return "\n".join(lines)


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{sender} to {receiver}" for sender, receiver in pairs[:_PAIRS_SHOWN])
    more = len(pairs) - _PAIRS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
