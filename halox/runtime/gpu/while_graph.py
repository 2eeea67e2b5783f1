"""A CUDA graph that repeats captured work until a flag on the GPU is set, by a conditional node of the kind WHILE.

The host launches the graph once, and then only waits. The node's body is one round, followed by a kernel that looks at
the flag::

    host  launch .............. sleeps ................................. number of rounds
    GPU         | work, look | work, look | ... | work, look: flag != 0, or most rounds, or the host's stop |
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from halox.runtime.arrays import Described
from halox.runtime.gpu import driver, streams
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, version_text
from halox.runtime.gpu.launch import PreparedLaunch

_DRIVER = 12040  # CUDA version with conditional nodes
_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_SHARE, _LEAST_S, _MOST_S = 0.05, 2e-5, 5e-3  # a sleep, as a share of the time so far


def why_no_while_graph() -> str:
    """Return why the driver or its bindings have no conditional nodes; empty if they have."""
    version = int(cupy().cuda.runtime.driverGetVersion())
    if version < _DRIVER:
        return (
            f"the NVIDIA driver supports CUDA {version_text(version)}, and loops on a GPU need 12.4"
        )
    if not hasattr(driver.bindings(), "cuGraphConditionalHandleCreate"):
        return "cuda.bindings is older than CUDA 12.4"
    return ""


class WhileGraph:
    """The graph of a loop on the current GPU; ``work`` launches one round on the current stream, which is captured.

    Raises the errors of ``work``, whose launches must have run before, and `DeviceError` for work that a body cannot
    contain. The memory of arrays that ``work`` allocates is kept as long as the graph.
    """

    def __init__(self, work: Callable[[], None], flag: Described) -> None:
        assert flag.device is not None
        cp, cu, device = cupy(), driver.bindings(), flag.device
        self._words = cp.zeros(3, "u8")
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._event = cp.cuda.Event(disable_timing=True)
        # A pool of its own: in a common pool, other arrays would get the memory of freed temporaries.
        self._pool = cp.cuda.MemoryPool()
        (graph,) = driver.call(cu.cuGraphCreate, 0, device=device)
        owned = [partial(cu.cuGraphDestroy, graph)]
        weakref.finalize(self, _destroy, owned).atexit = False
        (context,) = driver.call(cu.cuCtxGetCurrent)
        assign = cu.CU_GRAPH_COND_ASSIGN_DEFAULT  # a launch begins with the value 1
        (handle,) = driver.call(cu.cuGraphConditionalHandleCreate, graph, context, 1, assign)
        node = cu.CUgraphNodeParams()
        node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        condition = node.conditional
        condition.handle, condition.ctx, condition.size = handle, context, 1
        condition.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        dependencies = (None, None, 0) if cu.CUDA_VERSION >= 13000 else (None, 0)
        driver.call(cu.cuGraphAddNode, graph, *dependencies, node)
        look = PreparedLaunch(
            kernel("look", "look", device, (("FLAG", _TYPES[flag.dtype.itemsize]),)),
            1,
            1,
            [
                ctypes.c_uint64(int(handle)),
                ctypes.c_uint64(flag.pointer),
                ctypes.c_uint64(self._words.data.ptr),
            ],
            device=device,
        )
        with self._stream, cp.cuda.using_allocator(self._pool.malloc), streams.capturing_loop():
            self._capture(condition.phGraph_out[0], work, look)
        (self._exec,) = driver.call(cu.cuGraphInstantiate, graph, 0)
        owned.insert(0, partial(cu.cuGraphExecDestroy, self._exec))

    def _capture(self, body: object, work: Callable[[], None], look: PreparedLaunch) -> None:
        cu, stream = driver.bindings(), self._stream.ptr
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # CuPy's: may allocate
        driver.call(cu.cuStreamBeginCaptureToGraph, stream, body, None, None, 0, relaxed)
        try:
            work()
            look.launch(stream)
        except BaseException:
            with suppress(Exception):  # the capture may already be invalid
                driver.call(cu.cuStreamEndCapture, stream)
            raise
        driver.call(cu.cuStreamEndCapture, stream)

    def run(self, rounds: int, most: int, has_failed: Callable[[], bool]) -> int:
        """Run on the current stream until the flag is set or ``most`` rounds are made; return their number.

        ``rounds`` is the number made before, less than ``most``. Blocks, mostly asleep. If ``has_failed()`` becomes
        true, or the wait is interrupted, the loop ends after the round that is under way.
        """
        stream = cupy().cuda.get_current_stream()
        self._words.set(np.array([rounds, most, 0], "u8"), stream=stream)
        driver.call(driver.bindings().cuGraphLaunch, self._exec, stream.ptr)
        self._event.record(stream)
        try:
            self._wait(has_failed)
        except BaseException:
            self._stop()
            self._wait(lambda: False)
            raise
        return int(self._words[0])

    def _wait(self, has_failed: Callable[[], bool]) -> None:
        begin, is_stopped = time.monotonic(), False
        while not self._event.done:
            if not is_stopped and has_failed():
                self._stop()
                is_stopped = True
            passed = time.monotonic() - begin
            time.sleep(min(max(passed * _SHARE, _LEAST_S), _MOST_S))

    def _stop(self) -> None:
        """Let the loop end after the present round, by a copy on a stream that does not wait for the loop."""
        with self._stream:
            self._words[2:].set(np.ones(1, "u8"), stream=self._stream)


def _destroy(owned: Sequence[Callable[[], object]]) -> None:
    for destroy in owned:
        destroy()
