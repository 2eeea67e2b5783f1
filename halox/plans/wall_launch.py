"""One kernel launch that fills the halo at the walls of all fields of a plan; `halox/plans/kernels/walls.cu`.

`plan_fill` makes the launch's table on the host. It declines a few boundaries, which then take one launch per wall and
operation: functions, phases, numbers that the kernel lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from halox.decomposition import AxisFill, Boundary, WallRegion, Walls
from halox.packing.refine import Level
from halox.packing.strided_plan import (
    LEVEL,
    MAX_LEVELS,
    MAX_WORDS,
    StridedPlan,
    StridedRow,
    plan_rows,
)
from halox.plans.wall_operations import twice_mirror
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.casting import cast
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import multiprocessors
from halox.runtime.gpu.launch import Parameter, PreparedLaunch
from halox.runtime.gpu.memory import uploaded

MOST_ARRAYS, INLINE_RULES, NO_LEVEL = 16, 8, 7

USES = {3: 3, 4: 11}
"""Room for the rules of a region, by their largest number: levels begin at a multiple of 16 bytes."""

_INLINE_BYTES = 3488
"""Of regions: the parameters of a launch have 4 KiB, also for the addresses and the rules."""

KINDS = {
    "constant": 1,
    **dict.fromkeys(("periodic", "edge", "reflect", "symmetric"), 2),
    **dict.fromkeys(("antireflect", "antisymmetric"), 3),
    "gradient": 4,
    "extrapolate": 5,
}
_AROUND = 6  # mirror images on the other side of a number other than 0

_TYPES = {
    **{"f4": ("float", 0), "f8": ("double", 0), "c8": ("float", 1), "c16": ("double", 1)},
    **{"i1": ("signed char", 0), "i2": ("short", 0), "i4": ("int", 0), "i8": ("long long", 0)},
    **{"u1": ("unsigned char", 0), "u2": ("unsigned short", 0), "u4": ("unsigned int", 0)},
    **{"u8": ("unsigned long long", 0), "b1": ("unsigned char", 0)},
}

EXACT = ("-fmad=false",)
"""Options of the compiler: a fused multiply-add would round other than NumPy on the host."""

RULE = np.dtype([("inner", "i8"), ("number", "V16"), ("depth", "i8")])


def wall_region_dtype(levels: int, uses: int) -> np.dtype[np.void]:
    """Return the layout of the kernel's regions."""
    head = [("source", "u8"), ("target", "u8"), ("words", "u4"), ("first_chunk", "u4")]
    return np.dtype([*head, ("array", "u2"), ("use", "u2", uses), ("level", LEVEL, levels)])


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
        kinds = {fill.boundary.kind for region in regions for fill in region.along}
        if not kinds <= KINDS.keys() or not walls.sources_are_inside(wraps=wraps):
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


def _negations(walls: Walls) -> list[WallRegion]:
    """Return regions whose points are replaced by their opposites, across no axis."""
    minus = AxisFill(Boundary("antisymmetric"), -1, -1, "low", 0, slice(0), ())
    return [WallRegion(box, (minus,)) for box in walls.negated]


