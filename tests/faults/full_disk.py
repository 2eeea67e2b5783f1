"""Saves to a disk that has room for one checkpoint and not for a second.

``python -m tests.faults.full_disk FOLDER OUT``

Rank 0 writes as JSON the error of every rank, and whether the first checkpoint was as it had been.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import halox
from halox.errors import CheckpointError


def main(folder: str, out: str) -> None:
    """Save, save again, load; for a group and a file."""
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
            grid.save(path, u=u)  # there is room again
            found[name] = [grid.comm.gather(error), bool(right)]
        grid.comm.Barrier()
        if grid.rank == 0:
            Path(out).write_text(json.dumps([found, sorted(os.listdir(folder))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
