"""Allocation of fields in the memory from which neighbours can read and write their halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.errors import HaloxError
from halox.exchange.selection import reads_in_place
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions, field_spec, fixed_dtype
from halox.runtime.arrays import Array, DType, check_extents
from halox.runtime.call_guard import one_thread
from halox.runtime.context import Context
from halox.runtime.gpu.devices import allocate, check_dtype, fill, fill_value
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.array_types import Field

Contents = Literal["zeros", "ones", "full", "empty"]

_ALLOCATION = "an allocation"

Form = Callable[[], tuple[FieldLayout, DType]]
"""Returns layout and dtype of a field, or raises what is wrong with their description."""


class GridAllocation:
    """Allocations as methods of a grid."""

    device_id: int | None
    _world: World
    _context: Context
    _layout: FieldLayout
    _layouts: FieldLayouts
    _made = 0

    def zeros(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field of zeros, halo included: bytes of zero, whatever the dtype.

        Parameters
        ----------
        dtype : dtype
            Any dtype of fixed size; on a GPU any that CuPy holds.
        components : int or sequence of int
            Extents of axes in front of the grid axes.
        components_after : int or sequence of int
            Extents of axes behind the grid axes.
        staggered : int or sequence of int
            Grid axes along which the field has one more point than cells.
        halo : int, or one per axis, or (low, high) per axis
            Widths of this field, the grid's by default.
        parity : {"even", "odd"}, optional
            Only the cells whose coordinates have an even or odd sum, stored compactly along the last grid axis: the
            cell at ``(x, ..., z)`` at index ``(x, ..., z // 2)``. Widths of halos still count cells of the grid.
        offsets : int or sequence of int, optional
            Distances along the axes at which a stencil reads the field, in both directions. Exchanges then
            move what is within reach, and no corners; by default the whole halo.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape ``components + padded_shape + components_after``; of one parity, a block of ``n`` cells with the halo
            ``(low, high)`` has ``ceil(low / 2) + n / 2 + ceil(high / 2)`` along the last grid axis. On a CPU with
            several ranks on the node it is in memory that they share, so that neighbours can read halos in place;
            unless it is large and cut along its innermost axis, where packing from private memory (in huge pages) is
            faster.

        Raises
        ------
        FieldError, DecompositionError
            On all ranks, if the dtype or the layout is impossible: also if an extent of the grid is odd, or a block
            begins at an odd cell along the last axis, for a field of one parity (see ``checkerboard`` of `Grid`).
        HaloxError
            On all ranks, if one of them has too little memory.

        Notes
        -----
        Collective. The array stays valid after `close`.
        """
        return self._new(dtype, layout)

    def ones(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field of ones, as `numpy.ones` has them for any dtype; see `zeros`."""
        return self._new(dtype, layout, "ones", 1)

    def full(
        self, value: object, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]
    ) -> Any:
        """Allocate a field filled with ``value``; see `zeros`.

        Parameters
        ----------
        value : scalar or array
            Converted to the dtype as by `numpy.full`, but for integers, which must be in its range. An array is
            broadcast to the field's shape on each rank, halo included.
        dtype, **layout
            The same as for `zeros`.

        Raises
        ------
        FieldError
            On all ranks, also if the dtype cannot hold the value, or its shape does not broadcast.
        """
        return self._new(dtype, layout, "full", value)

    def empty(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field with undefined contents; see `zeros`."""
        return self._new(dtype, layout, "empty")

    def zeros_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field of zeros with the layout of another one; see `zeros`.

        Parameters
        ----------
        field : array
            A field of this grid, whose components, staggering, halo, parity and offsets the new one gets.
        dtype : dtype, optional
            That of ``field`` by default.

        Raises
        ------
        FieldError
            On all ranks, also if ``field`` is no field of the grid.
        """
        return self._new_like(field, dtype, "zeros")

    def ones_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field of ones with the layout of another one; see `zeros_like`."""
        return self._new_like(field, dtype, "ones", 1)

    def full_like(self, field: object, value: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field filled with ``value``, as of `full`, with the layout of another one; see `zeros_like`."""
        return self._new_like(field, dtype, "full", value)

    def empty_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field with undefined contents and the layout of another one; see `zeros_like`."""
        return self._new_like(field, dtype, "empty")

    def _layout_of(self, options: FieldOptions) -> FieldLayout:
        """Return the layout that a field's options describe."""
        layout = self._layouts.of(field_spec(options, self._layout.spec))
        layout.check_widths()
        return layout

    def _new(
        self,
        dtype: npt.DTypeLike,
        options: FieldOptions,
        contents: Contents = "zeros",
        value: object = None,
    ) -> Field:
        return self._add(
            lambda: (self._layout_of(options), fixed_dtype(dtype)), contents, value, dtype
        )

    def _new_like(
        self, field: object, dtype: npt.DTypeLike | None, contents: Contents, value: object = None
    ) -> Field:
        def check() -> tuple[FieldLayout, DType]:
            found, layout = self._layouts.read(field)
            return layout, fixed_dtype(found.dtype if dtype is None else dtype)

        return self._add(check, contents, value, dtype)

    @one_thread
    def _add(self, form: Form, contents: Contents, value: object, dtype: object) -> Field:
        """Allocate a field on each rank; collective."""
        world, context, device = self._world, self._context, self.device_id
        world.begin(contents, dtype)

        def check() -> tuple[FieldLayout, DType, Array | None]:
            layout, found = form()
            remedy = "give fewer components, a smaller dtype, or more ranks"
            check_extents(layout.padded_shape, found.itemsize, "a field of shape", remedy)
            if device is not None:
                check_dtype(found, device)
            if contents in ("zeros", "empty"):
                return layout, found, None
            return layout, found, fill_value(value, found, layout.padded_shape)

        layout, found, filling = world.guarded(check, _ALLOCATION)
        shared = None
        if device is None and reads_in_place(layout, found.itemsize):
            shared = context.arena.array(layout.padded_shape, found)

        def make() -> Field:
            array: Field | None = shared
            try:
                if device is not None and world.size > 1:
                    # Neighbours can map it, so that they can store into its halo, and adapters register it whole.
                    array = context.use_device(device).array(layout.padded_shape, found)
                elif array is None:
                    array = allocate(layout.padded_shape, found, device)
            except MemoryError as error:
                raise HaloxError(
                    f"no memory for a field of shape {layout.padded_shape} and dtype {found} ({error}); use more "
                    "ranks, or a smaller dtype"
                ) from error
            if contents != "empty":
                fill(array, filling)
            return array

        # Memory can run out on one rank alone.
        array: Field = world.guarded(make, _ALLOCATION)
        self._made += 1
        self._layouts.add(array, layout, self._made)
        return array
