"""Reductions of a grid on the host: combined in the order of the ranks, the same bits on every rank.

Every call compares dtypes and layouts of the ranks, along with their errors, so that all ranks raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halox.collectives.cells import Cells, cells_of
from halox.collectives.host.cell_sums import dot, moments, sum_of_squares, total
from halox.collectives.host.grid_allreduce import DOING as _COMBINING
from halox.collectives.host.grid_allreduce import GridAllreduce
from halox.collectives.operations import check_out, result_dtype
from halox.collectives.prepared import MOST_ARRAYS, Launch, PreparedReductions
from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError, HaloxError, as_halox_error
from halox.runtime.arrays import Array, DType, as_ndarray, describe
from halox.runtime.context import Context
from halox.runtime.gathered_values import GatheredValues
from halox.runtime.gpu.devices import array_module, to_host
from halox.values import shortened, shown

_REDUCING = "a reduction"

# How a rank combines its cells, and how the ranks' values are combined: by `numpy.add` unless the name is here.
_OF_CELLS: dict[str, Callable[..., object]] = {
    "sum": total,
    "min": lambda cells: np.minimum.reduce(cells, None),
    "max": lambda cells: np.maximum.reduce(cells, None),
    "norm": sum_of_squares,
    "dot": dot,
}
_OF_RANKS: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum}


class HostFieldReduction:
    """A reduction of fields of one layout and of given dtypes to one value; the constructor is local."""

    def __init__(
        self, context: Context, name: str, dtypes: Sequence[DType], layout: FieldLayout
    ) -> None:
        self._world, self._name, self._layout = context.world, name, layout
        self.dtype, spec = result_dtype(name, dtypes), layout.spec
        self._of_cells, self._of_ranks = _OF_CELLS[name], _OF_RANKS.get(name, np.add)
        self._shown = f"{', '.join(map(str, dtypes))}, {spec}"
        meaning = name, [dtype.str for dtype in dtypes], spec.digest
        self._values = GatheredValues(context.world, meaning, self.dtype, 1)

    def __call__(self, cells: Sequence[object], out: object) -> object:
        """Return ``out``, or a NumPy scalar: the same bits on every rank.

        Combining the ranks' values raises no floating-point errors, for any `numpy.errstate`: the result is then
        infinite or NaN, on all ranks.
        """
        try:
            mine = np.asarray(self._of_cells(*cells), self.dtype).tobytes()
        except Exception as caught:
            self.refuse(as_halox_error(caught, _REDUCING))
        values = self._values.gather(mine, _REDUCING)
        if values is None:
            self._world.compare({"the field reduced": self._shown}, _REDUCING)
            raise AssertionError("ranks have met with fields of two kinds, and then of one")
        result = _combined(self._of_ranks, values)
        if self._name == "norm":
            result = np.sqrt(result)
        if out is None:
            return result
        as_ndarray(out)[...] = result
        return out

    def bind(self, cells: Sequence[Cells]) -> Launch | None:
        """Prepare calls with these fields; None for arrays of other libraries."""
        fields = [each.field for each in cells]
        if not all(type(array) is np.ndarray for array in fields):
            return None
        world, name, run, count = self._world, self._name, self.__call__, len(cells)
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
        self._world.agree(error, _REDUCING)

    def close(self) -> None:
        """Do nothing: this object holds no memory."""


class HostArrays:
    """A grid's reductions of arrays on the host, and the cache of all its reductions."""

    fields: PreparedReductions[Any]

    def __init__(self, domain: Domain) -> None:
        self._context, self._world, self._device = domain.context, domain.world, domain.device_id
        self._find_layout = domain.layouts.find
        self.fields = PreparedReductions()
        self.arrays: PreparedReductions[Any] = PreparedReductions(MOST_ARRAYS)

    def array(self, op: str, array: object, out: object) -> object:
        """Combine an array of each rank, element by element; collective, blocks."""
        with self._world.guard:
            self._world.begin("allreduce", op)
            is_new = False
            try:
                host = array if type(array) is np.ndarray else _values(array)
                known = self.arrays.reductions
                signature = "cpu", op, host.dtype, host.shape
                reduction: Any = known.get(signature) if isinstance(op, str) else None
                if reduction is None:
                    is_new = True
                    reduction = GridAllreduce(self._context, op, host.dtype, host.shape)
                target = reduction.target(out)
            except Exception as caught:
                self._world.agree(as_halox_error(caught, _COMBINING), _COMBINING)
            result: Any = reduction(host, target)
            if is_new:  # on all ranks, since the call has compared the signature
                self.arrays.add(signature, reduction)
        if out is not None or isinstance(array, np.ndarray):
            return result
        return result[()] if np.isscalar(array) else array_module(self._device).asarray(result)

    def close(self) -> None:
        """Free the reductions' memory and communicators; collective."""
        self.fields.close()
        self.arrays.close()


class HostReductions(HostArrays):
    """A grid's reductions on the host."""

    fields: PreparedReductions[HostFieldReduction]
    moments = staticmethod(moments)

    def field(self, name: str, fields: tuple[object, ...], out: object) -> object:
        """Reduce fields to one value; collective, blocks."""
        with self._world.guard:
            self._world.begin(name)
            try:
                cells = cells_of(name, fields, self._find_layout)
                # Equal layouts are one object, which lives as long as its reduction.
                layout = cells[0].layout
                dtypes = [each.dtype for each in cells]
                signature = (name, *dtypes, id(layout))
                reduction = self.fields.reductions.get(signature)
                if reduction is None:
                    reduction = HostFieldReduction(self._context, name, dtypes, layout)
                    self.fields.add(signature, reduction)
                if out is not None:
                    check_out(describe(out, "out"), None, reduction.dtype)
                views = [each.view() for each in cells]
            except Exception as error:
                self._world.agree(as_halox_error(error, _REDUCING), _REDUCING)
                raise
            result = reduction(views, out)
        self.fields.prepare(name, fields, out, lambda: reduction.bind(cells))
        return result


@np.errstate(all="ignore")
def _combined(of_ranks: np.ufunc, values: Sequence[Array]) -> Any:
    return of_ranks.reduce(np.concatenate(values) if len(values) > 1 else values[0])


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
