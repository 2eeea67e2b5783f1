"""One kernel launch that fills the halo at the walls of all fields of a plan; `halox/exchange/kernels/walls.cu`.

`plan_fill` makes the launch's table on the host. It declines a few boundaries, which then take one launch per wall and
operation: functions, phases, numbers that the kernel lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halox.decomposition import AxisFill, Boundary, WallRegion, Walls
from halox.exchange.wall_slabs import twice_mirror
from halox.packing.refine import Level
from halox.packing.strided_plan import MAX_LEVELS, MAX_WORDS, StridedPlan, StridedRow, plan_rows
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.casting import cast
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import multiprocessors
from halox.runtime.gpu.launch import Parameter, PreparedLaunch
from halox.runtime.gpu.memory import uploaded

MOST_ARRAYS, MOST_RULES, INLINE_RULES, NO_LEVEL = 16, 4, 8, 7

_INLINE_BYTES = (
    3488  # of regions: the parameters of a launch have 4 KiB, also for the addresses and the rules
)

KINDS = {
    "constant": 0,
    **dict.fromkeys(("periodic", "edge", "reflect", "symmetric"), 1),
    **dict.fromkeys(("antireflect", "antisymmetric"), 2),
    "gradient": 3,
    "extrapolate": 4,
}
_AROUND = 5  # mirror images on the other side of a number other than 0

_TYPES = {
    **{"f4": ("float", 0), "f8": ("double", 0), "c8": ("float", 1), "c16": ("double", 1)},
    **{"i1": ("signed char", 0), "i2": ("short", 0), "i4": ("int", 0), "i8": ("long long", 0)},
    **{"u1": ("unsigned char", 0), "u2": ("unsigned short", 0), "u4": ("unsigned int", 0)},
    **{"u8": ("unsigned long long", 0), "b1": ("unsigned char", 0)},
}

EXACT = ("-fmad=false",)
"""Options of the compiler: a fused multiply-add would round other than NumPy on the host."""

RULE = np.dtype([("inner", "i8"), ("number", "u1", 16), ("depth", "i8")])


@dataclass(frozen=True)
class FillPlan:
    """A launch: its regions and rules, and the numbers of the arrays to which rules refer.

    A launch that does not fill halos changes the signs of halos in place.
    """

    planned: StridedPlan
    rules: Array
    numbers: tuple[int, ...]
    defines: tuple[tuple[str, str], ...]
    fills: bool

    def parameter(self, pointers: Sequence[int], rules: int = 0) -> bytes:
        """Return the kernel's first parameter: addresses of the arrays, and the rules or their address."""
        inline, regions = self.planned.inline, self.planned.regions
        first_chunks = np.full((inline + 1) // 2 * 2, -1, "i4")
        addresses = np.zeros(1 if len(self.numbers) == 1 else MOST_ARRAYS, np.uint64)
        addresses[: len(self.numbers)] = [pointers[number] for number in self.numbers]
        behind = np.array([rules], np.uint64)
        if inline:
            first_chunks[: len(regions)] = regions["first_chunk"]
            behind = np.zeros(INLINE_RULES, RULE)
            behind[: len(self.rules)] = self.rules
        return first_chunks.tobytes() + addresses.tobytes() + behind.tobytes()


def plan_fill(
    fields: Sequence[tuple[int, Walls]],
    described: Sequence[Described],
    sms: int,
    *,
    wraps: bool = False,
) -> list[FillPlan] | None:
    """Return the launches that fill the walls of fields, given by number: one for up to 16 fields of a dtype.

    Signs of connections take another launch before. With ``wraps`` the launches also fill the halo on periodic axes if
    this rank owns all cells along them. None if the kernel cannot fill a halo.
    """
    # Launches by whether they fill, and the dtype.
    by_type: dict[tuple[bool, DType], list[tuple[int, Sequence[WallRegion]]]] = {}
    for number, walls in fields:
        regions = walls.regions(wraps=wraps)
        if not all(map(_is_known, regions)) or not _sources_are_inside(walls, regions):
            return None
        for fills, some in ((False, _negations(walls)), (True, regions)):
            if some:
                key = fills, described[number].dtype
                by_type.setdefault(key, []).append((number, some))
    plans = []
    for (fills, dtype), of_type in sorted(by_type.items(), key=lambda item: item[0][0]):
        for first in range(0, len(of_type), MOST_ARRAYS):
            plan = _plan(dtype, of_type[first : first + MOST_ARRAYS], described, sms, fills)
            if plan is None:
                return None
            plans.append(plan)
    return [plan for plan in plans if plan.planned.chunks]


def _negations(walls: Walls) -> tuple[WallRegion, ...]:
    """Return regions whose points are replaced by their opposites."""
    nowhere, first = slice(0, 0), slice(0, 1)
    minus = AxisFill(Boundary("antisymmetric"), -1, -1, "low", nowhere, first, first, (0,))
    return tuple(WallRegion(box, (minus,)) for box in walls.negated)


def _plan(
    dtype: DType,
    fields: Sequence[tuple[int, Sequence[WallRegion]]],
    described: Sequence[Described],
    sms: int,
    fills: bool,
) -> FillPlan | None:
    types = _TYPES.get(dtype.str[1:]) if dtype.isnative else None
    if types is None or dtype.names is not None:
        return None
    rows, codes, rules = [], [], []
    for place, (number, regions) in enumerate(fields):
        array, numbers = described[number], dict[int, int]()
        for region in regions:
            row, levels = _row(region, array)
            if row.words > MAX_WORDS or len(row.levels) > MAX_LEVELS:
                return None
            if not row.words:
                continue
            for fill in region.along:
                if id(fill) not in numbers:  # regions of the same components share them
                    rule, kind = _rule(fill, array)
                    rules.append(rule)
                    numbers[id(fill)] = len(rules) << 6 | kind << 3
            pairs = zip(region.along, levels, strict=True)
            codes.append((place, *(numbers[id(fill)] | level for fill, level in pairs)))
            rows.append(row)
    is_signed = dtype.kind not in "bu"
    if len(rules) >= 1 << 10 or not all(
        is_signed or code >> 3 & 7 <= KINDS["edge"] for _, *of_region in codes for code in of_region
    ):
        return None
    table = np.array(rules, RULE)
    inline = _INLINE_BYTES if len(table) <= INLINE_RULES else 0
    planned = plan_rows(rows, sms=sms, table_bytes=inline)
    for region, (place, *of_region) in zip(planned.regions, codes, strict=True):
        first, second, third, fourth = (*of_region, 0, 0, 0)[:MOST_RULES]
        region["level"][0]["extent"] = place
        region["word_bytes"], region["run_bytes"] = first | second << 16, third | fourth << 16
    most = max(len(region.along) for _, regions in fields for region in regions)
    numbers_of = tuple(number for number, _ in fields)
    defines = (
        ("TYPE", types[0]),
        ("COMPLEX", str(types[1])),
        ("RULES", "3" if most < 4 else "4"),
        ("ARRAYS", "1" if len(fields) == 1 else str(MOST_ARRAYS)),
    )
    return FillPlan(planned, table, numbers_of, (*planned.defines, *defines), fills)


def _is_known(region: WallRegion) -> bool:
    return len(region.along) <= MOST_RULES and all(a.boundary.kind in KINDS for a in region.along)


def _layers(fill: AxisFill) -> set[int]:
    kind = KINDS[fill.boundary.kind]
    if kind == KINDS["constant"]:
        return set()
    read = {fill.source.start + n * fill.step for n in range(len(fill.depths))}
    return read | ({fill.inner.start} if kind == KINDS["extrapolate"] else set())


def _sources_are_inside(walls: Walls, regions: Sequence[WallRegion]) -> bool:
    """Whether no fill reads a layer that another one writes, as the wall of a staggered field in a thin block."""
    first, stop = len(walls.components[0]), len(walls.components[0]) + len(walls.axes)
    by_component: dict[str, dict[int, AxisFill]] = {}
    for region in regions:
        fills = by_component.setdefault(str((region.box[:first], region.box[stop:])), {})
        fills.update({id(one): one for one in region.along})
    return all(
        fill.array_axis != other.array_axis
        or _layers(fill).isdisjoint(range(other.target.start, other.target.stop))
        for fills in by_component.values()
        for fill in fills.values()
        for other in fills.values()
    )


def _row(region: WallRegion, array: Described) -> tuple[StridedRow, list[int]]:
    """Return a region's loops, and the level of the layers of each of its fills."""
    across = {one.array_axis: one for one in region.along}
    source, target, loops = 0, 0, []
    for axis, (cut, extent, stride) in enumerate(
        zip(region.box, array.shape, array.strides, strict=True)
    ):
        start, stop, _ = cut.indices(extent)
        fill = across.get(axis)
        target += start * stride
        source += (start if fill is None else fill.source.start) * stride
        if stop - start != 1:
            step = stride if fill is None else fill.step * stride
            loops.append((axis, Level(max(stop - start, 0), step, stride)))
    # The axis with the smallest stride last, so that neighbouring threads write neighbouring addresses.
    loops.sort(key=lambda loop: -abs(loop[1].target_stride))
    levels: list[tuple[int, Level]] = []
    for axis, level in loops:
        outer_axis, outer = levels[-1] if levels else (axis, level)
        is_joined = axis not in across and outer_axis not in across
        if levels and is_joined and outer.target_stride == level.steps * level.target_stride:
            levels[-1] = axis, level._replace(steps=outer.steps * level.steps)
        else:
            levels.append((axis, level))
    by_axis = {axis: number for number, (axis, _) in enumerate(reversed(levels))}
    row = StridedRow(source, target, array.dtype.itemsize, tuple(level for _, level in levels))
    return row, [by_axis.get(fill.array_axis, NO_LEVEL) for fill in region.along]


def _rule(fill: AxisFill, array: Described) -> tuple[tuple[int, Array, int], int]:
    boundary, kind = fill.boundary, KINDS[fill.boundary.kind]
    value = np.zeros(16, "u1")
    if boundary.number is not None:
        number = cast(boundary.number, array.dtype)
        if boundary.kind in ("antireflect", "antisymmetric"):
            kind, number = _AROUND, twice_mirror(boundary, array.dtype)
        number = np.atleast_1d(number)
        value[: number.nbytes] = number.view("u1")
    inner = (fill.inner.start - fill.source.start) * array.strides[fill.array_axis]
    return (inner, value, fill.depths[0]), kind


class FillLaunches:
    """The launches of some plans on a GPU; large tables are in its memory."""

    def __init__(self, plans: Sequence[FillPlan], device: int) -> None:
        self._plans, self._device = plans, device
        self._kernels = [
            kernel("walls", "fill_walls", device, plan.defines, EXACT) for plan in plans
        ]
        self._tables = [
            None
            if plan.planned.inline
            else (uploaded(plan.planned.table, device), uploaded(plan.rules.view("u1"), device))
            for plan in plans
        ]

    def on(self, pointers: Sequence[int]) -> list[tuple[PreparedLaunch, bool]]:
        """Return the launches on arrays at these addresses, by number in the plan, and whether they fill halos."""
        launches = []
        for plan, function, memory in zip(self._plans, self._kernels, self._tables, strict=True):
            planned, table, rules = plan.planned, plan.planned.table, 0
            if memory is not None:
                pointer, rules = memory[0].pointer, memory[1].pointer
                table = np.array([pointer, pointer + planned.regions.nbytes], np.uint64)
            structs = (plan.parameter(pointers, rules), table.tobytes())
            args: list[Parameter] = [
                *((ctypes.c_char * len(one)).from_buffer_copy(one) for one in structs),
                ctypes.c_uint32(planned.chunk_words),
            ]
            launch = PreparedLaunch(
                function,
                planned.blocks,
                planned.threads,
                args,
                device=self._device,
                dependent=True,
            )
            launches.append((launch, plan.fills))
        return launches


def launches_of(
    fields: Sequence[tuple[int, Walls]],
    described: Sequence[Described],
    device: int,
    *,
    wraps: bool,
) -> tuple[FillLaunches | None, bool]:
    """Return launches of `plan_fill`, or None, and whether they also fill the halo on periodic axes, as asked."""
    sms = multiprocessors(device)
    plans = plan_fill(fields, described, sms, wraps=True) if wraps else None
    if plans is not None:
        return FillLaunches(plans, device), True
    plans = plan_fill(fields, described, sms)
    return None if plans is None else FillLaunches(plans, device), False
