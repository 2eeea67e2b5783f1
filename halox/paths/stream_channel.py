"""Base of channels that enqueue a whole exchange on one stream: the current stream, or a separate concurrent stream."""

from __future__ import annotations

from abc import abstractmethod

from halox.paths.base import Channel
from halox.runtime.gpu import pools
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.streams import Stream, StreamOrder


class StreamChannel(Channel):
    """Base of GPU channels whose exchanges need the host only for launches; a subclass enqueues them by `_enter`."""

    needs_host = False
    timeline = (
        ("start", "launch"),
        ("run", "launch"),
        ("finish", "join"),
    )

    def __init__(self, device: int) -> None:
        cuda = cupy().cuda
        self._runtime = cuda.runtime
        self._current_stream = cuda.get_current_stream
        self._order = StreamOrder()
        self._device = device
        self._side = pools.SIDE_STREAMS.acquire(device)
        self._is_concurrent = False

    @abstractmethod
    def _enter(self, stream: Stream, is_concurrent: bool) -> None:
        """Put an exchange on a stream; raise if an earlier exchange has failed.

        ``is_concurrent`` says that other work, on the caller's stream, may run at the same time.
        """

    def run(self) -> None:
        self._enter(self._current_stream(), False)

    def start(self) -> None:
        """Put the whole exchange on a separate stream, after the work that the current stream has so far."""
        side, runtime = self._side, self._runtime
        pointer = side.stream.ptr
        runtime.eventRecord(side.before.ptr, self._current_stream().ptr)
        runtime.streamWaitEvent(pointer, side.before.ptr)
        self._enter(side.stream, True)
        runtime.eventRecord(side.after.ptr, pointer)
        self._is_concurrent = True

    def finish(self) -> None:
        if self._is_concurrent:
            self._is_concurrent = False
            self._runtime.streamWaitEvent(self._current_stream().ptr, self._side.after.ptr)

    def close(self) -> None:
        """Wait for the last exchange, which ends at ``HALOX_TIMEOUT`` at the latest."""
        self._order.synchronize()
        pools.SIDE_STREAMS.release(self._device, self._side)
