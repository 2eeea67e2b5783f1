"""Other work on the same GPU: kernels on its multiprocessors, copies over the host link."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned
from halox_bench.common.kernels import defines, kernel
from halox_bench.common.options import MIB
from halox_bench.common.rig import Rig, copy

LIMIT_NS = 2_000_000_000
"""Longest time for which a neighbour holds multiprocessors, even if this process ends."""

TURN_NS = 20_000
PATIENCE_S = 0.3
"""Longest wait for packing before it counts as starved."""

_SETTLE_NS = 50_000
_COPY_BYTES = 256 * MIB


class Neighbour:
    """Other work on the same GPU, on separate streams.

    Notes
    -----
    Not collective. All memory is allocated, and all kernels are loaded, here: no call may wait for
    the GPU while a kernel holds it.
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
        # The kernel polls the GPU's memory: reads of host memory by many blocks stall all loads.
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
        """Hold a share of the multiprocessors; yields a remark if the share differs."""
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
        routes = {"to host": [(memory, host)], "from host": [(host, memory)]}
        streams = (self._low, self._side)
        # Halves, so that the two directions do not touch the same bytes.
        both = [(memory, host), (host + _COPY_BYTES // 2, memory + _COPY_BYTES // 2)]
        for stream, (source, target) in zip(streams, routes.get(direction, both), strict=False):
            for _ in range(int(PATIENCE_S * 55e9 / (_COPY_BYTES // 2))):
                copy(source, target, _COPY_BYTES // 2, stream.ptr)
        try:
            time.sleep(1e-3)
            yield ""
        finally:
            for stream in streams:
                stream.synchronize()

    @property
    def busy(self) -> bool:
        """Whether the neighbour still runs."""
        return not (self._low.done and self._side.done)

    def _staying(self, wanted: int) -> int:
        """Count the blocks that have begun to run; wait briefly for them."""
        deadline = time.monotonic() + 0.1
        while True:
            ends = int(self._state.data.ptr), self._count.device_pointer
            copy(*ends, 4, self._side.ptr)
            self._side.synchronize()
            staying = int(self._count.array[:4].view(np.uint32)[0])
            if staying >= wanted or time.monotonic() > deadline:
                return staying

    def _reset(self) -> None:
        self._state.fill(0)
        self._cp.cuda.Device(self._rig.device).synchronize()

    def _release(self) -> None:
        # A copy engine works even if all SMs are held.
        self._stop.array[:] = 1
        copy(self._stop.device_pointer, int(self._state.data.ptr) + 32, 4, self._side.ptr)
        self._side.synchronize()
        self._low.synchronize()
