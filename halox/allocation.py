"""Allocation of fields, in memory that neighbours can read and write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.errors import HaloxError
from halox.exchange.selection import reads_in_place
from halox.field_layouts import FieldLayouts
from halox.field_options import FieldOptions, field_spec, fixed_dtype
from halox.runtime.arena import Room, Wishes
from halox.runtime.arrays import Array, DType, check_extents, describe
from halox.runtime.call_guard import one_thread
from halox.runtime.context import Context
from halox.runtime.gpu.devices import allocate, check_dtype, fill, fill_value
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.array_types import Field

Contents = Literal["zeros", "ones", "full", "empty"]

_ALLOCATION = "an allocation"

Form = Callable[[], tuple[FieldLayout, DType]]
"""Returns the layout and dtype of a field; raises an error if their description is invalid."""


class _Description(NamedTuple):
    """Field to allocate; ``filling`` is an array of its values, or None for zero bytes."""

    layout: FieldLayout
    dtype: DType
    is_read_in_place: bool
    is_filled: bool
    filling: Array | None

    def filled(self, array: Field) -> Field:
        """Fill a new array, unless it may have any contents, and return it."""
        if self.is_filled:
            fill(array, self.filling)
        return array


class GridAllocation:
    """Allocations as methods of a grid."""

    device_id: int | None
    _world: World
    _context: Context
    _layout: FieldLayout
    _layouts: FieldLayouts
    _made = 0
    _read_in_place: dict[tuple[int, DType], bool]

    def zeros(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field of zeros, halo included; all bytes are zero for every dtype.

        Parameters
        ----------
        dtype : dtype
            Any fixed-size dtype; on a GPU, any dtype that CuPy supports.
        components : int or sequence of int
            Extents of the component axes before the grid axes.
        components_after : int or sequence of int
            Extents of the component axes after the grid axes.
        staggered : int or sequence of int
            Grid axes along which the field has one more point than cells.
        halo : int, or one per axis, or (low, high) per axis
            Halo widths of this field; by default the halo of the grid.
        parity : {"even", "odd"}, optional
            Store only the cells with an even or odd sum of coordinates, compactly along the last grid axis: the cell
            ``(x, ..., z)`` is at index ``(x, ..., z // 2)``. Halo widths still count cells of the grid.
        offsets : int or sequence of int, optional
            Distances along each axis at which a stencil reads the field, in both directions. Exchanges then move only
            the halo cells that this stencil reads, and no corners. By default exchanges move the whole halo.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            Shape ``components + padded_shape + components_after``. For a field of one parity, a block of ``n`` cells
            with the halo ``(low, high)`` has the extent ``ceil(low / 2) + n / 2 + ceil(high / 2)`` along the last grid
            axis. On a CPU with several ranks on a node, the array is in memory that these ranks share, so that
            neighbours can read it in place. Only a large field that is divided along its innermost axis is in private
            memory (in huge pages), since packing from private memory is faster.

        Raises
        ------
        FieldError, DecompositionError
            If the dtype or the layout is invalid. A field of one parity needs even grid extents, and blocks that begin
            at even cells along the last axis (see ``checkerboard`` of `Grid`). Raised on all ranks.
        HaloxError
            If a rank has too little memory. Raised on all ranks.

        Notes
        -----
        Collective. The array stays valid after `close`.
        """
        return self._new(dtype, layout)

    def ones(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field of ones, with the value that `numpy.ones` uses for the dtype; see `zeros`."""
        return self._new(dtype, layout, "ones", 1)

    def full(
        self, value: object, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]
    ) -> Any:
        """Allocate a field filled with ``value``; see `zeros`.

        Parameters
        ----------
        value : scalar or array
            Converted to the dtype as by `numpy.full`: floats are rounded to the precision of a float dtype, and
            truncated for an integer dtype. An array is broadcast to the field's shape on each rank, halo included, by
            NumPy's rules. For example, one number per component of a field with a component axis before two grid axes
            has the shape ``(components, 1, 1)``.
        dtype : dtype
            "f8" by default. The default does not depend on the value, so that it is the same on all ranks.
        **layout
            Layout options of `zeros`.

        Raises
        ------
        FieldError
            As for `zeros`. Also if the dtype cannot represent the value (an imaginary part, a number out of range, NaN
            for integers, a longer string, a mask), or if the value's shape does not broadcast. Raised on all ranks.
        """
        return self._new(dtype, layout, "full", value)

    def empty(self, dtype: npt.DTypeLike = "f8", **layout: Unpack[FieldOptions]) -> Any:
        """Allocate a field with undefined contents; see `zeros`."""
        return self._new(dtype, layout, "empty")

    def zeros_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field of zeros with the layout of another field; see `zeros`.

        Parameters
        ----------
        field : array
            A field of this grid. The new field has the same components, staggering, halo, parity and offsets.
        dtype : dtype, optional
            By default the dtype of ``field``.

        Raises
        ------
        FieldError
            As for `zeros`. Also if ``field`` is not a field of the grid. Raised on all ranks.
        """
        return self._new_like(field, dtype, "zeros")

    def ones_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field of ones with the layout of another field; see `zeros_like`."""
        return self._new_like(field, dtype, "ones", 1)

    def full_like(self, field: object, value: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field filled with ``value``, with the layout of another field; see `full` and `zeros_like`."""
        return self._new_like(field, dtype, "full", value)

    def empty_like(self, field: object, dtype: npt.DTypeLike | None = None) -> Any:
        """Allocate a field with undefined contents and the layout of another field; see `zeros_like`."""
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
        def form() -> tuple[FieldLayout, DType]:
            layout = self._layouts.find(field)
            return layout, fixed_dtype(describe(field).dtype if dtype is None else dtype)

        return self._add(form, contents, value, dtype)

    @one_thread
    def _add(self, form: Form, contents: Contents, value: object, dtype: object) -> Field:
        """Allocate a field on each rank; collective. The ranks synchronize only once if all have host memory for it."""
        world, arena = self._world, self._context.arena
        on_host, room = self.device_id is None, Room()
        world.begin(contents, dtype)

        def prepare() -> tuple[tuple[_Description, Field | None], Wishes | None]:
            nonlocal room
            described = self._describe(form, contents, value)
            if on_host and arena.shares_memory and described.is_read_in_place:
                room = arena.reserve(prod(described.layout.padded_shape) * described.dtype.itemsize)
            elif on_host:
                return (described, self._allocate(described)), None
            return (described, None), room.wishes

        try:
            (described, array), said = world.prepare(prepare, _ALLOCATION)
        except BaseException:
            arena.cancel(room)
            raise
        wishes = any(said)
        if on_host and (wishes or array is None):
            block = arena.take(room, [said[rank] for rank in world.node_ranks], is_field=True)
            if block is not None:
                array = described.filled(
                    arena.array(block, described.layout.padded_shape, described.dtype)
                )
        if wishes or not on_host:  # memory can run out on one rank alone
            make = partial(self._allocate, described)
            array = world.guarded(lambda: make() if array is None else array, _ALLOCATION)
        assert array is not None
        self._made += 1
        self._layouts.add(array, described.layout, self._made)
        return array

    def _describe(self, form: Form, contents: Contents, value: object) -> _Description:
        """Check the description and the fill value of a field."""
        layout, dtype = form()
        shape, known = layout.padded_shape, self._read_in_place.get((id(layout), dtype))
        if known is None:
            remedy = "give fewer components, a smaller dtype, or more ranks"
            check_extents(shape, dtype.itemsize, "a field of shape", remedy)
            if self.device_id is not None:
                check_dtype(dtype, self.device_id)
            known = reads_in_place(layout, dtype.itemsize)
            self._read_in_place[id(layout), dtype] = known
        has_value = contents not in ("zeros", "empty")
        filling = fill_value(value, dtype, shape) if has_value else None
        return _Description(layout, dtype, known, contents != "empty", filling)

    def _allocate(self, described: _Description) -> Field:
        """Allocate a field in this rank's private memory; local."""
        shape, dtype = described.layout.padded_shape, described.dtype
        try:
            if self.device_id is not None and self._world.size > 1:
                # Neighbours can map this memory to write into the halo, and network adapters register all of it.
                array: Field = self._context.use_device(self.device_id).array(shape, dtype)
            else:
                array = allocate(shape, dtype, self.device_id)
        except MemoryError as error:
            raise HaloxError(
                f"no memory for a field of shape {shape} and dtype {dtype} ({error}); use more ranks, or a smaller "
                "dtype"
            ) from error
        return described.filled(array)
