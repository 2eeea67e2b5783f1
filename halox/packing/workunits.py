"""Work-unit packer on a GPU, for any datatype: warps process lists of pieces of similar size.

The method follows Wu et al. 2016, section 3.2. :mod:`halox.packing.workunits_plan` converts datatypes, and
:mod:`halox.packing.workunits_lists` keeps the lists on the device. This module launches the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from halox.errors import DeviceError
from halox.packing.device_packer import Base, DevicePacker, nothing, table_launch
from halox.packing.workunits_lists import unit_list
from halox.packing.workunits_plan import SEGMENTS, Rows, launch_of, repeated, table, unit_bytes_of
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.memory import DeviceBytes, uploaded

if TYPE_CHECKING:
    from halox.datatypes import Datatype


class WorkUnitsPacker(DevicePacker):
    """Packs any datatype from a list of work units; see :class:`DevicePacker`.

    The size of the list does not depend on ``count``, and equal layouts share a list. The first use of a
    datatype with more than 32768 blocks is pipelined: the GPU moves a part while the host converts the next
    part. Every later call is one launch.
    """

    method: ClassVar[str] = "workunits"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        self._lock = Lock()
        self._launches: _Launches | None = None

    def pack(self, array: int, packed: int, stream: int) -> None:
        launches = self._launches or self._first_use(False, array, packed, stream)
        if launches is not None:
            launches.pack.launch_at(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
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
            parts: list[_Launches] = []  # they own tables that running kernels read

            def move(rows: Rows) -> None:
                launches = self._launches_of(rows)
                launch = launches.unpack if unpacking else launches.pack
                launch.launch_at(stream, array, packed)
                parts.append(launches)

            self._list = unit_list(
                self.datatype, unit_bytes_of(self.nbytes), self.device, stream, move
            )
            self._launches = self._launches_of(self._list.rows)
            return None if parts else self._launches

    def _launches_of(self, rows: Rows) -> _Launches:
        datatype = self.datatype
        segments = repeated(rows, self.count, datatype.extent, datatype.size)
        return _Launches(segments, self.device, self.max_blocks)


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
        self.bases: list[Base] = []  # the addresses are fixed
        self.at: Callable[[int], None] = nothing
        """Function that enqueues the launch, given a stream's address."""
        if not parts:
            return
        unit_bytes = unit_bytes_of(self.nbytes)
        self._lists = [unit_list(datatype, unit_bytes, device) for datatype, _, _, _ in parts]
        segments = []
        for units, (datatype, count, array, packed) in zip(self._lists, parts, strict=True):
            rows = repeated(units.rows, count, datatype.extent, datatype.size)
            rows["array"] += array
            rows["packed"] += packed
            segments.append(rows)
        self._launches = _Launches(np.concatenate(segments), device, None)
        self.at = (self._launches.unpack if unpack else self._launches.pack).launch


class _Launches:
    """Pack and unpack launches over the same segments, and the memory that they read."""

    def __init__(self, segments: Rows, device: int, max_blocks: int | None) -> None:
        planned = launch_of(segments, sms=multiprocessors(device), max_blocks=max_blocks)
        self._memory: DeviceBytes | None = None
        if planned.segments.size > SEGMENTS:
            self._memory = uploaded(planned.segments, device)
        text = table(planned, self._memory.pointer if self._memory else 0)
        shape = planned.blocks, planned.threads
        self.pack, self.unpack = (
            table_launch("workunits", f"workunits_{direction}", device, shape, text)
            for direction in ("pack", "unpack")
        )
