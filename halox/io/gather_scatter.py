"""Gather and scatter: a whole array on one rank, or a region of it, and the blocks of all ranks.

Grids call `gather` and `scatter`, its inverse. The ranks first exchange their arguments, so that all ranks raise an
error before any cell moves. Then the cells move in parts. These are small enough for MPI's counts, and need little
memory beside the whole field. The root serves one part of each rank in turn, so that no rank waits long::

    rank 1:  part 0 | part 1 | part 2
    rank 2:  part 0 | part 1 |
    root:    1.0  2.0  1.1  2.1  1.2         in place, or through a buffer if a part is not contiguous there
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import FieldLayout
from halox.decomposition.blocks import blocks
from halox.domain import Domain, FieldOptions
from halox.domain.options import dtype_text
from halox.errors import FieldError, MismatchError
from halox.io.message_queue import MessageQueue, as_void
from halox.io.regions import Cut, owned_cells, place_of, points_of, region_of, region_shape
from halox.runtime.arrays import Array, DType, as_ndarray, check_elements_apart, describe
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import allocate, to_host
from halox.runtime.gpu.staging import DeviceStaging, Index, as_words
from halox.runtime.world import World
from halox.values import as_int, shown

PART_BYTES = 8 << 20
"""Maximum bytes of a part; a single element may be larger."""

_ROUND_BYTES = 256 << 20
"""Maximum bytes of a turn, one part of each rank, so that ranks do not wait long; but parts have at least 1 MiB."""

_PARTS_IN_FLIGHT = 4
"""Maximum number of parts in memory at once."""

_COPIED_BYTES = 4 << 20
"""Maximum bytes of one copy from a GPU into strided host memory, and so of the page-locked buffer that CuPy keeps."""

_GATHER, _SCATTER = "a gather", "a scatter"


# Gather


def gather(domain: Domain, field: object, root: object, region: object = None) -> Array | None:
    """Return the whole field on rank ``root``, None on other ranks; see `halox.Grid.gather`. Collective; blocks."""
    world = domain.world

    def prepare() -> tuple[tuple[int, dict[int, Array], Array, Array | None], dict[str, object]]:
        """Check this rank's arguments, and allocate its memory."""
        root_rank, layout = root_of(world, root), domain.layouts.find(field)
        cut = () if region is None else region_of(region, layout, "the field")
        dtype = describe(field, "field").dtype
        cells, targets, whole = _owned_points(field, layout, cut), {}, None
        if root_rank == world.rank:
            whole = allocate(region_shape(layout, cut), dtype, None)
            targets = _blocks_of(layout, whole, cut)
        if is_device_array(cells):
            on_host = targets.get(root_rank)
            if on_host is None:
                on_host = allocate(cells.shape, dtype, None)
            _copy_from_device(cells, on_host)
            cells = on_host
        arguments: dict[str, object] = {"root": root_rank, "dtype": _name(dtype)}
        arguments |= {"layout": _text(layout), "region": str(cut)}
        return (root_rank, targets, as_void(cells), whole), arguments

    root_rank, targets, cells, whole = world.attempt(prepare, _GATHER, alike=True)
    with MessageQueue(world, _PARTS_IN_FLIGHT, _GATHER) as queue:
        if whole is None:
            for index in _parts_of(cells, world.size):
                queue.send(cells[index], root_rank)
            return None
        own = targets.pop(world.rank, None)
        for rank, part in _rounds(targets, world.size):
            queue.receive(part, rank)
        if own is not None and own is not cells:
            own[...] = cells
    return whole


def _copy_from_device(cells: Any, target: Array) -> None:
    """Copy cells from a GPU to a host array."""
    source, target = as_words(cells), as_void(target)
    if source.dtype != target.dtype:
        target = target.view(source.dtype).reshape(source.shape)
    most = target.size if target.flags.c_contiguous else _COPIED_BYTES // target.itemsize
    for index in blocks(target.shape, max(1, most)):
        part = target[index]
        if part.flags.c_contiguous:
            source[index].get(out=part)
        else:
            part[...] = source[index].get()


