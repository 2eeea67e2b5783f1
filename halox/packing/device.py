"""GPU launches for the parts of messages: pack, unpack, add, and copy between arrays.

The paths call the ``launch_*`` functions when a plan is made; exchanges then only run the launches. One kernel packs or
unpacks the parts of all strided datatypes, and a second kernel all irregular datatypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from halox.errors import DatatypeError
from halox.packing.device_arrays import device_array
from halox.packing.device_packer import Launchable, StreamLike
from halox.packing.refine import Copy, Side, cut_parts, paired
from halox.packing.strided import StridedAdd, StridedCopy
from halox.packing.workunits import WorkUnitsCopy
from halox.runtime.arrays import Described
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import Mark, MarkLaunch
from halox.runtime.gpu.streams import stream_pointer

if TYPE_CHECKING:
    from halox.datatypes import Datatype

Endpoint = tuple[Described, "Datatype", int]
"""An array on the GPU, and a datatype and a count; displacements are relative to the array's first element."""

Move = tuple[Endpoint, int]
"""An endpoint, and the address of its packed bytes."""

FragmentedMove = tuple[Endpoint, int, Sequence[int]]
"""An endpoint, the address of its packed bytes, and for each fragment the end of the endpoint's share of it, as an
offset from this address."""

_Irregular = tuple["Datatype", int, int, int]
"""Input of `WorkUnitsCopy`: a datatype, a count, and the addresses of the array and of the packed bytes."""

_Addition = tuple[Sequence[Copy], np.dtype[np.generic]]
"""Copies that add, and the dtype of their elements."""
_MOST_ADDED_PARTS = 1 << 20


class Launches:
    """Several launches, in order on one stream, and the memory that they need."""

    def __init__(self, parts: Sequence[Launchable], keep: Sequence[object] = ()) -> None:
        self._parts = tuple(parts)
        self._keep = tuple(keep)
        only = self._parts[0] if len(self._parts) == 1 else None
        self.at: Callable[[int, int, int], None] | None = getattr(only, "at", None)
        """:meth:`launch` with a stream's address; None unless there is exactly one launch that supports this."""

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        """Enqueue all launches; see :class:`~halox.packing.device_packer.Launchable`."""
        pointer = stream_pointer(stream)
        for part in self._parts:
            part.launch(pointer, source, target)


def launch_pack(
    moves: Sequence[Move],
    device: int,
    mark: Mark | None = None,
    pairs: Sequence[tuple[Endpoint, Endpoint]] = (),
) -> Launches:
    """Return one launch that packs all strided endpoints, and one launch that packs all irregular endpoints.

    The first launch leaves ``mark`` when it starts. It also copies the first endpoint of each pair in ``pairs`` to the
    second endpoint. Both endpoints of a pair must have a strided form.
    """
    between = [
        Copy(a, b) for first, second in pairs if (a := _whole(first)) and (b := _whole(second))
    ]
    assert len(between) == len(pairs)
    return _moving(moves, device, unpack=False, mark=mark, between=between)


def launch_unpack(moves: Sequence[Move], device: int, mark: Mark | None = None) -> Launches:
    """Return one launch that unpacks all strided endpoints, and one launch that unpacks all irregular endpoints.

    The first launch leaves ``mark`` when it starts.
    """
    return _moving(moves, device, unpack=True, mark=mark)


def fragment_launches(
    moves: Sequence[FragmentedMove], fragments: int, device: int, *, unpack: bool
) -> list[Launches]:
    """Return launches like :func:`launch_pack` or :func:`launch_unpack`, separately for each fragment.

    Each move has one end per fragment. Uploads tables and waits for the uploads.
    """
    copies: list[list[Copy]] = [[] for _ in range(fragments)]
    irregular: list[list[_Irregular]] = [[] for _ in range(fragments)]
    for (array, datatype, count), packed, ends in moves:
        parts = cut_parts(array.pointer, datatype, count, packed, ends, unpack=unpack)
        if isinstance(parts, int):
            irregular[parts].append((datatype, count, array.pointer, packed))
            continue
        for fragment, fragment_parts in zip(copies, parts, strict=True):
            fragment += fragment_parts
    return [
        _launches(strided, others, device, unpack=unpack)
        for strided, others in zip(copies, irregular, strict=True)
    ]


def launch_add(moves: Sequence[Move], device: int, mark: Mark | None = None) -> Launches:
    """Return launches that leave ``mark`` and then add packed elements to endpoints, in order and in their dtypes."""
    additions = _adding([(_additions(*move), element_type(move[0])) for move in moves], device)
    return additions if mark is None else Launches([MarkLaunch(mark, device), additions])


