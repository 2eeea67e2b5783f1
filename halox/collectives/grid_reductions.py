"""Reductions of a grid: of its fields' cells, and of arrays of all ranks.

Public methods of `halox.Grid`, with what they share. A call with arrays that a call was prepared for costs a look in a
dict and a launch; so these are methods of the grid itself, and forward nothing before that look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halox.collectives.device.device_fields import Cells, DeviceNumbers
from halox.collectives.host import cell_sums as local
from halox.collectives.operations import find_operation
from halox.collectives.reductions import (
    check_numeric,
    check_ordered,
    check_out,
    reduce_array,
    reduce_scalar,
)
from halox.decomposition import FieldLayout, FieldSpec
from halox.errors import FieldError, HaloxError
from halox.runtime.arrays import as_ndarray, describe
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import array_module, as_device_array, to_host
from halox.runtime.world import World
from halox.values import shortened, shown


class GridReductions:
    """Reductions as methods; for a grid, which calls `_make_reductions` when it is made."""

    _world: World
    _numbers: DeviceNumbers | None

    def layout(self, field: Any) -> FieldLayout:
        """Return the layout of a field; the grid's."""
        raise NotImplementedError

    def _make_reductions(self, context: Context, device: int | None) -> None:
        """Prepare for reductions of arrays on a device."""
        self._device = device
        self._numbers = None if device is None else DeviceNumbers(context, device)

    def _forget_layouts(self) -> None:
        """Look at all fields again, since a declaration has changed; local."""
        if self._numbers is not None:
            self._numbers.forget()

    def _close_reductions(self) -> None:
        """Free what reductions hold; collective."""
        if self._numbers is not None:
            self._numbers.close()

    def sum(self, field: Any, out: Any = None) -> Any:
        """Return the sum over the whole field, components included, halo left out.

        Parameters
        ----------
        field : array
            Of numbers; made by this grid, or of its padded shape on its device.
        out : array, optional
            Of one element of the result's dtype, on the grid's device, where the result is written.

        Returns
        -------
        scalar or array
            ``out``; or else a NumPy scalar, and on a GPU a CuPy array of shape (): ``float(x)`` brings it to the host.
            Floats are added in float64, complex ones in complex128, integers in 64 bits.

        Raises
        ------
        FieldError
            If the dtype has no such operation, the array does not fit the grid, or ``out`` the result.
        MismatchError
            If the ranks' dtypes or layouts (components, staggering, halo) differ; on a GPU dtypes only, at the first
            call with one.
        StateError
            If CuPy's current stream is being captured, and this is the first call with this dtype and shape, or
            ranks share a GPU or are on several nodes; if another thread is inside a collective call of this grid.
        ExchangeTimeoutError
            If a rank does not come within ``HALOX_TIMEOUT`` seconds; where GPUs signal to one another, if one did not
            come to an earlier call. That result, and those since, are not valid.

        Notes
        -----
        Collective, and the same for all reductions: the same bits on every rank and in every run. Blocks on the host.
        On a GPU it is ordered with the current stream. Where every rank has a GPU of its own, and all map one another's
        memory, it is one launch that does not block and can be captured in a CUDA graph, once it has been called; else
        it goes the way of a `halox.Allreduce` of one element.

        There, an error that only one rank can see (an array that does not fit) is raised on it at once, and after the
        first call as a `MismatchError` on the others when they call again; that result is not valid.
        """
        return self._number("sum", local.total, out, field)

    def min(self, field: Any, out: Any = None) -> Any:
        """Return the smallest value of a real field; NaN if there is one. All else as of `sum`."""
        return self._number("min", np.min, out, field)

    def max(self, field: Any, out: Any = None) -> Any:
        """Return the largest value of a real field; NaN if there is one. All else as of `sum`."""
        return self._number("max", np.max, out, field)

    def norm(self, field: Any, out: Any = None) -> Any:
        """Return the Euclidean norm, formed in float64. All else as of `sum`."""
        return self._number("norm", local.sum_of_squares, out, field)

    def dot(self, field: Any, other: Any, out: Any = None) -> Any:
        """Return the sum of ``conj(field) * other``, formed in float64, complex128 or 64-bit integers.

        The fields are of one layout. All else as of `sum`.
        """
        return self._number("dot", local.dot, out, field, other)

    def allreduce(self, array: Any, op: str = "sum", out: Any = None) -> Any:
        """Combine arrays that are not fields, element by element, over all ranks.

        Parameters
        ----------
        array : scalar, numpy.ndarray or array on this rank's GPU
            Of one shape and dtype on all ranks.
        op : str
            As of `halox.Allreduce`, which does the same again and again without comparing shapes each time.
        out : array, optional
            Of the array's shape and dtype, where the result is written; may be ``array`` itself.

        Returns
        -------
        scalar or array
            ``out``, or a new array where ``array`` is; the same bits on every rank.

        Raises
        ------
        FieldError
            If the operation has no meaning for the dtype, or ``out`` does not fit.
        MismatchError
            If ranks give different shapes, dtypes or operations; on a GPU at the first call with these.
        StateError, ExchangeTimeoutError
            As of `sum`.

        Notes
        -----
        Collective. Blocks for arrays on the host. Of arrays on a GPU grid's GPU each first call with a shape, dtype and
        operation makes a `halox.Allreduce`, of which the grid keeps the 32 that were made last; so such calls must
        come in one order on all ranks. Later calls cost what those of a `halox.Allreduce` cost.
        """
        if self._numbers is not None:
            try:
                prepared = self._numbers.arrays_seen.found.get((op, id(array), id(out)))
            except TypeError:  # an operation that is none
                prepared = None
            if prepared is not None:
                launch, shape = prepared
                if array.shape == shape and (out is None or out is array or out.shape == shape):
                    result = launch()
                    return result if out is None else out
        if self._numbers is not None and is_device_array(array):
            with self._world.guard:
                self._world.check_open()
                return self._numbers.array(array, op, out)
        with self._world.guard:
            return self._allreduce_on_host(array, op, out)

    def _allreduce_on_host(self, array: Any, op: str, out: Any) -> Any:
        self._world.begin("allreduce", op)

        def prepare() -> np.ndarray[Any, Any]:
            try:
                host = np.ascontiguousarray(to_host(array))
            except HaloxError:
                raise
            except Exception as error:  # NumPy's of several kinds, and what an object raises
                raise FieldError(
                    f"array: {shown(array)} is neither an array nor a number ({shortened(str(error))})"
                ) from error
            find_operation(op, host.dtype)
            if out is not None:
                check_out(describe(out, "out"), np.shape(array), host.dtype)
            return host

        host = self._world.guarded(prepare, "an allreduce")
        result = reduce_array(self._world, host.reshape(np.shape(array)), op)
        if out is not None:
            if is_device_array(out):
                as_device_array(out)[...] = array_module(self._device).asarray(result)
            else:
                out[...] = result
            return out
        if isinstance(array, np.ndarray) or np.isscalar(array):
            return result if isinstance(array, np.ndarray) else result[()]
        return array_module(self._device).asarray(result)

    def _number(
        self, name: str, local_number: Callable[..., Any], out: Any, field: Any, other: Any = None
    ) -> Any:
        """Reduce fields to a number: on the host by this function of their cells, and a sum or so of the ranks."""
        if self._numbers is not None:
            prepared = self._numbers.numbers_seen.found.get((name, id(field), id(other), id(out)))
            if prepared is not None:
                launch, shape = prepared
                if field.shape == shape and (other is None or other.shape == shape):
                    result = launch()
                    return result if out is None else out
        fields = (field,) if name != "dot" else (field, other)
        if self._numbers is not None:
            with self._world.guard:
                self._world.check_open()
                return self._numbers.number(name, fields, lambda: self._cells(name, fields), out)

        def value() -> tuple[Any, str, FieldSpec]:
            cells = [one.view() for one in self._cells(name, fields)]
            for one in cells:
                check_numeric(one.dtype, name)
                check_ordered(one.dtype, name)
            found = np.asarray(local_number(*cells))
            if out is not None:
                check_out(describe(out, "out"), None, found.dtype)
            dtypes = ",".join([one.dtype.str for one in cells])
            return found, dtypes, self.layout(fields[0]).spec

        op = name if name in ("min", "max") else "sum"
        with self._world.guard:
            self._world.begin(name)
            result = reduce_scalar(self._world, value, op)
        if name == "norm":
            result = np.sqrt(result)
        if out is None:
            return result
        as_ndarray(out)[...] = result
        return out

    def _cells(self, name: str, fields: Sequence[Any]) -> list[Cells]:
        """Return the cells of fields, halos left out."""
        layouts = [self.layout(field) for field in fields]
        if layouts[-1] is not layouts[0] and layouts[-1].spec != layouts[0].spec:
            raise FieldError(
                f"{name} needs two fields of one layout, got shapes {fields[0].shape} and {fields[1].shape}"
            )
        return [_cells_of(field, layout) for field, layout in zip(fields, layouts, strict=True)]


def _cells_of(field: Any, layout: FieldLayout) -> Cells:
    """Return the cells of a field without making a view of it, which takes longer on a GPU than a launch."""
    whole, interior = describe(field, "field"), layout.interior
    if tuple(whole.shape) != layout.padded_shape:
        raise FieldError(
            f"field: its shape is {tuple(whole.shape)} now, and was {layout.padded_shape} when the grid read it; take "
            "a reshaped view instead, which is a field of its own"
        )
    pointer, shape = whole.pointer, []
    for cut, extent, stride in zip(interior, whole.shape, whole.strides, strict=True):
        start, stop = cut.start or 0, extent if cut.stop is None else cut.stop
        pointer += start * stride
        shape.append(stop - start)
    found = replace(whole, pointer=pointer, shape=tuple(shape))
    # On the host a view of NumPy, since sums of other libraries are formed in other dtypes.
    return Cells(found, lambda: as_ndarray(field)[interior])
