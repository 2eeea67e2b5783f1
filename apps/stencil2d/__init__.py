"""Stencil2D of the SHOC benchmark suite: a nine-point Jacobi stencil on a plane with zero boundary.

Written from the benchmark's definition: operator, sizes, initial values, halo width and rate are
the original's; ``docs/stencil2d.md`` lists the differences.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..common import Progress
from .options import add_arguments

__all__ = ["PICTURE", "SUMMARY", "add_arguments", "run"]

SUMMARY = "SHOC Stencil2D: nine-point stencil, float32 and float64, weak or strong scaling"
PICTURE = "the last field and the blocks of the ranks"


def run(args: argparse.Namespace, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run the benchmark; figures on rank 0, None elsewhere."""
    from .benchmark import run_benchmark
    from .options import settings

    return run_benchmark(settings(args, comm.size), comm, progress)
