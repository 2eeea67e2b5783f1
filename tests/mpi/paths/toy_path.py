"""A data path in one file and one line of registration: packed NumPy arrays, sent by mpi4py's Isend and Irecv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox.packing.host import HostPacker
from halox.paths.base import (
    Build,
    Candidate,
    Channel,
    ChannelMessages,
    Job,
    MessageEnds,
    Path,
    Protocol,
)
from halox.paths.messages import Message


class ToyChannel(Channel):
    def __init__(self, job: Job, build: Build) -> None:
        self.comm, self.tag, self.job = build.world.comm, build.mpi_tag, job
        self.send_buffers = [np.zeros(m.packed_bytes, np.uint8) for m in job.sends]
        self.receive_buffers = [np.zeros(m.packed_bytes, np.uint8) for m in job.receives]
        self.starts = 0

    def parts(self, messages: Sequence[Message], buffers: Sequence[Any]) -> Any:
        for message, buffer in zip(messages, buffers, strict=True):
            for part, offset in zip(message.parts, message.offsets, strict=True):
                packer = HostPacker(self.job.arrays[part.array], part.datatype, part.count)
                yield packer, buffer[offset : offset + part.nbytes]

    def start(self) -> None:
        self.starts += 1
        self.requests = [
            self.comm.Irecv(buffer, m.peer, self.tag(m))
            for m, buffer in zip(self.job.receives, self.receive_buffers, strict=True)
        ]
        for packer, packed in self.parts(self.job.sends, self.send_buffers):
            packer.pack(packed)
        self.requests += [
            self.comm.Isend(buffer, m.peer, self.tag(m))
            for m, buffer in zip(self.job.sends, self.send_buffers, strict=True)
        ]

    def finish(self) -> None:
        for request in self.requests:
            request.Wait()
        for packer, packed in self.parts(self.job.receives, self.receive_buffers):
            packer.unpack(packed)


class ToyPath(Path):
    """Path whose ``made`` lists the channels that it has made."""

    name = "toy"
    protocols = (Protocol("bytes"),)
    summary = "possible: in tests"
    memory = "host"

    def __init__(self) -> None:
        self.made: list[ToyChannel] = []

    def describe(self, message: Message, arrays: Any, context: Any, *, relocatable: bool) -> str:
        return f"toy of rank {context.world.rank}"

    def candidates(self, ends: MessageEnds) -> list[Candidate] | str:
        if ends.selection.operation == "add":
            return "a toy does not add"
        sender, receiver = ends.described(self)
        return [self.candidate("bytes", f"somebody wants to play, {sender} to {receiver}")]

    def channels(self, build: Build, agreed: Any) -> list[ChannelMessages]:
        return [self.channel(build, build.job(self))]

    def channel(self, build: Build, job: Job) -> ChannelMessages:
        self.made.append(ToyChannel(job, build))
        return ChannelMessages(self.name, self.made[-1], job.messages)
