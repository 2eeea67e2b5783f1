"""Cells of a field that its rank owns, as input of reductions of fields on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.runtime.arrays import Described, DType, as_ndarray, describe

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
        """Dtype of a cell."""
        return self.described.dtype

    def view(self) -> Any:
        """View the cells as an array; on the host always of NumPy, since other libraries form sums in other dtypes."""
        return as_ndarray(self.field)[self.layout.interior]


def cells_of(name: str, fields: Sequence[Any], find_layout: FindLayout) -> list[Cells]:
    """Describe the cells of a reduction's fields without a view; on a GPU, making a view takes longer than a launch."""
    layouts = [find_layout(field) for field in fields]
    specs = [layout.spec for layout in layouts]
    if layouts[-1] is not layouts[0] and specs[0].of_cells != specs[-1].of_cells:
        parities = [spec.parity for spec in specs]
        if parities[0] != parities[1]:
            given = " and ".join(f"one of {parity or 'all'} cells" for parity in parities)
            raise FieldError(
                f"{name} needs two fields of one layout, got {given}; give two of one parity"
            )
        raise FieldError(
            f"{name} needs two fields of one layout, got shapes {fields[0].shape} and {fields[1].shape}"
            + (f" ({specs[0]}; {specs[1]})" if fields[0].shape == fields[1].shape else "")
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
