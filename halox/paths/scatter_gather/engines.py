"""Channels of all engines of the ``scatter_gather`` path, with their keys; one set of keys per context."""

from __future__ import annotations

from functools import partial

from halox.paths.base import Build, Job
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.scatter_gather import (
    GpuMemory,
    ScatterGatherPath,
    survey_of,
)
from halox.paths.scatter_gather.agreement import make_with_peers
from halox.paths.scatter_gather.copy_channel import CopyChannel
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.engine import Direction
from halox.paths.scatter_gather.keys import Keys
from halox.paths.scatter_gather.mlx5_channel import Inbox, Mlx5Channel
from halox.paths.scatter_gather.mlx5_gpu import GpuArrays
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.runtime.context import Context


def make_copy_channel(build: Build, path: ScatterGatherPath, job: Job) -> CopyChannel | None:
    """Make the copy engine's channel of a job; collective over all ranks."""
    link = build.links.get(path.name)
    return make_with_peers(build.world, partial(_copy_engine_channel, build, link, path, job), job)


def make_mlx5_channel(build: Build, job: Job) -> Mlx5Channel | None:
    """Make the adapters' channel of a job; collective over all ranks."""
    return make_with_peers(build.world, partial(_mlx5_channel, build, job), job)


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
