"""FT of the NAS Parallel Benchmarks: a diffusion equation solved by three-dimensional Fourier transforms.

Written from the benchmark's definition: sizes, initial values, evolution, verification and rate are the original's;
``docs/nas_ft.md`` lists the differences.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..common import Progress
from .options import add_arguments

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "NAS FT: a diffusion equation by distributed 3D FFTs, classes S to D, officially verified"


def run(args: argparse.Namespace, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run the benchmark; figures on rank 0, None elsewhere."""
    from .benchmark import run_benchmark
    from .options import settings

    return run_benchmark(settings(args, comm.size), comm, progress)
