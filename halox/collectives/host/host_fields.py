"""Reductions of a grid on the host: combined in the order of the ranks, the same bits on every rank.

Every call compares dtypes and layouts of the ranks, along with the errors of all, so that they raise together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from halox.collectives.array_reduction import ArrayReduction
from halox.collectives.cells import Cells, FindLayout, cells_of
from halox.collectives.host.cell_sums import dot, sum_of_squares, total
from halox.collectives.host.host_allreduce import HostAllreduce
from halox.collectives.operations import check_out, find_operation, result_dtype
from halox.collectives.prepared import MOST_ARRAYS, Launch, PreparedReductions, Signature, weak_call
from halox.decomposition import FieldLayout
from halox.errors import FieldError, HaloxError, MismatchError, as_halox_error
from halox.runtime.arrays import Array, DType, as_ndarray, describe
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module, to_host
from halox.runtime.world import World
from halox.values import shortened, shown

_REDUCING, _COMBINING = "a reduction", "an allreduce"

_OF_CELLS: dict[str, Callable[..., object]] = {
    "sum": total,
    "min": np.min,
    "max": np.max,
    "norm": sum_of_squares,
    "dot": dot,
}
_OF_RANKS: dict[str, Callable[..., object]] = {"min": np.min, "max": np.max}


class HostFieldReduction:
    """A reduction of fields of one layout and of given dtypes to one value; local to make."""

    def __init__(
        self, context: Context, name: str, dtypes: Sequence[DType], layout: FieldLayout
    ) -> None:
        self._world, self._name, self._layout = context.world, name, layout
        self.dtype, spec = result_dtype(name, dtypes), layout.spec
        self._of_cells, self._of_ranks = _OF_CELLS[name], _OF_RANKS.get(name, np.sum)
        self._signature = f"{','.join(dtype.str for dtype in dtypes)} {spec.digest}"
        self._shown = f"{', '.join(map(str, dtypes))}, {spec}"

    def __call__(self, cells: Sequence[object], out: object) -> object:
        """Return ``out``, or a NumPy scalar: the same bits on every rank.

        Combining the ranks' values raises no floating-point errors, whatever `numpy.errstate` is: the
        result is then infinite or NaN, on all ranks.
        """
        world, error = self._world, None
        mine: tuple[str, bytes] | None = None
        try:
            value = np.asarray(self._of_cells(*cells))
            mine = self._signature, value.tobytes()
        except Exception as caught:
            error = as_halox_error(caught, _REDUCING)
        found: list[tuple[str, bytes]] = world.gather(mine, _REDUCING, error)
        if any(signature != self._signature for signature, _ in found):
            world.compare({"the field reduced": self._shown}, _REDUCING)
        with np.errstate(all="ignore"):
            values = np.frombuffer(b"".join([raw for _, raw in found]), value.dtype)
            result = self._of_ranks(values)
        if self._name == "norm":
            result = np.sqrt(result)
        if out is None:
            return result
        as_ndarray(out)[...] = result
        return out

    def bind(
        self, cells: Sequence[Cells], out: object, again: Callable[..., object]
    ) -> Launch | None:
        """Prepare calls with these fields; None for arrays of other libraries."""
        fields = [one.field for one in cells]
        if not all(type(array) is np.ndarray for array in fields):
            return None
        # Held weakly, since launches are kept for as long as their arrays live.
        found = [(weakref.ref(one.field), one.dtype, one.layout.interior) for one in cells]
        find_out = None if out is None else weakref.ref(out)
        world, name = self._world, self._name

        def launch() -> object:
            views, place = [], None if find_out is None else find_out()
            for find, dtype, interior in found:
                field: Any = find()
                if field.dtype is not dtype:
                    return again(name, [find() for find, *_ in found], place)
                views.append(field[interior])
            with world.guard:
                world.begin(name)
                return self(views, place)

        return launch

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._world.agree(error, _REDUCING)

    def close(self) -> None:
        """Do nothing: it holds no memory."""


class HostArrays:
    """A grid's reductions of arrays on the host, and the cache of all of its reductions."""

    fields: PreparedReductions[Any]

    def __init__(self, context: Context, device: int | None, find_layout: FindLayout) -> None:
        self._context, self._world, self._device = context, context.world, device
        self._find_layout = find_layout
        self.fields = PreparedReductions()
        self.arrays: PreparedReductions[ArrayReduction] = PreparedReductions(MOST_ARRAYS)

    def array(self, op: str, arrays: Sequence[object], out: object) -> object:
        """Combine an array of each rank, element by element; collective, blocks."""
        array = arrays[0]
        with self._world.guard:
            self._world.begin("allreduce", op)
            error: Exception | None = None
            signature: Signature | None = None
            try:
                host = _values(array, op, out)
                signature = "cpu", op, host.shape, host.dtype.str
            except Exception as caught:
                error = as_halox_error(caught, _COMBINING)
            _compare(self._world, signature, error)
            assert signature is not None
            reduction = self.arrays.reductions.get(signature)
            if reduction is None:
                begin = partial(_begin, self._world, op, signature)
                prepared = begin, weak_call(self.array)
                made = HostAllreduce(self._context, host.shape, host.dtype, op, prepared=prepared)
                reduction = self.arrays.add(signature, made)
            result = reduction(host, out)
        if isinstance(array, np.ndarray):
            bind = reduction.bind
            self.arrays.prepare(op, arrays, out, lambda: bind(array, out))
        elif out is None:
            return result[()] if np.isscalar(array) else array_module(self._device).asarray(result)
        return result

    def forget(self) -> None:
        """Forget prepared calls, since a declaration has changed; local."""
        self.fields.forget()

    def close(self) -> None:
        """Free what reductions hold; collective."""
        self.fields.close()
        self.arrays.close()


