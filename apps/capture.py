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
        so that all kernels are compiled and all plans made.
    stream : cupy.cuda.Stream
        The current stream; not the default one, which cannot be captured.

    Returns
    -------
    callable
        Repeats the work at each call; keeps the graph alive.

    Raises
    ------
    halox.errors.StateError
        If the path of an exchange cannot be captured; the stream can be used as before.

    Notes
    -----
    Local, but work that exchanges must be captured by all ranks, and replayed equally often by all.
    The capture itself does none of the work.
    """
    stream.begin_capture()
    try:
        work()
    except BaseException:
        stream.end_capture()
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)
