"""Packing while others use the GPU: kernels on its multiprocessors, copies over the host link.

After Wu et al. 2016, 5.4, and Jenkins et al. 2013, 4.4.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from statistics import median

from halox.errors import HaloxError
from halox.runtime.gpu.cuda import cupy
from halox_bench.common import neighbour as beside
from halox_bench.common.neighbour import Neighbour
from halox_bench.common.options import KIB, MIB
from halox_bench.common.rig import Buffer, Rig
from halox_bench.common.rows import Row
from halox_bench.pack import synthetic
from halox_bench.pack.on_device import make_packer
from halox_bench.pack.patterns import Case
from halox_bench.pack.placed import Placed
from halox_bench.pack.rows import PACKER
from halox_bench.ranks.bench import Bench

CASES = ((8, 64 * MIB), (128, 64 * MIB), (KIB, 64 * MIB), (128, MIB))
"""Blocks and payloads of the vectors, twice the block apart."""

SHARES = (0.25, 0.5, 1.0)
METHODS = (("strided", None), ("strided", 16), ("strided", 66), ("copy_engine", None))
"""Packers with their most thread blocks."""

_CALLS = 10
_SAMPLES = 7
_HOST_US = 15.0  # more than the host takes for a call


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the vectors to pack."""
    chosen = CASES[1:2] if args.quick else CASES
    return [synthetic.runs("vector", block, 2 * block, payload) for block, payload in chosen]


class ContentionBench(Bench):
    """Packing beside each neighbour, on one GPU; some tenths of a second a row."""

    def __init__(self, rig: Rig | None = None) -> None:
        self._rig = rig or Rig()
        self._neighbour = Neighbour(self._rig)

    def heading(self) -> str:
        return "slow-down: time beside the neighbour over the time alone, less 1"

    def measure(self, case: Case) -> list[Row]:
        """Measure one vector, to device and host memory, by each packer, beside each neighbour."""
        rows: list[Row] = []
        with Placed(self._rig, case) as placed:
            for destination in ("device", "host"):
                buffer = self._rig.buffer(destination, case.payload)
                for method, limit in METHODS:
                    what = {"destination": destination, "max_blocks": limit, "neighbour": "none"}
                    blank = self.blank(case, PACKER, method, **what, slowdown=None, note="")
                    rows += self._beside(placed, buffer, blank)
        return rows

    def _beside(self, placed: Placed, buffer: Buffer, blank: Row) -> list[Row]:
        rig, neighbour, case = self._rig, self._neighbour, placed.case
        try:
            packer = make_packer(
                blank.name, placed.datatype, case.count, rig.device, blank.max_blocks
            )
        except HaloxError as error:
            return [blank.with_(error=f"{type(error).__name__}: {error}")]

        def call() -> None:
            packer.pack(placed.addresses[0], buffer.address(0), rig.stream.ptr)

        call()
        rig.stream.synchronize()
        alone = _patient_us(rig, call, None)
        rig.stream.synchronize()
        if alone is None:
            return [blank.with_(error=f"takes longer than {beside.PATIENCE_S} s alone")]
        begun: dict[str, Callable[[], AbstractContextManager[str]]] = {
            f"{share:.0%} of the SMs held": partial(neighbour.holding, share) for share in SHARES
        }
        begun["all SMs, short blocks"] = neighbour.taking_turns
        for direction in ("to host", "from host", "both ways"):
            begun[f"copies {direction}"] = partial(neighbour.copying, direction)
        rows = []
        for name, begin in begun.items():
            with begin() as note:
                us = _patient_us(rig, call, neighbour)
                if us is not None and not neighbour.busy:
                    note = "the neighbour had ended before"
            rig.stream.synchronize()
            row = blank.with_(neighbour=name, alone_us=alone, us=us, note=note)
            if us is None:
                rows.append(row.with_(error=f"{name}: starved until the neighbour ended"))
            else:
                rows.append(row.with_(slowdown=us / alone - 1))
        return rows


def _patient_us(rig: Rig, call: Callable[[], None], neighbour: Neighbour | None) -> float | None:
    """Median time of a call, from a few samples; None if it does not end in time."""
    cp, times = cupy(), []
    deadline = time.monotonic() + beside.PATIENCE_S
    for sample in range(_SAMPLES):
        rig.clock.keep_busy(_CALLS * _HOST_US)
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(rig.stream)
        for _ in range(_CALLS):
            call()
        end.record(rig.stream)
        while not end.done:
            if time.monotonic() > deadline:
                return None
        if sample:
            times.append(float(cp.cuda.get_elapsed_time(begin, end)) * 1e3 / _CALLS)
        if neighbour is not None and time.monotonic() > deadline:
            break
    return median(times) if times else None


def half_busy_slowdown(
    rig: Rig, block: int = 128, payload: int = 64 * MIB, max_blocks: int | None = None
) -> tuple[float, float, str]:
    """Measure packing a vector with half of the multiprocessors held.

    Returns
    -------
    busy_us, alone_us : float
        ``inf`` for the first if packing starved.
    note : str
    """
    neighbour = Neighbour(rig)
    with Placed(rig, synthetic.runs("vector", block, 2 * block, payload)) as placed:
        buffer = rig.buffer("device", payload)
        packer = make_packer("auto", placed.datatype, 1, rig.device, max_blocks)

        def call() -> None:
            packer.pack(placed.addresses[0], buffer.address(0), rig.stream.ptr)

        call()
        rig.stream.synchronize()
        alone = _patient_us(rig, call, None) or float("inf")
        with neighbour.holding(0.5) as note:
            busy = _patient_us(rig, call, neighbour)
        rig.stream.synchronize()
    return busy or float("inf"), alone, note
