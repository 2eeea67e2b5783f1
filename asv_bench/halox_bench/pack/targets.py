"""Figures of the GPU datatype engine with their targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import halox
from halox.errors import HaloxError
from halox_bench.common.options import KIB, MIB
from halox_bench.common.rig import Rig, copy
from halox_bench.common.targets import Figure, Groups, figure
from halox_bench.common.timing import Timed
from halox_bench.pack import baselines, contention, synthetic
from halox_bench.pack.cases import select
from halox_bench.pack.on_device import make_packer
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed

REPEATS = 9

OF_COPY = (
    *((block, size, least) for block, least in ((KIB, 0.97), (128, 0.90)) for size in (64, 256)),
)
"""Block, MiB, and least share of a device copy's speed."""

TRIANGLE, TRIANGLE_OF_COPY = "lower_triangle/8192", 0.92
X_FACE, X_FACE_OF_BOUND = "face_x/512", 0.80

OF_MEMCPY_2D = (
    *((8, 5.0, "device"), (128, 1.2, "device"), (4 * KIB, 1.0, "device"), (8, 10.0, "host")),
)
"""Block, least speed over cudaMemcpy2D, and memory of the packed bytes."""

OF_STRIDED = ((64 * KIB, 1.10), (MIB, 1.02))
"""Payload, and most time of the better generic packer over ``strided``."""

LISTS, LISTS_OF_BOUND = ("dense-64MiB", "sparse-64MiB"), 0.70

OF_LINK = (
    ("vector/128B-64MiB", "vector, blocks of 128 B", 0.93),
    ("lower_triangle/4096", "indexed (lower triangle, N = 4096)", 0.88),
    ("random_indexed/dense-64MiB", "indexed (lists of random elements)", 0.88),
)
"""Case, its description, and least share of the host link's speed."""

HACC, OF_FIELD_COPIES = ("HACC_vblock/4Ki", "HACC_vblock/32Ki", "HACC_particles/32Ki"), 1.5

CACHED_PACK_US = 7.0
HALF_BUSY = 0.05

_SECTORS = "us for 32-byte sectors and payload at the speed of a large copy"


def groups() -> Groups:
    """Return the groups of figures on the first GPU."""
    return Targets(Rig(0, REPEATS)).groups()


