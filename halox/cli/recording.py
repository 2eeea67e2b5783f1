"""Records of all exchanges and reductions of a program, a file a rank, for ``halox run --compare``.

`halox.cli.compare` starts ``python -m halox.cli.recording FOLDER CALLS DEVICE PROGRAM ...`` on each rank. `main` wraps
the public calls of grids and plans, and runs the program; the library has no hook. A record is the digest of a field's
owned cells before a call, which does not depend on the division of the grid, or a result. Sums are exact, and so do not
depend on the division either. A second run names ``CALLS``, whose cells it saves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import blake2b
from inspect import currentframe
from itertools import islice
from math import gcd, prod
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import mpi4py
import numpy as np
from mpi4py.run import run_command_line

from halox.decomposition import FieldLayout
from halox.errors import HaloxError
from halox.grid import Grid
from halox.plans.device_loop import Loop
from halox.plans.plan import Plan
from halox.reductions.statistics import starts_of
from halox.runtime.arrays import as_ndarray
from halox.runtime.gpu.devices import as_device_array, to_host
from halox.runtime.gpu.streams import is_capturing
from halox.runtime.world import load_mpi
from halox.sampling.points import Points

_SUMS = ("sum", "mean", "norm", "dot", "reduce", "allreduce")
_RESULTS = (*_SUMS, "min", "max", "argmin", "argmax", "histogram", "gather")
_FIELDS = {"exchange": None, "dot": 2, "allreduce": 0, "accumulate": 0}
"""Number of leading arguments that are fields, else 1. Cells before `accumulate` lack values that lie in halos."""

_BLOCK = 1 << 18  # cells that are hashed at once; on a GPU 64 times as many
_GAMMA = 0x9E3779B97F4A7C15  # the step of SplitMix64, here from word to word of the whole field
_MOST_FRAMES = 4
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(mpi4py.__file__).parent), "<frozen")


def digest(xp: ModuleType, cells: Any, layout: FieldLayout) -> int:
    """Return the sum modulo 2**64 of a hash of the global index and the bits of each cell that this rank owns.

    ``cells`` are the owned cells, an array of ``xp``. The sum over all ranks is the same for every division.
    """
    starts, total = starts_of(layout), 0
    width = gcd(cells.dtype.itemsize, 8)
    count = cells.dtype.itemsize // width
    most = _BLOCK if xp is np else 64 * _BLOCK
    rows = max(most // max(prod(cells.shape[1:]), 1), 1)
    for first in range(0, len(cells), rows):
        part = xp.ascontiguousarray(cells[first : first + rows])
        words = part.reshape(-1).view(f"u{width}").reshape(-1, count)
        key = xp.zeros((), "u8")
        for axis, extent in enumerate(part.shape):
            along = xp.arange(extent, dtype="u8") + np.uint64(starts[axis] + first * (axis == 0))
            weight = prod(layout.global_shape[axis + 1 :]) * count * _GAMMA
            key = key[..., None] + along * np.uint64(weight % 2**64)
        for number in range(count):
            x = key.reshape(-1) + words[:, number]
            x += np.uint64((number + 1) * _GAMMA % 2**64)
            total += int(_mixed(x).sum(dtype="u8"))
    return total % 2**64


def _mixed(x: Any) -> Any:
    """Mix the bits of integers in place, as SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


