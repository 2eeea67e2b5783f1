"""``halox bench checkpoint``: saves and loads of a field, in turns with system calls for the same bytes, a file a rank.

Files are written through, and dropped from the page cache before they are read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import halox
from halox.errors import HaloxError
from halox.runtime.world import load_mpi
from halox_bench.bench import MIB, NAMED, Bench
from halox_bench.kernels import copy, pinned
from halox_bench.kinds import Kind, Option, shapes
from halox_bench.rows import BASELINE, Column, Row

WRITE, SAVE, TO_HOST = "os.write, fsync", "grid.save", "copy to the host"
READ, LOAD, TO_DEVICE = "os.read", "grid.load", "copy to the GPU"

_PIECE = 16 * MIB
_COPY_BYTES = 64 * MIB


@dataclass(frozen=True)
class CheckpointCase:
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def details(self) -> dict[str, Any]:
        return {"shape": self.shape, "nbytes": 8 * prod(self.shape)}


def cases(args: argparse.Namespace) -> list[CheckpointCase]:
    cells = args.cells or (((64, 64, 64),) if args.quick else ((512, 512, 512),))
    return [CheckpointCase(shape) for shape in cells]


def measure(bench: Bench, args: argparse.Namespace, case: CheckpointCase) -> list[Row]:
    """Measure one field, in a folder of its own."""
    comm, parent = bench.comm, args.folder
    if comm.bcast(parent is not None and not parent.is_dir()):
        raise HaloxError(f"--folder {parent}: there is no such folder")
    own = tempfile.mkdtemp(prefix="halox-bench-", dir=parent) if comm.rank == 0 else None
    folder = Path(comm.bcast(own))
    rounds = args.repeats or (2 if args.quick else 5)
    try:
        times = _times(bench, case, folder, rounds)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for name, seconds in times.items():
        row = Row(case.name, NAMED if name in (SAVE, LOAD) else BASELINE, name, us=1e6 * seconds)
        speed = case.details["nbytes"] / seconds / 1e9
        rows.append(row.with_(**case.details, gb_per_s=speed))
    for one, two in ((WRITE, TO_HOST), (READ, TO_DEVICE)) if bench.on_gpu else ():
        name, seconds = f"the longer of {one} and {two}", max(times[one], times[two])
        rows.append(Row(case.name, BASELINE, name, us=1e6 * seconds))
    return rows


def _times(bench: Bench, case: CheckpointCase, folder: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of each method on the slowest rank; `WrongResult` if a load gives other cells."""
    comm, shape = bench.comm, case.shape
    with bench.stage.current(), halox.Grid(shape, comm=comm, device=bench.device) as grid:
        values = np.random.default_rng(comm.rank).random(grid.rank_shape)
        u, v = grid.empty(), grid.zeros()
        grid.interior(u)[...] = grid.xp.asarray(values)
        raw = values.reshape(-1).view(np.uint8)
        single, plain = folder / f"raw.{comm.rank}", folder / "plain.zarr"
        grid.save(folder / "first.zarr", u=u)  # keeps imports out of the first save's time
        calls: dict[str, Callable[[], Any]] = {WRITE: partial(_write, single, raw)}
        if bench.on_gpu:
            calls[TO_HOST] = _copying(bench, raw.nbytes, to_host=True)
        calls[SAVE] = partial(grid.save, plain, u=u)
        calls[READ] = partial(_read, single, raw)
        if bench.on_gpu:
            calls[TO_DEVICE] = _copying(bench, raw.nbytes, to_host=False)
        calls[LOAD] = partial(grid.load, plain, u=v)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            _clear(comm, folder)
            for name, call in calls.items():
                _drop(comm, folder)
                begin = time.perf_counter()
                call()
                times[name].append(comm.allreduce(time.perf_counter() - begin, load_mpi().MAX))
                if name == LOAD:
                    same = (grid.interior(v) == grid.interior(u)).all()
                    bench.expect(not same, f"ranks with other cells after {name}")
                    v[...] = 0
    return {name: median(found) for name, found in times.items()}


def _copying(bench: Bench, nbytes: int, *, to_host: bool) -> Callable[[], None]:
    """Return copies of so many bytes between GPU and page-locked memory, the same 64 MiB again and again."""
    size = min(nbytes, _COPY_BYTES)
    buffer, on_gpu = pinned(size), bench.stage.xp.empty(size, np.uint8)

    def call() -> None:
        ends = int(on_gpu.data.ptr), int(buffer.array.ctypes.data)
        for start in range(0, nbytes, size):
            count = min(size, nbytes - start)
            copy(*(ends if to_host else ends[::-1]), count, bench.stage.stream.ptr)
        bench.stage.synchronize()

    return call


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


CHECKPOINT = Kind(
    "checkpoint",
    "saves and loads of a field by all ranks, beside plain writes and reads of the same bytes",
    cases,
    measure,
    (
        Option("--cells", "grids of float64; default: 512x512x512", shapes, metavar="N,MxL"),
        Option("--folder", "where to write; default: a temporary folder", Path, None, "DIR"),
    ),
    (Column("GB/s", "gb_per_s", ".2f"),),
)
