"""Capture of streams into CUDA graphs, and the refusal of work that a graph cannot hold."""

from __future__ import annotations

from functools import cache
from typing import Any

from halox.errors import StateError
from halox.runtime.gpu.cuda import cupy, stream_pointer

_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def is_capturing(stream: Any = None) -> bool:
    """Whether work put on a stream, CuPy's current one by default, would join a CUDA graph or break the capture of one.

    Does not block, and leaves a capture as it is. Takes less than a microsecond. True for the legacy default stream
    while a stream that waits for it is captured, since any work on it would end that capture.
    """
    query, refused = _query()
    try:
        return bool(query(stream_pointer(stream)))
    except refused as error:
        if error.status == _IMPLICIT:
            return True
        raise


def refuse_capture(stream: Any, path: str) -> None:
    """Raise `StateError` if a stream is being captured, before anything is put on it."""
    if is_capturing(stream):
        raise StateError(
            f"the {path} path needs the host in every exchange and cannot be captured in a CUDA graph; capture only "
            "the work around the exchange, or use the peer path, which can be captured, where every rank has a GPU of "
            'its own (path="peer" or HALOX_PATH=peer)'
        )


@cache
def _query() -> tuple[Any, Any]:
    runtime = cupy().cuda.runtime
    return runtime.streamIsCapturing, runtime.CUDARuntimeError
