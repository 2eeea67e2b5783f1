"""Graphs with a conditional node, without a GPU: the driver's calls on a stand-in, with the kernel compiled as C++."""

from __future__ import annotations

import time

import numpy as np
import pytest

from halox.errors import DeviceError, StateError
from halox.runtime.arrays import Described
from halox.runtime.gpu import driver, streams, while_graph
from halox.runtime.gpu.while_graph import WhileGraph
from tests.support import require

require("cxx")
require("nvrtc")  # the bindings belong to the same package
from tests.fakes.graph_driver import EXECUTABLE, GRAPH, GraphDriver, compiled  # noqa: E402


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GraphDriver:
    fake = GraphDriver(getattr(request, "param", 13000))
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(while_graph, "cupy", fake.cupy)

    monkeypatch.setattr(while_graph, "PreparedLaunch", fake.prepared)
    monkeypatch.setattr(
        while_graph,
        "kernel",
        lambda name, function, device, defines: compiled(dict(defines)["FLAG"]),
    )
    return fake


class Steps:
    """Rounds on the stand-in: each adds 1, and sets the highest bit of the flag after ``end`` rounds."""

    def __init__(self, gpu: GraphDriver, end: int, dtype: str = "?", pause_s: float = 0) -> None:
        self._gpu, self.end, self._pause_s = gpu, end, pause_s
        self.rounds = 0
        self._bytes = np.zeros(np.dtype(dtype).itemsize, "u1")
        self.flag = Described(self._bytes.ctypes.data, (), (), np.dtype(dtype), 0, True)

    def __call__(self) -> None:
        self._gpu.launch(self._kernel)

    def _kernel(self) -> None:
        time.sleep(self._pause_s)
        self.rounds += 1
        self._bytes[-1] = 0x80 if self.rounds >= self.end else 0


def never() -> bool:
    return False


@pytest.mark.parametrize("gpu", [12080, 13000], indirect=True)
@pytest.mark.parametrize("dtype", ["?", "i2", "i4", "u8"])
@pytest.mark.part(2)
def test_numbers_of_rounds(dtype: str, gpu: GraphDriver) -> None:
    for end, most, known in ((1, 9, 1), (5, 9, 5), (9, 9, 9), (20, 9, 9)):
        steps = Steps(gpu, end, dtype)
        graph = WhileGraph(steps, steps.flag)
        pools = [call for call in gpu.calls if "pool" in call]
        assert pools[-2:] == ["pool of the loop", "default pool"]
        assert (graph.run(0, most, never), steps.rounds) == (known, known)
        steps.rounds = 3
        assert graph.run(3, most, never) == max(known, 4)


def test_a_failure_and_an_interrupt_stop_the_loop(gpu: GraphDriver) -> None:
    """The loop ends after the round under way, before `run` returns or raises."""
    steps = Steps(gpu, 1 << 60, pause_s=1e-4)
    graph = WhileGraph(steps, steps.flag)
    rounds = graph.run(0, 1 << 60, lambda: steps.rounds > 20)
    assert 20 < rounds == steps.rounds and gpu.thread and not gpu.thread.is_alive()

    def interrupted() -> bool:
        if steps.rounds > 40:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        graph.run(0, 1 << 60, interrupted)
    assert steps.rounds > 40 and not gpu.thread.is_alive()


def test_errors_of_the_capture(gpu: GraphDriver) -> None:
    """An error of the work is raised as it is; the capture is ended, and the graph freed."""

    def work() -> None:
        assert streams.loops
        raise StateError("needs the host")

    steps = Steps(gpu, 1)
    with pytest.raises(StateError) as caught:
        WhileGraph(work, steps.flag)
    assert not gpu.is_capturing and not streams.loops
    caught.value.__traceback__ = None
    del caught
    assert gpu.calls.count(f"destroyed {GRAPH}") == 1
    gpu.is_invalid = True
    with pytest.raises(DeviceError, match="cuStreamEndCapture"):
        WhileGraph(steps, steps.flag)


def test_the_graph_is_freed(gpu: GraphDriver) -> None:
    steps = Steps(gpu, 1)
    graph = WhileGraph(steps, steps.flag)
    gpu.calls.clear()
    del graph
    assert sorted(gpu.calls) == [f"destroyed {GRAPH}", f"destroyed {EXECUTABLE}"]


def test_drivers_without_conditional_nodes(gpu: GraphDriver) -> None:
    for version, has in ((13000, True), (12030, False), (12040, True)):
        gpu.CUDA_VERSION = version
        assert while_graph.has_while_graphs() == has
