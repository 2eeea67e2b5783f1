"""Allreduce algorithms for arrays on GPUs: why one is not available, and its construction.

``oneshot`` and ``reduce_scatter_allgather`` are kernels that wait for one another (`kernel_reductions`);
``shared_buffer`` and ``binomial`` are trees of events (`tree_reduction`). ``host`` uses page-locked memory, which the
ranks share or between which MPI carries; ``hierarchical`` uses it between nodes, after the GPUs of each node have
combined::

    node 0   GPUs 0 1 2 3, all get a = a0 op a1 op a2 op a3    rank 0: a -> host <- MPI -> a op b -> host of all -> GPUs
    node 1   GPUs 4 5 6 7, all get b = b4 op b5 op b6 op b7    rank 4: b -> host <-'
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import combinations
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from halox.collectives.algorithms import DEVICE_ALGORITHMS, rank_algorithms
from halox.collectives.device.kernel_plans import plan_oneshot, plan_scattered
from halox.collectives.device.kernel_reductions import Target, make_array_reduction
from halox.collectives.device.tree_reduction import DeviceMoves, Shape, make_tree_reduction
from halox.collectives.host.host_algorithms import HostAlgorithm, InRankOrder, Leaders
from halox.collectives.host.shared_reduction import SharedReduction, make_shared_reduction
from halox.collectives.operations import Operation, find_operation
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, StateError
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.memory import pinned
from halox.runtime.gpu.streams import StreamOrder, is_capturing
from halox.runtime.topology import Topology
from halox.runtime.world import World

_DOING = "an allreduce"
_MAKING = "the making of an allreduce"


class DeviceAlgorithm(Protocol):
    """Combines contiguous arrays of one length on the GPUs of all ranks.

    Attributes
    ----------
    captures : bool
        Whether a call may be captured in a CUDA graph.
    """

    captures: bool

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Combine, or raise.

        Parameters
        ----------
        source, target : int
            Addresses, the same or of disjoint arrays. Not looked at with an error.
        stream : cupy.cuda.Stream
            The current one.
        error : Exception or None
            Why this rank cannot take part: raised on all ranks where the host takes part in a call. Kernels cancel the
            reduction: it is raised here, and a `MismatchError` on the other ranks at their next call.

        Notes
        -----
        Collective.
        """

    def close(self) -> None:
        """Give back what it holds; collective."""


class Nothing:
    """For arrays without elements."""

    captures = True

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Do nothing."""
        if error is not None:
            raise error

    def close(self) -> None:
        """Do nothing."""


class ByKernel:
    """``oneshot`` and ``reduce_scatter_allgather``."""

    captures = True

    def __init__(
        self, context: Context, name: str, op: str, dtype: np.dtype[Any], elements: int
    ) -> None:
        assert context.device_arena is not None
        planner = plan_oneshot if name == "oneshot" else plan_scattered
        plan = planner(dtype, op, elements, context.world.size)
        self._launch = make_array_reduction(context.world, context.device_arena, plan)

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Combine: see `DeviceAlgorithm`."""
        if error is not None:
            self._launch.cancel(stream)
            raise error
        self._launch(source, target, stream)

    def bind(self, source: int, target: Target) -> Callable[[], Any]:
        """Prepare calls with these addresses on CuPy's current stream, with less on the way each time."""
        return self._launch.bind(source, target)

    def close(self) -> None:
        """Wait for the last launch; local."""
        self._launch.close()


class ByTree:
    """``shared_buffer`` and ``binomial``."""

    captures = False

    def __init__(
        self, context: Context, name: Shape, op: str, dtype: np.dtype[Any], elements: int
    ) -> None:
        arena, events = context.device_arena, context.events
        assert arena is not None and events is not None
        self._world = context.world
        moves = partial(DeviceMoves, dtype, op, elements, arena.device)
        memory = arena, events, context.arena
        nbytes = elements * dtype.itemsize
        self._tree = make_tree_reduction(context.world, memory, name, nbytes, moves)

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Combine: see `DeviceAlgorithm`."""
        self._world.agree(error, _DOING)
        self._tree(source, target)

    def close(self) -> None:
        """Wait for all ranks' last calls; collective."""
        self._tree.close()


