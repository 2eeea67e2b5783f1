"""GPU launches for the parts of messages: pack, unpack, add, and copy between arrays.

The paths call the ``launch_*`` functions when a plan is made; exchanges then only run the launches. One kernel packs or
unpacks the parts of all strided datatypes, and a second kernel the irregular datatypes.

The arrays of endpoints have numbers, by which `Launches.bases` say how to move to other arrays of the same layouts:
by multiples of ``word`` bytes, the longest word of the tables that the ``launch_*`` functions make. Only plans of
fields move, and the parts of fields are strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halox.packing.device_arrays import device_array
from halox.packing.device_packer import Launchable, Launches
from halox.packing.refine import Copy, Side, contiguous_side, cut_parts, paired
from halox.packing.strided import StridedAdd, StridedCopy
from halox.packing.workunits import WorkUnitsCopy
from halox.runtime.arrays import Described
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.marks import Mark, MarkLaunch

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

_Addition = tuple[Copy, Endpoint]
"""A copy that adds, and its target."""


def launch_pack(
    moves: Sequence[Move],
    device: int,
    word: int = 16,
    mark: Mark | None = None,
    pairs: Sequence[tuple[Endpoint, Endpoint]] = (),
) -> Launches:
    """Return one launch that packs all strided endpoints, and one that packs all irregular endpoints.

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
    """Return one launch that unpacks all strided endpoints, and one that unpacks all irregular endpoints.

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
    """Return launches that leave ``mark`` and then add packed elements to endpoints, in order and in their dtypes.

    The endpoints are strided, as in all accumulations.
    """
    parts = []
    for end, packed in moves:
        target, nbytes = _whole(end), end.datatype.size * end.items
        assert target is not None
        parts.append((Copy(contiguous_side(packed, nbytes), target), end))
    additions = _adding(parts, device, word)
    return additions if mark is None else Launches([MarkLaunch(mark, device), additions])


def launch_between(
    pairs: Sequence[tuple[Endpoint, Endpoint]], operation: str, device: int, word: int = 16
) -> Launches:
    """Return launches that copy or add the first endpoint of each pair to the second endpoint.

    One launch copies all pairs of strided datatypes; only these are added. Other pairs are packed into a buffer and
    unpacked from it.
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
                additions.append((Copy(a, b), target))
            else:
                copies.append(Copy(a, b))
            continue
        assert operation == "copy", "additions are of strided parts"
        with cupy().cuda.Device(device):
            buffers.append(cupy().cuda.Memory(max(1, source.datatype.size * source.items)))
        packed = int(buffers[-1].ptr)
        packing.append((source, packed))
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
    if irregular:
        moved = [(end.datatype, end.items, end.array.pointer, packed) for end, packed in irregular]
        parts.append(WorkUnitsCopy(moved, unpack=unpack, device=device))
    return Launches(parts)


def _whole(endpoint: Endpoint) -> Side | None:
    """Return an endpoint as strided blocks; None if its items have no strided form."""
    array, datatype, count, number = endpoint
    strided = datatype.items(count).strided
    return None if strided is None else Side(array.pointer, strided, number)


def _adding(additions: Sequence[_Addition], device: int, word: int) -> Launches:
    parts = []
    for dtype, group in groupby(additions, key=lambda addition: addition[1].datatype.uniform):
        copies = [copy for copy, _ in group]
        parts.append(StridedAdd(copies, dtype, device=device, max_word=word))
    return Launches(parts)
