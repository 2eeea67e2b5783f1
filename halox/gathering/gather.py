"""Gather: collects the cells of all ranks on one rank.

The ranks first exchange their arguments, so that all ranks raise an error before any cell moves. Then each rank sends
its block in parts. The parts are small enough for MPI's counts, and need little memory beside the whole field. The root
receives one part of each rank in turn, so that no rank waits long for its next turn::

    rank 1:  part 0 | part 1 | part 2
    rank 2:  part 0 | part 1 |
    root:    1.0  2.0  1.1  2.1  1.2         in place, or through a buffer if a part is not contiguous there
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from halox.decomposition import FieldLayout, FieldSpec
from halox.decomposition.blocks import blocks
from halox.domain import Domain
from halox.errors import FieldError, MismatchError
from halox.gathering.message_queue import MessageQueue, as_void
from halox.gathering.staging import Index, owned_cells
from halox.runtime.arrays import Array, DType, describe
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import allocate
from halox.runtime.gpu.staging import as_words
from halox.runtime.world import World
from halox.values import as_int, shown

PART_BYTES = 8 << 20
"""Maximum bytes of a part; a single element may be larger."""

_ROUND_BYTES = 256 << 20
"""Maximum bytes of a turn, one part of each rank, so that ranks do not wait long; but parts have at least 1 MiB."""

PARTS_IN_FLIGHT = 4
"""Maximum number of parts in memory at once."""

_COPIED_BYTES = 4 << 20
"""Maximum bytes of one copy from a GPU into strided host memory, and so of the page-locked buffer that CuPy keeps."""

_GATHER = "a gather"
_ALIKE = "dtype and layout"


@dataclass(frozen=True)
class _GatherRecord:
    """A rank's arguments of a gather, which must be the same on all ranks."""

    root: int
    dtype: DType
    spec: FieldSpec


_Record = tuple[int, DType, str]
"""The root, the dtype, and a digest of the spec, since a spec is long."""

_Local = tuple[FieldLayout, Array | None, Array | None, _Record]
"""Layout, the rank's cells, on the root the whole array, and the record for the other ranks.

The cells are None if they are already in the whole array.
"""


def gather(domain: Domain, field: object, root: int) -> Array | None:
    """Return the whole field on rank ``root``, None on other ranks; see `halox.Grid.gather`. Collective; blocks."""
    world = domain.world
    (layout, cells, whole, record), records = world.gather(
        lambda: _prepare(domain, field, root), _GATHER
    )
    root_rank, dtype, _ = record
    if any(other != record for other in records.distinct):
        # The records have digests of the specs; gather the specs themselves for the error.
        whole_record = _GatherRecord(root_rank, dtype, layout.spec.without_boundary)
        _compare(world.gather(lambda: (None, whole_record), _GATHER)[1])
    with MessageQueue(world, PARTS_IN_FLIGHT, _GATHER) as queue:
        if whole is None:
            assert cells is not None
            _send(world, as_void(cells), root_rank, queue)
            return None
        # One part of each other rank in turn.
        targets = blocks_of(layout, whole)
        own = targets.pop(world.rank)
        for rank, target in rounds(targets, world.size):
            queue.receive_into(target, rank)
        if cells is not None:
            own[...] = as_void(cells)
    return whole


def _prepare(domain: Domain, field: Any, root: int) -> tuple[_Local, _Record]:
    """Check this rank's arguments, and allocate its memory."""
    world = domain.world
    root_rank, layout = root_of(world, root), domain.layouts.find(field)
    dtype, cells = describe(field, "field").dtype, owned_cells(field, layout)
    whole = allocate(layout.global_shape, dtype, None) if root_rank == world.rank else None
    if is_device_array(cells):
        own = (
            allocate(cells.shape, dtype, None)
            if whole is None
            else blocks_of(layout, whole)[root_rank]
        )
        _copy_from_device(cells, as_void(own))
        cells = own if whole is None else None
    record = root_rank, dtype, layout.spec.without_boundary.digest
    return (layout, cells, whole, record), record


def _copy_from_device(cells: Any, target: Array) -> None:
    """Copy cells from a GPU to a host array."""
    source = as_words(cells)
    if source.dtype != target.dtype:
        target = target.view(source.dtype).reshape(source.shape)
    most = target.size if target.flags.c_contiguous else _COPIED_BYTES // target.itemsize
    for index in blocks(target.shape, most):
        part = target[index]
        if part.flags.c_contiguous:
            source[index].get(out=part)
        else:
            part[...] = source[index].get()


def _compare(records: Sequence[_GatherRecord]) -> None:
    """Raise `MismatchError` if two ranks gave different arguments."""
    for rank, other in enumerate(records):
        for name, what in (("root", "root"), ("dtype", _ALIKE), ("spec", _ALIKE)):
            mine, theirs = getattr(records[0], name), getattr(other, name)
            if mine != theirs:
                raise MismatchError(
                    f"gather needs one {what} on all ranks: rank 0 gave {name}={mine}, rank {rank} {name}={theirs}; "
                    "give the same on all ranks"
                )


def root_of(world: World, root: object) -> int:
    """Return the argument ``root`` as a rank, or raise `FieldError`."""
    rank = as_int(root)
    if rank is None or not 0 <= rank < world.size:
        raise FieldError(f"root must be a rank, 0 to {world.size - 1}, got {shown(root)}")
    return rank


def parts_of(cells: Array, size: int) -> Iterator[Index]:
    """Yield the indices of the parts of an array, on the host or a GPU, for messages among ``size`` ranks."""
    most_bytes = min(PART_BYTES, max(_ROUND_BYTES // size, 1 << 20))
    return blocks(cells.shape, max(1, most_bytes // cells.dtype.itemsize))


def blocks_of(layout: FieldLayout, whole: Array) -> dict[int, Array]:
    """Return for each rank a view of its cells in the array of the whole field."""
    components, all_cells = (slice(None),) * len(layout.spec.components_before), as_void(whole)
    owned_of_ranks = enumerate(layout.owned_of_ranks)
    return {rank: all_cells[(*components, *owned)] for rank, owned in owned_of_ranks}


def rounds(blocks_by_rank: dict[int, Array], size: int) -> Iterator[tuple[int, Array]]:
    """Yield ranks and their parts, one part of each rank in turn until no part is left."""
    cuts = [parts_of(block, size) for block in blocks_by_rank.values()]
    for turn in zip_longest(*cuts):
        for rank, index in zip(blocks_by_rank, turn, strict=True):
            if index is not None:
                yield rank, blocks_by_rank[rank][index]


def _send(world: World, cells: Array, root: int, queue: MessageQueue) -> None:
    """Send this rank's cells to the root, part by part."""
    for index in parts_of(cells, world.size):
        queue.send_copy(cells[index], root)
