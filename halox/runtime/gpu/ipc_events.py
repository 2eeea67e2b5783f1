"""Interprocess CUDA events: streams of other processes can wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from halox.errors import DeviceError
from halox.runtime.gpu.cuda import cupy


class EventPool:
    """Interprocess events of one GPU, and events of other ranks that this process has opened.

    Other ranks identify an event by its owner and a number. Only `close` destroys events: when this rank closes a plan,
    a slow rank may still have to wait for one of the plan's events. Later plans reuse the events. That is safe because
    making a plan is collective. Opening a handle requires that the processes share /dev/shm, and in containers the IPC
    namespace.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._own: list[tuple[int, bytes]] = []
        self._free: list[int] = []
        self._opened: dict[tuple[int, int], int] = {}

    def acquire(self, count: int) -> list[int]:
        missing = count - len(self._free)
        if missing > 0:
            runtime = cupy().cuda.runtime
            flags = runtime.eventDisableTiming | runtime.eventInterprocess
            with cupy().cuda.Device(self._device):
                for _ in range(missing):
                    event = int(runtime.eventCreateWithFlags(flags))
                    self._own.append((event, bytes(runtime.ipcGetEventHandle(event))))
                    self._free.append(len(self._own) - 1)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Return events to the pool; this rank's streams must no longer use them."""
        self._free += numbers

    def handles(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Return the IPC handles of this rank's events; other ranks pass them to `open`."""
        return {number: self._own[number][1] for number in numbers}

    def open(self, rank: int, handles: Mapping[int, bytes]) -> None:
        """Open another rank's events, unless already open; raise `DeviceError` if an event cannot be opened."""
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(self._device):
            for number, handle in handles.items():
                if (rank, number) in self._opened:
                    continue
                try:
                    self._opened[rank, number] = int(runtime.ipcOpenEventHandle(handle))
                except RuntimeError as error:
                    raise DeviceError(
                        f"a CUDA event of rank {rank} cannot be opened here ({error}); the ranks of "
                        "a node must share /dev/shm and, in containers, the IPC namespace, or use "
                        "the staged path (HALOX_PATH=staged)"
                    ) from error

    def own(self, number: int) -> int:
        return self._own[number][0]

    def opened(self, rank: int, number: int) -> int:
        return self._opened[rank, number]

    def close(self) -> None:
        """Destroy this rank's events, and close opened events; no rank may use them again."""
        destroy = cupy().cuda.runtime.eventDestroy
        for event in self._opened.values():
            destroy(event)
        for event, _ in self._own:
            destroy(event)
        self._opened, self._own, self._free = {}, [], []
