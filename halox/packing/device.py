"""GPU launches for the parts of messages: pack, unpack, add, and copy between arrays.

The paths call the ``launch_*`` functions when a plan is made; exchanges then only run the launches. One kernel packs or
unpacks the parts of all strided datatypes, and a second kernel the irregular datatypes of an array.

The arrays of endpoints have numbers, by which `Launches.bases` say how to move to other arrays of the same layouts:
by multiples of ``word`` bytes, the longest word of the tables that the ``launch_*`` functions make.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halox.errors import DatatypeError
from halox.packing.device_arrays import device_array
from halox.packing.device_packer import Base, Launchable, Launches, StreamLike
from halox.packing.refine import Copy, Side, cut_parts, paired
from halox.packing.strided import StridedAdd, StridedCopy
from halox.packing.workunits import WorkUnitsCopy
from halox.runtime.arrays import Described
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import Mark, MarkLaunch
from halox.runtime.gpu.streams import stream_pointer

if TYPE_CHECKING:
    from halox.datatypes import Datatype


class Endpoint(NamedTuple):
    """An array on the GPU, and items of a datatype; displacements are relative to the array's first element."""

    array: Described
    datatype: Datatype
    items: int
    number: int | None = None  # of the array, among those that can be shifted


Move = tuple[Endpoint, int]
"""An endpoint, and the address of its packed bytes."""

FragmentedMove = tuple[Endpoint, int, Sequence[int]]
"""An endpoint, the address of its packed bytes, and for each fragment the end of the endpoint's share of it, as an
offset from this address."""

_Addition = tuple[Sequence[Copy], np.dtype[np.generic]]
"""Copies that add, and the dtype of their elements."""
_MOST_ADDED_PARTS = 1 << 20


class _Irregular:
    """Launch for the irregular datatypes of one array, whose kernel takes the words that the addresses allow."""

    def __init__(self, moves: Sequence[Move], *, unpack: bool, device: int) -> None:
        parts = [(end.datatype, end.items, end.array.pointer, packed) for end, packed in moves]
        self._copy = WorkUnitsCopy(parts, unpack=unpack, device=device)
        self._is_unpacking, self._shift = unpack, [0]
        number = moves[0][0].number
        self.bases: list[Base] = [] if number is None else [(self._shift, 0, number)]

    def launch(self, stream: StreamLike = None) -> None:
        self.at(stream_pointer(stream))

    def at(self, stream: int) -> None:
        if self._is_unpacking:
            self._copy.launch(stream, target=self._shift[0])
        else:
            self._copy.launch(stream, source=self._shift[0])


def launch_pack(
    moves: Sequence[Move],
    device: int,
    word: int = 16,
    mark: Mark | None = None,
    pairs: Sequence[tuple[Endpoint, Endpoint]] = (),
) -> Launches:
    """Return one launch that packs all strided endpoints, and launches that pack all irregular endpoints.

    The first launch leaves ``mark`` when it starts. It also copies the first endpoint of each pair in ``pairs`` to the
    second endpoint. Both endpoints of a pair must have a strided form.
    """
    between = [
        Copy(a, b) for first, second in pairs if (a := _whole(first)) and (b := _whole(second))
    ]
    assert len(between) == len(pairs)
    return _moving(moves, device, word, unpack=False, mark=mark, between=between)


def launch_unpack(
    moves: Sequence[Move], device: int, word: int = 16, mark: Mark | None = None
) -> Launches:
    """Return one launch that unpacks all strided endpoints, and launches that unpack all irregular endpoints.

    The first launch leaves ``mark`` when it starts.
    """
    return _moving(moves, device, word, unpack=True, mark=mark)


def fragment_launches(
    moves: Sequence[FragmentedMove], fragments: int, device: int, word: int = 16, *, unpack: bool
) -> list[Launches]:
    """Return launches like :func:`launch_pack` or :func:`launch_unpack`, separately for each fragment.

    Each move has one end per fragment. Uploads tables and waits for the uploads.
    """
    copies: list[list[Copy]] = [[] for _ in range(fragments)]
    irregular: list[list[Move]] = [[] for _ in range(fragments)]
    for endpoint, packed, ends in moves:
        array, datatype, count, number = endpoint
        parts = cut_parts(array.pointer, datatype, count, packed, ends, unpack=unpack, array=number)
        if isinstance(parts, int):
            irregular[parts].append((endpoint, packed))
            continue
        for fragment, fragment_parts in zip(copies, parts, strict=True):
            fragment += fragment_parts
    return [
        _launches(strided, others, device, word, unpack=unpack)
        for strided, others in zip(copies, irregular, strict=True)
    ]


def launch_add(
    moves: Sequence[Move], device: int, word: int = 16, mark: Mark | None = None
) -> Launches:
    """Return launches that leave ``mark`` and then add packed elements to endpoints, in order and in their dtypes."""
    parts = [(_additions(*move), element_type(move[0])) for move in moves]
    additions = _adding(parts, device, word)
    return additions if mark is None else Launches([MarkLaunch(mark, device), additions])


