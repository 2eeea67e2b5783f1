"""Steps captured in a CUDA graph, to be replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def captured(work: Callable[[], None], stream: Any) -> Callable[[], None]:
    """Capture what ``work`` puts on a stream; return what replays it there.

    Parameters
    ----------
    work : callable
        Launches on the current stream, and does nothing else on the GPU: all kernels are compiled
        and all plans made, for it has run before.
    stream : cupy.cuda.Stream
        The current stream; not the default one, which cannot be captured.

    Returns
    -------
    callable
        Does the work once more at each call; keeps the graph alive.

    Raises
    ------
    halox.errors.StateError
        If the path of an exchange cannot be captured; the stream can be used as before.

    Notes
    -----
    Local, but work that exchanges must be captured by all ranks, and replayed as often by all.
    Nothing is done at the capture itself.
    """
    stream.begin_capture()
    try:
        work()
    except BaseException:
        stream.end_capture()
        raise
    graph = stream.end_capture()
    return lambda: graph.launch(stream)
