"""Halo exchange for NumPy and CuPy arrays: declare a grid, call ``exchange()`` each step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from halox import datatypes, errors
from halox._version import __version__
from halox.errors import HaloxError
from halox.exchange.plan import Plan
from halox.exchange.report import Report
from halox.grid import Grid

if TYPE_CHECKING:
    from halox.checkpoint.output import Output
    from halox.collectives.allreduce import Allreduce
    from halox.cubed_sphere import CubedSphere
    from halox.decomposition.connections import Connection
    from halox.domain.stopping import stopping
    from halox.exchange.device_loop import Loop
    from halox.exchange.typed import Exchange, Recv, Send
    from halox.fft import FFT
    from halox.packing.pack import Choice, pack, packing_method, unpack
    from halox.paths.peer.stores import device_header
    from halox.points import Points
    from halox.transpose import Transpose

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
    "Allreduce": "halox.collectives.allreduce",
    "Connection": "halox.decomposition.connections",
    "CubedSphere": "halox.cubed_sphere",
    "FFT": "halox.fft",
    "Loop": "halox.exchange.device_loop",
    "Output": "halox.checkpoint.output",
    "Points": "halox.points",
    "Transpose": "halox.transpose",
    "device_header": "halox.paths.peer.stores",
    "stopping": "halox.domain.stopping",
    **dict.fromkeys(("Exchange", "Recv", "Send"), "halox.exchange.typed"),
    **dict.fromkeys(("Choice", "pack", "packing_method", "unpack"), "halox.packing.pack"),
}
"""Modules of the names that are imported at their first use."""


def __getattr__(name: str) -> object:
    """Import a name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
