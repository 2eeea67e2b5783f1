"""The strided packer on the GPU: tables of strided copies and additions, one kernel launch each.

Planning is in :mod:`halox.packing.strided_plan`, which needs no GPU; here tables are
uploaded and kernels launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from halox.errors import DatatypeError
from halox.packing.device_packer import DevicePacker
from halox.packing.ordering import rounds
from halox.packing.refine import MAX_PARTS, Copy, paired
from halox.packing.strided_plan import Plan, plan
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import multiprocessors, stream_pointer
from halox.runtime.gpu.device_memory import uploaded
from halox.runtime.gpu.launch import PreparedLaunch

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

    Notes
    -----
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
        """Copy contiguous bytes to where the items say."""
        bits = (array | packed) & 15
        launch = self._unpacks.get(bits)
        if launch is None:
            launch = self._unpacks[bits] = self._made(self._unpacking, bits)
        launch.at(stream, packed, array)

    def _made(self, copies: Sequence[Copy], bits: int) -> _Launch:
        bits |= 16
        sms = multiprocessors(self.device)
        planned = plan(copies, sms=sms, max_blocks=self.max_blocks, max_word=bits & -bits)
        return _Launch("strided_copy", planned, self.device)


class StridedCopy:
    """Strided copies, all performed by one kernel launch.

    Parameters
    ----------
    copies : sequence of Copy
        Addresses must be valid on the device: its own memory, a peer's, or mapped host memory.
        Targets must not overlap one another or any source; if they do, which bytes arrive is not
        defined.
    device : int
        The GPU that runs the kernel.
    max_blocks : int, optional
        Most thread blocks of 128 threads, to leave SMs to others; by default as many as there is
        work for.

    Attributes
    ----------
    nbytes : int
        Bytes that a launch moves.

    Raises
    ------
    DatatypeError
        If the sides of a copy differ in bytes.
    DeviceError
        If there is no GPU or the kernel cannot be loaded.

    Notes
    -----
    Not collective. Making one allocates device memory for the table (some 200 bytes a copy, 4
    bytes a chunk) and waits until it is uploaded; do it while no stream is being captured. What
    the addresses point to is the caller's to keep alive.
    """

    def __init__(
        self, copies: Sequence[Copy], *, device: int, max_blocks: int | None = None
    ) -> None:
        planned = plan(copies, sms=multiprocessors(device), max_blocks=max_blocks)
        self.nbytes = planned.nbytes
        self._launch = _Launch("strided_copy", planned, device)

    def launch(self, stream: Any = None) -> None:
        """Perform the copies on a stream.

        Parameters
        ----------
        stream : cupy.cuda.Stream, int or None
            A stream of the device, its address, or CuPy's current one.

        Notes
        -----
        Not collective; does not block; ordered as work of the stream, and may be captured. The
        GPU must be the calling thread's current device.
        """
        self._launch.at(stream_pointer(stream), 0, 0)


class StridedAdd:
    """Strided additions, ``target += source`` element by element.

    Parameters
    ----------
    copies : sequence of Copy
        What to add to what. Where targets overlap, additions happen in the order given, in
        launches one after another; equal inputs give equal bits. Sources must not overlap
        targets.
    dtype : dtype-like
        Type of the elements: floating point of 2, 4, 8 bytes, complex of 8, 16, or integers.
    device : int
        The GPU that runs the kernels.

    Attributes
    ----------
    nbytes : int
        Bytes of the targets that are added to.

    Raises
    ------
    DatatypeError
        If elements of that dtype cannot be added, or addresses or strides are not aligned to them.
        If the sides of a copy differ in bytes.
        If targets overlap so often that it would take more than 4096 launches.
    DeviceError
        If there is no GPU or the kernel cannot be loaded.

    Notes
    -----
    As for :class:`StridedCopy`.
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
        """Kernel launches that the additions take."""
        return len(self._launches)

    def launch(self, stream: Any = None) -> None:
        """Perform the additions on a stream; see :meth:`StridedCopy.launch`."""
        pointer = stream_pointer(stream)
        for launch in self._launches:
            launch.at(pointer, 0, 0)


def addition_element(dtype: npt.DTypeLike) -> tuple[str, int]:
    """C type and bytes of what the kernel adds for a dtype; a complex number is two of them.

    Raises
    ------
    DatatypeError
        If elements of that dtype cannot be added on the GPU.

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
    """A plan made ready: its table, in the launch's parameters or in device memory, and its kernel."""

    def __init__(
        self, name: str, planned: Plan, device: int, defines: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.at: Callable[[int, int, int], None] = _nothing
        """Puts it on a stream, the plan's addresses being relative to two others."""
        if not planned.chunks:
            return
        table = planned.table
        if not planned.inline:
            self._memory = uploaded(table, device)
            pointer = self._memory.pointer
            table = np.array([pointer, pointer + planned.chunk_region_offset], np.uint64)
        launch = PreparedLaunch(
            kernel(name, name, device, (*planned.defines, *defines)),
            planned.blocks,
            planned.threads,
            (
                ctypes.c_uint64(0),
                ctypes.c_uint64(0),
                (ctypes.c_char * table.nbytes).from_buffer_copy(table.tobytes()),
                ctypes.c_uint32(len(planned.regions)),
                ctypes.c_uint32(planned.chunks),
                ctypes.c_uint32(planned.chunk_words),
            ),
            device=device,
        )
        self.at = launch.launch_at
