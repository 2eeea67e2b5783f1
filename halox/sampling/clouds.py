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
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError
from halox.reductions.device.field_plans import check_aligned
from halox.reductions.operations import element
from halox.runtime.arrays import Array, Described, as_ndarray
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.devices import allocate, as_device_array
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.streams import stream_pointer
from halox.sampling.device_points import byte_places
from halox.sampling.locating import as_numbers, grid_first
from halox.values import as_int, shown

_BLOCK = 1 << 14  # particles at a time on the host, whose arrays stay in the cache
_THREADS = 128


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
    """Return the values of a field at particles, as `halox.Particles.get` describes them.

    ``positions`` are global indices of shape (particles, axes), in float64 and on the device of the grid's fields.
    """
    described, layout, components = _describe(domain, field, order)
    values: Any = allocate((len(positions), *components), described.dtype, described.device)
    if described.device is not None:
        _launch("get_clouds", described, layout, order, positions, values)
        return values
    cells = grid_first(as_ndarray(field), layout)
    for rows, points in _blocks(layout, order, positions):
        sums = np.zeros(values[rows].shape, np.result_type(values, "f8"))
        for indices, weights in points:
            sums += cells[indices] * weights.reshape(-1, *(1,) * len(components))
        values[rows] = sums
    return values


def add_clouds(
    domain: Domain, field: object, positions: Any, values: Any, order: int, *, reproducible: bool
) -> None:
    """Add values of particles to a field, as `halox.Particles.add` describes it."""
    described, layout, components = _describe(domain, field, order)
    (particles, ndim), xp, dtype = positions.shape, domain.xp, described.dtype
    numbers = as_numbers(values, described, (particles, *components), xp, by_point=True)
    if not particles:
        return
    numbers = numbers.reshape(len(numbers), prod(components)).view(dtype.char.lower())
    if described.device is not None and not reproducible:
        _launch("add_clouds", described, layout, order, positions, numbers)
        return
    array: Any = as_ndarray(field) if described.device is None else as_device_array(field)
    cells, width = grid_first(array, layout), numbers.shape[1]
    shape = cells.shape[:ndim]
    units = _units(xp, numbers, particles) if reproducible else [0.0]
    sums = xp.zeros((len(units), prod(shape) * width))
    numbers = xp.broadcast_to(numbers, (particles, width))
    for rows, points in _blocks(layout, order, positions):
        for indices, weights in points:
            at = xp.ravel_multi_index(indices, shape) * width
            for n, given in enumerate(numbers[rows].T):
                rest = weights * given
                for total, unit in zip(sums, units, strict=True):
                    term = (rest + unit) - unit
                    xp.add.at(total, at + n, term)
                    rest = rest - term
    cells += sums.sum(axis=0).view("c16" if dtype.kind == "c" else "f8").reshape(cells.shape)


def _units(xp: Any, numbers: Any, particles: int) -> Any:
    """Return 1.5 * 2**52 units, large and small, so that no sum of all particles' multiples of a unit is rounded.

    Terms are below 2**exponent, and rests at most half of the large unit. See J. Demmel and H. D. Nguyen: Parallel
    reproducible summation, IEEE Transactions on Computers 64 (7), 2015, section 4.
    """
    bits = particles.bit_length() + 1
    exponent = xp.frexp(abs(numbers).max())[1] + xp.array([bits - 1, 2 * bits - 55], "i4")
    return xp.ldexp(xp.full(2, 1.5), exponent)


def _describe(domain: Domain, field: object, order: object) -> tuple[Described, FieldLayout, Any]:
    """Return a field's description, layout and components; with the same errors on all ranks."""
    described, layout = domain.layouts.read(field)
    spec, number, dtype = layout.spec, as_int(order), described.dtype
    if number not in (0, 1, 2):
        raise FieldError(f"order must be 0, 1 or 2, got {shown(order)}")
    if spec.parity is not None or dtype.char not in "fdFD" or not dtype.isnative:
        raise FieldError(
            f"field: expected all cells in float32, float64, complex64 or complex128, got {described} of {layout}"
        )
    for axis, halo in enumerate(spec.halo):
        needed = (number + (not spec.staggered[axis])) // 2
        if min(halo) < needed:
            raise FieldError(
                f"order: clouds of order {number} need a halo of {needed} along axis {axis}, and the field has {halo} "
                f"(low, high); make it with halo={needed}, or give a lower order"
            )
    if described.device is not None:
        check_aligned(described)
    return described, layout, spec.components_before + spec.components_after