def launch_between(
    pairs: Sequence[tuple[Endpoint, Endpoint]], operation: str, device: int
) -> Launchable:
    """Return launches that copy or add the first endpoint of each pair to the second endpoint.

    One launch copies all pairs of strided datatypes. Other pairs are packed into a buffer and unpacked from it; the
    addresses of the launches must then not be shifted.
    """
    copies: list[Copy] = []
    additions: list[_Addition] = []
    packing: list[Move] = []
    unpacking: list[Move] = []
    buffers = []
    for source, target in pairs:
        a, b = _whole(source), _whole(target)
        if a is not None and b is not None:
            if operation == "add":
                additions.append(([Copy(a, b)], element_type(target)))
            else:
                copies.append(Copy(a, b))
            continue
        with cupy().cuda.Device(device):
            buffers.append(cupy().cuda.Memory(max(1, source[1].size * source[2])))
        packed = int(buffers[-1].ptr)
        packing.append((source, packed))
        if operation == "add":
            additions.append((_additions(target, packed), element_type(target)))
        else:
            unpacking.append((target, packed))
    parts: list[Launchable] = []
    if packing:
        parts.append(launch_pack(packing, device))
    if additions:
        parts.append(_adding(additions, device))
    if copies:
        parts.append(StridedCopy(copies, device=device))
    if unpacking:
        parts.append(launch_unpack(unpacking, device))
    return parts[0] if len(parts) == 1 else Launches(parts, keep=buffers)


def launch_zeros(endpoints: Sequence[Endpoint], device: int) -> Launches:
    """Return launches that set endpoints to zero."""
    nbytes = max(datatype.size * count for _, datatype, count in endpoints)
    with cupy().cuda.Device(device):
        zeros = cupy().zeros(nbytes, np.uint8)
        cupy().cuda.get_current_stream().synchronize()
    source = int(zeros.data.ptr)
    unpacking = launch_unpack([(endpoint, source) for endpoint in endpoints], device)
    return Launches([unpacking], keep=[zeros])


def element_type(endpoint: Endpoint) -> np.dtype[np.generic]:
    """Return the dtype of an endpoint's elements, for additions; `DatatypeError` if they have several dtypes."""
    _, datatype, _ = endpoint
    if datatype.uniform is None:
        raise DatatypeError(
            "accumulate needs elements of one numeric dtype; exchange the fields of a structure apart"
        )
    return datatype.uniform


def check_bounds(array: object, datatype: Datatype, count: int) -> None:
    """Raise `FieldError` if a datatype reaches outside an array's memory."""
    device_array(array, "array").check_bounds(datatype, count)


def _moving(
    moves: Sequence[Move],
    device: int,
    *,
    unpack: bool,
    mark: Mark | None = None,
    between: Sequence[Copy] = (),
) -> Launches:
    copies = [*between]
    irregular: list[_Irregular] = []
    for (array, datatype, count), packed in moves:
        pairs = paired(array.pointer, datatype, count, packed)
        if pairs is None:
            irregular.append((datatype, count, array.pointer, packed))
        else:
            copies += [Copy(b, a) if unpack else Copy(a, b) for a, b in pairs]
    return _launches(copies, irregular, device, unpack=unpack, mark=mark)


def _launches(
    copies: Sequence[Copy],
    irregular: Sequence[_Irregular],
    device: int,
    *,
    unpack: bool,
    mark: Mark | None = None,
) -> Launches:
    parts: list[Launchable] = []
    if copies:
        parts.append(strided := StridedCopy(copies, device=device, mark=mark))
        if strided.nbytes:
            mark = None  # the kernel sets it
    if mark is not None:
        parts.insert(0, MarkLaunch(mark, device))
    if irregular:
        parts.append(WorkUnitsCopy(irregular, unpack=unpack, device=device))
    return Launches(parts)


def _whole(endpoint: Endpoint) -> Side | None:
    """Return an endpoint as strided blocks; None if its items have no strided form."""
    array, datatype, count = endpoint
    strided = datatype.items(count).strided
    return None if strided is None else Side(array.pointer, strided)


def _adding(additions: Sequence[_Addition], device: int) -> Launches:
    return Launches(
        [
            StridedAdd([copy for copies, _ in group for copy in copies], dtype, device=device)
            for dtype, group in groupby(additions, key=lambda addition: addition[1])
        ]
    )


def _additions(endpoint: Endpoint, packed: int) -> list[Copy]:
    array, datatype, count = endpoint
    pairs = paired(array.pointer, datatype, count, packed, _MOST_ADDED_PARTS)
    if pairs is None:
        raise DatatypeError(
            f"adding {datatype!r} would take more than {_MOST_ADDED_PARTS} copies; use a datatype "
            "with fewer blocks, or add on the host"
        )
    return _joined([Copy(b, a) for a, b in pairs])


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Join consecutive copies of one shape at equal steps, which are common in long lists.

    The joined copies move the same bytes in the same order.
    """
    joined: list[Copy] = []
    series: list[Copy] = []
    for copy in copies:
        if series and not (
            _shape(copy) == _shape(series[0])
            and (len(series) == 1 or _step(series[-1], copy) == _step(*series[:2]))
        ):
            joined.append(_series_copy(series))
            series = []
        series.append(copy)
    if series:
        joined.append(_series_copy(series))
    return joined


def _shape(copy: Copy) -> list[Side]:
    """Return both sides without their offsets."""
    return [Side(side.pointer, side.strided.shifted(-side.strided.offset)) for side in copy]


def _step(first: Copy, second: Copy) -> list[int]:
    """Return the bytes from one copy to another, on both sides."""
    pairs = zip(first, second, strict=True)
    return [b.strided.offset - a.strided.offset for a, b in pairs]


def _series_copy(series: list[Copy]) -> Copy:
    """Return one copy equivalent to several copies at equal steps."""
    steps = _step(*series[:2]) if len(series) > 1 else [0, 0]
    sides = zip(series[0], steps, strict=True)
    return Copy(*(Side(s.pointer, s.strided.repeated(len(series), step)) for s, step in sides))
