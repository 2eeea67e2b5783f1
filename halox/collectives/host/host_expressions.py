"""Reductions of expressions on the host, in blocks that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, starmap
from typing import Any

import numpy as np

from halox.collectives.expressions import Program, Request, Typed
from halox.collectives.host.exact_sums import MOST, RECORD_BYTES, ExactSum, exact_sums
from halox.collectives.host.host_fields import (
    OF_CELLS,
    OF_RANKS,
    HostFieldReduction,
    combined,
    join,
    rounded,
)
from halox.collectives.operations import REPRODUCIBLE
from halox.collectives.prepared import Launch
from halox.decomposition.blocks import blocks
from halox.errors import FieldError
from halox.runtime.arrays import Array, DType, as_ndarray
from halox.runtime.context import Context
from halox.runtime.gathered_values import GatheredValues


class Blocks:
    """Evaluates a program block by block, in a few arrays of the size of a block."""

    def __init__(self, program: Program, ops: Sequence[str]) -> None:
        dtypes = program.dtypes
        self._registers: list[Any] = [None] * len(dtypes)
        self._scalars = list(program.scalars)
        self._results = [
            (register, register in program.scalars, _of_block(op))
            for register, op in zip(program.results, ops, strict=True)
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

    def reduce(self, inputs: Sequence[Array], values: Sequence[Array]) -> list[list[Any]]:
        """Return, for each result, the values of all blocks; for exact sums, lists of their records."""
        first = inputs[0]
        scratch = [np.empty(min(MOST, first.size), dtype) for dtype in self._dtypes]
        registers = [*self._registers]
        for register, value in zip(self._scalars, values, strict=True):
            registers[register] = value
        partials: list[list[Any]] = [[] for _ in self._results]
        for index in [()] if 0 < first.size <= MOST else blocks(first.shape, MOST):
            registers[: len(inputs)] = [each[index] for each in inputs]
            shape, size = registers[0].shape, registers[0].size
            for register, function, args, array in self._steps:
                out = registers[register] = scratch[array][:size].reshape(shape)
                function(*[registers[arg] for arg in args], out=out)
            for found, (register, is_scalar, of_block) in zip(partials, self._results, strict=True):
                cells = registers[register]
                found.append(of_block(np.broadcast_to(cells, shape) if is_scalar else cells))
        return partials


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


def _of_block(op: str) -> Callable[[Array], Any]:
    if not op.startswith(REPRODUCIBLE):
        return OF_CELLS[op]
    plain = op.removeprefix(REPRODUCIBLE)
    return lambda cells: [each.record() for each in exact_sums(plain, cells)]


class HostExpressions(HostFieldReduction):
    """Reductions of expressions of fields with given layouts and dtypes; the constructor is local."""

    def __init__(self, context: Context, call: Typed) -> None:
        self._world, self._shown, self._call = context.world, call.meaning, call.without_arrays()
        self._blocks, shape = Blocks(call.program, call.ops), call.cells[0].described.shape
        self._indices = []
        for axis, start in call.axes:
            numbers = np.arange(start, start + shape[axis])
            along = numbers.reshape([-1 if n == axis else 1 for n in range(len(shape))])
            self._indices.append(np.broadcast_to(along, shape))
        self._is_exact = call.ops[0].startswith(REPRODUCIBLE)
        sizes = [
            RECORD_BYTES * (dtype.itemsize // 8) if self._is_exact else dtype.itemsize
            for dtype in call.dtypes
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._parts = list(zip(call.ops, call.dtypes, starmap(slice, pairwise(ends)), strict=True))
        u1 = np.dtype("u1")
        self._values = GatheredValues(context.world, call.meaning, u1, (ends[-1],), self._join)

    def _join(self, total: Array, other: Array) -> None:
        for op, dtype, part in self._parts:
            join(op, total[part].view(dtype), other[part].view(dtype))

    @np.errstate(all="ignore")
    def _of_cells(self, cells: Sequence[Any]) -> Array:
        """Return this rank's values, for ``cells``: arrays of the fields' cells, and the scalars."""
        views, values = cells
        call = self._call
        partials = self._blocks.reduce([*views, *self._indices], values)
        if self._is_exact:
            parts = [ExactSum(part).record() for part in zip(*partials[0], strict=True)]
        else:
            parts = [
                np.asarray(
                    found[0] if len(found) == 1 else OF_RANKS.get(op, np.add).reduce(found), dtype
                ).tobytes()
                for found, op, dtype in zip(partials, call.ops, call.dtypes, strict=True)
            ]
        return np.frombuffer(b"".join(parts), "u1")

    def _of_ranks(self, values: Sequence[Array]) -> list[Any]:
        results: list[Any] = []
        for op, dtype, part in self._parts:
            parts = [each[part] for each in values]
            if self._is_exact:
                records = [each.tobytes() for each in parts]
                results.append(rounded(op.removeprefix(REPRODUCIBLE), records, dtype))
            else:
                results.append(combined(op, np.concatenate(parts).view(dtype)))
        return results

    def _delivered(self, result: Any, out: Any) -> Any:
        if out is None:
            return result
        for value, one in zip(result, out, strict=True):
            as_ndarray(one)[...] = value
        return [*out]

    def bind_call(self, request: Request, call: Typed) -> Launch | None:
        """Prepare calls with these fields; None for arrays of other libraries."""
        names, keys, program = tuple(request.named), request.keys, call.program
        places = [
            (names.index(name), cells.layout.interior)
            for name, cells in zip(call.names, call.cells, strict=True)
        ]
        if not all(type(cells.field) is np.ndarray for cells in call.cells):
            return None
        world, run, count, name = self._world, self.__call__, len(names), request.call

        def launch(arguments: Sequence[Any]) -> Any:
            views = [arguments[place][interior] for place, interior in places]
            with world.guard:
                world.begin(name)
                try:
                    values = program.values(dict(zip(names, arguments, strict=False)))
                except FieldError as error:
                    self.refuse(error)
                results: Any = run((views, values), arguments[count:] or None)
            return results[0] if keys is None else dict(zip(keys, results, strict=True))

        return launch
