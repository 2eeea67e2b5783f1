"""The ``scatter_gather`` path: blocks move from the arrays of one end to those of the other, without packing.

A plan asks this module which of three protocols can carry a message. Each has a module, which makes its channel:

- ``process_vm``: NumPy arrays of two ranks of a node, copied by the Linux kernel.
- ``copy_engine``: arrays on GPUs of a node, copied by the CUDA driver into memory that the peer maps.
- ``mlx5_umr``: arrays of ranks on different nodes, written by their network adapters (Suresh et al. 2022, in `mlx5`);
  never chosen automatically.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message
from halox.runtime.arrays import Described
from halox.runtime.context import Context
from halox.runtime.cross_memory import Attachments, survey

if TYPE_CHECKING:
    from halox.paths.scatter_gather.mlx5.channel import Inbox
    from halox.paths.scatter_gather.mlx5.keys import Keys
    from halox.runtime.device_arena import DeviceArena
    from halox.runtime.mlx5 import Adapters

PROCESS_VM, COPY_ENGINE, MLX5_UMR = "process_vm", "copy_engine", "mlx5_umr"
"""Names of the protocols."""

BLOCK_BYTES, MESSAGE_BYTES = 4 << 10, 128 << 10
"""Smallest blocks, and smallest one-way message, in bytes, that the kernel copies between NumPy arrays without packing.
Each end moves half of the message. A block costs the kernel about 0.2 us; flags and calls cost about 10 us."""

BLOCK_BYTES_BOTH_WAYS, MESSAGE_BYTES_BOTH_WAYS = 16 << 10, 1 << 20
"""The same if the plan has a message in the opposite direction, too, so that each rank moves one message
(docs/performance/log.md)."""

ROW_BYTES = 128
"""Smallest blocks on GPUs, in bytes, for which copy engines are preferred if multiprocessors should stay free: a copy
engine takes at least as long for each row of a box as for a few hundred bytes."""


class Survey(NamedTuple):
    """Memory of ranks that the kernel can access, and network adapters of ranks; None if all are on one node."""

    attachments: Attachments
    adapters: Adapters | None


class GpuMemory(NamedTuple):
    """Description of a message's arrays on a GPU."""

    is_mapped: bool  # in memory that peers can map
    is_strided: bool  # few calls of the driver copy it


def survey_of(context: Context) -> Survey:
    """Return the result of the communicator's survey."""
    result: Survey = context.world.ranks.resources[ScatterGatherPath.name]
    return result


def _mlx5_keys(context: Context) -> tuple[Keys, Inbox]:
    from halox.paths.scatter_gather.mlx5.channel import make_keys

    adapters = survey_of(context).adapters
    assert adapters is not None and adapters.own is not None
    return make_keys(context.world, adapters.own)


