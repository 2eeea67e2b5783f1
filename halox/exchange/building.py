"""The channels of a plan, made path by path in the order of the registry."""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths import PATHS
from halox.paths.base import Carried
from halox.paths.build import Build

_BUILDING = "the making of a plan"


def build_channels(build: Build) -> list[Carried]:
    """Make all channels of a plan; collective over all ranks."""
    world = build.world
    used = {route.path for route, _ in build.routes.values()}
    said = world.gather({name: bool(build.messages_near(PATHS[name])) for name in used}, _BUILDING)
    build.near = [[name for name, is_near in one.items() if is_near] for one in said]
    anywhere = set().union(*said)
    agreed = {name: path.negotiate(build) for name, path in PATHS.items() if name in anywhere}

    def made() -> Sequence[Carried]:
        return [
            one for name, path in PATHS.items() for one in path.channels(build, agreed.get(name))
        ]

    # Page-locking and compiling can fail on one rank alone.
    channels: list[Carried] = world.guarded(made, _BUILDING)
    return channels