class _Pinned:
    """An array in page-locked memory, for one call at a time."""

    def __init__(self, dtype: np.dtype[Any], elements: int) -> None:
        self._nbytes = dtype.itemsize * elements
        self._buffer = pinned(self._nbytes)
        self.values = self._buffer.array.view(dtype)
        self._order = StreamOrder()
        self._runtime = cupy().cuda.runtime

    def fetch(self, source: int, stream: Any) -> None:
        """Copy an array of the GPU to the host, and wait for it."""
        self.settle(stream)
        runtime = self._runtime
        at = self.values.ctypes.data
        runtime.memcpyAsync(at, source, self._nbytes, runtime.memcpyDefault, stream.ptr)
        stream.synchronize()

    def settle(self, stream: Any) -> None:
        """Order a stream after the last call's."""
        self._order.follow(stream)

    def bring(self, target: int, stream: Any) -> None:
        """Copy the array to the GPU; does not wait."""
        runtime = self._runtime
        at = self.values.ctypes.data
        runtime.memcpyAsync(target, at, self._nbytes, runtime.memcpyDefault, stream.ptr)

    def close(self) -> None:
        """Wait for the last copy, and let go of the memory."""
        self._order.synchronize()
        self._buffer.close()


class _Copies:
    """`Moves` between a GPU and the host, on a stream."""

    def __init__(self, source: int, target: int, stream: Any) -> None:
        self._source, self._target, self._stream = source, target, stream
        self._runtime = cupy().cuda.runtime

    def fetch(self, values: npt.NDArray[Any], start: int) -> None:
        """Copy a piece of the array to the host; does not wait."""
        self._copy(values.ctypes.data, self._source + start * values.itemsize, values.nbytes)

    def settle(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def bring(self, values: npt.NDArray[Any], start: int) -> None:
        """Copy a piece of the result to the GPU; does not wait."""
        self._copy(self._target + start * values.itemsize, values.ctypes.data, values.nbytes)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self._stream.ptr)


