"""Compiles kernels with NVRTC, which needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.support import require


class Compiled(NamedTuple):
    """PTX of a program, its machine code (empty unless compiled for ``sm_NN``), and the compiler's log."""

    ptx: str
    code: bytes
    log: str


def by_nvrtc(text: str, name: str, options: Sequence[str]) -> Compiled:
    """Compile a program for ``compute_NN`` or ``sm_NN``."""
    require("nvrtc")
    from cuda.bindings import nvrtc

    def call(result: Any) -> Any:
        error, *values = result
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    encoded = [option.encode() for option in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = bytearray(call(nvrtc.nvrtcGetProgramLogSize(program)))
    call(nvrtc.nvrtcGetProgramLog(program, log))
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    found = {}
    for kind in ("PTX", "CUBIN"):
        found[kind] = bytearray(call(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
        if found[kind]:
            call(getattr(nvrtc, f"nvrtcGet{kind}")(program, found[kind]))
    call(nvrtc.nvrtcDestroyProgram(program))
    ptx = found["PTX"].decode().rstrip("\0")
    return Compiled(ptx, bytes(found["CUBIN"]), log.decode().strip("\0\n "))
