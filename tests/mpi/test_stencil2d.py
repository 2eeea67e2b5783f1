"""The stencil mini-app on ranks; tests/unit/cli/test_cli_ranks.py tests the command that starts them."""

from __future__ import annotations

import argparse
import os

import pytest
from mpi4py import MPI

from apps import stencil2d
from apps.common import shared_cores

pytestmark = pytest.mark.geometry


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_equals_one_rank(scaling: str, every: int, comm: MPI.Intracomm) -> None:
    # 41 x 54 is uneven over every process grid that divides it; 23 steps end between two exchanges.
    words = f"--custom-size 41,54 --num-iters 23 --scaling {scaling} --iters-per-exchange {every}"
    parser = argparse.ArgumentParser()
    stencil2d.add_arguments(parser)
    common = "--passes 1 --warmup-passes 0 --device cpu"
    args = parser.parse_args(f"{words} {common}".split())
    figures = comm.bcast(stencil2d.run(args, comm, lambda *_: None))
    assert figures["verified"] is True
    assert all(checks["equals_one_rank"] is True for checks in figures["checks"].values())
    procs = (2, comm.size // 2) if comm.size % 2 == 0 else (1, comm.size)
    tiles = procs if scaling == "weak" else (1, 1)
    margin = 2 * (every - 1)
    assert figures["points"] == [41 * tiles[0] + margin, 54 * tiles[1] + margin]
    picture = figures["picture"]
    values = picture["values"]
    assert list(values.shape) == figures["points"][::-1] and values.max() > 0
    assert [sum(sizes) for sizes in picture["blocks"]] == list(values.shape)
    assert [len(sizes) for sizes in picture["blocks"]] == list(procs[::-1])
    assert sorted(picture["ranks"].values()) == list(range(comm.size))


def test_ranks_that_share_cores_are_told(comm: MPI.Intracomm) -> None:
    """All ranks are bound to one core, then to a core each, as far as there are cores."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    try:
        os.sched_setaffinity(0, cores[:1])
        (note,) = shared_cores(comm) or [""]
        assert note.startswith(f"{comm.size} ranks share 1 core here") == (comm.size > 1)
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
        assert bool(shared_cores(comm)) == (comm.size > len(cores))
    finally:
        os.sched_setaffinity(0, before)