class ThroughHost:
    """``host``: through memory that all ranks share if they are on one node. Collective to make."""

    captures = False

    def __init__(
        self, context: Context, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        world, what = context.world, (operation, dtype, elements)
        self._order = StreamOrder()
        self._shared: SharedReduction | None = None
        if world.node_size == world.size:
            self._shared = make_shared_reduction(world, context.arena, *what, page_locked=True)
        if self._shared is None:
            self._pinned: _Pinned = world.guarded(lambda: _Pinned(dtype, elements), _MAKING)
            self._host: HostAlgorithm = InRankOrder(context, *what)

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Combine: see `DeviceAlgorithm`."""
        if self._shared is not None:
            error = error or _failure(lambda: self._order.follow(stream))
            self._shared.reduce(None if error else _Copies(source, target, stream), error)
            return
        error = error or _failure(lambda: self._pinned.fetch(source, stream))
        values = None if error else self._pinned.values
        self._host.reduce(values, values, error)
        self._pinned.bring(target, stream)

    def close(self) -> None:
        """Wait for the last copy, and give the memory back."""
        if self._shared is not None:
            self._order.synchronize()
            self._shared.close()
        else:
            self._pinned.close()
            self._host.close()


class AcrossNodes:
    """``hierarchical``: see the module."""

    captures = False

    def __init__(
        self,
        context: Context,
        operation: Operation,
        dtype: np.dtype[Any],
        elements: int,
        device: int,
    ) -> None:
        world = self._world = context.world
        self._pinned: _Pinned = world.guarded(lambda: _Pinned(dtype, elements), _MAKING)
        self._nodes = len(set(world.nodes))
        self._node: Context | None = None
        self._within: DeviceAlgorithm | None = None

        def make() -> None:
            if world.node_size == 1:
                return
            self._node = Context(World(world.node_comm))
            self._within, self.within, _ = make_algorithm(
                self._node,
                device,
                (operation.name, dtype, elements),
                without=["hierarchical"],
            )

        self.within = "alone"
        try:
            world.guarded(make, _MAKING)
        except HaloxError as error:
            if self._within is not None:
                self._within.close()
            if self._node is not None:
                self._node.close_after(error)
            self._pinned.close()
            raise
        self._leaders = Leaders(world, operation, dtype, elements)

    def reduce(self, source: int, target: int, stream: Any, error: Exception | None) -> None:
        """Combine: see `DeviceAlgorithm`."""
        self._world.agree(error, _DOING)
        host = self._pinned
        if self._within is not None:
            self._within.reduce(source, target, stream, None)
            source = target
            if self._nodes == 1:
                return
        if self._leaders.is_one:
            host.fetch(source, stream)
        else:
            # What the last call brought to the GPU must be there before the memory is written again.
            host.settle(stream)
            stream.synchronize()
        self._leaders.combine(host.values)
        host.bring(target, stream)

    def close(self) -> None:
        """Give memory and communicators back; collective."""
        self._pinned.close()
        self._leaders.close()
        if self._within is not None:
            self._within.close()
        if self._node is not None:
            self._node.close()


def _failure(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def why_no_kernels(world: World, topology: Topology) -> str | None:
    """Why one kernel on each rank cannot reduce over all of them, None if it can; the same on all ranks."""
    return _first_reason(world, topology.why_no_signals)


def _first_reason(world: World, why: Callable[[int, int], str | None]) -> str | None:
    nodes = world.nodes
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if other is not None:
        return f"ranks 0 and {other} are on different nodes"
    pairs = combinations(range(world.size), 2)
    return next((reason for a, b in pairs if (reason := why(a, b)) is not None), None)


def why_not(
    world: World, topology: Topology, op: str, dtype: np.dtype[Any], elements: int
) -> dict[str, str]:
    """Return why algorithms cannot be had, by name; the same on all ranks.

    Parameters
    ----------
    world : World
    topology : Topology
    op, dtype, elements
        What is reduced.
    """
    found: dict[str, str] = {}
    no_kernels = why_no_kernels(world, topology)
    for name, planner in (("oneshot", plan_oneshot), ("reduce_scatter_allgather", plan_scattered)):
        reason = no_kernels
        if reason is None:
            try:
                planner(dtype, op, elements, world.size)
            except FieldError as error:
                reason = str(error)
        if reason is not None:
            found[name] = reason
    no_tree = "there is one rank, and so no tree of ranks" if world.size == 1 else None
    no_tree = no_tree or _first_reason(world, topology.why_no_events)
    if no_tree is not None:
        found |= dict.fromkeys(("shared_buffer", "binomial"), no_tree)
    return found


def make_algorithm(
    context: Context,
    device: int,
    what: tuple[str, np.dtype[Any], int],
    wish: str | None = None,
    without: Collection[str] = (),
) -> tuple[DeviceAlgorithm, str, dict[str, str]]:
    """Make the algorithm asked for, or the one that is expected to be fastest.

    Parameters
    ----------
    context : Context
        The ranks.
    device : int
        This rank's GPU.
    what : (str, dtype, int)
        Operation, dtype and number of elements, the same on all ranks.
    wish : str, optional
        The same on all ranks.
    without : collection of str
        Algorithms that are not to be taken.

    Returns
    -------
    algorithm : DeviceAlgorithm
    name : str
    reasons : dict
        Why others cannot be had, as far as is known.

    Raises
    ------
    FieldError
        On all ranks, if the algorithm asked for cannot be had; says why.
    StateError
        On all ranks, if one's current stream is being captured.

    Notes
    -----
    Collective. Waits for the GPU.
    """
    op, dtype, elements = what
    world = context.world

    def begin() -> None:
        if is_capturing():
            raise StateError(
                "the current stream is being captured, and making a reduction needs the host; make it, or call it "
                "once, before the capture"
            )
        context.use_device(device)
        cupy().cuda.Device(device).synchronize()

    world.guarded(begin, _MAKING)
    assert context.device_arena is not None
    # All ranks' GPUs have been idle since the first of them came here.
    context.device_arena.reclaim()
    topology = context.find_gpus()
    reasons = why_not(world, topology, op, dtype, max(elements, 1))
    nbytes = elements * dtype.itemsize
    possible = [n for n in DEVICE_ALGORITHMS if n not in reasons and n not in without]
    if wish is not None and wish in reasons:
        names = ", ".join(map(repr, possible))
        raise FieldError(
            f"algorithm {wish!r} cannot be had: {reasons[wish]}; here are {names}, or None for the fastest"
        )
    if not elements:
        return Nothing(), wish or "oneshot", reasons
    sharers = 1 + max(len(topology.sharers(rank)) for rank in range(world.size))
    nodes = len(set(world.nodes))
    ranked = rank_algorithms(possible, nbytes, world.size, nodes, sharers=sharers)
    for name in [wish] if wish is not None else ranked:
        try:
            return _made(context, device, name, what), name, reasons
        except ExchangeTimeoutError:
            raise
        except HaloxError as error:  # on all ranks
            reasons[name] = str(error)
            if name == wish or name == ranked[-1]:
                raise FieldError(f"algorithm {name!r} cannot be had: {error}") from error
    raise AssertionError("there is always a way through the host")


def _made(
    context: Context, device: int, name: str, what: tuple[str, np.dtype[Any], int]
) -> DeviceAlgorithm:
    op, dtype, elements = what
    if name in ("oneshot", "reduce_scatter_allgather"):
        return ByKernel(context, name, op, dtype, elements)
    if name in ("shared_buffer", "binomial"):
        return ByTree(context, cast(Shape, name), op, dtype, elements)
    operation = find_operation(op, dtype)
    if name == "host":
        return ThroughHost(context, operation, dtype, elements)
    return AcrossNodes(context, operation, dtype, elements, device)
