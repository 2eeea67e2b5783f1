"""Random lives of halox's objects: ``python -m tests.faults.lives STEPS SEED RESULT`` on ranks.

The ranks make, use, close and drop grids, fields, plans, transposes and allreduces in one random order, the same on
all ranks. New arrays often get the addresses of former arrays. Every result is checked.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.mpi.reference import (
    DTYPES,
    Case,
    Expected,
    Field,
    expected,
    factorisations,
    random_case,
    same_bytes,
)

_MOST_GRIDS = 4
_MOST_FIELDS = 6
_MOST_PLANS = 4
_MOST_REDUCTIONS = 3
_ALIGNMENT = 64


@dataclass(eq=False)
class Kept:
    """A field, its layout, and its values before and after an exchange."""

    array: Any
    layout: Field
    wanted: Expected


@dataclass(eq=False)
class Life:
    """A grid, with the communicator and ``HALOX_NODE`` that it was made with, and the objects made on it."""

    grid: Any
    comm: Any
    node: str
    case: Case
    fields: list[Kept] = field(default_factory=list)
    plans: list[tuple[Any, list[Kept]]] = field(default_factory=list)
    other: Any = None
    transpose: Any = None


class Memory:
    """Allocator of user arrays, which reuses the address of an array as soon as this is collected.

    Attributes
    ----------
    used_again : int
        Number of arrays at the address of a former one.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._free: dict[int, list[int]] = {}
        self.used_again = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array whose base is no other array: it looks like the owner of its memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        rounded = 1 << nbytes.bit_length()
        free = self._free.setdefault(rounded, [])
        if free:
            address = free.pop()
            self.used_again += 1
        else:
            self._blocks.append(np.empty(rounded + _ALIGNMENT, np.uint8))
            start = self._blocks[-1].ctypes.data
            address = start + -start % _ALIGNMENT
        raw: Any = (ctypes.c_char * nbytes).from_address(address)
        array: np.ndarray = np.ndarray(shape, dtype, buffer=raw)
        weakref.finalize(array, free.append, address).atexit = False
        return array


