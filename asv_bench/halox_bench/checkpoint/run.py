"""Saves and loads of one field, interleaved with system calls that write and read the same bytes, a file a rank."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from halox.checkpoint.store import load_tensorstore
from halox.errors import HaloxError
from halox.grid import Grid
from halox.runtime.gpu.devices import to_host
from halox.runtime.gpu.memory import pinned
from halox_bench.common.rows import BASELINE, SELECTED, Row
from halox_bench.ranks.bench import Bench

WRITE, SAVE, TO_HOST = "os.write, fsync", "grid.save", "copy to the host"
READ, LOAD, TO_DEVICE = "os.read", "grid.load", "copy to the GPU"

CPU_TARGET, GPU_TARGET, TARGET_MIB = 1.3, 1.2, 256

_AIMED_BYTES = 1 << 30
"""Fewest bytes for which there are targets: with fewer, files and folders take the time."""

_PIECE = 16 << 20
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class CheckpointCase:
    """A field of float64 cells, and the loads that are measured beside the plain one.

    Attributes
    ----------
    onto : tuple of tuple of int
        Process grids for further loads of the field.
    """

    shape: tuple[int, ...]
    codecs: tuple[str, ...] = ()
    onto: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def details(self) -> dict[str, Any]:
        return {"shape": self.shape, "nbytes": 8 * prod(self.shape)}


def verdict(target: float | None, ratio: float, extra_mib: float | None) -> str:
    """Return whether the time and the memory met their targets; empty without a target."""
    if target is None:
        return ""
    found = f"{target} x {'met' if ratio <= target else 'missed'}"
    if extra_mib is None:
        return f"{found}, MiB unknown"
    return found if extra_mib <= TARGET_MIB else f"{found}, {TARGET_MIB} MiB missed"


class CheckpointBench(Bench):
    """Saves and loads of all ranks, in a folder of their own.

    Parameters
    ----------
    parent : pathlib.Path or None
        Folder for that folder; by default the system's for temporary files.
    rounds : int
        Samples of each method.
    """

    def __init__(self, comm: Any, parent: Path | None, device: str, rounds: int) -> None:
        self.comm, self._parent, self._device, self._rounds = comm, parent, device, rounds
        if comm.bcast(parent is not None and not parent.is_dir()):
            raise HaloxError(f"--folder {parent}: there is no such folder")

    def heading(self) -> str:
        return (
            "medians of the slowest rank; files are written through, and read from the disk\n"
            f"targets, from 1 GiB on: {CPU_TARGET} x plain calls, and {TARGET_MIB} MiB a rank;\n"
            f"for saves from a GPU {GPU_TARGET} x the longer of plain write and copy to the host"
        )

    def measure(self, case: CheckpointCase) -> list[Row]:
        """Measure one field."""
        comm = self.comm
        own = tempfile.mkdtemp(prefix="halox-bench-", dir=self._parent) if comm.rank == 0 else None
        folder = Path(comm.bcast(own))
        try:
            return measure(comm, case, folder, self._device, self._rounds)
        finally:
            if comm.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def measure(comm: Any, case: CheckpointCase, folder: Path, device: Any, rounds: int) -> list[Row]:
    """Measure a field of random numbers with 24 bits of mantissa, which codecs can compress.

    Files are read after their pages have been dropped. Collective; raises `HaloxError` if a load gives other bits.
    """
    shape, codecs = case.shape, case.codecs
    load_tensorstore()  # keeps the import out of the first save's time
    with ExitStack() as stack:
        grid = stack.enter_context(Grid(shape, comm=comm, device=device))
        values = np.random.default_rng(comm.rank).random(grid.rank_shape)
        values.view("u8")[...] &= np.uint64(0xFFFFFFFFF0000000)
        u, v = grid.empty(), grid.zeros()
        grid.interior(u)[...] = grid.xp.asarray(values)
        raw = values.reshape(-1).view(np.uint8)
        single, plain = folder / f"raw.{comm.rank}", folder / "plain.zarr"
        calls: dict[str, Callable[[], Any]] = {WRITE: partial(_write, single, raw)}
        if grid.xp is not np:
            calls[TO_HOST] = partial(_copy, grid, to_host=True)
        calls[SAVE] = partial(grid.save, plain, u=u)
        for codec in codecs:
            path = folder / f"{codec}.zarr"
            calls[f"{SAVE}, {codec}"] = partial(grid.save, path, u=u, compressors=codec)
        calls[READ] = partial(_read, single, raw)
        if grid.xp is not np:
            calls[TO_DEVICE] = partial(_copy, grid, to_host=False)
        calls[LOAD] = partial(grid.load, plain, u=v)
        for codec in codecs:
            calls[f"{LOAD}, {codec}"] = partial(grid.load, folder / f"{codec}.zarr", u=v)
        others = []
        for proc_shape in case.onto:
            name = f"{LOAD} on {'x'.join(map(str, proc_shape))}"
            other = Grid(shape, comm=comm, device=device, proc_shape=proc_shape)
            others.append((name, stack.enter_context(other), other.zeros()))
            calls[name] = partial(other.load, plain, u=others[-1][2])
        times: dict[str, list[float]] = {name: [] for name in calls}
        extra: dict[str, list[float | None]] = {name: [] for name in calls}
        for _ in range(rounds):
            _clear(comm, folder)
            for name, call in calls.items():
                _drop(comm, folder)
                before = _resident_mib(reset=True)
                times[name].append(_timed(comm, call))
                extra[name] += comm.allgather(_grown(before))
        expected = _signature(grid, u)
        for name, on, loaded in [(LOAD, grid, v), *others]:
            if _signature(on, loaded) != expected:
                raise HaloxError(f"{name} gave other values than were saved")
        _clear(comm, folder)
    return [row_of(case, name, comm.size, times, extra[name]) for name in calls]


def row_of(
    case: CheckpointCase,
    name: str,
    ranks: int,
    times: dict[str, list[float]],
    extra: list[float | None],
) -> Row:
    """Return the row of a method.

    Its details: ``ratio``, the time over plain writes or reads, or over the copy between GPU and host if that takes
    longer; ``target``, the largest ratio allowed, None for plain calls, codecs and small fields; ``extra_mib``, the
    most extra memory of a rank, None if the system hides it.
    """
    middle = {one: median(found) for one, found in times.items()}
    is_reading = name.startswith((READ, LOAD, TO_DEVICE))
    copies = middle.get(TO_DEVICE if is_reading else TO_HOST, 0.0)
    plain, seconds = middle[READ if is_reading else WRITE], middle[name]
    nbytes = case.details["nbytes"]
    target = None
    if name.startswith((SAVE, LOAD)) and "," not in name and nbytes >= _AIMED_BYTES:
        target = GPU_TARGET if copies and not is_reading else CPU_TARGET
        plain = max(plain, copies)
    known = [mib for mib in extra if mib is not None]
    extra_mib = max(known) if len(known) == len(extra) else None
    ratio = seconds / plain
    kind = SELECTED if name.startswith((SAVE, LOAD)) else BASELINE
    return Row(case.name, kind, name, us=1e6 * seconds, checked=True, details=case.details).with_(
        ranks=ranks,
        seconds=seconds,
        gb_per_s=nbytes / seconds / 1e9,
        ratio=ratio,
        target=target,
        extra_mib=extra_mib,
        verdict=verdict(target, ratio, extra_mib),
    )


def _signature(grid: Grid, field: Any) -> int:
    """Return a sum of the bits of all cells, each weighted by its place; collective."""
    first, *others = [np.arange(cut.start, cut.stop, dtype=np.uint64) for cut in grid.owned]
    found, plane = np.uint64(0), np.uint64(prod(grid.grid_shape[1:]))
    weights: Any = np.zeros((), np.uint64)
    for axis, extent in zip(others, grid.grid_shape[1:], strict=True):
        weights = weights[..., None] * np.uint64(extent) + axis
    weights = weights.reshape(-1) * np.uint64(2) + np.uint64(1)
    with np.errstate(over="ignore"):  # modulo 2^64
        for number, row in zip(first, grid.interior(field), strict=True):
            bits = np.ascontiguousarray(to_host(row)).reshape(-1).view(np.uint64)
            found += bits @ weights + bits.sum() * np.uint64(2) * number * plane
    return int(sum(grid.comm.allgather(int(found))) % (1 << 64))


def _copy(grid: Grid, *, to_host: bool) -> None:
    """Copy the bytes of a rank's cells between GPU and page-locked memory, the same 64 MiB again and again."""
    nbytes = 8 * prod(grid.rank_shape)
    size = min(nbytes, _COPY_BYTES)
    buffer = pinned(size)
    on_gpu = grid.xp.empty(size, np.uint8)
    host, device = int(buffer.array.ctypes.data), int(on_gpu.data.ptr)
    runtime, stream = grid.xp.cuda.runtime, grid.xp.cuda.get_current_stream()
    for start in range(0, nbytes, size):
        count = min(size, nbytes - start)
        if to_host:
            runtime.memcpyAsync(host, device, count, runtime.memcpyDeviceToHost, stream.ptr)
        else:
            runtime.memcpyAsync(device, host, count, runtime.memcpyHostToDevice, stream.ptr)
    stream.synchronize()
    buffer.close()


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


def _resident_mib(*, reset: bool = False) -> float | None:
    """Return the most resident memory since the last reset, or after a reset the present one; None if unknown."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # some containers forbid it
            return None
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 1024
    return None


def _grown(before: float | None) -> float | None:
    after = _resident_mib()
    return None if before is None or after is None else max(0.0, after - before)
