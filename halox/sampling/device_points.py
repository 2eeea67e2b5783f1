"""Values at points on a GPU: one launch of `halox/sampling/kernels/points.cu`."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import FieldLayout
from halox.errors import FieldError, StateError
from halox.reductions.device.field_plans import check_aligned
from halox.reductions.operations import ELEMENTS
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.streams import is_capturing
from halox.sampling.weights import Weights

_THREADS = 128


class PointTables(NamedTuple):
    """Arguments of the kernel, and its ``#define``s."""

    starts: Array
    targets: Array
    sources: Array
    weights: Array
    defines: tuple[tuple[str, str], ...]


def byte_places(layout: FieldLayout, dtype: DType, strides: tuple[int, ...]) -> tuple[Array, Array]:
    """Return a field's strides along the grid axes, and the places of a cell's numbers: of all components and parts."""
    spec, along = layout.spec, layout.spec.grid_slice
    across = strides[: along.start] + strides[along.stop :]
    extents = spec.components_before + spec.components_after
    components = np.tensordot(np.array(across, "i8"), np.indices(extents, "i8"), 1).reshape(-1, 1)
    parts = np.arange(0, dtype.itemsize, dtype.itemsize // (2 if dtype.kind == "c" else 1))
    return np.array(strides[along], "i8"), (components + parts).reshape(-1)


def plan_points(
    layout: FieldLayout, field: Described, weights: Weights, points: int, *, add: bool
) -> PointTables:
    """Return the arguments that read a field at all points, or add to its cells; values of points are contiguous."""
    dtype = field.dtype
    size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    element = ELEMENTS.get(f"{dtype.kind.replace('c', 'f')}{size}")
    if element is None or not dtype.isnative:
        raise FieldError(
            f"field: dtype {dtype} has no values at points on a GPU; use numbers of 1 to 8 bytes (complex: 16)"
        )
    check_aligned(field)
    along, numbers = byte_places(layout, dtype, field.strides)
    in_field = numbers.reshape(-1, 1)
    in_values = size * np.arange(len(in_field)).reshape(-1, 1)
    counts, rows = np.diff(weights.starts), weights.rows @ along if add else np.arange(points)
    if not add:  # rows of other ranks' points are empty, and set to zero
        counts = np.zeros(points, "i8")
        counts[weights.rows] = np.diff(weights.starts)
    columns = weights.columns if add else weights.columns @ along
    point_bytes = size * len(in_field)
    targets = in_field + rows if add else in_values + point_bytes * rows
    sources = in_values + point_bytes * columns if add else in_field + columns
    defines = {
        "TYPE": element,
        "SUM": "double" if dtype.kind in "fc" else element,
        "WEIGHTED": str(int((weights.values != 1).any())),
        "ADD": str(int(add)),
    }
    return PointTables(
        np.append(0, np.cumsum(np.tile(counts, len(in_field)))),
        targets.reshape(-1),
        sources.reshape(-1),
        np.tile(weights.values, len(in_field)),
        tuple(defines.items()),
    )


class PointLaunch:
    """The kernel with its tables in the memory of a GPU."""

    def __init__(self, tables: PointTables, device: int) -> None:
        if is_capturing():
            raise StateError(
                "the current stream is being captured, and this is the first call of the points with a field of this "
                "layout and dtype; make it once before the capture"
            )
        cuda, rows = cupy().cuda, len(tables.targets)
        with cuda.Device(device):
            self._tables = [cupy().asarray(np.ascontiguousarray(each)) for each in tables[:4]]
            cuda.Device(device).synchronize()  # the copies ran on another stream, perhaps
        self._launch: Any = None
        if rows:
            addresses = [0, 0, *(each.data.ptr for each in self._tables)]
            self._launch = PreparedLaunch(
                kernel("points", "points", device, tables.defines),
                -(-rows // _THREADS),
                _THREADS,
                [*map(ctypes.c_uint64, addresses), ctypes.c_uint32(rows)],
                device=device,
            )

    def __call__(self, target: int, source: int, stream: int) -> None:
        """Launch with the addresses of the target and the source; does not block."""
        if self._launch is not None:
            self._launch.launch_at(stream, target, source)
