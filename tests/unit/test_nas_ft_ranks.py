"""``halox run nas_ft`` on several ranks: the official verification, and errors printed once."""

from __future__ import annotations

import pytest

from tests.support import halox, verified


@pytest.mark.parametrize(
    ("name", "ranks", "decomposition", "shape"),
    [
        ("S", 2, "auto", [2, 1, 1]),
        ("W", 3, "2d", [1, 3, 1]),
        # tests/mpi/test_nas_ft.py covers classes S and W on 1 to 8 ranks, too.
        pytest.param("A", 6, "2d", [2, 3, 1], marks=pytest.mark.full),
    ],
)
def test_official_verification(name: str, ranks: int, decomposition: str, shape: list[int]) -> None:
    words = ["--class", name, "-n", str(ranks), "--decomposition", decomposition, "--device", "cpu"]
    figures = verified("nas_ft", *words)
    assert figures["relative_error"] <= 1e-12
    assert (figures["class"], figures["ranks"], figures["process_grid"]) == (name, ranks, shape)
    assert len(figures["checksums"]) == figures["iterations"] == 6
    assert max(one["relative_error"] for one in figures["checksums"]) == figures["relative_error"]


def test_what_cannot_be_is_told_once() -> None:
    ended = halox("run", "nas_ft", "-n", "2", "--device", "cpu", "--graph")
    assert ended.returncode == 2
    assert ended.stderr.count("--graph needs GPUs") == 1 and "Traceback" not in ended.stderr
