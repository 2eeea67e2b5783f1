"""The machine: its description for the JSON files, its GPUs, and its MPI's support of device memory."""

from __future__ import annotations

import platform
from collections import Counter
from typing import Any

import numpy as np

from halox._version import __version__
from halox.errors import DeviceError
from halox.runtime.device_pointers import find_out
from halox.runtime.gpu.devices import choose_device
from halox.runtime.world import World, load_mpi


def machine(device: str) -> dict[str, Any]:
    """Return versions and, for ``device="gpu"``, the GPUs that one process sees."""
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
    """Return the first rank's `machine`, and with a communicator the hosts of all ranks; collective."""
    if comm is None:
        return machine(device)
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


def why_no_gpu() -> str | None:
    """Return why this process can use no GPU, None if it can."""
    from halox.runtime.gpu import cuda

    return cuda.why_no_gpu()


def device_of(asked: str, comm: Any = None) -> str:
    """Return "cpu" or "gpu", the same on all ranks; collective where there is a communicator.

    Parameters
    ----------
    asked : {"auto", "cpu", "gpu"}

    Raises
    ------
    DeviceError
        On all ranks, if GPUs are required and any rank has none.
    """
    why = None if asked == "cpu" else why_no_gpu()
    if comm is not None:
        why = next(filter(None, comm.allgather(why)), None)
    if asked == "gpu" and why is not None:
        raise DeviceError(f"--device gpu: no GPU can be used: {why}")
    return "gpu" if asked != "cpu" and why is None else "cpu"


def why_not_gpu_aware(comm: Any, device: str) -> str:
    """Return why MPI is not given device memory, or an empty text if it can be.

    Parameters
    ----------
    device : {"cpu", "gpu"}

    Notes
    -----
    Collective. A separate process tries it, since an MPI without support may crash.
    """
    if device == "cpu":
        return "the arrays are not on a GPU"
    world = World(comm)
    try:
        verdict = find_out(world, choose_device("gpu", world.turn))
    finally:
        world.close()
    return "" if verdict.takes else verdict.reason
