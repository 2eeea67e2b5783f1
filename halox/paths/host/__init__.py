"""The ``host`` path: NumPy arrays, read in place, or packed into shared memory or MPI messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halox.decomposition import FieldLayout
from halox.paths.base import Build, Candidate, ChannelMessages, MessageEnds, Path, Protocol
from halox.paths.host.direct import DirectChannel, SharedParts, are_readable, run_bytes
from halox.paths.host.packed import packed_channels
from halox.paths.messages import Message, located
from halox.runtime.arrays import Described
from halox.runtime.context import Context

DIRECT_BYTES = 256
"""Blocks of at least this length are read in place from a neighbour's memory; messages of shorter blocks travel packed.

A core fetches another core's cache lines one by one if blocks are short, but in streams if they are packed
(docs/performance/host.md has the measurements).
"""


HUGE_PAGE_BYTES = 4 << 20
"""From this size NumPy asks for huge pages, which shared memory lacks; packing short blocks from 4 KiB pages misses the
TLB at every block."""


class HostPath(Path):
    """Moves NumPy arrays; its protocols follow fixed rules."""

    name = "host"
    protocols = (
        Protocol("direct", fallback="host/mpi", in_field=True),
        Protocol("shared", fallback="host/mpi", is_packed=True),
        Protocol("mpi", reach="nodes"),
    )
    summary = "possible: NumPy arrays"
    memory = "host"
    is_tuned = False

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> SharedParts | None:
        """Return the layouts of the message's parts, and the places of the parts if all are in shared memory."""
        if relocatable or arrays[message.parts[0].array].device is not None:
            return None
        if any(part.count != 1 for part in message.parts):
            return None
        return located(message, arrays, context.arena.locate)

    def wants_shared_fields(self, layout: FieldLayout, itemsize: int) -> bool:
        """Return True for fields whose blocks are read in place, and for small fields."""
        spec, axes = layout.spec, layout.decomposition.axes
        inner = itemsize * math.prod(spec.components_after)
        cells = math.prod(
            max(axis.sizes) + low + high for axis, (low, high) in zip(axes, spec.halo, strict=True)
        )
        width = max(spec.halo[-1])
        if spec.parity is not None:
            cells, width = cells // 2, width // 2  # every row of a block has half of the cells
        is_large = cells * inner * math.prod(spec.components_before) >= HUGE_PAGE_BYTES
        has_short_blocks = (
            axes[-1].parts > 1 and width * inner < DIRECT_BYTES and any(spec.halo[-1])
        )
        return not (is_large and has_short_blocks)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        if "gpu" in (ends.sender.memory, ends.receiver.memory):
            return ends.host_reason or "it is for NumPy arrays, and these are on a GPU"
        if not ends.are_near:
            return [self.candidate("mpi", "other node")]
        located_parts: tuple[SharedParts | None, SharedParts | None] = ends.described(self)
        source, target = located_parts
        run, operation = ends.block_bytes, ends.selection.operation
        is_in_place = False
        if operation == "copy" and source is not None and target is not None:
            # In a transpose the receiver's order of axes may cut runs that are long in the sender's memory.
            run = max(run, run_bytes(source))
            is_in_place = run >= DIRECT_BYTES and are_readable(source, target)
        if operation == "add":
            why = "same node, packed: accumulate needs a copy"
        elif run < DIRECT_BYTES:
            why = f"same node, packed: blocks of {run} B on average < {DIRECT_BYTES} B"
        elif not is_in_place:
            why = "same node, packed: array sent not in a grid's shared memory"
        else:
            why = f"same node, read in place: blocks of {run} B on average"
            return [self.candidate("direct", why, preferred=True)]
        return [self.candidate("shared", why)]

    def channels(self, build: Build, agreed: object) -> Sequence[ChannelMessages]:
        channels = []
        job = build.job(self, "direct")
        if job.messages:
            located_parts = {(m.peer, m.tag): build.peer_info(self, m) for m in job.receives}
            channel = DirectChannel(job, build.context.arena, build.links[self.name], located_parts)
            channels.append(ChannelMessages("host/direct", channel, job.messages))
        return [*channels, *packed_channels(build, self)]
