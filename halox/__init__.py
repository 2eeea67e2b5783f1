"""Halo exchange for NumPy and CuPy arrays: declare a grid, call ``exchange()`` each step."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from halox import datatypes, errors
from halox._version import __version__
from halox.errors import HaloxError
from halox.grid import Grid
from halox.plans.plan import Plan
from halox.plans.report import Report

if TYPE_CHECKING:
    from halox.cubed_sphere import CubedSphere
    from halox.decomposition.connections import Connection
    from halox.domain.stopping import stopping
    from halox.fft import FFT
    from halox.fft.transpose import Transpose
    from halox.io.checkpoint.output import Output
    from halox.packing.pack import Choice, pack, packing_method, unpack
    from halox.paths.peer.stores import device_header
    from halox.plans.device_loop import Loop
    from halox.plans.typed import Exchange, Recv, Send
    from halox.reductions.allreduce import Allreduce
    from halox.sampling.particles import Particles
    from halox.sampling.points import Points

__all__ = [
    "FFT",
    "Allreduce",
    "Choice",
    "Connection",
    "CubedSphere",
    "Exchange",
    "Grid",
    "HaloxError",
    "Loop",
    "Output",
    "Particles",
    "Plan",
    "Points",
    "Recv",
    "Report",
    "Send",
    "Transpose",
    "__version__",
    "datatypes",
    "device_header",
    "errors",
    "pack",
    "packing_method",
    "stopping",
    "unpack",
]

_MODULES = {
    "Allreduce": "halox.reductions.allreduce",
    "Connection": "halox.decomposition.connections",
    "CubedSphere": "halox.cubed_sphere",
    "FFT": "halox.fft",
    "Loop": "halox.plans.device_loop",
    "Output": "halox.io.checkpoint.output",
    "Particles": "halox.sampling.particles",
    "Points": "halox.sampling.points",
    "Transpose": "halox.fft.transpose",
    "device_header": "halox.paths.peer.stores",
    "stopping": "halox.domain.stopping",
    **dict.fromkeys(("Exchange", "Recv", "Send"), "halox.plans.typed"),
    **dict.fromkeys(("Choice", "pack", "packing_method", "unpack"), "halox.packing.pack"),
}
"""Modules of the names that are imported at their first use."""


def __getattr__(name: str) -> object:
    """Import a name at its first use."""
    if name == "exchange":
        raise AttributeError("halox has no exchange; call the method of a grid: grid.exchange(u)")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)


if folder := os.environ.get("HALOX_TRACE"):
    import_module("halox.timeline").install(folder)
