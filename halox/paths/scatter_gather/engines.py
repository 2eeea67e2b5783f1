"""Channels of all engines of the ``scatter_gather`` path, with their keys; one set of keys per context."""

from __future__ import annotations

from functools import partial

from halox.paths.base import Build, Job
from halox.paths.scatter_gather import (
    survey_of,
)
from halox.paths.scatter_gather.agreement import make_with_peers
from halox.paths.scatter_gather.keys import Keys
from halox.paths.scatter_gather.mlx5_channel import Inbox, Mlx5Channel
from halox.paths.scatter_gather.mlx5_gpu import GpuArrays
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.runtime.context import Context


def make_mlx5_channel(build: Build, job: Job) -> Mlx5Channel | None:
    """Make the adapters' channel of a job; collective over all ranks."""
    return make_with_peers(build.world, partial(_mlx5_channel, build, job), job)


def _mlx5_keys(context: Context) -> tuple[Keys, Inbox]:
    adapters = survey_of(context).adapters
    assert adapters is not None and adapters.own is not None
    engine = Mlx5Umr(context.world.rank, adapters.own, context.world.waiter)
    return Keys(engine), Inbox(engine)


def _mlx5_channel(build: Build, job: Job) -> Mlx5Channel:
    arena = build.context.device_arena
    gpu = None if arena is None else GpuArrays(arena)
    return Mlx5Channel(build.world, job, *build.context.once(_mlx5_keys), gpu)
