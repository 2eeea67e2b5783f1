"""Jobs that save other values to the same paths again and again, and a job that loads them meanwhile.

``python -m tests.faults.replaced FOLDER NAME [OUT]``

Jobs called other than "load" save until there is a file "done". That one writes as JSON the numbers of its loads that
succeeded and failed, and the values of those that are not all of one save.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import halox
from halox.errors import CheckpointError

CELLS = (12, 10)
LOADS = 15
MOST_SAVES = 50_000
PATHS = ("run.zarr", "u.npy")


def save(grid: halox.Grid, folder: Path, name: str) -> None:
    """Save, each time another value."""
    for number in range(MOST_SAVES):
        if (folder / "done").exists():
            break
        value = 2.0 * number + (name == "second")
        u = grid.full(value)
        codecs = "zstd" if number % 2 else None
        with suppress(CheckpointError):  # if the other job is writing
            grid.save(folder / "run.zarr", u=u, v=u, attrs={"value": value}, compressors=codecs)
            grid.save(folder / "u.npy", u=u)
    (folder / f"{name} has ended").touch()


def load(grid: halox.Grid, folder: Path, out: Path) -> None:
    """Load while the others save, and once after them."""
    wait_for(*(folder / path for path in PATHS))
    found: dict[str, Any] = {"succeeded": 0, "failed": 0, "mixed": []}
    for _ in range(LOADS):
        for path in PATHS:
            try:
                count(found, grid, grid.load(folder / path))
            except CheckpointError:
                found["failed"] += 1
    grid.comm.Barrier()
    (folder / "done").touch()
    wait_for(folder / "first has ended", folder / "second has ended")
    for path in PATHS:
        count(found, grid, grid.load(folder / path))
    if grid.rank == 0:
        out.write_text(json.dumps(found))


def count(found: dict[str, Any], grid: halox.Grid, loaded: Any) -> None:
    """Note whether all cells of all ranks are of one save."""
    mine = {float(one) for u in loaded.values() for one in np.unique(grid.interior(u))}
    values = sorted(set.union(mine, loaded.attrs.values(), *grid.comm.allgather(mine)))
    found["succeeded"] += 1
    if len(values) > 1:
        found["mixed"].append(values)


def wait_for(*paths: Path) -> None:
    """Wait for files; the caller's own time limit bounds it."""
    while not all(path.exists() for path in paths):
        time.sleep(0.005)


def main(folder: Path, name: str, *out: str) -> None:
    """Run a job."""
    with halox.Grid(CELLS, device="cpu") as grid:
        if name == "load":
            load(grid, folder, Path(*out))
        else:
            save(grid, folder, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
