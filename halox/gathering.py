"""Brings the cells that all ranks own together on one of them.

The ranks first tell one another what they have come with; so everything that one rank can see alone, or that differs
between ranks, is raised by all before a cell moves. Then each rank sends its
block in parts, small enough for MPI's counts and for memory beside the whole field. The root takes one part of each
rank in turn, so that none waits long for the next::

    rank 1:  part 0 | part 1 | part 2
    rank 2:  part 0 | part 1 |
    root:    1.0  2.0  1.1  2.1  1.2         into place, or through a buffer where rows of the whole are split
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from halox.collectives.host.cell_sums import blocks
from halox.decomposition import FieldLayout, FieldSpec
from halox.errors import FieldError, MismatchError
from halox.runtime.arrays import Array, DType, as_ndarray, describe
from halox.runtime.communicator import UNFINISHED
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import allocate, to_host
from halox.runtime.world import World
from halox.values import as_int, shown

if TYPE_CHECKING:
    from mpi4py import MPI

PART_BYTES = 32 << 20
"""Most bytes of a part, but for a single element of more."""

_ROUND_BYTES = 256 << 20
"""Most bytes of one part of each rank, if parts of a megabyte are not more: what a rank waits for in its turn."""

_UNDER_WAY = 4
"""Parts for which memory may be needed at once."""

_TAG = 2
_GATHER = "a gather"
_ALIKE = "dtype and layout"

Index: TypeAlias = tuple[slice | int, ...]

UnderWay: TypeAlias = "deque[tuple[MPI.Request, Array]]"
"""Requests, each with the memory that it works on, the oldest first."""


@dataclass(frozen=True)
class _Offer:
    """A rank's arguments of a gather, which must be alike on all."""

    root: int
    dtype: DType
    spec: FieldSpec


@dataclass(frozen=True)
class _Ready:
    """A rank's cells, and on the root the array for all."""

    root: int
    layout: FieldLayout
    cells: Array
    whole: Array | None


def gather(
    world: World, field: object, layout_of: Callable[[object], FieldLayout], root: int
) -> Array | None:
    """Return the whole field on rank ``root``, None on the others; see `Grid.gather`. Collective; blocks."""
    ready, offers = world.prepare(lambda: _prepare(world, field, layout_of, root), _GATHER)
    _compare(offers)
    under_way: UnderWay = deque()
    try:
        if ready.whole is None:
            _send(world, ready, under_way)
        else:
            _receive(world, ready, ready.whole, under_way)
    except BaseException:
        _abandon(under_way, receives=ready.whole is not None)
        raise
    return ready.whole


def _prepare(
    world: World, field: Any, layout_of: Callable[[object], FieldLayout], root: int
) -> tuple[_Ready, _Offer]:
    """Check what this rank can check alone, and that it has the memory."""
    chosen = as_int(root)
    if chosen is None or not 0 <= chosen < world.size:
        raise FieldError(f"root must be a rank, 0 to {world.size - 1}, got {shown(root)}")
    layout = layout_of(field)
    dtype, interior = describe(field, "field").dtype, layout.interior
    cells = to_host(field[interior]) if is_device_array(field) else as_ndarray(field)[interior]
    whole = allocate(layout.global_shape, dtype, None) if chosen == world.rank else None
    ready = _Ready(chosen, layout, np.asarray(cells), whole)
    return ready, _Offer(chosen, dtype, layout.spec)


def _compare(offers: list[_Offer]) -> None:
    """Raise if two ranks have come with different arguments."""
    for rank, other in enumerate(offers):
        for name, what in (("root", "root"), ("dtype", _ALIKE), ("spec", _ALIKE)):
            mine, theirs = getattr(offers[0], name), getattr(other, name)
            if mine != theirs:
                raise MismatchError(
                    f"gather needs one {what} on all ranks: rank 0 gave {name}={mine}, rank {rank} {name}={theirs}; "
                    "give the same on all ranks"
                )


def _parts(cells: Array, size: int) -> Iterator[Index]:
    """Yield the indices of the parts in which cells travel among so many ranks."""
    most_bytes = min(PART_BYTES, max(_ROUND_BYTES // size, 1 << 20))
    return blocks(cells.shape, max(1, most_bytes // cells.itemsize))


def _send(world: World, ready: _Ready, under_way: UnderWay) -> None:
    """Send this rank's cells to the root, part by part."""
    cells, root = _opaque(ready.cells), ready.root
    what = f"in a gather for rank {root} to take its cells"
    for index in _parts(cells, world.size):
        if len(under_way) == _UNDER_WAY:
            _finish(world, under_way, what, root)
        part = np.ascontiguousarray(cells[index])
        under_way.append((world.comm.Isend(_bytes(part), root, _TAG), part))
    while under_way:
        _finish(world, under_way, what, root)


def _receive(world: World, ready: _Ready, whole: Array, under_way: UnderWay) -> None:
    """Receive the other ranks' cells, a part of each in turn, and copy this rank's own."""
    layout = ready.layout
    targets: dict[int, Array] = {}
    for rank in range(world.size):
        owned = FieldLayout(layout.decomposition, rank, layout.spec).owned
        before = (slice(None),) * len(layout.spec.components_before)
        targets[rank] = _opaque(whole)[(*before, *owned)]
    own = targets.pop(world.rank)
    waiting: deque[tuple[int, Array, Array]] = deque()

    def finish() -> None:
        rank, target, part = waiting.popleft()
        _finish(world, under_way, f"in a gather for rank {rank}", rank)
        if part is not target:
            target[...] = part

    cuts = [_parts(target, world.size) for target in targets.values()]
    for turn in zip_longest(*cuts):
        for rank, index in zip(targets, turn, strict=True):
            if index is None:  # all of this rank's are under way
                continue
            if len(under_way) == _UNDER_WAY:
                finish()
            target = targets[rank][index]
            part = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
            under_way.append((world.comm.Irecv(_bytes(part), rank, _TAG), part))
            waiting.append((rank, target, part))
    own[...] = _opaque(ready.cells)
    while waiting:
        finish()


def _finish(world: World, under_way: UnderWay, what: str, peer: int) -> None:
    """Wait for the oldest request; it stays in the list if that fails."""
    world.wait([under_way[0][0]], what, lambda: [peer])
    under_way.popleft()


def _abandon(under_way: UnderWay, *, receives: bool) -> None:
    """Cancel receives, as MPI cancels no sends; keep the memory of all that goes on from being used again."""
    for request, memory in under_way:
        if receives:
            request.Cancel()
        if not request.Test():
            UNFINISHED.extend([request, memory])
    under_way.clear()


def _opaque(array: Array) -> Array:
    """View structs as bytes: NumPy would copy field by field, and leave the gaps out."""
    return array if array.dtype.names is None else array.view(f"V{array.itemsize}")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
