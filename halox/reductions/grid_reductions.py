"""`GridReductions`, the base class of `Grid` with its reductions.

The methods document and call `halox.reductions`, which is imported in the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from halox.domain import Domain
from halox.errors import FieldError
from halox.runtime.arrays import Array
from halox.runtime.call_guard import single_threaded
from halox.values import arrays_in, check_bool, kind_of

if TYPE_CHECKING:
    from halox.reductions.device.device_reductions import DeviceReductions
    from halox.reductions.host.host_reductions import HostReductions
    from halox.runtime.array_types import FieldLike
    from halox.runtime.world import World


class GridReductions:
    """Reductions over all ranks, of fields and of arrays."""

    domain: Domain
    device_id: int | None
    reproducible: bool
    _world: World

    def _use_reductions(self, domain: Domain) -> None:
        self._reductions: HostReductions | DeviceReductions
        if domain.device_id is None:
            from halox.reductions.host.host_reductions import HostReductions

            self._reductions = HostReductions(domain)
        else:
            from halox.reductions.device.device_reductions import DeviceReductions

            self._reductions = DeviceReductions(domain)
        self._of_fields = self._reductions.fields.known
        self._of_arrays = self._reductions.arrays.known

    def reduce(
        self,
        expression: str | dict[Any, str],
        /,
        op: str | dict[Any, str] = "sum",
        out: Any = None,
        *,
        reproducible: bool | None = None,
        unique: bool = False,
        **named: Any,
    ) -> Any:
        """Reduce expressions of fields to one value each; reads each field once, and makes no temporary fields.

        Parameters
        ----------
        expression : str or dict of str
            Text in Python's grammar: names, numbers, ``+ - * / // % **``, comparisons, ``& | ~`` of booleans, and the
            functions abs, sqrt, exp, log, sin, cos, where, minimum, maximum, conj, real, imag and isfinite. It is
            translated, never run as code. Lines before the last one give names to parts, as ``e = a + b``.
            ``index_x`` is the global index of a point along the axis "x" (``dims`` of the grid). A dict of at most 8
            expressions gives a dict of results.
        op : str or dict of str
            "sum", "min", "max" or "norm", of all results or by their keys.
        out : array or dict of arrays, optional
            The same as for `sum`.
        reproducible : bool, optional
            The same as for `sum`. Each sum of floats of a dict is then a separate reduction.
        unique : bool
            The same as for `sum`.
        **named
            Fields and scalars in the expression: at most 16 fields, of one layout except for their halos; numbers,
            NumPy arrays of shape (), and on a GPU CuPy arrays of shape (). Also profiles, ``("x", numbers)``: an array
            along an axis of the whole grid, on the fields' device, which counts as a field. All ranks must give equal
            scalars and profiles. ``out`` and other parameters of the method cannot be names.

        Returns
        -------
        scalar, array or dict
            As for `sum`; for a dict of expressions, a dict with its keys.

        Raises
        ------
        FieldError
            Also if an expression contains anything else, or has more than 200 parts; if a name in it is not given, or a
            keyword is not in it; if fields have unlike layouts.
        MismatchError
            Also if expressions differ between ranks; on a GPU compared in the first call.

        Notes
        -----
        Collective, with the rules of `sum`. The first call with a text makes a reduction, which the grid keeps: give
        numbers that change as keywords. Dtypes are promoted as by NumPy: Python's numbers take the dtype of the
        other operand, and integers wrap around. Complex numbers can be added, multiplied, divided, squared and compared
        for equality. Last bits of exp, log, sin, cos and ``**`` differ between NumPy and CUDA (docs/allreduce.md).

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     u, v = grid.ones(), grid.full(3)
        ...     grid.reduce("(a - b) ** 2", a=u, b=v)
        ...     grid.reduce({"n": "u * index_y > 2", "most": "u * v"}, {"n": "sum", "most": "max"}, u=u, v=v)
        np.float64(96.0)
        {'n': np.int64(12), 'most': np.float64(3.0)}
        """
        return self._expressions("reduce", expression, op, out, reproducible, named, unique=unique)

    def sum(
        self,
        field: FieldLike | str,
        /,
        out: Any = None,
        *,
        axis: int | str | Sequence[int | str] | None = None,
        reproducible: bool | None = None,
        unique: bool = False,
        **named: Any,
    ) -> Any:
        """Return the sum over the whole field, components included, or over some grid axes; halo left out.

        Parameters
        ----------
        field : array or str
            Array of numbers, made by this grid, or of the grid's padded shape, or the cells that this rank owns, on the
            grid's device; or an expression of fields that are given by keyword, as for `reduce`.
        out : array, optional
            Array of one element of the result's dtype, on the grid's device, for the result; not with ``axis``.
        axis : int, str, or sequence of these, optional
            Grid axes to sum over, by number or name. Component axes are kept: all grid axes give one sum per
            component. The hosts of the ranks then synchronize in every call.
        reproducible : bool, optional
            Whether the sum of floats is exact and rounded once (docs/allreduce.md): the same bits on any number of
            ranks, in any division, on CPUs and GPUs. By default the grid's setting. Not with ``axis``.
        unique : bool
            Whether points that have two indices, on the line of a fold (`Connection`), are counted once, at the index
            from which exchanges copy them; not with ``axis``. An array that is not declared has its points at centers.
        **named
            Fields and scalars of an expression; not with ``axis``.

        Returns
        -------
        scalar or array
            ``out``, or else a NumPy scalar, on a GPU a CuPy array of shape (): ``float(x)`` copies it to the host.
            Floats are added in float64, complex numbers in complex128, integers in 64 bits. With ``axis``, an array of
            the whole remaining axes, in the order of the field's, on every rank.

        Raises
        ------
        FieldError
            Also if the dtype does not support the operation, or ``out`` does not fit the result.
        MismatchError
            On a GPU only dtypes and parities are compared, in the first call with them.
        StateError
            Also if CuPy's current stream is being captured, and ranks share a GPU or are on several nodes without NCCL.
        ExchangeTimeoutError
            If GPUs signal to one another, also if a rank missed an earlier call. The results of that call and of all
            later calls are not valid.

        Notes
        -----
        Collective. These notes hold for all reductions. The result has the same bits on every rank and in every run.
        Blocks for arrays on the host. On a GPU the reduction is ordered with the current stream. If every rank has a
        separate GPU, and all GPUs map one another's memory, the reduction is one launch that does not block; after its
        first call it can be captured in a CUDA graph. Then an array that does not fit raises an error on its rank at
        once, and, after the first call, `ExchangeTimeoutError` in the next call of the remaining ranks. Otherwise a
        reduction works like a `halox.Allreduce` of one element.
        """
        if axis is None:
            if unique or named or isinstance(field, str):
                return self._expressions(
                    "sum", field, "sum", out, reproducible, named, unique=unique
                )
            return self._reduce("sum", out, field, reproducible=reproducible)
        if unique:
            error = FieldError(
                "unique: sums over some axes count all points; leave out axis or unique"
            )
            self._reductions.refuse("sum", error)
        if self._is_exact("sum", reproducible):
            self._reductions.refuse(
                "sum",
                FieldError(
                    "reproducible: sums over some axes depend on the division of the grid; leave out axis, or give "
                    "reproducible=False"
                ),
            )
        return self._over_axes("sum", field, axis, out, named)

    def mean(
        self,
        field: FieldLike | str,
        /,
        *,
        axis: int | str | Sequence[int | str] | None = None,
        reproducible: bool | None = None,
        unique: bool = False,
        **named: Any,
    ) -> Any:
        """Return the `sum`, over the whole field or some grid axes, divided by the number of points.

        It has the arguments of `sum`. Integers are added in 64 bits, and wrap around.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((4, 3), device="cpu") as grid:
        ...     u = grid.zeros()
        ...     grid.interior(u)[...] = grid.indices()[0]
        ...     grid.mean(u), grid.mean(u, axis=1)
        (np.float64(1.5), array([0., 1., 2., 3.]))
        """
        from halox.reductions.statistics import array_axes, number_of_points

        total = self.sum(field, axis=axis, reproducible=reproducible, unique=unique, **named)
        one = next((each for each in named.values() if getattr(each, "shape", ())), field)
        layout = self.domain.layouts.find(one)
        axes = array_axes(layout, axis, self.domain.labels.dims)
        return total / number_of_points(layout, axes, unique)

    def std(self, field: FieldLike, *, unique: bool = False) -> float:
        """Return the standard deviation over the whole field, components included, computed in float64.

        With ``unique`` points that have two indices across a connection count once, as for `sum`.
        Collective; blocks, on a GPU too. Its errors are raised on all ranks. The dtype is one that expressions take.
        A large mean cancels no digits: cells are read twice, and the mean is subtracted before squares are added.
        """
        mean = self.mean(field, unique=unique)
        return sqrt(self.mean("abs(u - m)**2", unique=unique, u=field, m=mean))

    def argmin(self, field: FieldLike) -> tuple[int, ...]:
        """Return the index of the smallest value in the whole field, as `gather` returns it, the same on all ranks.

        The first of equal values counts, and the first NaN counts as smallest, as for `numpy.argmin`. Collective;
        blocks, on a GPU too. Its errors are raised on all ranks.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     u = grid.zeros()
        ...     grid.interior(u)[...] = (grid.indices()[0] - 2) ** 2 + grid.indices()[1]
        ...     grid.argmin(u), grid.argmax(u)
        ((2, 0), (0, 5))
        """
        from halox.reductions.statistics import extreme

        return extreme(self.domain, lambda: self._reduce("min", None, field), "argmin", field)

    def argmax(self, field: FieldLike) -> tuple[int, ...]:
        """Return the index of the largest value, or of the first NaN, in the whole field; see `argmin`."""
        from halox.reductions.statistics import extreme

        return extreme(self.domain, lambda: self._reduce("max", None, field), "argmax", field)

    @single_threaded
    def histogram(
        self,
        field: FieldLike,
        bins: int | Sequence[float] | Array = 10,
        range: Sequence[float] | Array | None = None,
    ) -> tuple[Array, Array]:
        """Return `numpy.histogram` of the whole field: counts and edges of the bins, on all ranks in host memory.

        Parameters
        ----------
        field : array
            The same as for `min`.
        bins : int or sequence of float
            Number of bins of equal width, or their edges in rising order.
        range : (float, float), optional
            Ends of the bins; by default the smallest and largest value. Other values and NaN are not counted.

        Raises
        ------
        FieldError
            Also if `numpy.histogram` refuses the bins or the range, or there is no range and a value is not finite.

        Notes
        -----
        Collective; blocks, on a GPU too.

        Examples
        --------
        >>> import halox
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     grid.histogram(grid.ones(), bins=2, range=(0, 2))
        (array([ 0, 24]), array([0., 1., 2.]))
        """
        from halox.reductions.statistics import histogram

        def ends() -> tuple[Any, Any]:
            return self._reduce("min", None, field), self._reduce("max", None, field)

        return histogram(self.domain, ends, field, bins, range)

    def min(
        self,
        field: FieldLike | str,
        /,
        out: Any = None,
        *,
        axis: int | str | Sequence[int | str] | None = None,
        **named: Any,
    ) -> Any:
        """Return the smallest value of a real field, or NaN if a value is NaN. Otherwise the same as `sum`."""
        return self._extreme("min", field, out, axis, named)

    def max(
        self,
        field: FieldLike | str,
        /,
        out: Any = None,
        *,
        axis: int | str | Sequence[int | str] | None = None,
        **named: Any,
    ) -> Any:
        """Return the largest value of a real field, or NaN if a value is NaN. Otherwise the same as `sum`."""
        return self._extreme("max", field, out, axis, named)

    def norm(
        self,
        field: FieldLike | str,
        /,
        out: Any = None,
        *,
        reproducible: bool | None = None,
        unique: bool = False,
        **named: Any,
    ) -> Any:
        """Return the Euclidean norm, computed in float64. Otherwise the same as `sum`."""
        if unique or named or isinstance(field, str):
            return self._expressions("norm", field, "norm", out, reproducible, named, unique=unique)
        return self._reduce("norm", out, field, reproducible=reproducible)

    def dot(
        self,
        field: FieldLike | str,
        other: FieldLike | str,
        /,
        out: Any = None,
        *,
        reproducible: bool | None = None,
        unique: bool = False,
        **named: Any,
    ) -> Any:
        """Return the sum of ``conj(field) * other``, computed in float64, complex128 or 64-bit integers.

        Both fields must have the same layout, or both arguments are expressions. Otherwise the same as `sum`.
        """
        if unique and not (named or isinstance(field, str) or isinstance(other, str)):
            named, field, other = {"field": field, "other": other}, "field", "other"
        if isinstance(field, str) and isinstance(other, str):
            text = f"conj(wide({field}\n)) * wide({other}\n)"
            parts = field, other
            return self._expressions(
                "dot", text, "sum", out, reproducible, named, parts, unique=unique
            )
        if named or isinstance(field, str) or isinstance(other, str):
            error = FieldError("dot: give two fields; or two expressions, and fields by keyword")
            self._reductions.refuse("dot", error)
        return self._reduce("dot", out, field, other, reproducible=reproducible)

    def allreduce(
        self, array: Any, op: str = "sum", out: Any = None, *, reproducible: bool | None = None
    ) -> Any:
        """Combine arrays that are not fields, element by element, over all ranks.

        Parameters
        ----------
        array : scalar, numpy.ndarray or array on this rank's GPU
            Array of one shape and dtype on all ranks.
        op : str
            Operation, as for `halox.Allreduce`, which can repeat a reduction without comparing shapes each time.
        out : array, optional
            Array of the same shape and dtype, for the result; may be ``array`` itself.
        reproducible : bool, optional
            The same as for `halox.Allreduce`; by default the grid's setting.

        Returns
        -------
        scalar or array
            ``out``, or a new array in the memory of ``array``; the same bits on every rank.

        Raises
        ------
        FieldError
            Also if the operation has no meaning for the dtype or cannot be reproducible.
        MismatchError
            On a GPU shapes, dtypes and operations are compared in the first call with them.

        Notes
        -----
        Collective. Blocks for arrays on the host: one synchronization of the ranks compares the arguments and also
        gathers arrays of up to 3520 bytes. For larger arrays, and on a GPU, the first call with a shape, dtype and
        operation makes a `halox.Allreduce`, and the grid keeps the last 32 of these objects. On a GPU all ranks must
        make these first calls in the same order; later calls cost as much as calls of a `halox.Allreduce`.
        """
        is_exact = self._is_exact("allreduce", reproducible)
        if self.device_id is not None:  # on the host no call is prepared
            arrays = (array,) if out is None else (array, out)
            launch = self._of_arrays.find((op, is_exact), arrays)
            if launch is not None:
                result = launch(arrays)
                return result if out is None else out
        return self._reductions.array(op, array, out, is_exact)

    def _extreme(self, op: str, field: Any, out: Any, axis: Any, named: dict[str, Any]) -> Any:
        """Reduce a field or an expression to its "min" or "max"."""
        if axis is not None:
            return self._over_axes(op, field, axis, out, named)
        if named or isinstance(field, str):
            return self._expressions(op, field, op, out, False, named)
        return self._reduce(op, out, field)

    def _over_axes(self, op: str, field: Any, axis: Any, out: Any, named: dict[str, Any]) -> Any:
        """Reduce a field over some grid axes."""
        if named or isinstance(field, str):
            error = FieldError("axis: an expression is reduced over the whole grid; leave out axis")
            self._reductions.refuse(op, error)
        from halox.reductions.statistics import over_axes

        allreduce = partial(self.allreduce, reproducible=False)
        return over_axes(self.domain, allreduce, op, field, axis, out)

    def _expressions(
        self,
        call: str,
        text: Any,
        op: Any,
        out: Any,
        reproducible: object,
        named: dict[str, Any],
        parts: tuple[str, ...] = (),
        *,
        unique: bool = False,
    ) -> Any:
        """Reduce one expression, or a dict of expressions; ``call`` is the method that was called.

        ``parts`` are the user's texts if ``text`` is composed of them. Other methods than `reduce` may give a field.
        """
        if call != "reduce" and not (named or isinstance(text, str)):
            text, named = "field", {"field": text}
        if isinstance(text, str):
            kind, outs = (text, op), () if out is None else (out,)
        else:
            kind = repr(text), repr(op)
            is_dict = isinstance(out, dict) and isinstance(text, dict)
            outs = tuple(map(out.get, text)) if is_dict else (out,) * (out is not None)
        values = tuple(named.values())
        key = (call, *kind, reproducible, unique, *named, *map(kind_of, values))
        arrays = *arrays_in(values), *outs
        launch = self._of_fields.find(key, arrays)
        if launch is not None:
            return launch((*values, *outs))
        from halox.reductions.expressions import parse, parted, requested

        try:
            for part in parts:
                parse(part)
            request = requested(call, text, op, out, named)
        except FieldError as error:
            self._reductions.refuse(call, error)
        is_exact = self._is_exact(call, reproducible)
        if request.keys is None or not is_exact:
            request = replace(request, is_exact=is_exact, is_unique=unique)
            return self._reductions.expressions(request, key)
        return {
            key: self._expressions(call, *each, reproducible, own, unique=unique)
            for key, each, own in parted(request)
        }

    def _is_exact(self, call: str, reproducible: object) -> bool:
        """Return whether sums of a call are exact; None is the grid's setting."""
        if reproducible is None:
            return self.reproducible
        if reproducible is True or reproducible is False:
            return reproducible
        try:
            return check_bool("reproducible", reproducible, FieldError)
        except FieldError as error:
            self._reductions.refuse(call, error)

    def _reduce(self, name: str, out: Any, *fields: Any, reproducible: object = False) -> Any:
        """Reduce one or two fields to one value."""
        key: Hashable = name
        is_exact = reproducible is not False and self._is_exact(name, reproducible)
        if is_exact:
            key = name, is_exact
        arrays = fields if out is None else (*fields, out)
        launch = self._of_fields.find(key, arrays)
        if launch is None:
            return self._reductions.field(name, fields, out, is_exact, key)
        result = launch(arrays)
        return result if out is None else out
