"""``halox info --paths``: the path of messages between every two ranks, and why other paths are not possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
    mine = [
        (comm.rank, r.peer, Route(r.path, r.protocol, r.reason, r.predicted_us, r.why_not))
        for r in rows
        if r.direction == "send"
    ]
    gathered = comm.gather(mine)
    return None if gathered is None else [hop for hops in gathered for hop in hops]


def figures_of(ranks: int, hops: Iterable[Hop]) -> dict[str, Any]:
    """Return the matrix, and the reasons for and against paths, each with its pairs of ranks.

    ``matrix[sender][receiver]`` is "path/protocol", None for pairs without a hop.
    """
    matrix: list[list[str | None]] = [[None] * ranks for _ in range(ranks)]
    predicted: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
    why: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    refused: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for sender, receiver, route in sorted(hops, key=lambda hop: hop[:2]):
        name, pair = f"{route.path}/{route.protocol}", (sender, receiver)
        matrix[sender][receiver], predicted[sender][receiver] = name, route.predicted_us
        why[name, route.reason].append(pair)
        for refusal in route.why_not.items():
            refused[refusal].append(pair)
    message = f"{MESSAGE_BYTES} bytes in one run, of an array that halox has not allocated"
    figures = {"ranks": ranks, "message": message, "matrix": matrix, "predicted_us": predicted}
    for title, reasons in (("why", why), ("not_possible", refused)):
        figures[title] = [
            {"path": path, "why": reason, "pairs": pairs}
            for (path, reason), pairs in reasons.items()
        ]
    return figures


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as text: the matrix with one row per sender, and the reasons below."""
    rows = [
        {"from \\ to": str(sender)} | {str(to): cell or "-" for to, cell in enumerate(row)}
        for sender, row in enumerate(figures["matrix"])
    ]
    lines = [f"ranks: {figures['ranks']}", f"message: {figures['message']}", ""]
    lines += report.table(rows)
    for title in ("why", "not_possible"):
        if figures[title]:
            lines += ["", f"{title.replace('_', ' ')}:"]
            lines += [f"  {e['path']}: {e['why']} ({_pairs(e['pairs'])})" for e in figures[title]]
    return "\n".join(lines)


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{sender} to {receiver}" for sender, receiver in pairs[:_PAIRS_SHOWN])
    more = len(pairs) - _PAIRS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
