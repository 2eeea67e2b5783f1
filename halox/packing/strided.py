"""Strided copies and additions on a GPU, and the packer for datatypes of few strided parts.

:mod:`halox.packing.strided_plan` plans a launch and makes its table. This module uploads tables and launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from halox.errors import DatatypeError
from halox.packing.device_packer import DevicePacker, StreamLike, table_launch
from halox.packing.ordering import rounds
from halox.packing.refine import MAX_PARTS, Copy, paired
from halox.packing.strided_plan import StridedPlan, plan
from halox.runtime.gpu.cuda import multiprocessors
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.memory import uploaded
from halox.runtime.gpu.streams import stream_pointer

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
        pairs = paired(0, datatype, count, 0)
        assert pairs is not None
        self._packing = [Copy(array, packed) for array, packed in pairs]
        self._unpacking = [Copy(packed, array) for array, packed in pairs]
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
        launch.at(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        bits = (array | packed) & 15
        launch = self._unpacks.get(bits)
        if launch is None:
            launch = self._unpacks[bits] = self._make_launch(self._unpacking, bits)
        launch.at(stream, packed, array)

    def _make_launch(self, copies: Sequence[Copy], bits: int) -> _Launch:
        bits |= 16
        sms = multiprocessors(self.device)
        planned = plan(
            copies, sms=sms, max_blocks=self.max_blocks, max_word=bits & -bits, tiles=True
        )
        return _Launch("strided_copy", planned, self.device)


class StridedCopy:
    """Strided copies in one kernel launch.

    All addresses must be valid on ``device``: in its own memory, in a peer's memory, or in mapped host
    memory. Targets must not overlap one another or any source. ``max_blocks`` limits the thread blocks.
    The launch leaves ``mark`` when it starts, unless there is nothing to copy.

    If the table is too large for the launch's parameters, the constructor allocates device memory,
    uploads the table and waits. Call the constructor while no stream is being captured. The caller must
    keep the memory at the addresses alive.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        *,
        device: int,
        max_blocks: int | None = None,
        mark: Mark | None = None,
    ) -> None:
        planned = plan(copies, sms=multiprocessors(device), max_blocks=max_blocks, tiles=True)
        self.nbytes = planned.nbytes
        """Bytes that a launch moves."""
        self._launch = _Launch("strided_copy", planned, device, mark=mark)
        self.at = self._launch.at
        """:meth:`launch` with a stream's address."""

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        self.at(stream_pointer(stream), source, target)


class StridedAdd:
    """Strided additions, ``target += source`` element by element.

    Elements are floating-point numbers of 2, 4 or 8 bytes, complex numbers of 8 or 16 bytes, or integers.
    Overlapping targets are added in the given order, in consecutive launches, so equal inputs give equal
    bits. Sources must not overlap targets. Raises `DatatypeError` if elements of ``dtype`` cannot be
    added, if addresses or strides are not aligned to the elements, or if the targets overlap so often that
    the additions would need more than 4096 launches. Otherwise see :class:`StridedCopy`.
    """

    def __init__(self, copies: Sequence[Copy], dtype: npt.DTypeLike, *, device: int) -> None:
        element, element_bytes = addition_element(dtype)
        defines = (("ELEMENT", element),)
        plans = [
            plan(together, sms=multiprocessors(device), element_bytes=element_bytes)
            for together in rounds(copies)
        ]
        self.nbytes = sum(planned.nbytes for planned in plans)
        self._launches = [
            _Launch("strided_add", planned, device, defines) for planned in plans if planned.chunks
        ]

    @property
    def launches(self) -> int:
        return len(self._launches)

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        pointer = stream_pointer(stream)
        for launch in self._launches:
            launch.at(pointer, source, target)


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


def _nothing(stream: int, source: int, target: int) -> None:
    """Launch nothing."""


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
        self.at: Callable[[int, int, int], None] = _nothing
        """Function that enqueues the launch, given a stream's address and two base addresses."""
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
        ).launch_at
