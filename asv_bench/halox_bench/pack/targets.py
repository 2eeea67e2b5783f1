"""Figures of the GPU datatype engine with their targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import halox
from halox.errors import HaloxError
from halox_bench.common.options import KIB
from halox_bench.common.rig import Rig, copy
from halox_bench.common.targets import Figure, Groups, figure
from halox_bench.common.timing import Timed
from halox_bench.pack import contention
from halox_bench.pack.baselines import BLOCK_COPIES, MEMCPY_2D, moves
from halox_bench.pack.cases import select
from halox_bench.pack.on_device import make_packer
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed
from halox_bench.pack.rows import COPY

REPEATS = 9

BOUND, LINK = "bound", "link"

BESIDE = {
    COPY: ("share", "us of a device copy of the payload"),
    BOUND: ("share", "us for 32-byte sectors and payload at the speed of a large copy"),
    LINK: ("share", "us at the speed of a large copy to pinned memory"),
    MEMCPY_2D: ("x", "us of cudaMemcpy2D"),
    BLOCK_COPIES: ("x", "us of ten cudaMemcpyAsync"),
}
"""Unit of the ratio, and description of the baseline."""


class Packed(NamedTuple):
    """A figure: the time of a baseline over the time of packing.

    Attributes
    ----------
    what : str
        Name of the figure.
    case : str
    beside : str
        A key of `BESIDE`.
    least : float
        The target.
    to : {"device", "host"}
        Memory of the packed bytes.
    warm : bool
        Whether the time with a warm cache counts, if the array fits into it; else with a cold one.
    """

    what: str
    case: str
    beside: str
    least: float
    to: str = "device"
    warm: bool = False


VECTORS = [
    Packed(
        f"vector, blocks of {nbytes} B, {size} MiB: share of a device copy",
        f"vector/{block}-{size}MiB",
        COPY,
        least,
    )
    for nbytes, block, least in ((KIB, "1KiB", 0.97), (128, "128B", 0.90))
    for size in (64, 256)
]
TRIANGLES = [
    Packed(
        "lower_triangle, N = 8192 float64: share of a device copy",
        "lower_triangle/8192",
        COPY,
        0.92,
    )
]
OVER_MEMCPY_2D = [
    Packed(
        f"vector, blocks of {nbytes} B, {size} MiB to {to}: times as fast as cudaMemcpy2D",
        f"vector/{block}-{size}MiB",
        MEMCPY_2D,
        least,
        to,
    )
    for nbytes, block, least, to in (
        *((8, "8B", 5.0, "device"), (128, "128B", 1.2, "device")),
        *((4 * KIB, "4KiB", 1.0, "device"), (8, "8B", 10.0, "host")),
    )
    for size in (1, 64)
]
LISTS = [
    Packed(
        f"lists of 1024 random 8-byte elements, {size}: share of the bound in sectors",
        f"random_indexed/{size}",
        BOUND,
        0.70,
    )
    for size in ("dense-64MiB", "sparse-64MiB")
]
ZERO_COPY = [
    Packed(f"zero-copy pack to the host, {what}: share of the host link", case, LINK, least, "host")
    for case, what, least in (
        ("vector/128B-64MiB", "vector, blocks of 128 B", 0.93),
        ("lower_triangle/4096", "indexed (lower triangle, N = 4096)", 0.88),
        ("random_indexed/dense-64MiB", "indexed (lists of random elements)", 0.88),
    )
]
STRUCTS = [
    Packed(
        f"{case}, struct of 10 arrays: times as fast as one copy a field",
        case,
        BLOCK_COPIES,
        1.5,
        warm=True,
    )
    for case in ("HACC_vblock/4Ki", "HACC_vblock/32Ki", "HACC_particles/32Ki")
]

X_FACE, X_FACE_OF_BOUND = "face_x/512", 0.80

OF_STRIDED = (("64KiB", "64 KiB", 1.10), ("1MiB", "1024 KiB", 1.02))
"""Payload, and most time of the better generic packer over ``strided``."""

CACHED_PACK_US = 7.0
HALF_BUSY = 0.05


def groups() -> Groups:
    """Return the groups of figures on the first GPU."""
    return Targets(Rig(0, REPEATS)).groups()


class Targets:
    """The groups of figures, on one rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def groups(self) -> Groups:
        found: dict[str, Callable[[], Iterator[Figure]]] = {
            "vector": partial(self.packed, VECTORS),
            "lower triangle": partial(self.packed, TRIANGLES),
            "x-face": self.x_face,
            "cudaMemcpy2D": partial(self.packed, OVER_MEMCPY_2D),
            "generic packers": self.generic,
            "random lists": partial(self.packed, LISTS),
            "zero-copy": partial(self.packed, ZERO_COPY),
            "HACC": partial(self.packed, STRUCTS),
            "host time": self.host_time,
            "half the GPU busy": self.half_busy,
        }
        return found

    def packed(self, targets: Sequence[Packed]) -> Iterator[Figure]:
        """Measure packing beside baselines."""
        for target in targets:
            with Placed(self._rig, _case(target.case)) as placed:
                times = list(self._packed(placed, "auto", target.to).values())
                ours = times[0 if target.warm else -1]
                theirs = self._baseline(placed, target)
                bound = placed.bound_us(target.to)
            unit, label = BESIDE[target.beside]
            yield figure(
                target.what,
                theirs.us / ours.us,
                unit,
                target.least,
                theirs.us,
                label,
                us=round(ours.us, 3),
                method=ours.note,
                of_bound=round(bound / ours.us, 4),
                in_a_graph=_ratio(theirs.graph_us, ours.graph_us),
            )

    def _baseline(self, placed: Placed, target: Packed) -> Timed:
        """Return the times of a baseline, in the state of the cache of the packer's figure."""
        rig, case = self._rig, placed.case
        if target.beside == BOUND:
            return Timed(placed.bound_us(target.to))
        if target.beside == LINK:
            return Timed(case.payload / rig.link_bytes_per_us(target.to))
        if target.beside == COPY:
            nbytes, buffer = case.payload, rig.buffer("device", case.payload)
            return rig.clock.measure(
                lambda stream, _: copy(placed.slabs[0], buffer.address(0), nbytes, stream),
                graph=False,
            )
        move = moves(case, placed.blocks, "pack", rig.device)[target.beside]()
        turns = placed.turns if target.to == "device" else 1
        buffer = rig.buffer(target.to, case.payload, turns)
        call = placed.moving(move, buffer)
        placed.check(call, buffer)
        caches = placed.caches[:1] if target.warm else placed.caches[-1:]
        return _first(placed.timed(call, caches=caches))

    def x_face(self) -> Iterator[Figure]:
        """Measure an x-face beside the least time for its sectors."""
        empty = self._rig.clock.empty()
        with Placed(self._rig, _case(X_FACE)) as placed:
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
                    BESIDE[BOUND][1],
                    us=round(us, 3),
                    of_bound_or_launch=round(max(bound, launch) / us, 4),
                    empty_kernel_us=round(launch, 3),
                )

    def generic(self) -> Iterator[Figure]:
        """Measure the better of the packers for any datatype over the packer for strides."""
        for payload, size, most in OF_STRIDED:
            for block in (8, 128):
                with Placed(self._rig, _case(f"vector/{block}B-{payload}")) as placed:
                    strided = _first(self._packed(placed, "strided", "device"))
                    generic = ("workunits", "traversal")
                    times = {one: self._or_refused(placed, one) for one in generic}
                better = min(times, key=lambda method: times[method].us)
                yield figure(
                    f"vector, blocks of {block} B, {size}: the better generic packer over strided",
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

    def host_time(self) -> Iterator[Figure]:
        """Measure the host time of a cached call."""
        rig = self._rig
        with Placed(rig, _case("vector/128B-64KiB")) as placed:
            out = rig.cp.empty(placed.case.payload, "u1")
            rig.cp.cuda.Device(rig.device).synchronize()
            with rig.stream:
                pack = partial(halox.pack, placed.array, placed.datatype, 1, out)
                host_us = rig.clock.host_us(pack)
            del pack  # refers to the case's memory
        launch = rig.clock.empty().host_us
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

    def _packed(self, placed: Placed, method: str, destination: str) -> dict[str, Timed]:
        """Check and time a packer, by the state of the cache."""
        rig, case = self._rig, placed.case
        to_host = destination == "host"
        packer = make_packer(method, placed.datatype, case.count, rig.device, to_host=to_host)
        buffer = rig.buffer(destination, case.payload, 1 if to_host else placed.turns)
        call = placed.packing(packer, buffer)
        placed.check(call, buffer)
        return placed.timed(call, note=packer.method)


def _case(name: str) -> Case:
    case: Case = select([name])[0]
    return case


def _first(times: dict[str, Timed]) -> Timed:
    """Return the times with a warm cache, if the array fits into it."""
    return next(iter(times.values()))


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if not one or not other else round(one / other, 4)
