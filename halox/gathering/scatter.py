"""Scatter: distributes a whole array of one rank over the blocks of all ranks; the inverse of `halox.gathering.gather`.

The ranks first exchange their arguments, so that all ranks raise an error before any cell moves. The root sends one
part to each rank in turn, as in a gather. A block on a GPU receives its parts through page-locked memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from halox.decomposition import FieldLayout, FieldSpec
from halox.decomposition.field_spec import components_text
from halox.domain import Domain, FieldOptions
from halox.domain.options import dtype_text
from halox.errors import FieldError, HaloxError, MismatchError
from halox.gathering.gather import PARTS_IN_FLIGHT, blocks_of, parts_of, root_of, rounds
from halox.gathering.message_queue import MessageQueue, as_void
from halox.gathering.staging import owned_cells, part_shape, staging
from halox.runtime.arrays import (
    Array,
    Described,
    DType,
    as_ndarray,
    check_elements_apart,
    describe,
)
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import to_host
from halox.runtime.world import World
from halox.values import shown

_SCATTER = "a scatter"


@dataclass(frozen=True)
class _Target:
    """The field to fill: an existing field, or the options of a new field."""

    field: object
    described: Described | None
    layout: FieldLayout | None
    options: FieldOptions


@dataclass(frozen=True)
class _ScatterRecord:
    """A rank's arguments; ``dtype`` and ``components`` describe the root's array."""

    root: int
    out: DType | None
    spec: FieldSpec | None
    dtype: DType | None
    components: FieldOptions


def scatter(domain: Domain, whole: object, root: object, out: object, options: FieldOptions) -> Any:
    """Return the field with this rank's cells of the root's array; see `halox.Grid.scatter`. Collective; blocks."""
    world = domain.world

    def prepare() -> tuple[tuple[_Target, Array | None], _ScatterRecord]:
        root_rank, target = root_of(world, root), _target_of(domain, out, options)
        out_dtype = None if target.described is None else target.described.dtype
        spec = None if target.layout is None else target.layout.spec.without_boundary
        if world.rank != root_rank:
            return (target, None), _ScatterRecord(root_rank, out_dtype, spec, None, {})
        array = _as_host_array(whole, root_rank)
        components: FieldOptions = {}
        if target.layout is None:
            call = f"grid.scatter(whole, {root_rank}, {{}})"
            components = components_of(tuple(array.shape), domain, "whole", call)
        elif array.shape != target.layout.global_shape:
            raise FieldError(
                f"whole: shape {tuple(array.shape)} on rank {root_rank} is not the "
                f"{shown(target.layout.global_shape)} of the whole field; give all cells of the grid, without halo, as "
                "grid.gather returns them"
            )
        return (target, array), _ScatterRecord(root_rank, out_dtype, spec, array.dtype, components)

    (target, array), records = world.gather(prepare, _SCATTER)
    _compare(records)
    source = records[records[0].root]
    field = target.field
    if field is None:
        assert source.dtype is not None  # the root's
        field = domain.allocation.new(source.dtype, target.options | source.components)
    layout = domain.layouts.find(field)
    with MessageQueue(world, PARTS_IN_FLIGHT, _SCATTER) as queue:
        if array is None:
            _receive(world, source.root, owned_cells(field, layout), queue)
        else:
            _send(world, layout, array, field, queue)
    return field


def _target_of(domain: Domain, out: object, options: FieldOptions) -> _Target:
    """Check ``out``, or the options of a new field."""
    if out is None:
        layout = domain.layouts.of_options(options) if options else None
        return _Target(None, None, layout, options)
    if options:
        raise FieldError(
            f"out and {', '.join(options)} were given: the field has its layout; leave out one of the two"
        )
    described, layout = domain.layouts.read(out)
    if not described.writable:
        raise FieldError("out: the array is read-only; give one that can be written")
    check_elements_apart(described, "out")
    return _Target(out, described, layout, {})


def _as_host_array(whole: object, root: int) -> Array:
    """Return the root's array on the host."""
    if whole is None:
        raise FieldError(
            f"whole: rank {root} is the root, and gave None; give it the array of all cells, and None to the others"
        )
    describe(whole, "whole")
    return to_host(whole) if is_device_array(whole) else as_ndarray(whole, "whole")


