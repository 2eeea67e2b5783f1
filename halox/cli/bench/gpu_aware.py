"""Whether the hand-written exchanges may hand device memory to MPI."""

from __future__ import annotations

from typing import Any

from halox.runtime.device_pointers import find_out
from halox.runtime.gpu.devices import choose_device
from halox.runtime.world import World


def why_not_gpu_aware(comm: Any, device: str) -> str:
    """Return why MPI is not given device memory, or an empty text if it can be.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    device : {"cpu", "gpu"}

    Notes
    -----
    Collective. Tried in a process of its own, since a wrong yes would end this one.
    """
    if device == "cpu":
        return "the arrays are not on a GPU"
    world = World(comm)
    try:
        verdict = find_out(world, choose_device("gpu", world.turn))
    finally:
        world.close()
    return "" if verdict.takes else verdict.reason
