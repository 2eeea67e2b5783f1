"""MG of the NAS Parallel Benchmarks: a multigrid V-cycle for a Poisson equation in a periodic cube.

Written from the benchmark's definition: sizes, operators, right-hand side, verification and rate
are the original's; ``docs/nas_mg.md`` lists the differences.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..common import Progress
from .options import add_arguments

__all__ = ["PICTURE", "SUMMARY", "add_arguments", "run"]

SUMMARY = "NAS MG: multigrid V-cycles in a periodic cube, classes S to D, officially verified"
PICTURE = "the solution in the middle plane and the blocks of the ranks"


def run(args: argparse.Namespace, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run the benchmark; figures on rank 0, None elsewhere."""
    from .benchmark import run_benchmark
    from .options import settings

    return run_benchmark(settings(args, comm.size), comm, progress)
