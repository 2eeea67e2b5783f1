"""Reductions by one kernel a call, among GPUs that map one another's memory.

The kernels (``kernels/allreduce_body.cu`` states their protocol) store into the memory of all ranks, wait for
what those store here, and combine in the order of the ranks. The host only launches them, so that a reduction can be
captured in a graph::

    rank 0  ...user's kernels | a0 -> slots of 1, 2 | wait for a1, a2 | (a0 + a1) + a2 | user's kernels...
    rank 1  ...user's kernels | a1 -> slots of 0, 2 | wait for a0, a2 | (a0 + a1) + a2 | user's kernels...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from halox.collectives.device.kernel_plans import (
    EPOCH_SHIFT,
    FIELD_REDUCTIONS,
    LEAST_THREADS,
    MOST_RANKS,
    PARTIALS,
    ReductionPlan,
    can_walk,
    check_aligned,
    field_row,
    plan_field,
    plan_meeting,
    plan_value,
)
from halox.errors import (
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from halox.packing.strided_plan import Row, fill_region, region_dtype
from halox.runtime.arrays import Described
from halox.runtime.device_arena import Allocation, DeviceArena, DeviceBlock, DevicePlace
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.pools import FailureWord
from halox.runtime.gpu.streams import StreamOrder, is_capturing
from halox.runtime.handshake import handshake
from halox.runtime.world import World

_MAKING = "the making of a reduction"
_MEETING = "a reduction after one that was cancelled"

Target = int | Callable[[], Any]
"""Address of a result, or what makes a CuPy array for it at each call."""

Argument: TypeAlias = "ctypes.Array[ctypes.c_char]"
Address = ctypes.c_uint64
"""A place for an address in a launch's argument."""

_Layout = tuple[Address, Address, PreparedLaunch]
"""Addresses of two fields' cells in a launch's argument, and the launch."""


@dataclass(frozen=True)
class _Offer:
    """Offer of a rank to the others: its memory, and how it planned."""

    handles: Mapping[Allocation, bytes]
    place: DevicePlace
    signature: tuple[object, ...]


