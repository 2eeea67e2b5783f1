"""``python3 -m tools.link`` measures exchanges between two nodes over a link of known rate, by default 400 Mbit/s.

Arguments are the rate in Mbit/s, and the delay of a packet in ms (by default 0). The nodes are network namespaces of
this machine with two ranks each (`tests.netns`). The table has the median times of `MPI_Sendrecv`, of an exchange and
of a hierarchical allreduce, beside the least time, which is bytes / rate, and the time of the exchange that
`halox.Grid.predict` predicts. It is measured with one and with two TCP connections of Open MPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import halox
from halox.tables import text_table
from tests import netns

RANKS = 4
SIZES = [1 << n for n in (10, 14, 17, 20, 22)]
"""Bytes of a message."""

_RANK = "measure"


def median_ms(comm: Any, step: Callable[[], object], repeats: int = 9) -> float:
    """Return the median time of a step on the slowest rank, in ms."""
    from mpi4py import MPI

    times = []
    step()
    for _ in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        step()
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return float(np.median(times)) * 1e3


def measure(mbit: int) -> None:
    """Measure on the ranks of both nodes; rank 0 prints the table."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    middle = comm.size // 2
    peer = {middle - 1: middle, middle: middle - 1}.get(comm.rank, MPI.PROC_NULL)

    def sendrecv(nbytes: int) -> Callable[[], object]:
        sent, received = np.zeros((2, nbytes), np.uint8)
        return partial(comm.Sendrecv, sent, peer, 0, received, peer, 0)

    latency_us = median_ms(comm, sendrecv(1), 99) * 1e3
    rows: list[Sequence[str]] = [
        ("bytes", "least ms", "Sendrecv", "exchange", "predicted", "allreduce")
    ]
    for nbytes in SIZES:
        shape, procs = (4 * comm.size, nbytes // 8), (comm.size, 1)
        options: dict[str, Any] = {"comm": comm, "device": "cpu"}
        with (
            halox.Grid(shape, halo=(1, 0), proc_shape=procs, **options) as grid,
            halox.Allreduce(comm, nbytes // 8, "f8", algorithm="hierarchical", device="cpu") as add,
        ):
            u, values = grid.zeros(), np.zeros(nbytes // 8)
            times = [
                nbytes * 8e-3 / mbit,
                median_ms(comm, sendrecv(nbytes)),
                median_ms(comm, partial(grid.exchange, u)),
                predicted_ms(grid, u, (latency_us, mbit / 8e3)),
                median_ms(comm, partial(add, values, values)),
            ]
        rows.append([f"{nbytes:,}", *(f"{ms:.2f}" for ms in times)])
    if comm.rank == 0:
        print(f"latency of MPI_Sendrecv: {latency_us:.0f} us")
        print("\n".join(text_table(rows, left=set())), flush=True)


def predicted_ms(grid: Any, field: Any, network: tuple[float, float]) -> float:
    """Return the predicted time of the exchange in ms, for a network's latency in us and bandwidth in GB/s."""
    if not hasattr(grid, "predict"):
        return float("nan")
    (row,) = grid.predict(
        [grid.size], field, proc_shape=grid.proc_shape, node_ranks=grid.size // 2, network=network
    )
    return float(row["exchange_us"]) / 1e3


def main(words: Sequence[str]) -> None:
    """Start the ranks in two network namespaces."""
    if words[:1] == [_RANK]:
        measure(int(words[1]))
        return
    mbit, delay_ms = (int(words[0]) if words else 400), float(words[1] if words[1:] else 0)
    reason = netns.why_none() or netns.why_no_rate() or (delay_ms and netns.why_no_delay())
    if reason:
        sys.exit(f"tools.link: no link of known rate and delay on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, netns.two_hosts(Path(folder), delay_ms) as hosts:
        hosts.limit_rate(mbit)
        for links in "1", "2":
            print(
                f"{mbit} Mbit/s, delay {delay_ms:g} ms, OMPI_MCA_btl_tcp_links={links}", flush=True
            )
            environment = hosts.environment(RANKS) | {"OMPI_MCA_btl_tcp_links": links}
            environment["PYTHONPATH"] = os.getcwd()
            command = hosts.command(RANKS, ["-m", "tools.link", _RANK, str(mbit)])
            subprocess.run(command, env=environment, check=True, timeout=netns.LIMIT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
