"""Messages of NumPy arrays with parts that MPI packs faster than NumPy: many short blocks of an odd size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from halox.packing.host_choice import HostLayout, host_layout
from halox.packing.host_copiers import Call, Copier
from halox.paths.base import Job
from halox.paths.messages import Message
from halox.runtime.arrays import Array, HostArray

Calls = list[Call]


def call_all(calls: Iterable[Call]) -> None:
    """Make some calls in sequence."""
    for call in calls:
        call()


class _Part(NamedTuple):
    """A part's layout, the number of its array, and the part's offset in the memory of that array."""

    layout: HostLayout
    array: int
    start: int

    def copier(self, memories: Sequence[memoryview]) -> Copier:
        """Return the copier for the memory of some arrays."""
        memory = np.ndarray((self.layout.span,), np.uint8, memories[self.array], self.start)
        return self.layout.copier(memory, lasting=True)


class OddBlocks:
    """All parts of a job's messages, each with the fastest copier for its layout; all are regular and copied.

    ``outgoing`` and ``incoming`` have the packed bytes of each part by slot, in contiguous memory.
    """

    def __init__(
        self, job: Job, outgoing: Sequence[Sequence[Array]], incoming: Sequence[Sequence[Array]]
    ) -> None:
        self._sent, self._received = _parts(job, job.sends), _parts(job, job.receives)
        self._outgoing, self._incoming = outgoing, incoming

    @property
    def are_some(self) -> bool:
        """Whether MPI packs or unpacks any of the parts."""
        return any(part.layout.prefers_mpi for part in (*self._sent, *self._received))

    def views(self, memories: Sequence[memoryview]) -> tuple[list[Calls], list[Calls]]:
        """Return for each slot the calls that pack, and the calls that unpack, for the memory of some arrays."""
        packs = [part.copier(memories) for part in self._sent]
        unpacks = [part.copier(memories) for part in self._received]
        return _rows(packs, self._outgoing, False), _rows(unpacks, self._incoming, True)


def _parts(job: Job, messages: Sequence[Message]) -> list[_Part]:
    found = []
    for message in messages:
        for part in message.parts:
            layout, array = host_layout(part.datatype, part.count), job.arrays[part.array]
            assert isinstance(array, HostArray)
            found.append(_Part(layout, part.array, array.origin + layout.first))
    return found


def _rows(copiers: Sequence[Copier], rows: Sequence[Sequence[Array]], unpack: bool) -> list[Calls]:
    return [
        [
            copier(packed.reshape(-1).view(np.uint8), unpack)
            for copier, packed in zip(copiers, row, strict=True)
        ]
        for row in rows
    ]