class ScatterGatherPath(Path):
    """Moves messages without packing."""

    name = "scatter_gather"
    protocols = (
        # Fixed rules decide between process_vm and the host path.
        Protocol(PROCESS_VM, fallback="host/mpi", memory="host", is_tuned=False),
        # Each row of a box costs a copy engine as much as some hundred bytes.
        Protocol(
            COPY_ENGINE,
            ProtocolCost(26.0, 6.0, (1.0, 4.0, 16.0, 120.0)),
            ProtocolCost(390.0, 6.0, (1.0, 4.0, 16.0, 120.0)),
            fallback="staged/mpi",
            in_field=True,
        ),
        # Never run on hardware, and never chosen automatically.
        Protocol(MLX5_UMR, reach="nodes", memory="host", is_tuned=False),
    )
    summary = "possible: long blocks that the kernel or a GPU's copy engines move by themselves"

    def survey(self, context: Context, *, is_named: bool) -> Survey:
        """Find whether the kernel copies between the node's ranks, and who has an adapter; once per communicator."""
        world = context.world
        if self.name not in world.ranks.resources:
            adapters = None
            if world.node_count > 1:
                from halox.runtime import mlx5

                adapters = mlx5.survey(world)
            world.ranks.resources[self.name] = Survey(survey(world), adapters)
        return survey_of(context)

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> GpuMemory | None:
        """Return whether peers can map the message's arrays, and whether the message is strided."""
        arena = context.device_arena
        if arena is None:
            return None
        is_mapped = not relocatable and self._is_mapped(message, arrays, arena)
        return GpuMemory(is_mapped, message.is_strided)

    @staticmethod
    def _is_mapped(message: Message, arrays: Sequence[Described], arena: DeviceArena) -> bool:
        """Whether a message's arrays are in memory of this rank's GPU that peers can map."""
        for part in message.parts:
            array, (first, end) = arrays[part.array], part.datatype.reach(part.count)
            if arena.locate(array.pointer + first, array.pointer + end) is None:
                return False
        return True

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        if ends.selection.operation == "add":
            return "accumulate needs a copy"
        if not ends.are_near:
            return self._between_nodes(ends)
        if "gpu" in (ends.sender.memory, ends.receiver.memory):
            return self._on_gpus(ends)
        return self._on_hosts(ends)

    def _on_hosts(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Offer the kernel, preferred for long blocks."""
        result: Survey | None = ends.selection.surveys.get(self.name)
        sender, block = ends.sender, ends.block_bytes
        if result is None:
            return "it is not known whether the kernel copies between the ranks"
        if result.attachments.refused is not None:
            return result.attachments.refused
        least = (
            (BLOCK_BYTES, MESSAGE_BYTES)
            if sender.is_one_way
            else (BLOCK_BYTES_BOTH_WAYS, MESSAGE_BYTES_BOTH_WAYS)
        )
        is_long = block >= least[0] and sender.nbytes >= least[1]
        why = f"same node, copied by the kernel: blocks of {block} B on average"
        if sender.is_one_way:
            why += ", half by each end"
        return [self.candidate(PROCESS_VM, why, preferred=is_long)]

    def _between_nodes(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Offer the adapters; whether they can register an array on a GPU shows when the channel is made."""
        result: Survey | None = ends.selection.surveys.get(self.name)
        adapters = None if result is None else result.adapters
        a, b = ends.sender.rank, ends.receiver.rank
        why = "their adapters are not known" if adapters is None else adapters.why_not(a, b)
        if why is not None:
            return (
                f"ranks {a} and {b} are on different nodes, where mlx5_umr alone works, and {why}"
            )
        return [self.candidate(MLX5_UMR, "other node, written by the network adapters")]

    def _on_gpus(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Offer the copy engine if the arrays of either end can be mapped."""
        why = ends.why_not_gpus(lambda topology, a, b: topology.why_no_events(a, b))
        if why is not None:
            return why
        sender, receiver = ends.described(self)
        if receiver is not None and receiver.is_mapped:
            why = "copied by the driver into the receiver's array, no kernel"
        elif sender is not None and sender.is_mapped:
            why = "copied by the driver from the sender's array, no kernel"
        else:
            return "neither end's array is in memory that the other rank maps; allocate one by the grid"
        preferred = (
            ends.selection.leave_sms
            and ends.block_bytes >= ROW_BYTES
            and all(end is None or end.is_strided for end in (sender, receiver))
        )
        return [self.candidate(COPY_ENGINE, why, preferred=preferred)]

    def negotiate(self, build: Build) -> dict[str, Any]:
        """Make the channels with the peers, protocol by protocol; None on a rank without messages for one."""
        makers = {
            PROCESS_VM: self._make_process_vm,
            COPY_ENGINE: self._make_copy_engine,
            MLX5_UMR: self._make_mlx5,
        }
        return {
            name: make(build, build.job(self, name))
            for name, make in makers.items()
            if (self.name, name) in build.chosen
        }

    def _make_process_vm(self, build: Build, job: Job) -> Channel | None:
        from halox.paths.scatter_gather.process_vm import make_channel

        pids = survey_of(build.context).attachments.pids
        return make_channel(build.world, job, pids, build.links.get(self.name))

    def _make_copy_engine(self, build: Build, job: Job) -> Channel | None:
        from halox.paths.scatter_gather.copy_engine import make_channel

        context, memory = build.context, None
        if context.device_arena is not None and context.events is not None:
            memory = context.device_arena, context.events
        directions = {m.key: self._direction(build, m) for m in job.messages}
        return make_channel(build.world, job, directions, memory, build.links.get(self.name))

    def _direction(self, build: Build, message: Message) -> Literal["put", "get"]:
        """Return "put" if the receiver's arrays can be mapped, else "get"; the same at both ends."""
        receiver: GpuMemory | None = (
            build.peer_info(self, message)
            if message.direction == "send"
            else self.describe(message, build.whole.arrays, build.context, relocatable=False)
        )
        return "put" if receiver is not None and receiver.is_mapped else "get"

    def _make_mlx5(self, build: Build, job: Job) -> Channel | None:
        from halox.paths.scatter_gather.mlx5.channel import make_channel

        context = build.context
        keys = partial(context.once, _mlx5_keys)
        return make_channel(build.world, job, keys, context.device_arena)

    def channels(self, build: Build, agreed: dict[str, Any]) -> Sequence[ChannelMessages]:
        return [
            ChannelMessages(f"{self.name}/{name}", channel, channel.messages)
            for name, channel in agreed.items()
            if channel is not None
        ]