# Scatter


class _Target(NamedTuple):
    """The field to fill; None for a new field, with these options, or with the component axes of the root's array."""

    field: object
    layout: FieldLayout | None
    dtype: DType | None
    options: FieldOptions


class _ScatterRecord(NamedTuple):
    """A rank's arguments, which must be alike, and facts of the array that the root alone has."""

    arguments: dict[str, object]
    dtype: DType | None
    components: FieldOptions


def scatter(
    domain: Domain,
    whole: object,
    root: object,
    out: object,
    options: FieldOptions,
    region: object = None,
) -> Any:
    """Return the field with this rank's cells of the root's array; see `halox.Grid.scatter`. Collective; blocks."""
    world = domain.world

    def prepare() -> tuple[tuple[_Target, Cut, Array | None], _ScatterRecord]:
        root_rank, target = root_of(world, root), _target_of(domain, out, options)
        cut: Cut = ()
        if region is not None:
            if target.field is None or target.layout is None:
                raise FieldError("region: give out=, the field whose cells are to be set")
            cut = region_of(region, target.layout, "out")
        layout = None if target.layout is None else _text(target.layout)
        arguments: dict[str, object] = {
            "root": root_rank,
            "out": out is not None,
            "layout": layout,
            "dtype of out": target.dtype,
            "region": str(cut),
        }
        if world.rank != root_rank:
            return (target, cut, None), _ScatterRecord(arguments, None, {})
        array, components = _as_host_array(whole, root_rank), FieldOptions()
        if target.layout is None:
            remedy = "give the options of the field, as in components=(2, ...) or staggered=0"
            components = domain.layouts.of_whole(tuple(array.shape), "whole", remedy)
        elif array.shape != (expected := region_shape(target.layout, cut)):
            raise FieldError(
                f"whole: shape {tuple(array.shape)} on rank {root_rank} is not the {shown(expected)} of the "
                f"{'region' if cut else 'whole field'}; give all its cells, without halo, as grid.gather returns them"
            )
        return (target, cut, array), _ScatterRecord(arguments, array.dtype, components)

    (target, cut, array), records = world.gather(prepare, _SCATTER)
    world.check_alike([record.arguments for record in records.distinct])
    root_rank = root_of(world, root)
    source = records[root_rank]
    if target.dtype is not None and target.dtype != source.dtype:
        raise MismatchError(
            f"scatter needs one dtype: out has {target.dtype}, and whole {source.dtype} on rank {root_rank}; convert "
            f"one of them, as by whole.astype({dtype_text(target.dtype)})"
        )
    field = target.field
    if field is None:
        assert source.dtype is not None  # the root's
        field = domain.allocation.new(source.dtype, target.options | source.components)
    layout = domain.layouts.find(field)
    cells = _owned_points(field, layout, cut)
    with MessageQueue(world, _PARTS_IN_FLIGHT, _SCATTER) as queue:
        if array is None:
            _receive(world, root_rank, cells, queue)
        else:
            _send(world, _blocks_of(layout, array, cut), cells, queue)
    return field


def _target_of(domain: Domain, out: object, options: FieldOptions) -> _Target:
    """Check ``out``, or the options of a new field."""
    if out is None:
        layout = domain.layouts.of_options(options) if options else None
        return _Target(None, layout, None, options)
    if options:
        raise FieldError(
            f"out and {', '.join(options)} were given: the field has its layout; leave out one of the two"
        )
    described, layout = domain.layouts.read(out)
    if not described.writable:
        raise FieldError("out: the array is read-only; give one that can be written")
    check_elements_apart(described, "out")
    return _Target(out, layout, described.dtype, {})