class _Meeting:
    """Memory of all ranks in which the launches of a plan meet, in the order of a stream.

    Attributes
    ----------
    plan : ReductionPlan
    """

    def __init__(self, world: World, arena: DeviceArena, plan: ReductionPlan) -> None:
        self.plan = plan
        self._world, self._arena = world, arena
        self._order = StreamOrder()
        self._laid_for: Callable[[], None] | None = None  # whose addresses are set
        self._failure: FailureWord | None = None
        self._block: DeviceBlock | None = arena.allocate(plan.memory_bytes)
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(arena.device):
            runtime.memset(self._block.pointer, 0, plan.memory_bytes)
            runtime.deviceSynchronize()

    def offer(self) -> _Offer:
        """Return what the other ranks must know."""
        assert self._block is not None
        place = self._block.place
        return _Offer(self._arena.handles([place]), place, self.plan.signature)

    def open(self, offers: list[_Offer]) -> None:
        """Map the other ranks' memory and lay out the launch."""
        assert self._block is not None
        plan, rank = self.plan, self._world.rank
        for other, offer in enumerate(offers):
            if offer.signature != plan.signature:
                raise MismatchError(
                    f"rank {other} reduces by {offer.signature}, rank {rank} by {plan.signature}; give all ranks the "
                    "same shape, dtype and operation"
                )
            if other != rank:
                self._arena.open(offer.handles)
        self._meet(rank, [self._arena.pointer(offer.place) for offer in offers])

    def open_alone(self) -> None:
        """Lay out the launch of a plan for this rank alone."""
        assert self._block is not None
        self._meet(0, [self._block.pointer])

    def _meet(self, place: int, memory: Sequence[int]) -> None:
        self._failure = FailureWord(self._arena.device)
        self._failed = self._failure.words
        limit_ns = int(self._world.limit_s * 1e9)
        parameter = self.plan.parameter(place, memory, self._failure.pointer, limit_ns)
        self._argument = _argument(parameter)
        self._source, self._target = _addresses(self._argument, parameter.dtype)
        self._partials = memory[place] + self.plan.partials_offset

    def _prepared(self, plan: ReductionPlan, leading: Sequence[Argument]) -> PreparedLaunch:
        return PreparedLaunch(
            kernel(plan.function, plan.function, self._arena.device, plan.defines),
            plan.blocks,
            plan.threads,
            [*leading, self._argument],
            device=self._arena.device,
            dependent=True,
        )

    def _enter(self, stream: Any) -> None:
        """Raise if an earlier call has failed, and keep the order of calls; who enters sets its own addresses."""
        if self._failed[0]:
            assert self._failure is not None
            if not (self._failure.is_told and self._failed[0] > MOST_RANKS):
                self._failure.is_told = True
                raise self._error()
            self._meet_again()
        self._laid_for = None
        self._order.follow(stream)

    def _bind(
        self, launch: PreparedLaunch, sources: Sequence[tuple[Address, int]], target: Target
    ) -> Callable[[], Any]:
        """Launch with fixed addresses on CuPy's current stream; returns the array if the target is a new one."""
        if callable(target):
            return self._bind_to_new(self._bind_at(launch, sources), target)
        return self._bind_at(launch, (*sources, (self._target, target)))

    def _bind_to_new(self, go: Callable[[], None], new: Callable[[], Any]) -> Callable[[], Any]:
        target, current_stream = self._target, cupy().cuda.get_current_stream

        def call() -> Any:
            try:
                result = new()
            except Exception:
                self.cancel(current_stream())
                raise
            # The sources are set again as well: any launch in between has set its own.
            target.value, self._laid_for = result.data.ptr, None
            go()
            return result

        return call

    def _bind_at(
        self, launch: PreparedLaunch, values: Sequence[tuple[Address, int]]
    ) -> Callable[[], None]:
        """Return what sets some addresses, unless they are set, and launches on CuPy's current stream."""
        current_stream, failed, order = cupy().cuda.get_current_stream, self._failed, self._order
        on: Any = None
        go: Callable[[], None]

        def call() -> None:
            nonlocal on, go
            stream = current_stream()
            if failed[0] or order.last is not stream:
                self._enter(stream)
            if on is not stream:
                on, go = stream, launch.ready(stream.ptr)
            if self._laid_for is not call:
                for place, value in values:
                    place.value = value
                self._laid_for = call
            go()

        return call

    def cancel(self, stream: Any) -> None:
        """Tell all ranks that this one does not take part in its next call, so that none waits for it.

        Local; does not block. Other ranks that make that call raise at the one after. When all have raised, on their
        own account or for another, the next call of all is as good as any.
        """
        if self._failure is None or self._failed[0] or is_capturing(stream):
            return
        self._order.follow(stream)
        name, device = "allreduce_cancel", self._arena.device
        function = kernel(name, name, device, ())
        launch = PreparedLaunch(
            function, 1, LEAST_THREADS, [self._argument], device=device, dependent=True
        )
        launch.launch(stream.ptr)
        self._failed[0] = MOST_RANKS + self._world.rank + 1
        self._failure.is_told = True

    def _meet_again(self) -> None:
        """Go on after a reduction that was cancelled, once all ranks have noticed; collective, waits for the GPU."""
        assert self._block is not None
        runtime, state = cupy().cuda.runtime, np.zeros(2, np.uint64)  # State of signals.cu
        at, nbytes = self._block.pointer + self.plan.state_offset, state.nbytes

        def ended() -> int:
            if is_capturing():
                raise StateError(
                    "the current stream is being captured, and the last reduction was cancelled; take one before the "
                    "capture"
                )
            self._order.synchronize()
            runtime.memcpy(state.ctypes.data, at, nbytes, runtime.memcpyDefault)
            return int(state[0]) >> EPOCH_SHIFT

        def begun() -> None:
            state[:] = (max(epochs) + 1) << EPOCH_SHIFT, 0
            runtime.memcpy(at, state.ctypes.data, nbytes, runtime.memcpyDefault)
            runtime.deviceSynchronize()
            assert self._failure is not None
            self._failure.clear()

        epochs: list[int] = self._world.gather_result(ended, _MEETING)
        self._world.guarded(begun, _MEETING)

    def _error(self) -> HaloxError:
        who, number = self._failed[0] - 1, self._failed[1]
        if who >= MOST_RANKS:
            return MismatchError(
                f"rank {who - MOST_RANKS} has cancelled reduction {number} of a plan, because what it was given does "
                "not fit, as its own error says; that result is not valid. The next call begins anew, if all ranks "
                "make it"
            )
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {who} in reduction {number} of a "
            f"plan for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; its result, and those since, are not "
            "valid. A rank has failed, is far behind, or has made another sequence of calls"
        )

    def close(self) -> None:
        """Wait for the last launch, then give the memory back; warn if a reduction has failed since the last call."""
        self._order.synchronize()
        self._laid_for = None
        if self._failure is not None:
            self._failure.close(self._error)
            self._failure = None
        if self._block is not None:
            # A peer that is behind may still store into it.
            self._arena.retire(self._block)
            self._block = None

    abandon = close


