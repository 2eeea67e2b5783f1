"""``python3 -m tools.scaling`` measures the making of grids, plans and reductions among simulated ranks.

It prints a table, by default for 64, 4,096 and 100,000 ranks. One process makes the objects of one rank, and
`tests.fakes.simulated` answers for the other ranks. Calls are Python calls in halox. Bytes are sent and received by
the rank, in messages and collectives. Memory is the largest amount that was in use during the making beyond the amount
before, with NumPy's arrays. The time is the least of several makings, without the time that the simulation takes.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import halox
from halox.tables import text_table
from tests.fakes.simulated import SimulatedRanks, simulated, torus_of

CELLS = 8
"""Cells of a block along each axis."""

REDUCTIONS = (
    "sum of a field",
    "reproducible sum",
    "norm of an expression",
    "allreduce of 4 numbers",
)
"""Names of the measured calls of an existing grid, all on the host."""

_HALOX = str(Path(halox.__file__).parent)

Make = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """Cost of one making on one rank."""

    calls: int
    bytes_sent: int
    bytes_received: int
    memory_bytes: int
    time_s: float


def count_calls(action: Make) -> int:
    """Return the number of Python calls in halox."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(_HALOX)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def peak_bytes(action: Make) -> int:
    """Return the most memory that Python and NumPy allocate during an action, beyond the memory in use before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        made = action()
        _, peak = tracemalloc.get_traced_memory()
        del made
    finally:
        tracemalloc.stop()
    return peak - before


def cost_of(comm: SimulatedRanks, make: Make, repeats: int = 3) -> Cost:
    """Measure an action that makes an object; it is run several times."""
    traffic = comm.cast.traffic
    make()  # imports and caches
    sent, received = traffic.bytes_sent, traffic.bytes_received
    calls = count_calls(make)
    sent, received = traffic.bytes_sent - sent, traffic.bytes_received - received
    times = []
    for _ in range(repeats):
        simulation_s, start = traffic.simulation_s, time.perf_counter()
        make()
        times.append(time.perf_counter() - start - (traffic.simulation_s - simulation_s))
    return Cost(calls, sent, received, peak_bytes(make), min(times))


@contextmanager
def blocks(ranks: int) -> Iterator[tuple[SimulatedRanks, dict[str, Make]]]:
    """Context manager: simulated ranks with blocks of three axes, and the objects to make, by name."""
    torus = torus_of(ranks)
    shape = [CELLS * parts for parts in torus]
    with simulated(torus) as comm, ExitStack() as stack:

        def grid() -> Any:
            return halox.Grid(
                shape, halo=1, periodic=True, proc_shape=torus, comm=comm, device="cpu"
            )

        own = stack.enter_context(grid())
        u, four = own.zeros(), own.allreduce(np.zeros(4))
        reductions: list[Make] = [
            lambda: own.sum(u),
            lambda: own.sum(u, reproducible=True),
            lambda: own.norm("u * u", u=u),
            lambda: own.allreduce(four),
        ]
        yield (
            comm,
            {
                "grid, made and closed": lambda: grid().close(),
                "plan": lambda: own.plan(u),
                **dict(zip(REDUCTIONS, reductions, strict=True)),
                "allreduce, made and closed": lambda: halox.Allreduce(
                    comm, 4, "f8", device="cpu"
                ).close(),
            },
        )


@contextmanager
def pencils(ranks: int) -> Iterator[tuple[SimulatedRanks, dict[str, Make]]]:
    """Context manager: the same as `blocks` for grids that are divided along two of three axes."""
    torus = torus_of(ranks, 2)
    shape = [4 * parts for parts in (*torus, max(torus))]
    with simulated(torus) as comm, ExitStack() as stack:
        rows, columns = (
            stack.enter_context(
                halox.Grid(shape, halo=0, periodic=True, proc_shape=procs, comm=comm, device="cpu")
            )
            for procs in ((*torus, 1), (torus[0], 1, torus[1]))
        )
        u, v = rows.zeros(), columns.zeros()

        def transpose() -> None:
            with halox.Transpose(rows, columns) as made:
                made.forward(u, v)

        yield (
            comm,
            {
                "transpose, made and called": transpose,
                "FFT, made and closed": lambda: halox.FFT(rows).close(),
            },
        )


def costs(ranks: int) -> dict[str, Cost]:
    """Return the costs of all kinds of objects among simulated ranks."""
    found = {}
    for division in blocks, pencils:
        with division(ranks) as (comm, makes):
            found.update({name: cost_of(comm, make) for name, make in makes.items()})
    return found


def main(words: Sequence[str]) -> None:
    """Print the table of costs on the given numbers of ranks."""
    rows: list[Sequence[str]] = [
        ("object", "ranks", "calls", "sent B", "received B", "memory KiB", "ms")
    ]
    numbers = [int(word) for word in words] or [64, 4096, 100_000]
    found = {ranks: costs(ranks) for ranks in numbers}
    for name in found[numbers[0]]:
        for ranks in numbers:
            cost = found[ranks][name]
            counts = ranks, cost.calls, cost.bytes_sent, cost.bytes_received
            rows.append(
                [
                    name,
                    *(f"{count:,}" for count in counts),
                    f"{cost.memory_bytes / 1024:,.0f}",
                    f"{cost.time_s * 1e3:.1f}",
                ]
            )
    print("\n".join(text_table(rows, left={0})))


if __name__ == "__main__":
    main(sys.argv[1:])
