"""A script that calls a stand-in for the driver through the real ``cuda.bindings``, as halox does.

The first argument is the stand-in's library. The script loads it before the bindings look for the driver, which they
then find in the process under the driver's name.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np

library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

from cuda.bindings import driver as cu  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.runtime.gpu import driver, launch  # noqa: E402
from halox.runtime.gpu.copies import PreparedMemcpy  # noqa: E402
from halox.runtime.gpu.launch import PreparedLaunch  # noqa: E402

STREAM, CAPTURED = 0x5000, 7


def variable(name: str, kind: type = ctypes.c_int):
    return kind.in_dll(library, name)


def refusal(call) -> str:
    try:
        call()
    except DeviceError as error:
        return str(error)
    raise AssertionError("not refused")


assert driver.bindings() is cu

# Each kind of copy: right bytes, and calls of the right driver function.
source = np.arange(2000, dtype=np.uint64).view(np.uint8)
at = source.ctypes.data
for prepared, expected in (
    (PreparedMemcpy(900), source[:900]),
    (
        PreparedMemcpy(13, 20, target_pitch=13, source_pitch=31),
        source[:620].reshape(20, 31)[:, :13],
    ),
    (
        PreparedMemcpy(13, 7, 5, target_pitch=13, target_rows=7, source_pitch=31, source_rows=9),
        source[:1395].reshape(5, 9, 31)[:, :7, :13],
    ),
):
    for stream in (STREAM, CAPTURED):
        target = np.zeros(expected.size + 1, np.uint8)
        prepared.launch(target.ctypes.data, at, stream)
        assert (target[:-1] == expected.ravel()).all() and target[-1] == 0, expected.shape
        assert variable("last_stream", ctypes.c_uint64).value == stream
counts = [variable(f"calls_{kind}").value for kind in ("1d", "2d", "3d")]
assert counts == [2, 2, 2], "every copy was launched twice"

# Errors name the driver's function.
rows = PreparedMemcpy(8, 2, target_pitch=7, source_pitch=8)
assert "cuMemcpy2DAsync: CUDA_ERROR_INVALID_VALUE; " in refusal(lambda: rows.launch(at, at, STREAM))
variable("next_error").value = 12345
assert "cuMemcpyAsync: CUDA error 12345" in refusal(
    lambda: PreparedMemcpy(8).launch(at, at, STREAM)
)

# Programmatic dependent launches; CuPy makes the others.
launch.has_dependent_launch = lambda device: True
prepared = PreparedLaunch(
    SimpleNamespace(ptr=99), 5, (32, 4), (ctypes.c_uint32(7),), dependent=True
)
for stream, number, run in (
    (STREAM, 7, lambda: prepared.launch(STREAM)),
    (0, 8, prepared.ready(0)),
):
    prepared.args[0].value = number
    run()
    assert list((ctypes.c_uint * 9).in_dll(library, "launched")) == [5, 1, 1, 32, 4, 1, 0, 6, 1]
    assert variable("launched_number", ctypes.c_uint32).value == number
    assert variable("last_stream", ctypes.c_uint64).value == stream
assert variable("launches").value == 2

# halox's error numbers have the names that the bindings give them.
names = {int(result): result.name.removeprefix("CUDA_ERROR_") for result in cu.CUresult}
codes = driver.NOT_INITIALIZED, driver.INVALID_CONTEXT
assert [names[code] for code in codes] == ["NOT_INITIALIZED", "INVALID_CONTEXT"]