def _as_host_array(whole: object, root: int) -> Array:
    """Return the root's array on the host."""
    if whole is None:
        raise FieldError(
            f"whole: rank {root} is the root, and gave None; give it the array of all cells, and None to the others"
        )
    describe(whole, "whole")
    return to_host(whole) if is_device_array(whole) else as_ndarray(whole, "whole")


def _send(world: World, sources: dict[int, Array], cells: Any, queue: MessageQueue) -> None:
    """Send each other rank its cells, one part to each rank in turn, and copy this rank's cells."""
    own = sources.pop(world.rank, None)
    for rank, part in _rounds(sources, world.size):
        queue.send(part, rank)
    if own is None:
        return
    if not is_device_array(cells):
        as_void(cells)[...] = own
        return
    indices = list(_parts_of(own, world.size))
    with DeviceStaging(cells, max(own[index].nbytes for index in indices)) as staged:
        for index in indices:
            staged.store(index, own[index])


def _receive(world: World, root: int, cells: Any, queue: MessageQueue) -> None:
    """Receive this rank's cells, part by part; a part is copied to a GPU while the next part arrives."""
    indices = list(_parts_of(cells, world.size))
    if not is_device_array(cells):
        target = as_void(cells)
        for index in indices:
            queue.receive(target[index], root)
    elif indices:
        whole = np.broadcast_to(np.empty((), np.uint8), cells.shape)
        shapes = [whole[index].shape for index in indices]
        with DeviceStaging(cells, max(map(prod, shapes)) * cells.dtype.itemsize) as staged:
            for index, shape in zip(indices, shapes, strict=True):
                queue.receive(staged.next_buffer(shape), root)
                queue.end()
                staged.put(index)


# Both


def root_of(world: World, root: object) -> int:
    """Return the argument ``root`` as a rank, or raise `FieldError`."""
    rank = as_int(root)
    if rank is None or not 0 <= rank < world.size:
        raise FieldError(f"root must be a rank, 0 to {world.size - 1}, got {shown(root)}")
    return rank


@cache
def _name(dtype: DType) -> str:
    """Return the text of a dtype, to compare between ranks; NumPy takes some 10 us to make or to pickle it."""
    return str(dtype)


def _text(layout: FieldLayout) -> str:
    """Return the text of a layout, to compare between ranks."""
    return str(layout.spec.without_boundary)


def _owned_points(field: object, layout: FieldLayout, region: Cut) -> Any:
    """Return a view of this rank's cells of a region; without a region, of all its cells."""
    cells = owned_cells(field, layout)
    return cells[(*_components_of(layout), *points_of(region, layout.owned))] if region else cells


def _blocks_of(layout: FieldLayout, whole: Array, region: Cut) -> dict[int, Array]:
    """Return for each rank that has cells of the region a view of these in the array of the region."""
    cells, components = as_void(whole), _components_of(layout)
    places = [
        (*components, *(place_of(region, owned) if region else owned))
        for owned in layout.owned_of_ranks
    ]
    return {rank: block for rank, place in enumerate(places) if (block := cells[place]).size}


def _components_of(layout: FieldLayout) -> Cut:
    return (slice(None),) * len(layout.spec.components_before)


def _parts_of(cells: Array, size: int) -> Iterator[Index]:
    """Yield the indices of the parts of an array, on the host or a GPU, for messages among ``size`` ranks."""
    if cells.size:
        most_bytes = min(PART_BYTES, max(_ROUND_BYTES // size, 1 << 20))
        yield from blocks(cells.shape, max(1, most_bytes // cells.dtype.itemsize))


def _rounds(blocks_by_rank: dict[int, Array], size: int) -> Iterator[tuple[int, Array]]:
    """Yield ranks and their parts, one part of each rank in turn until no part is left."""
    cuts = [_parts_of(block, size) for block in blocks_by_rank.values()]
    for turn in zip_longest(*cuts):
        for rank, index in zip(blocks_by_rank, turn, strict=True):
            if index is not None:
                yield rank, blocks_by_rank[rank][index]
