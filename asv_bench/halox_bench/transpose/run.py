"""The transpose benchmark: halox and hand-written transposes, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

import halox
from halox import datatypes as dt
from halox.errors import HaloxError
from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox.transpose import Transpose
from halox_bench.common.rows import Row
from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.methods import Baseline, Method, Prepared, paths_taken
from halox_bench.transpose import baselines as by_users
from halox_bench.transpose.baselines import Turning
from halox_bench.transpose.cases import TRANSPOSE, WHOLE, TransposeCase
from halox_bench.transpose.oracle import TransposeOracle
from halox_bench.transpose.pieces import Pieces, Slices

MOST_HOST_BYTES = 1 << 28
"""Larger cases are left out on CPUs."""

_FREE_SHARE = 0.15
_CHECKS = 3


class TransposeBench(RanksBench):
    """Transposes of the ranks of a communicator."""

    def suited(self, cases: Sequence[TransposeCase]) -> list[TransposeCase]:
        """Return the cases for this number of ranks; raise `HaloxError` if none fits."""
        alone = self.comm.size == 1
        found = [case for case in cases if (case.division == WHOLE) is alone]
        if not found:
            divided = "whole arrays are for one rank, slabs and pencils for several"
            raise HaloxError(f"nothing to measure on {self.comm.size} ranks: {divided}")
        return found

    def names(self) -> tuple[str, ...]:
        """Return the paths to name one by one; a single rank sends only to itself."""
        return super().names() if self.comm.size > 1 else ()

    def measure(self, case: TransposeCase) -> list[Row]:
        why = self._why_not(case)
        if why:
            return self.left_out(case, why)
        kind = ThroughGrids if case.method == TRANSPOSE else ThroughDatatype
        with kind(self, case) as prepared:
            rows = prepared.rows()
        self.free()
        return rows

    def heading(self) -> str:
        return (
            f"{self.comm.size} ranks, {self.options.device} arrays; microseconds a transpose, the slowest rank's\n"
            "% copy: the speed of a plain copy of one rank's bytes is 100"
        )

    def _why_not(self, case: TransposeCase) -> str:
        """Return why a case is left out, or an empty text; the same on all ranks."""
        size = self.comm.size
        for shape, ranks in zip(
            (case.shape, case.turned_shape), case.proc_shapes(size), strict=True
        ):
            if any(n < parts for n, parts in zip(shape, ranks, strict=True)):
                return f"{shape} cells cannot be divided among {ranks} ranks"
        most = float(MOST_HOST_BYTES)
        if self.stage.device is not None:
            most = _FREE_SHARE * self.stage.xp.cuda.runtime.memGetInfo()[0]
            most *= 1 if self.shared_gpu else size
        if not self.comm.allreduce(case.nbytes <= most, load_mpi().LAND):
            return f"{case.nbytes:,} bytes are too many"
        return ""


class PreparedTranspose(Prepared):
    """A case on the ranks: source and target, and every method with a right result.

    Attributes
    ----------
    pieces : Pieces
        This rank's share of the cells.
    """

    graph_calls = 10
    case: TransposeCase
    pieces: Pieces

    def make(self) -> None:
        """Make the oracle of this rank's cells, find the most bytes of any rank, and make the methods."""
        source, target = self.pieces.source, self.pieces.target
        self._oracle = TransposeOracle(self.case, source, target, self.stage.xp)
        of_cells = prod(part.stop - part.start for part in source)
        most = [
            self.comm.allreduce(cells * self.case.element_bytes, load_mpi().MAX)
            for cells in (of_cells, self.pieces.cells_sent)
        ]
        self.details = {
            "proc_shapes": self.case.proc_shapes(self.comm.size),
            **dict(zip(("nbytes", "bytes_sent"), most, strict=True)),
        }
        self.stage.settle()
        super().make()

    def by_hand(self, name: str, make: Callable[[], Baseline]) -> Method:
        """Make a baseline, which may have other arrays."""
        made: Any = make()
        return replace(super().by_hand(name, lambda: made), arrays=made.arrays)

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return copies and NumPy or mpi4py for NumPy arrays; copies, cuTENSOR and NCCL for CuPy arrays."""
        case, arrays, alone = self.case, self.arrays, self.comm.size == 1
        whole, between = (case, arrays), (self.comm, case, self.pieces, arrays)
        found: list[tuple[type[Turning], Any]]
        if self.stage.device is None:
            found = [(by_users.HostCopy, (arrays,))]
            if alone:
                found.append((by_users.CopyTo, whole))
            else:
                found.append((by_users.Alltoallw, between))
                if case.source_axes != tuple(range(case.ndim)):
                    found.append((by_users.AlltoallwCopyTo, between))
            return {one.name: partial(one, *given) for one, given in found}
        from halox_bench.transpose import baselines_gpu as gpu

        found = [(gpu.DeviceCopy, (arrays,))]
        if alone:
            found += [(gpu.StridedCopy, whole), (gpu.Cutensor, whole)]
        made = {one.name: partial(one, *given) for one, given in found}
        if alone:
            return made
        return {**made, gpu.NCCL: lambda: gpu.ByNccl(self.bench.nccl(), *between[1:])}

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        source, target = method.arrays
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(source, target, step)
            call()
            self.stage.synchronize()
            if method.name == by_users.COPY:
                wrong = int(self.stage.xp.count_nonzero(target != source))
            else:
                wrong = self._oracle.wrong(target, step)
            self.expect(wrong, f"values, in transpose {step} of {_CHECKS}")


class ThroughGrids(PreparedTranspose):
    """By `halox.Transpose`."""

    def enter(self, stack: ExitStack) -> None:
        """Make two grids, the transpose between them and a field of each."""
        case, comm = self.case, self.comm
        device: Any = self.bench.options.device
        shapes = case.shape, case.turned_shape
        grids = [
            stack.enter_context(Grid(shape, halo=0, proc_shape=parts, comm=comm, device=device))
            for shape, parts in zip(shapes, case.proc_shapes(comm.size), strict=True)
        ]
        self._transpose = stack.enter_context(Transpose(*grids, axes=case.axes))
        with self.stage.current():
            self._fields = [
                grid.zeros(case.dtype, components_after=case.components) for grid in grids
            ]
        blocks: list[list[Slices]] = [comm.allgather(grid.owned) for grid in grids]
        order = -1 if case.backward else 1
        self.own_arrays = self._fields[::order]
        self.arrays = self.arrays_of_users()
        source, target = blocks[::order]
        self.pieces = Pieces(source, target, case.source_axes, comm.rank)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan the transpose by a path."""
        path: Any = {} if chosen is None else {"path": chosen}
        plan = self._transpose.plan(*self._fields, backward=self.case.backward, **path)
        without = self.comm.rank if self.comm.size > 1 else None
        taken = paths_taken(plan.explain().rows, without)
        return Method(kind, name, plan, plan.close, True, self.own_arrays, {"path": taken})

    def _leave(self, kind: object, *error: object) -> None:
        super()._leave(kind, *error)
        self._fields = []


