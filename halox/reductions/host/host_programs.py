"""Programs of reductions on the host: how a rank combines its cells, and how the ranks' values are combined.

A `FieldProgram` combines the cells of one field or two. `Blocks` evaluates expressions, block by block, in arrays that
stay in a core's cache. Each result of a program has `Values`, which combines cells to the value of a block, blocks to
the record of the rank, and records to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout
from halox.decomposition.blocks import blocks
from halox.reductions.expressions import Typed
from halox.reductions.field_operations import FieldOperation
from halox.reductions.host.cell_sums import dot, sum_of_squares, total
from halox.reductions.host.exact_sums import MOST, RECORD_BYTES, ExactSum, exact_sums
from halox.runtime.arrays import Array, DType

_OF_CELLS: dict[str, Callable[..., Any]] = {
    "sum": total,
    "min": lambda cells: np.minimum.reduce(cells, None),
    "max": lambda cells: np.maximum.reduce(cells, None),
    "norm": sum_of_squares,
    "dot": dot,
}
_COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Values:
    """Values of one result: of the blocks of a rank, in the record of a rank, and of all ranks.

    A record is an array of ``count`` numbers of the dtype ``record``.
    """

    def __init__(self, operation: FieldOperation, dtype: DType) -> None:
        self.dtype = self.record = dtype
        self.count = 1
        self.of_block = _OF_CELLS[operation.name]
        self._combine, self._is_norm = _COMBINE[operation.op], operation.name == "norm"

    def of_rank(self, of_blocks: Sequence[Any]) -> Any:
        """Return a rank's record, or its only number, for the values of its blocks."""
        return of_blocks[0] if len(of_blocks) == 1 else self._combine.reduce(of_blocks)

    def join(self, total: Array, other: Array) -> None:
        """Combine the records of two groups of ranks in ``total``."""
        self._combine(total, other, out=total)

    def of_ranks(self, records: Sequence[Array]) -> Any:
        """Return the result, for the records of all ranks."""
        values = np.concatenate(records) if len(records) > 1 else records[0]
        result = self._combine.reduce(values)
        return np.sqrt(result) if self._is_norm else result


