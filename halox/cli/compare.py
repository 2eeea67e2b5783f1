"""``halox run PROGRAM -n 4 --compare 1``: whether a program computes the same bits on 4 ranks and on 1.

The program runs on both numbers of ranks, and `halox.cli.recording` records its exchanges and reductions. If a record
differs, second runs up to this call save the cells. ``--compare cpu`` runs the same ranks without GPUs, and compares
the values of the last call at each line. Begin with `compare`.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from halox.cli import launcher
from halox.errors import HaloxError


class Record(NamedTuple):
    """A field of a call, or a result, which has no name."""

    call: int
    entry: int
    function: str
    name: str
    place: list[str]
    digest: int

    def __str__(self) -> str:
        """Return the call, and the lines of the program that made it."""
        lines = [f"{self.function}{' of ' * bool(self.name)}{self.name}, call {self.call}"]
        for place in self.place:
            path, _, line = place.rpartition(":")
            code = linecache.getline(path, int(line)).strip()
            lines.append(f"    {os.path.relpath(path)}:{line}: {code}")
        return "\n".join(lines)


class Side(NamedTuple):
    """One of the two runs; ``device`` is "cpu", or "" for the devices that the program uses."""

    ranks: int
    device: str
    folder: Path

    def __str__(self) -> str:
        """Return the ranks, as reports name a side."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{' on CPUs' * bool(self.device)}"

    def run(self, program: Sequence[str], saved: Sequence[int] = ()) -> int:
        """Run and record a program; if calls are to be saved, only until then, without output."""
        self.folder.mkdir()
        calls = ",".join(map(str, saved))
        words = ["-m", "halox.cli.recording", str(self.folder), calls, self.device, *program]
        hidden = subprocess.DEVNULL if saved else None
        process = subprocess.Popen(
            launcher.command(launcher.fitting(), self.ranks, words, safe_path=False),
            env=launcher.environment(self.ranks)
            | ({"CUDA_VISIBLE_DEVICES": ""} if self.device else {}),
            stdin=subprocess.DEVNULL,
            stdout=hidden,
            stderr=hidden,
        )
        while process.poll() is None and len([*self.folder.glob("*.done")]) < self.ranks:
            time.sleep(0.05)
        process.terminate()
        return process.wait()

    def records(self) -> Iterator[Record]:
        """Yield the records of all ranks together: the sum of the digests of a field, the digest of a result."""
        with ExitStack() as stack:
            paths = sorted(self.folder.glob("*.calls"))
            # A rank may have ended early.
            for lines in zip(*(stack.enter_context(path.open()) for path in paths), strict=False):
                of_ranks = [Record(*json.loads(line)) for line in lines]
                digests = [record.digest for record in of_ranks]
                digest = sum(digests) % 2**64 if of_ranks[0].name else max(digests)
                yield of_ranks[0]._replace(digest=digest)

    def whole(self, record: Record) -> Any:
        """Return the whole array of a saved record; None if no rank has saved it."""
        whole = None
        for path in self.folder.glob(f"{record.call}.{record.entry}.*.npz"):
            with np.load(path) as saved:
                cells, starts = saved["cells"], saved["start"]
                whole = np.zeros(saved["shape"], cells.dtype) if whole is None else whole
            cuts = zip(starts, cells.shape, strict=True)
            whole[tuple(slice(start, start + extent) for start, extent in cuts)] = cells
        return whole


