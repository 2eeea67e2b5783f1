"""Allreduce algorithms for arrays on GPUs: `why_not` finds the available ones, `make_algorithm` makes one.

``oneshot`` and ``reduce_scatter_allgather`` are kernels that wait for one another (`kernel_reductions`).
``shared_buffer`` and ``binomial`` are trees of events (`tree_reduction`). ``host`` uses page-locked memory, which the
ranks share or whose contents MPI transfers. ``hierarchical`` is for GPUs of several nodes (`nccl_reduction`)::

    node 0   GPUs 0 1 2 3, all get a = a0 op a1 op a2 op a3    a <- NCCL -> a op b, on all GPUs
    node 1   GPUs 4 5 6 7, all get b = b4 op b5 op b6 op b7    b <- NCCL -> a op b, on all GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import combinations
from typing import cast

import numpy as np

from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, StateError
from halox.reductions.algorithms import DEVICE_ALGORITHMS, rank_algorithms
from halox.reductions.device.kernel_plans import plan_oneshot, plan_scattered
from halox.reductions.device.kernel_reductions import KernelReduction, make_kernel_reduction
from halox.reductions.device.nccl_reduction import DeviceAlgorithm, NcclHierarchicalReduction
from halox.reductions.device.tree_reduction import ArrayKernels, Shape, make_tree_reduction
from halox.reductions.host.host_algorithms import HostAlgorithm
from halox.reductions.host.shared_reduction import SharedReduction, make_shared_reduction
from halox.reductions.operations import Operation
from halox.runtime.arrays import Array, DType
from halox.runtime.context import Context
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.memory import PinnedBuffer, pinned
from halox.runtime.gpu.streams import Stream, StreamOrder, is_capturing
from halox.runtime.nccl_ranks import nccl_of, why_no_nccl
from halox.runtime.topology import Topology
from halox.runtime.world import World

_KERNELS = {"oneshot": plan_oneshot, "reduce_scatter_allgather": plan_scattered}
_DOING = "an allreduce"
_MAKING = "the making of an allreduce"


class EmptyReduction:
    """Algorithm for arrays without elements."""

    captures = True

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        if error is not None:
            raise error

    def close(self) -> None:
        """Do nothing."""


def _pinned(world: World, dtype: DType, elements: int) -> PinnedBuffer:
    """Return page-locked memory for one array, used by one call at a time; collective."""
    buffer: PinnedBuffer = world.attempt(lambda: pinned(dtype.itemsize * elements), _MAKING)
    return buffer


def _copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Copy between a GPU and the host; does not wait."""
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)