class ThroughDatatype(PreparedTranspose):
    """By `halox.pack` and `halox.unpack`, with a type that runs along the columns of a matrix."""

    def enter(self, stack: ExitStack) -> None:
        """Make a matrix and memory for its packed bytes."""
        case, xp = self.case, self.stage.xp
        with self.stage.current():
            matrix, packed = (
                xp.zeros((*shape, *case.components), case.dtype)
                for shape in (case.shape, case.turned_shape)
            )
        self._matrix, self._packed = matrix, packed.reshape(-1).view(np.uint8)
        self._datatype, self._count = columns(case)
        self.own_arrays = [packed, matrix] if case.backward else [matrix, packed]
        self.arrays = self.arrays_of_users()
        shapes = case.shape, case.turned_shape
        blocks = [tuple(slice(0, n) for n in shape) for shape in shapes]
        source, target = blocks[:: -1 if case.backward else 1]
        self.pieces = Pieces([source], [target], case.source_axes, 0)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Prepare the packing, or the unpacking."""
        matrix, packed, what = self._matrix, self._packed, (self._datatype, self._count)

        def pack() -> None:
            halox.pack(matrix, *what, out=packed)

        def unpack() -> None:
            halox.unpack(packed, what[0], matrix, what[1])

        call = unpack if self.case.backward else pack
        taken = halox.packing_method(matrix, *what, out=packed).method
        return Method(kind, name, call, lambda: None, True, self.own_arrays, {"path": taken})

    def _leave(self, kind: object, *error: object) -> None:
        super()._leave(kind, *error)
        self._matrix = self._packed = None


def columns(case: TransposeCase) -> tuple[dt.Datatype, int]:
    """Return the datatype of a matrix by columns, and its count."""
    (rows, wide), nbytes = case.shape, case.element_bytes
    element = dt.contiguous(prod(case.components), case.dtype)
    return dt.resized(dt.vector(rows, 1, wide, element), 0, nbytes), wide