def components_of(shape: tuple[int, ...], domain: Domain, name: str, call: str) -> FieldOptions:
    """Return the component axes of a whole array of cells, by its shape.

    Raises `FieldError`, which names the array and the remedy. ``call`` is the remedy's code, with "{}" in place of the
    field's options.
    """
    fits = _components(shape, domain.grid_shape)
    if len(fits) == 1:
        before, after = fits[0]
        return {"components": (*before, ..., *after)}
    if fits:
        options = [f"components={components_text(*each)}" for each in fits]
        raise FieldError(
            f"{name}: shape {shape} can be read in {len(fits)} ways; tell which with "
            f"{', or '.join(map(call.format, options))}"
        )
    options = []
    for text, whole in _other_layouts(domain):
        for before, after in _components(shape, whole):
            components = f"components={components_text(before, after)}" * bool(before + after)
            options.append(", ".join(filter(None, [text, components])))
    raise FieldError(
        f"{name}: shape {shape} does not hold the grid's {domain.grid_shape}, with component axes in front or behind; "
        + (
            f"tell the layout of the field, as with {', or '.join(map(call.format, options))}"
            if options
            else "give all cells, without halo, or make a grid of this shape"
        )
    )


def _components(
    shape: tuple[int, ...], whole: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the component axes in front and behind, for each place of the grid axes in a shape."""
    ndim = len(whole)
    places = [n for n in range(len(shape) - ndim + 1) if shape[n : n + ndim] == whole]
    both = [(shape[:n], shape[n + ndim :]) for n in places]
    return [(before, after) for before, after in both if all(before) and all(after)]


def _other_layouts(domain: Domain) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the options and the points per axis of staggered fields, and of fields of one parity."""
    axes = domain.decomposition.axes
    for number in range(1, len(axes) + 1):
        for chosen in combinations(range(len(axes)), number):
            text = f"staggered={chosen[0] if number == 1 else chosen}"
            yield text, tuple(axis.points(n in chosen) for n, axis in enumerate(axes))
    with suppress(HaloxError):  # without a checkerboard
        yield "parity='even'", domain.layouts.of_options({"parity": "even"}).global_shape


def _compare(records: Sequence[_ScatterRecord]) -> None:
    """Raise `MismatchError` if ranks gave different arguments, or a field of another dtype than the root's array."""
    first = records[0]
    for rank, other in enumerate(records):
        for name, mine, theirs in (
            ("root", first.root, other.root),
            ("out", first.out is not None, other.out is not None),
            ("layout", first.spec, other.spec),
        ):
            if mine != theirs:
                raise MismatchError(
                    f"scatter needs one {name} on all ranks: rank 0 gave {name}={mine}, rank {rank} {name}={theirs}; "
                    "give the same on all ranks"
                )
    source = records[first.root]
    for rank, other in enumerate(records):
        if other.out is not None and other.out != source.dtype:
            raise MismatchError(
                f"scatter needs one dtype: out has {other.out} on rank {rank}, and whole {source.dtype} on rank "
                f"{source.root}; convert one of them, as by whole.astype({dtype_text(other.out)})"
            )


def _send(
    world: World, layout: FieldLayout, whole: Array, field: object, queue: MessageQueue
) -> None:
    """Send each other rank its cells, one part to each rank in turn, and copy this rank's cells."""
    blocks = blocks_of(layout, whole)
    own = blocks.pop(world.rank)
    for rank, part in rounds(blocks, world.size):
        queue.send_copy(part, rank)
    cells = owned_cells(field, layout)
    if not is_device_array(cells):
        as_void(cells)[...] = own
        return
    indices = list(parts_of(own, world.size))
    with staging(cells, max(own[index].nbytes for index in indices)) as staged:
        for index in indices:
            staged.store(index, own[index])


def _receive(world: World, root: int, cells: Any, queue: MessageQueue) -> None:
    """Receive this rank's cells, part by part."""
    if is_device_array(cells):
        _receive_on_device(world, root, cells, queue)
        return
    target = as_void(cells)
    for index in parts_of(target, world.size):
        queue.receive_into(target[index], root)


def _receive_on_device(world: World, root: int, cells: Any, queue: MessageQueue) -> None:
    """Receive into page-locked memory; a part is copied to the GPU while the next part arrives."""
    indices = list(parts_of(cells, world.size))
    shapes = [part_shape(cells.shape, index) for index in indices]
    with staging(cells, max(map(prod, shapes)) * cells.dtype.itemsize) as staged:
        for index, shape in zip(indices, shapes, strict=True):
            queue.receive(staged.next_buffer(shape), root)
            queue.end()
            staged.put(index)
