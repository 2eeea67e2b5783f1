"""The work-unit packer on a GPU: any datatype, as lists of like pieces that warps work off.

After Wu et al. 2016, section 3.2. The conversion is in
:mod:`halox.packing.workunits_plan`, the lists' life on the device in
:mod:`halox.packing.workunits_lists`; here they become launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError
from halox.packing.device_packer import DevicePacker
from halox.packing.workunits_lists import (
    UnitList,
    cached_list,
    pipelined_list,
    unit_list,
)
from halox.packing.workunits_plan import (
    LISTED_SEGMENTS,
    UNIT_BYTES,
    Rows,
    default_unit_bytes,
    fits_inline,
    launch_of,
    repeated,
    table,
)
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors, stream_pointer
from halox.runtime.gpu.device_memory import DeviceBytes, uploaded
from halox.runtime.gpu.launch import PreparedLaunch, check_max_blocks

if TYPE_CHECKING:
    from halox.datatypes import Datatype

PIPELINED_BLOCKS = 1 << 15
"""More blocks than this are converted in parts at the first use, each packed while the next is converted."""


class WorkUnitsPacker(DevicePacker):
    """Packs any datatype from a list of work units; see :class:`DevicePacker`.

    Parameters
    ----------
    datatype : Datatype
    count : int
        Items, one extent apart; the list does not grow with them.
    device : int
    max_blocks : int, optional
    unit_bytes : int, optional
        Longest work unit of blocks that are not alike: 512, 1024, 2048 or 4096; by default by the
        message's size.

    Raises
    ------
    DeviceError
        If ``unit_bytes`` is another number.

    Notes
    -----
    Equal layouts share a list. At the first use of a type of more than 32768 blocks, the host
    converts parts of it while the GPU moves those before; from then on a call is one launch.
    """

    method: ClassVar[str] = "workunits"

    def __init__(
        self,
        datatype: Datatype,
        count: int,
        device: int,
        max_blocks: int | None = None,
        *,
        unit_bytes: int | None = None,
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        self.unit_bytes = _unit_bytes(unit_bytes, self.nbytes)
        self._lock = Lock()
        self._launches: _Launches | None = None
        self._list: UnitList | None = None

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return None: there is no type without a block list."""
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory."""
        launches = self._launches
        if launches is None:
            launches = self._first_use(False, array, packed, stream)
            if launches is None:
                return
        launches.pack.launch_at(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to where the items say."""
        launches = self._launches
        if launches is None:
            launches = self._first_use(True, array, packed, stream)
            if launches is None:
                return
        launches.unpack.launch_at(stream, array, packed)

    def _first_use(self, unpacking: bool, array: int, packed: int, stream: int) -> _Launches | None:
        """Prepare the launches; None if there is nothing to move, or it has been moved already."""
        if not self.nbytes:
            return None
        with self._lock:
            if self._launches is not None:
                return self._launches
            if cupy().cuda.runtime.streamIsCapturing(stream):
                raise DeviceError(
                    "this packer's lists are not on the GPU yet, and cannot be made while a stream "
                    "is being captured; call pack or unpack once before capturing"
                )
            found = cached_list(self.datatype, self.unit_bytes, self.device)
            pipelined = found is None and self.datatype.blocks().n_blocks > PIPELINED_BLOCKS
            if pipelined:
                self._list = self._pipelined(unpacking, array, packed, stream)
            else:
                self._list = found or unit_list(self.datatype, self.unit_bytes, self.device)
            self._launches = self._prepare(self._list)
            return None if pipelined else self._launches

    def _pipelined(self, unpacking: bool, array: int, packed: int, stream: int) -> UnitList:
        """Move everything, part by part as the parts are converted, and return the whole list."""
        done = []  # tables of launches that may not have run yet
        made = None
        for part in pipelined_list(self.datatype, self.unit_bytes, self.device, stream):
            if isinstance(part, UnitList):
                made = part
                continue
            rows, address = part
            launches = _Launches(self._at(rows, address), None, self.device, self.max_blocks)
            done.append(launches)
            launch = launches.unpack if unpacking else launches.pack
            launch.launch_at(stream, array, packed)
        assert made is not None
        return made

    def _prepare(self, units: UnitList) -> _Launches:
        segments = self._at(units.rows, 0)
        if units.words is not None and fits_inline(segments, units.n_words):
            return _Launches(segments, units.words, self.device, self.max_blocks)
        if units.n_words:
            segments = self._at(units.rows, units.address())
        return _Launches(segments, None, self.device, self.max_blocks)

    def _at(self, rows: Rows, address: int) -> Rows:
        """Segments of all items; with an address they name bytes of device memory, else words."""
        datatype = self.datatype
        segments = repeated(rows, self.count, datatype.extent, datatype.size)
        return _addressed(segments, address) if address else segments


