"""The ``scatter_gather`` path: engines that walk both ends' block lists by themselves, without packing.

After Suresh et al. 2022, section IV. An engine (`halox.paths.scatter_gather.engine`) moves windows of a message, cut at
the same bytes at both ends (`windows`), between keys that are mapped once and kept (`keys`). Each is a protocol:

- ``process_vm``: NumPy arrays of two ranks of a node, copied by the kernel.
- ``copy_engine``: arrays on GPUs of a node, copied by the CUDA driver into memory that the peer maps.
- ``mlx5_umr``: NumPy arrays of ranks on different nodes, written by their network adapters; not chosen by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from halox.paths.base import (
    Build,
    Candidate,
    Carried,
    EndpointInfo,
    Path,
    Protocol,
    SelectionContext,
    why_not_gpus,
)
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message
from halox.paths.scatter_gather.copy_channel import CopyChannel, make_copy_channel
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.engine import Direction
from halox.paths.scatter_gather.keys import Keys
from halox.paths.scatter_gather.mlx5_channel import Mail, Mlx5Channel, make_mlx5_channel
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.paths.scatter_gather.node_channel import NodeChannel, make_node_channel
from halox.paths.scatter_gather.process_vm import ProcessVm
from halox.runtime import mlx5
from halox.runtime.context import Context
from halox.runtime.cross_memory import Attachments, survey
from halox.runtime.topology import Topology

if TYPE_CHECKING:
    from halox.runtime.arrays import Described

BLOCK_BYTES, MESSAGE_BYTES = 4 << 10, 128 << 10
"""NumPy arrays that a message goes one way between, in blocks and of bytes at least so many, are copied by the kernel
rather than packed: both ends move half. A block costs the kernel some 0.2 us, flags and calls some 10 us."""

BLOCK_BYTES_BOTH_WAYS, MESSAGE_BYTES_BOTH_WAYS = 16 << 10, 1 << 20
"""The same where a message goes the other way as well, so that each rank moves one (docs/performance/log.md)."""

ROW_BYTES = 128
"""Blocks on GPUs at least this long are left to copy engines where multiprocessors are to be left alone; a row of a box
takes them as long as some hundred bytes, however short it is."""

Agreed = tuple[NodeChannel | None, CopyChannel | None, Mlx5Channel | None]


class Survey(NamedTuple):
    """Memory of ranks that the kernel reaches, and network adapters of ranks; None if all are on one node."""

    attachments: Attachments
    adapters: mlx5.Adapters | None


def _surveyed(context: Context) -> Survey:
    found: Survey = context.world.ranks.kept[ScatterGatherPath.name]
    return found


def _process_vm_keys(context: Context) -> Keys:
    return Keys(ProcessVm(context.world.rank, _surveyed(context).attachments.pids))


def _mlx5_keys(context: Context) -> tuple[Keys, Mail]:
    adapters = _surveyed(context).adapters
    if adapters is None or adapters.own is None:
        raise AssertionError("a message between adapters on a rank without one")
    engine = Mlx5Umr(context.world.rank, adapters.own, context.world.waiter)
    return Keys(engine), Mail(engine)


def _copy_engine_keys(context: Context) -> tuple[Keys, CopyEngine]:
    if context.device_arena is None:
        raise AssertionError("a message between GPUs on a rank without memory for it")
    engine = CopyEngine(context.device_arena)
    return Keys(engine), engine


class ScatterGatherPath(Path):
    """Moves messages without packing; its protocols are the engines."""

    name = "scatter_gather"
    protocols = (
        # It competes with those of the host path, which follow fixed rules, and so does it.
        Protocol(ProcessVm.name, fallback="host/mpi", memory="host", is_tuned=False),
        # As ipc/put, but that every row of a box costs a copy engine as much as some hundred bytes.
        Protocol(
            CopyEngine.name,
            ProtocolCost(26.0, 6.0, (1.0, 4.0, 16.0, 120.0)),
            ProtocolCost(390.0, 6.0, (1.0, 4.0, 16.0, 120.0)),
            fallback="staged/mpi",
            in_field=True,
        ),
        # It has not run on hardware, and is not chosen by itself.
        Protocol(Mlx5Umr.name, reach="nodes", memory="host", is_tuned=False),
    )
    summary = "possible: long blocks that the kernel or a GPU's copy engines move by themselves"

    def survey(self, context: Context, *, is_named: bool) -> Survey:
        """Find out between which ranks of a node the kernel copies, and who has an adapter; once a communicator."""
        world = context.world
        if self.name not in world.ranks.kept:
            adapters = mlx5.survey(world) if len(set(world.nodes)) > 1 else None
            world.ranks.kept[self.name] = Survey(survey(world), adapters)
        return _surveyed(context)

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, floats: bool
    ) -> bool | None:
        """Say that the message's arrays are in memory of this rank's GPU that peers can map."""
        arena = context.device_arena
        if arena is None or floats:
            return None
        for part in message.parts:
            array, (first, end) = arrays[part.array], part.datatype.reach(part.count)
            if array.device is None:
                return None
            if arena.locate(array.pointer + first, array.pointer + end) is None:
                return None
        return True

    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer the engines that reach both ends."""
        if selection.operation == "add":
            return "accumulate needs a copy"
        if "gpu" in (sender.memory, receiver.memory):
            return self._on_gpus(sender, receiver, selection)
        return self._on_hosts(sender, receiver, selection)

    def _on_hosts(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer the kernel on a node, and prefer it for long blocks; between nodes the adapters."""
        found: Survey | None = selection.surveys.get(self.name)
        if found is None:
            return "it is not known whether the kernel copies between the ranks"
        if sender.node != receiver.node:
            return self._between_nodes(sender.rank, receiver.rank, found.adapters)
        why = found.attachments.why_not(sender.rank, receiver.rank)
        if why is not None:
            return why
        block = min(sender.block_bytes, receiver.block_bytes)
        least = (
            (BLOCK_BYTES, MESSAGE_BYTES)
            if sender.is_one_way
            else (BLOCK_BYTES_BOTH_WAYS, MESSAGE_BYTES_BOTH_WAYS)
        )
        is_long = block >= least[0] and sender.nbytes >= least[1]
        said = f"same node, copied by the kernel: blocks of {block} B on average"
        if sender.is_one_way:
            said += ", half by each end"
        return [self.offer(ProcessVm.name, said, preferred=is_long)]

    def _between_nodes(
        self, sender: int, receiver: int, adapters: mlx5.Adapters | None
    ) -> Sequence[Candidate] | str:
        """Offer the adapters."""
        why = "they are not known" if adapters is None else adapters.why_not(sender, receiver)
        if why is not None:
            return f"ranks {sender} and {receiver} are on different nodes, and {why}"
        return [self.offer(Mlx5Umr.name, "other node, written by the network adapters")]

    def why_not(self, protocol: str, sender: EndpointInfo, receiver: EndpointInfo) -> str | None:
        """Say where each engine works."""
        if protocol == Mlx5Umr.name:
            if "gpu" in (sender.memory, receiver.memory):
                return "mlx5_umr moves NumPy arrays"
            if sender.node == receiver.node:
                return f"mlx5_umr is for different nodes, and ranks {sender.rank} and {receiver.rank} are on the same"
        return None

    def _on_gpus(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer the copy engine where either end's arrays can be mapped."""
        why = why_not_gpus(sender, receiver, selection, Topology.why_no_events)
        if why is not None:
            return why
        block = min(sender.block_bytes, receiver.block_bytes)
        if self.name in receiver.paths:
            said = "copied by the driver into the receiver's array, no kernel"
        elif self.name in sender.paths:
            said = "copied by the driver from the sender's array, no kernel"
        else:
            return "neither end's array is in memory that the other rank maps; allocate one by the grid"
        preferred = selection.leave_sms and block >= ROW_BYTES
        return [self.offer(CopyEngine.name, said, preferred=preferred)]

    def negotiate(self, build: Build) -> Agreed:
        """Swap keys with the peers, engine by engine."""
        context = build.context
        link = build.link(self, words=len(build.whole.arrays))
        on_host, on_gpu, far = None, None, None
        if (self.name, ProcessVm.name) in build.protocols_used:
            job = build.job(self, ProcessVm.name)
            keys = context.once(_process_vm_keys) if job.messages else None
            on_host = make_node_channel(build.world, job, keys, link)
        if (self.name, CopyEngine.name) in build.protocols_used:
            job = build.job(self, CopyEngine.name)
            engine = None
            if job.messages and context.events is not None:
                engine = (*context.once(_copy_engine_keys), context.events)
            directions = {m.key: self._direction(build, m) for m in job.messages}
            on_gpu = make_copy_channel(build.world, job, directions, engine, link)
        if (self.name, Mlx5Umr.name) in build.protocols_used:
            job = build.job(self, Mlx5Umr.name)
            far = make_mlx5_channel(
                build.world, job, lambda: context.once(_mlx5_keys) if job.messages else None
            )
        return on_host, on_gpu, far

    def _direction(self, build: Build, message: Message) -> Direction:
        """Return "put" where the receiver's arrays can be mapped, else "get"; alike at both ends."""
        receiver = (
            build.peer_info(self, message)
            if message.direction == "send"
            else self.describe(message, build.whole.arrays, build.context, floats=False)
        )
        return "put" if receiver else "get"

    def channels(self, build: Build, agreed: Agreed | None) -> Sequence[Carried]:
        """Return the channels that were agreed on."""
        on_host, on_gpu, far = agreed or (None, None, None)
        found = []
        if on_host is not None:
            found.append(Carried(f"{self.name}/{ProcessVm.name}", on_host, on_host.messages))
        if on_gpu is not None:
            found.append(Carried(f"{self.name}/{CopyEngine.name}", on_gpu, on_gpu.messages))
        if far is not None:
            found.append(Carried(f"{self.name}/{Mlx5Umr.name}", far, far.messages))
        return found
