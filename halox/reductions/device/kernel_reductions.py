"""Reductions by one kernel per call, among GPUs that map one another's memory.

The kernels store into the memory of all ranks, wait for the stores of all ranks, and combine the values in the order of
the ranks. (``kernels/allreduce_body.cu`` states their protocol.) The host only launches the kernels, so that a
reduction can be captured in a CUDA graph::

    rank 0  ...user's kernels | a0 -> slots of 1, 2 | wait for a1, a2 | (a0 + a1) + a2 | user's kernels...
    rank 1  ...user's kernels | a1 -> slots of 0, 2 | wait for a0, a2 | (a0 + a1) + a2 | user's kernels...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeVar

import numpy as np

from halox.errors import ExchangeTimeoutError, HaloxError, StateError
from halox.packing.strided_plan import StridedRow, fill_region, region_dtype
from halox.reductions.device.field_plans import ONE_VALUE, check_aligned, field_row, plan_field
from halox.reductions.device.kernel_plans import ReductionPlan
from halox.reductions.field_operations import FieldOperation
from halox.reductions.prepared import Launch
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.pools import FailureWord
from halox.runtime.gpu.streams import Stream, StreamOrder, is_capturing
from halox.runtime.handshake import handshake
from halox.runtime.segments import Block, Place, SegmentKey
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_MAKING = "the making of a reduction"
RESUMING = "a reduction after one that was refused"

Target: TypeAlias = "int | Callable[[], CupyArray]"
"""Address of a result, or a function that makes a CuPy array for the result of each call."""

Argument: TypeAlias = "ctypes.Array[ctypes.c_char]"
Address = ctypes.c_uint64
"""Place of an address in a launch's argument; setting its value takes effect in the next launch."""

Layout = tuple[Sequence[Address], PreparedLaunch]
"""Places of the addresses of the fields' cells in a launch's argument, and the launch."""

_KernelRecord = tuple[Mapping[SegmentKey, bytes], Place]
"""Description of a rank for its peers: handles of its memory, and its place there."""


class _PlannedReduction:
    """A plan's memory on all ranks, and the launches that synchronize there, in the order of a stream.

    Attributes
    ----------
    plan : ReductionPlan
    """

    def __init__(self, world: World, arena: DeviceArena, plan: ReductionPlan) -> None:
        self.plan = plan
        self._world, self._arena = world, arena
        self._order = StreamOrder()
        self._bound_call: Callable[[], object] | None = None  # call whose addresses are set
        self._failure: FailureWord | None = None
        self._block: Block | None = arena.allocate(plan.memory_bytes)
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(arena.device):
            runtime.memset(self._block.pointer, 0, plan.memory_bytes)
            runtime.deviceSynchronize()

    def record(self) -> _KernelRecord:
        """Return this rank's memory for the remaining ranks."""
        assert self._block is not None
        place = self._block.place
        return self._arena.handles([place]), place

    def open(self, records: list[_KernelRecord]) -> Self:
        """Map the memory of the remaining ranks and lay out the launch."""
        rank = self._world.rank
        for other, (handles, _) in enumerate(records):
            if other != rank:
                self._arena.open(handles)
        self._set_memory(rank, [self._arena.pointer(place) for _, place in records])
        return self

    def open_alone(self) -> None:
        """Lay out the launch of a plan for this rank alone."""
        assert self._block is not None
        self._set_memory(0, [self._block.pointer])

    def _set_memory(self, place: int, memory: Sequence[int]) -> None:
        self._failure = FailureWord(self._arena.device)
        self._failed = self._failure.words
        limit_ns = int(self._world.limit_s * 1e9)
        parameter = self.plan.parameter(place, memory, self._failure.pointer, limit_ns)
        self._argument = argument(parameter)
        self._source, self._target = _addresses(self._argument, parameter.dtype)

    def _prepared(self, plan: ReductionPlan, leading: Sequence[Argument]) -> PreparedLaunch:
        return PreparedLaunch(
            kernel(plan.function, plan.function, self._arena.device, plan.defines),
            plan.blocks,
            plan.threads,
            [*leading, self._argument],
            device=self._arena.device,
            dependent=True,
        )

    def _enter(self, stream: Stream) -> None:
        """Raise if an earlier call has failed, and keep the order of calls. The caller must then set all addresses."""
        if self._failed[0]:
            self._resume()
        self._bound_call = None
        self._order.follow(stream)

    def _bind(
        self, launch: PreparedLaunch, sources: Sequence[tuple[Address, int]], target: Target
    ) -> Launch:
        """Return a launch with fixed addresses on CuPy's current stream.

        If ``target`` is a function, each launch writes to a new array, and returns it.
        """
        new: Callable[[], CupyArray] | None = None
        values = [*sources]
        if callable(target):
            new = target
        else:
            values.append((self._target, target))
        current_stream, failed, order = cupy().cuda.get_current_stream, self._failed, self._order
        on: Stream | None = None
        go: Callable[[], None]

        def call(_: Sequence[object] = ()) -> CupyArray | None:
            nonlocal on, go
            result = None
            if new is not None:
                try:
                    result = new()
                except Exception as error:
                    self.refuse(error, current_stream())
                # The sources must be set again, too, since any launch in between has set other addresses.
                self._target.value, self._bound_call = result.data.ptr, None
            stream = current_stream()
            if failed[0] or order.last is not stream:
                self._enter(stream)
            if on is not stream:
                on, go = stream, launch.ready(stream.ptr)
            if self._bound_call is not call:
                for place, value in values:
                    place.value = value
                self._bound_call = call
            go()
            return result

        return call

    def refuse(self, error: Exception, stream: Stream) -> NoReturn:
        """Raise the error that keeps this rank out of a call; local.

        Ranks that make the call wait for this rank until their time limit. If all ranks refuse the call, later calls
        work: this rank's next call first waits for all ranks on the host.
        """
        if self._failure is not None and not self._failed[0] and not is_capturing(stream):
            self._failed[0], self._failure.was_raised = self._world.rank + 1, True
        raise error

    def _resume(self) -> None:
        """Continue after a call that all ranks have refused (collective), or raise the error of an earlier call."""
        assert self._failure is not None
        refused = self._world.rank + 1  # no kernel waits for its own rank
        if self._failed[0] != refused:
            self._failure.was_raised = True
            raise self._error()

        def check() -> None:
            check_resuming()
            self._order.synchronize()
            if self._failed[0] != refused:
                raise self._error()

        self._world.attempt(check, RESUMING)
        self._failure.clear()

    def _error(self) -> HaloxError:
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {self._failed[0] - 1} in reduction {self._failed[1]} "
            f"({self.plan.name}) of a plan for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; its result, and "
            "those since, are not valid. A rank has failed, is far behind, has refused its argument, or has made "
            "another sequence of calls"
        )

    def close(self) -> None:
        """Wait for the last launch, then release the memory; warn if a reduction has failed since the last call."""
        self._order.synchronize()
        self._bound_call = None
        if self._failure is not None:
            self._failure.close(self._error)
            self._failure = None
        if self._block is not None:
            # A peer that is behind may still store into the block.
            self._arena.retire(self._block)
            self._block = None

    abandon = close