class ExactValues(Values):
    """Exact sums, rounded once; a complex result is two sums."""

    def __init__(self, operation: FieldOperation, dtype: DType) -> None:
        super().__init__(operation, dtype)
        self.record, self.count = np.dtype("u1"), RECORD_BYTES * (dtype.itemsize // 8)
        self.of_block = partial(_records, operation.name)

    def of_rank(self, of_blocks: Sequence[Any]) -> Array:
        records = of_blocks[0]
        if len(of_blocks) > 1:
            records = [ExactSum(part).record() for part in zip(*of_blocks, strict=True)]
        return np.frombuffer(b"".join(records), "u1")

    def join(self, total: Array, other: Array) -> None:
        for part in self._parts():
            both = ExactSum([total[part].tobytes(), other[part].tobytes()])
            total[part] = np.frombuffer(both.record(), "u1")

    def of_ranks(self, records: Sequence[Array]) -> Any:
        """Add the sums of all ranks, and round."""
        sums = [ExactSum([record[part].tobytes() for record in records]) for part in self._parts()]
        result = np.array([each.rounded() for each in sums]).view(self.dtype)[0]
        return np.sqrt(result) if self._is_norm else result

    def _parts(self) -> list[slice]:
        return [slice(n, n + RECORD_BYTES) for n in range(0, self.count, RECORD_BYTES)]


def _records(name: str, *cells: Array) -> list[bytes]:
    return [each.record() for each in exact_sums(name, *cells)]


def values_of(operation: FieldOperation, dtype: DType) -> Values:
    """Return the values of an operation whose result has a dtype."""
    return (ExactValues if operation.is_exact else Values)(operation, dtype)


class FieldProgram:
    """Reduces fields of one layout and of given dtypes.

    ``results`` has the values of each result. ``meaning`` must be equal on all ranks; ``shown`` is the same for errors.
    """

    def __init__(
        self,
        operation: FieldOperation,
        dtypes: Sequence[DType],
        dtype: DType,  # of the result
        layout: FieldLayout,
    ) -> None:
        spec = layout.spec
        values = values_of(operation, dtype)
        self.results, self._of_block, self._of_rank = [values], values.of_block, values.of_rank
        self._is_exact = operation.is_exact
        self.meaning = str(operation), [dtype.str for dtype in dtypes], spec.digest
        self.shown = f"{', '.join(map(str, dtypes))}, {spec}"
        self.shown += ", reproducible=True" * operation.is_exact

    def of_cells(self, views: Sequence[Array], scalars: Sequence[Array]) -> list[Any]:
        value = self._of_block(*views)
        return [self._of_rank([value]) if self._is_exact else value]


class Blocks:
    """Reduces expressions, in a few arrays of the size of a block."""

    def __init__(self, call: Typed) -> None:
        program, self.meaning, self.shown = call.program, call.meaning, call.meaning
        self.results = [values_of(*each) for each in zip(call.ops, call.dtypes, strict=True)]
        self._indices = _indices(call)
        dtypes = program.dtypes
        self._registers: list[Any] = [None] * len(dtypes)
        self._scalars = list(program.scalars)
        self._of_blocks = [
            (register, register in program.scalars, values.of_block)
            for register, values in zip(program.results, self.results, strict=True)
        ]
        last = {arg: register for register, step in program.steps.items() for arg in step.args}
        last |= dict.fromkeys(program.results, len(dtypes))
        self._dtypes: list[DType] = []  # of the arrays
        self._steps = []
        arrays: dict[int, int] = {}  # by register
        free: list[int] = []
        for register, step in program.steps.items():
            ended = [n for n in dict.fromkeys(step.args) if last[n] == register and n in arrays]
            in_place = step.function != "where"  # which is written in two steps
            free += [arrays[n] for n in ended if in_place]
            dtype = dtypes[register]
            array = next((n for n in free if self._dtypes[n] == dtype), len(self._dtypes))
            if array == len(self._dtypes):
                self._dtypes.append(dtype)
            else:
                free.remove(array)
            arrays[register] = array
            free += [arrays[n] for n in ended if not in_place]
            is_cast = [dtypes[n] for n in step.args] != [*step.loop]
            signature = (*step.loop, dtype) if is_cast else None
            self._steps.append((register, _function(step.function, signature), step.args, array))

    @np.errstate(all="ignore")
    def of_cells(self, views: Sequence[Array], scalars: Sequence[Array]) -> list[Any]:
        inputs = [*views, *self._indices]
        first = inputs[0]
        scratch = [np.empty(min(MOST, first.size), dtype) for dtype in self._dtypes]
        registers = [*self._registers]
        for register, value in zip(self._scalars, scalars, strict=True):
            registers[register] = value
        partials: list[list[Any]] = [[] for _ in self.results]
        for index in [()] if 0 < first.size <= MOST else blocks(first.shape, MOST):
            registers[: len(inputs)] = [each[index] for each in inputs]
            shape, size = registers[0].shape, registers[0].size
            for register, function, args, array in self._steps:
                out = registers[register] = scratch[array][:size].reshape(shape)
                function(*[registers[arg] for arg in args], out=out)
            for found, (register, is_scalar, of_block) in zip(
                partials, self._of_blocks, strict=True
            ):
                cells = registers[register]
                found.append(of_block(np.broadcast_to(cells, shape) if is_scalar else cells))
        return [values.of_rank(found) for values, found in zip(self.results, partials, strict=True)]


Program = FieldProgram | Blocks
"""A program over the cells of a rank."""


def _indices(call: Typed) -> list[Array]:
    """Return the values of each index, as arrays of the fields' shape."""
    shape, indices = call.cells[0].described.shape, []
    for axis, start in call.axes:
        numbers = np.arange(start, start + shape[axis])
        along = numbers.reshape([-1 if n == axis else 1 for n in range(len(shape))])
        indices.append(np.broadcast_to(along, shape))
    return indices


def _function(name: str, signature: tuple[DType, ...] | None) -> Callable[..., Any]:
    """Return a function of a step, called with its arguments and ``out``; a signature costs microseconds."""
    if name == "where":

        def where(condition: Array, a: Array, b: Array, out: Array) -> None:
            np.copyto(out, b)
            np.copyto(out, a, where=condition)

        return where
    if name in ("real", "imag"):
        return lambda cells, out: np.copyto(out, getattr(cells, name))
    function: np.ufunc = getattr(np, name)
    return function if signature is None else partial(function, signature=signature)
