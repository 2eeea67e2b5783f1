"""Memory that halox keeps after objects are released: ``python -m tests.faults.leaks REPEATS RESULT`` on ranks."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_WARM = 15
_FIELDS = 8


def main(repeats: str, place: str) -> None:
    """Repeat every story, and write the growth of memory after the warm-up."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found = {"a field that outlives its grid": [outliving(comm)]}
    for name, once in STORIES.items():
        for number in range(_WARM):
            once(comm, number)
        before = _taken()
        for number in range(_WARM, _WARM + repeats_of(name, int(repeats))):
            once(comm, number)
        found[name] = [{key: after - before[key] for key, after in _taken().items()}]
    everywhere = comm.gather(found)
    if everywhere is not None:
        lists = {name: [one[name][0] for one in everywhere] for name in found}
        Path(place).write_text(json.dumps(lists))


def outliving(comm: Any) -> dict[str, int]:
    """Return the growth of memory when fields are dropped after their grids were closed."""
    import halox

    shape = (500 * comm.size, 800)

    def once() -> None:
        with halox.Grid(shape, proc_shape=(comm.size, 1), comm=comm, device="cpu") as g:
            u = g.ones()
        assert u.sum() == u.size
        del u

    once()
    before = _taken()
    for _ in range(_FIELDS):
        once()
    return {key: after - before[key] for key, after in _taken().items()}


def grids_closed(comm: Any, number: int) -> None:
    _grid(comm, number).close()


def grids_dropped(comm: Any, number: int) -> None:
    _grid(comm, number)
    if number % 10 == 0:
        gc.collect()


def _grid(comm: Any, number: int) -> Any:
    import halox

    g = halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu")
    u = g.full(number)
    g.exchange(u)
    assert g.max(u) == number == u[0, 0]
    return g


def fields_and_plans(comm: Any, number: int) -> None:
    """Make a field and a plan; all repeats use one grid."""
    import halox

    if "g" not in _KEPT:
        _KEPT["g"] = halox.Grid((8 * comm.size, 64), periodic=True, comm=comm, device="cpu")
    g = _KEPT["g"]
    u, v = g.full(number), np.full(g.padded_shape, 1.0 * number)
    u[0], v[0] = -1.0, -1.0
    g.exchange(u)
    plan = g.plan(u, v)
    plan()
    assert (u == number).all() and (v == number).all()


def exchanges(comm: Any, number: int) -> None:
    import halox
    from halox import Recv, Send

    mine, theirs = np.full(4, comm.rank), np.empty(4, int)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends, receives = [Send(mine, "i8", right, count=4)], [Recv(theirs, "i8", left, count=4)]
    with halox.Exchange(sends, receives, comm=comm) as exchange:
        exchange()
    assert (theirs == left).all()


def allreduces(comm: Any, number: int) -> None:
    import halox

    with halox.Allreduce(comm, 4, "f8", device="cpu") as reduce:
        assert (reduce(np.full(4, 1.0)) == comm.size).all()


STORIES: dict[str, Callable[[Any, int], None]] = {
    "grids that are closed": grids_closed,
    "grids that are dropped": grids_dropped,
    "fields and plans of one grid": fields_and_plans,
    "exchanges that are closed": exchanges,
    "allreduces that are closed": allreduces,
}
_KEPT: dict[str, Any] = {}


def repeats_of(name: str, repeats: int) -> int:
    """Return the repeats of a story: all for grids, where most known leaks were, otherwise a half."""
    return repeats if name.startswith("grids") else repeats // 2


def _taken() -> dict[str, int]:
    """Return the number of memory maps of this process, its resident bytes, and its resident bytes in shared memory.

    A page of shared memory counts from this process's first access until its release. Open MPI's segments and the
    pages of other processes do not count.
    """
    gc.collect()
    maps = Path("/proc/self/smaps").read_text()
    heads = re.findall(r"^[0-9a-f]+-[0-9a-f]+ .*$", maps, re.M)
    resident = [int(kib) << 10 for kib in re.findall(r"^Rss: +(\d+) kB$", maps, re.M)]
    pairs = list(zip(heads, resident, strict=True))
    return {
        "maps": len(heads),
        "resident": sum(resident),
        "shared": sum(n for head, n in pairs if "/dev/shm/" in head and "sm_segment" not in head),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
