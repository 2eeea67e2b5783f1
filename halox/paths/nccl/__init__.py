"""The ``nccl`` path: pack on the device, send by NCCL, unpack on the device, all on one stream.

`halox.paths.nccl.channel` describes an exchange. `halox.runtime.nccl_ranks` connects the ranks, and watches them.
"""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths.base import Build, Candidate, ChannelMessages, Job, MessageEnds, Path, Protocol
from halox.paths.costs import ProtocolCost
from halox.paths.nccl.channel import Agreed, NcclChannel
from halox.runtime.context import Context
from halox.runtime.nccl_ranks import nccl_of, why_no_nccl

NOT_LOOKED_FOR = "halox looks for NCCL only if some ranks cannot map one another's GPU memory, or if it is asked for"


class NcclPath(Path):
    """Sends between the GPUs of all ranks by NCCL, on any nodes."""

    name = "nccl"
    protocols = (
        # Measured on one node, like all paths.
        Protocol("packed", ProtocolCost(17.0, 1.5, (60.0, 110.0, 150.0, 180.0)), reach="nodes"),
    )
    summary = "between ranks with a GPU each, on any nodes, if NCCL is installed; see `halox info --paths -n N`"

    def survey(self, context: Context, *, is_named: bool) -> str | None:
        if not is_named and context.find_gpus().all_map:
            return NOT_LOOKED_FOR
        return context.of_gpus(why_no_nccl)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        surveys = ends.selection.surveys
        why = ends.why_not_gpus(lambda *_: surveys.get(self.name, NOT_LOOKED_FOR))
        reason = "a GPU each, NCCL: packed, sent, unpacked on the stream"
        return why or [self.candidate("packed", reason)]

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
        channel = NcclChannel(build.world, job, agreed, arena)
        return [ChannelMessages(self.name, channel, (*job.messages, *agreed.copies.messages))]
