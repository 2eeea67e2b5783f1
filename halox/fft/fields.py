"""Arrays of a transform: checks of the user's arguments, new results, and views of the owned cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halox.decomposition import FieldLayout, FieldSpec
from halox.errors import DeviceError, FieldError, HaloxError
from halox.grid import Grid
from halox.runtime.arrays import (
    Described,
    DType,
    as_ndarray,
    check_elements_apart,
    describe,
    share_memory,
)
from halox.runtime.gpu.devices import allocate, as_device_array

if TYPE_CHECKING:
    from halox.runtime.array_types import XArray

SPECTRAL = {np.dtype(real): np.dtype(pair) for real, pair in (("f4", "c8"), ("f8", "c16"))}
PHYSICAL = {pair: real for real, pair in SPECTRAL.items()}


@dataclass(frozen=True)
class TransformCall:
    """A call with checked arguments."""

    dtype: DType  # of the spectrum
    result: DType  # dtype of the result
    source: FieldLayout
    target: FieldLayout

    @property
    def components(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents of the component axes before and after the grid axes."""
        return components(self.source)


class TransformFields:
    """Checks and makes fields of both sides of a transform, ``physical`` and ``spectral``; local."""

    def __init__(self, physical: Grid, spectral: Grid, *, real: bool) -> None:
        self._grids = physical, spectral
        self._real = real
        self._view = as_ndarray if physical.device_id is None else as_device_array

    def read(self, forward: bool, source: object, out: object | None) -> TransformCall:
        """Check this rank's arguments; raises the errors of `FFT.forward`."""
        grids = self._grids if forward else self._grids[::-1]
        name = "u" if forward else "s"
        described = describe(source, name)
        layout = self._layout(source, described, name, forward)
        dtype = self._check_dtype(described.dtype, name, is_real=self._real and forward)
        result = PHYSICAL[dtype] if self._real and not forward else dtype
        before, after = components(layout)
        if out is None:
            target = grids[1].domain.layouts.of(FieldSpec(grids[1].halo, before, after))
            return TransformCall(dtype, result, layout, target)
        given = describe(out, "out")
        target = self._layout(out, given, "out", not forward)
        if given.dtype != result:
            raise FieldError(
                f"out has dtype {given.dtype}, and the transform of {described.dtype} gives {result}"
            )
        if components(target) != (before, after):
            raise FieldError(
                f"out has the component axes {components(target)}, before and after the grid axes, {name} "
                f"{(before, after)}; give both the same"
            )
        if not given.writable:
            raise FieldError("out is read-only; its cells cannot be set")
        check_elements_apart(given, "out")
        if share_memory(described, given):
            raise FieldError(
                f"{name} and out share memory, and cells would be overwritten before they are read; give two arrays "
                "apart"
            )
        return TransformCall(dtype, result, layout, target)

    def new(self, forward: bool, call: TransformCall) -> XArray:
        """Allocate a result, with a halo of zeros; local."""
        grid = self._grids[1 if forward else 0]
        shape = call.target.padded_shape
        try:
            array = allocate(shape, call.result, grid.device_id)
        except MemoryError as error:
            raise HaloxError(
                f"no memory for a field of shape {shape} and dtype {call.result} ({error}); use more ranks, or "
                "give out="
            ) from error
        if shape != call.target.spec.box((0,) * len(grid.halo), grid.rank_shape).subsizes:
            array[...] = 0
        grid.domain.layouts.record(array, call.target)
        return array

    def cells(self, array: object, layout: FieldLayout) -> XArray:
        """View the owned cells of an array, with the component axes first."""
        cells = self._view(array)[layout.interior]
        if not layout.spec.components_after:
            return cells
        axes = layout.spec.grid_axes
        return cells.transpose(*range(axes.start), *range(axes.stop, cells.ndim), *axes)

    def _layout(
        self, array: object, described: Described, name: str, physical: bool
    ) -> FieldLayout:
        """Return the layout of an array of the physical or the spectral grid."""
        side, other_side = ("physical", "grid") if physical else ("grid", "physical")
        mine, other = (
            grid.domain.layouts for grid in (self._grids if physical else self._grids[::-1])
        )
        expected = f"{name} must be a field of fft.{side}"
        if other.is_field(array, described) and not mine.is_field(array, described):
            raise FieldError(f"{expected}, and is one of fft.{other_side}")
        try:
            layout = mine.find(array)
        except (FieldError, DeviceError) as error:
            raise type(error)(f"{expected}: {error}") from error
        if any(layout.spec.staggered) or layout.spec.parity is not None:
            raise FieldError(f"{expected} with all its cells, got {layout.spec}")
        return layout

    def _check_dtype(self, dtype: DType, name: str, *, is_real: bool) -> DType:
        """Return the spectral dtype of a field's dtype."""
        allowed = SPECTRAL if is_real else PHYSICAL
        if dtype in allowed:
            return SPECTRAL.get(dtype, dtype)
        raise FieldError(
            f"{name} has dtype {dtype}, and this transform with real={self._real} takes "
            f"{' or '.join(map(str, allowed))}"
        )


def components(layout: FieldLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the extents of the component axes before and after the grid axes."""
    return layout.spec.components_before, layout.spec.components_after
