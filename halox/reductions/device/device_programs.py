"""Programs of reductions on GPUs: kernels that combine the cells of a rank, and alternatives where kernels cannot.

A `FieldProgram` reduces one field or two, an `ExpressionProgram` the expressions of a call. A program makes its kernel
for all ranks, or for one rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.errors import FieldError
from halox.packing.strided_plan import MAX_WORDS
from halox.reductions.cells import Cells
from halox.reductions.device.device_allreduce import check_lasts
from halox.reductions.device.expression_kernels import ExpressionKernel, operands, words_of
from halox.reductions.device.field_plans import check_aligned
from halox.reductions.device.kernel_reductions import FieldReduction, Target
from halox.reductions.expressions import Request, Typed, returning
from halox.reductions.field_operations import FieldOperation
from halox.reductions.operations import element, wide_dtype
from halox.reductions.prepared import Launch
from halox.runtime.arrays import DType, describe
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.streams import Stream
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray


class FieldProgram:
    """Reduces fields of given dtypes to one value.

    ``call`` is the grid's method; ``operations`` and ``dtypes`` are those of the results; with ``has_kernel``, a kernel
    combines the cells.

    Without a kernel for the dtypes, CuPy reduces the cells. An exact sum of such fields is a sum of copies.
    """

    def __init__(self, operation: FieldOperation, dtypes: Sequence[DType], dtype: DType) -> None:
        self.call, self.operations = operation.name, [operation]
        # ``dtype`` is the result's; float32 represents float16 exactly.
        self.dtypes = [dtype if element(dtype) else np.dtype("f4")]
        self._is_alike = bool(element(dtypes[0])) and len(set(dtypes)) == 1
        self.has_kernel = self._is_alike or operation.is_exact
        self._dtype = dtypes[0] if self._is_alike else np.result_type(*dtypes, "f8")

    def kernel(
        self, world: World, arena: DeviceArena, operations: Sequence[FieldOperation], ranks: int
    ) -> FieldReduction:
        """Return the kernel for some ranks; local."""
        return FieldReduction(world, arena, operations[0], self._dtype, ranks)

    def combine(
        self,
        kernel: FieldReduction | None,
        cells: Sequence[Cells],
        targets: Sequence[CupyArray],
        stream: Stream,
    ) -> Sequence[CupyArray]:
        """Combine cells, and the ranks of the kernel; returns ``targets``, or other arrays. Does not block."""
        if kernel is None:
            return [combine_by_cupy(self.call, cells).astype(self.dtypes[0], copy=False)]
        target, described = targets[0], [field.described for field in cells]
        if self._is_alike and kernel.supports(described):
            kernel(described, target.data.ptr, stream)
        elif self.operations[0].is_exact:
            copies = [self._copy(field) for field in cells]
            kernel([describe(copy) for copy in copies], target.data.ptr, stream)
        else:
            value = combine_by_cupy(self.call, cells)
            kernel.of_value(value.data.ptr, target.data.ptr, stream)
        return targets

    def bind(self, kernel: FieldReduction, cells: Sequence[Cells], target: Target) -> Launch | None:
        """Return the launch for these cells, None if the kernel does not support them."""
        described = [field.described for field in cells]
        if not (self._is_alike and kernel.supports(described)):
            return None
        return kernel.bind(described, target)

    def _copy(self, field: Cells) -> CupyArray:
        """Return a contiguous copy of cells in the kernel's dtype; `StateError` in a capture."""
        check_lasts("a field with these strides, or of another dtype than the second field,")
        copy: CupyArray = cupy().empty(field.described.shape, self._dtype)
        if copy.size > MAX_WORDS:
            raise FieldError(
                f"reproducible: a {self.call} of {copy.size} cells of a rank, at most {MAX_WORDS} are possible on a "
                "GPU; use more ranks"
            )
        copy[...] = as_device_array(field.view())
        return copy


class ExpressionProgram:
    """Reduces the expressions of a call; see `FieldProgram`."""

    has_kernel = True

    def __init__(self, call: Typed, name: str) -> None:
        self.call, self._call = name, call.without_arrays()
        self.operations, self.dtypes = call.ops, call.dtypes

    def kernel(
        self, world: World, arena: DeviceArena, operations: Sequence[FieldOperation], ranks: int
    ) -> FieldReduction:
        return ExpressionKernel(world, arena, self._call, operations, ranks)

    def combine(
        self,
        kernel: FieldReduction | None,
        inputs: tuple[Typed, Sequence[Any]],
        targets: Sequence[CupyArray],
        stream: Stream,
    ) -> Sequence[CupyArray]:
        assert kernel is not None
        first, *others = [target.data.ptr for target in targets]
        kernel(operands(*inputs, others), first, stream)
        return targets

    def bind(
        self, kernel: FieldReduction, request: Request, call: Typed, outs: Sequence[CupyArray]
    ) -> Launch:
        """Return the launch for later calls with these arrays, which are ``outs`` if the call gives them."""
        names, program, dtypes = tuple(request.named), call.program, call.dtypes
        cells = operands(call, program.values(request.named), [0] * (len(outs) - 1))
        go = kernel.of_words(cells)
        fixed = [each.pointer for each in cells[: call.inputs]]
        given = [out.data.ptr for out in outs] if request.outs else []
        current_stream, empty = cupy().cuda.get_current_stream, cupy().empty
        returned = returning(request.keys)

        def launch(arguments: Sequence[Any]) -> Any:
            stream = current_stream()
            try:
                scalars = words_of(program.values(dict(zip(names, arguments, strict=False))))
                results = arguments[len(names) :] or [empty((), dtype) for dtype in dtypes]
            except Exception as error:
                kernel.refuse(error, stream)
            target, *others = given or [result.data.ptr for result in results]
            go([*fixed, *scalars, *others], target, stream)
            return returned(results)

        return launch


Program = FieldProgram | ExpressionProgram
"""A program over the cells of a rank."""


def combine_by_cupy(name: str, cells: Sequence[Cells]) -> Any:
    """Reduce this rank's cells to an array of shape (), for a norm the sum of squares; `StateError` in a capture."""
    cp = cupy()
    check_lasts("a field with these strides")
    for field in cells:
        check_aligned(field.described)
    first, *others = (as_device_array(field.view()) for field in cells)
    if name == "norm":
        return cp.sum(cp.square(cp.abs(first.astype(wide_dtype(first.dtype))), dtype="f8"))
    if name == "dot":
        wide = wide_dtype(np.result_type(first.dtype, others[0].dtype))
        return cp.sum(cp.conj(first.astype(wide)) * others[0].astype(wide), dtype=wide)
    if name == "sum":
        return cp.sum(first, dtype=wide_dtype(first.dtype))
    if not first.size:
        raise FieldError(f"{name} has no meaning for a field of no cells")
    return getattr(cp, name)(first)
