"""Order of work on changing streams."""

from __future__ import annotations

from typing import Any, Protocol

from halox.runtime.gpu.capture import is_capturing
from halox.runtime.gpu.cuda import cupy


class Stream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int:
        """Address of the stream."""

    def synchronize(self) -> None:
        """Wait for all its work."""

    def wait_event(self, event: Any) -> None:
        """Order later work after an event."""


class StreamOrder:
    """Order of calls, the one in which they are made, across streams.

    ``last`` is the stream of the last call, captures apart; work that follows there need not be ordered. A capture
    holds its own work alone: calls in one are in the order of its stream, and in none with others.
    """

    def __init__(self) -> None:
        self.last: Stream | None = None
        self._captured: Stream | None = None

    def follow(self, stream: Stream) -> None:
        """Order the stream of the next call after the last call's; does not block."""
        last = self.last
        if last is stream:
            return
        if is_capturing(stream):
            self._captured = stream
            return
        self.last = stream
        if last is None or last.ptr == stream.ptr or is_capturing(last):
            return
        event = cupy().cuda.Event(disable_timing=True)
        event.record(last)
        stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait for all calls; of replays, for those on the stream of the capture."""
        streams = [stream for stream in (self.last, self._captured) if stream is not None]
        self.last = self._captured = None
        for stream in streams:
            stream.synchronize()
