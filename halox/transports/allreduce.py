"""Reductions by one kernel a call, among GPUs that map one another's memory.

The kernels (``engine/kernels/allreduce_body.cu`` states their protocol) store into the memory of all ranks, wait for
what those store here, and combine in the order of the ranks. The host only launches them, so that a reduction can be
captured in a graph::

    rank 0  ...user's kernels | a0 -> slots of 1, 2 | wait for a1, a2 | (a0 + a1) + a2 | user's kernels...
    rank 1  ...user's kernels | a1 -> slots of 0, 2 | wait for a0, a2 | (a0 + a1) + a2 | user's kernels...

Not chosen by anything yet: a reduction on a GPU goes through the host unless it is made here.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.engine.allreduce_plan import (
    FIELD_REDUCTIONS,
    PARTIALS,
    ReductionPlan,
    field_row,
    plan_field,
)
from halox.engine.arrays import Described
from halox.engine.compiler import kernel
from halox.engine.cuda import cupy, multiprocessors
from halox.engine.launch import PreparedLaunch
from halox.engine.memory import PinnedBuffer, pinned
from halox.engine.packers.strided_plan import Row, fill_region, region_dtype
from halox.engine.streams import order_after
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, MismatchError
from halox.transports.device_arena import DeviceArena, DeviceBlock, DevicePlace, Segment
from halox.world import World

_MAKING = "the making of a reduction"


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others: its memory, and how it planned."""

    handles: Mapping[Segment, bytes]
    place: DevicePlace
    signature: tuple[object, ...]