class KernelReduction(_PlannedReduction):
    """``oneshot`` or ``reduce_scatter_allgather``; made by :func:`make_kernel_reduction`."""

    captures = True

    def _set_memory(self, place: int, memory: Sequence[int]) -> None:
        super()._set_memory(place, memory)
        self._launch = self._prepared(self.plan, [])

    def reduce(
        self, source: int, target: int, stream: Stream, error: Exception | None = None
    ) -> None:
        """Launch on a stream, or refuse; keeps the order of calls across streams, except in captures."""
        if error is not None:
            self.refuse(error, stream)
        self._enter(stream)
        self._source.value, self._target.value = source, target
        self._launch.launch(stream.ptr)

    def bind(self, source: int, target: Target) -> Launch:
        """Prepare calls with these addresses on CuPy's current stream, with less overhead per call."""
        return self._bind(self._launch, ((self._source, source),), target)


class FieldReduction(_PlannedReduction):
    """A reduction of fields to one value; made by :func:`make_kernel_reduction`, or for one rank alone.

    Only its operation and dtype must be the same on all ranks. The strides of the cells may differ between ranks, so
    that a rank lays out a launch for new strides alone.
    """

    def __init__(
        self, world: World, arena: DeviceArena, operation: FieldOperation, dtype: DType, ranks: int
    ) -> None:
        self._operation, self._dtype, self._ranks = operation, dtype, ranks
        self._sms = multiprocessors(arena.device)
        super().__init__(world, arena, self._memory())
        self._launches: dict[object, Layout] = {}

    def _memory(self) -> ReductionPlan:
        """Plan the memory of all launches."""
        return plan_field(self._operation, self._dtype, ONE_VALUE, self._ranks, sms=self._sms)

    def _set_memory(self, place: int, memory: Sequence[int]) -> None:
        super()._set_memory(place, memory)
        identities = b"".join(each.tobytes().ljust(16, b"\0") for each in self._identities())
        partials = [memory[place] + self.plan.partials_offset, *np.frombuffer(identities, "u8")]
        self._partials = argument(np.array(partials, "u8"))

    def _identities(self) -> list[Any]:
        """Return the identity element of each result."""
        return [self._operation.identity(self._dtype)]

    def supports(self, cells: Sequence[Described]) -> bool:
        """Whether the kernel supports the cells of one or two fields, or a launch for them already exists."""
        is_aligned = not any(field.pointer % self._dtype.itemsize for field in cells)
        if is_aligned and self._key(cells) in self._launches:
            return True
        for field in cells:
            check_aligned(field)
        return self._row(cells) is not None

    def _row(self, cells: Sequence[Described]) -> StridedRow | None:
        first, *others = cells
        second = (others[0].pointer, others[0].strides) if others else None
        return field_row(first.pointer, first.shape, first.strides, self._dtype.itemsize, second)

    @staticmethod
    def _key(cells: Sequence[Described]) -> object:
        return cells[0].shape, *[field.strides for field in cells]

    def _find(self, cells: Sequence[Described]) -> Layout:
        key = self._key(cells)
        layout = self._launches.get(key)
        if layout is None:
            layout = self._launches[key] = self._layout(cells)
        return layout

    def _layout(self, cells: Sequence[Described]) -> Layout:
        row = self._row(cells)
        assert row is not None  # `supports` has returned True
        plan = plan_field(self._operation, self._dtype, row, self._ranks, sms=self._sms)
        return self._layout_of_row(plan, row)

    def _layout_of_row(self, plan: ReductionPlan, row: StridedRow) -> Layout:
        region = np.zeros(1, region_dtype(int(dict(plan.defines)["MAX_LEVELS"])))
        fill_region(region[0], row, 0)
        first = argument(region)
        return _addresses(first, region.dtype), self._prepared_for(plan, first)

    def _prepared_for(self, plan: ReductionPlan, first: Argument) -> PreparedLaunch:
        """Return the launch of a plan; ``first`` is the argument that describes the cells."""
        if is_capturing():
            raise StateError(
                f"the current stream is being captured, and this is the first {self.plan.name} of a field of this "
                "shape with these strides; take it once before the capture"
            )
        assert plan.memory_bytes <= self.plan.memory_bytes
        return self._prepared(plan, [first, self._partials])

    def __call__(self, cells: Sequence[Described], target: int, stream: Stream) -> None:
        """Launch on a stream; collective, does not block. Calls keep their order across streams, except in captures."""
        self._launch_at(self._find(cells), [field.pointer for field in cells], target, stream)

    def bind(self, cells: Sequence[Described], target: Target) -> Launch:
        """Prepare calls with these cells on CuPy's current stream, with less overhead per call."""
        places, launch = self._find(cells)
        sources = [(place, field.pointer) for place, field in zip(places, cells, strict=False)]
        return self._bind(launch, sources, target)

    def of_words(self, cells: Sequence[Described]) -> Callable[[Sequence[int], int, Stream], None]:
        """Return a launch for cells with these strides: of their addresses, the result's address, and a stream."""
        return partial(self._launch_at, self._find(cells))

    def of_value(self, value: int, target: int, stream: Stream) -> None:
        """Launch for a rank whose cells have already been combined, to an accumulator at an address."""
        layout = self._launches.get("value")
        if layout is None:
            local = "Words" if self._operation.is_exact else "Value"
            operation = replace(self._operation, local=local)
            dtype = self._operation.accumulator(self._dtype)
            plan = plan_field(operation, dtype, ONE_VALUE, self._ranks, sms=self._sms)
            layout = self._launches["value"] = self._layout_of_row(plan, ONE_VALUE)
        self._launch_at(layout, [value], target, stream)

    def _launch_at(
        self, layout: Layout, sources: Sequence[int], target: int, stream: Stream
    ) -> None:
        places, launch = layout
        self._enter(stream)
        for place, source in zip(places, sources, strict=False):  # fewer fields than places
            place.value = source
        self._target.value = target
        launch.launch(stream.ptr)


def _addresses(data: Argument, dtype: DType) -> tuple[Address, Address]:
    """Return the places of source and target in a launch's argument."""
    assert dtype.fields is not None
    at = (dtype.fields[name][1] for name in ("source", "target"))
    source, target = (Address.from_buffer(data, offset) for offset in at)
    return source, target


def argument(data: Array) -> Argument:
    """Return a copy of an array as an argument of launches."""
    return (ctypes.c_char * data.nbytes).from_buffer_copy(data.tobytes())


def check_resuming() -> None:
    """Raise `StateError` in a capture, since a rank that has refused a call must first meet the others on the host."""
    if is_capturing():
        raise StateError(
            "the current stream is being captured, and this rank has refused the last reduction; take one before the "
            "capture"
        )


_Reduction = TypeVar("_Reduction", bound=_PlannedReduction)


def make_kernel_reduction(world: World, draft: Callable[[], _Reduction]) -> _Reduction:
    """Make a reduction whose launches synchronize with the launches of all ranks; collective."""
    rounds = [lambda new, _: new.record(), lambda new, records: new.open(records)]
    reduction: _Reduction = handshake(world, draft, rounds, _MAKING)
    return reduction
