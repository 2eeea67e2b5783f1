"""Marks that a kernel writes to host memory to report the start or end of work on a stream.

`halox.runtime.nccl_ranks` polls the marks, and detects a wait that exceeds the time limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.launch import PreparedLaunch

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
    """Four 32-bit words of mapped host memory: a begin sets the first to 1, an end sets the first two to 0 and 1.

    An end mark sets the last two words if a message does not have the name ``name``; see ``kernels/mark_body.cu``.
    """

    pointer: int  # device address of the words
    is_end: bool
    names: int = 0  # device address of a table of addresses of 32-bit names
    messages: int = 0  # number of names to check
    name: int = 0

    @property
    def arguments(self) -> Sequence[Any]:
        """Arguments of a kernel that writes the mark when it starts."""
        pointer, is_end, names, messages, name = self
        return (_Parameter(pointer, names, is_end, messages, name),)


class MarkLaunch:
    """A kernel of one block that only writes a mark, if no other halox kernel on the stream can write it."""

    bases: Sequence[tuple[Any, int, int]] = ()  # it accesses no array

    def __init__(self, mark: Mark, device: int) -> None:
        function = kernel("mark", "mark", device)
        threads = max(1, min(mark.messages, _MOST_THREADS))
        self.at = PreparedLaunch(function, 1, threads, mark.arguments, device=device).launch
