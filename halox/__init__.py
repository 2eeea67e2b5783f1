"""Halo exchange for NumPy and CuPy arrays: declare a grid, call ``exchange()`` each step."""

from __future__ import annotations

from halox import datatypes, errors
from halox._version import __version__
from halox.collectives.allreduce import Allreduce
from halox.errors import HaloxError
from halox.exchange.plan import Plan
from halox.exchange.report import Report
from halox.exchange.typed import Exchange, Recv, Send
from halox.fft import FFT
from halox.grid import Grid
from halox.packing.pack import BOTTOM, Choice, pack, packing_method, unpack
from halox.transpose import Transpose

__all__ = [
    "BOTTOM",
    "FFT",
    "Allreduce",
    "Choice",
    "Exchange",
    "Grid",
    "HaloxError",
    "Plan",
    "Recv",
    "Report",
    "Send",
    "Transpose",
    "__version__",
    "datatypes",
    "errors",
    "pack",
    "packing_method",
    "unpack",
]
