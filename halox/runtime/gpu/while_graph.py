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
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from halox.runtime.arrays import Described
from halox.runtime.gpu import driver, streams
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch

_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_SHARE, _LEAST_S, _MOST_S = 0.1, 2e-5, 2e-2  # a sleep, as a share of the time so far


def has_while_graphs() -> bool:
    """Whether the driver and its bindings have conditional nodes: CUDA 12.4."""
    is_new = cupy().cuda.runtime.driverGetVersion() >= 12040
    return is_new and hasattr(driver.bindings(), "cuGraphConditionalHandleCreate")


class WhileGraph:
    """The graph of a loop on the current GPU; ``work`` launches one round on the current stream, which is captured.

    Raises the errors of ``work``, and `DeviceError` for work that the body of a loop cannot contain. The memory of
    arrays that ``work`` allocates lives as long as the graph.
    """

    def __init__(self, work: Callable[[], None], flag: Described) -> None:
        cuda, cu = cupy().cuda, driver.bindings()
        self._words = cupy().zeros(3, "u8")
        self._stream, self._event = cuda.Stream(non_blocking=True), cuda.Event(disable_timing=True)
        self._pool = cuda.MemoryPool()  # other arrays must not get the memory of temporaries
        (graph,) = driver.call(cu.cuGraphCreate, 0)
        weakref.finalize(self, cu.cuGraphDestroy, graph).atexit = False
        node = cu.CUgraphNodeParams()
        node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        condition = node.conditional
        condition.type, condition.size = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE, 1
        (condition.ctx,) = driver.call(cu.cuCtxGetCurrent)
        first = 1, cu.CU_GRAPH_COND_ASSIGN_DEFAULT  # each launch makes the first round
        (handle,) = driver.call(cu.cuGraphConditionalHandleCreate, graph, condition.ctx, *first)
        condition.handle = handle
        dependencies = (None, None, 0) if cu.CUDA_VERSION >= 13000 else (None, 0)
        driver.call(cu.cuGraphAddNode, graph, *dependencies, node)
        arguments = [*map(ctypes.c_uint64, (int(handle), flag.pointer, self._words.data.ptr))]
        device = flag.device or 0
        function = kernel("look", "look", device, (("FLAG", _TYPES[flag.dtype.itemsize]),))
        look = PreparedLaunch(function, 1, 1, arguments, device=device, dependent=True)
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # CuPy may allocate
        how = condition.phGraph_out[0], None, None, 0, mode
        streams.loops.append(self)
        try:
            with self._stream, cuda.using_allocator(self._pool.malloc):
                driver.call(cu.cuStreamBeginCaptureToGraph, self._stream.ptr, *how)
                work()
                look.launch(self._stream.ptr)
                driver.call(cu.cuStreamEndCapture, self._stream.ptr)
        except BaseException:
            with suppress(Exception):  # an error may have ended the capture
                driver.call(cu.cuStreamEndCapture, self._stream.ptr)
            raise
        finally:
            streams.loops.pop()
        (self._exec,) = driver.call(cu.cuGraphInstantiate, graph, 0)
        weakref.finalize(self, cu.cuGraphExecDestroy, self._exec).atexit = False

    def run(self, rounds: int, most: int, has_failed: Callable[[], bool]) -> int:
        """Run on the current stream until the flag is set or ``most`` rounds are made; return their number.

        ``rounds`` is the number made before, less than ``most``. Blocks, mostly asleep. If ``has_failed()`` becomes
        true, or the wait is interrupted, the loop ends after the present round.
        """
        stream = cupy().cuda.get_current_stream()
        self._words.set(np.array([rounds, most, 0], "u8"), stream=stream)
        driver.call(driver.bindings().cuGraphLaunch, self._exec, stream.ptr)
        self._event.record(stream)
        try:
            self._wait(has_failed)
        finally:
            if not self._event.done:  # tell the loop, by a stream that does not wait for it
                self._words[2:].set(np.ones(1, "u8"), stream=self._stream)
                self._wait(lambda: False)
        return int(self._words[0])

    def _wait(self, is_over: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not (self._event.done or is_over()):
            passed = time.monotonic() - begin
            time.sleep(min(max(passed * _SHARE, _LEAST_S), _MOST_S))
