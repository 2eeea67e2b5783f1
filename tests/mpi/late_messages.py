"""A rank that comes late, or is interrupted in a call: the next calls return the right cells or raise an error.

Each story has three calls with cells of their own: one in which something happens to the last rank, one on the same
grid, and one on a new grid, which must be right on all ranks. ::

    rank 0   call 1: times out    | call 2: error        | close, new grid, call 3: the cells of call 3
    rank 1   call 1: stopped ...  | call 2: error        | close, new grid, call 3: the cells of call 3
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.faults.calls import coded, coded_whole
from tests.faults.rank import Entering
from tests.mpi.conftest import agree, by_first
from tests.mpi.limits import short_waits
from tests.support import full

LIMIT_S = 0.3
_STOPPED_S = 2.5 * LIMIT_S
_SHAPE = (12, 10, 4)
_STAGES = (0.9, 0.7, 0.5)
"""Place of the fault, as a fraction of the functions of halox that a call enters."""


class Story:
    """A grid with what a call needs, and the call itself: returns whether this rank's result is right."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        self.comm = comm
        self.grid = grid = halox.Grid(_SHAPE, proc_shape=(0, 1, 1), device="cpu", comm=comm)
        self.folder = folder
        self.other = halox.Grid(_SHAPE, proc_shape=(1, 0, 1), device="cpu", halo=0, comm=comm)
        self.field, self.target, self.turned = grid.zeros(), grid.zeros(), self.other.zeros()
        self.made: Any = None

    def fill(self, step: int) -> None:
        self.grid.interior(self.field)[...] = coded(self.grid, step)

    def close(self) -> None:
        for one in (self.made, self.other, self.grid):
            if one is not None:
                one.close()

    def gather(self, step: int, root: int) -> bool:
        self.fill(step)
        whole = self.grid.gather(self.field, root=root % self.grid.size)
        return whole is None or np.array_equal(whole, coded_whole(self.grid, step))

    def scatter(self, step: int, root: int) -> bool:
        root %= self.grid.size
        whole = coded_whole(self.grid, step) if self.grid.rank == root else None
        self.grid.scatter(whole, root, out=self.target)
        return self._target_is(step)

    def save(self, step: int) -> bool:
        self.fill(step)
        self.grid.save(self.folder / f"{step}.zarr", u=self.field)
        return True

    def load(self, step: int) -> bool:
        self.grid.load(self.folder / f"known {step}.zarr", u=self.target)
        return self._target_is(step)

    def sum(self, step: int) -> bool:
        self.fill(step)
        return float(self.grid.sum(self.field)) == coded_whole(self.grid, step).sum()

    def allreduce(self, step: int, elements: int) -> bool:
        size = self.grid.size
        found = self.grid.allreduce(np.arange(elements) * (self.grid.rank + 1.0) + step)
        return np.array_equal(found, np.arange(elements) * (size * (size + 1) / 2) + size * step)

    def allreduce_object(self, step: int) -> bool:
        if self.made is None:
            self.made = halox.Allreduce(self.comm, 50_000, "f8", device="cpu")
        found = self.made(np.full(50_000, self.grid.rank + 10.0 * step))
        size = self.grid.size
        return np.array_equal(found, np.full(50_000, size * (size - 1) / 2 + 10.0 * size * step))

    def transpose(self, step: int) -> bool:
        if self.made is None:
            self.made = halox.Transpose(self.grid, self.other)
        self.fill(step)
        self.made.forward(self.field, self.turned)
        return np.array_equal(self.turned, coded(self.other, step))

    def new_transpose(self, step: int) -> bool:
        """With arrays of which no plan is known, so that the ranks make one."""
        self.field, self.target = self.grid.zeros(), self.grid.zeros()
        self.made = None
        return self.transpose(step)

    def fft(self, step: int) -> bool:
        if self.made is None:
            self.made = halox.FFT(self.grid, real=False)
            self.complex = self.grid.zeros("c16")
        self.grid.interior(self.complex)[...] = coded(self.grid, step)
        whole = np.fft.fftn(coded_whole(self.grid, step))
        modes = self.made.forward(self.complex)
        mine = self.made.grid.interior(modes)
        return np.allclose(mine, whole[self.made.grid.owned])

    def exchange(self, step: int) -> bool:
        """Of new arrays, so that the ranks make a plan."""
        self.field = np.full(self.grid.padded_shape, -1.0)
        self.fill(step)
        self.grid.exchange(self.field)
        return np.array_equal(self.field[self._inside], coded(self.grid, step, True)[self._inside])

    @property
    def _inside(self) -> tuple[slice, ...]:
        """Cells of a field that are not outside the grid."""
        first, last = self.grid.owned[0].start == 0, self.grid.owned[0].stop == _SHAPE[0]
        return slice(int(first), -1 if last else None), slice(1, -1), slice(1, -1)

    def _target_is(self, step: int) -> bool:
        return np.array_equal(self.grid.interior(self.target), coded(self.grid, step))


