"""Allocation of fields, in memory that neighbours can read and write.

On the host with several ranks on a node, a field is a block of the node's shared memory (`halox.runtime.arena`), if a
path would read the field in place. On a GPU it is exportable memory (`halox.runtime.device_arena`). All other fields
are ordinary arrays of NumPy or CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.domain.layouts import FieldLayouts
from halox.domain.options import FieldOptions, fixed_dtype
from halox.errors import HaloxError
from halox.paths import reads_in_place
from halox.runtime.arena import Room
from halox.runtime.arrays import Array, DType, check_extents, describe
from halox.runtime.call_guard import single_threaded
from halox.runtime.context import Context
from halox.runtime.gpu.devices import allocate, check_dtype, fill, fill_value
from halox.runtime.world import World
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.runtime.array_types import XArray

Contents = Literal["zeros", "ones", "full", "empty"]

_ALLOCATION = "an allocation"
_ALIGNMENT = 256

FindForm = Callable[[], tuple[FieldLayout, DType]]
"""Function that returns the layout and dtype of a field to allocate, or raises an error for invalid options."""


class _Description(NamedTuple):
    """Field to allocate; ``filling`` is an array of its values, or None for zero bytes."""

    layout: FieldLayout
    dtype: DType
    is_read_in_place: bool
    is_filled: bool
    filling: Array | None

    def filled(self, array: XArray) -> XArray:
        """Fill a new array, unless it may have any contents, and return it."""
        if self.is_filled:
            fill(array, self.filling)
        return array


class Allocation:
    """Allocates fields of a domain; its methods are collective and raise the errors of `halox.Grid.zeros`.

    ``device`` is this rank's GPU, None for the host.
    """

    def __init__(
        self, world: World, context: Context, layouts: FieldLayouts, device: int | None
    ) -> None:
        self._world, self._context, self._layouts = world, context, layouts
        self._device = device
        self._number_of_fields = 0

    def new(
        self,
        dtype: npt.DTypeLike,
        options: FieldOptions,
        contents: Contents = "zeros",
        value: object = None,
    ) -> Any:
        """Allocate a field with the layout that options describe."""
        return self._allocate_on_all(
            lambda: (self._layouts.of_options(options), fixed_dtype(dtype)), contents, value, dtype
        )

    def new_like(
        self, field: object, dtype: npt.DTypeLike | None, contents: Contents, value: object = None
    ) -> Any:
        """Allocate a field with the layout of another field, and by default its dtype."""

        def find_form() -> tuple[FieldLayout, DType]:
            layout = self._layouts.find(field)
            return layout, fixed_dtype(describe(field).dtype if dtype is None else dtype)

        return self._allocate_on_all(find_form, contents, value, dtype)

    def reserve(self, forms: Sequence[tuple[tuple[int, ...], DType]]) -> Callable[[], list[XArray]]:
        """Reserve memory for arrays of some shapes and dtypes that neighbours can read; collective.

        Returns a local function that makes the arrays, with undefined contents. The function raises `HaloxError` if
        memory runs out.
        """
        ends = list(
            accumulate(
                rounded_up(prod(shape) * dtype.itemsize, _ALIGNMENT) for shape, dtype in forms
            )
        )
        arena, block = self._context.arena, None
        if self._device is None:
            block = arena.allocate(ends[-1])
        if block is None:
            return lambda: [self._private(shape, dtype) for shape, dtype in forms]
        memory = arena.array(block, (ends[-1],), np.dtype("u1"))
        return lambda: [
            np.ndarray(shape, dtype, memory, start)
            for (shape, dtype), start in zip(forms, [0, *ends], strict=False)
        ]

    @single_threaded
    def _allocate_on_all(
        self, find_form: FindForm, contents: Contents, value: object, dtype: object
    ) -> XArray:
        """Allocate a field on each rank; collective. The ranks synchronize only once if all have host memory for it."""
        world, arena = self._world, self._context.arena
        on_host, room = self._device is None, Room()
        world.begin(contents, dtype)

        def prepare() -> tuple[tuple[_Description, XArray | None], list[int]]:
            nonlocal room
            described = self._describe(find_form, contents, value)
            if on_host and arena.shares_memory and described.is_read_in_place:
                room = arena.reserve(prod(described.layout.padded_shape) * described.dtype.itemsize)
            elif on_host:
                return (described, self._allocate(described)), [0]
            return (described, None), [room.needs_node]

        try:
            (described, array), (needs_nodes,) = world.total(prepare, _ALLOCATION)
        except BaseException:
            arena.cancel(room)
            raise
        if on_host and (needs_nodes or array is None):
            block = arena.commit(room, bool(needs_nodes))
            if block is not None:
                array = described.filled(
                    arena.array(block, described.layout.padded_shape, described.dtype)
                )
        if needs_nodes or not on_host:  # memory can run out on one rank alone
            make = partial(self._allocate, described)
            array = world.attempt(lambda: make() if array is None else array, _ALLOCATION)
        assert array is not None
        self._number_of_fields += 1
        self._layouts.record(array, described.layout, self._number_of_fields)
        return array

    def _describe(self, find_form: FindForm, contents: Contents, value: object) -> _Description:
        layout, dtype = find_form()
        shape = layout.padded_shape
        remedy = "give fewer components, a smaller dtype, or more ranks"
        check_extents(shape, dtype.itemsize, "a field of shape", remedy)
        if self._device is not None:
            check_dtype(dtype, self._device)
        is_read_in_place = reads_in_place(layout, dtype.itemsize)
        has_value = contents not in ("zeros", "empty")
        filling = fill_value(value, dtype, shape) if has_value else None
        return _Description(layout, dtype, is_read_in_place, contents != "empty", filling)

    def _allocate(self, described: _Description) -> XArray:
        return described.filled(self._private(described.layout.padded_shape, described.dtype))

    def _private(self, shape: tuple[int, ...], dtype: DType) -> XArray:
        try:
            if self._device is not None and self._world.size > 1:
                # Neighbours can map this memory to write into the halo, and network adapters register all of it.
                return self._context.use_device(self._device).array(shape, dtype)
            return allocate(shape, dtype, self._device)
        except MemoryError as error:
            raise HaloxError(
                f"no memory for a field of shape {shape} and dtype {dtype} ({error}); use more ranks, or a smaller "
                "dtype"
            ) from error
