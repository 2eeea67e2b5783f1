"""Values of fields at particles, and values of particles added to fields: `Particles.get` and `Particles.add`.

Along each axis a particle is a cloud around its position, and a point of a field has the weight of the part of the
cloud nearest to it. Order 0 is the nearest point, 1 a cloud as long as a cell (cloud in cell, linear weights), and 2 a
triangle (triangular-shaped cloud). The host adds point by point, a GPU by `kernels/clouds.cu`. Begin with
`weights_of`.

References: C. K. Birdsall and A. B. Langdon: Plasma Physics via Computer Simulation, 1985, sections 2-6 and 8-8; R. W.
Hockney and J. W. Eastwood: Computer Simulation Using Particles, 1988, section 5-3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain import Domain
from halox.errors import FieldError
from halox.reductions.device.field_plans import check_aligned
from halox.reductions.operations import element
from halox.runtime.arrays import Array, DType, as_ndarray
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.devices import allocate, as_device_array, to_host
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.streams import stream_pointer
from halox.values import as_int, check_unmasked, shown

_BLOCK = 1 << 14  # particles at a time on the host, whose arrays stay in the cache
_THREADS = 128


class Clouds(NamedTuple):
    """A field, and along each axis where its points lie."""

    layout: FieldLayout
    dtype: DType
    order: int
    shift: list[float]  # 1/2 if points are at faces
    last: list[float]  # greatest index in the array of a particle's first point

    @property
    def components(self) -> tuple[int, ...]:
        """Extents of all component axes."""
        return self.layout.spec.components_before + self.layout.spec.components_after

    def planes(self, field: Any) -> list[Any]:
        """View the real and imaginary parts of all components, each as an array of the grid axes."""
        first, ndim = len(self.layout.spec.components_before), self.layout.spec.ndim
        grid = range(first, first + ndim)
        array = field.transpose(*range(first), *range(first + ndim, field.ndim), *grid)
        parts = (array.real, array.imag) if self.dtype.kind == "c" else (array,)
        return [part[component] for component in np.ndindex(self.components) for part in parts]


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
    clouds, device = clouds_of(domain, field, order), domain.device_id
    values: Any = allocate((len(positions), *clouds.components), clouds.dtype, device)
    if not len(positions):
        return values
    numbers = values.view(clouds.dtype.char.lower()).reshape(len(positions), -1)
    planes = clouds.planes(as_ndarray(field) if device is None else as_device_array(field))
    if device is not None:
        _launch("get_clouds", clouds, planes, positions, numbers, device)
        return values
    for rows, points in _blocks(clouds, positions):
        sums = np.zeros(numbers[rows].T.shape)
        for indices, weights in points:
            for total, plane in zip(sums, planes, strict=True):
                total += weights * plane[indices]
        numbers[rows] = sums.T
    return values


def add_clouds(
    domain: Domain, field: object, positions: Any, values: Any, order: int, *, reproducible: bool
) -> None:
    """Add values of particles of this rank's cells to a field, as `halox.Particles.add` describes it."""
    clouds, xp, device = clouds_of(domain, field, order), domain.xp, domain.device_id
    numbers = _numbers(clouds, values, len(positions), domain)
    if not len(positions):
        return
    planes = clouds.planes(as_ndarray(field) if device is None else as_device_array(field))
    if device is not None and not reproducible:
        _launch("add_clouds", clouds, planes, positions, numbers, device)
        return
    shape, slices = planes[0].shape, 2 if reproducible else 1
    units = _units(xp, numbers, len(positions)) if reproducible else None
    sums = xp.zeros((len(planes) * slices, *shape))
    if device is not None:
        _launch("add_clouds", clouds, [*sums], positions, numbers, device, units)
    else:
        numbers = np.broadcast_to(numbers, (len(positions), len(planes)))
        for rows, points in _blocks(clouds, positions):
            for indices, weights in points:
                at = np.ravel_multi_index(indices, shape)
                for n, terms in enumerate(_terms(weights, numbers[rows], units)):
                    np.add.at(sums[n].reshape(-1), at, terms)
    for n, plane in enumerate(planes):
        plane += sums[n * slices : (n + 1) * slices].sum(axis=0)


