"""What all packers on the GPU have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from halox.errors import DatatypeError
from halox.runtime.gpu.launch import check_max_blocks

if TYPE_CHECKING:
    from halox.datatypes import Datatype


class DevicePacker(ABC):
    """Packs and unpacks ``count`` items of one datatype on one GPU, wherever the data lie.

    Parameters
    ----------
    datatype : Datatype
    count : int
        Items, one extent apart.
    device : int
        The GPU that does the work.
    max_blocks : int, optional
        Most thread blocks of a launch, to leave SMs to others; by default as many as there is
        work for.

    Attributes
    ----------
    method : str
        Name of the strategy, as in ``halox.pack(..., method=...)``.
    nbytes : int
        Bytes that a call moves.

    Raises
    ------
    DatatypeError
        If this packer cannot take the type; with the reason.
    DeviceError
        If there is no GPU, or ``max_blocks`` is less than 1.

    Notes
    -----
    Not collective. The first call may compile, build and upload tables, and block; later calls
    only launch, so that they can be captured into a graph.
    """

    method: ClassVar[str]

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
    @abstractmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return a short reason why this packer cannot take the items, or None if it can."""

    @abstractmethod
    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory.

        Parameters
        ----------
        array : int
            Address that displacements count from.
        packed : int
            Address of ``nbytes`` bytes: this GPU's memory, a peer's, or mapped host memory.
        stream : int
            Address of a stream of the GPU, which must be the calling thread's current device.
        """

    @abstractmethod
    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to where the items say; the reverse of :meth:`pack`."""
