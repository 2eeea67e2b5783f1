"""Strided copies and additions on a GPU, a kernel launch each, and the packer built on them.

:mod:`halox.packing.strided_plan` makes the tables; they are uploaded and launched here.
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
from halox.packing.strided_plan import Plan, plan
from halox.runtime.gpu.cuda import multiprocessors, stream_pointer
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


class StridedPacker(DevicePacker):
    """Packs types that consist of few strided parts; see :class:`DevicePacker`.

    Words are as wide as the layout and the addresses of a call allow; each width is planned, and
    its table made, when it first occurs.
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
        # By the lowest bits of both addresses together, which bound the words.
        self._packs: dict[int, _Launch] = {}
        self._unpacks: dict[int, _Launch] = {}

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return a short reason why this packer cannot take the items, or None if it can."""
        if paired(0, datatype, count, 0) is None:
            return f"its blocks form more than {MAX_PARTS} regular parts"
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory."""
        bits = (array | packed) & 15
        launch = self._packs.get(bits)
        if launch is None:
            launch = self._packs[bits] = self._made(self._packing, bits)
        launch.at(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to the places of the items."""
        bits = (array | packed) & 15
        launch = self._unpacks.get(bits)
        if launch is None:
            launch = self._unpacks[bits] = self._made(self._unpacking, bits)
        launch.at(stream, packed, array)

    def _made(self, copies: Sequence[Copy], bits: int) -> _Launch:
        bits |= 16
        sms = multiprocessors(self.device)
        planned = plan(
            copies, sms=sms, max_blocks=self.max_blocks, max_word=bits & -bits, tiles=True
        )
        return _Launch("strided_copy", planned, self.device)


class StridedCopy:
    """Strided copies, all performed by one kernel launch.

    Addresses must be valid on ``device``: of its own memory, a peer's, or mapped host memory.
    Targets must not overlap one another or any source. ``max_blocks`` limits the thread blocks. Making
    one allocates and uploads a table if it is too large for the launch's parameters, and waits for
    that; do it while no stream is being captured. Memory at the addresses is the caller's to keep alive.
    The launch leaves a ``mark`` as it starts, unless there is nothing to copy.
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
        """:meth:`launch` on a stream given by its address."""

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        """Enqueue the copies; see :class:`~halox.packing.device_packer.Launchable`."""
        self.at(stream_pointer(stream), source, target)


class StridedAdd:
    """Strided additions, ``target += source`` element by element.

    Elements are floating point of 2, 4, 8 bytes, complex of 8, 16, or integers. Where targets overlap,
    additions happen in the order given, in launches one after another; equal inputs give equal
    bits. Sources must not overlap targets. Raises `DatatypeError` if elements of that dtype cannot be
    added, addresses or strides are not aligned to them, or targets overlap so often that it would
    take more than 4096 launches. Otherwise as :class:`StridedCopy`.
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
        """Number of kernel launches."""
        return len(self._launches)

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        """Enqueue the additions; see :class:`~halox.packing.device_packer.Launchable`."""
        pointer = stream_pointer(stream)
        for launch in self._launches:
            launch.at(pointer, source, target)


def addition_element(dtype: npt.DTypeLike) -> tuple[str, int]:
    """C type and bytes of the kernel's elements for a dtype; a complex number is two of them.

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
    """A plan with its kernel and its table, in the launch's parameters or in device memory."""

    def __init__(
        self,
        name: str,
        planned: Plan,
        device: int,
        defines: tuple[tuple[str, str], ...] = (),
        mark: Mark | None = None,
    ) -> None:
        self.at: Callable[[int, int, int], None] = _nothing
        """Enqueues it on a stream, the plan's addresses being relative to two others."""
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
