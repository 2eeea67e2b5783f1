"""Saves and loads of one field, interleaved with system calls that write and read the same bytes, a file a rank."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from halox.errors import HaloxError
from halox.grid import Grid
from halox.runtime.gpu.devices import to_host

WRITE, SAVE = "os.write, fsync", "grid.save"
READ, LOAD = "os.read", "grid.load"
_PIECE = 16 << 20


@dataclass(frozen=True)
class CheckpointRow:
    """One method: median seconds of the slowest rank, bytes of all ranks, most extra memory of a rank."""

    name: str
    ranks: int
    shape: tuple[int, ...]
    nbytes: int
    seconds: float
    gb_per_s: float
    ratio: float
    """Time over that of plain writes or reads."""

    extra_mib: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure(
    comm: Any,
    shape: tuple[int, ...],
    folder: Path,
    device: Any,
    codecs: tuple[str, ...],
    rounds: int,
) -> list[CheckpointRow]:
    """Measure a float64 field of random numbers, of 24 bits of mantissa, so that codecs find something to compress.

    Reads are of files whose pages have been dropped. Collective; raises `HaloxError` if a load gives other bits.
    """
    with Grid(shape, comm=comm, device=device) as grid:
        values = np.random.default_rng(comm.rank).random(grid.rank_shape)
        values.view("u8")[...] &= np.uint64(0xFFFFFFFFF0000000)
        u, v = grid.empty(), grid.zeros()
        grid.interior(u)[...] = grid.xp.asarray(values)
        raw = values.reshape(-1).view(np.uint8)
        single = folder / f"raw.{comm.rank}"
        names = {None: SAVE} | {codec: f"{SAVE}, {codec}" for codec in codecs}
        loads = {None: LOAD} | {codec: f"{LOAD}, {codec}" for codec in codecs}
        calls: dict[str, Callable[[], Any]] = {WRITE: partial(_write, single, raw)}
        for codec, name in names.items():
            path = folder / f"{codec or 'plain'}.zarr"
            calls[name] = partial(grid.save, path, u=u, compressors=codec)
        calls[READ] = partial(_read, single, raw)
        for codec, name in loads.items():
            calls[name] = partial(grid.load, folder / f"{codec or 'plain'}.zarr", u=v)
        times: dict[str, list[float]] = {name: [] for name in calls}
        extra = dict.fromkeys(calls, 0.0)
        for _ in range(rounds):
            _clear(comm, folder)
            for name, call in calls.items():
                _drop(comm, folder)
                before = _resident_mib(reset=True)
                seconds = _timed(comm, call)
                times[name].append(seconds)
                most = comm.allreduce(_resident_mib() - before, op=_most(comm))
                extra[name] = max(extra[name], most)
            wrong = int((to_host(grid.interior(v)) != values).sum())
            if comm.allreduce(wrong):
                raise HaloxError("a load gave other values than were saved")
        _clear(comm, folder)
    nbytes, rows = 8 * prod(shape), []
    for name, found in times.items():
        seconds = median(found)
        plain = median(times[READ if name.startswith((READ, LOAD)) else WRITE])
        rows.append(
            CheckpointRow(
                name,
                comm.size,
                shape,
                nbytes,
                seconds,
                nbytes / seconds / 1e9,
                seconds / plain,
                max(0.0, extra[name]),
            )
        )
    return rows


def _timed(comm: Any, call: Callable[[], Any]) -> float:
    """Return the seconds of a call on the slowest rank."""
    comm.Barrier()
    begin = time.perf_counter()
    call()
    return float(comm.allreduce(time.perf_counter() - begin, op=_most(comm)))


def _most(comm: Any) -> Any:
    from mpi4py import MPI

    return MPI.MAX


def _write(path: Path, values: Any) -> None:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    view = values.data
    while view:
        view = view[os.write(handle, view[:_PIECE]) :]
    os.fsync(handle)
    os.close(handle)


def _read(path: Path, values: Any) -> None:
    handle = os.open(path, os.O_RDONLY)
    view = values.data
    while view:
        view = view[os.readv(handle, [view[:_PIECE]]) :]
    os.close(handle)


def _clear(comm: Any, folder: Path) -> None:
    """Remove the files of the last round, so that each writes new ones."""
    comm.Barrier()
    if comm.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    comm.Barrier()


def _drop(comm: Any, folder: Path) -> None:
    """Drop all files from the page cache: they have been written through."""
    comm.Barrier()
    if comm.rank == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    comm.Barrier()


def _resident_mib(*, reset: bool = False) -> float:
    """Return the most resident memory since the last reset, or after a reset what is resident now."""
    if reset:
        with suppress(OSError):  # some containers forbid it; the figure is 0 then
            Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    return 0.0
