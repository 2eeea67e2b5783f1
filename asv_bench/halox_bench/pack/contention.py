"""Packing while others use the GPU: kernels on its multiprocessors, copies over the host link.

After Wu et al. 2016, 5.4, and Jenkins et al. 2013, 4.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from halox.errors import HaloxError
from halox.runtime.gpu.cuda import cupy
from halox_bench.common import neighbour as beside
from halox_bench.common.neighbour import Neighbour
from halox_bench.common.rig import Buffer, Rig
from halox_bench.common.sizes import KIB, MIB
from halox_bench.pack import synthetic
from halox_bench.pack.on_device import make_packer
from halox_bench.pack.placed import Placed

CASES = ((8, 64 * MIB), (128, 64 * MIB), (KIB, 64 * MIB), (128, MIB))
"""Blocks and payloads of the vectors, twice the block apart."""

SHARES = (0.0, 0.25, 0.5, 1.0)
BLOCK_LIMITS = (None, 16, 66)

_CALLS = 10
_SAMPLES = 7
_HOST_US = 15.0  # more than the host takes for a call


@dataclass(frozen=True)
class Contended:
    """One line: a vector packed beside a neighbour.

    Attributes
    ----------
    alone_us : float or None
        None if it could not be measured.
    us : float or None
        None if packing did not end while the neighbour was there.
    slowdown : float or None
        Time over that alone, less 1.
    """

    block_bytes: int
    payload_bytes: int
    destination: str
    method: str
    max_blocks: int | None
    neighbour: str
    alone_us: float | None
    us: float | None
    slowdown: float | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        return asdict(self)


def run(rig: Rig, progress: Callable[[str], None], *, quick: bool = False) -> Iterator[Contended]:
    """Measure packing beside each neighbour; yields lines as they are there.

    Notes
    -----
    Not collective. Takes some tenths of a second a line.
    """
    neighbour = Neighbour(rig)
    cases = CASES[1:2] if quick else CASES
    limits = (None, 66) if quick else BLOCK_LIMITS
    for block, payload in cases:
        placed = Placed(rig, synthetic.runs("vector", block, 2 * block, payload))
        for destination in ("device", "host"):
            buffer = rig.buffer(destination, payload)
            for method, limit in (*(("strided", limit) for limit in limits), ("copy_engine", None)):
                progress(
                    f"contention: blocks of {block}, {payload} bytes to {destination}, {method}"
                )
                yield from _lines(rig, neighbour, placed, buffer, (destination, method, limit))
        placed.close()


def _lines(
    rig: Rig,
    neighbour: Neighbour,
    placed: Placed,
    buffer: Buffer,
    what: tuple[str, str, int | None],
) -> Iterator[Contended]:
    destination, method, limit = what
    case = placed.case

    def line(name: str, alone: float | None, us: float | None, note: str) -> Contended:
        slowdown = us / alone - 1 if us is not None and alone is not None else None
        what = (case.block_bytes, case.payload, destination, method, limit, name)
        return Contended(*what, alone, us, slowdown, note)

    try:
        packer = make_packer(method, placed.datatype, case.count, rig.device, limit)
    except HaloxError as error:
        yield line("none", None, None, f"{type(error).__name__}: {error}")
        return

    def call() -> None:
        packer.pack(placed.addresses[0], buffer.address(0), rig.stream.ptr)

    call()
    rig.stream.synchronize()
    alone = _patient_us(rig, call, None)
    if alone is None:
        rig.stream.synchronize()
        yield line("none", None, None, f"takes longer than {beside.PATIENCE_S} s alone")
        return
    begun: dict[str, Callable[[], AbstractContextManager[str]]] = {
        f"{share:.0%} of the SMs held": lambda share=share: neighbour.holding(share)  # type: ignore[misc]
        for share in SHARES
    }
    begun["all SMs, short blocks"] = neighbour.taking_turns
    for direction in ("to host", "from host", "both ways"):
        begun[f"copies {direction}"] = lambda d=direction: neighbour.copying(d)  # type: ignore[misc]
    for name, begin in begun.items():
        with begin() as note:
            us = _patient_us(rig, call, neighbour)
            if us is not None and not neighbour.busy and not name.startswith("0%"):
                note = "the neighbour had ended before"
        rig.stream.synchronize()
        yield line(name, alone, us, note if us is not None else "starved until the neighbour ended")


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
    placed = Placed(rig, synthetic.runs("vector", block, 2 * block, payload))
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
    placed.close()
    return busy or float("inf"), alone, note
