"""The strided packer on the GPU: tables of strided copies and additions, one kernel launch each.

Planning is in :mod:`halox.engine.packers.strided_plan`, which needs no GPU; here tables are
uploaded and kernels launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halox.datatypes import contiguous
from halox.engine.compiler import kernel
from halox.engine.cuda import cupy, multiprocessors, stream_pointer
from halox.engine.launch import PreparedLaunch
from halox.engine.packers.device_arrays import DeviceArray, device_array, packed_bytes
from halox.engine.packers.ordering import rounds
from halox.engine.packers.refine import Copy, Side, contiguous_side, sides
from halox.engine.packers.strided_plan import THREADS, Plan, plan
from halox.errors import DatatypeError

if TYPE_CHECKING:
    from halox.datatypes import Datatype

__all__ = [
    "Copy",
    "Side",
    "StridedAdd",
    "StridedCopy",
    "contiguous_side",
    "pack_device",
    "sides",
    "unpack_device",
]

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
        self._device = device
        planned = plan(copies, sms=multiprocessors(device), max_blocks=max_blocks)
        self.nbytes = planned.nbytes
        self._table = _Table(planned, device)
        self._launches = _prepare("strided_copy", planned, self._table.pointer, device)

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
        pointer = stream_pointer(stream)
        for launch in self._launches:
            launch.launch(pointer)


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
        self._device = device
        plans = [
            plan(together, sms=multiprocessors(device), element_bytes=element_bytes)
            for together in rounds(copies)
        ]
        self.nbytes = sum(planned.nbytes for planned in plans)
        self._tables = [_Table(planned, device) for planned in plans]
        self._launches = [
            launch
            for planned, table in zip(plans, self._tables, strict=True)
            for launch in _prepare("strided_add", planned, table.pointer, device, defines)
        ]

    @property
    def launches(self) -> int:
        """Kernel launches that the additions take."""
        return len(self._launches)

    def launch(self, stream: Any = None) -> None:
        """Perform the additions on a stream; see :meth:`StridedCopy.launch`."""
        pointer = stream_pointer(stream)
        for launch in self._launches:
            launch.launch(pointer)


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


def pack_device(array: Any, datatype: Datatype, count: int = 1, out: Any = None) -> Any:
    """Copy the bytes a datatype describes into contiguous device memory.

    Parameters
    ----------
    array : object with ``__cuda_array_interface__``
        Displacements count from its first element.
    datatype : Datatype
    count : int
        Items, one extent apart.
    out : array of uint8 on the same device, optional
        Contiguous, one-dimensional, at least ``count * datatype.size`` long. Made if not given.

    Returns
    -------
    array
        The first ``count * datatype.size`` bytes of ``out``, or a new CuPy array of them.

    Raises
    ------
    FieldError
        If the datatype reaches outside the array's allocation; names the byte range.
        If ``out`` is of another shape, dtype or device, too short or read-only.
    DeviceError
        If there is no GPU.

    Notes
    -----
    Not collective; does not block; ordered on CuPy's current stream. Plans and uploads a table on
    every call: in a time loop use a plan.
    """
    items = contiguous(count, datatype)
    nbytes = items.size
    source = device_array(array, "source")
    source.check_bounds(datatype, count)
    with cupy().cuda.Device(source.device):
        if out is None:
            out = cupy().empty(nbytes, np.uint8)
        packed = packed_bytes(out, "out", nbytes, source.device, writable=True)
        _once([Copy(side, at) for side, at in _pairs(source, items, packed)], source.device)
    return out[:nbytes]


def unpack_device(packed: Any, datatype: Datatype, array: Any, count: int = 1) -> None:
    """Copy contiguous bytes to where a datatype says; the reverse of :func:`pack_device`.

    Parameters
    ----------
    packed : array of uint8 on the array's device
        Contiguous, one-dimensional, at least ``count * datatype.size`` long.
    datatype : Datatype
    array : object with ``__cuda_array_interface__``
        Displacements count from its first element.
    count : int
        Items, one extent apart.

    Raises
    ------
    FieldError
        If the datatype reaches outside the array's allocation; names the byte range.
        If the array is read-only, or ``packed`` is of another shape, dtype or device, or too short.
    DeviceError
        If there is no GPU.

    Notes
    -----
    As for :func:`pack_device`. Where the datatype visits a byte twice, which value stays is not
    defined.
    """
    items = contiguous(count, datatype)
    target = device_array(array, "target", writable=True)
    target.check_bounds(datatype, count)
    with cupy().cuda.Device(target.device):
        source = packed_bytes(packed, "packed", items.size, target.device)
        copies = [Copy(at, side) for side, at in _pairs(target, items, source)]
        _once(copies, target.device)


def _pairs(array: DeviceArray, items: Datatype, packed: int) -> list[tuple[Side, Side]]:
    """Each strided side of an array beside its place in a packed buffer."""
    return [
        (side, contiguous_side(packed + offset, side.strided.nbytes))
        for offset, side in sides(array.pointer, items)
    ]


def _once(copies: Sequence[Copy], device: int) -> None:
    """Perform copies on CuPy's current stream, without waiting.

    The table comes from CuPy's pool, which hands memory on in stream order: it may be let go of
    before the kernel has run.
    """
    planned = plan(copies, sms=multiprocessors(device))
    table = cupy().asarray(planned.table)
    for launch in _prepare("strided_copy", planned, int(table.data.ptr), device):
        launch.launch(stream_pointer())


class _Table:
    """A plan's table in device memory of its own.

    Not from CuPy's pool: a plan may be let go of while its last launch runs on any stream, and
    the pool knows only the stream that memory was made on. cudaFree waits.
    """

    def __init__(self, planned: Plan, device: int) -> None:
        cp = cupy()
        self.pointer = 0
        table = planned.table
        if not table.nbytes:
            return
        with cp.cuda.Device(device):
            self._memory = cp.cuda.Memory(table.nbytes)
            self.pointer = int(self._memory.ptr)
            stream = cp.cuda.Stream(non_blocking=True)
            runtime = cp.cuda.runtime
            runtime.memcpyAsync(
                self.pointer,
                table.ctypes.data,
                table.nbytes,
                runtime.memcpyHostToDevice,
                stream.ptr,
            )
            stream.synchronize()


def _prepare(
    name: str,
    planned: Plan,
    table: int,
    device: int,
    defines: tuple[tuple[str, str], ...] = (),
) -> list[PreparedLaunch]:
    """One launch, or none where there is nothing to move."""
    if not planned.chunks:
        return []
    function = kernel(name, name, device, defines)
    args = (
        ctypes.c_void_p(table),
        ctypes.c_void_p(table + planned.chunk_region_offset),
        ctypes.c_uint32(planned.chunks),
        ctypes.c_uint32(planned.chunk_words),
    )
    return [PreparedLaunch(function, planned.blocks, THREADS, args, device=device)]
