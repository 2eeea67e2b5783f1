"""Marks that a kernel leaves in host memory: something on a stream has begun, or has ended."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import stream_pointer
from halox.runtime.gpu.launch import PreparedLaunch

WORDS_BYTES = 16
"""Bytes of the words of a mark."""

_MOST_THREADS = 256


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_uint64),
        ("names", ctypes.c_uint64),
        ("is_end", ctypes.c_uint32),
        ("messages", ctypes.c_uint32),
        ("name", ctypes.c_uint32),
    )


class Mark(NamedTuple):
    """Four 32-bit words of mapped host memory: 1 and as it was to begin with, 0 and 1 in the end.

    The last two are set if a message has another name than ``name``; see ``kernels/mark_body.cu``.
    """

    pointer: int  # address of the words on the GPU
    is_end: bool
    names: int = 0  # address there of the addresses of the messages' names, 32 bits each
    messages: int = 0  # number of names to be checked
    name: int = 0

    @property
    def arguments(self) -> Sequence[Any]:
        """Parameters of a kernel that leaves the mark as it starts."""
        pointer, is_end, names, messages, name = self
        return (_Parameter(pointer, names, is_end, messages, name),)


class MarkLaunch:
    """A kernel of one block that leaves a mark, where no other kernel of halox runs there."""

    def __init__(self, mark: Mark, device: int) -> None:
        function = kernel("mark", "mark", device)
        threads = max(1, min(mark.messages, _MOST_THREADS))
        self._launch = PreparedLaunch(function, 1, threads, mark.arguments, device=device)

    def launch(self, stream: Any = None, source: int = 0, target: int = 0) -> None:
        """Enqueue it on a stream."""
        self._launch.launch(stream_pointer(stream))