def compare(ranks: int, other: str, program: Sequence[str]) -> int:
    """Run a program on ``ranks`` and on ``other`` ranks, or "cpu", and print a report.

    Return 0 if the sides agree, 1 if they differ, or the exit status of a program that fails.
    """
    if launcher.running_ranks() is not None:
        raise HaloxError("--compare starts its ranks: leave out mpiexec or srun")
    device, others = ("cpu", ranks) if other == "cpu" else ("", int(other))
    with TemporaryDirectory(prefix="halox-compare-") as place:
        sides = Side(ranks, "", Path(place, "a")), Side(others, device, Path(place, "b"))
        again = [side._replace(folder=side.folder / "again") for side in sides]
        status = max(side.run(program) for side in sides)
        print(f"halox run --compare: {sides[0]} beside {sides[1]}: ", end="")
        before = now = None
        last: dict[tuple[str, ...], Record] = {}
        for mine, theirs in zip_longest(*(side.records() for side in sides)):
            if mine is None or theirs is None or mine[:4] != theirs[:4]:
                made = [record or "no further call" for record in (mine, theirs)]
                print(f"the calls differ\n{sides[0]}: {made[0]}\n{sides[1]}: {made[1]}")
                return max(status, 1)
            if now is None or mine.call > now.call:
                before, now = now, mine
            if device:
                last[mine.name, *mine.place] = mine
            elif mine.digest != theirs.digest:
                for side in again:
                    side.run(program, [mine.call])
                print(_first_difference(mine, before, again))
                return 1
        if not last:
            print(f"all {now.call if now else 0} calls of grids agree, bit for bit")
            return max(status, int(now is None))
        for side in again:
            side.run(program, [record.call for record in last.values()])
        text, is_far = _largest_difference([*last.values()], again)
        print(text)
        return max(status, int(is_far))


def _first_difference(record: Record, before: Record | None, sides: Sequence[Side]) -> str:
    """Describe the first cell that differs, the call before, and fields whose halos are old."""
    lines = [f"the first difference is in {record}"]
    a, b = (side.whole(record) for side in sides)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        lines.append("  with other shapes or dtypes, or no such call in a second run")
    elif (differ := a.view(f"V{a.itemsize}") != b.view(f"V{b.itemsize}")).any():
        cell = np.unravel_index(int(differ.argmax()), a.shape)
        count = f"{np.count_nonzero(differ)} of {a.size} values differ"
        lines.append(f"  {count}, the first at {_values(cell, a, b, sides)}")
    else:
        lines.append("  but not in a second run: the program does not compute the same in each run")
    if before is not None:
        lines.append(f"the cause lies between this call and the one before, {before}")
    of_ranks = [json.loads(path.read_text()) for path in sides[0].folder.glob("*.stale")]
    stale = {(call, entry): rest for each in of_ranks for call, entry, *rest in each}
    for key, rest in sorted(stale.items()):
        lines.append(f"its halo is old: {Record(*key, *rest)}")
    return "\n".join(lines)


def _values(cell: Any, a: Any, b: Any, sides: Sequence[Side]) -> str:
    return f"{tuple(map(int, cell))}: {a[cell]!s} on {sides[0]}, {b[cell]!s} on {sides[1]}"


def _largest_difference(records: Sequence[Record], sides: Sequence[Side]) -> tuple[str, bool]:
    """Describe the largest difference relative to an array's largest value; also whether one is beyond rounding."""
    found, is_far = [], False
    for record in records:
        a, b = (side.whole(record) for side in sides)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or not a.size:
            return f"other shapes or dtypes, or no such call in a second run: {record}", True
        eps = float(np.finfo(a.dtype).eps) if a.dtype.kind in "fc" else 0.0
        a, b = (array.astype(np.result_type(a.dtype, "f8")) for array in (a, b))
        apart = np.where((a == b) | ((a != a) & (b != b)), 0, abs(a - b))
        apart[np.isnan(apart)] = np.inf
        cell = np.unravel_index(int(apart.argmax()), a.shape)
        ratio = float(apart[cell]) / float(np.nanmax(abs(b), initial=1e-300))
        is_far = is_far or ratio > eps**0.5
        found.append((ratio, f"in {record}\n  at {_values(cell, a, b, sides)}"))
    ratio, text = max(found, key=lambda entry: entry[0])
    if ratio == 0:
        return f"the last calls of {len(found)} fields and results agree", is_far
    return f"the largest difference is {ratio:.1e} of the largest value, {text}", is_far
