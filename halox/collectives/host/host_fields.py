"""Reductions of a grid on the host: combined in the order of the ranks, the same bits on every rank.

Every call compares dtypes and layouts of the ranks, along with their errors, so that all ranks raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from halox.collectives.cells import Cells, cells_of
from halox.collectives.expressions import Request, typed
from halox.collectives.host.cell_sums import dot, ends, moments, place, sum_of_squares, total
from halox.collectives.host.exact_sums import RECORD_BYTES, ExactSum, exact_sums
from halox.collectives.host.host_allreduce import DOING as _COMBINING
from halox.collectives.host.host_allreduce import HostAllreduce
from halox.collectives.operations import (
    REPRODUCIBLE,
    check_out,
    field_reduction_name,
    result_dtype,
)
from halox.collectives.prepared import MOST_ARRAYS, Launch, PreparedReductions
from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError, HaloxError, as_halox_error, raising
from halox.runtime.arrays import Array, DType, as_ndarray, describe
from halox.runtime.context import Context
from halox.runtime.gathered_values import GatheredValues
from halox.runtime.gpu.devices import array_module, to_host
from halox.values import shortened, shown

_REDUCING = "a reduction"

MOST_FIELDS = 256
"""Most reductions of fields that a grid keeps on the host."""

# How a rank combines its cells, and how the ranks' values are combined: by `numpy.add` unless the name is here.
OF_CELLS: dict[str, Callable[..., object]] = {
    "sum": total,
    "min": lambda cells: np.minimum.reduce(cells, None),
    "max": lambda cells: np.maximum.reduce(cells, None),
    "norm": sum_of_squares,
    "dot": dot,
}
OF_RANKS: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum}


@np.errstate(all="ignore")
def combined(name: str, values: Array) -> Any:
    """Return the result of a reduction from its values on all ranks."""
    result = OF_RANKS.get(name, np.add).reduce(values)
    return np.sqrt(result) if name == "norm" else result


def rounded(name: str, records: Sequence[bytes], dtype: DType) -> Any:
    """Return the result of a reproducible reduction from the records of exact sums, of one part or two."""
    starts = range(0, len(records[0]), RECORD_BYTES)
    parts = [ExactSum([r[i : i + RECORD_BYTES] for r in records]).rounded() for i in starts]
    result = np.array(parts).view(dtype)[0]
    return np.sqrt(result) if name == "norm" else result


@np.errstate(all="ignore")
def join(name: str, total: Array, other: Array) -> None:
    """Combine the values of two groups of ranks in ``total``; of reproducible reductions the records of exact sums."""
    if name.startswith(REPRODUCIBLE):
        parts = [each.view("u1").reshape(-1, RECORD_BYTES) for each in (total, other)]
        for mine, more in zip(*parts, strict=True):
            mine[...] = np.frombuffer(ExactSum([mine.tobytes(), more.tobytes()]).record(), "u1")
    else:
        OF_RANKS.get(name, np.add)(total, other, out=total)


class HostFieldReduction:
    """A reduction of fields of one layout and of given dtypes to one value; the constructor is local."""

    def __init__(
        self, context: Context, name: str, dtypes: Sequence[DType], layout: FieldLayout
    ) -> None:
        self._world, self._name, self._layout = context.world, name, layout
        self.dtype, spec = result_dtype(name, dtypes), layout.spec
        self._shown = f"{', '.join(map(str, dtypes))}, {spec}"
        meaning = name, [dtype.str for dtype in dtypes], spec.digest
        dtype, count = self._record()
        self._values = GatheredValues(context.world, meaning, dtype, (count,), partial(join, name))

    def _record(self) -> tuple[DType, int]:
        """Return the dtype and the number of the values that each rank sends."""
        return self.dtype, 1

    def _of_cells(self, cells: Sequence[Any]) -> Any:
        """Return this rank's value, or the array of its values."""
        return OF_CELLS[self._name](*cells)

    def _of_ranks(self, values: Sequence[Array]) -> Any:
        """Combine the values of all ranks."""
        return combined(self._name, np.concatenate(values) if len(values) > 1 else values[0])

    def _delivered(self, result: Any, out: object) -> object:
        if out is None:
            return result
        as_ndarray(out)[...] = result
        return out

    def __call__(self, cells: Sequence[Any], out: object) -> object:
        """Return ``out``, or a NumPy scalar: the same bits on every rank.

        Combining the ranks' values raises no floating-point errors, for any `numpy.errstate`: the result is then
        infinite or NaN, on all ranks.
        """
        try:
            mine = self._of_cells(cells)
        except Exception as caught:
            self.refuse(as_halox_error(caught, _REDUCING))
        values = self._values.gather(mine, _REDUCING)
        if values is None:
            self._world.attempt(
                lambda: (None, {"the field reduced": self._shown}), _REDUCING, alike=True
            )
            raise AssertionError("ranks have met with fields of two kinds, and then of one")
        return self._delivered(self._of_ranks(values.each), out)

    def bind(self, cells: Sequence[Cells]) -> Launch | None:
        """Prepare calls with these fields; None for arrays of other libraries."""
        fields = [each.field for each in cells]
        if not all(type(array) is np.ndarray for array in fields):
            return None
        world, run, count = self._world, self.__call__, len(cells)
        name = self._name.removeprefix(REPRODUCIBLE)
        interior = self._layout.interior

        def launch(arrays: Sequence[Any]) -> object:
            views = [arrays[0][interior]]
            if count == 2:
                views.append(arrays[1][interior])
            with world.guard:
                world.begin(name)
                return run(views, arrays[count] if len(arrays) > count else None)

        return launch

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._world.attempt(raising(error), _REDUCING)

    def close(self) -> None:
        """Do nothing: this object holds no memory."""


