"""Streams: order of work across them, and their capture into CUDA graphs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

from halox.errors import ExchangeTimeoutError, StateError
from halox.runtime.gpu.cuda import cupy, stream_pointer
from halox.runtime.waiting import Waiter

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyEvent

LEGACY_STREAMS = (0, 1)
"""The null stream and CU_STREAM_LEGACY, which cannot be captured."""

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


def refuse_capture(stream: Stream | int, path: str, why: str | None = None) -> None:
    """Raise `StateError` if a stream is being captured, before anything is put on it.

    The reason, a clause, is that the path needs the host, or another one.
    """
    if is_capturing(stream):
        reason = "needs the host in every exchange and cannot be captured in a CUDA graph"
        others = "scatter_gather/copy_engine where ranks share one, or nccl between nodes"
        if why is not None:
            reason, others = (
                f"cannot be captured in a CUDA graph here: {why}",
                "or nccl between nodes",
            )
        raise StateError(
            f"the {path} path {reason}; capture only "
            "the work around the exchange, or use the peer path, which can be captured, where every rank has a GPU of "
            f'its own (path="peer" or HALOX_PATH=peer), {others}'
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
    """Streams of the calls of a plan: each is ordered behind the last one, but those that are captured."""

    def __init__(self, path: str) -> None:
        self._path, self._order = path, StreamOrder()
        self._current = cupy().cuda.get_current_stream

    def enter(self) -> int:
        """Return the current stream, put behind what the last one was given."""
        stream = self._current()
        if self._order.last is not stream:
            self._order.follow(stream)
        return int(stream.ptr)

    @property
    def is_captured(self) -> bool:
        """Whether work on the current stream joins a CUDA graph, and does not break the capture of another stream."""
        pointer = int(self._current().ptr)
        return pointer not in LEGACY_STREAMS and is_capturing(pointer)

    def check(self, why: str | None = None) -> None:
        """Refuse a stream that is being captured, and one behind a last one that is; see `refuse_capture`."""
        refuse_capture(self._current(), self._path, why)
        if self._order.last is not None:
            refuse_capture(self._order.last, self._path, why)

    def end(self, waiter: Waiter, *others: Stream) -> bool:
        """Wait until the streams of the last call and capture, and others, have ended; False if not in time.

        A stream that does not end within ``HALOX_TIMEOUT``, as when a kernel of the caller's runs on, has not ended
        later either.
        """
        for stream in (*self._order.streams, *others):
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

    @property
    def streams(self) -> list[Stream]:
        """Streams of the last call and of the last capture."""
        return [stream for stream in (self.last, self._captured) if stream is not None]

    def synchronize(self) -> None:
        """Wait for all calls; of replays, for those on the stream of the capture."""
        streams = self.streams
        self.last = self._captured = None
        for stream in streams:
            stream.synchronize()
