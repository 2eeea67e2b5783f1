"""Graphs with a conditional node, without a GPU: the driver's calls on a stand-in, with the kernel compiled as C++."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.errors import DeviceError, StateError
from halox.runtime.arrays import Described
from halox.runtime.gpu import driver, streams, while_graph
from halox.runtime.gpu.compiler import preamble, source
from halox.runtime.gpu.while_graph import WhileGraph
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")
cu = pytest.importorskip("cuda.bindings.driver")

HANDLE, STREAM, GRAPH, BODY, EXECUTABLE = 70, 7, 11, 12, 13
SUCCESS = 0

LOOK = """
static unsigned conditions[100];
extern "C" void cudaGraphSetConditional(unsigned long long handle, unsigned value) {{ conditions[handle] = value; }}
{look}
extern "C" unsigned run(unsigned long long loop, const FLAG* flag, unsigned long long* words)
{{
    launch_on_cpu(1, 1, false, look, loop, (const volatile FLAG*)flag, (volatile unsigned long long*)words);
    return conditions[loop];
}}
"""


def compiled(flag: str) -> Callable[..., int]:
    text = preamble((("FLAG", flag),)) + f'#include "{SHIM}"\n' + LOOK.format(look=source("look"))
    run: Callable[..., int] = shared_library(text).run
    return run


class Words:
    """Array in device memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.data = SimpleNamespace(ptr=values.ctypes.data)

    def set(self, values: np.ndarray, stream: Any) -> None:
        self.values[...] = values

    def __getitem__(self, key: Any) -> Any:
        found = self.values[key]
        return found if isinstance(key, int) else Words(found)


class FakeDriver:
    """Takes the place of ``cuda.bindings.driver`` and of CuPy; a launched graph runs in a thread."""

    def __init__(self, version: int = 13000) -> None:
        self.CUDA_VERSION = version
        self.launches: list[Callable[[], int | None]] = []
        self.calls: list[str] = []
        self.is_capturing = False
        self.is_invalid = False
        self.condition = 1
        self.thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(name)
        return getattr(cu, name)

    def cuGraphCreate(self, flags: int) -> Any:
        return SUCCESS, GRAPH

    def cuCtxGetCurrent(self) -> Any:
        return SUCCESS, cu.CUcontext(5)

    def cuGraphConditionalHandleCreate(
        self, graph: int, context: Any, value: int, flags: int
    ) -> Any:
        assert (graph, int(context), value) == (GRAPH, 5, 1) and flags == 1
        return SUCCESS, cu.CUgraphConditionalHandle(HANDLE)

    def cuGraphAddNode(self, graph: int, *rest: Any) -> Any:
        *dependencies, node = rest
        assert dependencies == [None] * (len(dependencies) - 1) + [0]
        assert len(dependencies) == (3 if self.CUDA_VERSION >= 13000 else 2)
        condition = node.conditional
        assert node.type == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        assert condition.type == cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        assert (int(condition.handle), condition.size, int(condition.ctx)) == (HANDLE, 1, 5)
        assert len(condition.phGraph_out) == 1
        return SUCCESS, object()

    def cuStreamBeginCaptureToGraph(self, stream: int, body: Any, *rest: Any) -> Any:
        assert stream == STREAM and rest[:3] == (None, None, 0)
        self.is_capturing, self.launches = True, []
        return (SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        assert stream == STREAM and self.is_capturing
        self.is_capturing = False
        return 901 if self.is_invalid else SUCCESS, BODY

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        assert graph == GRAPH and not self.is_capturing
        return SUCCESS, EXECUTABLE

    def cuGraphExecDestroy(self, graph: int) -> None:
        self.calls.append(f"destroyed {graph}")

    def cuGraphDestroy(self, graph: int) -> None:
        self.calls.append(f"destroyed {graph}")

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        assert executable == EXECUTABLE and not self.is_capturing

        def run() -> None:
            self.condition = 1
            while self.condition:
                for launch in self.launches:
                    condition = launch()
                    self.condition = self.condition if condition is None else condition

        self.thread = threading.Thread(target=run)
        self.thread.start()
        return (SUCCESS,)

    def launch(self, work: Callable[[], Any]) -> None:
        """Launch a kernel on the current stream."""
        assert self.is_capturing
        self.launches.append(work)

    def cupy(self) -> Any:
        machine = self

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                pass

            def record(self, stream: Any) -> None:
                pass

            @property
            def done(self) -> bool:
                assert machine.thread is not None
                return not machine.thread.is_alive()

        def new_stream(non_blocking: bool) -> Any:
            class Stream:
                ptr = STREAM

                def __enter__(self) -> None:
                    pass

                def __exit__(self, *_: object) -> None:
                    pass

            return Stream()

        @contextmanager
        def allocator(function: Any) -> Any:
            machine.calls.append(function())
            yield
            machine.calls.append("default pool")

        cuda = SimpleNamespace(
            Stream=new_stream,
            Event=Event,
            MemoryPool=lambda: SimpleNamespace(malloc=lambda: "pool of the loop"),
            using_allocator=allocator,
            get_current_stream=lambda: SimpleNamespace(ptr=3),
            runtime=SimpleNamespace(driverGetVersion=lambda: machine.CUDA_VERSION),
        )
        return SimpleNamespace(cuda=cuda, zeros=lambda n, dtype: Words(np.zeros(n, dtype)))


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(getattr(request, "param", 13000))
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(while_graph, "cupy", fake.cupy)

    class Launch:
        def __init__(
            self, run: Any, grid: int, block: int, args: Any, *, device: int, dependent: bool
        ) -> None:
            assert (grid, block, device, dependent) == (1, 1, 0, True)
            self._run, self._args = run, args

        def launch(self, stream: int) -> None:
            assert stream == STREAM
            fake.launch(lambda: self._run(*self._args))

    monkeypatch.setattr(while_graph, "PreparedLaunch", Launch)
    monkeypatch.setattr(
        while_graph,
        "kernel",
        lambda name, function, device, defines: compiled(dict(defines)["FLAG"]),
    )
    return fake


class Steps:
    """Rounds on the stand-in: each adds 1, and sets the highest bit of the flag after ``end`` rounds."""

    def __init__(self, gpu: FakeDriver, end: int, dtype: str = "?", pause_s: float = 0) -> None:
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
def test_numbers_of_rounds(dtype: str, gpu: FakeDriver) -> None:
    for end, most, known in ((1, 9, 1), (5, 9, 5), (9, 9, 9), (20, 9, 9)):
        steps = Steps(gpu, end, dtype)
        graph = WhileGraph(steps, steps.flag)
        pools = [call for call in gpu.calls if "pool" in call]
        assert pools[-2:] == ["pool of the loop", "default pool"]
        assert (graph.run(0, most, never), steps.rounds) == (known, known)
        steps.rounds = 3
        assert graph.run(3, most, never) == max(known, 4)


def test_a_failure_and_an_interrupt_stop_the_loop(gpu: FakeDriver) -> None:
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


def test_errors_of_the_capture(gpu: FakeDriver) -> None:
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


def test_the_graph_is_freed(gpu: FakeDriver) -> None:
    steps = Steps(gpu, 1)
    graph = WhileGraph(steps, steps.flag)
    gpu.calls.clear()
    del graph
    assert sorted(gpu.calls) == [f"destroyed {GRAPH}", f"destroyed {EXECUTABLE}"]


def test_drivers_without_conditional_nodes(gpu: FakeDriver) -> None:
    for version, has in ((13000, True), (12030, False), (12040, True)):
        gpu.CUDA_VERSION = version
        assert while_graph.has_while_graphs() == has
