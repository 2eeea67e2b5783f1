"""The channels of a plan, made path by path in the order of the registry."""

from __future__ import annotations

from typing import NamedTuple

from halox.errors import HaloxError
from halox.paths import PATHS
from halox.paths.base import Carried
from halox.paths.build import Build

_BUILDING = "the making of a plan"


class Built(NamedTuple):
    """The channels of a plan on this rank, and what holds for those of all ranks.

    Attributes
    ----------
    channels : list of Carried
    needs_host : bool
        Whether some channel of any rank needs the host.
    is_movable : bool
        Whether all can work on other arrays of the same layouts.
    """

    channels: list[Carried]
    needs_host: bool
    is_movable: bool


def build_channels(build: Build, error: HaloxError | None = None) -> Built:
    """Make all channels of a plan, or raise on all ranks if one has an error; collective over all ranks."""
    world = build.world
    used = {route.path for route, _ in build.routes.values()} if error is None else ()
    near = {name: bool(build.messages_near(PATHS[name])) for name in used}
    said = world.gather(near, _BUILDING, error)
    build.near = [[name for name, is_near in one.items() if is_near] for one in said]
    anywhere = set().union(*said)
    agreed = {name: path.negotiate(build) for name, path in PATHS.items() if name in anywhere}

    channels: list[Carried] = []

    def made() -> tuple[bool, bool]:
        for name, path in PATHS.items():
            channels.extend(path.channels(build, agreed.get(name)))
        found = [one.channel for one in channels]
        return any(c.needs_host for c in found), all(c.is_movable for c in found)

    # Page-locking and compiling can fail on one rank alone.
    needs_host, is_movable = zip(*world.gather_result(made, _BUILDING), strict=True)
    return Built(channels, any(needs_host), all(is_movable))
