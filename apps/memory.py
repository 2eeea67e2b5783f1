"""Comparison of the memory that a run needs with the free memory, before the run allocates any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import halox

MARGIN_BYTES = 32 << 20
"""Reserve added to every estimate."""


class Share(NamedTuple):
    """Memory of one rank.

    Attributes
    ----------
    place : tuple
        Key of the host or GPU, equal for ranks that share it.
    name : str
        Name of the host or GPU, for error texts.
    needed, free : int
        Bytes that this rank needs, and free bytes of the host or GPU for all its ranks together.
    """

    place: tuple[Any, ...]
    name: str
    needed: int
    free: int


def check_memory(grid: halox.Grid, what: str, needed: Callable[[bool], int], remedy: str) -> int:
    """Check that a problem fits in memory, and return the bytes that all ranks together need.

    Parameters
    ----------
    grid : halox.Grid
        Its device determines the memory: GPU or host.
    what : str
        Name of the problem, for errors.
    needed : callable
        Returns the bytes that this rank needs; its argument is whether all ranks are on one node.
    remedy : str
        Option for a smaller problem, for errors.

    Raises
    ------
    halox.errors.HaloxError
        If the problem exceeds the free memory of a host or GPU; on all ranks.

    Notes
    -----
    Collective.
    """
    place, where, is_one_node = _place(grid)
    mine = Share(place, where, needed(is_one_node), free_bytes(grid))
    shares = grid.comm.allgather(mine)
    lacking = shortage(shares)
    if lacking is not None:
        where, ranks, wanted, free = lacking
        more = "more GPUs or nodes" if grid.device == "gpu" else "more nodes"
        raise halox.errors.HaloxError(
            f"{what} needs {gib(wanted)} of memory {where} for {ranks} rank(s), and {gib(free)} are free "
            f"there; use {remedy}, or {more}"
        )
    return sum(share.needed for share in shares)


def shortage(shares: Sequence[Share]) -> tuple[str, int, int, int] | None:
    """Return the place with the largest shortage, its number of ranks, and the bytes needed and free there.

    None if every place has enough memory.

    Examples
    --------
    >>> shortage([Share((0,), "on a", 5, 12), Share((0,), "on a", 5, 11)])
    >>> shortage([Share((0,), "on a", 5, 9), Share((0,), "on a", 5, 8), Share((1,), "on b", 5, 9)])
    ('on a', 2, 10, 8)
    """
    places: dict[tuple[Any, ...], list[Share]] = {}
    for share in shares:
        places.setdefault(share.place, []).append(share)
    found = [
        (mine[0].name, len(mine), sum(s.needed for s in mine), min(s.free for s in mine))
        for mine in places.values()
    ]
    lacking = [place for place in found if place[2] > place[3]]
    return max(lacking, key=lambda place: place[2] - place[3], default=None)


def free_bytes(grid: halox.Grid) -> int:
    """Return the free bytes of this rank's GPU or host; local."""
    if grid.device == "cpu":
        return host_free_bytes()
    xp = grid.xp
    with xp.cuda.Device(grid.device_id):
        free: int = xp.cuda.runtime.memGetInfo()[0]
        return free + int(xp.get_default_memory_pool().free_bytes())


def host_free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate, within the host's memory and its control groups."""
    limits = [
        int(line.split()[1]) << 10
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    limits += [free for folder in _groups(root) if (free := _group_free(folder)) is not None]
    return max(0, min(limits))


def gib(size: int) -> str:
    """Return a size as text.

    Examples
    --------
    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / 2**30:.3g} GiB" if size < 100 << 30 else f"{size / 2**30:.0f} GiB"


def _place(grid: halox.Grid) -> tuple[tuple[Any, ...], str, bool]:
    """Return the key and the name of this rank's host or GPU, and whether all ranks are on one node; collective."""
    from mpi4py import MPI

    node = grid.comm.Split_type(MPI.COMM_TYPE_SHARED)
    first, is_one_node = node.bcast(grid.rank), node.size == grid.size
    node.Free()
    host = MPI.Get_processor_name()
    if grid.device == "cpu":
        return (first,), f"on {host}", is_one_node
    gpu = grid.xp.cuda.runtime.getDeviceProperties(grid.device_id)
    return (first, bytes(gpu["uuid"])), f"on GPU {grid.device_id} of {host}", is_one_node


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups (version 1 or 2) that may limit memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        yield from [group, *group.parents][: len(group.relative_to(top).parts) + 1]


def _group_free(folder: Path) -> int | None:
    """Return the bytes left under a control group's limit, counting unused file cache as free; None without a limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
            return most - used + int(stat.get(cache, 0))
        except (OSError, ValueError):
            continue  # no such file, or "max"
    return None
