"""Stores from a user's kernel: the argument ``plan.device_handle``, and the text of `device_header`.

``kernels/halo.cu`` states the protocol between the kernels of the ranks, and why it suffices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from halox.decomposition import FieldLayout
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, PathError, StateError
from halox.paths.base import Channel
from halox.runtime.arrays import Described, span
from halox.runtime.gpu.compiler import source
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.pools import FailureWord
from halox.runtime.gpu.streams import is_capturing
from halox.runtime.handshake import handshake
from halox.runtime.segments import Block, Place, SegmentKey

if TYPE_CHECKING:
    from halox.runtime.context import Context

_FIELDS = 8  # largest number of fields
_FLAGS_AT, _COPIES_AT = 128, 256  # in this rank's memory, behind the state
_CHECKED = 1 << 31  # kinds of failures that only the debug header finds
_REMEDY = "call plan() between the kernels of the steps instead"


def _members(**types: str) -> list[tuple[str, str]]:
    return [(name, dtype) for dtype, names in types.items() for name in names.split()]


_FIRST = _members(u4="waited stored", i4="row_low row_high", i8="row component_stride copies")
_WORDS = _members(i8="state flags carry failure limit_ns")
_COUNTS = _members(u4="neighbours fields components item_bytes")
_SIDES, _BOX = _members(i4="low high"), _members(i4="near inner")

Field: TypeAlias = tuple[Described, FieldLayout]


def argument_dtype(ndim: int) -> np.dtype[Any]:
    """Return the layout of ``halox::Halo`` in ``halo.cu``."""
    owned, copied, rims = [(name, _SIDES, (ndim,)) for name in ("owned", "copied", "rims")]
    for_cells = ("box", _BOX, (ndim,)), ("stride", "u4", (ndim,)), owned, copied
    rest = rims, ("signals", "i8", (3**ndim - 1,)), ("extent", "i4", (ndim,))
    members = [*_FIRST, *for_cells, ("own", "i8", (_FIELDS,)), *_WORDS, *_COUNTS, *rest]
    return np.dtype(members, align=True)


def device_header(*, debug: bool = False) -> str:
    """Return the CUDA C++ text that precedes a kernel with an argument ``halox::Halo<N>``, for grids of N axes.

    Parameters
    ----------
    debug : bool
        Whether to check all calls. A store outside the array, to an unknown field or component, or of a value of
        another size is left out, and the next use of `Plan.device_handle` or call of the plan raises `FieldError`,
        also after steps that did not call ``wait`` once for each owned cell.

    Returns
    -------
    str
        Text, in the namespace ``halox``, for the source of a `cupy.RawKernel`. `Plan.device_handle` lists the methods.
    """
    return ("#define HALOX_CHECKED 1\n" if debug else "") + source("halo")


class Offer(NamedTuple):
    """Places of a rank's flags and fields for a peer, and the layout of the fields there."""

    handles: Mapping[SegmentKey, bytes]
    flags: Place
    fields: Sequence[Place]
    strides: Sequence[int]  # in bytes: components, then grid axes
    received: Mapping[tuple[int, ...], Sequence[int]]  # first cell of the halo by direction


def make_stores(context: Context, *given: Any) -> StoreChannel:
    """Make a `StoreChannel`, with further arguments as there; collective, and raises its errors on all ranks."""
    context.world.begin("plan", "device")
    begin = partial(StoreChannel, context, *given)
    rounds = (StoreChannel.offer, StoreChannel.accept)
    step = "the making of plan.device_handle"
    made: StoreChannel = handshake(context.world, begin, rounds, step, peers=lambda m: m.peers)
    return made


