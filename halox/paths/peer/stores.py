"""Stores from a user's kernel: the argument ``plan.device``, and the text of `device_header`.

``kernels/halo.cu`` states the protocol between the kernels of the ranks, and why it suffices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from halox.decomposition import FieldLayout, Region
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

_SIGNALS = [
    *((name, "u8") for name in ("state", "flags", "failure", "limit_ns")),
    *((name, "u4") for name in ("peers", "directions")),
]
_AXIS = [
    ("stride", "i8"),
    *((name, "i4") for name in ("extent", "begin", "low", "high", "end", "near", "far", "unused")),
]

Direction: TypeAlias = tuple[int, ...]
Field: TypeAlias = tuple[Described, FieldLayout]


def argument_dtype(ndim: int) -> np.dtype[Any]:
    """Return the layout of ``halox::Halo`` in ``halo.cu``."""
    return np.dtype(
        [
            *_SIGNALS,
            *((name, "u8") for name in ("direction", "base")),
            ("component_stride", "i8"),
            *((name, "u4") for name in ("components", "fields", "item_bytes", "unused")),
            ("axis", _AXIS, (ndim,)),
        ]
    )


def device_header(*, debug: bool = False) -> str:
    """Return the CUDA C++ text that precedes a kernel with an argument ``halox::Halo<N>``, for grids of N axes.

    Parameters
    ----------
    debug : bool
        Whether ``store`` checks its arguments. A store outside the array, to an unknown field or component, or of a
        value of another size is left out, and the next use of `Plan.device` or call of the plan raises `FieldError`.

    Returns
    -------
    str
        Source for `cupy.RawKernel`, to be followed by the text of the kernel. All names are in the namespace ``halox``.

    Notes
    -----
    Local; needs no GPU. `Plan.device` returns the argument, and lists its methods.
    """
    return ("#define HALOX_CHECKED 1\n" if debug else "") + source("halo")


@dataclass(frozen=True)
class Offer:
    """The places to which one peer may store, with all that it needs to compute addresses."""

    handles: Mapping[Allocation, bytes]
    flag: DevicePlace
    fields: tuple[DevicePlace, ...]
    strides: tuple[int, ...]  # in bytes: components, then grid axes
    received: Mapping[Direction, tuple[int, ...]]  # first cell of the halo on each side


def make_stores(
    context: Context, read: Sequence[Field], corners: bool, arrays: Sequence[object], rows: Any
) -> StoreChannel:
    """Make the argument of kernels for the fields of a plan; collective. ``rows`` are the rows of the plan's report.

    Raises on all ranks a `FieldError` if any field has a layout that kernels cannot store to, and a `PathError` if a
    message does not take the peer path.
    """
    world = context.world
    world.begin("plan", "device")

    def begin() -> StoreChannel:
        for row in rows:
            if row.path != "peer" and row.peer != world.rank and row.path != "local":
                raise PathError(
                    f"plan.device: the message to rank {row.peer} takes the path {row.path!r} ({row.reason}), and a "
                    f"kernel stores only into memory that GPUs of one node map from one another; {_REMEDY}, or run "
                    "with a GPU for each rank"
                )
        return StoreChannel(context, read, corners, arrays)

    rounds = (StoreChannel.offer, StoreChannel.accept)
    step = "the making of plan.device"
    made: StoreChannel = handshake(world, begin, rounds, step, peers=lambda part: part.peers)
    return made


class StoreChannel(Channel):
    """State, flags and tables of a plan's kernels on this rank; its only step marks the end of an exchange."""

    needs_host = False

    def __init__(
        self, context: Context, read: Sequence[Field], corners: bool, arrays: Sequence[object]
    ) -> None:
        self._world, self._arrays = context.world, arrays
        self._fields = [described for described, _ in read]
        first, layout = read[0]
        if first.device is None or context.device_arena is None:
            raise FieldError(f"plan.device: the fields are NumPy arrays, without a GPU; {_REMEDY}")
        self._arena, self.device = context.device_arena, first.device
        _check(read)
        regions = [r for r in layout.regions(corners) if r.send is not None or r.recv is not None]
        regions.sort(key=lambda region: sum(map(abs, region.direction)))  # wait for faces first
        self._before = len(layout.spec.components_before)
        self._regions = {region.direction: region for region in regions}
        self._axes = [self._axis(layout, axis) for axis in range(layout.spec.ndim)]
        self._check_boxes()
        self.peers = sorted({r.peer for r in regions} - {self._world.rank})
        self._block: DeviceBlock | None = None
        self.failure = FailureWord(self.device)

    def _span(self, axis: int, *, received: bool, side: int) -> list[tuple[int, int]]:
        """Return the bounds along an axis of all boxes on one of its sides, as halo or as sent cells."""
        bounds, at = [], self._before + axis
        for direction, region in self._regions.items():
            box = region.recv if received else region.send
            if direction[axis] == side and box is not None:
                bounds.append((box.starts[at], box.starts[at] + box.subsizes[at]))
        return bounds

    def _axis(self, layout: FieldLayout, axis: int) -> tuple[int, ...]:
        """Return an axis as ``halo.cu`` has it."""
        described, place = self._fields[0], self._before + axis
        cut = layout.interior[place]
        low = max([end for _, end in self._span(axis, received=False, side=-1)], default=cut.start)
        high = min(
            [start for start, _ in self._span(axis, received=False, side=1)], default=cut.stop
        )
        below, above = (self._span(axis, received=True, side=side) for side in (-1, 1))
        near = max([low, *(2 * end - start for start, end in below)])
        far = min([high, *(2 * start - end for start, end in above)])
        extents = described.shape[place], cut.start, low, high, cut.stop
        return (described.strides[place], *extents, near, far, 0)

    def _check_boxes(self) -> None:
        """Check that the sides of a cell alone tell who has copies of it."""
        for direction, region in self._regions.items():
            for axis, (side, bounds) in enumerate(zip(direction, self._axes, strict=True)):
                _, _, begin, low, high, end, *_ = bounds
                at = self._before + axis
                box = region.send
                found = box and (box.starts[at], box.starts[at] + box.subsizes[at])
                if found not in (None, {-1: (begin, low), 0: (begin, end), 1: (high, end)}[side]):
                    raise FieldError(f"plan.device: the cells sent are no simple boxes; {_REMEDY}")

    @property
    def _strides(self) -> tuple[int, ...]:
        described = self._fields[0]
        axes = range(self._before, self._before + len(self._axes))
        others = [n for axis, n in enumerate(described.strides) if axis not in axes]
        return (*(others or [0]), *(described.strides[axis] for axis in axes))

    def offer(self, _: object) -> dict[int, Offer]:
        """Allocate this rank's memory, and return for each peer the places to which it may store."""
        cuda, count = cupy().cuda, len(self._regions)
        table = 8 * (count * (3 + len(self._axes)) + len(self._fields) * (count + 1))
        self._block = self._arena.allocate(
            _LINE * (2 + len(self.peers)) + table + 8 * len(self.peers)
        )
        with cuda.Device(self.device):
            cuda.runtime.memset(self._block.pointer, 0, self._block.nbytes)
            cuda.runtime.deviceSynchronize()  # also for work that still uses the halos
        places = tuple(map(self._place, self._fields)) if self.peers else ()
        handles = self._arena.handles([self._block.place, *places])
        return {
            peer: Offer(
                handles,
                self._block.place.at(self._flag_at(peer)),
                places,
                self._strides,
                self._received(peer),
            )
            for peer in self.peers
        }

    def _received(self, peer: int) -> dict[Direction, tuple[int, ...]]:
        """Return the first cell of each box of the halo that a rank fills."""
        return {
            direction: region.recv.starts
            for direction, region in self._regions.items()
            if region.peer == peer and region.recv is not None
        }

    def _flag_at(self, peer: int) -> int:
        return _LINE * (1 + self.peers.index(peer))

    def _place(self, described: Described) -> DevicePlace:
        before, behind = span(described.shape, described.strides, described.dtype.itemsize)
        place = self._arena.locate(described.pointer - before, described.pointer + behind)
        if place is None:
            raise FieldError(
                f"plan.device: field {described} is not in memory that other GPUs can map; allocate it with "
                f"grid.zeros, or {_REMEDY}"
            )
        return place.at(before)

    def accept(self, offers: Mapping[int, Offer]) -> StoreChannel:
        """Map the peers' memory, write the tables, and make the argument of kernels."""
        assert self._block is not None
        for offer in offers.values():
            self._arena.open(offer.handles)
        pointers: list[list[int]] = [[described.pointer] for described in self._fields]
        directions: list[int] = []
        for direction, region in self._regions.items():
            flag = self._block.pointer + self._flag_at(region.peer) if region.peer in offers else 0
            directions += [flag, _sides(direction)]
            directions += self._copies(direction, region, offers.get(region.peer), pointers)
        flags = [self._arena.pointer(offers[peer].flag) for peer in self.peers]
        tables = [np.array(table, np.int64) for table in (directions, pointers, flags)]
        at = [self._block.pointer + _LINE * (1 + len(self.peers))]
        with cupy().cuda.Device(self.device):
            runtime = cupy().cuda.runtime
            for table in tables:
                runtime.memcpy(at[-1], table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice)
                at.append(at[-1] + table.nbytes)
            runtime.deviceSynchronize()
        argument = np.zeros((), argument_dtype(len(self._axes)))
        argument["state"], argument["failure"] = self._block.pointer, self.failure.pointer
        argument["direction"], argument["base"], argument["flags"] = at[:3]
        argument["limit_ns"] = int(self._world.limit_s * 1e9)
        argument["peers"], argument["directions"] = len(flags), len(self._regions)
        argument["component_stride"], shape = self._strides[0], self._fields[0].shape
        argument["components"] = np.prod(shape) // np.prod([axis[1] for axis in self._axes])
        argument["fields"] = len(self._fields)
        argument["item_bytes"] = self._fields[0].dtype.itemsize
        argument["axis"] = self._axes
        argument.flags.writeable = False
        self.argument = argument
        signals = argument.tobytes()[: np.dtype(_SIGNALS).itemsize]
        self._mark = PreparedLaunch(
            kernel("halo_mark", "halo_mark", self.device),
            1,
            32,
            [(ctypes.c_char * len(signals)).from_buffer_copy(signals)],
            device=self.device,
        )
        return self

    def _copies(
        self, direction: Direction, region: Region, offer: Offer | None, pointers: list[list[int]]
    ) -> tuple[int, ...]:
        """Append to ``pointers`` the address of cell 0 of each field's copy; return the strides of the copies."""
        opposite = tuple(-side for side in direction)
        strides = self._strides if offer is None else offer.strides
        cut, shift = slice(self._before, self._before + len(self._axes)), 0
        if region.send is not None:
            received = self._received(self._world.rank) if offer is None else offer.received
            ends = received[opposite][cut], region.send.starts[cut], strides[1:]
            shift = sum((there - here) * stride for there, here, stride in zip(*ends, strict=True))
        for number, found in enumerate(pointers):
            at = found[0] if offer is None else self._arena.pointer(offer.fields[number])
            found.append(at + shift)
        return strides

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
        kind, step, found, allowed = self.failure.words[:4]
        if kind >= _CHECKED:
            number = kind - _CHECKED
            index = found - (found >> 31 << 32)
            what = {
                16: f"field {index}, and the plan has {allowed}",
                17: f"component {index}, and the fields have {allowed}",
                18: f"a value of {found} bytes, and a cell has {allowed}; convert it to {self._fields[0].dtype}",
            }.get(
                number, f"cell {index} along axis {number}, and the array has {allowed} cells there"
            )
            return FieldError(
                f"halo.store: a kernel on rank {self._world.rank} stored to {what}; the store was left out. Correct "
                "the kernel, and make a new plan"
            )
        direction, region = [*self._regions.items()][kind - 1]
        sides = " and ".join(
            f"the {'low' if side < 0 else 'high'} side of axis {axis}"
            for axis, side in enumerate(direction)
            if side
        )
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {region.peer}, beyond {sides}, in step {step} of plan.device "
            f"for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; the fields are no longer valid. Launch the "
            "same steps on all ranks, let all threads of all blocks call halo.done(), and begin again on a new grid"
        )

    def close(self) -> None:
        """Wait for the kernels, which may still store to peers; warn of a failure that was not raised."""
        self._arena.synchronize()
        self.has_failed = self.failure.close(self.error)

    def free(self) -> None:
        """Release the memory and the fields, after all peers have closed the plan."""
        self.abandon()

    def abandon(self) -> None:
        """Release the memory, which no other rank uses."""
        if self._block is not None:
            self._arena.release(self._block)
        self._block, self._arrays = None, ()
        self.failure.close(self.error)


