"""Packing while others use the GPU: kernels on its multiprocessors, copies over the host link.

After Wu et al. 2016, 5.4, and Jenkins et al. 2013, 4.4.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from halox.cli.bench import baselines, synthetic
from halox.cli.bench.kernels import defines, kernel
from halox.cli.bench.on_device import make_packer
from halox.cli.bench.patterns import KIB, MIB
from halox.cli.bench.rig import Buffer, Placed, Rig
from halox.errors import HaloxError
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned

CASES = ((8, 64 * MIB), (128, 64 * MIB), (KIB, 64 * MIB), (128, MIB))
"""Blocks and payloads of the vectors, twice the block apart."""

SHARES = (0.0, 0.25, 0.5, 1.0)
BLOCK_LIMITS = (None, 16, 66)

LIMIT_NS = 2_000_000_000
"""The longest that a neighbour holds multiprocessors, whatever becomes of this process."""

TURN_NS = 20_000
PATIENCE_S = 0.3
"""How long packing is waited for before it counts as starved."""

_SETTLE_NS = 50_000
_COPY_BYTES = 256 * MIB
_CALLS = 10
_SAMPLES = 7
_HOST_US = 15.0  # more than the host takes for a call


@dataclass(frozen=True)
class Contended:
    """One line: a vector packed beside a neighbour.

    Attributes
    ----------
    block_bytes, payload_bytes : int
    destination, method : str
    max_blocks : int or None
    neighbour : str
    alone_us : float or None
        None if it could not be measured.
    us : float or None
        None if packing did not end while the neighbour was there.
    slowdown : float or None
        Time over that alone, less 1.
    note : str
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


class Neighbour:
    """Work of somebody else's on the same GPU, on streams of its own.

    Parameters
    ----------
    rig : Rig

    Notes
    -----
    Not collective. All memory is allocated, and all kernels are loaded, here: nothing that waits
    for the GPU happens while a kernel holds it.
    """

    def __init__(self, rig: Rig) -> None:
        cp, device = rig.cp, rig.device
        self._rig, self._cp = rig, cp
        self._low = cp.cuda.Stream(non_blocking=True)
        self._side = cp.cuda.Stream(non_blocking=True)
        self._stop = pinned(64)
        self._count = pinned(64)
        self._state = cp.zeros(16, np.uint32)
        self._host = pinned(_COPY_BYTES)
        self._memory = cp.empty(_COPY_BYTES, np.uint8)
        properties = cp.cuda.runtime.getDeviceProperties(device)
        threads = min(1024, properties["maxThreadsPerMultiProcessor"] // 2)
        # Polled in the GPU's memory: reads of host memory by many blocks stall everybody's loads.
        state = int(self._state.data.ptr)
        stop = ctypes.c_void_p(state + 32)
        self._held = ctypes.c_uint(0)
        self._hold = PreparedLaunch(
            kernel("bench", "hold", device, defines("bench")),
            2 * rig.sms,
            threads,
            (
                stop,
                ctypes.c_void_p(state),
                ctypes.c_void_p(state + 4),
                self._held,
                ctypes.c_uint(rig.sms),
                ctypes.c_uint64(_SETTLE_NS),
                ctypes.c_uint64(LIMIT_NS),
            ),
            device=device,
        )
        blocks = 2 * rig.sms * (2 * int(PATIENCE_S * 1e9) // TURN_NS)
        self._turns = PreparedLaunch(
            kernel("bench", "turns", device, defines("bench")),
            blocks,
            threads,
            (stop, ctypes.c_void_p(state + 4), ctypes.c_uint64(TURN_NS)),
            device=device,
        )
        self._release()
        self._turns.launch(self._low.ptr)
        self._hold.launch(self._low.ptr)
        cp.cuda.Device(device).synchronize()

    @contextmanager
    def holding(self, share: float) -> Iterator[str]:
        """Hold a share of the multiprocessors; yields a remark if it is not what was asked for."""
        self._held.value = wanted = round(share * self._rig.sms)
        self._reset()
        self._hold.launch(self._low.ptr)
        try:
            time.sleep(3 * _SETTLE_NS * 1e-9)
            staying = self._staying(2 * wanted)
            yield "" if staying == 2 * wanted else f"{staying} of {2 * wanted} blocks stay"
        finally:
            self._release()

    @contextmanager
    def taking_turns(self) -> Iterator[str]:
        """Fill the whole GPU with short blocks that queue behind one another."""
        self._reset()
        self._turns.launch(self._low.ptr)
        try:
            time.sleep(1e-3)
            yield ""
        finally:
            self._release()

    @contextmanager
    def copying(self, direction: str) -> Iterator[str]:
        """Keep a copy engine busy: ``"to host"``, ``"from host"``, or ``"both ways"``."""
        host, memory = self._host.device_pointer, int(self._memory.data.ptr)
        ways = {"to host": [(memory, host)], "from host": [(host, memory)]}
        streams = (self._low, self._side)
        # Halves, so that the two ways do not touch the same bytes.
        both = [(memory, host), (host + _COPY_BYTES // 2, memory + _COPY_BYTES // 2)]
        for stream, (source, target) in zip(streams, ways.get(direction, both), strict=False):
            for _ in range(int(PATIENCE_S * 55e9 / (_COPY_BYTES // 2))):
                baselines.copy(source, target, _COPY_BYTES // 2, stream.ptr)
        try:
            time.sleep(1e-3)
            yield ""
        finally:
            for stream in streams:
                stream.synchronize()

    @property
    def busy(self) -> bool:
        """Whether the neighbour is still there."""
        return not (self._low.done and self._side.done)

    def _staying(self, wanted: int) -> int:
        """Count the blocks that have settled; waits for them for a moment."""
        deadline = time.monotonic() + 0.1
        while True:
            ends = int(self._state.data.ptr), self._count.device_pointer
            baselines.copy(*ends, 4, self._side.ptr)
            self._side.synchronize()
            staying = int(self._count.array[:4].view(np.uint32)[0])
            if staying >= wanted or time.monotonic() > deadline:
                return staying

    def _reset(self) -> None:
        self._state.fill(0)
        self._cp.cuda.Device(self._rig.device).synchronize()

    def _release(self) -> None:
        # By a copy engine: all SMs may be held.
        self._stop.array[:] = 1
        baselines.copy(self._stop.device_pointer, int(self._state.data.ptr) + 32, 4, self._side.ptr)
        self._side.synchronize()
        self._low.synchronize()


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
    way: tuple[str, str, int | None],
) -> Iterator[Contended]:
    destination, method, limit = way
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
        yield line("none", None, None, f"takes longer than {PATIENCE_S} s alone")
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
    deadline = time.monotonic() + PATIENCE_S
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
