"""One kernel launch that fills the halo at the walls of all fields of a plan; `halox/exchange/kernels/walls.cu`.

`plan_fill` makes the launch's table on the host. It declines a few boundaries, which then take one launch per wall and
operation: functions, phases, numbers that the kernel lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from halox.decomposition import AxisFill, Boundary, WallRegion, Walls
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.casting import cast
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch

MOST_ARRAYS, MOST_AXES, MOST_RULES, THREADS = 16, 8, 4, 256

_MOST_BLOCKS, _MOST_POINTS = 1024, 1 << 31  # of one region

KINDS = {
    "constant": 0,
    **dict.fromkeys(("edge", "reflect", "symmetric"), 1),
    **dict.fromkeys(("antireflect", "antisymmetric"), 2),
    "gradient": 3,
    "extrapolate": 4,
}
_AROUND = 5  # mirror images on the other side of a number other than 0

_TYPES = {
    **{
        "f4": ("float", 0, 1),
        "f8": ("double", 0, 1),
        "c8": ("float", 1, 1),
        "c16": ("double", 1, 1),
    },
    **{"i1": ("signed char", 0, 1), "i2": ("short", 0, 1), "i4": ("int", 0, 1)},
    **{"i8": ("long long", 0, 1), "u1": ("unsigned char", 0, 0), "u2": ("unsigned short", 0, 0)},
    **{
        "u4": ("unsigned int", 0, 0),
        "u8": ("unsigned long long", 0, 0),
        "b1": ("unsigned char", 0, 0),
    },
}

RULE = np.dtype(
    [(name, "i8") for name in ("axis", "kind", "source", "step", "inner", "depth")]
    + [("number", "u1", 16)]
)
REGION = np.dtype(
    [(name, "i8") for name in ("array", "first_block", "base", "count", "axes", "rules")]
    + [("extents", "i8", MOST_AXES), ("strides", "i8", MOST_AXES), ("rule", RULE, MOST_RULES)]
)


@dataclass(frozen=True)
class FillPlan:
    """A launch: the table of its regions, its blocks, and the numbers of the arrays to which regions refer."""

    regions: Array
    blocks: int
    numbers: tuple[int, ...]
    defines: tuple[tuple[str, str], ...]


def plan_fill(
    fields: Sequence[tuple[int, Walls]], described: Sequence[Described]
) -> list[FillPlan] | None:
    """Return the launches that fill the walls of fields, given by number: one for up to 16 fields of a dtype.

    Signs of connections take another launch before. None if the kernel cannot fill a wall.
    """
    by_type: dict[DType, list[tuple[int, Walls]]] = {}
    for number, walls in fields:
        by_type.setdefault(described[number].dtype, []).append((number, walls))
    plans = []
    for dtype, of_type in by_type.items():
        for first in range(0, len(of_type), MOST_ARRAYS):
            some = of_type[first : first + MOST_ARRAYS]
            for regions_of in (_negations, Walls.regions):
                plan = _plan(dtype, some, described, regions_of)
                if plan is None:
                    return None
                if plan.blocks:
                    plans.append(plan)
    return plans


def _negations(walls: Walls) -> tuple[WallRegion, ...]:
    """Return regions whose points are replaced by their opposites."""
    nowhere, first = slice(0, 0), slice(0, 1)
    minus = AxisFill(Boundary("antisymmetric"), -1, -1, "low", nowhere, first, first, (0,))
    return tuple(WallRegion(box, (minus,)) for box in walls.negated)


def _plan(
    dtype: DType,
    fields: Sequence[tuple[int, Walls]],
    described: Sequence[Described],
    regions_of: Callable[[Walls], tuple[WallRegion, ...]],
) -> FillPlan | None:
    types = _TYPES.get(dtype.str[1:]) if dtype.isnative else None
    if types is None or dtype.names is not None:
        return None
    c_type, is_complex, is_signed = types
    rows, blocks = [], 0
    for place, (number, walls) in enumerate(fields):
        array = described[number]
        regions = regions_of(walls)
        if len(array.shape) > MOST_AXES or not all(map(_is_known, regions)):
            return None
        if not _sources_are_inside(regions):
            return None
        for region in regions:
            row = _row(region, array)
            if row["count"] > _MOST_POINTS:
                return None
            if row["count"]:
                row["array"], row["first_block"] = place, blocks
                blocks += min(-(-int(row["count"]) // THREADS), _MOST_BLOCKS)
                rows.append(row)
    defines = (("TYPE", c_type), ("COMPLEX", str(is_complex)), ("SIGNED", str(is_signed)))
    table = np.array(rows, REGION)
    if not is_signed and np.any(table["rule"]["kind"] > KINDS["edge"]):
        return None
    return FillPlan(table, blocks, tuple(number for number, _ in fields), defines)


def _is_known(region: WallRegion) -> bool:
    return len(region.along) <= MOST_RULES and all(a.boundary.kind in KINDS for a in region.along)


def _layers(fill: AxisFill) -> set[int]:
    """Return the layers along the axis that a fill reads."""
    kind = KINDS[fill.boundary.kind]
    if kind == KINDS["constant"]:
        return set()
    layers = range(len(fill.depths)) if fill.boundary.mirrors else (0,)
    read = {fill.source.start - n for n in layers}
    return read | ({fill.inner.start} if kind == KINDS["extrapolate"] else set())


def _sources_are_inside(regions: Sequence[WallRegion]) -> bool:
    """Whether no fill reads a layer that another one writes, as the wall of a staggered field in a thin block."""
    fills = {(one.array_axis, one.side): one for region in regions for one in region.along}
    for (axis, _), fill in fills.items():
        for (other_axis, _), other in fills.items():
            written = range(other.target.start, other.target.stop)
            if axis == other_axis and not _layers(fill).isdisjoint(written):
                return False
    return True


def _row(region: WallRegion, array: Described) -> Array:
    """Return a region of the table."""
    row = np.zeros((), REGION)
    starts, extents = [], []
    for cut, extent in zip(region.box, array.shape, strict=True):
        start, stop, _ = cut.indices(extent)
        starts.append(start)
        extents.append(max(stop - start, 0))
    # The axis with the smallest stride last, so that neighbouring threads write neighbouring addresses.
    axes = [axis for axis, extent in enumerate(extents) if extent != 1]
    order = sorted(axes, key=lambda axis: -abs(array.strides[axis]))
    row["base"] = sum(at * stride for at, stride in zip(starts, array.strides, strict=True))
    row["count"], row["axes"], row["rules"] = prod(extents), len(order), len(region.along)
    row["extents"][: len(order)] = [extents[axis] for axis in order]
    row["strides"][: len(order)] = [array.strides[axis] for axis in order]
    for rule, fill in zip(row["rule"], region.along, strict=False):
        stride, first = array.strides[fill.array_axis], fill.target.start
        rule["axis"] = order.index(fill.array_axis) if fill.array_axis in order else -1
        boundary, kind = fill.boundary, KINDS[fill.boundary.kind]
        is_around = kind == KINDS["antireflect"] and boundary.number is not None
        rule["kind"] = _AROUND if is_around else kind
        rule["source"] = (fill.source.start - first) * stride
        rule["step"] = -stride if fill.boundary.mirrors else 0
        rule["inner"] = (fill.inner.start - first) * stride
        rule["depth"] = fill.depths[0]
        if boundary.number is not None:
            number = np.atleast_1d(cast(boundary.number, array.dtype))
            value = (2 * number).astype(array.dtype) if is_around else number
            rule["number"][: number.nbytes] = value.view("u1")
    return row


class FillLaunches:
    """The launches of some plans on a GPU; their tables are in its memory."""

    def __init__(self, plans: Sequence[FillPlan], device: int) -> None:
        self._plans, self._device = plans, device
        self._kernels = [kernel("walls", "fill_walls", device, plan.defines) for plan in plans]
        with cupy().cuda.Device(device):
            self._tables = [cupy().asarray(plan.regions.view("u1")) for plan in plans]
            cupy().cuda.Device(device).synchronize()  # the copies ran on another stream, perhaps

    def on(self, pointers: Sequence[int]) -> list[PreparedLaunch]:
        """Return the launches on arrays at these addresses, by their number in the plan."""
        launches = []
        for plan, function, table in zip(self._plans, self._kernels, self._tables, strict=True):
            addresses = np.zeros(MOST_ARRAYS, np.uint64)
            addresses[: len(plan.numbers)] = [pointers[number] for number in plan.numbers]
            launches.append(
                PreparedLaunch(
                    function,
                    plan.blocks,
                    THREADS,
                    [
                        (ctypes.c_char * addresses.nbytes).from_buffer_copy(addresses.tobytes()),
                        ctypes.c_uint64(table.data.ptr),
                        ctypes.c_uint32(len(plan.regions)),
                    ],
                    device=self._device,
                )
            )
        return launches