def _sides(direction: Direction) -> int:
    return sum(1 << (2 * axis + (side > 0)) for axis, side in enumerate(direction) if side)


def _check(read: Sequence[Field]) -> None:
    """Raise `FieldError` unless the fields are alike, and an exchange of them only copies boxes between neighbours."""
    (first, layout), spec = read[0], read[0][1].spec
    for described, other in read:
        if (described.shape, described.strides, described.dtype) != (
            first.shape,
            first.strides,
            first.dtype,
        ):
            raise FieldError(
                f"plan.device: the fields of a plan must be alike, got {first} and {described} with strides "
                f"{first.strides} and {described.strides}; make a plan for each, and give their kernel both arguments"
            )
        if other.spec != spec:
            raise FieldError(
                f"plan.device: the fields of a plan must be alike, got {spec} and {other.spec}; make a plan for each, "
                "and give their kernel both arguments"
            )
    reasons = {
        "boundary=, which exchanges fill": spec.boundary,
        "parity=": spec.parity,
        "more than one axis of components": len(first.shape) > spec.ndim + 1,
        "a halo wider than a neighbour's block": layout.is_wide,
        "connect=, so that sides of the grid meet": layout.decomposition.joined is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise FieldError(f"plan.device: kernels cannot store to a field with {found[0]}; {_REMEDY}")
