"""Description of the machine for the JSON files."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import numpy as np

import halox
from halox_bench.kernels import cupy


def machine(comm: Any, device: str) -> dict[str, Any]:
    """Return versions, the hosts of the ranks, and for ``device="gpu"`` the GPUs of the first rank; collective."""
    import mpi4py
    from mpi4py import MPI

    hosts = Counter(comm.allgather(MPI.Get_processor_name()))
    found: dict[str, Any] = {
        "halox": halox.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": device,
        "ranks": comm.size,
        "hosts": dict(hosts),
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().strip().splitlines()[0].rstrip("\0"),
    }
    if device == "gpu":
        runtime = cupy().cuda.runtime
        properties = map(runtime.getDeviceProperties, range(runtime.getDeviceCount()))
        found |= {
            "gpus": [one["name"].decode() for one in properties],
            "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
            "cupy": cupy().__version__,
        }
    return found
