"""Fills of walls by operations on whole slabs of NumPy or CuPy, and their adjoints: the general form.

`host_walls` and `wall_launch` are the fast forms for most boundaries; both take their numbers from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from halox.decomposition import AxisFill, Boundary, WallFill
from halox.runtime.arrays import Array, DType
from halox.runtime.casting import cast

Step = Callable[[], object]


class Call(partial):  # type: ignore[type-arg]
    """A call of a user's function."""


class InPlace(partial):  # type: ignore[type-arg]
    """A call that multiplies a halo that neighbours have sent, and so must run once in an exchange."""


def twice_mirror(boundary: Boundary, dtype: DType) -> Array:
    """Return the number from which a mirror image of the opposite sign is subtracted, as an array of shape ()."""
    # -0 - x is -x for zeros, too. NumPy 2.4 computes negative(x) wrongly for some strides.
    number = boundary.number
    return np.asarray(-dtype.type(0) if number is None else 2 * cast(number, dtype)).astype(dtype)


def changes(along: AxisFill, dtype: DType) -> Array:
    """Return the number that a gradient adds to each target layer; integers wrap around."""
    return np.array(along.depths).astype(dtype) * cast(along.boundary.number, dtype)


def _by_layer(xp: ModuleType, array: Any, along: AxisFill, numbers: Array) -> Any:
    """Return one number per target layer, in a shape that broadcasts along the other axes."""
    shape = [1] * array.ndim
    shape[along.array_axis] = -1
    return xp.asarray(numbers.astype(array.dtype).reshape(shape))


def slab_steps(
    xp: ModuleType, array: Any, fill: WallFill, call: Callable[[Any], Step]
) -> list[Step]:
    """Return the operations of one fill with whole slabs; ``call`` returns that of a user's function."""
    along, boundary = fill.along, fill.along.boundary
    target, source = array[fill.target], array[fill.source]
    kind = boundary.kind
    if kind == "function":
        return [call(target)]
    if kind == "constant":
        return [partial(xp.copyto, target, cast(boundary.number, array.dtype)[()])]
    if kind == "phase":
        return [InPlace(xp.multiply, target, _phase(along, array.dtype), target)]
    if kind == "gradient":
        change = _by_layer(xp, array, along, changes(along, array.dtype))
        return [partial(xp.add, source, change, target)]
    if kind == "extrapolate":
        operations: list[Step] = [partial(xp.subtract, source, array[fill.inner], target)]
        if len(along.depths) > 1:
            distances = _by_layer(xp, array, along, abs(np.array(along.depths)))
            operations.append(partial(xp.multiply, target, distances, target))
        return [*operations, partial(xp.add, target, source, target)]
    if kind in ("antireflect", "antisymmetric"):
        return [partial(xp.subtract, twice_mirror(boundary, array.dtype)[()], source, target)]
    return [partial(target.__setitem__, ..., source)]


def _phase(along: AxisFill, dtype: DType) -> Any:
    """Return the factor of a halo: the phase beyond the high side, its inverse beyond the low side."""
    number = along.boundary.number
    assert number is not None
    return cast(number if along.side == "high" else 1 / number, dtype)[()]


def adjoint_steps(xp: ModuleType, array: Any, fill: WallFill) -> list[Step]:
    """Return the operations of the adjoint of one fill: add the halo to its sources, and clear it."""
    along, target, source = fill.along, array[fill.target], array[fill.source]
    kind = along.boundary.kind
    if kind == "phase":
        return [partial(xp.multiply, target, np.conj(_phase(along, array.dtype)), target)]
    clear = partial(target.fill, 0)
    if kind == "constant":
        return [clear]
    native = array.dtype.newbyteorder("=")  # NumPy adds in no other
    layers: dict[str, Any] = {"axis": along.array_axis, "keepdims": True, "dtype": native}

    def add_layers() -> None:
        source[...] += target.sum(**layers)

    def add_extrapolated() -> None:
        distances = _by_layer(xp, array, along, abs(np.array(along.depths)))
        weighted = (target * distances).sum(**layers)
        source[...] += target.sum(**layers) + weighted
        array[fill.inner] -= weighted

    if kind in ("edge", "gradient"):
        return [add_layers, clear]
    if kind == "extrapolate":
        return [add_extrapolated, clear]
    combine = xp.subtract if kind in ("antireflect", "antisymmetric") else xp.add
    return [partial(combine, source, target, source), clear]
