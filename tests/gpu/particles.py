"""Checks of particles on GPUs against particles on the host of one rank, for one rank or several."""

from __future__ import annotations

from itertools import product
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import halox

SHAPE = (13, 7, 6)


def check_particles(comm: MPI.Intracomm) -> list[str]:
    """Return the cases whose particles differ after some steps: positions, attributes, number and ranks."""
    wrong = []
    for periodic, wall in product(
        ((True, False, True), (False, False, False)), ("reflect", "absorb")
    ):
        rng = np.random.default_rng(4)
        total = 5000
        position = rng.random((total, 3)) * SHAPE - 0.5
        jumps = (rng.random((4, total, 3)) - 0.5) * np.array([0.5, 1, 30, 0.1]).reshape(4, 1, 1)
        attributes: dict[str, Any] = {
            "key": np.arange(total),
            "v": rng.integers(-9, 9, (total, 3)).astype("f4"),
            "z": rng.integers(-9, 9, (total, 2)).astype("c16"),
        }
        found = []
        for device, ranks in (("gpu", comm), ("cpu", MPI.COMM_SELF)):
            with halox.Grid(SHAPE, periodic=periodic, comm=ranks, device=device) as grid:
                own = slice(ranks.rank, None, ranks.size)
                first = {name: values[own] for name, values in attributes.items()}
                p = halox.Particles(grid, position[own], walls=wall, flip="v", **first)
                for jump in jumps:
                    p.position += grid.xp.asarray(jump)[p["key"]]
                    p.sort()
                    p.migrate()
                p["twice"] = 2 * p["v"]
                cells = np.floor(cupy.asnumpy(p.position) + 0.5).astype(int)
                if not (grid.owner(cells) == grid.rank).all():
                    wrong.append(f"owners on the {device}")
                rows = {name: cupy.asnumpy(p[name]) for name in p}
                all_rows = ranks.allgather(rows)
                joined = {name: np.concatenate([one[name] for one in all_rows]) for name in rows}
                order = np.argsort(joined["key"])
                found.append({name: values[order].tobytes() for name, values in joined.items()})
                if p.count() != len(order):
                    wrong.append(f"count on the {device}")
        wrong += [
            f"{name} {periodic} {wall}" for name in found[0] if found[0][name] != found[1][name]
        ]
    return wrong