def clouds_of(domain: Domain, field: object, order: object) -> Clouds:
    """Check that a field has all points around particles of this rank's cells; the same on all ranks."""
    described, layout = domain.layouts.read(field)
    spec, number = layout.spec, as_int(order)
    if number not in (0, 1, 2):
        raise FieldError(f"order must be 0, 1 or 2, got {shown(order)}")
    if spec.parity is not None:
        raise FieldError("field: a field of one parity has no clouds; give a field of all cells")
    if described.dtype.str[1:] not in ("f4", "f8", "c8", "c16") or not described.dtype.isnative:
        raise FieldError(
            f"field: expected float32, float64, complex64 or complex128, got {described.dtype}"
        )
    if described.device is not None:
        check_aligned(described)
    for axis, (is_staggered, halo) in enumerate(zip(spec.staggered, spec.halo, strict=True)):
        needed = number // 2 if is_staggered else (number + 1) // 2
        if min(halo) < needed:
            raise FieldError(
                f"order: clouds of order {number} need a halo of {needed} along axis {axis}, and the field has {halo} "
                f"(low, high); make it with halo={needed}, or give a lower order"
            )
    shift = [0.5 * is_staggered for is_staggered in spec.staggered]
    last = [along.stored - 1.0 - number for along in layout.cells]
    return Clouds(layout, described.dtype, number, shift, last)


def _numbers(clouds: Clouds, values: Any, particles: int, domain: Domain) -> Any:
    """Return the real and imaginary parts to add, in a row for each particle, or in one row for all."""
    check_unmasked(values, "values")
    given: Any = to_host(values) if domain.device_id is None else as_device_array(values)
    if not np.can_cast(given.dtype, clouds.dtype, "same_kind"):
        raise FieldError(
            f"values: dtype {given.dtype} cannot be added to a field of {clouds.dtype}; convert one of them"
        )
    rows = particles if given.ndim else 1
    if given.ndim == 1:  # a number for each particle
        given = given.reshape(-1, *(1,) * len(clouds.components))
    try:
        numbers = domain.xp.broadcast_to(given, (rows, *clouds.components))
    except ValueError:
        raise FieldError(
            f"values: expected a number, or an array of shape ({particles},) or {(particles, *clouds.components)}, got "
            f"{shown(values)}"
        ) from None
    numbers = domain.xp.ascontiguousarray(numbers, clouds.dtype)
    return numbers.view(clouds.dtype.char.lower()).reshape(rows, -1) if rows else numbers


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


def _launch(
    function: str,
    clouds: Clouds,
    planes: list[Any],
    positions: Any,
    numbers: Any,
    device: int,
    units: Any = None,
) -> None:
    """Launch a kernel on the current stream; ``numbers`` has a row for each particle, or one for all."""
    (particles, ndim), (rows, width) = positions.shape, numbers.shape
    defines = {
        "TYPE": element(numbers.dtype),
        "NDIM": ndim,
        "ORDER": clouds.order,
        "NUMBERS": width,
        "SLICES": len(planes) // width,
    }
    start = planes[0].data.ptr
    places = [*planes[0].strides, *(plane.data.ptr - start for plane in planes)]
    axes = [*clouds.shift, *clouds.layout.origin, *clouds.last]
    launch = PreparedLaunch(
        kernel("clouds", function, device, tuple((k, str(v)) for k, v in defines.items())),
        -(-particles // _THREADS),
        _THREADS,
        [
            ctypes.c_uint64(start),
            ctypes.c_uint64(positions.data.ptr),
            ctypes.c_uint64(numbers.data.ptr),
            (ctypes.c_int64 * len(places))(*places),
            (ctypes.c_double * len(axes))(*axes),
            ctypes.c_int64(particles),
            ctypes.c_int64(width if rows == particles else 0),
            ctypes.c_uint64(0 if units is None else units.data.ptr),
        ],
        device=device,
    )
    launch.launch(stream_pointer())
