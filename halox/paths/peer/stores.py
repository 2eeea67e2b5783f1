"""Stores from a user's kernel: the argument ``plan.device``, and the text of `device_header`.

``kernels/halo.cu`` states the protocol between the kernels of the ranks, and why it suffices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from halox.decomposition import FieldLayout
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, PathError
from halox.paths.base import Channel
from halox.runtime.arrays import Described, span
from halox.runtime.device_arena import Allocation, DeviceBlock, DevicePlace
from halox.runtime.gpu.compiler import kernel, source
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.pools import FailureWord
from halox.runtime.handshake import handshake

if TYPE_CHECKING:
    from halox.runtime.context import Context

_LINE = 128
_CHECKED = 1 << 31  # kinds of failures that only the debug header finds
_REMEDY = "call plan() between the kernels of the steps instead"


def _members(**types: str) -> list[tuple[str, str]]:
    return [(name, dtype) for dtype, names in types.items() for name in names.split()]


SIGNALS = np.dtype(_members(u8="state flags failure limit_ns", u4="peers directions"))
"""``halox::Signals`` of ``halo.cu``."""
_AXIS = _members(i8="stride", i4="extent begin low high end near far unused")
_HALO = _members(i8="direction base component_stride", u4="components fields item_bytes unused")

Field: TypeAlias = tuple[Described, FieldLayout]
Starts: TypeAlias = Mapping[tuple[int, ...], tuple[int, ...]]
"""First cell of the halo by direction."""


def argument_dtype(ndim: int) -> np.dtype[Any]:
    """Return the layout of ``halox::Halo`` in ``halo.cu``."""
    return np.dtype([("signals", SIGNALS), *_HALO, ("axis", _AXIS, (ndim,))])


def device_header(*, debug: bool = False) -> str:
    """Return the CUDA C++ text that precedes a kernel with an argument ``halox::Halo<N>``, for grids of N axes.

    Parameters
    ----------
    debug : bool
        Whether to check all calls. A store outside the array, to an unknown field or component, or of a value of
        another size is left out. After such a store, or a kernel without ``done``, the next use of `Plan.device` and
        the next call of the plan raise `FieldError`.

    Returns
    -------
    str
        Text, in the namespace ``halox``, for the source of a `cupy.RawKernel`. `Plan.device` lists the methods.
    """
    return ("#define HALOX_CHECKED 1\n" if debug else "") + source("halo")


class Offer(NamedTuple):
    """The places to which a peer may store, and the layout of the fields there."""

    handles: Mapping[Allocation, bytes]
    flag: DevicePlace
    fields: Sequence[DevicePlace]
    strides: Sequence[int]  # in bytes: components, then grid axes
    received: Starts  # from the peer


def make_stores(context: Context, *given: Any) -> StoreChannel:
    """Make a `StoreChannel`, with further arguments as there; collective, and raises its errors on all ranks."""
    context.world.begin("plan", "device")
    begin = partial(StoreChannel, context, *given)
    rounds = (StoreChannel.offer, StoreChannel.accept)
    step = "the making of plan.device"
    made: StoreChannel = handshake(context.world, begin, rounds, step, peers=lambda m: m.peers)
    return made


class StoreChannel(Channel):
    """State, flags and tables of a plan's kernels on this rank; its only step marks the end of an exchange.

    ``read`` and ``arrays`` are the fields of the plan, ``routes`` the peer, path and reason of each message. Raises
    `FieldError` if kernels cannot store to a field, and `PathError` if a message does not take the peer path.
    """

    needs_host = False

    def __init__(
        self,
        context: Context,
        read: Sequence[Field],
        corners: bool,
        arrays: Any,
        routes: Iterable[tuple[int, str, str]],
    ) -> None:
        self._world, self._arrays = context.world, arrays
        self._fields, layout = [described for described, _ in read], read[0][1]
        strides, device = self._fields[0].strides, self._fields[0].device
        if device is None or context.device_arena is None:
            raise FieldError(f"plan.device: the fields are NumPy arrays; {_REMEDY}")
        for peer, path, reason in routes:
            if path != "peer" and peer != self._world.rank:
                raise PathError(
                    f"plan.device: the message to rank {peer} takes the path {path!r} ({reason}), and a kernel stores "
                    f"only into memory that GPUs map from one another; {_REMEDY}, or run with a GPU for each rank, on "
                    "one node"
                )
        _check(read)
        self._arena, self._layout, self._device = context.device_arena, layout, device
        regions = [r for r in layout.regions(corners) if r.send is not None or r.recv is not None]
        regions.sort(key=lambda region: sum(map(abs, region.direction)))  # wait for faces first
        self._regions = {region.direction: region for region in regions}
        first = len(layout.spec.components_before)
        self._cut = slice(first, first + layout.spec.ndim)
        others = strides[:first] + strides[self._cut.stop :]
        self._strides = (*(others or (0,)), *strides[self._cut])
        self.peers = sorted({r.peer for r in regions} - {self._world.rank})
        self._lines = {peer: _LINE * number for number, peer in enumerate(self.peers, 1)}
        self._block: DeviceBlock | None = None
        self.failure = FailureWord(device)

    def offer(self, _: object) -> dict[int, Offer]:
        """Allocate this rank's memory, and return for each peer the places to which it may store."""
        count, peers = len(self._regions), len(self.peers)
        words = count * (2 + len(self._strides)) + len(self._fields) * (count + 1) + peers
        self._block = block = self._arena.allocate(_LINE * (1 + peers) + 8 * words)
        with cupy().cuda.Device(self._device):
            cupy().cuda.runtime.memset(block.pointer, 0, block.nbytes)
            cupy().cuda.runtime.deviceSynchronize()  # also for work that still uses the halos
        places = [self._place(field) for field in self._fields if self.peers]
        handles = self._arena.handles([block.place, *places])
        return {
            peer: Offer(handles, block.place.at(at), places, self._strides, self._received(peer))
            for peer, at in self._lines.items()
        }

    def _place(self, field: Described) -> DevicePlace:
        before, behind = span(field.shape, field.strides, field.dtype.itemsize)
        place = self._arena.locate(field.pointer - before, field.pointer + behind)
        if place is None:
            raise FieldError(
                f"plan.device: field {field} is not in memory that other GPUs can map; allocate it with grid.zeros, or "
                f"{_REMEDY}"
            )
        return place.at(before)

    def _received(self, peer: int) -> Starts:
        return {
            direction: region.recv.starts[self._cut]
            for direction, region in self._regions.items()
            if region.peer == peer and region.recv is not None
        }

    def accept(self, offers: Mapping[int, Offer]) -> StoreChannel:
        """Map the peers' memory, write the tables, and make the argument of kernels."""
        assert self._block is not None
        pointer, arena, fields = self._block.pointer, self._arena, self._fields
        for offer in offers.values():
            arena.open(offer.handles)
        bases, directions = [[field.pointer] for field in fields], []
        for direction, region in self._regions.items():
            there = offers.get(region.peer)
            strides = there.strides if there else self._strides
            sides = sum(1 << (2 * axis + (side > 0)) for axis, side in enumerate(direction) if side)
            flag = pointer + self._lines[region.peer] if there else 0
            directions.append([flag, sides, *strides])
            shift = 0  # bytes from a cell that is sent to its copy
            if region.send is not None:
                received = there.received if there else self._received(region.peer)
                ends = received[tuple(-side for side in direction)], region.send.starts[self._cut]
                shift = sum((b - a) * n for b, a, n in zip(*ends, strides[1:], strict=True))
            for number, base in enumerate(bases):
                base.append((arena.pointer(there.fields[number]) if there else base[0]) + shift)
        flags = [arena.pointer(offers[peer].flag) for peer in self.peers]
        at = [pointer + _LINE * (1 + len(self.peers))]
        with cupy().cuda.Device(self._device):
            runtime = cupy().cuda.runtime
            for words in (directions, bases, flags):
                table = np.array(words, np.int64)
                runtime.memcpy(at[-1], table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice)
                at.append(at[-1] + table.nbytes)
            runtime.deviceSynchronize()
        limit_ns = int(self._world.limit_s * 1e9)
        signals = (pointer, at[2], self.failure.pointer, limit_ns, len(flags), len(directions))
        shape, itemsize = fields[0].shape, fields[0].dtype.itemsize
        components = np.prod(shape) // np.prod(shape[self._cut])
        numbers = (*at[:2], self._strides[0], components, len(fields), itemsize, 0)
        axes = [self._axis(axis) for axis in range(len(self._strides) - 1)]
        self.argument = np.array((signals, *numbers, axes), argument_dtype(len(axes)))
        self.argument.flags.writeable = False
        parameter = (ctypes.c_char * SIGNALS.itemsize).from_buffer_copy(self.argument.tobytes())
        mark = kernel("halo_mark", "halo_mark", self._device)
        self._mark = PreparedLaunch(mark, 1, 32, [parameter], device=self._device)
        return self

    def _axis(self, axis: int) -> tuple[int, ...]:
        """Return an axis as ``halo.cu`` has it."""
        decomposition = self._layout.decomposition
        along = self._layout.along(axis, decomposition.coords_of(self._world.rank)[axis])
        (begin, size), (high, _), (_, low) = along.sent()
        _, (end, above), (_, below) = along.received()
        assert end == begin + size
        near, far = begin + max(low, below), min(high, end - above)
        return (self._strides[1 + axis], along.stored, begin, begin + low, high, end, near, far, 0)

    def check(self) -> None:
        """Raise the failure that a kernel has reported."""
        if self.failure.words[0]:
            self.failure.was_raised = True
            raise self.error()

    def start(self) -> None:
        """Do nothing: the other channels exchange."""

    def finish(self) -> None:
        """Mark the end of an exchange, on the current stream: the neighbours' next step waits for it."""
        if self.peers:
            self._mark.launch(cupy().cuda.get_current_stream().ptr)

    def error(self) -> HaloxError:
        """Return the failure that a kernel has reported, as an exception."""
        kind, step, found, most = self.failure.words[:4]
        if kind >= _CHECKED:
            index = found - (found >> 31 << 32)
            what = {
                16: f"stored to field {index}, and the plan has {most}",
                17: f"stored to component {index}, and the fields have {most}",
                18: f"stored a value of {found} bytes, and a cell has {most}; convert it to {self._fields[0].dtype}",
                19: "ended before all threads of all its blocks had called halo.done(), and another one began",
            }
            cell = f"stored to cell {index} along axis {kind - _CHECKED}, and the array has {most} cells there"
            return FieldError(
                f"plan.device: a kernel on rank {self._world.rank} {what.get(kind - _CHECKED, cell)}. Correct the "
                "kernel, and begin again on a new grid"
            )
        at, region = [*self._regions.items()][kind - 1]
        sides = [
            f"the {'low' if s < 0 else 'high'} side of axis {k}" for k, s in enumerate(at) if s
        ]
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {region.peer}, beyond {' and '.join(sides)}, in step {step} "
            f"of plan.device for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; the fields are no longer "
            "valid. Launch the same steps on all ranks, let all threads of all blocks call halo.done(), and begin "
            "again on a new grid"
        )

    def close(self) -> None:
        """Wait for the kernels, which may still store to peers; warn of a failure that was not raised."""
        self._arena.synchronize()
        self.has_failed = self.failure.close(self.error)

    def free(self) -> None:
        """Release the memory and the fields, after all peers have closed the plan."""
        if self._block is not None:
            self._arena.release(self._block)
        self._block, self._arrays = None, ()

    def abandon(self) -> None:
        """Release the memory, which no other rank uses."""
        self.free()
        self.failure.close(self.error)


def _check(read: Sequence[Field]) -> None:
    """Raise `FieldError` unless the fields are alike, and an exchange of them only copies boxes between neighbours."""
    (first, layout), spec = read[0], read[0][1].spec
    reasons = {
        "a boundary, which exchanges fill": spec.boundary,
        "one parity": spec.parity,
        "more than one axis of components": len(first.shape) > spec.ndim + 1,
        "a halo wider than a neighbour's block": layout.is_wide,
        "connected sides of the grid": layout.decomposition.joined is not None,
    }
    forms = [(d.shape, d.strides, d.dtype, other.spec) for d, other in read]
    for (described, _), form in zip(read, forms, strict=True):
        if form != forms[0]:
            raise FieldError(
                f"plan.device: the fields of a plan must be alike, got {first} and {described}, or their halos or "
                "strides differ; make a plan for each, and give their kernel both arguments"
            )
    for why in (reason for reason, holds in reasons.items() if holds):
        raise FieldError(f"plan.device: a kernel cannot store to a field with {why}; {_REMEDY}")
