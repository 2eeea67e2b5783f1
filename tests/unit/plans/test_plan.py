"""The close of a plan: the arrays that must stay alive after it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.paths.base import Channel, ChannelMessages
from halox.plans.plan import Plan
from halox.plans.runner import Runner
from halox.runtime.call_guard import CallGuard


class Given(Channel):
    """A channel that fails in a given step."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.has_failed = fails_in == "silence"

    def start(self) -> None:
        if self.fails_in == "start":
            raise RuntimeError

    def finish(self) -> None:
        if self.fails_in == "finish":
            raise RuntimeError


class Rig:
    """A plan of one array, and the arrays that it keeps alive at its end."""

    def __init__(self, keep: bool, fails_in: str = "") -> None:
        self.array = np.zeros(3)
        self.left: list[Any] = []
        channel: Any = Given(fails_in)
        report: Any = SimpleNamespace(rank=0, rows=())
        world: Any = SimpleNamespace(guard=CallGuard(), check_open=lambda: None)
        carried = [ChannelMessages("given", channel, ())]
        runner = Runner(world, None, carried, report, self.release_memory)
        runner.hold([self.array[1:]], alive=keep)
        self.plan = Plan(runner)

    def release_memory(self, channels: Sequence[Channel], arrays: Sequence[Any]) -> None:
        self.left.append(list(arrays))

    def leaves(self, how: str) -> bool:
        """Whether the plan keeps the array's memory alive when it is closed or deleted."""
        if how == "close":
            self.plan.close()
        del self.plan
        (arrays,) = self.left
        return any(np.shares_memory(array, self.array) for array in arrays)


def test_a_plan_shows_public_names_only() -> None:
    assert [name for name in dir(Rig(True).plan) if not name.startswith("_")] == [
        *("accumulate", "bytes_sent", "close", "device_handle", "explain", "fill_walls"),
        *("finish", "measure", "messages_sent", "overlap", "start", "steps"),
    ]


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("keep", [True, False])
def test_arrays_of_a_finished_plan_are_let_go(keep: bool, how: str) -> None:
    rig = Rig(keep)
    rig.plan()
    rig.plan.start()
    rig.plan.finish()
    assert not rig.leaves(how)


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("fails_in", ["", "start", "finish", "silence"])
def test_arrays_of_an_unfinished_plan_are_kept(fails_in: str, keep: bool, how: str) -> None:
    """The plan was started, failed in a step, or failed on a GPU without an error."""
    rig = Rig(keep, fails_in)
    if fails_in == "":
        rig.plan.start()
    elif fails_in == "silence":
        rig.plan()
    else:
        with pytest.raises(RuntimeError):
            rig.plan()
    assert rig.leaves(how)


def test_a_plan_of_the_cache_keeps_its_arrays_from_a_failure_on() -> None:
    """A late peer may still write to the arrays after the caller has deleted them."""
    rig = Rig(keep=False, fails_in="finish")
    with pytest.raises(RuntimeError):
        rig.plan()
    rig.array = np.ones(3)
    rig.plan.close()
    assert [list(array) for array in rig.left[0]] == [[0.0, 0.0, 0.0]]
