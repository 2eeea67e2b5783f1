"""Reductions of a grid on GPUs, made in their first call and cached.

If the kernels of all ranks can signal to one another, a field reduction is one launch: it combines the rank's cells,
and then the ranks. Otherwise one launch combines the rank's cells, and the fastest allreduce of one element combines
the ranks. CuPy first combines cells with strides that the kernel does not support.

All collective decisions follow from the reduction's name, the dtypes and the parity of the cells, which the ranks
compare when the reduction is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite, nan, prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from halox.collectives.cells import Cells, cells_of
from halox.collectives.device.device_algorithms import (
    DeviceAlgorithm,
    begin_making,
    make_algorithm,
    why_no_kernels,
)
from halox.collectives.device.device_allreduce import DeviceAllreduce, check_captures, check_lasts
from halox.collectives.device.exact_fields import ExactReduction
from halox.collectives.device.field_plans import FIELD_REDUCTIONS, check_aligned
from halox.collectives.device.kernel_plans import MOST_RANKS
from halox.collectives.device.kernel_reductions import (
    FieldReduction,
    Target,
    make_kernel_reduction,
)
from halox.collectives.expressions import Request, typed
from halox.collectives.host.host_fields import HostArrays
from halox.collectives.operations import (
    REPRODUCIBLE,
    check_out,
    element,
    field_reduction_name,
    find_operation,
    result_dtype,
    wide_dtype,
)
from halox.collectives.prepared import Launch, PreparedReductions
from halox.decomposition import Parity
from halox.errors import DeviceError, FieldError, HaloxError, raising
from halox.runtime.arrays import Described, DType, describe
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy, is_device_array
from halox.runtime.gpu.devices import as_device_array, has_kernels
from halox.runtime.gpu.streams import Stream

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_DOING = "a reduction"


class DeviceReductions(HostArrays):
    """A grid's reductions on GPUs; arrays on the host are reduced on the host."""

    fields: PreparedReductions[DeviceFieldReduction]
    _device: int

    def field(self, name: str, fields: tuple[object, ...], out: object) -> object:
        """Reduce fields to one value in ``out``, or in a new CuPy array of shape (); collective."""
        with self._world.guard:
            self._world.check_open()
            reduction: DeviceFieldReduction | None = None
            plain = found_name = name.removeprefix(REPRODUCIBLE)
            try:
                cells = cells_of(plain, fields, self._find_layout)
                dtypes = [field.dtype for field in cells]
                found_name = field_reduction_name(name, dtypes)
                parity = cells[0].layout.spec.parity
                signature = (found_name, parity, *(dtype.str for dtype in dtypes))
                reduction = self.fields.reductions.get(signature)
                dtype = result_dtype(name, dtypes)
                if reduction is None:
                    _check_dtypes(plain, dtypes)
                new = partial(cupy().empty, (), dtype)
                target = new() if out is None else self._target(out, dtype)
            except HaloxError as error:
                if reduction is not None:
                    reduction.refuse(error)
                elif not self.fields.refuse(error, found_name):
                    self._refuse_making(plain, error)
                raise
            if reduction is None:
                reduction = self.fields.add(signature, self._make(found_name, dtypes, parity))
            self._world.guard.begin()
            reduction(cells, target)
            bind, address = reduction.bind, new if out is None else target.data.ptr
            self.fields.prepare(name, fields, out, lambda: bind(cells, address))
            return target if out is None else out

    def moments(self, numbers: Any) -> tuple[float, ...]:
        """Return mean and variance of an array of real numbers of this rank, the mean as a sum of two; blocks.

        One launch, which subtracts the number in the middle of the array, reads it. If the squares overflow, a second
        one subtracts the mean.
        """
        cells = describe(numbers)
        pivot = numbers[tuple(slice(n // 2, n // 2 + 1) for n in cells.shape)].reshape(())
        for _ in range(2):
            one = replace(cells, pointer=pivot.data.ptr, strides=(0,) * numbers.ndim)
            sums = self._local("moments", [cells, one])
            if sums is None:
                away = numbers.astype("f8") - pivot
                return float(pivot), float(away.mean()), float(away.var())
            mean, square = (sums.view("f8") / numbers.size).tolist()
            if isfinite(square) or not isfinite(mean):
                break
            pivot = (pivot + mean).astype(numbers.dtype)
        if square == inf:  # numbers that are not finite have no variance
            square = inf if bool(cupy().isfinite(numbers).all()) else nan
            return float(pivot), 0.0, square
        return float(pivot), mean, max(square - mean * mean, 0.0)  # NaN stays

    def ends(self, numbers: Any) -> tuple[Any, Any]:
        """Return the smallest and the largest number of this rank; blocks."""
        least, largest = (self._local(name, [describe(numbers)]) for name in ("min", "max"))
        if least is None or largest is None:
            # CuPy takes 100 times as long for strided numbers.
            flat = cupy().ascontiguousarray(numbers)
            return flat.min().get()[()], flat.max().get()[()]
        return least.view(numbers.dtype)[0], largest.view(numbers.dtype)[0]

    def place(self, name: str, numbers: Any) -> tuple[int, Any]:
        """Return the number of a cell, in the order of the array, and its value; see `cell_sums.place`. Blocks."""
        cells = describe(numbers)
        strides = [
            cells.dtype.itemsize * prod(cells.shape[n + 1 :]) for n in range(len(cells.shape))
        ]
        found = self._local(name, [cells, replace(cells, pointer=0, strides=tuple(strides))])
        if found is not None:
            return int(found[1]), found.view(numbers.dtype)[0]
        flat = cupy().ascontiguousarray(numbers).reshape(-1)
        value = getattr(flat, name[3:])()
        is_nan = value != value
        index = int((flat != flat if is_nan else flat == value).argmax())
        return index, value.get()[()]

    def _local(self, name: str, cells: Sequence[Described]) -> Any:
        """Reduce cells of this rank, and return the 16 bytes of the result on the host; None if no kernel does."""
        dtype = cells[0].dtype
        key = "of one rank", name, dtype.str
        kernel: Any = self.fields.reductions.get(key)
        if kernel is None and element(dtype):
            arena = self._context.use_device(self._device)
            kernel = FieldReduction(self._world, arena, name, dtype, 1)
            kernel.open_alone()
            self.fields.add(key, kernel)
        if kernel is None or not kernel.supports(cells):
            return None
        result = cupy().empty(2, "u8")
        kernel(cells, result.data.ptr, cupy().cuda.get_current_stream())
        return result.get()

    def _target(self, out: object, dtype: DType) -> CupyArray:
        described = describe(out, "out")
        if described.device != self._device:
            where = "the host" if described.device is None else f"GPU {described.device}"
            raise DeviceError(
                f"out is on {where}, rank {self._world.rank} reduces on GPU {self._device}; allocate it there"
            )
        check_out(described, None, dtype)
        return as_device_array(out)

    def _refuse_making(self, name: str, error: Exception) -> None:
        """Raise an error of this rank on all ranks, while they make a reduction."""
        self._world.begin(name)
        self._world.attempt(raising(error), _DOING)

    def _make(
        self, name: str, dtypes: Sequence[DType], parity: Parity | None
    ) -> DeviceFieldReduction:
        world, context = self._world, self._context
        plain = name.removeprefix(REPRODUCIBLE)
        in_one_launch = self._meet(
            plain,
            f"field of {dtypes[0]}",
            {
                "reduction": name,
                "dtype": ", ".join(map(str, dtypes)),
                "parity of the field": parity or "all cells",
            },
        )
        if plain != name:
            return ExactReduction(context, self._device, name, dtypes, in_one_launch=in_one_launch)
        has_kernel = bool(element(dtypes[0])) and len(set(dtypes)) == 1
        if has_kernel and in_one_launch:
            arena, dtype = context.use_device(self._device), dtypes[0]
            draft = partial(FieldReduction, world, arena, name, dtype, world.size)
            return OneLaunchReduction(name, make_kernel_reduction(world, draft))
        return TwoStepReduction(context, self._device, name, dtypes, has_kernel)

    def _meet(self, call: str, what: str, mine: dict[str, object]) -> bool:
        """Compare a new reduction with all ranks, and return whether their kernels can signal to one another."""
        world = self._world
        world.begin(call)
        topology = begin_making(
            self._context,
            self._device,
            _DOING,
            f"and this is the first {call} of a {what}; take it once before the capture",
        )
        world.attempt(lambda: (None, mine), _DOING, alike=True)
        return why_no_kernels(world, topology) is None and world.size <= MOST_RANKS

    def expressions(self, request: Request, key: Hashable) -> Any:
        """Reduce expressions of fields, each to one value; collective."""
        from halox.collectives.device.expression_fields import ExpressionReduction

        with self._world.guard:
            self._world.check_open()
            try:
                call = typed(request, self._domain)
                values = call.program.values(request.named)
                for cells in call.cells:
                    check_aligned(cells.described)
                new = cupy().empty
                outs = [new((), dtype) for dtype in call.dtypes if not request.outs]
                outs += [
                    self._target(*each) for each in zip(request.outs, call.dtypes, strict=False)
                ]
            except HaloxError as error:
                if not self.fields.refuse(error, *request.title):
                    self._refuse_making(request.call, error)
                raise
            signature = (*request.title, call.meaning)
            reduction: Any = self.fields.reductions.get(signature)
            if reduction is None:
                in_one_launch = self._meet(
                    request.call, "call with these dtypes", {"expression": call.meaning}
                )
                reduction = ExpressionReduction(
                    self._context, self._device, call, in_one_launch=in_one_launch
                )
                self.fields.add(signature, reduction)
            self._world.guard.begin()
            reduction(call, values, outs)
            arrays = request.arrays()
            self.fields.prepare(key, arrays, None, lambda: reduction.bind(request, call, outs))
            return request.returned([*request.outs] or outs)

    def refuse(self, name: str, error: HaloxError) -> NoReturn:
        """Raise the error of a call's argument; see `HostArrays.refuse`."""
        if not self.fields.refuse(error, name):
            super().refuse(name, error)
        raise error

    def array(self, op: str, array: object, out: object) -> object:
        """Combine an array of each rank, element by element; collective."""
        if not is_device_array(array):
            return super().array(op, array, out)
        with self._world.guard:
            self._world.check_open()
            try:
                described = describe(array)
                find_operation(op, described.dtype)
                signature = "gpu", op, described.shape, described.dtype.str
            except HaloxError as error:
                if not self.arrays.refuse(error, "gpu"):
                    self._refuse_making("allreduce", error)
                raise
            reduction = self.arrays.reductions.get(signature)
            if reduction is None:
                self._world.begin("allreduce")
                mine = {"shape": described.shape, "dtype": str(described.dtype), "op": op}
                self._world.attempt(lambda: (None, mine), _DOING, alike=True)
                new = DeviceAllreduce(
                    self._context, self._device, described.shape, described.dtype, op
                )
                reduction = self.arrays.add(signature, new)
            self._world.guard.begin()
            result, bind = reduction(array, out), reduction.bind
            self.arrays.prepare(op, (array,), out, lambda: bind(array, out))
            return result


class OneLaunchReduction:
    """Reduction by one kernel, which combines the rank's cells and then the values of all ranks."""

    def __init__(self, name: str, reduction: FieldReduction) -> None:
        self._name, self._reduction = name, reduction
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self, cells: Sequence[Cells], out: CupyArray) -> None:
        """Launch; does not block."""
        described = [field.described for field in cells]
        stream = self._current_stream()
        try:
            if self._reduction.supports(described):
                self._reduction(described, out.data.ptr, stream)
            else:
                value = combine_by_cupy("squares" if self._name == "norm" else self._name, cells)
                self._reduction.of_value(value.data.ptr, out.data.ptr, stream)
        except HaloxError as error:
            self.refuse(error)

    def bind(self, cells: Sequence[Cells], target: Target) -> Launch | None:
        """Return the launch for these cells, None if CuPy combines them first."""
        described = [field.described for field in cells]
        if not self._reduction.supports(described):
            return None
        return self._reduction.bind(described, target)

    def refuse(self, error: Exception) -> None:
        """Raise the error that keeps this rank out of a call; local."""
        self._reduction.refuse(error, self._current_stream())

    def close(self) -> None:
        """Wait for the last launch."""
        self._reduction.close()


class TwoStepReduction:
    """Reduction in two steps; collective to make.

    A kernel combines the rank's cells (``has_kernel``), or else CuPy. Then an allreduce of one element combines the
    ranks. If the host takes part in the allreduce, an error of one rank is raised on all ranks.
    """

    def __init__(
        self,
        context: Context,
        device: int,
        name: str,
        dtypes: Sequence[DType],
        has_kernel: bool,
    ) -> None:
        assert context.device_arena is not None
        self._name = name
        self._local = "squares" if name == "norm" else name
        self._dtype = result_dtype(name, dtypes)
        if not element(self._dtype):
            self._dtype = np.dtype("f4")  # represents float16 exactly
        op = FIELD_REDUCTIONS[name].op
        self._allreduce: DeviceAlgorithm
        self._allreduce, self.algorithm, _ = make_algorithm(context, device, (op, self._dtype, 1))
        self._cells: FieldReduction | None = None
        if has_kernel:
            arena, world = context.device_arena, context.world

            def make() -> tuple[FieldReduction, CupyArray]:
                reduction = FieldReduction(world, arena, self._local, dtypes[0], 1)
                reduction.open_alone()
                return reduction, cupy().empty((), self._dtype)

            # Replays of captured calls write the rank's value again, so that it must not be a temporary.
            self._cells, self._own = world.attempt(make, _DOING)

    def __call__(self, cells: Sequence[Cells], out: CupyArray) -> None:
        """Launch, and combine; blocks if the allreduce blocks."""
        cp = cupy()
        stream = cp.cuda.get_current_stream()
        try:
            check_captures(self._allreduce, self.algorithm, self._name)
            value = self._value(cells, stream)
        except Exception as error:
            self.refuse(error)
            raise
        is_direct = self._name != "norm" and out.dtype == self._dtype
        total = out if is_direct else value
        self._allreduce.reduce(value.data.ptr, total.data.ptr, stream, None)
        if self._name == "norm":
            cp.sqrt(total.reshape(out.shape), out=out)
        elif not is_direct:
            out[...] = total.reshape(out.shape)

    def bind(self, cells: Sequence[Cells], target: Target) -> Launch | None:
        """Return None: the reduction takes two steps."""
        return None

    def refuse(self, error: Exception) -> None:
        """Raise the error: on all ranks if the host takes part in the allreduce, else only here."""
        self._allreduce.reduce(0, 0, cupy().cuda.get_current_stream(), error)

    def _value(self, cells: Sequence[Cells], stream: Stream) -> Any:
        described = [field.described for field in cells]
        if self._cells is None or not self._cells.supports(described):
            return combine_by_cupy(self._local, cells).astype(self._dtype, copy=False)
        self._cells(described, self._own.data.ptr, stream)
        return self._own

    def close(self) -> None:
        """Release the resources of both steps; collective."""
        if self._cells is not None:
            self._cells.close()
        self._allreduce.close()


DeviceFieldReduction: TypeAlias = OneLaunchReduction | TwoStepReduction | ExactReduction


def _check_dtypes(name: str, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        if not has_kernels(dtype):
            raise FieldError(
                f"{name} has no meaning for dtype {dtype} on a GPU; use bool or numbers of 1 to 8 bytes (complex: 16) "
                "in the machine's byte order"
            )


def combine_by_cupy(name: str, cells: Sequence[Cells]) -> Any:
    """Reduce this rank's cells to an array of shape (); `StateError` in a capture."""
    cp = cupy()
    check_lasts("a field with these strides")
    for field in cells:
        check_aligned(field.described)
    first, *others = (as_device_array(field.view()) for field in cells)
    if name == "squares":
        return cp.sum(cp.square(cp.abs(first.astype(wide_dtype(first.dtype))), dtype="f8"))
    if name == "dot":
        wide = wide_dtype(np.result_type(first.dtype, others[0].dtype))
        return cp.sum(cp.conj(first.astype(wide)) * others[0].astype(wide), dtype=wide)
    if name == "sum":
        return cp.sum(first, dtype=wide_dtype(first.dtype))
    if not first.size:
        raise FieldError(f"{name} has no meaning for a field of no cells")
    return getattr(cp, name)(first)
