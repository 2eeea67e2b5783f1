"""Reductions of a grid: of its fields' cells, and of arrays of all ranks.

Public methods of `halox.Grid`, with their cache. A call with arrays of a prepared call costs a look-up in a dict and a
launch; so these are methods of the grid itself, and forward nothing before that look-up.
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
    """Reductions as methods; for a grid, which calls `_make_reductions` when it is made."""

    _reductions: HostReductions | DeviceReductions
    _of_fields: dict[Hashable, tuple[Launch, Shape]]
    _of_arrays: dict[Hashable, tuple[Launch, Shape]]

    def _make_reductions(
        self, context: Context, device: int | None, find_layout: FindLayout
    ) -> None:
        """Begin with reductions of arrays on a device; local."""
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
        DeviceError
            If the array is on another device than the grid's fields.
        ClosedError
            If the grid is closed.
        MismatchError
            If the ranks' dtypes or layouts (components, staggering, halo) differ; on a GPU dtypes and parities
            only, at the first call with these.
        StateError
            If CuPy's current stream is being captured, and this is the first call with this dtype and shape, or
            ranks share a GPU or are on several nodes without NCCL; if another thread is inside a collective call of
            this grid.
        ExchangeTimeoutError
            If a rank does not call within ``HALOX_TIMEOUT`` seconds; where GPUs signal to one another, if one
            missed an earlier call. That result, and those since, are not valid.

        Notes
        -----
        Collective, and the same for all reductions: the same bits on every rank and in every run. Blocks on the host.
        On a GPU it is ordered with the current stream. Where every rank has a GPU of its own, and all map one another's
        memory, it is one launch that does not block and can be captured in a CUDA graph, once it has been called;
        otherwise it works like a `halox.Allreduce` of one element.

        There, an error that only one rank can see (an array that does not fit) is raised on it at once, and after the
        first call as a `MismatchError` on the others when they call again; that result is not valid.
        """
        return self._reduce("sum", out, field)

    def min(self, field: Any, out: Any = None) -> Any:
        """Return the smallest value of a real field; NaN if there is one. Otherwise the same as `sum`."""
        return self._reduce("min", out, field)

    def max(self, field: Any, out: Any = None) -> Any:
        """Return the largest value of a real field; NaN if there is one. Otherwise the same as `sum`."""
        return self._reduce("max", out, field)

    def norm(self, field: Any, out: Any = None) -> Any:
        """Return the Euclidean norm, formed in float64. Otherwise the same as `sum`."""
        return self._reduce("norm", out, field)

    def dot(self, field: Any, other: Any, out: Any = None) -> Any:
        """Return the sum of ``conj(field) * other``, formed in float64, complex128 or 64-bit integers.

        The fields are of one layout. Otherwise the same as `sum`.
        """
        return self._reduce("dot", out, field, other)

    def allreduce(self, array: Any, op: str = "sum", out: Any = None) -> Any:
        """Combine arrays that are not fields, element by element, over all ranks.

        Parameters
        ----------
        array : scalar, numpy.ndarray or array on this rank's GPU
            Of one shape and dtype on all ranks.
        op : str
            One of those of `halox.Allreduce`, which does the same again and again without comparing shapes each time.
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
            The same as for `sum`.

        Notes
        -----
        Collective. Blocks for arrays on the host: one meeting of the ranks compares the arguments and brings arrays of
        up to 3520 bytes. For larger ones, and on a GPU, each first call with a shape, dtype and operation makes a
        `halox.Allreduce`, of which the grid keeps the 32 that were made last. On a GPU these calls must come in one
        order on all ranks, and later ones cost what those of a `halox.Allreduce` cost.
        """
        try:
            prepared = self._of_arrays.get((op, id(array), id(out)))
        except Exception:  # of an operation that is none
            prepared = None
        if prepared is not None:
            launch, shape = prepared
            if array.shape == shape and (out is None or out is array or out.shape == shape):
                result = launch()
                return result if out is None else out
        return self._reductions.array(op, (array,), out)

    def _reduce(self, name: str, out: Any, field: Any, other: Any = None) -> Any:
        """Reduce a field, or two, to one value."""
        prepared = self._of_fields.get((name, id(field), id(other), id(out)))
        if prepared is not None:
            launch, shape = prepared
            if field.shape == shape and (other is None or other.shape == shape):
                result = launch()
                return result if out is None else out
        return self._reductions.field(name, (field, other) if name == "dot" else (field,), out)