class KernelReduction:
    """A reduction that is launched again and again; made by the functions of this module.

    Attributes
    ----------
    plan : ReductionPlan
    """

    def __init__(
        self,
        world: World,
        arena: DeviceArena,
        plan: ReductionPlan,
        leading: Callable[[int], list[npt.NDArray[Any]]],
    ) -> None:
        self.plan = plan
        self._world, self._arena, self._leading = world, arena, leading
        self._last: Any = None
        self._is_told = False
        self._failure: PinnedBuffer | None = None
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
        """Map the other ranks' memory and lay out the launch.

        Raises
        ------
        MismatchError
            If another rank has planned otherwise.
        """
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
        memory = [self._arena.pointer(offer.place) for offer in offers]
        self._failure = pinned(8)
        self._failure.array[:] = 0
        self._failed = self._failure.array.data.cast("I")
        limit_ns = int(self._world.limit_s * 1e9)
        parameter = plan.parameter(rank, memory, self._failure.device_pointer, limit_ns)
        arguments = [
            (ctypes.c_char * data.nbytes).from_buffer_copy(data.tobytes())
            for data in (*self._leading(memory[rank] + plan.partials_offset), parameter)
        ]
        # What is set in it holds from the next launch on.
        held: Any = arguments[-1]
        self._parameter = np.frombuffer(held, parameter.dtype)
        self._launch = PreparedLaunch(
            kernel(plan.kernel, plan.function, self._arena.device, plan.defines),
            plan.blocks,
            plan.threads,
            arguments,
            device=self._arena.device,
        )

    def __call__(self, source: int, target: int, stream: Any) -> None:
        """Launch on a stream.

        Parameters
        ----------
        source, target : int
            Addresses of arrays of ``plan.elements`` elements, the same or disjoint; of a field's number only the
            target is looked at.
        stream : cupy.cuda.Stream

        Raises
        ------
        ExchangeTimeoutError
            If an earlier call has waited too long for a rank; names it.

        Notes
        -----
        Collective; does not block. Calls on different streams keep their order, but in captures.
        """
        if self._failed[0]:
            self._is_told = True
            raise self._late()
        if self._last is not stream:
            order_after(self._last, stream)
            self._last = stream
        entry = self._parameter[0]
        entry["source"], entry["target"] = source, target
        self._launch.launch(stream.ptr)

    def _late(self) -> ExchangeTimeoutError:
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {self._failed[0] - 1} in reduction {self._failed[1]} of a "
            f"plan for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; its result, and those since, are not "
            "valid. A rank has failed, is far behind, or has made another sequence of calls"
        )

    def close(self) -> None:
        """Wait for the last launch, then give the memory back; warn if a reduction has failed since the last call."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._failure is not None:
            if self._failed[0] and not self._is_told:
                warnings.warn(str(self._late()), stacklevel=2)
            self._failed.release()
            self._failure.close()
            self._failure = None
        if self._block is not None:
            # A peer that is behind may still store into it.
            self._arena.retire(self._block)
            self._block = None


def make_array_reduction(world: World, arena: DeviceArena, plan: ReductionPlan) -> KernelReduction:
    """Make the reduction of arrays of one shape.

    Parameters
    ----------
    world : World
        All ranks; each has a GPU of its own, and all map one another's memory.
    arena : DeviceArena
        This rank's device memory.
    plan : ReductionPlan
        The same on all ranks.

    Raises
    ------
    HaloxError
        On all ranks, if any of them cannot make its part, or has planned otherwise.

    Notes
    -----
    Collective over the world.
    """
    return _made(world, lambda: KernelReduction(world, arena, plan, lambda _: []))


def make_field_reduction(
    world: World, arena: DeviceArena, name: str, field: Described, other: Described | None = None
) -> KernelReduction:
    """Make the reduction of a field's cells to a number.

    Parameters
    ----------
    world, arena
        As of :func:`make_array_reduction`.
    name : {"sum", "min", "max", "norm", "dot"}
    field, other : Described
        This rank's cells, halo left out; the second field of "dot".

    Raises
    ------
    FieldError
        On all ranks, if the number has no meaning for the dtype, or the two fields' cells are not alike.

    Notes
    -----
    Collective over the world. Holds for these arrays, which must live as long.
    """

    def draft() -> KernelReduction:
        row = _row(name, field, other)
        sms = multiprocessors(arena.device)
        plan = plan_field(name, field.dtype, row, world.size, sms=sms)
        identity = FIELD_REDUCTIONS[name].identity(field.dtype).tobytes().ljust(16, b"\0")

        def leading(partials: int) -> list[npt.NDArray[Any]]:
            region = np.zeros(1, region_dtype(int(dict(plan.defines)["MAX_LEVELS"])))
            fill_region(region[0], row, 0)
            kept = np.zeros(1, PARTIALS)
            kept[0]["at"], kept[0]["identity"] = partials, np.frombuffer(identity, np.uint64)
            return [region, kept]

        return KernelReduction(world, arena, plan, leading)

    return _made(world, draft)


def _row(name: str, field: Described, other: Described | None) -> Row:
    if FIELD_REDUCTIONS[name].has_other != (other is not None):
        raise FieldError(f"{name} takes {'two fields' if other is None else 'one field'}")
    second = None
    if other is not None:
        if (other.shape, other.dtype) != (field.shape, field.dtype):
            raise FieldError(
                f"{name} needs two fields alike: got {field.shape} of {field.dtype}, {other.shape} of {other.dtype}"
            )
        second = other.pointer, other.strides
    return field_row(field.pointer, field.shape, field.strides, field.dtype.itemsize, second)


def _made(world: World, draft: Callable[[], KernelReduction]) -> KernelReduction:
    made: KernelReduction | None = None

    def begun() -> _Offer:
        nonlocal made
        made = draft()
        return made.offer()

    def opened() -> KernelReduction:
        assert made is not None
        made.open(offers)
        return made

    try:
        offer = world.guarded(begun, _MAKING)
        offers: list[_Offer] = world.comm.allgather(offer)
        found: KernelReduction = world.guarded(opened, _MAKING)
    except HaloxError:
        if made is not None:
            made.close()
        raise
    return found
