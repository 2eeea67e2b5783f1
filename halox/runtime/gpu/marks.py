"""Marks that a kernel leaves in host memory: something on a stream has begun, or has ended."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import stream_pointer
from halox.runtime.gpu.launch import PreparedLaunch


class Mark(NamedTuple):
    """Two 32-bit words of mapped host memory: 1 and as it was to begin with, 0 and 1 in the end."""

    pointer: int
    is_end: bool

    @property
    def arguments(self) -> Sequence[Any]:
        """Parameters of a kernel that leaves the mark as it starts; see ``kernels/mark_body.cu``."""
        return ctypes.c_uint64(self.pointer), ctypes.c_uint32(self.is_end)


class MarkLaunch:
    """A kernel of one thread that leaves a mark, where no other kernel of halox runs there."""

    def __init__(self, mark: Mark, device: int) -> None:
        function = kernel("mark", "mark", device)
        self._launch = PreparedLaunch(function, 1, 1, mark.arguments, device=device)

    def launch(self, stream: Any = None, source: int = 0, target: int = 0) -> None:
        """Enqueue it on a stream."""
        self._launch.launch(stream_pointer(stream))
