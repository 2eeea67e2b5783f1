"""Stream memory operations of the CUDA driver: streams write words of device memory, and wait for them.

The operations need no kernel and no host action. Unlike interprocess events they can be captured in CUDA graphs. The
driver does not know the order that they create, so the caller of a wait must ensure that the word will be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, NamedTuple

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.cuda import cupy

_MOST = 255  # operations per batch


class WordStep(NamedTuple):
    """One operation: wait until a 32-bit word equals a value, or write it after all earlier writes of the stream."""

    kind: Literal["wait", "write"]
    address: int
    value: int


class PreparedWords:
    """Prepared sequence of operations; raises `DeviceError` if there is no driver."""

    def __init__(self, steps: Sequence[WordStep], device: int) -> None:
        cu = driver.bindings()
        self._call, self._device = cu.cuStreamBatchMemOp, device
        parameters = [_parameters(cu, step) for step in steps]
        self._batches = [parameters[at : at + _MOST] for at in range(0, len(parameters), _MOST)]

    def launch(self, stream: int) -> None:
        """Enqueue the operations on a stream, which may be capturing; does not block. `DeviceError` on failure."""
        for batch in self._batches:
            driver.call(self._call, stream, len(batch), batch, 0, device=self._device)


def _parameters(cu: Any, step: WordStep) -> Any:
    operation = cu.CUstreamBatchMemOpParams()
    kinds = cu.CUstreamBatchMemOpType
    if step.kind == "wait":
        member, operation.operation = operation.waitValue, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        member.flags = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    else:
        member, operation.operation = operation.writeValue, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        member.flags = int(cu.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    member.operation, member.address, member.value = operation.operation, step.address, step.value
    return operation


@cache
def why_not_captured(device: int) -> str | None:
    """Return why CUDA graphs on a GPU cannot contain these operations, None if they can.

    Captures both kinds on a temporary stream, and drops the graph. The result is cached per GPU. Must not be called
    during stream capture.
    """
    cuda = cupy().cuda
    with cuda.Device(device):
        memory, stream = cuda.Memory(4), cuda.Stream(non_blocking=True)
        at = int(memory.ptr)
        words = PreparedWords([WordStep("write", at, 0), WordStep("wait", at, 0)], device)
        stream.begin_capture(cuda.runtime.streamCaptureModeThreadLocal)
        try:
            words.launch(stream.ptr)
        except DeviceError as error:
            with suppress(RuntimeError):  # the capture may already be invalid
                stream.end_capture()
            return f"the driver captures no stream memory operations ({error})"
        try:
            stream.end_capture()
        except RuntimeError as error:
            return f"the driver makes no graph of stream memory operations ({error})"
    return None
