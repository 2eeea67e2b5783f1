"""A stand-in for the driver and CuPy that captures a graph with a WHILE node, and runs it in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from halox.runtime.gpu.compiler import preamble, source
from tests.fakes.cpu_kernels import SHIM, shared_library

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


class GraphDriver:
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

    def prepared(
        self, run: Any, grid: int, block: int, args: Any, *, device: int, dependent: bool
    ) -> Any:
        """Take the place of `PreparedLaunch`."""
        assert (grid, block, device, dependent) == (1, 1, 0, True)

        def launch(stream: int) -> None:
            assert stream == STREAM
            self.launch(lambda: run(*args))

        return SimpleNamespace(launch=launch)
