"""What measures: the machine and versions, for the benchmarks' JSON files."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import numpy as np

from halox._version import __version__
from halox.runtime.world import load_mpi


def machine(device: str) -> dict[str, Any]:
    """Return what one process sees.

    Parameters
    ----------
    device : {"cpu", "gpu"}
    """
    found: dict[str, Any] = {
        "halox": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": device,
    }
    if device == "gpu":
        from halox.runtime.gpu.cuda import cupy

        cp = cupy()
        runtime = cp.cuda.runtime
        found |= {
            "gpus": [
                runtime.getDeviceProperties(i)["name"].decode()
                for i in range(runtime.getDeviceCount())
            ],
            "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
            "cupy": cp.__version__,
        }
    return found


def machines(comm: Any, device: str) -> dict[str, Any]:
    """Return what the first rank sees, and where all ranks are; collective."""
    import mpi4py

    mpi = load_mpi()
    hosts = Counter(comm.allgather(mpi.Get_processor_name()))
    library = mpi.Get_library_version().strip().splitlines()[0].rstrip("\0")
    return machine(device) | {
        "ranks": comm.size,
        "hosts": dict(hosts),
        "mpi4py": mpi4py.__version__,
        "mpi": library,
    }
