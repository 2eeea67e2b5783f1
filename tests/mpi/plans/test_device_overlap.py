"""Overlapped loops on a GPU: the order of their work on two streams, and whether they overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.paths.base import ChannelMessages
from halox.plans.overlap import DeviceOverlap
from halox.plans.runner import Runner
from halox.runtime.arrays import describe
from halox.runtime.gpu import pools
from halox.runtime.gpu.pools import Pool, SideStream
from tests.fakes.fake_gpu import judge
from tests.mpi.conftest import on_first
from tests.mpi.paths.channels import CopyRig, IpcRig, RecordedRig, ring

Make = Callable[[type[RecordedRig]], RecordedRig]


def overlap_of(mode: Any, remote_us: float, extent: int = 96, axis: int = 0) -> DeviceOverlap:
    """Return the loop over blocks of ``extent`` squared cells, with neighbours along an axis."""
    procs, sides = (3, 1) if axis == 0 else (1, 3), (axis == 0, axis == 1)
    shape = [extent * parts for parts in procs]
    domain = decompose(shape, 3, periodic=sides, proc_shape=procs)
    layout = FieldLayout(domain, 1, FieldSpec(((1, 1), (1, 1))))
    described = replace(describe(np.empty(layout.padded_shape)), device=0)
    return DeviceOverlap(layout, 1, mode, (), (), described, remote_us)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("mode", "remote_us", "extent", "axis", "text"),
    [
        ("auto", 12, 2048, 0, "on in CUDA graphs, 12.0 us can be hidden"),
        ("auto", 100, 4096, 0, "on, 67.2 us can be hidden"),
        ("auto", 5, 4096, 0, "off, 5.0 us can be hidden"),
        ("auto", 100, 512, 0, "off, 1.1 us can be hidden"),
        ("auto", 12, 4096, 1, "off, 0.0 us can be hidden"),
        ("auto", 0, 4096, 0, "off, no other rank sends halo cells"),
        (True, 0, 4096, 0, "off, no other rank sends halo cells"),
        (True, 1, 512, 0, "region(s) after it; on"),
        (False, 100, 4096, 0, "region(s) after it; off"),
        (True, 100, 60, 1, "off, the block has no cells so far from its halo"),
    ],
)
def test_whether_a_loop_overlaps(
    mode: Any,
    remote_us: float,
    extent: int,
    axis: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "SIDE_STREAMS", Pool(lambda device: object()))
    assert text in str(overlap_of(mode, remote_us, extent, axis))


@pytest.fixture
def rig(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made = []

    def make(kind: type[RecordedRig]) -> RecordedRig:
        way = "staging" if kind is IpcRig else "put"
        made.append(kind(comm, monkeypatch, ring(way, comm.size)))
        monkeypatch.setattr(pools, "SIDE_STREAMS", Pool(SideStream))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Stepper:
    """Overlapped steps of a rig: each region reads what a step may read there, and writes an area of its own."""

    def __init__(self, rig: RecordedRig) -> None:
        rig.poison()
        report: Any = None
        channels = [ChannelMessages("channel", rig.channel, ())]
        self.rig, self.overlap = rig, overlap_of(True, 1e3)
        self.runner: Any = Runner(rig.world, 0, channels, report, lambda *_: None)
        self.sources, self.targets = (
            [array.pointer + np.arange(8 * array.shape[0]) for some in arrays for array in some]
            for arrays in (rig.sources.values(), rig.targets.values())
        )
        self.results = [rig.array(len(self.sources[0]) // 8, False).pointer for _ in range(4)]
        self.result = [at + np.arange(len(self.sources[0])) for at in self.results]

    def regions(self) -> Iterator[int]:
        """Run a loop, and number its regions."""
        for number, _ in enumerate(self.overlap.loop(self.runner, None, ())):
            yield number

    def body(self, number: int) -> None:
        """The step of a region on the current stream."""
        read = [*self.sources, *(self.targets if number else [])]
        size = len(self.result[number])
        self.rig.gpu.run([("copy", at[:size], self.result[number]) for at in read])

    def after(self) -> None:
        """Read all results, and what the exchange has received, on the caller's stream."""
        *others, last = self.result
        self.rig.gpu.run([("copy", result, last) for result in others])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [CopyRig, IpcRig])
def test_regions_on_two_streams_have_no_race(
    kind: type[RecordedRig], rig: Make, comm: MPI.Intracomm
) -> None:
    """A body may also put a kernel on the caller's stream by itself, as other libraries do."""
    made = rig(kind)
    caller, steps = made.gpu.current, Stepper(made)
    for epoch in range(5):
        made.gpu.epoch = epoch
        made.fill(epoch)
        seen = []
        for number in steps.regions():
            steps.body(number)
            if number:
                other = [
                    ("copy", at[: len(steps.result[3])], steps.result[3]) for at in steps.targets
                ]
                made.gpu.run(other, caller.ptr)
            seen.append(made.gpu.current)
            if epoch == 3:
                break
        assert epoch == 3 or (len(seen) == 3 and seen[0] is caller and seen[1] is not caller)
        assert made.gpu.current is caller
        made.expect(epoch)
        steps.after()
    assert made.is_right()


class Unpacked:
    """In place of a runner: `finish` copies to the targets, as a path that graphs can contain."""

    def __init__(self, steps: Stepper) -> None:
        self._gpu = steps.rig.gpu
        self._copies = [("copy", steps.sources[0], target) for target in steps.targets]

    def start_copied(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        self._gpu.run(self._copies)


@pytest.mark.ranks(3)
def test_rims_are_a_branch_beside_the_interior(rig: Make, comm: MPI.Intracomm) -> None:
    made: Any = rig(IpcRig)
    caller, steps = made.gpu.current, Stepper(made)
    steps.runner = Unpacked(steps)
    made.gpu.begin_capture()
    for number in steps.regions():
        steps.body(number)
    graph = made.gpu.end_capture()
    for epoch in range(4):
        made.gpu.epoch = epoch
        made.gpu.replay(graph)
        steps.after()
    kernels = [n for n, op in enumerate(graph) if op.kind == "kernel" and op.steps]
    (interior,) = (
        n for n in kernels if any(step[-1] is steps.result[0] for step in graph[n].steps)
    )
    late = {op.event for op in graph[interior:] if op.kind == "record" and op.stream == caller.ptr}
    waits = [op for op in graph if op.kind == "wait" and op.stream != caller.ptr]
    assert waits and not any(op.event in late for op in waits)
    logs = made.logs()
    on_first(lambda: judge(logs), comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("nested", [False, True])
def test_two_loops_at_once(nested: bool, rig: Make, comm: MPI.Intracomm) -> None:
    """Regions of two plans in turn, or all regions of a plan in each region of another one."""
    one = rig(IpcRig)
    two = one.twin()
    first, second = Stepper(one), Stepper(two)
    caller = one.gpu.current
    for epoch in range(3):
        one.gpu.epoch = epoch
        one.fill(epoch)
        two.fill(epoch)
        if nested:
            for a in first.regions():
                first.body(a)
                if a == 1:
                    for b in second.regions():
                        second.body(b)
        else:
            for a, b in zip(first.regions(), second.regions(), strict=True):
                first.body(a)
                second.body(b)
        assert one.gpu.current is caller
        for rig_, steps in ((one, first), (two, second)):
            rig_.expect(epoch)
            steps.after()
    logs = one.logs()
    on_first(lambda: judge(logs), comm)
    two.leave()
