"""Reproducible sums, norms and dot products of fields on GPUs: exact sums, rounded once.

If the kernels of all ranks can signal to one another, a reduction is one launch of ``kernels/exact_field.cu``.
Otherwise a first launch stores the words of the rank's sum, an ordinary allreduce adds these integers, and a second
launch rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from halox.collectives.cells import Cells
from halox.collectives.device.device_algorithms import DeviceAlgorithm, make_algorithm
from halox.collectives.device.device_allreduce import check_captures, check_lasts
from halox.collectives.device.field_plans import EXACT_WORDS, WORDS_OF
from halox.collectives.device.kernel_reductions import (
    FieldReduction,
    Target,
    make_kernel_reduction,
)
from halox.collectives.operations import REPRODUCIBLE, element, result_dtype
from halox.collectives.prepared import Launch
from halox.errors import FieldError
from halox.packing.strided_plan import MAX_WORDS
from halox.runtime.arrays import DType, describe
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.devices import as_device_array

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_MAKING = "the making of a reduction"


class ExactReduction:
    """A reproducible reduction of fields of given dtypes; collective to make.

    ``in_one_launch``: the kernels of all ranks can signal to one another.
    """

    def __init__(
        self,
        context: Context,
        device: int,
        name: str,
        dtypes: Sequence[DType],
        *,
        in_one_launch: bool,
    ) -> None:
        self._name = name.removeprefix(REPRODUCIBLE)
        is_kernels = bool(element(dtypes[0])) and len(set(dtypes)) == 1
        self._dtype = dtypes[0] if is_kernels else np.result_type(*dtypes, "f8")
        self._current_stream = cupy().cuda.get_current_stream
        self._allreduce: DeviceAlgorithm | None = None
        world, arena = context.world, context.use_device(device)
        new = partial(FieldReduction, world, arena)
        if in_one_launch:
            draft = partial(new, name, self._dtype, world.size)
            self._cells: FieldReduction = make_kernel_reduction(world, draft)
            return
        words = EXACT_WORDS * (result_dtype(name, dtypes).itemsize // 8)
        what = "sum", np.dtype("i8"), words
        self._allreduce, self._algorithm, _ = make_algorithm(context, device, what)

        def make() -> tuple[FieldReduction, FieldReduction, CupyArray]:
            steps = new(WORDS_OF + name, self._dtype, 1), new(name, self._dtype, 1)
            for step in steps:
                step.open_alone()
            return *steps, cupy().empty(words, "i8")

        # Replays of captured calls write the words again, so that they must not be a temporary.
        self._cells, self._rounding, self._words = world.attempt(make, _MAKING)

    def __call__(self, cells: Sequence[Cells], out: CupyArray) -> None:
        """Launch; blocks if the allreduce blocks."""
        stream, allreduce = self._current_stream(), self._allreduce
        try:
            if allreduce is not None:
                check_captures(allreduce, self._algorithm, self._name)
            described = [field.described for field in cells]
            if not self._are_supported(cells):
                copies = [self._copy(field) for field in cells]
                described = [describe(copy) for copy in copies]
            target = out if allreduce is None else self._words
            self._cells(described, target.data.ptr, stream)
        except Exception as error:
            self.refuse(error)
            raise
        if allreduce is not None:
            words = self._words.data.ptr
            allreduce.reduce(words, words, stream, None)
            self._rounding.of_value(words, out.data.ptr, stream)

    def _are_supported(self, cells: Sequence[Cells]) -> bool:
        """Whether the kernel supports the cells."""
        described = [field.described for field in cells]
        is_dtype = all(field.dtype == self._dtype for field in described)
        return is_dtype and self._cells.supports(described)

    def _copy(self, field: Cells) -> CupyArray:
        """Return a contiguous copy of cells in the kernel's dtype; `StateError` in a capture."""
        described = field.described
        check_lasts("a field with these strides, or of another dtype than the second field,")
        copy: CupyArray = cupy().empty(described.shape, self._dtype)
        if copy.size > MAX_WORDS:
            raise FieldError(
                f"reproducible: a {self._name} of {copy.size} cells of a rank, at most {MAX_WORDS} are possible on a "
                "GPU; use more ranks"
            )
        copy[...] = as_device_array(field.view())
        return copy

    def bind(self, cells: Sequence[Cells], target: Target) -> Launch | None:
        """Return the launch for these cells, None if the reduction takes several steps."""
        if self._allreduce is not None or not self._are_supported(cells):
            return None
        return self._cells.bind([field.described for field in cells], target)

    def refuse(self, error: Exception) -> None:
        """Raise the error: on all ranks if the host takes part in the allreduce, else only here."""
        stream = self._current_stream()
        if self._allreduce is None:
            self._cells.refuse(error, stream)
        self._allreduce.reduce(0, 0, stream, error)

    def close(self) -> None:
        """Release the resources of all steps; collective."""
        self._cells.close()
        if self._allreduce is not None:
            self._rounding.close()
            self._allreduce.close()
