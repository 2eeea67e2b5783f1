"""Cells of a field that its rank owns, as input of reductions of fields on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.lib.stride_tricks import as_strided

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError
from halox.runtime.arrays import Described, DType, as_ndarray, describe
from halox.values import check_unmasked, shown

FindLayout = Callable[[object], FieldLayout]
"""Returns the layout of a field; may raise a `HaloxError`."""


@dataclass(frozen=True)
class Cells:
    """A field's cells on this rank, halo left out."""

    field: object  # with halo
    layout: FieldLayout
    described: Described  # without halo

    @property
    def dtype(self) -> DType:
        return self.described.dtype

    def view(self) -> Any:
        """View the cells as an array; on the host always of NumPy, since other libraries form sums in other dtypes."""
        return as_ndarray(self.field)[self.layout.interior]


def cells_of(name: str, fields: Sequence[Any], find_layout: FindLayout) -> list[Cells]:
    """Describe the cells of a reduction's fields without a view; on a GPU, making a view takes longer than a launch."""
    layouts = [find_layout(field) for field in fields]
    specs = [layout.spec for layout in layouts]
    if layouts[-1] is not layouts[0] and specs[0].of_cells != specs[-1].of_cells:
        raise FieldError(
            f"{name} needs two fields of one layout and parity, got shapes {fields[0].shape} and {fields[1].shape} "
            f"({specs[0]}; {specs[1]})"
        )
    return [owned_cells(field, layout) for field, layout in zip(fields, layouts, strict=True)]


def owned_cells(field: object, layout: FieldLayout) -> Cells:
    """Describe the cells of a field."""
    whole = describe(field, "field")
    pointer, shape = whole.pointer, []
    for cut, extent, stride in zip(layout.interior, whole.shape, whole.strides, strict=True):
        start, stop = cut.start or 0, extent if cut.stop is None else cut.stop
        pointer += start * stride
        shape.append(stop - start)
    described = Described(
        pointer, tuple(shape), whole.strides, whole.dtype, whole.device, whole.writable
    )
    return Cells(field, layout, described)


@dataclass(frozen=True)
class Profile(Cells):
    """Numbers along one axis of the whole grid, as cells of a field that is constant along the other axes."""

    view_of: Callable[[Any], Any]  # of the numbers

    def view(self) -> Any:
        """View the numbers of this rank as an array of the field's shape."""
        return self.view_of(self.field)


def profile_of(name: str, given: Any, field: Cells, domain: Domain) -> Profile:
    """Describe the profile ``(axis, numbers)`` beside a field."""
    dims, layout, xp = domain.labels.dims, field.layout, domain.xp
    if len(given) != 2 or given[0] not in dims or not isinstance(given[1], xp.ndarray):
        raise FieldError(
            f"{name}: expected a tuple of an axis ({', '.join(dims)}) and an array of {xp.__name__}, got {shown(given)}"
        )
    axis, numbers = dims.index(given[0]), given[1]
    check_unmasked(numbers, name)
    whole, start = describe(numbers, name), layout.owned[axis].start
    position = layout.spec.grid_axes[axis]
    length = layout.global_shape[position]
    if whole.shape != (length,) or whole.device != domain.device_id:
        raise FieldError(
            f"{name}: got {whole.shape} numbers; give all {length} along {given[0]}, of the whole "
            "grid, on the device of the fields"
        )
    (stride,), shape = whole.strides, field.described.shape
    strides = tuple(stride * (n == position) for n in range(len(shape)))
    pointer, device = whole.pointer + start * stride, whole.device
    described = Described(pointer, shape, strides, whole.dtype, device, writable=False)
    return Profile(
        numbers, layout, described, lambda all_: as_strided(all_[start:], shape, strides)
    )