def launch_between(
    pairs: Sequence[tuple[Endpoint, Endpoint]], operation: str, device: int, word: int = 16
) -> Launches:
    """Return launches that copy or add the first endpoint of each pair to the second endpoint.

    One launch copies all pairs of strided datatypes. Other pairs are packed into a buffer and unpacked from it.
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
            buffers.append(cupy().cuda.Memory(max(1, source.datatype.size * source.items)))
        packed = int(buffers[-1].ptr)
        packing.append((source, packed))
        if operation == "add":
            additions.append((_additions(target, packed), element_type(target)))
        else:
            unpacking.append((target, packed))
    parts: list[Launchable] = []
    if packing:
        parts.append(launch_pack(packing, device, word))
    if additions:
        parts.append(_adding(additions, device, word))
    if copies:
        parts.append(StridedCopy(copies, device=device, max_word=word))
    if unpacking:
        parts.append(launch_unpack(unpacking, device, word))
    return Launches(parts, keep=buffers)


def launch_zeros(endpoints: Sequence[Endpoint], device: int, word: int = 16) -> Launches:
    """Return launches that set endpoints to zero."""
    nbytes = max(end.datatype.size * end.items for end in endpoints)
    with cupy().cuda.Device(device):
        zeros = cupy().zeros(nbytes, np.uint8)
        cupy().cuda.get_current_stream().synchronize()
    source = int(zeros.data.ptr)
    moves = [(endpoint, source) for endpoint in endpoints]
    unpacking = launch_unpack(moves, device, word)
    return Launches([unpacking], keep=[zeros])


def element_type(endpoint: Endpoint) -> np.dtype[np.generic]:
    """Return the dtype of an endpoint's elements, for additions; `DatatypeError` if they have several dtypes."""
    if endpoint.datatype.uniform is None:
        raise DatatypeError(
            "accumulate needs elements of one numeric dtype; exchange the fields of a structure apart"
        )
    return endpoint.datatype.uniform


def check_bounds(array: object, datatype: Datatype, count: int) -> None:
    """Raise `FieldError` if a datatype reaches outside an array's memory."""
    device_array(array, "array").check_bounds(datatype, count)


def _moving(
    moves: Sequence[Move],
    device: int,
    word: int,
    *,
    unpack: bool,
    mark: Mark | None = None,
    between: Sequence[Copy] = (),
) -> Launches:
    copies = [*between]
    irregular: list[Move] = []
    for endpoint, packed in moves:
        array, datatype, count, number = endpoint
        pairs = paired(array.pointer, datatype, count, packed, array=number)
        if pairs is None:
            irregular.append((endpoint, packed))
        else:
            copies += [Copy(b, a) if unpack else Copy(a, b) for a, b in pairs]
    return _launches(copies, irregular, device, word, unpack=unpack, mark=mark)


def _launches(
    copies: Sequence[Copy],
    irregular: Sequence[Move],
    device: int,
    word: int,
    *,
    unpack: bool,
    mark: Mark | None = None,
) -> Launches:
    parts: list[Launchable] = []
    if copies:
        strided = StridedCopy(copies, device=device, mark=mark, max_word=word)
        parts.append(strided)
        if strided.nbytes:
            mark = None  # the kernel sets it
    if mark is not None:
        parts.insert(0, MarkLaunch(mark, device))
    by_array: dict[int | None, list[Move]] = {}
    for move in irregular:
        by_array.setdefault(move[0].number, []).append(move)
    parts += [_Irregular(some, unpack=unpack, device=device) for some in by_array.values()]
    return Launches(parts)


def _whole(endpoint: Endpoint) -> Side | None:
    """Return an endpoint as strided blocks; None if its items have no strided form."""
    array, datatype, count, number = endpoint
    strided = datatype.items(count).strided
    return None if strided is None else Side(array.pointer, strided, number)


def _adding(additions: Sequence[_Addition], device: int, word: int) -> Launches:
    parts = []
    for dtype, group in groupby(additions, key=lambda addition: addition[1]):
        copies = [copy for some, _ in group for copy in some]
        parts.append(StridedAdd(copies, dtype, device=device, max_word=word))
    return Launches(parts)


def _additions(endpoint: Endpoint, packed: int) -> list[Copy]:
    array, datatype, count, number = endpoint
    pairs = paired(array.pointer, datatype, count, packed, _MOST_ADDED_PARTS, array=number)
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
    return [
        side._replace(strided=side.strided.shifted(-side.strided.offset))
        for side in (copy.source, copy.target)
    ]


def _step(first: Copy, second: Copy) -> list[int]:
    """Return the bytes from one copy to another, on both sides."""
    pairs = zip(first, second, strict=True)
    return [b.strided.offset - a.strided.offset for a, b in pairs]


def _series_copy(series: list[Copy]) -> Copy:
    """Return one copy equivalent to several copies at equal steps."""
    steps = _step(*series[:2]) if len(series) > 1 else [0, 0]
    sides = zip(series[0], steps, strict=True)
    source, target = (
        side._replace(strided=side.strided.repeated(len(series), step)) for side, step in sides
    )
    return Copy(source, target)
