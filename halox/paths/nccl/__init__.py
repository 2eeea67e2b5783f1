"""The ``nccl`` path: pack on the device, send by NCCL, unpack on the device, all on one stream.

`halox.paths.nccl.channel` describes an exchange. `halox.runtime.nccl_ranks` connects the ranks, and watches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from halox.paths.base import Build, Candidate, ChannelMessages, Job, MessageEnds, Path, Protocol
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message
from halox.paths.nccl.channel import Agreed, NcclChannel, run_of
from halox.runtime.arrays import Described
from halox.runtime.context import Context
from halox.runtime.nccl_ranks import nccl_of, why_no_nccl

PART_BYTES = 1 << 20
"""Smallest mean size, in bytes, of the parts of a message sent separately: one send is faster than several short sends.

Separate sends also need launches for the marks of the time limit, which packing kernels set without additional cost.
"""

NOT_LOOKED_FOR = "halox looks for NCCL only if some ranks cannot map one another's GPU memory, or if it is asked for"

_Runs: TypeAlias = tuple[bool, ...]
"""For each part of a message, whether it is one run of bytes at this end."""


class NcclPath(Path):
    """Sends between the GPUs of all ranks by NCCL, on any nodes."""

    name = "nccl"
    protocols = (
        # One send per message. Measured on one node, like all paths.
        Protocol("packed", ProtocolCost(17.0, 1.5, (60.0, 110.0, 150.0, 180.0)), reach="nodes"),
        # One send per part, directly from and to the arrays if the part is one run.
        Protocol("parts", ProtocolCost(14.0, 1.5, (100.0, 150.0, 200.0, 250.0)), reach="nodes"),
    )
    summary = "between ranks with a GPU each, on any nodes, if NCCL is installed; see `halox info --paths -n N`"

    def survey(self, context: Context, *, is_named: bool) -> str | None:
        if not is_named and context.find_gpus().all_map:
            return NOT_LOOKED_FOR
        return context.of_gpus(why_no_nccl)

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> _Runs:
        """Return for each part of the message whether it is one run."""
        return tuple(run_of(part) is not None for part in message.parts)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        surveys = ends.selection.surveys
        why = ends.why_not_gpus(lambda *_: surveys.get(self.name, NOT_LOOKED_FOR))
        if why is not None:
            return why
        offers = [
            self.candidate("packed", "a GPU each, NCCL: packed, sent, unpacked on the stream")
        ]
        runs: tuple[_Runs, _Runs] = ends.described(self)
        many, parts = [len(part_runs) for part_runs in runs], len(runs[0])
        is_long = ends.sender.nbytes >= parts * PART_BYTES
        if many[0] == many[1] and is_long and all(map(any, zip(*runs, strict=True))):
            why = "a GPU each, NCCL: sent from and to the arrays where parts are contiguous"
            offers.append(self.candidate("parts", why))
        return offers

    def carries_copies(self, job: Job, copies: Job) -> bool:
        is_copy = bool(job.sends) and job.operation == "copy"
        return is_copy and all(part.strided is not None for pair in copies.pairs() for part in pair)

    def negotiate(self, build: Build) -> Agreed:
        """Make NCCL's communicator if necessary, connect this plan's ranks, and agree on the plan's name."""
        job, ranks = build.job(self), nccl_of(build.context)
        peers = ({m.peer for m in some} for some in (job.sends, job.receives))
        return Agreed(ranks, ranks.connect(build.world, *peers), build.carried(self))

    def channels(self, build: Build, agreed: Agreed) -> Sequence[ChannelMessages]:
        job, arena = build.job(self), build.context.device_arena
        assert arena is not None
        channel = NcclChannel(build.world, job, build.protocols(job), agreed, arena)
        return [ChannelMessages(self.name, channel, (*job.messages, *agreed.copies.messages))]
