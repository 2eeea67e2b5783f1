"""Kernels compiled by NVRTC, which needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support import require


def by_nvrtc(text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """PTX for ``compute_NN`` or machine code for ``sm_NN`` of a program, and what the compiler says."""
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
    kind = "PTX" if any("=compute_" in option for option in options) else "CUBIN"
    code = bytearray(call(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    call(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
    call(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), log.decode().strip("\0\n ")
