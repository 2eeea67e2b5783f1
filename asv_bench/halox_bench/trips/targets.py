"""Figures of messages between two ranks with their targets: host packing, key caches, copies without packing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from halox.errors import PathError
from halox.paths.scatter_gather import ScatterGatherPath
from halox_bench.common.options import KIB, MIB, size_label
from halox_bench.common.rows import SELECTED, STREAM, right
from halox_bench.common.targets import (
    FASTER,
    Figure,
    Groups,
    Target,
    figure,
    limited,
    missing,
)
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import beside_work
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.runner import PLACES
from halox_bench.trips.baselines import HaloxPacked, MpiPacked, host_buffers
from halox_bench.trips.cases import TripCase, both_ways, ddtbench, vector
from halox_bench.trips.run import NO_CACHE, PreparedTrip, TripBench

TIMING = Timing(batches=15, batch_s=3e-3)

OF_MPI_PACK = 0.95
"""Least speed of host packing, as a share of MPI_Pack's."""

OWN = ScatterGatherPath.name

CACHED = {16: 2.0, 64: 3.0}
"""Least speed with key caches over the speed without, by the number of blocks of 1 KiB: figure 8 of Suresh et al."""

OF_HOST = 1.5
"""Least speed of NumPy arrays copied by the kernel over the speed of the ``host`` path."""

HOST_BLOCKS = (KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)
MESSAGE_BYTES = MIB

BUSY_BLOCK = 4 * KIB
KERNEL_LOSS, BESIDE_KERNEL = 0.02, 1.5
"""Most time that a kernel which fills the GPU loses beside transfers; a transfer's time beside it over alone."""

_ROUNDS = 40
_ROUND_S = 2e-4
_MOST_CALLS = 300


def of_host_packing(args: argparse.Namespace, comm: Any, place: str) -> Groups:
    """Return a group for each case of DDTBench: packing and unpacking on the host, once for all places."""
    if place != (args.where or PLACES)[0]:
        return {}
    return {case.name: partial(over_mpi_pack, comm, case) for case in ddtbench(args)}


def over_mpi_pack(comm: Any, case: TripCase) -> Iterator[Figure]:
    """Measure packing and unpacking by halox beside MPI_Pack, on every rank."""
    slab = np.zeros(case.slab_bytes, np.uint8)
    buffers = host_buffers(case)  # the same for both: addresses decide on conflicts in caches
    ours = HaloxPacked(comm, case, slab, None, buffers)
    theirs = MpiPacked(comm, case, slab, buffers)
    calls = {"halox": ours.phases(), "mpi": theirs.phases()}
    for phase in ("pack", "unpack"):
        us = least_us({name: phases[phase] for name, phases in calls.items()})
        what, ratio = f"{case.name}, {phase}: speed over MPI_Pack's", us["mpi"] / us["halox"]
        beside = round(us["halox"], 3)
        yield figure(what, ratio, "x", OF_MPI_PACK, us["mpi"], "us of MPI", us=beside)
    theirs.close()


