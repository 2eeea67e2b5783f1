"""Random programs on NumPy and CuPy fields: all arrays have the same bytes after each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError
from tests.mpi.conftest import agree
from tests.mpi.test_transpose import SEED
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ["f8", "f4", "f2", "c8", "c16", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]
LONGEST = {1: 500, 2: 90, 3: 36, 4: 12}
"""Upper limit of cells along an axis, by the number of axes."""
PAIR = ("cpu", "gpu")


def on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else np.asarray(array)


class Program:
    """A CPU grid and a GPU grid with equal fields. Values are small integers, so that sums are exact in any order."""

    def __init__(self, number: int, comm: MPI.Intracomm, folder: Path) -> None:
        self.rng = np.random.default_rng([SEED, 11, comm.size, number])  # identical on all ranks
        self.mine = np.random.default_rng([SEED, number, comm.rank])
        self.comm, self.folder, self.told = comm, folder, [("seed", SEED)]
        self.axes = int(self.rng.integers(1, 5))
        self.is_checkered = self.chance(0.2)
        self.shape = [int(self.rng.integers(4, LONGEST[self.axes])) for _ in range(self.axes)]
        if self.is_checkered:
            self.shape = [n + n % 2 for n in self.shape]
            self.shape[-1] = max(self.shape[-1], 4 * comm.size)
        options = {
            "halo": self.widths(),
            "periodic": [self.chance(0.6) for _ in range(self.axes)],
            "corners": self.chance(0.7),
            "checkerboard": self.is_checkered,
        }
        self.told.append(("grid", self.shape, options))
        procs: dict[str, Any] = {}  # of the first grid: devices may choose unlike process grids

        def made_on(k: int) -> halox.Grid:
            grid = halox.Grid(self.shape, device=PAIR[k], **procs, **options)
            procs["proc_shape"] = grid.proc_shape
            return grid

        made = self.both(made_on)
        self.grids = made or ()
        self.fields: list[tuple[list[Any], dict[str, Any]]] = []

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, some: Any) -> Any:
        return some[int(self.rng.integers(len(some)))]

    def widths(self) -> list[tuple[int, int]]:
        return [tuple(int(w) for w in self.rng.integers(0, 3, 2)) for _ in range(self.axes)]

    def both(self, call: Callable[[int], Any]) -> list[Any] | None:
        """Return the results of a call on both grids, or None if both raise the same class of error."""
        found: list[Any] = []
        for k in (0, 1):
            try:
                found.append(call(k))
            except HaloxError as error:
                found.append(error)
        refused = [type(one) for one in found if isinstance(one, HaloxError)]
        assert agree(len(refused) != 1 and len({*refused}) < 2, self.comm), (self.told, found)
        self.told += [("refused", str(found[0])[:100])] if refused else []
        return None if refused else found

    def check(self, arrays: list[Any] | None, tolerance: float = 0) -> None:
        if arrays is None:
            return
        a, b = map(on_host, arrays)
        right = (a.dtype, a.shape) == (b.dtype, b.shape) and (
            np.allclose(a, b, tolerance, tolerance) if tolerance else np.array_equal(a, b)
        )
        assert agree(right, self.comm), self.told

    def make(self) -> None:
        """Add a field of random layout and values."""
        layout: dict[str, Any] = {}
        if self.chance(0.3):
            layout["components"] = self.pick([1, 2, 3, (2, 2), (..., 2), (2, ..., 3)])
        if self.is_checkered and self.chance(0.7):
            layout["parity"] = self.pick(["even", "odd"])
        elif self.chance(0.25):
            layout["staggered"] = int(self.rng.integers(self.axes))
        if self.chance(0.2):
            layout["halo"] = self.widths()
        if self.chance(0.15):
            layout["offsets"] = self.pick([1, (1, 2)])
        dtype = np.dtype(self.pick(DTYPES))
        self.told.append(("field", dtype.str, layout))
        fields = self.both(lambda k: self.grids[k].zeros(dtype, **layout))
        if fields is not None:
            self.fill(fields)
            self.fields.append((fields, layout))

    def fill(self, fields: list[Any]) -> None:
        dtype = fields[0].dtype
        low, high = (0, 2) if dtype.kind == "b" else (0 if dtype.kind == "u" else -20, 20)
        values = self.mine.integers(low, high, fields[0].shape).astype(dtype)
        fields[0][...] = values
        fields[1][...] = cupy.asarray(values)

    def step(self) -> None:
        """Make a random call on both grids, and compare all fields."""
        name = self.pick(CALLS)
        chosen = [self.pick(self.fields) for _ in range(self.pick([1, 2]))]
        if chosen[0] is chosen[-1]:
            chosen = chosen[:1]
        self.told.append((name, [fields[0].dtype.str for fields, _ in chosen]))
        getattr(self, name)([fields for fields, _ in chosen], chosen[0][1])
        for fields, _ in self.fields:
            self.check(fields)
        if name == "accumulate":  # otherwise repeated sums would grow until they are rounded
            for fields, _ in chosen:
                self.fill(fields)

    def exchange(self, some: list[Any], layout: dict[str, Any]) -> None:
        corners = self.pick([None, True, False])
        self.both(lambda k: self.grids[k].exchange(*(f[k] for f in some), corners=corners))

    def plan(self, some: list[Any], layout: dict[str, Any]) -> None:
        plans = self.both(lambda k: self.grids[k].plan(*(f[k] for f in some)))
        for plan in plans or ():
            plan()
            plan.start()
            plan.finish()

    def accumulate(self, some: list[Any], layout: dict[str, Any]) -> None:
        corners = self.pick([None, True, False])
        self.both(lambda k: self.grids[k].accumulate(*(f[k] for f in some), corners=corners))

    def reduce(self, some: list[Any], layout: dict[str, Any]) -> None:
        if some[0][0].dtype in (np.dtype("?"), np.dtype("f2")):
            return
        name = self.pick(["sum", "norm", "max", "min"])
        self.check(self.both(lambda k: getattr(self.grids[k], name)(some[0][k])), 1e-6)
        self.check(self.both(lambda k: self.grids[k].dot(some[0][k], some[-1][k])), 1e-6)

    def allreduce(self, some: list[Any], layout: dict[str, Any]) -> None:
        dtype, op = self.pick(["f8", "f4", "i4", "u1", "i8"]), self.pick(["sum", "max", "min"])
        numbers = self.mine.integers(1, 3, int(self.rng.integers(1, 3000))).astype(dtype)
        of_both = numbers, cupy.asarray(numbers)
        self.check(self.both(lambda k: self.grids[k].allreduce(of_both[k], op)))

    def gather_scatter(self, some: list[Any], layout: dict[str, Any]) -> None:
        root = int(self.rng.integers(self.comm.size))
        found = self.both(lambda k: self.grids[k].gather(some[0][k], root))
        if found is None:
            return
        if self.comm.rank == root:
            assert np.array_equal(*map(on_host, found)), self.told
            found = [whole[::-1].copy() for whole in found]
        self.check(self.both(lambda k: self.grids[k].scatter(found[k], root, **layout)))
        self.both(lambda k: self.grids[k].scatter(found[k], root, out=some[0][k]))

    def new_array(self, some: list[Any], layout: dict[str, Any]) -> None:
        def exchanged(k: int) -> Any:
            found = some[0][k] | some[0][k] if some[0][k].dtype == bool else some[0][k] * 1
            self.grids[k].exchange(found)
            other = self.grids[k].empty_like(found)
            other[...] = found
            self.grids[k].exchange(other)
            return other

        self.check(self.both(exchanged))

    def permuted(self, some: list[Any], layout: dict[str, Any]) -> None:
        """Exchange a user's array with permuted axes, gaps between elements, or a negative stride."""
        of_numpy, step, flip = some[0][0], self.pick([1, 2]), self.pick([1, -1])
        order = [int(axis) for axis in self.rng.permutation(of_numpy.ndim)]
        back = np.argsort(order).tolist()
        shape = [of_numpy.shape[axis] for axis in order]
        shape[0] *= step

        def exchanged(k: int) -> Any:
            memory = (np, cupy)[k].zeros(shape, of_numpy.dtype)
            array = memory[::step].transpose(back)[::flip]
            array[...] = some[0][k]
            self.grids[k].declare(array, **layout)
            self.grids[k].exchange(array)
            if of_numpy.dtype.kind != "b":
                self.grids[k].accumulate(array)
            return memory

        self.check(self.both(exchanged))

    def save_load(self, some: list[Any], layout: dict[str, Any]) -> None:
        """Each grid loads the checkpoint of the other grid."""
        if self.axes == 4 or self.chance(0.5):
            return
        name = self.folder / f"{len(self.told)}"
        saved = self.both(lambda k: self.grids[k].save(f"{name}-{k}.zarr", u=some[0][k]))
        if saved is not None:
            fresh = [g.zeros(some[0][0].dtype, **layout) for g in self.grids]
            self.both(lambda k: self.grids[k].load(f"{name}-{1 - k}.zarr", u=fresh[k]))
            self.check(fresh)

    def transpose(self, some: list[Any], layout: dict[str, Any]) -> None:
        axes = [int(axis) for axis in self.rng.permutation(self.axes)]
        shape, halo = [self.shape[axis] for axis in axes], int(self.rng.integers(0, 2))
        if set(layout) - {"components", "halo"}:
            return

        procs: dict[str, Any] = {}

        def carried(k: int) -> Any:
            there = {name: n for name, n in layout.items() if name != "halo"}
            with (
                halox.Grid(shape, halo=halo, device=PAIR[k], **procs) as other,
                halox.Transpose(self.grids[k], other, axes=axes) as transpose,
            ):
                procs["proc_shape"] = other.proc_shape
                v = other.zeros(some[0][k].dtype, **there)
                transpose.forward(some[0][k], v)
                back = self.grids[k].zeros(some[0][k].dtype, **layout)
                transpose.backward(v, back)
                return np.concatenate([on_host(v).ravel(), on_host(back).ravel()])

        self.check(self.both(carried))

    def transform(self, some: list[Any], layout: dict[str, Any]) -> None:
        axes = sorted({int(axis) for axis in self.rng.integers(self.axes, size=2)})
        real, dealias = self.chance(0.5), self.chance(0.3)
        norm, dtype = self.pick(["backward", "ortho", "forward"]), self.pick(["8", "4"])

        def transformed(k: int) -> Any:
            with halox.FFT(self.grids[k], axes, real=real, norm=norm, dealias=dealias) as fft:
                u = fft.physical.zeros(f"f{dtype}" if real else f"c{2 * int(dtype)}")
                cells = np.random.default_rng(self.comm.rank).standard_normal(u.shape)
                u[...] = (np, cupy)[k].asarray(cells.astype(u.dtype))
                return fft.forward(u)

        self.check(self.both(transformed), 1e-11 if dtype == "8" else 1e-2)


CALLS = [
    *["exchange", "exchange", "plan", "accumulate", "accumulate", "reduce", "allreduce"],
    *["gather_scatter", "new_array", "permuted", "permuted", "save_load", "transpose", "transform"],
]


@pytest.mark.parametrize("number", range(20))
def test_random_program(number: int, comm: MPI.Intracomm, tmp_path: Path) -> None:
    program = Program(number, comm, Path(comm.bcast(str(tmp_path))))
    if not program.grids:
        return  # both devices refused this grid
    try:
        for _ in range(program.pick([1, 2, 3])):
            program.make()
        for _ in range(8 if program.fields else 0):
            program.step()
    finally:
        for grid in program.grids:
            grid.close()
