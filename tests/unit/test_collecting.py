"""Finalizers at any instruction of a call: no memory is lost or handed out twice, and no call deadlocks."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.exchange import cache as cache_module
from halox.exchange.plan import Plan
from halox.paths.base import Channel
from halox.runtime import arena as arena_module
from halox.runtime import device_arena
from halox.runtime.arena import SharedArena
from halox.runtime.call_guard import CallGuard, close_collected
from halox.runtime.deferred import Deferred
from halox.runtime.device_arena import DeviceArena
from halox.runtime.free_list import FreeList
from tests.collecting import at_each_instruction
from tests.limits import cache_few_plans
from tests.support import ROOT
from tests.unit.lone_rank import nccl_of_one

MIB = 1 << 20


class Owner:
    """An object that accepts a finalizer."""


class TestMemoryOfAGpu:
    """Fields of an arena; a fake driver hands out addresses without memory."""

    @pytest.fixture(autouse=True)
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        at = count(1 << 32, 1 << 30)
        cuda = SimpleNamespace(
            Device=lambda number: nullcontext(),
            Memory=lambda nbytes: SimpleNamespace(ptr=next(at)),
        )
        monkeypatch.setattr(device_arena, "cupy", lambda: SimpleNamespace(cuda=cuda))

    def field(self, arena: DeviceArena, nbytes: int) -> Any:
        block, owner = arena.allocate(nbytes), Owner()
        weakref.finalize(owner, arena.release, block)
        owner.span = block.pointer, block.pointer + nbytes  # type: ignore[attr-defined]
        return owner

    # A field between others, one with a free neighbour, and one alone in its segment.
    @pytest.mark.parametrize("doomed", [2, 1, 5])
    @pytest.mark.parametrize("call", ["allocate", "allocate more", "locate"])
    def test_fields_never_share_memory(self, doomed: int, call: str) -> None:
        found: list[Any] = []

        def make() -> tuple[list[Any], Any]:
            arena = DeviceArena(0)
            sizes = [1000, 3000, 512, 5000, 700, 40 * MIB, 90 * MIB]
            fields = [self.field(arena, nbytes) for nbytes in sizes]
            del fields[0]
            found[:] = arena, fields

            def run() -> None:
                if call == "locate":
                    start, end = fields[-1].span
                    assert arena.locate(start, end) is not None
                    return
                fields.append(self.field(arena, 600 if call == "allocate" else 60 * MIB))
                spans = sorted(field.span for field in fields if field is not None)
                assert all(a[1] <= b[0] for a, b in pairwise(spans))

            which = [fields[doomed - 1]]
            fields[doomed - 1] = None
            return which, run

        def check() -> None:
            arena, fields = found
            fields.clear()
            assert not arena._segments

        def made() -> tuple[list[Any], Any]:
            if found:
                check()
            return make()

        modules = "runtime/device_arena", "runtime/free_list"
        assert at_each_instruction(made, modules) > 9
        check()


def test_plans_whose_arrays_go_while_another_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_few_plans(monkeypatch, 3)

    def make() -> tuple[list[Any], Any]:
        cache = cache_module.PlanCache(lambda arrays: tuple(map(id, arrays)))
        arrays = [np.zeros(3) for _ in range(4)]
        plans = [SimpleNamespace(close=lambda: None, relocatable=False) for _ in arrays]
        for array, plan in zip(arrays[:3], plans, strict=False):
            cache.add("exchange", (array,), plan)  # type: ignore[arg-type]
        doomed, last = [arrays.pop(0)], arrays[-1]

        def run() -> None:
            cache.add("exchange", (last,), plans[3])  # type: ignore[arg-type]
            assert len(cache) == len(arrays) == 3

        return doomed, run

    assert at_each_instruction(make, ["exchange/cache"]) > 9


def test_fields_that_go_while_their_grid_is_closed() -> None:
    found: list[SharedArena] = []
    ranks: Any = SimpleNamespace(
        rank=0, node_ranks={0: 0}, shares_memory=True, gather=None, reduce=None
    )

    def make() -> tuple[list[Any], Any]:
        if found:
            assert not found[0]._used and found[0]._own[0].free.is_whole
        arena = SharedArena(ranks)
        segment = SimpleNamespace(nbytes=MIB, memory=np.zeros(MIB, "u1"), trim=lambda: None)
        arena._own[0] = arena_module._OwnSegment(segment, FreeList(MIB))  # type: ignore[arg-type]
        blocks: list[Any] = []
        for number in range(4):
            room = arena.reserve(5000)
            blocks.append(arena.commit(room, [None], is_field=number % 2 == 0))
        fields = [arena.array(block, (5000,), np.dtype("u1")) for block in blocks[::2]]
        found[:] = [arena]
        arena._is_open = False
        return fields, arena._release_plans

    assert at_each_instruction(make, ["runtime/arena", "runtime/free_list"]) > 9


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


def plan_of(channel: Channel, guard: CallGuard) -> Plan:
    report: Any = SimpleNamespace(rank=0)
    return Plan([channel], report, [], lambda: None, lambda channels, arrays: None, guard=guard)


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

    def test_close_is_at_once(self) -> None:
        guard, channel = CallGuard(), Seen()
        plan = plan_of(channel, guard)
        with guard:
            plan.close()
            assert channel.is_closed
        channel.is_closed = False
        del plan
        assert not channel.is_closed

    def test_a_closed_one_keeps_nothing(self) -> None:
        channel = Seen()
        seen = weakref.ref(channel)
        plan = plan_of(channel, CallGuard())
        plan.close()
        del channel
        assert seen() is None

    def test_not_at_exit(self) -> None:
        """MPI and CUDA may already be finalized at interpreter exit."""
        script = (
            "import os\n"
            "from tests.unit.test_collecting import CallGuard, Seen, plan_of\n"
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

    def test_an_error_is_none_of_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        monkeypatch.setattr("sys.unraisablehook", lambda found: seen.append(found.exc_value))
        guard, channel = CallGuard(), Seen(fails=True)
        plan = plan_of(channel, guard)
        with guard:
            del plan
        assert channel.is_closed and [str(error) for error in seen] == ["in its end"]
        close_collected()
        assert len(seen) == 1


class TestDeferred:
    def test_on_another_thread(self) -> None:
        deferred, done = Deferred(), []
        with deferred:
            other = threading.Thread(target=lambda: deferred.do(partial(done.append, 1)))
            other.start()
            other.join()
            assert not done
        assert done == [1]

    def test_an_error_lets_others_in(self) -> None:
        deferred, done = Deferred(), []

        def fail() -> None:
            raise ValueError("in its end")

        with pytest.raises(ValueError, match="in its end"):
            deferred.do(fail)
        with deferred:
            deferred.do(partial(done.append, 1))
        assert done == [1]


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
