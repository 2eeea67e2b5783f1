"""Failure word of a kernel: host memory in which it reports whom it has waited for too long, and in which call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from halox.runtime.gpu.pools import HOST_WORDS


class FailureWord:
    """Two 32-bit ``words`` in page-locked memory: 0 or the failure's number, and the call in which it happened.

    ``is_told`` says whether the caller has been told of the failure.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._buffer = HOST_WORDS.take(device)
        self._buffer.array[:] = 0
        self.words = self._buffer.array.data.cast("I")
        self.is_told = False
        self._is_open = True

    @property
    def pointer(self) -> int:
        """Its address on the GPU."""
        return int(self._buffer.device_pointer)

    def clear(self) -> None:
        """Begin anew."""
        self.words[0], self.is_told = 0, False

    def close(self, error: Callable[[], Exception]) -> bool:
        """Give the memory back; warn of a failure of which nobody was told, and return whether there was one.

        Local, and harmless when repeated; no kernel that writes it may run any more.
        """
        if not self._is_open:
            return False
        self._is_open = False
        has_failed = bool(self.words[0])
        if has_failed and not self.is_told:
            warnings.warn(str(error()), stacklevel=3)
        self.words.release()
        HOST_WORDS.release(self._device, self._buffer)
        return has_failed