class KernelReduction(_Meeting):
    """``oneshot`` or ``reduce_scatter_allgather``; made by :func:`make_array_reduction`."""

    captures = True

    def _meet(self, place: int, memory: Sequence[int]) -> None:
        super()._meet(place, memory)
        self._launch = self._prepared(self.plan, [])

    def __call__(self, source: int, target: int, stream: Any) -> None:
        """Launch on a stream; collective, does not block. Calls keep their order across streams, but in captures."""
        self._enter(stream)
        self._source.value, self._target.value = source, target
        self._launch.launch(stream.ptr)

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Launch, or cancel and raise."""
        if error is not None:
            self.cancel(stream)
            raise error
        self(source, target, stream)

    def bind(self, source: int, target: Target) -> Callable[[], Any]:
        """Prepare calls with these addresses on CuPy's current stream, with less on the way each time."""
        return self._bind(self._launch, ((self._source, source),), target)


class FieldReduction(_Meeting):
    """A reduction of fields to one value; made by :func:`make_field_reduction`.

    Ranks meet by its name and the dtype alone. Strides of its cells are a rank's own affair, so that a launch
    for cells of other strides is laid out without the other ranks.
    """

    def __init__(
        self, world: World, arena: DeviceArena, name: str, dtype: np.dtype[Any], ranks: int
    ) -> None:
        self._name, self._dtype = name, dtype
        self._sms = multiprocessors(arena.device)
        super().__init__(world, arena, plan_meeting(name, dtype, ranks, sms=self._sms))
        self._launches: dict[object, _Layout] = {}

    def _meet(self, place: int, memory: Sequence[int]) -> None:
        super()._meet(place, memory)
        kept = np.zeros(1, PARTIALS)
        identity = FIELD_REDUCTIONS[self._name].identity(self._dtype).tobytes().ljust(16, b"\0")
        kept[0]["at"], kept[0]["identity"] = self._partials, np.frombuffer(identity, np.uint64)
        self._kept = _argument(kept)

    def walks(self, cells: Described, other: Described | None = None) -> bool:
        """Whether a launch can be laid out for cells, or has been."""
        pointers = cells.pointer | (other.pointer if other is not None else 0)
        if self._key(cells, other) in self._launches and not pointers % self._dtype.itemsize:
            return True
        for one in (cells, other):
            if one is not None:
                check_aligned(one)
        return can_walk(cells, other)

    @staticmethod
    def _key(cells: Described, other: Described | None) -> object:
        return cells.shape, cells.strides, None if other is None else other.strides

    def _find(self, cells: Described, other: Described | None) -> _Layout:
        key = self._key(cells, other)
        found = self._launches.get(key)
        if found is None:
            row = _row(self._name, self._dtype, cells, other)
            plan = plan_field(self._name, self._dtype, row, self.plan.ranks, sms=self._sms)
            found = self._launches[key] = self._laid_out(plan, row)
        return found

    def _laid_out(self, plan: ReductionPlan, row: Row) -> _Layout:
        if is_capturing():
            raise StateError(
                f"the current stream is being captured, and this is the first {self._name} of a field of this shape "
                "with these strides; take it once before the capture"
            )
        assert plan.memory_bytes <= self.plan.memory_bytes
        region = np.zeros(1, region_dtype(int(dict(plan.defines)["MAX_LEVELS"])))
        fill_region(region[0], row, 0)
        argument = _argument(region)
        launch = self._prepared(plan, [argument, self._kept])
        return (*_addresses(argument, region.dtype), launch)

    def __call__(self, cells: Described, other: Described | None, target: int, stream: Any) -> None:
        """Launch on a stream; collective, does not block. Calls keep their order across streams, but in captures."""
        found = self._find(cells, other)
        self._go(found, cells.pointer, 0 if other is None else other.pointer, target, stream)

    def bind(self, cells: Described, other: Described | None, target: Target) -> Callable[[], Any]:
        """Prepare calls with these cells on CuPy's current stream, with less on the way each time."""
        first, second, launch = self._find(cells, other)
        sources = ((first, cells.pointer), (second, other.pointer if other is not None else 0))
        return self._bind(launch, sources, target)

    def of_value(self, value: int, target: int, stream: Any) -> None:
        """Launch for a rank that has combined its cells by other means, to an accumulator at an address."""
        found = self._launches.get("value")
        if found is None:
            plan = plan_value(self._name, self._dtype, self.plan.ranks, sms=self._sms)
            found = self._launches["value"] = self._laid_out(plan, Row(0, 0, 1, ()))
        self._go(found, value, 0, target, stream)

    def _go(self, found: _Layout, source: int, other: int, target: int, stream: Any) -> None:
        first, second, launch = found
        self._enter(stream)
        first.value, second.value, self._target.value = source, other, target
        launch.launch(stream.ptr)