class Targets:
    """The groups of figures, on one rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def groups(self) -> Groups:
        """Return the groups by name, in the order of their measurement."""
        found: dict[str, Callable[[], Iterator[Figure]]] = {
            "vector": self.vectors,
            "lower triangle": self.triangle,
            "x-face": self.x_face,
            "cudaMemcpy2D": self.against_memcpy_2d,
            "generic packers": self.generic,
            "random lists": self.random_lists,
            "zero-copy": self.zero_copy,
            "HACC": self.hacc,
            "host time": self.host_time,
            "half the GPU busy": self.half_busy,
        }
        return found

    def vectors(self) -> Iterator[Figure]:
        """Measure vectors beside a device copy."""
        for block, size, least in OF_COPY:
            case = synthetic.runs("vector", block, 2 * block, size * MIB)
            yield self._of_copy(case, f"blocks of {block} B, {size} MiB", least)

    def triangle(self) -> Iterator[Figure]:
        """Measure a triangle beside a device copy."""
        yield self._of_copy(_case(TRIANGLE), "N = 8192 float64", TRIANGLE_OF_COPY)

    def x_face(self) -> Iterator[Figure]:
        """Measure an x-face beside the least time for its sectors."""
        empty = self._rig.clock.empty()
        placed = Placed(self._rig, _case(X_FACE))
        times = self._packed(placed, "auto", "device")
        bound = placed.bound_us("device")
        for cache, timed in times.items():
            for kind, us, launch in (
                ("in a stream", timed.us, empty.us),
                ("in a graph", timed.graph_us, empty.graph_us),
            ):
                if us is None or launch is None:
                    continue
                yield figure(
                    f"x-face of 512^3 float64, {cache}, {kind}: share of the bound in sectors",
                    bound / us,
                    "share",
                    X_FACE_OF_BOUND,
                    bound,
                    _SECTORS,
                    us=round(us, 3),
                    of_bound_or_launch=round(max(bound, launch) / us, 4),
                    empty_kernel_us=round(launch, 3),
                )
        placed.close()

    def against_memcpy_2d(self) -> Iterator[Figure]:
        """Measure vectors beside cudaMemcpy2D."""
        for block, least, destination in OF_MEMCPY_2D:
            for payload in (MIB, 64 * MIB):
                placed = Placed(self._rig, synthetic.runs("vector", block, 2 * block, payload))
                ours = _last(self._packed(placed, "auto", destination))
                theirs = self._by_hand(placed, baselines.MEMCPY_2D, destination)
                placed.close()
                what = f"vector, blocks of {block} B, {payload // MIB} MiB to {destination}"
                name = f"{what}: times as fast as cudaMemcpy2D"
                yield _faster(name, "x", least, ours, theirs.us, "us of cudaMemcpy2D")

    def generic(self) -> Iterator[Figure]:
        """Measure the better of the packers for any datatype over the packer for strides."""
        for payload, most in OF_STRIDED:
            for block in (8, 128):
                placed = Placed(self._rig, synthetic.runs("vector", block, 2 * block, payload))
                strided = _first(self._packed(placed, "strided", "device"))
                times = {one: self._or_refused(placed, one) for one in ("workunits", "traversal")}
                placed.close()
                better = min(times, key=lambda method: times[method].us)
                yield figure(
                    f"vector, blocks of {block} B, {payload // KIB} KiB: the better generic packer "
                    "over strided",
                    times[better].us / strided.us,
                    "x its time",
                    most,
                    strided.us,
                    "us of strided",
                    at_most=True,
                    method=better,
                    in_a_graph=_ratio(times[better].graph_us, strided.graph_us),
                )

    def _or_refused(self, placed: Placed, method: str) -> Timed:
        try:
            return _first(self._packed(placed, method, "device"))
        except HaloxError as error:
            return Timed(math.inf, note=str(error))

    def random_lists(self) -> Iterator[Figure]:
        """Measure lists of random elements beside the least time for their sectors."""
        for name in LISTS:
            placed = Placed(self._rig, _case(f"random_indexed/{name}"))
            timed = _last(self._packed(placed, "auto", "device"))
            bound = placed.bound_us("device")
            placed.close()
            what = f"lists of 1024 random 8-byte elements, {name}: share of the bound in sectors"
            note = {"method": timed.note}
            yield _faster(what, "share", LISTS_OF_BOUND, timed, bound, _SECTORS, **note)

    def zero_copy(self) -> Iterator[Figure]:
        """Measure packing to the host beside the speed of the link."""
        for pattern, what, least in OF_LINK:
            placed = Placed(self._rig, _case(pattern))
            timed = _last(self._packed(placed, "auto", "host"))
            link_us = placed.case.payload / self._rig.link_bytes_per_us("host")
            placed.close()
            name = f"zero-copy pack to the host, {what}: share of the host link"
            beside = "us at the speed of a large copy to pinned memory"
            yield _faster(name, "share", least, timed, link_us, beside)

    def hacc(self) -> Iterator[Figure]:
        """Measure structs of arrays beside one copy a field."""
        for name in HACC:
            placed = Placed(self._rig, _case(name))
            ours = _first(self._packed(placed, "auto", "device"))
            theirs = self._by_hand(placed, baselines.BLOCK_COPIES, "device")
            placed.close()
            what = f"{name}, struct of 10 arrays: times as fast as one copy a field"
            graph = {"in_a_graph": _ratio(theirs.graph_us, ours.graph_us)}
            label = "us of ten cudaMemcpyAsync"
            yield _faster(what, "x", OF_FIELD_COPIES, ours, theirs.us, label, **graph)

    def host_time(self) -> Iterator[Figure]:
        """Measure the host time of a cached call."""
        rig = self._rig
        placed = Placed(rig, synthetic.runs("vector", 128, 256, 64 * KIB))
        out = rig.cp.empty(placed.case.payload, "u1")
        rig.cp.cuda.Device(rig.device).synchronize()
        with rig.stream:
            pack = partial(halox.pack, placed.array, placed.datatype, 1, out)
            host_us = rig.clock.host_us(pack)
        launch = rig.clock.empty().host_us
        placed.close()
        yield figure(
            "host time of one cached pack call, launch included",
            host_us,
            "us",
            CACHED_PACK_US,
            launch,
            "us of a prepared launch of an empty kernel",
            at_most=True,
        )

    def half_busy(self) -> Iterator[Figure]:
        """Measure packing while a kernel holds half of the multiprocessors."""
        sms = self._rig.sms
        for block, limit in ((128, sms), (KIB, sms), (128, None), (KIB, None)):
            busy, alone, note = contention.half_busy_slowdown(self._rig, block, max_blocks=limit)
            how = "no limit on blocks" if limit is None else f"max_blocks={limit}"
            yield figure(
                f"packing 64 MiB, blocks of {block} B, {how}, with half of the SMs held: slow-down",
                busy / alone - 1,
                "share",
                HALF_BUSY,
                alone,
                "us alone",
                at_most=True,
                us=round(busy, 3),
                note=note,
            )

    def _of_copy(self, case: Case, what: str, least: float) -> Figure:
        placed = Placed(self._rig, case)
        timed = _last(self._packed(placed, "auto", "device"))
        nbytes = placed.case.payload
        buffer = self._rig.buffer("device", nbytes)
        copied = self._rig.clock.measure(
            lambda stream, _: copy(placed.slabs[0], buffer.address(0), nbytes, stream), graph=False
        )
        bound = placed.bound_us("device")
        placed.close()
        name, beside = f"{case.pattern}, {what}: share of a device copy", "us of a device copy"
        of_bound = {"of_sector_bound": round(bound / timed.us, 4), "method": timed.note}
        label = f"{beside} of the payload"
        return _faster(name, "share", least, timed, copied.us, label, **of_bound)

    def _packed(self, placed: Placed, method: str, destination: str) -> dict[str, Timed]:
        """Check and time a packer, by the state of the cache."""
        rig, case = self._rig, placed.case
        to_host = destination == "host"
        packer = make_packer(method, placed.datatype, case.count, rig.device, to_host=to_host)
        buffer = rig.buffer(destination, case.payload, 1 if to_host else placed.turns)
        call = placed.packing(packer, buffer)
        placed.check(call, buffer)
        return placed.timed(call, note=packer.method)

    def _by_hand(self, placed: Placed, name: str, destination: str) -> Timed:
        """Check and time a baseline, in the state of the cache of the packer's figure."""
        rig, case = self._rig, placed.case
        move = baselines.moves(case, placed.blocks, "pack", rig.device)[name]()
        turns = placed.turns if destination == "device" else 1
        buffer = rig.buffer(destination, case.payload, turns)
        call = placed.moving(move, buffer)
        placed.check(call, buffer)
        cold = name == baselines.MEMCPY_2D
        caches = placed.caches[-1:] if cold else placed.caches[:1]
        return _first(placed.timed(call, caches=caches))


def _faster(
    name: str,
    unit: str,
    least: float,
    timed: Timed,
    baseline_us: float,
    baseline_name: str,
    **others: Any,
) -> Figure:
    """Return the figure of a baseline's time over ours."""
    others = {"us": round(timed.us, 3), **others}
    return figure(name, baseline_us / timed.us, unit, least, baseline_us, baseline_name, **others)


def _case(name: str) -> Case:
    case: Case = select([name])[0]
    return case


def _first(times: dict[str, Timed]) -> Timed:
    """Return the times with a warm cache, if the array fits into it."""
    return next(iter(times.values()))


def _last(times: dict[str, Timed]) -> Timed:
    """Return the times with a cold cache, if they could be measured."""
    return list(times.values())[-1]


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if not one or not other else round(one / other, 4)
