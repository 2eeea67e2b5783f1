"""Sums and extremes over some axes of a grid, deviations, positions of extremes, and histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout, second_images
from halox.decomposition.blocks import blocks
from halox.decomposition.normalise import axis_number
from halox.domain import Domain
from halox.errors import FieldError
from halox.reductions.cells import cells_of
from halox.reductions.field_operations import find_field_operation
from halox.reductions.operations import result_dtype
from halox.runtime.arrays import Array
from halox.runtime.gpu.devices import as_device_array, to_host
from halox.values import as_entries, check_unmasked, shortened, shown

_REDUCING = "a reduction"
_Alike = dict[str, object]
_BLOCK = 1 << 20  # cells that `numpy.histogram` copies at a time


def over_axes(
    domain: Domain, allreduce: Callable[..., Any], op: str, field: object, axis: object, out: object
) -> Any:
    """Return the "sum", "min" or "max" over some grid axes, as `halox.Grid.sum` describes them; collective."""

    def part(own: Any, layout: FieldLayout) -> tuple[Any, _Alike, None]:
        if out is not None:
            raise FieldError("out: results over axes are new arrays; leave out one of out and axis")
        axes = array_axes(layout, axis, domain.labels.dims)
        if layout.spec.parity is not None:
            raise FieldError(f"axis: a field of one parity has no {op} over axes; leave out axis")
        operation, dtype = find_field_operation(op, (own.dtype,), False)
        reduce = partial(own.sum, dtype=dtype) if op == "sum" else getattr(own, op)
        kept, starts = [n for n in range(own.ndim) if n not in axes], starts_of(layout)
        shape = [layout.global_shape[n] for n in kept]
        whole = domain.xp.full(shape, operation.identity(dtype), dtype)
        whole[tuple(slice(starts[n], starts[n] + own.shape[n]) for n in kept)] = reduce(axis=axes)
        return whole, {"op": op, "axis": axes}, None

    whole, _ = _of_cells(domain, "sum over axes", field, part)
    return allreduce(whole, op)[()]


def number_of_points(layout: FieldLayout, axes: Sequence[int], unique: bool) -> int:
    """Return the points along some axes of a field's array, components included; if ``unique`` without images."""
    points = prod(layout.global_shape[n] for n in axes)
    if unique:
        of_point = prod(layout.spec.components_before + layout.spec.components_after)
        images = [prod(past - first for first, past in box) for box in second_images(layout)]
        points -= of_point * sum(images)
    return points


def array_axes(layout: FieldLayout, axis: object, dims: Sequence[str]) -> tuple[int, ...]:
    """Return the axes of a field's array that are the given grid axes, or all axes for None."""
    if axis is None:
        return tuple(range(len(layout.padded_shape)))
    axes = tuple(axis_number(entry, dims) for entry in as_entries(axis))
    if not axes or len(set(axes)) < len(axes):
        raise FieldError(f"axis: give different grid axes, got {shown(axis)}")
    return tuple(layout.spec.grid_axes[n] for n in axes)


def extreme(domain: Domain, best: Callable[[], Any], name: str, field: object) -> tuple[int, ...]:
    """Return the first position of ``best()``, the smallest ("argmin") or largest ("argmax") value; blocks."""
    (own, starts), _ = _of_cells(
        domain, name, field, lambda own, layout: ((own, starts_of(layout)), {}, None)
    )
    value = best()

    def find() -> tuple[None, tuple[int, ...] | None]:
        is_best = own == value if value == value else own != own
        index = np.unravel_index(int(is_best.argmax()), own.shape)
        position = tuple(int(n) + start for n, start in zip(index, starts, strict=True))
        return None, position if is_best[index] else None

    _, of_ranks = domain.world.gather(find, _REDUCING)
    first: tuple[int, ...] = min(position for position in of_ranks if position is not None)
    return first


def histogram(
    domain: Domain, ends: Callable[[], tuple[Any, Any]], field: object, bins: Any, limits: Any
) -> tuple[Array, Array]:
    """Return counts and edges, as `halox.Grid.histogram` describes them; blocks.

    ``ends()`` returns the smallest and the largest value of the field; collective.
    """

    def edges_of(values: Array) -> Array:
        try:
            return np.asarray(np.histogram_bin_edges(values, bins, limits))
        except Exception as error:  # NumPy raises several types
            given = f"bins={shown(bins)}, range={shown(limits)}"
            raise FieldError(
                f"bins, range: {given}: {shortened(str(error))}; give rising edges, or a number and finite ends"
            ) from None

    def read(own: Any, _: FieldLayout) -> tuple[Any, _Alike, None]:
        if isinstance(bins, str):
            raise FieldError(f"bins: expected a number or edges, got {bins!r}")
        check_unmasked(bins, "bins")
        check_unmasked(limits, "range")
        edges_of(np.zeros(1, own.dtype))
        return own, {"bins": np.asarray(bins).tolist(), "range": np.asarray(limits).tolist()}, None

    def count() -> Array:
        if len(edges) < 2:
            return np.zeros(0, np.intp)
        if domain.device_id is not None:
            return to_host(domain.xp.histogram(own, domain.xp.asarray(edges))[0])
        ends = (edges[0], edges[-1]) if limits is None else limits
        parts = [np.histogram(own[at], bins, ends)[0] for at in blocks(own.shape, _BLOCK)]
        return np.asarray(np.sum(parts, axis=0))

    own, _ = _of_cells(domain, "histogram", field, read)
    # Given edges or ends do not depend on the cells.
    is_found = limits is None and np.ndim(bins) == 0
    edges = edges_of(np.array([*map(to_host, ends())] if is_found else [0, 0], own.dtype))
    _, counts = domain.world.gather(lambda: (None, count()), _REDUCING)
    return np.asarray(np.sum([*counts], axis=0)), edges


def starts_of(layout: FieldLayout) -> list[int]:
    """Return the index of a rank's first cell in the whole field."""
    before, after = layout.spec.components_before, layout.spec.components_after
    return [0] * len(before) + [cut.start for cut in layout.owned] + [0] * len(after)


def _of_cells(
    domain: Domain,
    name: str,
    field: object,
    read: Callable[[Any, FieldLayout], tuple[Any, _Alike, Any]],
) -> tuple[Any, list[Any]]:
    """Return the first result of ``read(cells, layout)`` of this rank, and the third results of all ranks.

    Collective: raises the error of one rank on all ranks, and `MismatchError` if the fields of the ranks, or the
    arguments by name in the second results, differ. They are compared as text, since NaN differs from itself.
    """

    def build() -> tuple[Any, tuple[dict[str, str], Any]]:
        (cells,) = cells_of(name, (field,), domain.layouts.find)
        result_dtype(name, [cells.dtype])
        view = cells.view()
        own = view if domain.device_id is None else as_device_array(view)
        mine, alike, sent = read(own, cells.layout)
        texts = {name: str(value) for name, value in alike.items()}
        return mine, ({"the field reduced": f"{cells.dtype}, {cells.layout.spec}"} | texts, sent)

    with domain.world.guard:
        domain.world.begin(name)
        mine, records = domain.world.gather(build, _REDUCING)
        domain.world.check_alike([fields for fields, _ in records.distinct])
    return mine, [sent for _, sent in records]
