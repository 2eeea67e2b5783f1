"""The order of work that goes to one stream now and to another later."""

from __future__ import annotations

from typing import Any

from halox.engine.capture import is_capturing
from halox.engine.cuda import cupy


def order_after(last: Any, stream: Any) -> None:
    """Order a stream after all that another holds by now.

    Parameters
    ----------
    last : cupy.cuda.Stream or None
        None where nothing has gone to any stream before.
    stream : cupy.cuda.Stream

    Notes
    -----
    Not collective; does not block. Does nothing where either is being captured: a capture holds its own work alone.
    """
    if last is None or last.ptr == stream.ptr or is_capturing(stream) or is_capturing(last):
        return
    event = cupy().cuda.Event(disable_timing=True)
    event.record(last)
    stream.wait_event(event)