class HostReductions(HostArrays):
    """A grid's reductions on the host."""

    fields: PreparedReductions[HostFieldReduction]

    def field(self, name: str, fields: Sequence[object], out: object) -> object:
        """Reduce fields to one value; collective, blocks."""
        with self._world.guard:
            self._world.begin(name)
            try:
                cells = cells_of(name, fields, self._find_layout)
                # A layout is one object for equal ones, and lives as long as its reduction.
                layout = cells[0].layout
                dtypes = [one.dtype for one in cells]
                signature = (name, *dtypes, id(layout))
                reduction = self.fields.reductions.get(signature)
                if reduction is None:
                    made = HostFieldReduction(self._context, name, dtypes, layout)
                    reduction = self.fields.add(signature, made)
                if out is not None:
                    check_out(describe(out, "out"), None, reduction.dtype)
                views = [one.view() for one in cells]
            except Exception as error:
                self._world.agree(as_halox_error(error, _REDUCING), _REDUCING)
                raise
            result = reduction(views, out)
        arrays, again = (*fields, None)[:2], self.field
        self.fields.prepare(name, arrays, out, lambda: reduction.bind(cells, out, weak_call(again)))
        return result


def _begin(world: World, op: str, signature: Signature) -> None:
    """Begin a prepared call of arrays."""
    world.begin("allreduce", op)
    _compare(world, signature, None)


def _compare(world: World, mine: Signature | None, error: Exception | None) -> None:
    """Raise on all ranks if one has an error, or two reduce different arrays."""
    found: list[Signature] = world.gather(mine, _COMBINING, error)
    for rank, other in enumerate(found):
        if other == found[0]:
            continue
        name, part = (
            ("operation", 1) if other[2:] == found[0][2:] else ("shape and dtype", slice(2, 4))
        )
        raise MismatchError(
            f"allreduce needs the same {name} on all ranks: rank 0 gave {found[0][part]}, rank {rank} {other[part]}"
        )


def _values(array: object, op: str, out: object) -> Array:
    """Return an array or a number as an array of NumPy, which the operation has a meaning for."""
    try:
        host = to_host(array)
    except HaloxError:
        raise
    except Exception as error:  # NumPy raises several kinds, and objects their own
        raise FieldError(
            f"array: {shown(array)} is neither an array nor a number ({shortened(str(error))})"
        ) from error
    find_operation(op, host.dtype)
    if out is not None:
        check_out(describe(out, "out"), host.shape, host.dtype)
    return host
