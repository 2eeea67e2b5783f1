"""Packing in host memory with NumPy: `HostPacker`.

`halox.packing.host_layout` chooses the copies, and `halox.packing.host_copiers` makes them. The tests compare every
other packer with this one.
"""

from __future__ import annotations

import numpy as np

from halox.datatypes import Datatype
from halox.datatypes.arguments import count_of
from halox.errors import DatatypeError, FieldError
from halox.packing.host_copiers import Bytes, Call
from halox.packing.host_layout import host_layout
from halox.runtime.arrays import Array, HostArray, HostBytes, as_ndarray, borrow

_BYTE = np.dtype(np.uint8)


class HostPacker:
    """Packs the bytes that a datatype describes from an array in host memory, and unpacks them.

    The constructor checks the arguments and plans the copies; :meth:`pack` and :meth:`unpack` then only copy. ``array``
    is a NumPy array with any dtype and strides, or an array of another library that supports DLPack. Displacements are
    relative to the array's first element ``[0, ..., 0]``. If the array is a view, displacements may leave the view, but
    not the memory of its base array. The packer keeps a reference to an array, but not to the owner of a `HostArray`.

    ``nbytes`` is the number of packed bytes.

    Raises
    ------
    FieldError
        If ``array`` is not in host memory, is masked or holds Python objects, or if the datatype reaches beyond its
        memory.
    DatatypeError
        If ``count`` is not an integer, or negative.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> grid = np.arange(12, dtype="i4").reshape(3, 4)
    >>> column = HostPacker(grid[:, 1:], vector(3, 1, 4, "i4"))
    >>> packed = np.empty(column.nbytes, np.uint8)
    >>> column.pack(packed)
    >>> packed.view("i4")
    array([1, 5, 9], dtype=int32)
    """

    def __init__(self, array: Array | HostArray, datatype: Datatype, count: int = 1) -> None:
        if type(count) is not int or count < 0:
            count = count_of("count", count)
        first, stop = datatype.reach(count)
        self.nbytes = datatype.size * count
        self._datatype, self._count = datatype, count
        self._memory = _memory(array, first, stop) if self.nbytes else np.empty(0, np.uint8)
        self._layout = host_layout(datatype, count)

    def pack(self, out: Bytes) -> None:
        """Copy the described bytes, in the datatype's order, to the first ``nbytes`` bytes of ``out``.

        Raises
        ------
        FieldError
            If ``out`` is not a contiguous, writable uint8 array, or too short.
        """
        out = self._checked("out", out, written=True)
        self._layout.move(self._memory, out, False, self._datatype, self._count)

    def unpack(self, packed: Bytes) -> None:
        """Copy packed bytes to the places of the datatype.

        Raises
        ------
        FieldError
            If ``packed`` is not a contiguous uint8 array, or too short; or if the packer's array is read-only.
        """
        source = self._checked("packed", packed, written=False)
        self._check_target()
        self._layout.move(self._memory, source, True, self._datatype, self._count)

    def overlaps(self) -> bool:
        return self._layout.overlaps(self._datatype, self._count)

    def packing(self, out: Bytes) -> Call:
        """Return a prepared call that packs into ``out`` each time.

        `packing` raises the errors of :meth:`pack`; the returned call does not check again.
        """
        out = self._checked("out", out, written=True)
        return self._layout.prepared(self._memory, out, False, self._datatype, self._count)

    def unpacking(self, packed: Bytes) -> Call:
        """Return a prepared call that unpacks ``packed`` each time.

        `unpacking` raises the errors of :meth:`unpack`; the returned call does not check again.
        """
        source = self._checked("packed", packed, written=False)
        self._check_target()
        return self._layout.prepared(self._memory, source, True, self._datatype, self._count)

    def _checked(self, name: str, buffer: Bytes, *, written: bool) -> Bytes:
        """Check a packed buffer, and cut it to ``nbytes`` bytes."""
        if not isinstance(buffer, np.ndarray):
            buffer = as_ndarray(buffer, name)
        if not isinstance(buffer, np.ndarray) or buffer.dtype != _BYTE or buffer.ndim != 1:
            given = (
                f"{buffer.dtype} of shape {buffer.shape}"
                if isinstance(buffer, np.ndarray)
                else type(buffer).__name__
            )
            raise FieldError(f"{name} must be a one-dimensional uint8 array, got {given}")
        if buffer.size < self.nbytes:
            raise FieldError(f"{name} must hold {self.nbytes} bytes or more, got {buffer.size}")
        if not buffer.flags.c_contiguous:
            raise FieldError(f"{name} must be contiguous, got strides {buffer.strides}")
        if written and not buffer.flags.writeable:
            raise FieldError(f"{name} is read-only; pass a writable array")
        return buffer if buffer.size == self.nbytes else buffer[: self.nbytes]

    def _check_target(self) -> None:
        if not self._memory.flags.writeable:
            raise FieldError("the target array is read-only; pass a writable one")


def _memory(array: Array | HostArray, first: int, stop: int) -> Bytes:
    """Return bytes ``first`` to ``stop`` of an array's memory, relative to its first element, after a check."""
    if isinstance(array, HostArray):
        array.check_inside(first, stop)
        return np.frombuffer(array.memory, np.uint8)[array.origin + first : array.origin + stop]
    if (
        type(array) is np.ndarray
        and first >= 0
        and stop <= array.nbytes
        and array.flags.c_contiguous
        and not array.dtype.hasobject
    ):
        try:
            return np.frombuffer(array, np.uint8, stop - first, first)
        except (TypeError, ValueError):  # a dtype without buffer support
            pass
    borrowed, root = borrow(array), as_ndarray(array)
    borrowed.check_inside(first, stop)
    memory = HostBytes(
        borrowed.pointer + first, (stop - first,), writable=root.flags.writeable, owner=root
    )
    return np.asarray(memory)


def overlapping(datatype: Datatype, count: int) -> DatatypeError:
    """Return the error for items that touch a byte twice, which must not be unpacked."""
    return DatatypeError(
        f"{count} item(s) of {datatype!r} touch some byte twice, so that they cannot be received "
        "into; give a datatype whose blocks do not overlap"
    )
