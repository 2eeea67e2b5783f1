"""Work-unit packer on a GPU, for any datatype: warps process lists of pieces of similar size.

The method follows Wu et al. 2016, section 3.2. :mod:`halox.packing.workunits_plan` converts datatypes, and
:mod:`halox.packing.workunits_lists` keeps the lists on the device. This module launches the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError
from halox.packing.device_packer import DevicePacker, StreamLike, table_launch
from halox.packing.workunits_lists import UnitList, cached_list, pipelined_list, unit_list
from halox.packing.workunits_plan import (
    LISTED_SEGMENTS,
    Rows,
    fits_inline,
    launch_of,
    repeated,
    table,
    unit_bytes_of,
)
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import DeviceBytes, uploaded
from halox.runtime.gpu.streams import stream_pointer

if TYPE_CHECKING:
    from halox.datatypes import Datatype

PIPELINED_BLOCKS = 1 << 15
"""Largest number of blocks to convert at once; with more, the first use packs a part while it converts the next."""


class WorkUnitsPacker(DevicePacker):
    """Packs any datatype from a list of work units; see :class:`DevicePacker`.

    ``unit_bytes`` is the longest work unit of blocks with different lengths: 512, 1024, 2048 or 4096. The
    default depends on the message's size. Other numbers raise `DeviceError`. The size of the list does not
    depend on ``count``, and equal layouts share a list. The first use of a datatype with more than 32768
    blocks is pipelined: the GPU moves a part while the host converts the next part. Every later call is one
    launch.
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
        self.unit_bytes = unit_bytes_of(unit_bytes, self.nbytes)
        self._lock = Lock()
        self._launches: _Launches | None = None
        self._list: UnitList | None = None

    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory."""
        launches = self._launches or self._first_use(False, array, packed, stream)
        if launches is not None:
            launches.pack.launch_at(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to the places of the items."""
        launches = self._launches or self._first_use(True, array, packed, stream)
        if launches is not None:
            launches.unpack.launch_at(stream, array, packed)

    def _first_use(self, unpacking: bool, array: int, packed: int, stream: int) -> _Launches | None:
        """Prepare the launches; None if there is nothing to move, or everything has been moved already."""
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
            cached = cached_list(self.datatype, self.unit_bytes, self.device)
            pipelined = cached is None and self.datatype.blocks().n_blocks > PIPELINED_BLOCKS
            if pipelined:
                self._list = self._pipelined(unpacking, array, packed, stream)
            else:
                self._list = cached or unit_list(self.datatype, self.unit_bytes, self.device)
            self._launches = self._prepare(self._list)
            return None if pipelined else self._launches

    def _pipelined(self, unpacking: bool, array: int, packed: int, stream: int) -> UnitList:
        """Pack or unpack everything while converting part by part, and return the whole list."""
        alive = []  # launches that may not have run yet: they own the tables that their kernels read
        whole = None
        for part in pipelined_list(self.datatype, self.unit_bytes, self.device, stream):
            if isinstance(part, UnitList):
                whole = part
                continue
            rows, address = part
            launches = _Launches(self._segments(rows, address), None, self.device, self.max_blocks)
            alive.append(launches)
            launch = launches.unpack if unpacking else launches.pack
            launch.launch_at(stream, array, packed)
        assert whole is not None
        return whole

    def _prepare(self, units: UnitList) -> _Launches:
        segments = self._segments(units.rows, 0)
        if units.words is not None and fits_inline(segments, units.n_words):
            return _Launches(segments, units.words, self.device, self.max_blocks)
        if units.n_words:
            segments = self._segments(units.rows, units.address())
        return _Launches(segments, None, self.device, self.max_blocks)

    def _segments(self, rows: Rows, address: int) -> Rows:
        """Return the segments of all items, with lists at ``address``; 0 for lists in a kernel parameter."""
        datatype = self.datatype
        segments = repeated(rows, self.count, datatype.extent, datatype.size)
        return _addressed(segments, address) if address else segments


class WorkUnitsCopy:
    """Packs, or unpacks, several datatypes at fixed addresses in one kernel launch.

    Each of ``parts`` has a datatype, a count, the address that displacements are relative to, and the
    address of the packed bytes. The requirements on addresses and capturing are the same as for
    :class:`~halox.packing.strided.StridedCopy`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Datatype, int, int, int]],
        *,
        unpack: bool,
        device: int,
    ) -> None:
        parts = [part for part in parts if part[0].size * part[1]]
        self.nbytes = sum(datatype.size * count for datatype, count, _, _ in parts)
        """Bytes that a launch moves."""
        self._launch: PreparedLaunch | None = None
        if not parts:
            return
        unit_bytes = unit_bytes_of(None, self.nbytes)
        self._lists = [unit_list(datatype, unit_bytes, device) for datatype, _, _, _ in parts]
        segments = []
        for units, (datatype, count, array, packed) in zip(self._lists, parts, strict=True):
            rows = repeated(units.rows, count, datatype.extent, datatype.size)
            rows["array"] += array
            rows["packed"] += packed
            segments.append(rows)
        words = self._place_lists(segments)
        self._launches = _Launches(np.concatenate(segments), words, device, None)
        self._launch = self._launches.unpack if unpack else self._launches.pack
        self._is_unpacking = unpack

    def _place_lists(self, segments: list[Rows]) -> npt.NDArray[np.uint32] | None:
        """Set the places of the segments' lists; return the lists for a kernel parameter, or None if on the device."""
        ends = np.cumsum([units.n_words for units in self._lists])
        if fits_inline(np.concatenate(segments), int(ends[-1])):
            for rows, units, end in zip(segments, self._lists, ends, strict=True):
                rows["list"] += int(end) - units.n_words
            return np.concatenate([units.words for units in self._lists if units.words is not None])
        for i, units in enumerate(self._lists):
            if units.n_words:
                segments[i] = _addressed(segments[i], units.address())
        return None

    def launch(self, stream: StreamLike = None, source: int = 0, target: int = 0) -> None:
        """Enqueue the copies; see :class:`~halox.packing.device_packer.Launchable`."""
        if self._launch is not None:
            array, packed = (target, source) if self._is_unpacking else (source, target)
            self._launch.launch_at(stream_pointer(stream), array, packed)


class _Launches:
    """Pack and unpack launches over the same segments, and the memory that they read."""

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
        shape = planned.blocks, planned.threads
        suffix = "" if words is None else "_inline"
        self.pack, self.unpack = (
            table_launch("workunits", f"workunits_{direction}{suffix}", device, shape, text)
            for direction in ("pack", "unpack")
        )


def _addressed(segments: Rows, address: int) -> Rows:
    """Return segments with addresses of lists in place of indices of words; the words begin at ``address``."""
    addressed = segments.copy()
    addressed["list"] = segments["list"] * np.uint64(4) + np.uint64(address)
    return addressed