def _plan(
    dtype: DType,
    fields: Sequence[tuple[int, Sequence[WallRegion]]],
    described: Sequence[Described],
    sms: int,
    fills: bool,
) -> FillPlan | None:
    types = _TYPES.get(dtype.str[1:]) if dtype.isnative else None
    if types is None:
        return None
    rows, uses, rules = [], [], dict[tuple[int, bytes, int], int]()
    for place, (number, regions) in enumerate(fields):
        for region in regions:
            row, levels = _row(region, described[number])
            if row.words > MAX_WORDS or len(row.levels) > MAX_LEVELS:
                return None
            if not row.words:
                continue
            kinds = []
            for fill, level in zip(region.along, levels, strict=True):
                kind, rule = _rule(fill, described[number])
                index = 0 if rule is None else rules.setdefault(rule, len(rules))
                kinds.append(level | kind << 3 | index << 6)
            uses.append((place, kinds))
            rows.append(row)
    if len(rules) > 1 << 10:
        return None
    most = 3 if max(len(kinds) for _, kinds in uses) < 4 else 4
    inline = _INLINE_BYTES if len(rules) <= INLINE_RULES else 0
    planned = plan_rows(rows, sms=sms, table_bytes=inline)
    table = np.zeros(len(rows), wall_region_dtype(planned.levels, USES[most]))
    for name in ("source", "target", "words", "first_chunk", "level"):
        table[name] = planned.regions[name]
    for entry, (place, kinds) in zip(table, uses, strict=True):
        entry["array"], entry["use"][: len(kinds)] = place, kinds
    planned = replace(planned, regions=table)
    numbers = tuple(number for number, _ in fields)
    defines = (
        ("TYPE", types[0]),
        ("COMPLEX", str(types[1])),
        ("RULES", str(most)),
        ("ARRAYS", "1" if len(fields) == 1 else str(MOST_ARRAYS)),
    )
    return FillPlan(
        planned,
        np.array([*rules] or [(0, b"", 0)], RULE),
        numbers,
        (*planned.defines, *defines),
        fills,
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
        if fill is None:
            source += start * stride
        elif fill.sources:
            source += fill.sources[0] * stride
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


def _rule(fill: AxisFill, array: Described) -> tuple[int, tuple[int, bytes, int] | None]:
    """Return the kind of a fill, and its numbers, if it has any."""
    boundary, dtype = fill.boundary, array.dtype
    kind = KINDS[boundary.kind]
    if boundary.kind in ("antireflect", "antisymmetric") and boundary.number is not None:
        return _AROUND, (0, twice_mirror(boundary, dtype).tobytes(), 0)
    if boundary.kind == "constant":
        return kind, (0, cast(boundary.number, dtype).tobytes(), 0)
    if boundary.kind == "gradient":
        return kind, (0, cast(boundary.number, dtype).tobytes(), fill.depths[0])
    if boundary.kind == "extrapolate":
        inner = (fill.inner - fill.edge) * array.strides[fill.array_axis]
        return kind, (inner, b"", fill.depths[0])
    return kind, None


class FillLaunch:
    """The launch of a plan on a GPU; a large table is in its memory.

    ``fills`` says whether it fills halos.
    """

    def __init__(self, plan: FillPlan, device: int) -> None:
        self._plan, self._device, self.fills = plan, device, plan.fills
        self._kernel = kernel("walls", "fill_walls", device, plan.defines, EXACT)
        self._memory = (
            ()
            if plan.planned.inline
            else (uploaded(plan.planned.table, device), uploaded(plan.rules.view("u1"), device))
        )

    def on(self, pointers: Sequence[int]) -> PreparedLaunch:
        """Return the launch on arrays at these addresses, by number in the plan."""
        planned, table, rules = self._plan.planned, self._plan.planned.table, 0
        if self._memory:
            pointer, rules = (memory.pointer for memory in self._memory)
            table = np.array([pointer, pointer + planned.regions.nbytes], np.uint64)
        structs = (self._plan.parameter(pointers, rules), table.tobytes())
        args: list[Parameter] = [
            *((ctypes.c_char * len(one)).from_buffer_copy(one) for one in structs),
            ctypes.c_uint32(planned.chunk_words),
        ]
        return PreparedLaunch(
            self._kernel,
            planned.blocks,
            planned.threads,
            args,
            device=self._device,
            dependent=True,
        )


def launches_of(
    fields: Sequence[tuple[int, Walls]],
    described: Sequence[Described],
    device: int,
    *,
    wraps: bool,
) -> tuple[list[FillLaunch] | None, bool]:
    """Return launches of `plan_fill`, or None, and whether they also fill the halo on periodic axes, as asked."""
    sms = multiprocessors(device)
    for with_periodic in (True, False) if wraps else (False,):
        plans = plan_fill(fields, described, sms, wraps=with_periodic)
        if plans is not None:
            return [FillLaunch(plan, device) for plan in plans], with_periodic
    return None, False
