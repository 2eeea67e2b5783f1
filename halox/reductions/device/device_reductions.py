"""Reductions of a grid on GPUs, made in their first call and cached.

If the kernels of all ranks can signal to one another, a field reduction is one launch: it combines the rank's cells,
and then the ranks. Otherwise one launch combines the rank's cells, and the fastest allreduce of one element combines
the ranks. CuPy first combines cells with strides that the kernel does not support.

All collective decisions follow from the reduction's name, the dtypes and the parity of the cells, which the ranks
compare when the reduction is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from halox.errors import DeviceError, FieldError, HaloxError
from halox.reductions.cells import cells_of
from halox.reductions.device.device_algorithms import (
    begin_making,
    make_algorithm,
    why_no_kernels,
)
from halox.reductions.device.device_allreduce import DeviceAllreduce, check_captures
from halox.reductions.device.device_programs import ExpressionProgram, FieldProgram, Program
from halox.reductions.device.field_plans import EXACT_WORDS, check_aligned
from halox.reductions.device.kernel_plans import MOST_RANKS
from halox.reductions.device.kernel_reductions import FieldReduction, make_kernel_reduction
from halox.reductions.device.nccl_reduction import DeviceAlgorithm
from halox.reductions.expressions import Request, returning, typed
from halox.reductions.field_operations import find_field_operation
from halox.reductions.host.host_reductions import HostArrays
from halox.reductions.operations import check_out, find_operation
from halox.reductions.prepared import Launch, PreparedReductions, Signature
from halox.runtime.arrays import DType, describe
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy, is_device_array
from halox.runtime.gpu.devices import as_device_array, has_kernels

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_DOING = "a reduction"
_MAKING = "the making of a reduction"


class DeviceReductions(HostArrays):
    """A grid's reductions on GPUs; arrays on the host are reduced on the host."""

    fields: PreparedReductions[DeviceReduction]
    _device: int

    def field(
        self, name: str, fields: tuple[object, ...], out: object, is_exact: bool, key: Hashable
    ) -> object:
        """Reduce fields to one value in ``out``, or in a new CuPy array of shape (); collective."""
        with self._world.guard:
            self._world.check_open()
            reduction: DeviceReduction | None = None
            kind: Signature = (name,)
            try:
                cells = cells_of(name, fields, self._find_layout)
                dtypes = tuple([field.dtype for field in cells])
                operation, dtype = find_field_operation(name, dtypes, is_exact)
                kind = (name, operation.is_exact)
                parity = cells[0].layout.spec.parity
                signature = (*kind, parity, *(dtype.str for dtype in dtypes))
                reduction = self.fields.reductions.get(signature)
                if reduction is None:
                    _check_dtypes(name, dtypes)
                new = partial(cupy().empty, (), dtype)
                target = new() if out is None else self._target(out, dtype)
            except HaloxError as error:
                if reduction is None:
                    self.refuse(name, error, kind)
                reduction.refuse(error)
                raise
            if reduction is None:
                compared = {
                    "reduction": str(operation),
                    "dtype": ", ".join(map(str, dtypes)),
                    "parity of the field": parity or "all cells",
                }
                program = FieldProgram(operation, dtypes, dtype)
                reduction = self._made(
                    signature, program, f"{name} of a field of {dtypes[0]}", compared
                )
            self._world.guard.begin()
            reduction(cells, [target])
            bind, address = reduction.bind, new if out is None else target.data.ptr
            self.fields.prepare(key, fields, out, lambda: bind(cells, address))
            return target if out is None else out

    def _target(self, out: object, dtype: DType) -> CupyArray:
        described = describe(out, "out")
        if described.device != self._device:
            where = "the host" if described.device is None else f"GPU {described.device}"
            raise DeviceError(
                f"out is on {where}, rank {self._world.rank} reduces on GPU {self._device}; allocate it there"
            )
        check_out(described, dtype)
        return as_device_array(out)

    def _made(
        self, signature: Signature, program: Program, what: str, compared: Mapping[str, object]
    ) -> DeviceReduction:
        """Make the reduction of a new signature, whose values in ``compared`` must be equal on all ranks; collective.

        ``what`` is the call in the text of an error.
        """
        world = self._world
        world.begin(program.call)
        topology = begin_making(
            self._context,
            self._device,
            _DOING,
            f"and this is the first {what}; take it once before the capture",
        )
        world.attempt(lambda: (None, compared), _DOING, alike=True)
        in_one_launch = why_no_kernels(world, topology) is None and world.size <= MOST_RANKS
        made = DeviceReduction(self._context, self._device, program, in_one_launch)
        return self.fields.add(signature, made)

    def expressions(self, request: Request, key: Hashable) -> Any:
        """Reduce expressions of fields, each to one value; collective."""
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
                self.refuse(request.call, error, request.title)
            signature = (*request.title, call.meaning)
            reduction = self.fields.reductions.get(signature)
            if reduction is None:
                reduction = self._made(
                    signature,
                    ExpressionProgram(call, request.call),
                    f"{request.call} of a call with these dtypes",
                    {"expression": call.meaning},
                )
            self._world.guard.begin()
            reduction((call, values), outs)
            arrays, bind = request.arrays(), reduction.bind
            self.fields.prepare(key, arrays, None, lambda: bind(request, call, outs))
            return returning(request.keys)([*request.outs] or outs)

    def refuse(self, name: str, error: HaloxError, kind: Signature = ()) -> NoReturn:
        """Raise the error of a call's argument: by the call's reduction, else on all ranks, which then make one.

        The signatures of the call's reductions begin with ``kind``, or with its name.
        """
        if not self.fields.refuse(error, *(kind or (name,))):
            super().refuse(name, error)
        raise error

    def array(self, op: str, array: object, out: object, is_exact: bool) -> object:
        """Combine an array of each rank, element by element; collective."""
        if not is_device_array(array):
            return super().array(op, array, out, is_exact)
        with self._world.guard:
            self._world.check_open()
            try:
                described = describe(array)
                operation = find_operation(op, described.dtype, is_exact)
                signature = "gpu", op, is_exact, described.shape, described.dtype.str
            except HaloxError as error:
                if not self.arrays.refuse(error, "gpu"):
                    super().refuse("allreduce", error)
                raise
            reduction = self.arrays.reductions.get(signature)
            if reduction is None:
                self._world.begin("allreduce")
                shape, dtype = described.shape, described.dtype
                mine = {"shape": shape, "dtype": str(dtype), "op": str(operation)}
                self._world.attempt(lambda: (None, mine), _DOING, alike=True)
                new = DeviceAllreduce(self._context, self._device, shape, dtype, operation)
                reduction = self.arrays.add(signature, new)
            self._world.guard.begin()
            result, bind = reduction(array, out), reduction.bind
            self.arrays.prepare((op, is_exact), (array,), out, lambda: bind(array, out))
            return result


