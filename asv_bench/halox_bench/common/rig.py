"""One GPU: its clock, its speeds, and packed buffers at each destination."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from halox.errors import DeviceError
from halox.runtime.gpu.cuda import cupy, gpu_count, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned
from halox_bench.common.kernels import defines, kernel
from halox_bench.common.options import MIB
from halox_bench.common.reference import Bytes
from halox_bench.common.timing import Clock

DESTINATIONS = ("device", "host", "peer")

DEVICE_COPY_BYTES = 256 * MIB
LINK_COPY_BYTES = 64 * MIB
"""Bytes of the copies that measure the speed of the host link."""

DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


def copy(source: int, target: int, nbytes: int, stream: int) -> None:
    """Copy bytes between any two kinds of memory with cudaMemcpyAsync."""
    cupy().cuda.runtime.memcpyAsync(target, source, nbytes, DEFAULT, stream)


@dataclass(frozen=True)
class Buffer:
    """Packed bytes in memory that kernels of the GPU reach.

    Attributes
    ----------
    addresses : tuple of int
        One, or one a turn.
    read, write : callable
        Content of the first on the host, and back.
    """

    addresses: tuple[int, ...]
    read: Callable[[], Bytes]
    write: Callable[[Bytes], None]

    def address(self, turn: int) -> int:
        """Address for a turn."""
        return self.addresses[turn % len(self.addresses)]


class Rig:
    """One GPU with its clock and its speeds.

    Parameters
    ----------
    repeats : int
        Samples of each measurement.
    """

    def __init__(self, device: int = 0, repeats: int = 11) -> None:
        self.cp = cupy()
        self.device = device
        self.clock = Clock(device, repeats)
        self.stream = self.clock.stream
        runtime = self.cp.cuda.runtime
        self.l2_bytes = int(runtime.getDeviceProperties(device)["l2CacheSize"])
        self.sms = multiprocessors(device)
        self._links = {"device": float("inf")}
        self._fill_args = (
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
            ctypes.c_int(0),
        )
        self._fill = PreparedLaunch(
            kernel("bench", "fill", device, defines("bench")),
            8 * self.sms,
            256,
            self._fill_args,
            device=device,
        )

    def destinations(self) -> tuple[str, ...]:
        """Return the destinations of this machine."""
        return ("device", "host", *(("peer",) if self.peer is not None else ()))

    @cached_property
    def peer(self) -> int | None:
        """Another GPU with memory that this one reaches."""
        runtime = self.cp.cuda.runtime
        for other in range(gpu_count()):
            if other != self.device and runtime.deviceCanAccessPeer(self.device, other):
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise
                return other
        return None

    @cached_property
    def bytes_per_us(self) -> float:
        """Bytes read and written a microsecond by a copy on the device too large for the L2."""
        nbytes = max(DEVICE_COPY_BYTES, 4 * self.l2_bytes)
        ends = self.cp.empty(nbytes, np.uint8), self.cp.empty(nbytes, np.uint8)
        source, target = (int(end.data.ptr) for end in ends)
        self.cp.cuda.Device(self.device).synchronize()
        timed = self.clock.measure(
            lambda stream, _: copy(source, target, nbytes, stream), graph=False
        )
        return 2 * nbytes / timed.us

    def link_bytes_per_us(self, destination: str) -> float:
        """Bytes that a copy moves to the host or the peer in a microsecond."""
        if destination not in self._links:
            self._links[destination] = self._measured_link(destination)
        return self._links[destination]

    def _measured_link(self, destination: str) -> float:
        nbytes = LINK_COPY_BYTES
        source = self.cp.empty(nbytes, np.uint8)
        buffer = self.buffer(destination, nbytes)
        self.cp.cuda.Device(self.device).synchronize()
        ends = int(source.data.ptr), buffer.address(0)
        timed = self.clock.measure(lambda stream, _: copy(*ends, nbytes, stream), graph=False)
        return nbytes / timed.us

    def buffer(self, destination: str, nbytes: int, turns: int = 1) -> Buffer:
        """Allocate packed bytes; several only on the device itself.

        Raises
        ------
        DeviceError
            If this machine lacks the destination.
        """
        cp = self.cp
        if destination == "host":
            page = pinned(nbytes)

            def to_host(packed: Bytes) -> None:
                page.array[:] = packed

            return Buffer((page.device_pointer,), lambda: page.array.copy(), to_host)
        place = self.device if destination == "device" else self.peer
        if place is None:
            raise DeviceError("destination 'peer': no other GPU here that this one can reach")
        step = -(-nbytes // 512) * 512
        with cp.cuda.Device(place):
            memory = cp.empty(step * turns, np.uint8)
            cp.cuda.Device(place).synchronize()

        def read() -> Bytes:
            with cp.cuda.Device(place):
                return np.asarray(memory[:nbytes].get())

        def write(packed: Bytes) -> None:
            with cp.cuda.Device(place):
                memory[:nbytes].set(packed)
                cp.cuda.Device(place).synchronize()

        pointer = int(memory.data.ptr)
        return Buffer(tuple(pointer + step * turn for turn in range(turns)), read, write)

    def fill(self, memory: Any, *, flip: int = 0, combine: bool = False) -> None:
        """Fill device memory of whole words, or combine it with the fill by exclusive or."""
        words, n, flipped, combined = self._fill_args
        words.value, n.value = int(memory.data.ptr), memory.nbytes // 8
        flipped.value, combined.value = flip, int(combine)
        self._fill.launch(self.stream.ptr)
        self.stream.synchronize()
