"""Base of the packers on a GPU, and the kernel launches that they prepare."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from halox.errors import DatatypeError
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.launch import Parameter, PreparedLaunch, check_max_blocks
from halox.runtime.gpu.streams import Stream

if TYPE_CHECKING:
    from halox.datatypes import Datatype


StreamLike = Stream | int | None
"""A stream, its address, or None for CuPy's current one."""


class Launchable(Protocol):
    """Work that can be enqueued on a stream, again and again."""

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        """Enqueue it on a stream of the current device, CuPy's current one by default; does not block.

        Addresses read and addresses written may be shifted, modulo 2**64, by multiples of the longest word, 16 bytes.
        """


class DevicePacker(ABC):
    """Packs and unpacks ``count`` items, one extent apart, of one datatype on one GPU.

    The constructor raises `DatatypeError`, with the reason, if the packer cannot take the type, and
    `DeviceError` if there is no GPU or ``max_blocks``, the most thread blocks of a launch, is less than
    1. The first call may compile, build and upload tables, and block; later calls only launch, so
    that they can be captured into a graph.
    """

    method: ClassVar[str]
    """Name of the strategy, as in ``halox.pack(..., method=...)``."""

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
        """Return a short reason why this packer cannot take the items, or None if it can."""
        return None

    @abstractmethod
    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory.

        Displacements count from the address ``array``; at ``packed`` are ``nbytes`` bytes of this GPU's memory, a
        peer's, or mapped host memory; ``stream`` is the address of a stream of the GPU, which must be the calling
        thread's current device.
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
    shared_bytes: int = 0,
    more: Sequence[Parameter] = (),
) -> PreparedLaunch:
    """Prepare a kernel of this room: its parameters are two addresses, a table, 32-bit numbers, and ``more`` of ctypes.

    ``shape`` is blocks and threads. The addresses are 0 until :meth:`PreparedLaunch.launch_at` sets
    them; memory that the table points to is the caller's to keep alive.
    """
    parameters = (
        ctypes.c_uint64(0),
        ctypes.c_uint64(0),
        (ctypes.c_char * len(table)).from_buffer_copy(table),
        *map(ctypes.c_uint32, numbers),
        *more,
    )
    loaded = kernel(name, function, device, defines)
    return PreparedLaunch(loaded, *shape, parameters, device=device, shared_bytes=shared_bytes)
