"""Many exchanges with random delays of ranks: ``python -m tests.faults.soak EXCHANGES RESULT`` on ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.calls import CPU_PATHS

SEED = 20261122
_STEP = 1000.0
_LATE = 0.02
_MOST_LATE_S = 0.002


def soak(path: str, exchanges: int) -> dict[str, Any]:
    """Return the number of wrong fields after many exchanges; values encode the cell and the number of the exchange."""
    os.environ["HALOX_NODE"] = "rank" if path == "host/mpi" else ""
    from mpi4py import MPI

    import halox

    comm = MPI.COMM_WORLD
    mine = np.random.default_rng([SEED, comm.rank])
    same = np.random.default_rng([SEED, 99])
    corners = path != "host/direct"  # plans pack the short runs of corners instead
    grid = halox.Grid(
        (3 * comm.size, 3, 40),
        periodic=True,
        proc_shape=(comm.size, 1, 1),
        corners=corners,
        path=path,
        device="cpu",
    )
    shared = path == "host/shared"
    u, v = (np.empty(grid.padded_shape) if shared else grid.empty() for _ in "uv")
    places = _coded(grid)
    # Without corners an exchange fills only the faces of the halo.
    outside = sum(
        np.meshgrid(
            *[(np.arange(n) == 0) | (np.arange(n) == n - 1) for n in u.shape], indexing="ij"
        )
    )
    stays = (outside > 1) & (not corners)
    plan = grid.plan(u, v)
    taken = {f"{row.path}/{row.protocol}" for row in plan.explain().rows if row.peer != comm.rank}
    assert taken == {path}, taken
    kinds = same.integers(0, 3, exchanges)
    late = mine.random((exchanges, 2))
    wrong = 0
    inside = grid.layout(u).interior

    def dawdle(number: int, place: int) -> None:
        if late[number, place] < _LATE:
            time.sleep(mine.random() * _MOST_LATE_S)

    for number in range(exchanges):
        fields = (u,) if kinds[number] == 0 else (u, v)
        for at, field in enumerate(fields):
            field[...] = -1.0
            field[inside] = places[inside] + _STEP * number + 0.5 * at
        dawdle(number, 0)
        if kinds[number] == 2:
            plan.start()
            dawdle(number, 1)
            plan.finish()
        else:
            grid.exchange(*fields)
        for at, field in enumerate(fields):
            wanted = np.where(stays, -1.0, places + _STEP * number + 0.5 * at)
            wrong += not np.array_equal(field, wanted)
    grid.close()
    return {"exchanges": exchanges, "wrong": wrong}


def _coded(grid: Any) -> np.ndarray:
    indices = grid.indices(halo=True)
    found: np.ndarray = sum(
        (i % n) * f for i, n, f in zip(indices, grid.grid_shape, (131.0, 41.0, 1.0), strict=True)
    )
    return found


def main(exchanges: str, place: str) -> None:
    from mpi4py import MPI

    found = {path: MPI.COMM_WORLD.gather(soak(path, int(exchanges))) for path in CPU_PATHS}
    if MPI.COMM_WORLD.rank == 0:
        Path(place).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