class WorkUnitsCopy:
    """Packs, or unpacks, several datatypes at fixed addresses in one kernel launch.

    Parameters
    ----------
    parts : sequence of (Datatype, int, int, int)
        Datatype, count, address that displacements count from, address of the packed bytes. All
        addresses must be valid on the device: its own memory, a peer's, or mapped host memory.
    unpack : bool
        Whether packed bytes go to the arrays, rather than the other way. Targets must not overlap
        one another or any source; if they do, which bytes arrive is not defined.
    device : int
        The GPU that runs the kernel.
    max_blocks : int, optional
        Most thread blocks, to leave SMs to others; by default as many as there is work for.

    Attributes
    ----------
    nbytes : int
        Bytes that a launch moves.

    Raises
    ------
    DeviceError
        If there is no GPU, the kernel cannot be loaded, or ``max_blocks`` is less than 1.

    Notes
    -----
    Not collective. Making one allocates device memory for the lists that no equal layout has yet,
    and waits until they are uploaded; do it while no stream is being captured. What the addresses
    point to is the caller's to keep alive.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Datatype, int, int, int]],
        *,
        unpack: bool,
        device: int,
        max_blocks: int | None = None,
    ) -> None:
        check_max_blocks(max_blocks)
        parts = [part for part in parts if part[0].size * part[1]]
        self.nbytes = sum(datatype.size * count for datatype, count, _, _ in parts)
        self._launch: PreparedLaunch | None = None
        if not parts:
            return
        unit_bytes = default_unit_bytes(self.nbytes)
        self._lists = [unit_list(datatype, unit_bytes, device) for datatype, _, _, _ in parts]
        segments = []
        for units, (datatype, count, array, packed) in zip(self._lists, parts, strict=True):
            made = repeated(units.rows, count, datatype.extent, datatype.size)
            made["array"] += array
            made["packed"] += packed
            segments.append(made)
        words = self._placed(segments)
        self._launches = _Launches(np.concatenate(segments), words, device, max_blocks)
        self._launch = self._launches.unpack if unpack else self._launches.pack

    def _placed(self, segments: list[Rows]) -> npt.NDArray[np.uint32] | None:
        """Make segments name their lists: in the parameter, which is returned, or on the device."""
        ends = np.cumsum([units.n_words for units in self._lists])
        if fits_inline(np.concatenate(segments), int(ends[-1])):
            for made, units, end in zip(segments, self._lists, ends, strict=True):
                made["list"] += int(end) - units.n_words
            return np.concatenate([units.words for units in self._lists if units.words is not None])
        for i, units in enumerate(self._lists):
            if units.n_words:
                segments[i] = _addressed(segments[i], units.address())
        return None

    def launch(self, stream: Any = None) -> None:
        """Move all parts on a stream.

        Parameters
        ----------
        stream : cupy.cuda.Stream, int or None
            A stream of the device, its address, or CuPy's current one.

        Notes
        -----
        Not collective; does not block; ordered as work of the stream, and may be captured. The
        GPU must be the calling thread's current device.
        """
        if self._launch is not None:
            self._launch.launch(stream_pointer(stream))


class _Launches:
    """The launches of both directions over the same segments, and the memory they read."""

    def __init__(
        self,
        segments: Rows,
        words: npt.NDArray[np.uint32] | None,
        device: int,
        max_blocks: int | None,
    ) -> None:
        planned = launch_of(segments, sms=multiprocessors(device), max_blocks=max_blocks)
        self._memory: DeviceBytes | None = None
        if words is None and planned.segments.size > LISTED_SEGMENTS:
            self._memory = uploaded(planned.segments, device)
        text = table(planned, words, self._memory.pointer if self._memory else 0)
        suffix = "" if words is None else "_inline"

        def prepared(name: str) -> PreparedLaunch:
            parameter = (ctypes.c_char * len(text)).from_buffer_copy(text)
            return PreparedLaunch(
                kernel("workunits", f"workunits_{name}{suffix}", device),
                planned.blocks,
                planned.threads,
                (ctypes.c_uint64(0), ctypes.c_uint64(0), parameter),
                device=device,
            )

        self.pack, self.unpack = prepared("pack"), prepared("unpack")


def _addressed(segments: Rows, address: int) -> Rows:
    made = segments.copy()
    made["list"] = made["list"] * np.uint64(4) + np.uint64(address)
    return made


def _unit_bytes(asked: int | None, nbytes: int) -> int:
    if asked is None:
        return default_unit_bytes(nbytes)
    if asked not in UNIT_BYTES:
        raise DeviceError(f"unit_bytes: got {asked}, must be one of {UNIT_BYTES}, or None")
    return asked