class DeviceReduction:
    """A program over cells, the operations of its results, and the ranks; collective to make.

    If the kernels of all ranks can signal to one another (``in_one_launch``), a call is one launch. Otherwise a kernel,
    or CuPy, combines the rank's cells to a value for each result, an allreduce combines the values of the ranks, and a
    last step makes the result: an exact sum is rounded, a norm is the root of a sum of squares.
    """

    def __init__(
        self, context: Context, device: int, program: Program, in_one_launch: bool
    ) -> None:
        world, arena = context.world, context.use_device(device)
        self._program, self._operations = program, program.operations
        self._current_stream = cupy().cuda.get_current_stream
        self._kernel: FieldReduction | None = None
        self._rounding: FieldReduction | None = None
        self._allreduces: list[DeviceAlgorithm] = []
        new = partial(program.kernel, world, arena)
        if in_one_launch and program.has_kernel:
            draft = partial(new, self._operations, world.size)
            self._kernel = make_kernel_reduction(world, draft)
            return
        kinds = [
            (np.dtype("i8"), EXACT_WORDS * (dtype.itemsize // 8)) if each.is_exact else (dtype, 1)
            for each, dtype in zip(self._operations, program.dtypes, strict=True)
        ]
        for each, (dtype, count) in zip(self._operations, kinds, strict=True):
            what = find_operation(each.op, dtype), dtype, count
            algorithm, self._algorithm, _ = make_algorithm(context, device, what)
            self._allreduces.append(algorithm)

        def make() -> list[CupyArray]:
            if program.has_kernel:
                self._kernel = new([each.before_ranks for each in self._operations], 1)
                self._kernel.open_alone()
            first = self._operations[0]
            if first.is_exact:
                self._rounding = FieldReduction(world, arena, first, program.dtypes[0], 1)
                self._rounding.open_alone()
            return [cupy().empty(count, dtype) for dtype, count in kinds]

        # Replays of captured calls write the rank's values again, so that they must not be temporaries.
        self._values = world.attempt(make, _MAKING)

    def __call__(self, inputs: Any, outs: Sequence[CupyArray]) -> None:
        """Launch; blocks if an allreduce blocks."""
        stream = self._current_stream()
        try:
            for allreduce in self._allreduces:
                check_captures(allreduce, self._algorithm, self._program.call)
            targets = self._values if self._allreduces else outs
            values = self._program.combine(self._kernel, inputs, targets, stream)
        except Exception as error:
            self.refuse(error)
            raise
        if not self._allreduces:
            return
        for operation, allreduce, value, out in zip(
            self._operations, self._allreduces, values, outs, strict=True
        ):
            is_result = operation.finish == "Plain" and not operation.is_exact
            is_direct = is_result and value.dtype == out.dtype
            total = out if is_direct else value
            allreduce.reduce(value.data.ptr, total.data.ptr, stream, None)
            if self._rounding is not None:
                self._rounding.of_value(value.data.ptr, out.data.ptr, stream)
            elif operation.finish == "Root":
                cupy().sqrt(value.reshape(out.shape), out=out)
            elif not is_direct:
                out[...] = value.reshape(out.shape)

    def bind(self, *call: Any) -> Launch | None:
        """Return the launch for the arrays of a call, None if the reduction takes several steps."""
        if self._allreduces or self._kernel is None:
            return None
        return self._program.bind(self._kernel, *call)

    def refuse(self, error: Exception) -> None:
        """Raise the error: on all ranks if the host takes part in an allreduce, else only here."""
        stream = self._current_stream()
        if self._allreduces:
            self._allreduces[0].reduce(0, 0, stream, error)
        elif self._kernel is not None:
            self._kernel.refuse(error, stream)

    def close(self) -> None:
        """Release the resources of all steps; collective."""
        for step in (self._kernel, self._rounding, *self._allreduces):
            if step is not None:
                step.close()


def _check_dtypes(name: str, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        if not has_kernels(dtype):
            raise FieldError(
                f"{name} has no meaning for dtype {dtype} on a GPU; use bool or numbers of 1 to 8 bytes (complex: 16) "
                "in the machine's byte order"
            )
