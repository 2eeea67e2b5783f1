"""Order of work across CUDA streams, and checks of stream capture."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, Self

from halox.errors import ExchangeTimeoutError, StateError
from halox.runtime.gpu.cuda import cupy
from halox.runtime.waiting import Waiter

_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit
loops: list[object] = []  # not empty while the body of a loop is captured


def stream_pointer(stream: Stream | int | None = None) -> int:
    """Return the address of a stream, given as a CuPy stream, an address, or None for CuPy's current stream."""
    if stream is None:
        return int(cupy().cuda.get_current_stream().ptr)
    return stream if isinstance(stream, int) else int(stream.ptr)


def is_capturing(stream: Stream | int | None = None) -> bool:
    """Return whether work on a stream (default: current) would be captured, or would invalidate a capture.

    Does not block, does not affect a capture, and takes less than a microsecond. Returns True for the legacy default
    stream while a blocking stream is captured, since any work on the legacy stream would invalidate that capture.
    """
    query, refused = _query()
    try:
        return bool(query(stream_pointer(stream)))
    except refused as error:
        if error.status == _IMPLICIT:
            return True
        raise


def refuse_capture(stream: Stream | int, path: str) -> None:
    """Raise `StateError` if a stream is being captured; call this before enqueueing work on the stream."""
    if is_capturing(stream):
        raise StateError(
            f"the {path} path needs the host in every exchange and cannot be captured in a CUDA graph; capture only "
            "the work around the exchange, or use the peer path, which can be captured, where every rank has a GPU of "
            'its own (path="peer" or HALOX_PATH=peer), or nccl between nodes'
        )


def refuse_loop(what: str) -> None:
    """Raise `StateError` while the body of a loop is captured, which cannot contain all that other graphs can."""
    if loops:
        raise StateError(f"{what} cannot be captured in the body of a loop")


@cache
def _query() -> tuple[Any, Any]:
    runtime = cupy().cuda.runtime
    return runtime.streamIsCapturing, runtime.CUDARuntimeError


class Stream(Protocol):
    """CuPy stream."""

    @property
    def ptr(self) -> int:
        """Address of the stream."""

    def __enter__(self) -> Self:
        """Make the stream CuPy's current stream."""

    def __exit__(self, *error: object) -> None:
        """Make the previous stream current again."""

    def synchronize(self) -> None:
        """Wait for all work on the stream."""

    def wait_event(self, event: Any) -> None:
        """Order later work after an event."""

    @property
    def done(self) -> bool:
        """Whether all work on the stream has ended."""


class CallStreams:
    """Streams of a plan's calls: each call is ordered after the previous call, except captured calls."""

    def __init__(self, path: str) -> None:
        self._path, self._order = path, StreamOrder()
        self._current = cupy().cuda.get_current_stream

    def enter(self) -> int:
        """Return the address of the current stream, ordered after the stream of the last call."""
        stream = self._current()
        if self._order.last is not stream:
            self._order.follow(stream)
        return int(stream.ptr)

    def check(self) -> None:
        """Raise `StateError` if the current stream or the last call's stream is capturing."""
        refuse_capture(self._current(), self._path)
        if self._order.last is not None:
            refuse_capture(self._order.last, self._path)

    def end(self, waiter: Waiter, *others: Stream) -> bool:
        """Wait for the streams of the last call and capture, and ``others``; return False after the time limit.

        The limit is ``HALOX_TIMEOUT``. A stream can exceed it, for example, if a kernel of the caller keeps running.
        """
        for stream in (*self._order.streams, *others):
            try:
                waiter.until(lambda: bool(stream.done), lambda: "closing has waited for the stream")  # noqa: B023
            except ExchangeTimeoutError:
                return False
        return True


class StreamOrder:
    """Ordering of calls across streams, in the order in which they are made.

    ``last`` is the stream of the last call that was not captured; later work on this stream needs no extra ordering. A
    capture contains only its own work: captured calls are ordered by their stream, and are not ordered with other
    calls.
    """

    def __init__(self) -> None:
        self.last: Stream | None = None
        self._captured: Stream | None = None

    def follow(self, stream: Stream) -> None:
        """Order the stream of the next call after the stream of the last call; does not block."""
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
        """Wait for all calls, and for graph replays on the stream of the last capture."""
        streams = self.streams
        self.last = self._captured = None
        for stream in streams:
            stream.synchronize()