class Recorder:
    """Records of one rank in a folder, and the cells of the calls with the numbers ``saved``."""

    def __init__(self, folder: Path, saved: set[int]) -> None:
        self._folder, self._saved, self._rank = folder, saved, load_mpi().COMM_WORLD.rank
        # Lines are written at once, since the rank may be aborted.
        self._file = (folder / f"{self._rank}.calls").open("w", buffering=1)
        self._number = self._entry = 0
        self._is_inside = self._is_counted = False
        self._place: list[str] = []
        self.plans: WeakKeyDictionary[Plan, tuple[Grid, tuple[Any, ...]]] = WeakKeyDictionary()
        # By name and place: the last field exchanged there, and its record.
        self._exchanged: dict[tuple[str, ...], tuple[Any, Grid, Any]] = {}

    def wrap(self, kind: type, name: str) -> None:
        """Record the calls of a method, except calls within another wrapped call."""
        plain = getattr(kind, name)

        def call(owner: Any, *arguments: Any, **options: Any) -> Any:
            if self._is_inside:
                return plain(owner, *arguments, **options)
            if name in _SUMS:  # only sums over axes and products cannot be exact
                op = (*arguments[1:2], options.get("op")) if name == "allreduce" else ()
                options["reproducible"] = options.get("axis") is None and "prod" not in op
            self._is_inside = True
            try:
                named = (value for key, value in options.items() if key != "out")
                fields = *arguments[: _FIELDS.get(name, 1)], *named
                if kind is Grid:
                    is_recorded = self._begin(name, owner, fields)
                else:
                    grid, planned = self.plans.get(owner, (None, ()))
                    is_recorded = self._begin("exchange", grid, arguments or planned)
                result = plain(owner, *arguments, **options)
                if is_recorded and name in _RESULTS and options.get("axis") is None:
                    self._write_result(name, result)
            finally:
                self._is_inside = False
            return result

        setattr(kind, name, call)

    def _begin(self, name: str, grid: Grid | None, fields: tuple[Any, ...]) -> bool:
        """Record the fields of a call; return False for a call without a grid, or under capture."""
        if grid is None or (grid.device_id is not None and is_capturing()):
            return False
        if self._saved and self._number == max(self._saved):
            (self._folder / f"{self._rank}.done").touch()
        self._number, self._entry = self._number + 1, 0
        # Each rank may have a grid of its own with the same cells.
        self._is_counted = grid.size > 1 or self._rank == 0
        frames = list(islice(_frames(currentframe()), _MOST_FRAMES))
        self._place = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
        if self._number in self._saved:  # first, since swapped fields have one name and place
            self._find_stale(fields if name == "exchange" else ())
        for number, field in enumerate(fields, 1):
            try:
                layout = grid.layout(field)
            except HaloxError:  # not a field
                continue
            array = as_ndarray(field) if grid.xp is np else as_device_array(field)
            cells, label = array[layout.interior], _name_of(field, frames) or f"field {number}"
            found, start = digest(grid.xp, cells, layout), starts_of(layout)
            record = self._write(name, label, found, cells, start, layout.global_shape)
            if name == "exchange" and self._saved:
                others = {k: v for k, v in self._exchanged.items() if v[0] is not field}
                self._exchanged = others | {(label, *self._place): (field, grid, record)}
        return True

    def _write_result(self, name: str, result: Any) -> None:
        parts = result.values() if isinstance(result, dict) else result
        for part in parts if isinstance(result, dict | tuple) else (result,):
            values = to_host(() if part is None else part)  # `gather` has no array for most ranks
            found = int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest())
            start = [0] * values.ndim
            self._write(name, "", found * (part is not None), values, start, values.shape)

    def _write(self, name: str, label: str, found: int, cells: Any, start: Any, shape: Any) -> Any:
        """Write and return a record; save the cells of a saved call with their place in the whole array."""
        record = self._number, self._entry, name, label, self._place, found * self._is_counted
        print(json.dumps(record), file=self._file)
        if self._number in self._saved and self._is_counted and found:
            path = self._folder / f"{self._number}.{self._entry}.{self._rank}.npz"
            np.savez(path, cells=to_host(cells), start=start, shape=shape)
        self._entry += 1
        return record

    def _find_stale(self, filled: tuple[Any, ...]) -> None:
        """Write the last exchange of each field whose halo is not the neighbours' cells, unless the call fills it."""
        stale = []
        for field, grid, record in self._exchanged.values():
            if not any(field is one for one in filled):
                fresh = grid.empty_like(field)
                fresh[...] = field
                grid.exchange(fresh)
                if to_host(fresh).tobytes() != to_host(field).tobytes():
                    stale.append(record)
        (self._folder / f"{self._rank}.stale").write_text(json.dumps(stale))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the program, without libraries below and above it."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            yield frame
        frame = frame.f_back


def _name_of(field: object, frames: list[FrameType]) -> str:
    """Return the name of a variable that is the field, "" if there is none."""
    names = ({**frame.f_globals, **frame.f_locals}.items() for frame in frames)
    return next((name for items in names for name, value in items if value is field), "")


def install(recorder: Recorder, device: str) -> None:
    """Wrap the calls of halox in this process; ``device`` is "cpu", or "" for the devices that the program uses."""
    make_grid, make_plan, make_loop = Grid.__init__, Grid.plan, Loop.__init__

    def grid(self: Grid, *shape: Any, **options: Any) -> None:
        own = {"device": device} if device else {}
        make_grid(self, *shape, **options | own | {"reproducible": True})

    def plan(self: Grid, *fields: Any, **options: Any) -> Plan:
        made = make_plan(self, *fields, **options)
        recorder.plans[made] = self, fields
        return made

    def loop(self: Loop, *arguments: Any, **options: Any) -> None:
        make_loop(self, *arguments, **options)
        self.why_host = self.why_host or "halox run --compare records every step"

    replaced = (Grid, "__init__", grid), (Grid, "plan", plan), (Loop, "__init__", loop)
    for kind, name, method in replaced:
        setattr(kind, name, method)
    for name in ("exchange", "accumulate", "std", *_RESULTS):
        recorder.wrap(Grid, name)
    for name in ("__call__", "start", "overlap", "steps"):
        recorder.wrap(Plan, name)
    for name in ("get", "collect"):  # they call `Grid.allreduce`, on several ranks only
        recorder.wrap(Points, name)


def main() -> None:
    """Record the program that the command line names after folder, calls and device."""
    folder, calls, device, *program = sys.argv[1:]
    install(Recorder(Path(folder), {int(call) for call in calls.split(",") if call}), device)
    run_command_line(program)


if __name__ == "__main__":
    main()
