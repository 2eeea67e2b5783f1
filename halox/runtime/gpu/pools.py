"""Process-wide pools of streams and page-locked memory for each GPU, since the driver creates them slowly."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Generic, TypeVar

from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.memory import PinnedBuffer, pinned
from halox.runtime.gpu.streams import Stream

Item = TypeVar("Item")

WORDS_BYTES = 16
"""Size in bytes of the words of a mark; a failure word needs half of it."""

_LEAST_BUFFER_BYTES = 1 << 16
_MOST_BUFFER_BYTES = 16 << 20


class Pool(Generic[Item]):
    """Reusable objects of one type for each GPU, created on demand and kept for the life of the process.

    An object may be released only when neither the host nor a GPU uses it.
    """

    def __init__(self, make: Callable[[int], Item]) -> None:
        self._make = make
        self._free: defaultdict[int, list[Item]] = defaultdict(list)

    def acquire(self, device: int) -> Item:
        """Return an unused object for a GPU; its state is not reset."""
        free = self._free[device]
        return free.pop() if free else self._make(device)

    def release(self, device: int, item: Item) -> None:
        self._free[device].append(item)


class SideStream:
    """A stream of high priority, and two events that order it with the user's stream."""

    def __init__(self, device: int) -> None:
        cuda = cupy().cuda
        with cuda.Device(device):
            # CUDA uses the nearest priority that the GPU supports.
            self.stream: Stream = cuda.Stream(non_blocking=True, priority=-5)
            self.before, self.after = (cuda.Event(disable_timing=True) for _ in range(2))

    def follow(self, stream: Stream) -> None:
        """Run later work of this stream after the present work of another one."""
        self.before.record(stream)
        self.stream.wait_event(self.before)

    def join(self, stream: Stream) -> None:
        """Run later work of another stream after the present work of this one."""
        self.after.record(self.stream)
        stream.wait_event(self.after)


def _pinned_for(nbytes: int, device: int) -> PinnedBuffer:
    with cupy().cuda.Device(device):
        return pinned(nbytes)


@cache
def _buffers(nbytes: int) -> Pool[PinnedBuffer]:
    return Pool(partial(_pinned_for, nbytes))


def acquire_buffer(nbytes: int, device: int) -> PinnedBuffer:
    """Return at least ``nbytes`` of page-locked memory; `release_buffer` pools it, or frees it if it is large."""
    if nbytes > _MOST_BUFFER_BYTES:
        return _pinned_for(nbytes, device)
    size = 1 << (max(nbytes, _LEAST_BUFFER_BYTES) - 1).bit_length()
    return _buffers(size).acquire(device)


def release_buffer(buffer: PinnedBuffer, device: int) -> None:
    """Release memory of `acquire_buffer`: pool it, or free it if it is large."""
    if buffer.nbytes > _MOST_BUFFER_BYTES:
        buffer.close()
    else:
        _buffers(buffer.nbytes).release(device, buffer)


SIDE_STREAMS = Pool(SideStream)
"""Streams for exchanges that overlap with the user's work."""

HOST_WORDS = Pool(partial(_pinned_for, WORDS_BYTES))
"""Host memory for failure words and for marks."""


_failures: weakref.WeakSet[FailureWord] = weakref.WeakSet()


def count_failures() -> int:
    """Return the number of failures of this process that have not been raised yet."""
    return sum(one.words[0] != 0 and not one.was_raised for one in list(_failures))


class FailureWord:
    """Report of a kernel wait that timed out: two 32-bit ``words`` in page-locked memory.

    The first word is the number of the failure, 0 without a failure. The second word is the call in which it happened.
    ``was_raised`` is set once the failure has been raised.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._buffer = HOST_WORDS.acquire(device)
        self._buffer.array[:] = 0
        self.words = self._buffer.array.data.cast("I")
        self.was_raised = False
        self._is_open = True
        _failures.add(self)

    @property
    def pointer(self) -> int:
        return int(self._buffer.device_pointer)

    def clear(self) -> None:
        self.words[0], self.was_raised = 0, False

    def close(self, error: Callable[[], Exception]) -> bool:
        """Release the memory; warn of a failure that was not raised, and return whether there was a failure.

        Local, and harmless when repeated. All kernels that may write the words must have ended.
        """
        if not self._is_open:
            return False
        self._is_open = False
        _failures.discard(self)
        has_failed = bool(self.words[0])
        if has_failed and not self.was_raised:
            warnings.warn(str(error()), stacklevel=3)
        self.words.release()
        HOST_WORDS.release(self._device, self._buffer)
        return has_failed
