"""Streams: order of work across them, and their capture into CUDA graphs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

from halox.errors import ExchangeTimeoutError, StateError
from halox.runtime.gpu.cuda import cupy, stream_pointer
from halox.runtime.waiting import Waiter

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyEvent

_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def is_capturing(stream: Stream | int | None = None) -> bool:
    """Whether work put on a stream, CuPy's current one by default, would join a CUDA graph or break the capture of one.

    Does not block, and leaves a capture as it is. Takes less than a microsecond. True for the legacy default stream
    while a stream that waits for it is captured, since any work on it would end that capture.
    """
    query, refused = _query()
    try:
        return bool(query(stream_pointer(stream)))
    except refused as error:
        if error.status == _IMPLICIT:
            return True
        raise


def refuse_capture(stream: Stream | int, path: str) -> None:
    """Raise `StateError` if a stream is being captured, before anything is put on it."""
    if is_capturing(stream):
        raise StateError(
            f"the {path} path needs the host in every exchange and cannot be captured in a CUDA graph; capture only "
            "the work around the exchange, or use the peer path, which can be captured, where every rank has a GPU of "
            'its own (path="peer" or HALOX_PATH=peer), or nccl between nodes'
        )


@cache
def _query() -> tuple[Any, Any]:
    runtime = cupy().cuda.runtime
    return runtime.streamIsCapturing, runtime.CUDARuntimeError


class Stream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int:
        """Address of the stream."""

    def __enter__(self) -> Self:
        """Make it CuPy's current stream."""

    def __exit__(self, *error: object) -> None:
        """Make the stream before it current again."""

    def synchronize(self) -> None:
        """Wait for all its work."""

    def wait_event(self, event: CupyEvent) -> None:
        """Order later work after an event."""

    @property
    def done(self) -> bool:
        """Whether all work on it has ended."""


class CallStreams:
    """Streams of the calls of a plan on a path that cannot be captured: each is ordered behind the last one."""

    def __init__(self, path: str) -> None:
        self._path, self._order = path, StreamOrder()
        self._current = cupy().cuda.get_current_stream

    def enter(self) -> int:
        """Return the current stream, put behind what the last one was given."""
        stream = self._current()
        if self._order.last is not stream:
            self._order.follow(stream)
        return int(stream.ptr)

    def check(self) -> None:
        """Refuse a stream that is being captured, and one behind a last one that is."""
        refuse_capture(self._current(), self._path)
        if self._order.last is not None:
            refuse_capture(self._order.last, self._path)

    def end(self, waiter: Waiter, *others: Stream) -> bool:
        """Wait until the stream of the last call, and others, have ended; False if not within ``HALOX_TIMEOUT``.

        A stream that does not end in time, as when a kernel of the caller's runs on, has not ended later either.
        """
        last = self._order.last
        for stream in others if last is None else (last, *others):
            try:
                waiter.until(lambda: bool(stream.done), lambda: "closing has waited for the stream")  # noqa: B023
            except ExchangeTimeoutError:
                return False
        return True


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
