"""Saves to a disk that has room for one checkpoint only: ``python -m tests.faults.full_disk FOLDER OUT``.

Rank 0 writes as JSON the error of every rank, and whether the first checkpoint stayed intact.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import halox
from halox.errors import CheckpointError


def main(folder: str, out: str) -> None:
    """Save a small field, fail to save a large one, and load the small one, for a Zarr group and a ``.npy`` file."""
    found = {}
    with halox.Grid((64, 60)) as grid:
        u, large = grid.ones(), grid.zeros(components=100)
        for name in ("run.zarr", "u.npy"):
            path = f"{folder}/{name}"
            grid.save(path, u=u)
            error = ""
            try:
                grid.save(path, u=large)
            except CheckpointError as caught:
                error = str(caught)
            right = grid.sum(grid.load(path)["u"]) == 64 * 60
            grid.save(path, u=u)  # succeeds if the failed save has removed its files
            found[name] = [grid.comm.gather(error), bool(right)]
        grid.comm.Barrier()
        if grid.rank == 0:
            Path(out).write_text(json.dumps([found, sorted(os.listdir(folder))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
