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
        return nearest, [np.ones(len(x))]
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
        arguments = clouds, described.device, described.pointer, described.strides, positions
        _launch("get_clouds", *arguments, values.data.ptr)
        return values
    first, ndim = len(clouds.layout.spec.components_before), clouds.layout.spec.ndim
    cells = np.moveaxis(as_ndarray(field), range(first, first + ndim), range(ndim))
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
    device, particles, xp = described.device, len(positions), domain.xp
    if not described.writable:
        raise FieldError("field: it is read-only; pass an array that can be written")
    numbers = _numbers(clouds, values, particles, domain)
    stride = numbers.shape[1] if len(numbers) == particles else 0
    if not particles:
        return
    if device is not None and not reproducible:
        arguments = clouds, device, described.pointer, described.strides, positions
        _launch("add_clouds", *arguments, numbers.data.ptr, stride)
        return
    units = _units(xp, numbers, particles) if reproducible else None
    sums = xp.zeros((*described.shape, clouds.parts, 2 if reproducible else 1))
    if device is not None:
        arguments = clouds, device, sums.data.ptr, sums.strides[:-2], positions
        _launch("add_clouds", *arguments, numbers.data.ptr, stride, units)
    else:
        numbers = np.broadcast_to(numbers, (particles, numbers.shape[1]))
        along, offsets = _places(clouds, sums.strides[:-2], 8, prod(sums.shape[-2:]))
        for rows, points in _blocks(clouds, positions):
            for indices, weights in points:
                at = sum(index * (step // 8) for index, step in zip(indices, along, strict=True))
                for offset, terms in zip(
                    offsets, _terms(weights, numbers[rows], units), strict=True
                ):
                    np.add.at(sums.reshape(-1), at + offset // 8, terms)
    array: Any = as_ndarray(field) if device is None else as_device_array(field)
    array += sums.sum(axis=-1).view("c16" if clouds.parts == 2 else "f8")[..., 0]


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


def _terms(weights: Array, numbers: Array, units: Array | None) -> Iterator[Array]:
    """Yield the terms of each number; with units, the multiples of each that are nearest to them, largest first."""
    for values in numbers.T:
        terms = weights * values
        if units is None:
            yield terms
        else:
            for unit in units:
                part = (terms + unit) - unit
                yield part
                terms = terms - part


def _blocks(clouds: Clouds, positions: Array) -> Iterator[tuple[slice, Iterator[Any]]]:
    """Yield blocks of particles, and for each of their points the indices in the array and the weights."""

    def point(sides: Any) -> tuple[tuple[Array, ...], Array]:
        indices, weights = zip(*sides, strict=True)
        return indices, reduce(np.multiply, weights)

    for start in range(0, len(positions), _BLOCK):
        rows, along = slice(start, start + _BLOCK), []
        for axis, last in enumerate(clouds.last):
            x = positions[rows, axis]
            first, weights = weights_of(x + clouds.shift[axis], clouds.order)
            first -= clouds.layout.origin[axis]
            inside = (first >= 0) & (first <= last)
            if not inside.all():
                lost = int(np.argmin(inside))
                raise FieldError(
                    f"position: particle {start + lost} is at {x[lost]:g} along axis {axis}, not in this rank's cells; "
                    "call migrate() after changes of positions"
                )
            index = first.astype("i8")
            along.append([(index + n, weight) for n, weight in enumerate(weights)])
        yield rows, map(point, product(*along))


@lru_cache(maxsize=64)
def _places(
    clouds: Clouds, strides: tuple[int, ...], size: int, parts: int
) -> tuple[tuple[int, ...], list[int]]:
    """Return the strides of the grid axes, and the places of all numbers of a point: ``parts`` of each component."""
    first = len(clouds.layout.spec.components_before)
    end = first + clouds.layout.spec.ndim
    across = strides[:first] + strides[end:]
    return strides[first:end], [
        sum(map(mul, component, across)) + size * part
        for component in np.ndindex(clouds.components)
        for part in range(parts)
    ]


@lru_cache(maxsize=64)
def _tables(clouds: Clouds, strides: tuple[int, ...], slices: int) -> tuple[Any, Any, Any]:
    """Return the kernels' tables of places and axes, and their ``#define``s."""
    size = clouds.dtype.itemsize // clouds.parts
    along, offsets = _places(clouds, strides, size if slices == 1 else 8, clouds.parts * slices)
    axes = [*clouds.shift, *clouds.layout.origin, *clouds.last]
    defines = {
        "TYPE": element(np.dtype(f"f{size}")),
        "NDIM": len(along),
        "ORDER": clouds.order,
        "NUMBERS": len(offsets) // slices,
        "SLICES": slices,
    }
    return (
        (ctypes.c_int64 * (len(along) + len(offsets)))(*along, *offsets),
        (ctypes.c_double * len(axes))(*axes),
        tuple((name, str(value)) for name, value in defines.items()),
    )


def _launch(
    function: str,
    clouds: Clouds,
    device: int,
    target: int,
    strides: tuple[int, ...],
    positions: Any,
    numbers: int,
    stride: int = 0,
    units: Any = None,
) -> None:
    """Launch a kernel on the current stream; ``stride`` is that of the particles' numbers."""
    if not len(positions):
        return
    places, axes, defines = _tables(clouds, strides, 1 if units is None else 2)
    launch = PreparedLaunch(
        kernel("clouds", function, device, defines),
        -(-len(positions) // _THREADS),
        _THREADS,
        [
            *map(ctypes.c_uint64, (target, positions.data.ptr, numbers)),
            places,
            axes,
            *map(ctypes.c_int64, (len(positions), stride)),
            ctypes.c_uint64(0 if units is None else units.data.ptr),
        ],
        device=device,
    )
    launch.launch(stream_pointer())
