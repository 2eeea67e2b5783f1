"""Values of fields at particles, and values of particles added to fields: `Particles.get` and `Particles.add`.

Along each axis a particle is a cloud around its position, and a point of a field has the weight of the part of the
cloud nearest to it. Order 0 is the nearest point, 1 a cloud as long as a cell (cloud in cell, linear weights), and 2 a
triangle (triangular-shaped cloud). The host adds point by point, a GPU by `kernels/clouds.cu`. Begin with `weights_of`.

References: C. K. Birdsall and A. B. Langdon: Plasma Physics via Computer Simulation, 1985, sections 2-6 and 8-8; R. W.
Hockney and J. W. Eastwood: Computer Simulation Using Particles, 1988, section 5-3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache, reduce
from itertools import product
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError
from halox.reductions.device.field_plans import check_aligned
from halox.reductions.operations import element
from halox.runtime.arrays import Array, Described, DType, as_ndarray
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.devices import allocate, as_device_array, to_host
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.streams import stream_pointer
from halox.values import as_int, check_unmasked, shown

_BLOCK = 1 << 14  # particles at a time on the host, whose arrays stay in the cache
_THREADS = 128


class Clouds(NamedTuple):
    """Clouds of an order in fields of a layout and dtype."""

    layout: FieldLayout
    dtype: DType
    order: int
    shift: tuple[float, ...]  # along each axis 1/2 if points are at faces
    last: tuple[float, ...]  # along each axis the greatest index of a cloud's first point

    @property
    def components(self) -> tuple[int, ...]:
        """Extents of all component axes."""
        return self.layout.spec.components_before + self.layout.spec.components_after

    @property
    def grid_axes(self) -> range:
        """Grid axes of the field."""
        first = len(self.layout.spec.components_before)
        return range(first, first + self.layout.spec.ndim)

    @property
    def parts(self) -> int:
        """Number of real numbers of a number: 2 if it is complex."""
        return 2 if self.dtype.kind == "c" else 1


def weights_of(x: Array, order: int) -> tuple[Array, list[Array]]:
    """Return each particle's first point along an axis, and the weights of this and of the following points.

    Examples
    --------
    >>> weights_of(np.array([3.75]), 1)
    (array([3.]), [array([0.25]), array([0.75])])
    """
    nearest = np.floor(x if order == 1 else x + 0.5)
    rest = x - nearest
    if order == 0:
        return nearest, [np.ones_like(x)]
    if order == 1:
        return nearest, [1 - rest, rest]
    return nearest - 1, [0.5 * (0.5 - rest) ** 2, 0.75 - rest * rest, 0.5 * (0.5 + rest) ** 2]


def read_clouds(domain: Domain, field: object, positions: Any, order: int) -> Any:
    """Return the values of a field at particles of this rank's cells, as `halox.Particles.get` describes them.

    ``positions`` are global indices of shape (particles, axes), in float64 and on the device of the grid's fields.
    """
    clouds, described = _describe(domain, field, order)
    values: Any = allocate((len(positions), *clouds.components), clouds.dtype, described.device)
    if described.device is not None:
        _launch("get_clouds", clouds, described, positions, values.data.ptr)
        return values
    cells = np.moveaxis(as_ndarray(field), clouds.grid_axes, range(positions.shape[1]))
    for rows, points in _blocks(clouds, positions):
        sums = np.zeros(values[rows].shape, np.result_type(clouds.dtype, "f8"))
        for indices, weights in points:
            sums += cells[indices] * weights.reshape(-1, *(1,) * len(clouds.components))
        values[rows] = sums
    return values


def add_clouds(
    domain: Domain, field: object, positions: Any, values: Any, order: int, *, reproducible: bool
) -> None:
    """Add values of particles of this rank's cells to a field, as `halox.Particles.add` describes it."""
    clouds, described = _describe(domain, field, order)
    (particles, ndim), parts, xp = positions.shape, clouds.parts, domain.xp
    if not described.writable:
        raise FieldError("field: it is read-only; pass an array that can be written")
    numbers = _numbers(clouds, values, particles, domain)
    if not particles:
        return
    if described.device is not None and not reproducible:
        stride = 0 if len(numbers) < particles else numbers.shape[1]
        _launch("add_clouds", clouds, described, positions, numbers.data.ptr, stride)
        return
    array: Any = as_ndarray(field) if described.device is None else as_device_array(field)
    grid_last = xp.moveaxis(array, clouds.grid_axes, range(-ndim, 0))
    shape = grid_last.shape[-ndim:]
    units = _units(xp, numbers, particles) if reproducible else None
    sums = xp.zeros((prod(clouds.components), 2 if reproducible else 1, prod(shape) * parts))
    numbers = xp.broadcast_to(numbers, (particles, numbers.shape[1]))
    for rows, points in _blocks(clouds, positions):
        for indices, weights in points:
            at = xp.ravel_multi_index(indices, shape) * parts
            for n, given in enumerate(numbers[rows].T):
                totals = sums[n // parts]
                for total, terms in zip(totals, _slices(weights * given, units), strict=True):
                    xp.add.at(total, at + n % parts, terms)
    whole = sums.sum(axis=1).view("c16" if parts == 2 else "f8")
    grid_last += whole.reshape(grid_last.shape)


def _describe(domain: Domain, field: object, order: object) -> tuple[Clouds, Described]:
    described, layout = domain.layouts.read(field)
    number = as_int(order)
    if number not in (0, 1, 2):
        raise FieldError(f"order must be 0, 1 or 2, got {shown(order)}")
    if described.device is not None:
        check_aligned(described)
    return clouds_of(layout, described.dtype, number), described


@lru_cache(maxsize=64)
def clouds_of(layout: FieldLayout, dtype: DType, order: int) -> Clouds:
    """Return the clouds of an order, unless a field lacks points around some particles of this rank's cells."""
    spec = layout.spec
    if spec.parity is not None:
        raise FieldError("field: a field of one parity has no clouds; give a field of all cells")
    if dtype.char not in "fdFD" or not dtype.isnative:
        raise FieldError(f"field: expected float32, float64, complex64 or complex128, got {dtype}")
    for axis, (is_staggered, halo) in enumerate(zip(spec.staggered, spec.halo, strict=True)):
        needed = order // 2 if is_staggered else (order + 1) // 2
        if min(halo) < needed:
            raise FieldError(
                f"order: clouds of order {order} need a halo of {needed} along axis {axis}, and the field has {halo} "
                f"(low, high); make it with halo={needed}, or give a lower order"
            )
    shift = tuple(0.5 * is_staggered for is_staggered in spec.staggered)
    last = tuple(along.stored - 1.0 - order for along in layout.cells)
    return Clouds(layout, dtype, order, shift, last)


def _numbers(clouds: Clouds, values: Any, particles: int, domain: Domain) -> Any:
    """Return the real and imaginary parts to add, in a row for each particle, or in one row for all."""
    check_unmasked(values, "values")
    on_host = domain.device_id is None or isinstance(values, (int, float, complex))
    given: Any = to_host(values) if on_host else as_device_array(values)
    if not np.can_cast(given.dtype, clouds.dtype, "same_kind"):
        raise FieldError(
            f"values: dtype {given.dtype} cannot be added to a field of {clouds.dtype}; convert one of them"
        )
    if given.ndim == 0:
        numbers = domain.xp.full((1, *clouds.components), given[()], clouds.dtype)
        return numbers.view(clouds.dtype.char.lower()).reshape(1, -1)
    if given.ndim == 1:  # a number for each particle
        given = given.reshape(-1, *(1,) * len(clouds.components))
    shape = (particles, *clouds.components)
    try:
        numbers = domain.xp.broadcast_to(given, shape)
    except ValueError:
        raise FieldError(
            f"values: expected a number, or an array of shape ({particles},) or {shape}, got {shown(values)}"
        ) from None
    numbers = domain.xp.ascontiguousarray(numbers, clouds.dtype).view(clouds.dtype.char.lower())
    return numbers.reshape(particles, prod(clouds.components) * clouds.parts)


def _units(xp: Any, numbers: Any, particles: int) -> Any:
    """Return two numbers, 1.5 * 2**52 units each: no sum of all particles' multiples of a unit is rounded.

    All terms are below ``2**exponent``; what the large unit leaves of them is at most half of it.
    """
    bits = particles.bit_length() + 1
    exponent = xp.frexp(abs(numbers).max())[1] + xp.array([bits - 1, 2 * bits - 55], "i4")
    return xp.ldexp(xp.full(2, 1.5), exponent)


def _slices(terms: Any, units: Any) -> Iterator[Any]:
    """Yield the terms, or with units the nearest multiples of the large one, and those of the small one of the rest."""
    if units is None:
        yield terms
        return
    for unit in units:
        part = (terms + unit) - unit
        yield part
        terms = terms - part


def _blocks(clouds: Clouds, positions: Any) -> Iterator[tuple[slice, Iterator[Any]]]:
    """Yield blocks of particles, and for each of their points the indices in the array and the weights."""

    def point(sides: Any) -> tuple[tuple[Array, ...], Array]:
        indices, weights = zip(*sides, strict=True)
        return indices, reduce(np.multiply, weights)

    block = _BLOCK if isinstance(positions, np.ndarray) else len(positions)
    for start in range(0, len(positions), block):
        rows, along = slice(start, start + block), []
        for axis, last in enumerate(clouds.last):
            x = positions[rows, axis]
            first, weights = weights_of(x + clouds.shift[axis], clouds.order)
            first -= clouds.layout.origin[axis]
            inside = (first >= 0) & (first <= last)
            if not inside.all():
                lost = int(inside.argmin())
                raise FieldError(
                    f"position: particle {start + lost} is at {float(x[lost]):g} along axis {axis}, not in this rank's "
                    "cells; call migrate() after changes of positions"
                )
            index = first.astype("i8")
            along.append([(index + n, weight) for n, weight in enumerate(weights)])
        yield rows, map(point, product(*along))


@lru_cache(maxsize=64)
def _tables(clouds: Clouds, strides: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return the kernels' tables of places and axes, and their ``#define``s, for a field of these strides."""
    grid, size = clouds.grid_axes, clouds.dtype.itemsize // clouds.parts
    across = strides[: grid.start] + strides[grid.stop :]
    numbers = [
        sum(map(mul, component, across)) + size * part
        for component in np.ndindex(clouds.components)
        for part in range(clouds.parts)
    ]
    places = [*strides[grid.start : grid.stop], *numbers]
    axes = [*clouds.shift, *clouds.layout.origin, *clouds.last]
    defines = {
        "TYPE": element(np.dtype(f"f{size}")),
        "NDIM": len(grid),
        "ORDER": clouds.order,
        "NUMBERS": len(numbers),
    }
    return (
        (ctypes.c_int64 * len(places))(*places),
        (ctypes.c_double * len(axes))(*axes),
        tuple((name, str(value)) for name, value in defines.items()),
    )


def _launch(
    function: str,
    clouds: Clouds,
    field: Described,
    positions: Any,
    values: int,
    stride: int = 0,
) -> None:
    """Launch a kernel on the current stream; ``stride`` is that of the particles' values."""
    particles = len(positions)
    if not particles:
        return
    assert field.device is not None
    places, axes, defines = _tables(clouds, field.strides)
    launch = PreparedLaunch(
        kernel("clouds", function, field.device, defines),
        -(-particles // _THREADS),
        _THREADS,
        [
            *map(ctypes.c_uint64, (field.pointer, positions.data.ptr, values)),
            places,
            axes,
            *map(ctypes.c_int64, (particles, stride)),
        ],
        device=field.device,
    )
    launch.launch(stream_pointer())
