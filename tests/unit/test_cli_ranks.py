"""``halox run`` as a user types it, on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import support

ROOT = Path(__file__).resolve().parents[2]


def halox_run(*words: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    support.require("mpi")
    return subprocess.run(
        [sys.executable, "-m", "halox", "run", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def stencil(ranks: int, *words: str) -> dict[str, Any]:
    common = ("--passes", "1", "--warmup-passes", "0", "--device", "cpu", "--json")
    ended = halox_run("stencil2d", "-n", str(ranks), *common, *words)
    assert ended.returncode == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    assert figures["verified"] is True
    assert figures["ranks"] == ranks
    for checks in figures["checks"].values():
        assert checks["equals_one_rank"] is True
    return figures


# tests/mpi/test_stencil2d.py has all of them, without starting ranks for each.
COMMANDS = [("weak", 4, 2), ("strong", 2, 4)]


@pytest.mark.parametrize(
    ("scaling", "every", "ranks"),
    [
        pytest.param(*case, marks=() if case in COMMANDS else pytest.mark.full)
        for case in product(("weak", "strong"), (1, 2, 4), (2, 4))
    ],
)
def test_stencil(scaling: str, every: int, ranks: int) -> None:
    # 41 x 54 is uneven over every process grid if it is cut; 23 steps end between two exchanges.
    figures = stencil(
        ranks,
        *("--custom-size", "41,54", "--num-iters", "23"),
        *("--scaling", scaling, "--iters-per-exchange", str(every)),
    )
    margin = 2 * (every - 1)
    tiles = (2, ranks // 2) if scaling == "weak" else (1, 1)
    assert figures["points"] == [41 * tiles[0] + margin, 54 * tiles[1] + margin]


def test_bytes_exchanged_are_those_of_the_faces() -> None:
    # Two ranks, one above the other: each sends one row of 30 points in each of 10 exchanges, and
    # no corners, for there is nobody at the sides.
    size = ("--custom-size", "20,30", "--num-iters", "10")
    figures = stencil(2, *size)
    assert [row["bytes_exchanged"] for row in figures["rows"]] == [2 * 30 * 4 * 10, 2 * 30 * 8 * 10]
    # With a halo of 2 the plane is one point wider on each side, and there are half as many
    # exchanges of two rows.
    wide = stencil(2, *size, "--iters-per-exchange", "2")
    assert [row["bytes_exchanged"] for row in wide["rows"]] == [2 * 64 * 4 * 5, 2 * 64 * 8 * 5]


def test_reference_numbers_on_four_ranks() -> None:
    figures = stencil(
        4,
        *("--size", "1", "--num-iters", "100", "--scaling", "strong", "--msize", "1,4"),
        *("--exact-weights", "--precision", "double"),
    )
    assert figures["checks"]["double"]["reference_numbers"] is True


def test_an_error_of_all_ranks_is_told_once() -> None:
    ended = halox_run("stencil2d", "-n", "2", "--msize", "2,2")
    assert ended.returncode == 2
    assert ended.stderr.count("has 4 places, but this run has 2 ranks") == 1
    assert "Traceback" not in ended.stderr


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    # A folder where the picture should be written: seen by rank 0 alone, when the others are done.
    ended = halox_run(
        *("stencil2d", "-n", "2", "--custom-size", "9,9", "--num-iters", "1", "--passes", "1"),
        *("--device", "cpu", "--png", str(tmp_path)),
    )
    assert ended.returncode not in (0, 2)
    assert "IsADirectoryError" in ended.stderr and "rank 0 failed" in ended.stderr


def test_inside_a_launcher_it_runs_on_the_ranks_that_are_there() -> None:
    support.require("mpi")
    from halox.cli import launcher

    words = "run stencil2d --custom-size 9,9 --num-iters 3 --passes 1 --device cpu --json"
    environ = launcher.environment(2)
    del environ[launcher.STARTED_BY_HALOX]
    ended = subprocess.run(
        launcher.command(launcher.find(), 2, ["-m", "halox", *words.split()]),
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ranks"] == 2
