"""The launch of a kernel that does nothing, as users make it: what no call that launches can be far below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BARE_LAUNCH = "launch of an empty CuPy RawKernel with five arguments"

_NOTHING = 'extern "C" __global__ void none(long a, long b, int c, int d, int e) {}'


def bare_launch(cp: Any) -> Callable[[], None]:
    """Return what launches it on CuPy's current stream.

    Parameters
    ----------
    cp : module
        ``cupy``.
    """
    kernel = cp.RawKernel(_NOTHING, "none")
    arguments = tuple(kind(0) for kind in (cp.int64, cp.int64, cp.int32, cp.int32, cp.int32))
    return lambda: kernel((1,), (1,), arguments)
