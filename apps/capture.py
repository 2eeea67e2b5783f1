"""Capture of steps in a CUDA graph, for replay with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def captured(work: Callable[[], None], stream: Any) -> Callable[[], None]:
    """Capture the launches of ``work`` on a stream; return a callable that replays them there.

    Parameters
    ----------
    work : callable
        Launches on the current stream, and does nothing else on the GPU. It must have run before,
        so that all kernels are compiled and all plans built.
    stream : cupy.cuda.Stream
        The current stream; CUDA cannot capture the default stream.

    Returns
    -------
    callable
        Replays the work; holds a reference to the graph.

    Raises
    ------
    halox.errors.StateError
        If the path of an exchange cannot be captured; the stream remains usable.

    Notes
    -----
    Local. If the work contains exchanges, all ranks must capture it, and replay it equally often.
    The capture itself does not run the work.
    """
    stream.begin_capture()
    try:
        work()
    except BaseException:
        stream.end_capture()
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)