class StoreChannel(Channel):
    """State, flags and tables of a plan's kernels on this rank; a channel only for its end with the plan.

    ``read`` and ``arrays`` are the fields of the plan, ``regions`` those of its exchange, and ``routes`` the peer, path
    and reason of each message. Raises
    `FieldError` if kernels cannot store to a field, and `PathError` if a message does not take the peer path.
    """

    needs_host = False

    def __init__(
        self, context: Context, read: Sequence[Field], regions: Any, arrays: Any, routes: Any
    ) -> None:
        self._world, self._arrays = context.world, arrays
        self._fields, layout = [described for described, _ in read], read[0][1]
        strides, device = self._fields[0].strides, self._fields[0].device
        if device is None or context.device_arena is None:
            raise FieldError(f"plan.device_handle: the fields are NumPy arrays; {_REMEDY}")
        if is_capturing():
            raise StateError(
                "plan.device_handle: a stream is being captured; use plan.device_handle before"
            )
        for peer, path, reason in routes:
            if path != "peer" and peer != self._world.rank:
                raise PathError(
                    f"plan.device_handle: the message to rank {peer} takes the path {path!r} ({reason}), and a kernel "
                    f"stores only into memory that GPUs map from one another; {_REMEDY}, or run with a GPU for each "
                    "rank, on one node"
                )
        _check(read)
        self._arena, self._layout, self._device = context.device_arena, layout, device
        regions = [region for region in regions if region.send or region.recv]
        self._regions = {region.direction: region for region in regions}
        self._cut = cut = layout.spec.grid_slice
        self._received = {r.direction: r.recv.starts[cut] for r in regions if r.recv}
        self._strides = (*(strides[: cut.start] + strides[cut.stop :] or (0,)), *strides[cut])
        self.peers = sorted({r.peer for r in regions} - {self._world.rank})
        self._block: Block | None = None
        self.failure = FailureWord(device)

    def offer(self, _: object) -> dict[int, Offer]:
        """Allocate this rank's memory, and return the places that each peer needs."""
        width = 1 + len(self._strides)
        self._copies = np.zeros((len(self._fields), 3 ** (width - 2), width), np.int64)
        self._block = block = self._arena.allocate(_COPIES_AT + self._copies.nbytes)
        with cupy().cuda.Device(self._device):
            cupy().cuda.runtime.memset(block.pointer, 0, block.nbytes)
            cupy().cuda.runtime.deviceSynchronize()
        places = [self._place(field) for field in self._fields if self.peers]
        handles, flags = self._arena.handles([block.place, *places]), block.place.at(_FLAGS_AT)
        offer = Offer(handles, flags, places, self._strides, self._received)
        return dict.fromkeys(self.peers, offer)

    def _place(self, field: Described) -> Place:
        before, behind = span(field.shape, field.strides, field.dtype.itemsize)
        place = self._arena.locate(field.pointer - before, field.pointer + behind)
        if place is None:
            raise FieldError(
                f"plan.device_handle: field {field} is not in memory that other GPUs can map; allocate it "
                f"with grid.zeros, or {_REMEDY}"
            )
        return place.at(before)

    def accept(self, offers: Mapping[int, Offer]) -> StoreChannel:
        """Map the peers' memory, write the tables, and make the argument of kernels."""
        assert self._block is not None
        pointer, arena, fields = self._block.pointer, self._arena, self._fields
        for offer in offers.values():
            arena.open(offer.handles)
        copies, runtime, own = self._copies, cupy().cuda.runtime, [f.pointer for f in fields]
        signals, waited, stored = [], 0, 0
        for direction, region in self._regions.items():
            there, opposite = offers.get(region.peer), tuple(-side for side in direction)
            number = _number(direction)
            if there and not self._is_covered(direction, region.peer):
                signals.append(arena.pointer(there.flags) + 4 * _number(opposite))
                waited |= 1 << number
            if region.send:
                stored |= 1 << number
                strides = there.strides if there else self._strides
                received = there.received if there else self._received
                ends = received[opposite], region.send.starts[self._cut], strides[1:]
                shift = sum((b - a) * n for b, a, n in zip(*ends, strict=True))
                at = [arena.pointer(place) for place in there.fields] if there else own
                copies[:, number, 0] = np.add(at, shift)
                copies[:, number, 1:] = strides
        flags, table = pointer + _FLAGS_AT, pointer + _COPIES_AT
        with cupy().cuda.Device(self._device):
            runtime.memcpy(table, copies.ctypes.data, copies.nbytes, runtime.memcpyHostToDevice)
            runtime.deviceSynchronize()
        limit_ns = int(self._world.limit_s * 1e9)
        shape, itemsize = fields[0].shape, fields[0].dtype.itemsize
        components = np.prod(shape) // np.prod(shape[self._cut])
        counts = len(signals), len(fields), components, itemsize
        strides = self._strides[1:]
        last = len(strides) - 1
        side = 3**last  # the direction to the low side of the last axis; 2 * side to the high side
        alone = not waited >> side
        axes = [self._axis(axis, alone and axis == last) for axis in range(last + 1)]
        owned, copied, rims = map(list, zip(*axes, strict=True))
        row = strides[last] * (owned[last][1] - owned[last][0])
        row_low = (copied if alone and stored >> side & 1 else owned)[last][0]
        row_high = (copied if alone and stored >> 2 * side & 1 else owned)[last][1]
        first = waited, stored, row_low, row_high, row, self._strides[0], table
        box = [(near, max(far - near, 0)) for near, far in rims]
        carry = (1 << 32) - _waiting_cells(owned, rims, waited)
        words = pointer, flags, carry, self.failure.pointer, limit_ns
        own, signals = (own + [0] * _FIELDS)[:_FIELDS], (signals + [0] * 26)[: 3 ** len(axes) - 1]
        rest = rims, signals, shape[self._cut]
        values = *first, box, strides, owned, copied, own, *words, *counts, *rest
        self.argument = np.array(values, argument_dtype(len(axes)))
        self.argument.flags.writeable = False
        return self

    def _axis(self, axis: int, alone: bool) -> Sequence[tuple[int, int]]:
        """Return ``owned``, ``copied`` and ``rims`` of an axis; ``alone``, the rank waits for no other rank there."""
        decomposition = self._layout.decomposition
        along = self._layout.along(axis, decomposition.coords_of(self._world.rank)[axis])
        (begin, size), (high, _), (_, low) = along.sent()
        _, (end, above), (_, below) = along.received()
        assert end == begin + size
        rims = begin + max(low, below), min(high, end - above)
        return (begin, end), (begin + low, high), (begin, end) if alone else rims

    def _is_covered(self, direction: Sequence[int], peer: int) -> bool:
        """Whether a face or an edge on some of a direction's sides leads to the same rank."""
        return any(
            region.peer == peer
            and sub != direction
            and all(not a or a == b for a, b in zip(sub, direction, strict=True))
            for sub, region in self._regions.items()
        )

    def check(self) -> None:
        if self.failure.words[0]:
            self.failure.was_raised = True
            raise self.error()

    def start(self) -> None:
        """Do nothing: other channels exchange."""

    def error(self) -> HaloxError:
        kind, step, found, most = self.failure.words[:4]
        if kind >= _CHECKED:
            index = found - (found >> 31 << 32)
            what = {
                16: f"stored to field {index}, and the plan has {most}",
                17: f"stored to component {index}, and the fields have {most}",
                18: f"stored a value of {found} bytes, and a cell has {most}; convert it to {self._fields[0].dtype}",
                19: "did not call halo.wait once for each owned cell in this step or the last",
            }
            cell = f"stored to cell {index} along axis {kind - _CHECKED}, and the array has {most} cells there"
            wrong = f"plan.device_handle: a kernel on rank {self._world.rank} {what.get(kind - _CHECKED, cell)}"
            return FieldError(f"{wrong}. Correct the kernel, and begin again on a new grid")
        at = next(direction for direction in self._regions if _number(direction) == kind)
        names = [f"the {('low', 'high')[s > 0]} side of axis {k}" for k, s in enumerate(at) if s]
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {self._regions[at].peer}, beyond {' and '.join(names)}, in "
            f"step {step} of plan.device_handle for {self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; the fields "
            "are no longer valid. Launch the same steps on all ranks, call halo.wait once for each cell, and begin "
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
        self.free()
        self.failure.close(self.error)


