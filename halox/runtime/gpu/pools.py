"""What plans borrow rather than make: the driver takes time to make it, and with several GPUs keeps memory of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.memory import PinnedBuffer, pinned

Spare = TypeVar("Spare")

_WORD_BYTES = 8


class Spares(Generic[Spare]):
    """Things of one kind, for as long as the process lives.

    Parameters
    ----------
    make : callable
        Makes one on a GPU, given its number.

    Notes
    -----
    Local. What is given back must be in no use any more, on the host or on a GPU.
    """

    def __init__(self, make: Callable[[int], Spare]) -> None:
        self._make = make
        self._free: defaultdict[int, list[Spare]] = defaultdict(list)

    def take(self, device: int) -> Spare:
        """Return one of a GPU that nobody uses, in whatever state it was left."""
        free = self._free[device]
        return free.pop() if free else self._make(device)

    def give_back(self, device: int, spare: Spare) -> None:
        """Let it be taken again."""
        self._free[device].append(spare)


class SideStream:
    """A stream of high priority beside the user's, and two events that put it in order with theirs."""

    def __init__(self, device: int) -> None:
        cuda = cupy().cuda
        with cuda.Device(device):
            # CUDA takes the nearest priority that the GPU has.
            self.stream: Any = cuda.Stream(non_blocking=True, priority=-5)
            self.before, self.after = (cuda.Event(disable_timing=True) for _ in range(2))


def _word(device: int) -> PinnedBuffer:
    with cupy().cuda.Device(device):
        return pinned(_WORD_BYTES)


SIDE_STREAMS = Spares(SideStream)
"""Streams for exchanges that run beside the user's work."""

HOST_WORDS = Spares(_word)
"""Eight bytes of host memory in which a kernel tells of its failure."""
