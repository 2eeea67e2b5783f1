"""CuPy's streams, events and memory functions on the host: `host_cuda` puts them in place of the module ``cupy``."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from halox.runtime.gpu import cuda, pools, streams
from halox.runtime.gpu.pools import Pool, SideStream
from tests.fakes.cpu_kernels import aligned


class HostStream:
    """A stream with a queue of work. A step of the queue returns whether it could run."""

    def __init__(self, gpu: HostCuda, ptr: int) -> None:
        self.gpu, self.ptr = gpu, ptr
        self.queue: list[Callable[[], bool]] = []

    def put(self, call: Callable[[], object]) -> None:
        """Enqueue a call."""

        def step() -> bool:
            call()
            return True

        self._append(step)

    def wait_event(self, event: HostEvent) -> None:
        record = event.last
        self._append(lambda: record["passed"])

    def _append(self, step: Callable[[], bool]) -> None:
        if self.gpu.random is not None:
            self.queue.append(step)
        else:
            assert step(), "a stream would wait for work that never comes"

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.queue)

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class HostEvent:
    def __init__(self, gpu: HostCuda, ptr: int) -> None:
        self.gpu, self.ptr = gpu, ptr
        self.last = {"passed": True}

    def record(self, stream: HostStream) -> None:
        record = self.last = {"passed": False}
        stream.put(lambda: record.update(passed=True))

    @property
    def done(self) -> bool:
        self.gpu.run_some()
        return self.last["passed"]

    def synchronize(self) -> None:
        record = self.last
        self.gpu.run_until(lambda: record["passed"])


class HostCuda:
    """A GPU, which is the host's memory.

    With a seed, its streams run in a random order: their work is delayed as far as CUDA allows, until the host waits
    for it. Without a seed, all work runs at once.
    """

    def __init__(self, seed: int | None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.streams: list[HostStream] = []
        self.events: list[HostEvent] = []
        self.current = self.stream()
        self.capturing: set[int] = set()
        """Addresses of streams that are being captured."""

    def stream(self, **_: Any) -> HostStream:
        self.streams.append(HostStream(self, 1 + len(self.streams)))
        return self.streams[-1]

    def at(self, ptr: int) -> HostStream:
        """Return the stream with an address."""
        return self.streams[ptr - 1]

    @property
    def is_busy(self) -> bool:
        return any(stream.queue for stream in self.streams)

    def run_one(self) -> bool:
        """Run the first work of a random stream that can run; returns whether there was one."""
        assert self.random is not None
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]():
                stream.queue.pop(0)
                return True
        return False

    def run_some(self) -> None:
        if self.random is not None:
            for _ in range(self.random.choice((0, 0, 1, 2))):
                self.run_one()

    def run_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert self.run_one(), "the streams wait for one another"

    def queued(self, launch: Any) -> Any:
        """Return a launch that enqueues the work of a `HostLaunch`, at the present places of the arrays."""

        def put(stream: int) -> None:
            self.at(stream).put(launch.prepared())

        return SimpleNamespace(launch=put, at=put, bases=launch.bases)

    def _event(self, disable_timing: bool) -> HostEvent:
        self.events.append(HostEvent(self, len(self.events)))
        return self.events[-1]

    def module(self) -> Any:
        """Return the stand-in for the module ``cupy``."""
        runtime = SimpleNamespace(
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
            streamIsCapturing=lambda stream: stream in self.capturing,
            eventRecord=lambda event, stream: self.events[event].record(self.at(stream)),
            streamWaitEvent=lambda stream, event: self.at(stream).wait_event(self.events[event]),
            memset=ctypes.memset,
            memcpy=lambda target, source, nbytes, kind: ctypes.memmove(target, source, nbytes),
            memcpyHostToDevice=1,
            deviceSynchronize=lambda: None,
        )
        return SimpleNamespace(
            ndarray=type("ndarray", (), {}),
            cuda=SimpleNamespace(
                runtime=runtime,
                Device=lambda number: nullcontext(),
                Event=self._event,
                Stream=self.stream,
                get_current_stream=lambda: self.current,
            ),
        )


@contextmanager
def host_cuda(seed: int | None = None) -> Iterator[HostCuda]:
    """Let `halox.runtime.gpu` find a GPU that is the host's memory; see `HostCuda`."""
    gpu = HostCuda(seed)
    former = sys.modules.get("cupy")
    sys.modules["cupy"] = gpu.module()

    def word(device: int) -> Any:
        array = aligned(16)
        return SimpleNamespace(array=array, device_pointer=array.ctypes.data)

    try:
        with (
            patch.object(cuda, "why_no_gpu", lambda: None),
            patch.object(streams, "_query", cache(streams._query.__wrapped__)),
            patch.multiple(pools, HOST_WORDS=Pool(word), SIDE_STREAMS=Pool(SideStream)),
        ):
            yield gpu
    finally:
        del sys.modules["cupy"]
        if former is not None:
            sys.modules["cupy"] = former
