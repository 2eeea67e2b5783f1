"""Interfaces of the GPU packers (`DevicePacker`) and of prepared work (`Launchable`), and preparation of launches."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from halox.errors import DatatypeError
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.launch import Parameter, PreparedLaunch, check_max_blocks

if TYPE_CHECKING:
    from halox.datatypes import Datatype


Base: TypeAlias = tuple[Any, int, int]
"""A list or an array of ctypes, the index of an array's shift in it, and the number of that array."""


class Launchable(Protocol):
    """Work that can be enqueued on a stream any number of times."""

    @property
    def at(self) -> Callable[[int], None]:
        """Function that enqueues the work on a stream of the current device, given by its address; does not block."""

    @property
    def bases(self) -> Sequence[Base]:
        """Where the shifts of the arrays are set, for all later launches: in bytes, modulo 2**64.

        The shifts must be multiples of the longest word for which the work was made.
        """


class Launches:
    """Several launches, in order on one stream, and the memory that they need."""

    def __init__(self, parts: Sequence[Launchable], keep: Sequence[object] = ()) -> None:
        self._parts = tuple(parts)
        self._keep = tuple(keep)
        calls = [part.at for part in self._parts]
        self.at = calls[0] if len(calls) == 1 else partial(_call_all, calls)

    @property
    def bases(self) -> list[Base]:
        return [base for part in self._parts for base in part.bases]


def nothing(stream: int) -> None:
    """Launch nothing."""


def _call_all(calls: Sequence[Callable[[int], None]], stream: int) -> None:
    for call in calls:
        call(stream)


class DevicePacker(ABC):
    """Packs and unpacks ``count`` items, one extent apart, of one datatype on one GPU.

    ``max_blocks`` limits the thread blocks of a launch. The constructor raises `DatatypeError`, with the
    reason, if the packer cannot pack the datatype. It raises `DeviceError` if there is no GPU or
    ``max_blocks`` is less than 1. The first call may compile a kernel, build and upload tables, and block.
    Later calls only launch and can be captured into a graph.
    """

    method: ClassVar[str]
    """Name of the packer, as in ``halox.pack(..., method=...)``."""

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        check_max_blocks(max_blocks)
        reason = self.why_not(datatype, count)
        if reason is not None:
            raise DatatypeError(f"method {self.method!r} cannot pack this datatype: {reason}")
        self.datatype = datatype
        self.count = count
        self.device = device
        self.max_blocks = max_blocks
        self.nbytes = datatype.size * count

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return a short reason why the packer cannot pack the items, or None if it can."""
        return None

    @abstractmethod
    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory.

        Displacements are relative to the address ``array``. ``packed`` is the address of ``nbytes`` bytes in the memory
        of this GPU or of a peer, or in mapped host memory. ``stream`` is the address of a stream of this GPU, and this
        GPU must be the calling thread's current device.
        """

    @abstractmethod
    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to the places of the items; the reverse of :meth:`pack`."""


def table_launch(
    name: str,
    function: str,
    device: int,
    shape: tuple[int, int],
    table: bytes,
    *numbers: int,
    defines: tuple[tuple[str, str], ...] = (),
    more: Sequence[Parameter] = (),
    bases: Parameter | None = None,
) -> PreparedLaunch:
    """Prepare a launch of a packing kernel.

    The kernel's parameters are two addresses, ``table``, the 32-bit ``numbers``, and the ctypes values ``more``.
    ``shape`` is the number of blocks, and of threads per block. The addresses are 0 until
    :meth:`PreparedLaunch.launch_at` sets them; ``bases`` takes their place in a kernel of many bases. The caller must
    keep memory alive that the table points to.
    """
    addresses = (ctypes.c_uint64(0), ctypes.c_uint64(0)) if bases is None else (bases,)
    parameters = (
        *addresses,
        (ctypes.c_char * len(table)).from_buffer_copy(table),
        *map(ctypes.c_uint32, numbers),
        *more,
    )
    loaded = kernel(name, function, device, defines)
    return PreparedLaunch(loaded, *shape, parameters, device=device)
