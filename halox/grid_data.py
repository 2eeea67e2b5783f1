"""Whole arrays on one rank, as methods of a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions
from halox.gathering import gather
from halox.runtime.arrays import Array, DType, check_elements_apart
from halox.runtime.call_guard import one_thread
from halox.runtime.world import World
from halox.scattering import Target, scatter

if TYPE_CHECKING:
    from halox.runtime.array_types import Field


class GridData:
    """Gather and scatter as methods of a grid."""

    _world: World
    _layout: FieldLayout
    _layouts: FieldLayouts
    _layout_of: Callable[[FieldOptions], FieldLayout]
    _new: Callable[..., Field]

    @one_thread
    def gather(self, field: object, root: int = 0) -> Array | None:
        """Collect the owned cells of all ranks on one rank.

        Parameters
        ----------
        field : array
            A field with the same dtype and layout on all ranks.
        root : int
            The rank that gets the cells; the same on all ranks.

        Returns
        -------
        numpy.ndarray or None
            The whole field, in host memory, on rank ``root``; None on other ranks. A field of one parity stays compact,
            with half the cells along the last grid axis.

        Raises
        ------
        FieldError
            If the array does not fit the grid, or ``root`` is not a rank.
        MismatchError
            If dtypes, layouts or roots differ between ranks.
        HaloxError
            Also if rank ``root`` has too little memory for the whole field.
        ExchangeTimeoutError
            If a rank does not make the matching call within ``HALOX_TIMEOUT`` seconds, or stops during the gather.


        Notes
        -----
        Collective; blocks. Rank ``root`` needs memory for the whole field and 64 MiB. Other ranks need 64 MiB if their
        cells are not contiguous, and memory for all of their cells if the field is on a GPU.
        """
        self._world.begin("gather")
        return gather(self._world, field, self._layouts.find, root)

    @one_thread
    def scatter(
        self, /, whole: object, root: int = 0, *, out: Any = None, **layout: Unpack[FieldOptions]
    ) -> Any:
        """Distribute a whole array of one rank: the inverse of `gather`.

        Parameters
        ----------
        whole : array or None
            On rank ``root``, an array of all cells of the grid, without halo, in the shape that `gather` returns; any
            fixed-size dtype. A `numpy.memmap` is read part by part. The argument is ignored on other ranks.
        root : int
            The rank that has the whole array; the same on all ranks.
        out : array, optional
            A field of the grid to fill; given on all ranks or on no rank. By default a new field is made.
        **layout
            Layout options of a new field, see `zeros`. Without options, component axes are inferred from the array's
            shape.

        Returns
        -------
        array
            The field. The halo of a new field is zero, the halo of ``out`` is not changed; `exchange` fills either.

        Raises
        ------
        FieldError
            If ``root`` is not a rank; if its array is missing or has another shape; if ``out`` is not a field of the
            grid, is read-only, or is given together with layout options.
        MismatchError
            If roots or layouts differ between ranks, or ``out`` has another dtype than the array.
        ExchangeTimeoutError
            If a rank does not make the matching call within ``HALOX_TIMEOUT`` seconds, or stops during the scatter.

        Notes
        -----
        Collective; blocks. Needs memory for the field and 64 MiB. Blocks on a GPU are filled through page-locked
        memory.

        Examples
        --------
        >>> import halox, numpy as np
        >>> with halox.Grid((4, 6), device="cpu") as grid:
        ...     u = grid.scatter(np.arange(24.0).reshape(4, 6) if grid.rank == 0 else None)
        ...     grid.sum(u)
        np.float64(276.0)
        """
        self._world.begin("scatter")

        def target() -> Target:
            if out is None:
                return Target(None, None, self._layout_of(layout) if layout else None, layout)
            if layout:
                raise FieldError(
                    f"out and {', '.join(layout)} were given: the field has its layout; leave out one of the two"
                )
            found, known = self._layouts.read(out)
            if not found.writable:
                raise FieldError("out: the array is read-only; give one that can be written")
            check_elements_apart(found, "out")
            return Target(out, found, known, {})

        def find(field: object) -> FieldLayout:
            return self._layout if field is None else self._layouts.find(field)

        def new(dtype: DType | None, options: FieldOptions) -> object:
            return self._new(dtype, options)

        return scatter(self._world, whole, root, target, find, new)
