"""The ``staged`` path: arrays on GPUs through page-locked host memory."""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths.base import Build, Candidate, ChannelMessages, MessageEnds, Path, Protocol
from halox.paths.costs import ProtocolCost
from halox.paths.fragments import cutter
from halox.paths.host.packed import packed_channels


class StagedPath(Path):
    """Moves arrays of which at least one end is on a GPU; always possible."""

    name = "staged"
    protocols = (
        # Out over the sender's link, in over the receiver's link.
        Protocol(
            "shared",
            ProtocolCost(27.0, 0.5, (22.0, 24.0, 25.0, 25.0)),
            ProtocolCost(450.0, 0.5, (11.0, 12.0, 13.0, 13.0)),
            fallback="staged/mpi",
            is_packed=True,
        ),
        Protocol(
            "mpi",
            ProtocolCost(40.0, 2.0, (4.5, 5.0, 5.0, 5.0)),
            ProtocolCost(470.0, 2.0, (3.7, 4.0, 4.0, 4.0)),
            reach="nodes",
        ),
    )
    summary = "possible: CuPy arrays, through pinned host memory"

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        if "gpu" not in (ends.sender.memory, ends.receiver.memory):
            return str(ends.host_reason)
        is_near = ends.are_near
        if ends.host_reason is not None:
            why = "same node, through host memory that the GPU maps" if is_near else "other node"
        elif is_near:
            why = "same node, through host memory that both GPUs map"
        else:
            why = "other node, through pinned host memory"
        return [self.candidate("shared" if is_near else "mpi", why)]

    def channels(self, build: Build, agreed: object) -> Sequence[ChannelMessages]:
        """Make a channel for each protocol; also called on ranks with NumPy arrays."""
        return packed_channels(build, self, cutter())
