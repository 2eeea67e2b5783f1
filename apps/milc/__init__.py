"""Staggered fermions of lattice QCD: MILC's conjugate gradient in four dimensions.

Written from the definitions of the operator and of the file formats. ``docs/milc.md`` lists the comparisons with MILC.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..common import Progress
from .options import add_arguments

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = (
    "MILC: conjugate gradient of staggered lattice QCD in 4D, verified against MILC's own sample"
)


def run(args: argparse.Namespace, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run the benchmark; figures on rank 0, None elsewhere."""
    from .benchmark import run_benchmark
    from .options import settings

    return run_benchmark(settings(args), comm, progress)