def _along(layout: FieldLayout, order: int) -> list[list[float]]:
    """Return along each axis 1/2 if points are at faces, the array's first point, and the last first one of a cloud."""
    return [
        [0.5 * is_staggered for is_staggered in layout.spec.staggered],
        [*layout.origin],
        [along.stored - 1.0 - order for along in layout.cells],
    ]


def _blocks(layout: FieldLayout, order: int, positions: Any) -> Iterator[tuple[slice, Any]]:
    """Yield blocks of particles, and for each of their points the indices in the array and the weights."""
    block = _BLOCK if isinstance(positions, np.ndarray) else len(positions)
    for start in range(0, len(positions), block):
        rows, along = slice(start, start + block), []
        for axis, (shift, origin, last) in enumerate(zip(*_along(layout, order), strict=True)):
            x = positions[rows, axis]
            first, weights = weights_of(x + shift, order)
            inside = (first >= origin) & (first <= origin + last)
            if not inside.all():
                lost = int(inside.argmin())
                raise FieldError(
                    f"position: particle {start + lost} is at {float(x[lost]):g} along axis {axis}, not in this rank's "
                    "cells; call migrate() after changes of positions"
                )
            index = first.astype("i8") - origin
            along.append([(index + n, weight) for n, weight in enumerate(weights)])
        points = (zip(*sides, strict=True) for sides in product(*along))
        yield rows, ((indices, reduce(np.multiply, weights)) for indices, weights in points)


def _launch(
    function: str, field: Described, layout: FieldLayout, order: int, positions: Any, values: Any
) -> None:
    """Launch a kernel on the current stream; a single row of values is the row of all particles."""
    particles, ndim = positions.shape
    if not particles:
        return
    assert field.device is not None
    launch = _prepared(function, layout, order, field.device, field.dtype.str, field.strides)
    block = _THREADS * (_each(ndim) if function == "add_clouds" else 1)
    addresses = field.pointer, positions.data.ptr, values.data.ptr
    stride = values.size // particles if len(values) == particles else 0
    launch.launch_with(stream_pointer(), -(-particles // block), *addresses, particles, stride)


def _each(ndim: int) -> int:
    """Return the particles that a thread adds: two where neighbours in a sorted list mostly have one place."""
    return 2 if ndim < 3 else 1


@lru_cache(maxsize=64)
def _prepared(
    function: str,
    layout: FieldLayout,
    order: int,
    device: int,
    kind: str,
    strides: tuple[int, ...],
) -> PreparedLaunch:
    """Return the launch of a kernel for fields of a dtype and strides."""
    dtype = np.dtype(kind)
    along, numbers = byte_places(layout, dtype, strides)
    shift, first, last = _along(layout, order)
    places, axes = [*along, *map(int, last), *numbers], [*shift, *first]
    defines = {
        "TYPE": element(np.dtype(dtype.char.lower())),
        "NDIM": len(along),
        "ORDER": order,
        "NUMBERS": len(numbers),
        "EACH": _each(len(along)),
    }
    arguments: list[Any] = [
        *map(ctypes.c_uint64, (0, 0, 0)),
        *map(ctypes.c_int64, (0, 0)),
        (ctypes.c_int64 * len(places))(*places),
        (ctypes.c_double * len(axes))(*axes),
    ]
    words = tuple((name, str(value)) for name, value in defines.items())
    code = kernel("clouds", function, device, words)
    return PreparedLaunch(code, 1, _THREADS, arguments, device=device)
