"""Finalizers in the middle of a call: they run after it, and no call deadlocks."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from halox.paths.base import Channel, ChannelMessages
from halox.plans.runner import Runner
from halox.runtime.call_guard import CallGuard, close_collected
from tests.fakes.lone_rank import nccl_of_one
from tests.support import ROOT


class Seen(Channel):
    """A channel that records its close."""

    def __init__(self, fails: bool = False) -> None:
        self.is_closed, self.fails = False, fails

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True
        if self.fails:
            raise ValueError("in its end")


def plan_of(channel: Channel, guard: CallGuard) -> Runner:
    report: Any = SimpleNamespace(rank=0)
    world: Any = SimpleNamespace(guard=guard)
    carried = [ChannelMessages("seen", channel, ())]
    return Runner(world, None, carried, report, lambda channels, arrays: None)


class TestPlans:
    def test_one_that_goes_in_a_call_is_closed_after_it(self) -> None:
        guard, other = CallGuard(), CallGuard()
        channel, elsewhere = Seen(), Seen()
        plan, second = plan_of(channel, guard), plan_of(elsewhere, other)
        with guard:
            with guard:
                del plan, second
                assert elsewhere.is_closed
            assert not channel.is_closed
        assert channel.is_closed

    def test_one_that_goes_in_a_call_without_time_is_closed_by_the_next(self) -> None:
        guard, channel = CallGuard(), Seen()
        plan = plan_of(channel, guard)
        guard.user = 1
        del plan
        with CallGuard():
            pass
        assert not channel.is_closed
        guard.user = 0
        assert not channel.is_closed
        # The guard of any grid runs the close, since the plan's own grid may be collected, too.
        with CallGuard():
            pass
        assert channel.is_closed

    def test_not_at_exit(self) -> None:
        """MPI and CUDA may already be finalized at interpreter exit."""
        script = (
            "import os\n"
            "from tests.unit.plans.test_collecting import CallGuard, Seen, plan_of\n"
            "Seen.close = lambda self, write=os.write: write(1, b'closed')\n"
            "for guard in CallGuard(), CallGuard():\n"
            "    plan = plan_of(Seen(), guard)\n"
            "    guard.user = 1\n"
            "    del plan\n"
            "print('end', flush=True)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert ended.stdout == "end\n" and not ended.stderr

    def test_an_error_is_none_of_the_call(self, capsys: pytest.CaptureFixture[str]) -> None:
        guard, channel = CallGuard(), Seen(fails=True)
        plan = plan_of(channel, guard)
        with guard:
            del plan
        assert channel.is_closed and "ValueError: in its end" in capsys.readouterr().err
        close_collected()
        assert not capsys.readouterr().err


def test_a_plan_that_goes_while_nccl_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread itself may collect the plan."""
    seen, released = threading.Event(), threading.Event()
    ranks = nccl_of_one(monkeypatch)

    def poll() -> None:
        if not seen.is_set():
            ranks.forget(second)
            assert not released.is_set()  # the thread may look at it next
            seen.set()

    first: Any = SimpleNamespace(limit_s=0.01, poll=poll, release=lambda: None)
    second: Any = SimpleNamespace(limit_s=0.01, poll=lambda: None, release=released.set)
    with ranks._lock:
        ranks._watched += [first, second]
    third: Any = SimpleNamespace(limit_s=0.01, poll=lambda: None, release=lambda: None)
    ranks.watch(third)
    assert seen.wait(60) and released.wait(60)
    assert second not in ranks._watched
    ranks.forget(first)
    ranks.forget(third)