def least_us(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least microseconds of a call of each, in turns."""
    numbers, found = {}, dict.fromkeys(calls, np.inf)
    for name, call in calls.items():
        call()
        numbers[name] = max(1, min(_MOST_CALLS, int(_ROUND_S / max(_seconds(call, 1), 1e-7))))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            found[name] = min(found[name], _seconds(call, numbers[name]) * 1e6)
    return found


def _seconds(call: Callable[[], Any], number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number


def without_packing(args: argparse.Namespace | None, comm: Any, place: str) -> Groups:
    """Return the groups of transfers without packing, between two ranks with arrays in a place."""
    device = "cpu" if place == "host" else "gpu"
    options = Options(device, (OWN,), (), graph=False, timing=TIMING)
    try:
        bench = TripBench(comm, place, options, mapped=True)
    except PathError as error:
        absent = missing(f"transfers without packing, {place}", str(error))
        return {place: lambda: [absent]}
    found: Groups = {f"key caches, {n} blocks": partial(over_uncached, bench, n) for n in CACHED}
    if device == "gpu":
        return {**found, "beside a kernel": partial(beside_kernel, bench)}
    blocks = {f"blocks of {size_label(n)}": partial(over_host, bench, n) for n in HOST_BLOCKS}
    return {**found, **blocks}


def over_uncached(bench: TripBench, count: int) -> Iterator[Figure]:
    """Measure transfers with key caches beside transfers without."""
    rows = right(bench.measure(vector(KIB, count)))
    what = f"{count} blocks of 1 KiB, {bench.place}: speed with key caches over that without"
    limits, theirs = {STREAM: CACHED[count]}, (NO_CACHE,)
    target = Target(what, limits, theirs, FASTER, OWN, label="us without")
    map_us = next((row.map_us for row in rows if row.name == OWN and row.us), None)
    yield from target.figures(rows, map_us=map_us)


def over_host(bench: TripBench, block: int) -> Iterator[Figure]:
    """Measure messages one way, there and back, and both ways at once, beside the ``host`` path."""
    named = Options("cpu", (OWN, "host"), (), graph=False, timing=TIMING)
    both = TripBench(bench.comm, bench.place, named)
    for way, one_way in (("one way", True), ("both ways", False)):
        case = both_ways(block, MESSAGE_BYTES // block, one_way=one_way)
        with PreparedTrip(both, case) as prepared:
            rows = right(prepared.rows())
        what = (
            f"1 MiB in blocks of {size_label(block)}, own arrays, {way}: speed over the host path's"
        )
        target = Target(
            what, {STREAM: OF_HOST}, ("host",), FASTER, OWN, label="us of the host path"
        )
        yield from target.figures(rows)


def beside_kernel(bench: TripBench) -> Iterator[Figure]:
    """Measure every path with a kernel that fills the GPU.

    The path without kernels has targets where each rank has a GPU: within one, the driver itself copies by kernels,
    and GPUs take turns between processes.
    """
    known = sorted(bench.known(), key=OWN.__ne__)
    options = Options("gpu", tuple(known), (), graph=False, timing=TIMING)
    every = TripBench(bench.comm, bench.place, options, mapped=True)
    case = both_ways(BUSY_BLOCK, MESSAGE_BYTES // BUSY_BLOCK, one_way=False)
    with PreparedTrip(every, case) as prepared:
        right(prepared.refused)
        for row in prepared.refused:
            if row.name == OWN:
                what = f"beside a kernel that fills the GPU, {bench.place}"
                yield missing(what, row.error)
        # Methods only by number: none may outlive the memory of the case.
        names = [method.name for method in prepared.made]
        for number, name in enumerate(names):
            if name not in (SELECTED, NO_CACHE):
                yield from _beside_kernel(every, prepared, number)


def _beside_kernel(bench: TripBench, prepared: PreparedTrip, number: int) -> Iterator[Figure]:
    method = prepared.made[number]
    found = beside_work(bench.comm, bench.stage, bench.clock, method.call, shared=bench.shared_gpu)
    prepared.check(method, method.call)
    has_target = method.name == OWN and not bench.shared_gpu
    what = f"1 MiB both ways in blocks of 4 KiB, {bench.place}, {method.found['path']}"
    yield limited(
        f"{what}: time that a kernel which fills the GPU loses",
        found.loss,
        "of its time",
        KERNEL_LOSS if has_target else None,
        found.work_us,
        "us of the kernel alone",
        beside_us=round(found.work_beside_us, 1),
    )
    bound = "" if found.is_covered else "at least, as the kernel ended first: "
    yield limited(
        f"{what}: beside that kernel over alone",
        found.call_beside_us / found.call_us,
        "x its time",
        BESIDE_KERNEL if has_target else None,
        found.call_us,
        f"us alone, of two exchanges; {bound}{found.call_beside_us:.1f} us beside it",
    )