CALLS: dict[str, Callable[[Story, int], bool]] = {
    "gather": partial(Story.gather, root=0),
    "gather to the last": partial(Story.gather, root=-1),
    "scatter": partial(Story.scatter, root=0),
    "scatter from the last": partial(Story.scatter, root=-1),
    "save": Story.save,
    "load": Story.load,
    "sum": Story.sum,
    "small allreduce": partial(Story.allreduce, elements=10),
    "large allreduce": partial(Story.allreduce, elements=100_000),
    "Allreduce": Story.allreduce_object,
    "transpose": Story.transpose,
    "new transpose": Story.new_transpose,
    "fft": Story.fft,
    "exchange": Story.exchange,
}
FAULTS = ("stopped", "interrupted", "raising")
NODES = ("", "rank")
"""One node for all ranks, and a node for each."""

EACH = [(name, FAULTS[n % 3], NODES[n // 3 % 2], _STAGES[n // 6]) for n, name in enumerate(CALLS)]
"""Each call once, and each fault on one node and between nodes."""

OTHERS = [case for case in product(CALLS, FAULTS, NODES, _STAGES) if case not in EACH]


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    found: Path = comm.bcast(tmp_path)
    return found


@pytest.mark.usually(3)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name, fault, node, stage", [*EACH, *full(*OTHERS)])
def test_the_right_cells_or_an_error(
    comm: MPI.Intracomm,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: str,
    node: str,
    stage: float,
) -> None:
    """Whatever stage of a call the last rank is stopped or interrupted at."""
    monkeypatch.setenv("HALOX_NODE", node)
    call = CALLS[name]
    if name == "load":
        _prepare(folder)
    ours = comm.Dup()
    story = Story(ours, folder)
    assert call(story, 0)
    with Entering() as entering:
        assert call(story, 1)
    comm.barrier()  # a rank still in call 1 would see the failure of call 2, and raise
    at = max(1, round(stage * entering.count)) if comm.rank == comm.size - 1 else -1

    def happen(where: str) -> None:
        if "forget" in where:
            return  # a callback of Python's, whose errors it only prints
        if fault == "stopped":
            time.sleep(_STOPPED_S)
        elif fault == "interrupted":
            raise KeyboardInterrupt(where)
        else:
            raise RuntimeError(where)

    with short_waits(LIMIT_S):
        entering = Entering(at, happen)
        seen = [_outcome(_suffer, call, story, entering if at > 0 else nullcontext())]
        # A message that arrives late must not arrive in memory that was released.
        later = [np.zeros(_SHAPE) for _ in range(100)]
        comm.barrier()
        seen.append(_outcome(call, story, 3))
        comm.barrier()
        seen.append(_outcome(story.close))
        comm.barrier()
    begun = at < 0 or entering.has_entered("CallWatch.call")
    begun &= not entering.has_entered("CallGuard.__exit__")
    said = f"{comm.allgather(seen)}"
    # A rank that never came to the call has left it out, and its next one is the others' last.
    skips = comm.bcast(not begun and fault != "stopped", comm.size - 1)
    assert agree("wrong" not in seen or skips, comm), said
    # A rank whose call has failed, and not together with the others', refuses the next one.
    is_alone = seen[0].startswith(("ExchangeTimeoutError", "KeyboardInterrupt", "RuntimeError"))
    assert agree(not (is_alone and begun) or seen[1] != "right", comm), said
    new = Story(ours, folder)
    assert agree(_outcome(call, new, 4) == "right", comm), said
    assert agree(not np.any(later), comm), said
    if name == "save":
        whole = by_first(lambda: _read(folder / "4.zarr"), comm)
        assert np.array_equal(whole, coded_whole(new.grid, 4)), said
    new.close()


def _suffer(call: Any, story: Story, entering: Any) -> bool:
    with entering:
        return bool(call(story, 2))


def _outcome(act: Callable[..., object], *arguments: object) -> str:
    try:
        return "wrong" if act(*arguments) is False else "right"
    except (halox.HaloxError, KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:200]


def _prepare(folder: Path) -> None:
    """Write the checkpoints that are loaded."""
    pytest.importorskip("tensorstore")
    with halox.Grid(_SHAPE, proc_shape=(0, 1, 1), device="cpu") as grid:
        u = grid.zeros()
        for step in range(5):
            grid.interior(u)[...] = coded(grid, step)
            grid.save(folder / f"known {step}.zarr", u=u, compressors="zstd")


def _read(path: Path) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_group(str(path), mode="r")["u"])
