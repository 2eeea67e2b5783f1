"""Channels of all engines of the ``scatter_gather`` path, with their keys; one set of keys per context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from halox.paths.base import Build, Job
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.scatter_gather import (
    COPY_ENGINE,
    MLX5_UMR,
    PROCESS_VM,
    GpuMemory,
    ScatterGatherPath,
    survey_of,
)
from halox.paths.scatter_gather.agreement import AgreeingChannel, make_with_peers
from halox.paths.scatter_gather.copy_channel import CopyChannel
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.engine import Direction
from halox.paths.scatter_gather.keys import Keys
from halox.paths.scatter_gather.mlx5_channel import Inbox, Mlx5Channel
from halox.paths.scatter_gather.mlx5_gpu import GpuArrays
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.paths.scatter_gather.node_channel import NodeChannel
from halox.paths.scatter_gather.process_vm import ProcessVm
from halox.runtime.context import Context

Channels: TypeAlias = dict[str, AgreeingChannel | None]
"""Channels by engine, None on a rank without messages for it."""


def make_channels(build: Build, path: ScatterGatherPath) -> Channels:
    """Make the channels of a plan, engine by engine; collective over all ranks."""
    link = build.links.get(path.name)
    makers: dict[str, Callable[[Job], AgreeingChannel]] = {
        PROCESS_VM: partial(_process_vm_channel, build, link),
        COPY_ENGINE: partial(_copy_engine_channel, build, link, path),
        MLX5_UMR: partial(_mlx5_channel, build),
    }
    channels: Channels = {}
    for name, make in makers.items():
        if (path.name, name) in build.chosen:
            job = build.job(path, name)
            channels[name] = make_with_peers(build.world, partial(make, job), job)
    return channels


def _process_vm_keys(context: Context) -> Keys:
    return Keys(ProcessVm(context.world.rank, survey_of(context).attachments.pids))


def _process_vm_channel(build: Build, link: NodeLink | None, job: Job) -> NodeChannel:
    assert link is not None
    return NodeChannel(job, build.context.once(_process_vm_keys), link)


def _copy_engine_keys(context: Context) -> tuple[Keys, CopyEngine]:
    assert context.device_arena is not None
    engine = CopyEngine(context.device_arena)
    return Keys(engine), engine


def _copy_engine_channel(
    build: Build, link: NodeLink | None, path: ScatterGatherPath, job: Job
) -> CopyChannel:
    context = build.context
    assert context.events is not None and link is not None
    directions = {m.key: _direction(build, path, m) for m in job.messages}
    engine = context.once(_copy_engine_keys)
    return CopyChannel(job, directions, *engine, context.events, link)


def _direction(build: Build, path: ScatterGatherPath, message: Message) -> Direction:
    """Return "put" if the receiver's arrays can be mapped, else "get"; the same at both ends."""
    receiver: GpuMemory | None = (
        build.peer_info(path, message)
        if message.direction == "send"
        else path.describe(message, build.whole.arrays, build.context, relocatable=False)
    )
    return "put" if receiver is not None and receiver.is_mapped else "get"


def _mlx5_keys(context: Context) -> tuple[Keys, Inbox]:
    adapters = survey_of(context).adapters
    assert adapters is not None and adapters.own is not None
    engine = Mlx5Umr(context.world.rank, adapters.own, context.world.waiter)
    return Keys(engine), Inbox(engine)


def _mlx5_channel(build: Build, job: Job) -> Mlx5Channel:
    arena = build.context.device_arena
    gpu = None if arena is None else GpuArrays(arena)
    return Mlx5Channel(build.world, job, *build.context.once(_mlx5_keys), gpu)
