"""Launches that move the parts of messages on a GPU: into packed buffers, out of them, and between arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.engine.arrays import Described
from halox.engine.cuda import cupy, stream_pointer
from halox.engine.packers.device_arrays import device_array
from halox.engine.packers.strided import (
    Copy,
    Side,
    StridedAdd,
    StridedCopy,
    contiguous_side,
    sides,
)
from halox.errors import DatatypeError

if TYPE_CHECKING:
    from halox.datatypes import Datatype

Endpoint = tuple[Described, "Datatype", int]
"""An array on the GPU, and a datatype with its count at the array's first element."""


def pack_copies(endpoint: Endpoint, packed: int) -> list[Copy]:
    """Return the copies that pack an endpoint at an address."""
    return [Copy(side, at) for side, at in _beside(endpoint, packed)]


def unpack_copies(endpoint: Endpoint, packed: int) -> list[Copy]:
    """Return the copies that unpack an endpoint from an address."""
    return [Copy(at, side) for side, at in _beside(endpoint, packed)]


class Launches:
    """Several launches, one after the other on the same stream, and what they need kept alive."""

    def __init__(self, parts: Sequence[Any], keep: Sequence[Any] = ()) -> None:
        self._parts = tuple(parts)
        self._keep = tuple(keep)

    def launch(self, stream: Any = None) -> None:
        """Put all of them on a stream, CuPy's current one by default."""
        pointer = stream_pointer(stream)
        for part in self._parts:
            part.launch(pointer)


def launch_copy(copies: Sequence[Copy], device: int) -> StridedCopy:
    """Return one launch that performs all copies; allocates its table on the device."""
    return StridedCopy(copies, device=device)


def launch_add(pieces: Sequence[tuple[Sequence[Copy], np.dtype[Any]]], device: int) -> Launches:
    """Return launches that add sources to targets in the order given, each in its dtype."""
    return Launches(
        [
            StridedAdd([copy for copies, _ in group for copy in copies], dtype, device=device)
            for dtype, group in groupby(pieces, key=lambda piece: piece[1])
        ]
    )


def launch_between(
    pairs: Sequence[tuple[Endpoint, Endpoint]], operation: str, device: int
) -> Launches:
    """Return launches that copy, or add, from the first endpoint of each pair to the second.

    Strided types move in one launch; types that are not go through a packed buffer.
    """
    packing: list[Copy] = []
    moving: list[tuple[list[Copy], np.dtype[Any]]] = []
    buffers = []
    for source, target in pairs:
        dtype = element_type(target) if operation == "add" else np.dtype("u1")
        a, b = _sides(source), _sides(target)
        if len(a) == len(b) == 1:
            moving.append(([Copy(a[0][1], b[0][1])], dtype))
            continue
        with cupy().cuda.Device(device):
            buffers.append(cupy().cuda.Memory(source[1].size * source[2]))
        packing += pack_copies(source, int(buffers[-1].ptr))
        moving.append((unpack_copies(target, int(buffers[-1].ptr)), dtype))
    if operation == "add":
        last: Any = launch_add(moving, device)
    else:
        last = launch_copy([copy for copies, _ in moving for copy in copies], device)
    return Launches([launch_copy(packing, device), last] if packing else [last], keep=buffers)


class Zeroing:
    """One launch that sets endpoints to zero."""

    def __init__(self, endpoints: Sequence[Endpoint], device: int) -> None:
        nbytes = max(datatype.size * count for _, datatype, count in endpoints)
        with cupy().cuda.Device(device):
            self._zeros = cupy().zeros(nbytes, np.uint8)
            cupy().cuda.get_current_stream().synchronize()
        source = int(self._zeros.data.ptr)
        self._copy = StridedCopy(
            [copy for endpoint in endpoints for copy in unpack_copies(endpoint, source)],
            device=device,
        )

    def launch(self, stream: Any = None) -> None:
        """Put it on a stream, CuPy's current one by default."""
        self._copy.launch(stream)


def element_type(endpoint: Endpoint) -> np.dtype[Any]:
    """Return the dtype in which an endpoint's elements are added."""
    _, datatype, _ = endpoint
    if datatype.uniform is None:
        raise DatatypeError(
            "accumulate needs elements of one numeric dtype; exchange the fields of a structure apart"
        )
    return datatype.uniform


def check_bounds(array: Any, datatype: Datatype, count: int) -> None:
    """Raise `FieldError` if a datatype reaches outside an array's memory."""
    device_array(array, "array").check_bounds(datatype, count)


def _sides(endpoint: Endpoint) -> list[tuple[int, Side]]:
    found, datatype, count = endpoint
    return sides(found.pointer, datatype, count)


def _beside(endpoint: Endpoint, packed: int) -> list[tuple[Side, Side]]:
    return [
        (side, contiguous_side(packed + offset, side.strided.nbytes))
        for offset, side in _sides(endpoint)
    ]