class _Copies:
    """`Moves` between a GPU and the host, on a stream."""

    def __init__(self, source: int, target: int, stream: Stream) -> None:
        self._source, self._target, self._stream = source, target, stream

    def fetch(self, values: Array, start: int) -> None:
        source = self._source + start * values.itemsize
        _copy(values.ctypes.data, source, values.nbytes, self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def bring(self, values: Array, start: int) -> None:
        target = self._target + start * values.itemsize
        _copy(target, values.ctypes.data, values.nbytes, self._stream)


class HostStagedReduction:
    """``host``: reduce in host memory, which all ranks share if they are on one node. Collective to make."""

    captures = False

    def __init__(self, context: Context, operation: Operation, dtype: DType, elements: int) -> None:
        world, what = context.world, (operation, dtype, elements)
        self._order = StreamOrder()
        self._shared: SharedReduction | None = None
        if world.node_size == world.size:
            self._shared = make_shared_reduction(world, context.arena, *what, page_locked=True)
        if self._shared is None:
            self._buffer = _pinned(world, dtype, elements)
            self._values = self._buffer.array.view(dtype)
            self._host = HostAlgorithm(context, "host", *what)

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        moves = _Copies(source, target, stream)
        if error is None:
            try:
                self._order.follow(stream)
                if self._shared is None:
                    moves.fetch(self._values, 0)
                    moves.wait()
            except Exception as caught:
                error = caught
        if self._shared is not None:
            self._shared.reduce(None if error else moves, error)
            return
        values = None if error else self._values
        self._host.reduce(values, values, error)
        moves.bring(self._values, 0)

    def close(self) -> None:
        """Wait for the last copy, and release the memory."""
        self._order.synchronize()
        if self._shared is not None:
            self._shared.close()
        else:
            self._buffer.close()
            self._host.close()


def why_no_kernels(world: World, topology: Topology) -> str | None:
    """Return why kernels of all ranks cannot reduce together, None if they can; the same on all ranks."""
    return _first_reason(world, topology.why_no_signals)


def _first_reason(world: World, why: Callable[[int, int], str | None]) -> str | None:
    others = np.flatnonzero(world.ranks.node_of)  # rank 0 is on node 0
    if others.size:
        return f"ranks 0 and {others[0]} are on different nodes"
    pairs = combinations(range(world.size), 2)
    return next((reason for a, b in pairs if (reason := why(a, b)) is not None), None)


def why_not(
    context: Context, topology: Topology, operation: Operation, dtype: DType, elements: int
) -> dict[str, str]:
    """Return the reasons why algorithms are not available, by name; the same on all ranks. Collective."""
    world = context.world
    if operation.is_exact:
        others = (name for name in DEVICE_ALGORITHMS if name != "host")
        return dict.fromkeys(others, "the host adds the values of all ranks in a reproducible sum")
    reasons: dict[str, str] = {}
    no_kernels = why_no_kernels(world, topology)
    for name, planner in _KERNELS.items():
        reason = no_kernels
        if reason is None:
            try:
                planner(dtype, operation.name, elements, world.size)
            except FieldError as error:
                reason = str(error)
        if reason is not None:
            reasons[name] = reason
    no_tree = "there is one rank, and so no tree of ranks" if world.size == 1 else None
    no_tree = no_tree or _first_reason(world, topology.why_no_events)
    if no_tree is not None:
        reasons |= dict.fromkeys(("shared_buffer", "binomial"), no_tree)
    no_nodes = (
        "all ranks are on one node" if world.node_count == 1 else context.of_gpus(why_no_nccl)
    )
    if no_nodes is not None:
        reasons["hierarchical"] = no_nodes
    return reasons


def begin_making(context: Context, device: int, step: str, why_no_capture: str) -> Topology:
    """Wait for all ranks' GPUs, and return the topology.

    Collective. In a capture, raises a `StateError` that ends with ``why_no_capture``.
    """

    def begin() -> DeviceArena:
        if is_capturing():
            raise StateError(f"the current stream is being captured, {why_no_capture}")
        arena = context.use_device(device)
        cupy().cuda.Device(device).synchronize()
        return arena

    arena: DeviceArena = context.world.attempt(begin, step)
    # The GPUs of all ranks were idle before the first rank returned from `guarded`.
    arena.reclaim()
    return context.find_gpus()


def make_algorithm(
    context: Context,
    device: int,
    what: tuple[Operation, DType, int],
    requested: str | None = None,
    without: Collection[str] = (),
) -> tuple[DeviceAlgorithm, str, dict[str, str]]:
    """Make the requested algorithm, or else the algorithm with the shortest predicted time.

    ``what`` has the operation, the dtype, and the number of elements. Returns the algorithm, its name, and for
    each algorithm that is not available the reason. Collective. Waits for the GPU.
    """
    operation, dtype, elements = what
    world = context.world
    topology = begin_making(
        context,
        device,
        _MAKING,
        "and making a reduction needs the host; make it, or call it once, before the capture",
    )
    reasons = why_not(context, topology, operation, dtype, max(elements, 1))
    nbytes = elements * dtype.itemsize
    possible = [n for n in DEVICE_ALGORITHMS if n not in reasons and n not in without]
    if requested is not None and requested in reasons:
        names = ", ".join(map(repr, possible))
        raise FieldError(
            f"algorithm {requested!r} is not available: {reasons[requested]}; here are {names}, or None for the fastest"
        )
    if not elements:
        return EmptyReduction(), requested or "oneshot", reasons
    sharers = max(1, int(topology.users.max()))
    ranked = rank_algorithms(possible, nbytes, world.size, world.node_count, sharers=sharers)
    for name in [requested] if requested is not None else ranked:
        try:
            return _make(context, device, name, what), name, reasons
        except ExchangeTimeoutError:
            raise
        except HaloxError as error:  # on all ranks
            reasons[name] = str(error)
            if name == requested or name == ranked[-1]:
                raise FieldError(f"algorithm {name!r} is not available: {error}") from error
    raise FieldError("no algorithm is left")  # through the host there is always one


def _make(
    context: Context, device: int, name: str, what: tuple[Operation, DType, int]
) -> DeviceAlgorithm:
    operation, dtype, elements = what
    world, arena, events = context.world, context.device_arena, context.events
    assert arena is not None and events is not None
    if name in _KERNELS:
        plan = _KERNELS[name](dtype, operation.name, elements, world.size)
        return make_kernel_reduction(world, lambda: KernelReduction(world, arena, plan))
    if name in ("shared_buffer", "binomial"):
        kernels = partial(ArrayKernels, dtype, operation.name, elements, device)
        memory, nbytes = (arena, events, context.arena), elements * dtype.itemsize
        return make_tree_reduction(world, memory, cast(Shape, name), nbytes, kernels)
    if name == "host":
        return HostStagedReduction(context, operation, dtype, elements)
    return _across_nodes(context, device, what)


class _NodeReduction:
    """A reduction by a kernel among the ranks of a node, on a context of its own; names the ranks in errors.

    Collective over the node to make; `FieldError` if kernels of the ranks cannot reduce together.
    """

    captures = True

    def __init__(self, world: World, device: int, what: tuple[Operation, DType, int]) -> None:
        self._context, self._ranks = Context(World(world.node_comm)), list(world.node_ranks)
        without = set(DEVICE_ALGORITHMS) - set(_KERNELS)
        try:
            self._within, _, _ = make_algorithm(self._context, device, what, without=without)
        except HaloxError as error:
            self._context.close_after(error)
            raise

    def reduce(self, source: int, target: int, stream: Stream, error: Exception | None) -> None:
        try:
            self._within.reduce(source, target, stream, error)
        except ExchangeTimeoutError as caught:
            raise ExchangeTimeoutError(
                f"{caught}. These are numbers within the node, of ranks {self._ranks}"
            ) from caught

    def close(self) -> None:
        """Release the reduction and the context; collective over the node."""
        self._within.close()
        self._context.close()


def _across_nodes(
    context: Context, device: int, what: tuple[Operation, DType, int]
) -> DeviceAlgorithm:
    """Make ``hierarchical``; collective. Raises a `HaloxError` if a node's kernels cannot reduce together."""
    operation, dtype, elements = what
    world = context.world
    within: _NodeReduction | None = None

    def make() -> None:
        nonlocal within
        if world.node_size > 1:
            within = _NodeReduction(world, device, what)

    try:
        world.attempt(make, _MAKING)
        return NcclHierarchicalReduction(
            *(context, nccl_of(context), operation.name, dtype, elements),
            partial(ArrayKernels, dtype, operation.name, elements, device),
            within,
        )
    except HaloxError:
        if within is not None:
            within.close()
        raise
