"""Packing the faces of cubes: GB/s of the strided kernel and of CuPy's slicing copy.

``benchmarks()`` returns the figures; as a script, this module writes them as JSON to a file. GB/s is 1e9 bytes of
payload a second; bytes read and written count once. Times are medians of CUDA-event times after a warm-up. Both sides
of a ratio come from the same run, write to preallocated memory and repeat on the same field, so that both read smaller
faces from the L2 cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from halox import datatypes as dt
from halox.packing.refine import Copy, Side, contiguous_side
from halox.packing.strided import StridedCopy
from halox.runtime.gpu.memory import pinned

Call = Callable[[], Any]
SIZES = (64, 128, 256, 512)
AXES = {"z": 0, "y": 1, "x": 2}


def event_us(call: Call, repeats: int = 15, inner: int = 20) -> float:
    """Median time of a call in microseconds, from ``repeats`` rounds of ``inner`` calls between two events.

    The stream stays busy while the host enqueues the calls, so the events measure the GPU's time rather than the
    host's launch time.
    """
    import cupy as cp

    busy = cp.zeros(1 << 25)  # 256 MiB: some 130 us a fill
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(repeats + 3):
        for _ in range(6):
            busy.fill(0)
        start.record()
        for _ in range(inner):
            call()
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / inner)
    return float(median(times[3:]))


def benchmarks(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Return the figures as dicts of name, value, unit and baseline, the rate of CuPy's slicing."""
    import cupy as cp

    found = []
    for n in sizes:
        field = cp.arange((n + 2) ** 3, dtype="f8").reshape((n + 2,) * 3)
        for name in AXES:
            found += of_face(field, n, name)
        del field
    return found


def of_face(field: Any, n: int, name: str) -> list[dict[str, Any]]:
    """Return the figures of one face of a cube of n^3 cells, packed to device memory and to pinned memory."""
    import cupy as cp

    subsizes, where = [n, n, n], [slice(1, n + 1)] * 3
    subsizes[AXES[name]], where[AXES[name]] = 1, slice(1, 2)
    datatype = dt.subarray(field.shape, subsizes, [1, 1, 1], "f8")
    assert datatype.strided is not None
    side = Side(int(field.data.ptr), datatype.strided)
    face = field[tuple(where)]
    out = cp.empty(subsizes)
    host = pinned(datatype.size)
    expected = cp.ascontiguousarray(face).get().tobytes()

    def packer(pointer: int) -> StridedCopy:
        return StridedCopy([Copy(side, contiguous_side(pointer, datatype.size))], device=0)

    def slice_to_host() -> None:
        out[...] = face
        out.get(out=host.array.view("f8").reshape(out.shape), blocking=False)

    # A destination, halox's call, CuPy's call, and a function that returns the packed bytes.
    cases: list[tuple[str, Call, Call, Callable[[], bytes]]] = [
        (
            "device",
            packer(int(out.data.ptr)).launch,
            lambda: cp.copyto(out, face),
            lambda: out.get().tobytes(),
        ),
        ("pinned", packer(host.device_pointer).launch, slice_to_host, host.array.tobytes),
    ]
    found = []
    for where_to, ours, theirs, read in cases:
        out.fill(0)
        host.array[:] = 0
        cp.cuda.runtime.deviceSynchronize()
        ours()
        cp.cuda.runtime.deviceSynchronize()
        if read() != expected:
            raise AssertionError(f"wrong bytes: {name}-face of {n}^3 to {where_to}")
        rates = [datatype.size / 1e3 / event_us(call) for call in (ours, theirs)]
        found.append(
            {
                "name": f"pack {name}-face of {n}^3 f8 to {where_to}",
                "value": round(rates[0], 2),
                "unit": "GB/s",
                "baseline": round(rates[1], 2),
                "baseline_name": "the same by CuPy's slicing",
            }
        )
    host.close()
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(benchmarks()), encoding="utf-8")
