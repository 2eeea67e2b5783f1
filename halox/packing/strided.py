"""Strided copies and additions on a GPU, and the packer for datatypes of few strided parts.

:mod:`halox.packing.strided_plan` plans a launch and makes its table. This module uploads tables and launches kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from halox.errors import DatatypeError
from halox.packing.device_packer import (
    Base,
    DevicePacker,
    Launches,
    nothing,
    table_launch,
)
from halox.packing.ordering import rounds
from halox.packing.refine import MAX_PARTS, Copy, paired
from halox.packing.strided_plan import BASES, StridedPlan, plan
from halox.runtime.gpu.cuda import multiprocessors
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.memory import uploaded

if TYPE_CHECKING:
    from halox.datatypes import Datatype

_ELEMENTS = {
    "f2": "Half",
    "f4": "float",
    "f8": "double",
    "c8": "float",
    "c16": "double",
    "i1": "unsigned char",
    "u1": "unsigned char",
    "i2": "unsigned short",
    "u2": "unsigned short",
    "i4": "unsigned int",
    "u4": "unsigned int",
    "i8": "unsigned long long",
    "u8": "unsigned long long",
}


_ARRAY, _PACKED = 0, 1


class StridedPacker(DevicePacker):
    """Packs datatypes that consist of few strided parts; see :class:`DevicePacker`.

    Words are as wide as the layout and the addresses of a call allow. The packer makes the plan and the
    table for a word width when a call first needs this width.
    """

    method: ClassVar[str] = "strided"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        pairs = paired(0, datatype, count, 0, array=_ARRAY)
        assert pairs is not None
        both = [(array, packed._replace(array=_PACKED)) for array, packed in pairs]
        self._packing = [Copy(array, packed) for array, packed in both]
        self._unpacking = [Copy(packed, array) for array, packed in both]
        # The key is the lowest bits of both addresses, combined by OR, which limit the word width.
        self._packs: dict[int, _Launch] = {}
        self._unpacks: dict[int, _Launch] = {}

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        if paired(0, datatype, count, 0) is None:
            return f"its blocks form more than {MAX_PARTS} regular parts"
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        bits = (array | packed) & 15
        launch = self._packs.get(bits)
        if launch is None:
            launch = self._packs[bits] = self._make_launch(self._packing, bits)
        launch.launch_with(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        bits = (array | packed) & 15
        launch = self._unpacks.get(bits)
        if launch is None:
            launch = self._unpacks[bits] = self._make_launch(self._unpacking, bits)
        launch.launch_with(stream, array, packed)

    def _make_launch(self, copies: Sequence[Copy], bits: int) -> _Launch:
        bits |= 16
        sms = multiprocessors(self.device)
        planned = plan(
            copies, sms=sms, max_blocks=self.max_blocks, max_word=bits & -bits, tiles=True
        )
        return _Launch("strided_copy", planned, self.device)


class StridedCopy(Launches):
    """Strided copies in one kernel launch for every 15 arrays.

    All addresses must be valid on the GPU: in its own memory, in a peer's memory, or in mapped host memory. The caller
    must keep this memory alive. Tables that are too large for a launch's parameters are uploaded, which waits: the
    constructor must not be called while a stream is being captured.

    Targets must not overlap one another or any source. ``max_blocks`` limits the thread blocks. The first launch leaves
    ``mark`` when it starts, unless there is nothing to copy. Shifts must be multiples of ``max_word``.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        *,
        device: int,
        max_blocks: int | None = None,
        mark: Mark | None = None,
        max_word: int = 16,
    ) -> None:
        launches: list[_Launch] = []
        sms = multiprocessors(device)
        for group in _groups(copies):
            planned = plan(group, sms=sms, max_blocks=max_blocks, max_word=max_word, tiles=True)
            if planned.chunks:
                launches.append(_Launch("strided_copy", planned, device, mark=mark))
                mark = None
        super().__init__(launches)
        self.nbytes = sum(launch.nbytes for launch in launches)
        """Bytes that a launch moves."""


