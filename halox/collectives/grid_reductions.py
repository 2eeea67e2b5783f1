"""Reductions of a grid: of its fields' cells, and of arrays of all ranks.

These are public methods of `halox.Grid`, with their cache. A call with the arrays of a prepared call costs a dict
look-up and a launch. Therefore the methods belong to the grid itself, and call no other method before the look-up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from halox.collectives.cells import FindLayout
from halox.collectives.device.device_fields import DeviceReductions
from halox.collectives.host.host_fields import HostReductions
from halox.collectives.prepared import Launch, Shape
from halox.runtime.context import Context


class GridReductions:
    """Reductions as methods of a grid, which calls `_make_reductions` in its constructor."""

    _reductions: HostReductions | DeviceReductions
    _of_fields: dict[Hashable, tuple[Launch, Shape]]
    _of_arrays: dict[Hashable, tuple[Launch, Shape]]

    def _make_reductions(
        self, context: Context, device: int | None, find_layout: FindLayout
    ) -> None:
        """Prepare for reductions of arrays on a device; local."""
        if device is None:
            self._reductions = HostReductions(context, device, find_layout)
        else:
            self._reductions = DeviceReductions(context, device, find_layout)
        self._of_fields = self._reductions.fields.launches
        self._of_arrays = self._reductions.arrays.launches

    def sum(self, field: Any, out: Any = None) -> Any:
        """Return the sum over the whole field, components included, halo left out.

        Parameters
        ----------
        field : array
            Array of numbers, made by this grid, or of the grid's padded shape and on its device.
        out : array, optional
            Array of one element of the result's dtype, on the grid's device, for the result.

        Returns
        -------
        scalar or array
            ``out``, or else a NumPy scalar, on a GPU a CuPy array of shape (): ``float(x)`` copies it to the host.
            Floats are added in float64, complex numbers in complex128, integers in 64 bits.

        Raises
        ------
        FieldError
            If the dtype does not support the operation, or the array does not fit the grid, or ``out`` the result.
        DeviceError
            If the array is not on the device of the grid's fields.
        ClosedError
            If the grid is closed.
        MismatchError
            If the ranks' dtypes or layouts (components, staggering, halo) differ; on a GPU only dtypes and parities are
            compared, in the first call with them.
        StateError
            If CuPy's current stream is being captured, and this is the first call with this dtype and shape, or
            ranks share a GPU or are on several nodes without NCCL; if another thread is inside a collective call of
            this grid.
        ExchangeTimeoutError
            If a rank does not call within ``HALOX_TIMEOUT`` seconds; if GPUs signal to one another, also if a rank
            missed an earlier call. The results of that call and of all later calls are not valid.

        Notes
        -----
        Collective. These notes hold for all reductions. The result has the same bits on every rank and in every run.
        Blocks for arrays on the host. On a GPU the reduction is ordered with the current stream. If every rank has a
        separate GPU, and all GPUs map one another's memory, the reduction is one launch that does not block; after its
        first call it can be captured in a CUDA graph. Otherwise it works like a `halox.Allreduce` of one element.

        With one launch, an error that only one rank can detect (an array that does not fit) is raised on that rank at
        once. After the first call, the remaining ranks raise it as a `MismatchError` in their next call, and the result
        is not valid.
        """
        return self._reduce("sum", out, field)

    def min(self, field: Any, out: Any = None) -> Any:
        """Return the smallest value of a real field, or NaN if a value is NaN. Otherwise the same as `sum`."""
        return self._reduce("min", out, field)

    def max(self, field: Any, out: Any = None) -> Any:
        """Return the largest value of a real field, or NaN if a value is NaN. Otherwise the same as `sum`."""
        return self._reduce("max", out, field)

    def norm(self, field: Any, out: Any = None) -> Any:
        """Return the Euclidean norm, computed in float64. Otherwise the same as `sum`."""
        return self._reduce("norm", out, field)

    def dot(self, field: Any, other: Any, out: Any = None) -> Any:
        """Return the sum of ``conj(field) * other``, computed in float64, complex128 or 64-bit integers.

        Both fields must have the same layout. Otherwise the same as `sum`.
        """
        return self._reduce("dot", out, field, other)

    def allreduce(self, array: Any, op: str = "sum", out: Any = None) -> Any:
        """Combine arrays that are not fields, element by element, over all ranks.

        Parameters
        ----------
        array : scalar, numpy.ndarray or array on this rank's GPU
            Array of one shape and dtype on all ranks.
        op : str
            Operation, as for `halox.Allreduce`, which can repeat a reduction without comparing shapes each time.
        out : array, optional
            Array of the same shape and dtype, for the result; may be ``array`` itself.

        Returns
        -------
        scalar or array
            ``out``, or a new array in the memory of ``array``; the same bits on every rank.

        Raises
        ------
        FieldError
            If the operation has no meaning for the dtype, or ``out`` does not fit.
        MismatchError
            If ranks give different shapes, dtypes or operations; on a GPU compared in the first call with them.
        StateError, ExchangeTimeoutError
            The same as for `sum`.

        Notes
        -----
        Collective. Blocks for arrays on the host: one synchronization of the ranks compares the arguments and also
        gathers arrays of up to 3520 bytes. For larger arrays, and on a GPU, the first call with a shape, dtype and
        operation makes a `halox.Allreduce`, and the grid keeps the last 32 of these objects. On a GPU all ranks must
        make these first calls in the same order; later calls cost as much as calls of a `halox.Allreduce`.
        """
        try:
            prepared = self._of_arrays.get((op, id(array), id(out)))
        except Exception:  # of an invalid operation, such as an unhashable object
            prepared = None
        if prepared is not None:
            launch, shape = prepared
            if array.shape == shape and (out is None or out is array or out.shape == shape):
                result = launch()
                return result if out is None else out
        return self._reductions.array(op, (array,), out)

    def _reduce(self, name: str, out: Any, field: Any, other: Any = None) -> Any:
        """Reduce one or two fields to one value."""
        prepared = self._of_fields.get((name, id(field), id(other), id(out)))
        if prepared is not None:
            launch, shape = prepared
            if field.shape == shape and (other is None or other.shape == shape):
                result = launch()
                return result if out is None else out
        return self._reductions.field(name, (field, other) if name == "dot" else (field,), out)
