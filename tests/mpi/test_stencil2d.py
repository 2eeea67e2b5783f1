"""The stencil mini-app on ranks; tests/unit/cli/test_cli_ranks.py tests the command that starts them."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
from mpi4py import MPI

from apps import stencil2d
from apps.common import shared_cores

pytestmark = pytest.mark.geometry


def figures_on(comm: MPI.Intracomm, words: str) -> dict[str, Any]:
    """Run the app on these ranks; return its figures, with its picture, on all of them."""
    parser = argparse.ArgumentParser()
    stencil2d.add_arguments(parser)
    common = "--passes 1 --warmup-passes 0 --device cpu"
    args = parser.parse_args(f"{words} {common}".split())
    figures: dict[str, Any] = comm.bcast(stencil2d.run(args, comm, lambda *_: None))
    assert figures["verified"] is True and figures["ranks"] == comm.size
    assert all(checks["equals_one_rank"] is True for checks in figures["checks"].values())
    return figures


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_equals_one_rank(scaling: str, every: int, comm: MPI.Intracomm) -> None:
    # 41 x 54 is uneven over every process grid that divides it; 23 steps end between two exchanges.
    words = f"--custom-size 41,54 --num-iters 23 --scaling {scaling} --iters-per-exchange {every}"
    figures = figures_on(comm, words)
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


@pytest.mark.usually(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("every", [1, 2])
def test_bytes_of_the_faces(every: int, comm: MPI.Intracomm) -> None:
    # Rank 0 is above rank 1. A halo of 2 adds a margin of one point at each side of the plane.
    figures = figures_on(
        comm, f"--custom-size 20,30 --num-iters 10 --iters-per-exchange {every} --msize 2,1"
    )
    points = 10 * (30 + 2 * (every - 1))
    assert [row["bytes_exchanged"] for row in figures["rows"]] == [2 * points * 4, 2 * points * 8]


@pytest.mark.usually(4)
@pytest.mark.ranks(4)
def test_reference_numbers(comm: MPI.Intracomm) -> None:
    """The numbers of the original benchmark."""
    figures = figures_on(
        comm,
        "--size 1 --num-iters 100 --scaling strong --msize 1,4 --exact-weights --precision double",
    )
    assert figures["checks"]["double"]["reference_numbers"] is True


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