def _number(direction: Sequence[int]) -> int:
    """Return the number of a direction, with a digit per axis to the base 3, as in ``halo.cu``."""
    return sum(-side % 3 * 3**axis for axis, side in enumerate(direction))


def _waiting_cells(owned: Any, rims: Any, waited: int) -> int:
    """Return the number of owned cells that wait for a direction of a mask, or are the first cell."""
    codes = []
    for (begin, end), (near, far) in zip(owned, rims, strict=True):
        cells = np.arange(begin, end)
        codes.append((cells < near) + 2 * (cells >= far))
    counts, total = [np.bincount(code, minlength=4).tolist() for code in codes], 0
    # Of the directions to no side, the low side, the high side, both.
    digits = (0,), (0, 1), (0, 2), (0, 1, 2)
    for sides in product(range(4), repeat=len(codes)):
        found = product(*(digits[side] for side in sides))
        if any(waited >> sum(n * 3**k for k, n in enumerate(number)) & 1 for number in found):
            total += prod(count[side] for count, side in zip(counts, sides, strict=True))
        elif all(code[0] == side for code, side in zip(codes, sides, strict=True)):
            total += 1
    return total


def _check(read: Sequence[Field]) -> None:
    """Raise `FieldError` unless the fields are alike, and an exchange of them only copies boxes between neighbours."""
    (first, layout), spec, strides = read[0], read[0][1].spec, read[0][0].strides
    alike = [replace(one, pointer=first.pointer) == first and of.spec == spec for one, of in read]
    reasons = {
        "fields that differ in dtype, strides or halo (make a plan for each)": not all(alike),
        f"more than {_FIELDS} fields": len(read) > _FIELDS,
        "a grid of four axes": spec.ndim > 3,
        "fields with more than one axis of components": strides[spec.ndim + 1 :],
        "fields with a boundary, which exchanges fill": spec.boundary,
        "fields of one parity": spec.parity,
        "strides that are negative, or of 4 GiB": not 0 <= min(strides) <= max(strides) < 1 << 32,
        "a halo wider than a neighbour's block": layout.is_wide,
        "connected sides of the grid": layout.decomposition.joined is not None,
    }
    for why in [reason for reason, holds in reasons.items() if holds]:
        raise FieldError(f"plan.device_handle: kernels cannot store to {why}; {_REMEDY}")