class ExactFieldReduction(HostFieldReduction):
    """A reproducible sum, norm or dot product."""

    def _record(self) -> tuple[DType, int]:
        self._plain = self._name.removeprefix(REPRODUCIBLE)
        self._shown += ", reproducible=True"
        return np.dtype("u1"), RECORD_BYTES * (self.dtype.itemsize // 8)

    def _of_cells(self, cells: Sequence[Any]) -> Array:
        records = [each.record() for each in exact_sums(self._plain, *cells)]
        return np.frombuffer(b"".join(records), "u1")

    def _of_ranks(self, values: Sequence[Array]) -> Any:
        return rounded(self._plain, [each.tobytes() for each in values], self.dtype)


class HostArrays:
    """A grid's reductions of arrays on the host, and the cache of all its reductions."""

    fields: PreparedReductions[Any]

    def __init__(self, domain: Domain) -> None:
        self._domain, self._context = domain, domain.context
        self._world, self._device = domain.world, domain.device_id
        self._find_layout = domain.layouts.find_cells
        # Of texts with numbers in them; on the host, closing a reduction is local.
        self.fields = PreparedReductions(MOST_FIELDS if domain.device_id is None else None)
        self.arrays: PreparedReductions[Any] = PreparedReductions(MOST_ARRAYS)
        # The latest operation and its launch, which returns None for arrays of another dtype or shape.
        self._latest: tuple[object, Callable[[Any, Any], Any]] = None, lambda *_: None

    def array(self, op: str, array: Any, out: object) -> object:
        """Combine an array of each rank, element by element; collective, blocks."""
        latest, launch = self._latest
        if op is latest and not self._world.closed:
            result = launch(array, out)
            if result is not None:
                return result
        known = self.arrays.reductions
        if type(array) is np.ndarray and type(op) is str:
            found = known.get(("cpu", op, array.dtype, array.shape))
            if found is not None and not self._world.closed:
                self._latest = op, found.launch
                result = found.launch(array, out)
                if result is not None:
                    return result
        with self._world.guard:
            self._world.begin("allreduce", op)
            try:
                host = array if type(array) is np.ndarray else _values(array)
                signature = "cpu", op, host.dtype, host.shape
                reduction: Any = known.get(signature) if isinstance(op, str) else None
                is_new = reduction is None
                if is_new:
                    reduction = HostAllreduce(
                        self._context, host.shape, host.dtype, op, compares=True
                    )
            except Exception as caught:
                self._world.attempt(raising(as_halox_error(caught, _COMBINING)), _COMBINING)
            result = reduction(host, out)
            if is_new:  # on all ranks, since the call has compared the signature
                self.arrays.add(signature, reduction)  # may close the latest one
                self._latest = op, reduction.launch
        if out is not None or isinstance(array, np.ndarray):
            return result
        return result[()] if np.isscalar(array) else array_module(self._device).asarray(result)

    def refuse(self, name: str, error: HaloxError) -> NoReturn:
        """Raise the error of a call's argument, on all ranks if the host takes part; collective."""
        with self._world.guard:
            self._world.begin(name)
            self._world.attempt(raising(error), _REDUCING)
        raise error

    def close(self) -> None:
        """Free the reductions' memory and communicators; collective."""
        self.fields.close()
        self.arrays.close()


class HostReductions(HostArrays):
    """A grid's reductions on the host."""

    fields: PreparedReductions[HostFieldReduction]
    moments = staticmethod(moments)
    ends = staticmethod(ends)
    place = staticmethod(place)

    def field(self, name: str, fields: tuple[object, ...], out: object) -> object:
        """Reduce fields to one value; collective, blocks."""
        with self._world.guard:
            self._world.begin(name.removeprefix(REPRODUCIBLE))
            try:
                cells = cells_of(name.removeprefix(REPRODUCIBLE), fields, self._find_layout)
                # Equal layouts are one object, which lives as long as its reduction.
                layout = cells[0].layout
                dtypes = [each.dtype for each in cells]
                found_name = field_reduction_name(name, dtypes)
                signature = (found_name, *dtypes, id(layout))
                reduction = self.fields.reductions.get(signature)
                if reduction is None:
                    is_exact = found_name.startswith(REPRODUCIBLE)
                    make = ExactFieldReduction if is_exact else HostFieldReduction
                    reduction = make(self._context, found_name, dtypes, layout)
                    self.fields.add(signature, reduction)
                if out is not None:
                    check_out(describe(out, "out"), None, reduction.dtype)
                views = [each.view() for each in cells]
            except Exception as error:
                self._world.attempt(raising(as_halox_error(error, _REDUCING)), _REDUCING)
                raise
            result = reduction(views, out)
        self.fields.prepare(name, fields, out, lambda: reduction.bind(cells))
        return result

    def expressions(self, request: Request, key: Hashable) -> Any:
        """Reduce expressions of fields, each to one value; collective, blocks."""
        from halox.collectives.host.host_expressions import HostExpressions

        with self._world.guard:
            self._world.begin(request.call)
            try:
                call = typed(request, self._domain)
                values = call.program.values(request.named)
                signature = *request.title, call.meaning
                found = self.fields.reductions.get(signature)
                if found is None:
                    found = HostExpressions(self._context, call)
                    self.fields.add(signature, found)
                for out, dtype in zip(request.outs, call.dtypes, strict=bool(request.outs)):
                    check_out(describe(out, "out"), None, dtype)
                views = [each.view() for each in call.cells]
            except Exception as error:
                self._world.attempt(raising(as_halox_error(error, _REDUCING)), _REDUCING)
                raise
            results = found((views, values), request.outs or None)
        reduction: Any = found
        arrays = request.arrays()
        self.fields.prepare(key, arrays, None, lambda: reduction.bind_call(request, call))
        return request.returned(results)


def _values(array: object) -> Array:
    """Return an array or a number as a NumPy array."""
    try:
        return to_host(array)
    except HaloxError:
        raise
    except Exception as error:  # NumPy raises several types
        raise FieldError(
            f"array: {shown(array)} is neither an array nor a number ({shortened(str(error))})"
        ) from error
