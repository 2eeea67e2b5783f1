"""The ``scatter_gather`` path: engines that walk both ends' block lists by themselves, without packing.

After Suresh et al. 2022, section IV. An engine (`halox.paths.scatter_gather.engine`) moves windows of a message, cut at
the same bytes at both ends (`windows`), between keys that are mapped once and kept (`keys`). Each is a protocol:

- ``process_vm``: NumPy arrays of two ranks of a node, copied by the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths.base import (
    Build,
    Candidate,
    Carried,
    EndpointInfo,
    Path,
    Protocol,
    SelectionContext,
)
from halox.paths.scatter_gather.keys import Keys
from halox.paths.scatter_gather.node_channel import NodeChannel, make_node_channel
from halox.paths.scatter_gather.process_vm import ProcessVm
from halox.runtime.context import Context
from halox.runtime.cross_memory import Attachments, survey

BLOCK_BYTES = 16 << 10
"""Blocks at least this long are taken from the peer's memory rather than packed: a block costs the kernel some 0.2 us,
and each of its pages as much."""

MESSAGE_BYTES = 64 << 10
"""Messages at least this large."""


def _process_vm_keys(context: Context) -> Keys:
    attachments: Attachments = context.world.ranks.kept[ScatterGatherPath.name]
    return Keys(ProcessVm(context.world.rank, attachments.pids))


class ScatterGatherPath(Path):
    """Moves messages without packing; its protocols are the engines."""

    name = "scatter_gather"
    protocols = (Protocol(ProcessVm.name, fallback="host/mpi"),)
    summary = "possible: long blocks that the kernel copies from another process"
    memory = "host"
    is_tuned = False

    def survey(self, context: Context, *, is_named: bool) -> Attachments | None:
        """Find out between which ranks of a node the kernel copies; once a communicator."""
        kept = context.world.ranks.kept
        if self.name not in kept:
            kept[self.name] = survey(context.world)
        found: Attachments = kept[self.name]
        return found

    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer the engines; prefer them for long blocks."""
        if "gpu" in (sender.memory, receiver.memory):
            return "no engine reaches these arrays on a GPU"
        if selection.operation == "add":
            return "accumulate needs a copy"
        attachments: Attachments | None = selection.surveys.get(self.name)
        if attachments is None:
            return "it is not known whether the kernel copies between the ranks"
        why = attachments.why_not(sender.rank, receiver.rank)
        if why is not None:
            return why
        block = min(sender.block_bytes, receiver.block_bytes)
        is_long = block >= BLOCK_BYTES and sender.nbytes >= MESSAGE_BYTES
        said = f"same node, copied by the kernel: blocks of {block} B on average"
        return [self.offer(ProcessVm.name, said, preferred=is_long)]

    def negotiate(self, build: Build) -> NodeChannel | None:
        """Swap keys with the peers."""
        link = build.link(self, words=len(build.whole.arrays))
        job = build.job(self)  # without messages that `link` had to turn to another path
        keys = build.context.once(_process_vm_keys) if job.messages else None
        return make_node_channel(build.world, job, keys, link)

    def channels(self, build: Build, agreed: NodeChannel | None) -> Sequence[Carried]:
        """Return the channel that was agreed on."""
        return [Carried(self.name, agreed, agreed.messages)] if agreed else []