class StridedAdd(Launches):
    """Strided additions, ``target += source`` element by element; otherwise see `StridedCopy`.

    Elements are floating-point numbers of 2, 4 or 8 bytes, complex numbers of 8 or 16 bytes, or integers.
    Overlapping targets are added in the given order, in consecutive launches, so equal inputs give equal
    bits. Sources must not overlap targets. Raises `DatatypeError` if elements of ``dtype`` cannot be
    added, if addresses or strides are not aligned to the elements, or if the targets overlap so often that
    the additions would need more than 4096 launches. Shifts must be multiples of ``max_word``.
    """

    def __init__(
        self, copies: Sequence[Copy], dtype: npt.DTypeLike, *, device: int, max_word: int = 16
    ) -> None:
        element, element_bytes = addition_element(dtype)
        plans = [
            plan(group, sms=multiprocessors(device), element_bytes=element_bytes, max_word=max_word)
            for together in rounds(copies)
            for group in _groups(together)
        ]
        defines = (("ELEMENT", element),)
        launches = [
            _Launch("strided_add", planned, device, defines) for planned in plans if planned.chunks
        ]
        super().__init__(launches)
        self.launches = len(launches)
        self.nbytes = sum(launch.nbytes for launch in launches)


def _groups(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Divide copies in any order into groups of at most 15 arrays, as many as a launch has bases."""

    def arrays_of(copy: Copy) -> set[int]:
        return {side.array for side in copy if side.array is not None}

    arrays: set[int] = set().union(*map(arrays_of, copies))
    if len(arrays) < BASES:
        yield copies
        return
    group: list[Copy] = []
    arrays = set()
    for copy in sorted(copies, key=lambda copy: sorted(arrays_of(copy))):
        if len(arrays | arrays_of(copy)) >= BASES:
            yield group
            group, arrays = [], set()
        group.append(copy)
        arrays |= arrays_of(copy)
    yield group


def addition_element(dtype: npt.DTypeLike) -> tuple[str, int]:
    """Return the C type and the bytes of the kernel's elements for a dtype; a complex number is two elements.

    Examples
    --------
    >>> addition_element("c16")
    ('double', 8)
    """
    asked = np.dtype(dtype)
    element = _ELEMENTS.get(f"{asked.kind}{asked.itemsize}") if asked.isnative else None
    if element is None:
        raise DatatypeError(
            f"dtype: got {asked}, which cannot be added on the GPU; allowed are native "
            f"{', '.join(_ELEMENTS)} (view bool as u1 only if counts are what you want)"
        )
    return element, asked.itemsize // (2 if asked.kind == "c" else 1)


class _Launch:
    """A prepared kernel launch for a plan; the table is in the launch's parameters or in device memory."""

    def __init__(
        self,
        name: str,
        planned: StridedPlan,
        device: int,
        defines: tuple[tuple[str, str], ...] = (),
        mark: Mark | None = None,
    ) -> None:
        self.nbytes = planned.nbytes
        self._bases = (ctypes.c_uint64 * BASES)()
        self.bases: list[Base] = [
            (self._bases, base, array) for base, array in enumerate(planned.arrays, 1)
        ]
        self._lock = Lock()
        self.at: Callable[[int], None] = nothing
        """Function that enqueues the launch, given a stream's address."""
        if not planned.chunks:
            return
        table = planned.table
        if not planned.inline:
            self._memory = uploaded(table, device)
            pointer = self._memory.pointer
            table = np.array([pointer, pointer + planned.regions.nbytes], np.uint64)
        self.at = table_launch(
            name,
            name,
            device,
            (planned.blocks, planned.threads),
            table.tobytes(),
            len(planned.regions),
            planned.chunks,
            planned.chunk_words,
            defines=(*planned.defines, *defines, *((("MARKED", "1"),) if mark else ())),
            more=mark.arguments if mark else (),
            bases=self._bases,
        ).launch

    def launch_with(self, stream: int, array: int, packed: int) -> None:
        """Launch a packing or an unpacking with these addresses; thread-safe."""
        bases = self._bases
        with self._lock:
            bases[1] = array  # base n + 1 is that of array n
            bases[2] = packed
            self.at(stream)