class Lives:
    """The live objects, and the random actions on them."""

    def __init__(self, comm: Any, seed: int) -> None:
        self.comm = comm
        self.comms = [comm, comm.Dup()]
        self.rng = np.random.default_rng([seed, comm.size])
        self.lives: list[Life] = []
        self.reductions: list[tuple[Any, Any]] = []
        self.orphans: list[tuple[Any, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.memory = Memory()
        self._actions = {
            self.make_grid: 6,
            self.close_grid: 3,
            self.drop_grid: 2,
            self.make_field: 14,
            self.drop_field: 10,
            self.exchange: 20,
            self.accumulate: 4,
            self.reduce: 6,
            self.make_plan: 8,
            self.run_plan: 10,
            self.drop_plan: 6,
            self.transpose: 6,
            self.drop_transpose: 3,
            self.make_reduction: 3,
            self.call_reduction: 6,
            self.drop_reduction: 2,
            self.look_at_orphans: 3,
            self.collect: 1,
        }

    def step(self) -> str:
        """Run one random action, and return its name."""
        weights = np.array(list(self._actions.values()), float)
        number = int(self.rng.choice(len(weights), p=weights / weights.sum()))
        action = list(self._actions)[number]
        action()
        self.counts[action.__name__] += 1
        return action.__name__

    def check(self, right: bool, what: object) -> None:
        if not self.comm.allreduce(int(right)) == self.comm.size:
            raise AssertionError(f"wrong on {'this' if not right else 'another'} rank: {what}")

    def pick(self, some: list[Any]) -> Any:
        return some[int(self.rng.integers(len(some)))] if some else None

    # Grids

    def make_grid(self) -> None:
        if len(self.lives) >= _MOST_GRIDS:
            self.close_grid()
        case = random_case(self.rng, self.comm.size, DTYPES)
        os.environ["HALOX_NODE"] = node = "rank" if self.rng.integers(4) == 0 else ""
        comm = self.pick(self.comms)
        self.lives.append(Life(case.grid(comm), comm, node, case))
        for layout in case.fields:
            self._make_field(self.lives[-1], layout)

    def _end(self) -> Life | None:
        """Remove a grid from the list; some of its fields become orphans, which stay alive."""
        life = self.pick(self.lives)
        if life is None:
            return None
        self.lives.remove(life)
        for kept in life.fields:
            if self.rng.integers(3) == 0 and len(self.orphans) < 8:
                self.orphans.append((kept.array, kept.array.tobytes()))
        return life

    def close_grid(self) -> None:
        life = self._end()
        if life is not None:
            if life.transpose is not None:
                life.transpose.close()
                life.other.close()
            life.grid.close()

    def drop_grid(self) -> None:
        self._end()

    # Fields

    def make_field(self) -> None:
        life = self.pick(self.lives)
        if life is not None:
            self._make_field(life, self.pick(life.case.fields))

    def _make_field(self, life: Life, layout: Field) -> None:
        if len(life.fields) >= _MOST_FIELDS:
            life.fields.remove(self.pick(life.fields))
        wanted = expected(life.case, layout, life.grid.coords, int(self.rng.integers(50)))
        self._make_room(life, layout)
        if self.rng.integers(2):
            array = self.memory.array(wanted.before.shape, layout.dtype)
            life.grid.declare(array, **layout.options())
        else:
            array = life.grid.empty(layout.dtype, **layout.options())
        array[...] = wanted.before
        life.fields.append(Kept(array, layout, wanted))

    def _make_room(self, life: Life, layout: Field) -> None:
        """Half of the time, drop a field of this layout and its plans: the next field is likely to get its address."""
        for number, kept in enumerate(life.fields):
            if kept.layout is layout and self.rng.integers(2):
                life.plans = [(plan, some) for plan, some in life.plans if kept not in some]
                del life.fields[number]
                return

    def drop_field(self) -> None:
        life = self.pick(self.lives)
        if life is not None and life.fields:
            life.fields.remove(self.pick(life.fields))

    def look_at_orphans(self) -> None:
        """Check that a field still has its values after the end of its grid, and drop it."""
        if self.orphans:
            array, held = self.orphans.pop(int(self.rng.integers(len(self.orphans))))
            self.check(array.tobytes() == held, "a field that has outlived its grid")

    # Exchanges and reductions

    def _some(self) -> tuple[Life, list[Kept]] | None:
        life = self.pick(self.lives)
        if life is None or not life.fields:
            return None
        number = int(self.rng.integers(1, min(3, len(life.fields)) + 1))
        places = self.rng.permutation(len(life.fields))[:number]
        some = [life.fields[int(place)] for place in places]
        for kept in some:
            kept.array[...] = kept.wanted.before
        return life, some

    def _moved(self, what: str, life: Life, some: list[Kept]) -> None:
        right = [same_bytes(kept.array, kept.wanted.after) for kept in some]
        self.check(all(right), (what, life.grid, [kept.layout for kept in some], right))

    def exchange(self) -> None:
        found = self._some()
        if found is not None:
            life, some = found
            life.grid.exchange(*(kept.array for kept in some))
            self._moved("exchange", life, some)

    def accumulate(self) -> None:
        """Accumulate fields of ones: the total over all ranks stays, and the halos become zero."""
        found = self._some()
        if found is None:
            return
        life, some = found
        some = [kept for kept in some if kept.layout.dtype.kind in "iuf"]
        some = [kept for kept in some if kept.layout.dtype != np.float16]
        if not some:
            return
        before = []
        for kept in some:
            kept.array[...] = kept.wanted.owned | kept.wanted.filled
            before.append(self.comm.allreduce(int(kept.array.sum(dtype="f8"))))
        life.grid.accumulate(*(kept.array for kept in some))
        for kept, total in zip(some, before, strict=True):
            small = kept.layout.dtype.itemsize == 1
            after = self.comm.allreduce(int(kept.array.sum(dtype="f8")))
            right = small or (after == total and not kept.array[kept.wanted.filled].any())
            self.check(right, ("accumulate", life.grid, kept.layout, total, after))
            kept.array[...] = kept.wanted.before

    def reduce(self) -> None:
        found = self._some()
        if found is None:
            return
        life, (kept, *_) = found
        if kept.layout.dtype.kind not in "iuf" or kept.layout.dtype.itemsize > 8:
            return
        owned = kept.array[kept.wanted.owned].astype("f8")
        wanted = self.comm.allreduce(owned.sum())
        self.check(float(life.grid.sum(kept.array)) == wanted, ("sum", life.grid, kept.layout))

    # Plans

    def make_plan(self) -> None:
        found = self._some()
        if found is not None:
            life, some = found
            if len(life.plans) >= _MOST_PLANS:
                life.plans.remove(self.pick(life.plans))
            life.plans.append((life.grid.plan(*(kept.array for kept in some)), some))

    def run_plan(self) -> None:
        life = self.pick([life for life in self.lives if life.plans])
        if life is None:
            return
        plan, some = self.pick(life.plans)
        for kept in some:
            kept.array[...] = kept.wanted.before
        if self.rng.integers(2):
            plan()
        else:
            plan.start()
            plan.finish()
        self._moved("plan", life, some)

    def drop_plan(self) -> None:
        life = self.pick([life for life in self.lives if life.plans])
        if life is None:
            return
        found = self.pick(life.plans)
        life.plans.remove(found)
        if self.rng.integers(2):
            found[0].close()

    # Transposes and allreduces

    def transpose(self) -> None:
        import halox

        life = self.pick(self.lives)
        if life is None:
            return
        if life.transpose is None:
            shape = life.case.shape
            choices = [
                procs
                for procs in factorisations(self.comm.size, len(shape))
                if all(p <= n for p, n in zip(procs, shape, strict=True))
            ]
            options = {"halo": 0, "periodic": False, "proc_shape": self.pick(choices)}
            os.environ["HALOX_NODE"] = life.node
            life.other = halox.Grid(shape, comm=life.comm, device="cpu", **options)
            life.transpose = halox.Transpose(life.grid, life.other)
        u, v = life.grid.full(-1.0), life.other.empty()
        u[life.grid.layout(u).interior] = _numbers(life.grid)
        v[...] = -2.0
        life.transpose.forward(u, v)
        right = bool(np.array_equal(v, _numbers(life.other)))
        u[...] = -1.0
        life.transpose.backward(v, u)
        right &= bool(np.array_equal(u[life.grid.layout(u).interior], _numbers(life.grid)))
        self.check(right, ("transpose", life.grid, life.other))

    def drop_transpose(self) -> None:
        life = self.pick([life for life in self.lives if life.transpose is not None])
        if life is not None:
            if self.rng.integers(2):
                life.transpose.close()
                life.other.close()
            life.transpose = life.other = None

    def make_reduction(self) -> None:
        import halox

        if len(self.reductions) >= _MOST_REDUCTIONS:
            self.drop_reduction()
        shape = tuple(int(n) for n in self.rng.integers(1, 40, size=2))
        array = np.arange(shape[0] * shape[1]).reshape(shape) + self.comm.rank
        comm, dtype = self.pick(self.comms), self.pick(["i8", "f8", "f4"])
        self.reductions.append((halox.Allreduce(comm, shape, dtype), array.astype(dtype)))

    def call_reduction(self) -> None:
        found = self.pick(self.reductions)
        if found is not None:
            reduce, array = found
            first = array - array.dtype.type(self.comm.rank)
            wanted = first * self.comm.size + sum(range(self.comm.size))
            self.check(bool(np.array_equal(reduce(array), wanted)), ("allreduce", reduce))

    def drop_reduction(self) -> None:
        found = self.pick(self.reductions)
        if found is not None:
            self.reductions.remove(found)
            if self.rng.integers(2):
                found[0].close()

    def collect(self) -> None:
        gc.collect()


def _numbers(grid: Any) -> np.ndarray:
    """Return the global numbers of this rank's cells, as floats."""
    found = np.zeros((), "f8")
    for i, n in zip(grid.indices(), grid.grid_shape, strict=True):
        found = found * n + i
    return np.broadcast_to(found, grid.rank_shape)


def main(steps: str, seed: str, place: str) -> None:
    from mpi4py import MPI

    lives = Lives(MPI.COMM_WORLD, int(seed))
    for number in range(int(steps)):
        try:
            lives.step()
        except BaseException:
            print(f"step {number} of seed {seed} failed; so far {dict(lives.counts)}", flush=True)
            raise
    if MPI.COMM_WORLD.rank == 0:
        Path(place).write_text(
            json.dumps(lives.counts | {"memory used again": lives.memory.used_again})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