def make_array_reduction(world: World, arena: DeviceArena, plan: ReductionPlan) -> KernelReduction:
    """Make the reduction of arrays of one shape; collective."""
    return _made(world, lambda: KernelReduction(world, arena, plan))


def make_field_reduction(
    world: World, arena: DeviceArena, name: str, dtype: np.dtype[Any]
) -> FieldReduction:
    """Make the reduction of fields' cells to one value; collective."""
    return _made(world, lambda: FieldReduction(world, arena, name, dtype, world.size))


def make_local_reduction(
    world: World, arena: DeviceArena, name: str, dtype: np.dtype[Any]
) -> FieldReduction:
    """Make the same for this rank's cells alone; local."""
    made = FieldReduction(world, arena, name, dtype, 1)
    made.open_alone()
    return made


def _addresses(argument: Argument, dtype: np.dtype[Any]) -> tuple[Address, Address]:
    """Return the source and the target in a launch's argument; what is set there holds from the next launch on."""
    assert dtype.fields is not None
    at = (dtype.fields[name][1] for name in ("source", "target"))
    source, target = (Address.from_buffer(argument, offset) for offset in at)
    return source, target


def _argument(data: npt.NDArray[Any]) -> Argument:
    return (ctypes.c_char * data.nbytes).from_buffer_copy(data.tobytes())


def _row(name: str, dtype: np.dtype[Any], field: Described, other: Described | None) -> Row:
    if FIELD_REDUCTIONS[name].has_other != (other is not None):
        raise FieldError(f"{name} takes {'two fields' if other is None else 'one field'}")
    second = None
    if other is not None:
        if (other.shape, other.dtype) != (field.shape, field.dtype):
            raise FieldError(
                f"{name} needs two fields alike: got {field.shape} of {field.dtype}, {other.shape} of {other.dtype}"
            )
        second = other.pointer, other.strides
    if field.dtype != dtype:
        raise FieldError(f"this {name} is of {dtype}, got a field of {field.dtype}")
    return field_row(field.pointer, field.shape, field.strides, dtype.itemsize, second)


_Kind = TypeVar("_Kind", bound=_Meeting)


def _made(world: World, draft: Callable[[], _Kind]) -> _Kind:
    """Make a reduction whose launches meet those of the other ranks; collective."""

    def opened(made: _Kind, offers: list[_Offer]) -> _Kind:
        made.open(offers)
        return made

    found: _Kind = handshake(world, draft, [lambda made, _: made.offer(), opened], _MAKING)
    return found
