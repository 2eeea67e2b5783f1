"""``halox run nas_mg`` on one and several ranks: the official verification, and bytes exchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import full, halox, verified


def multigrid(name: str, ranks: int, *words: str) -> dict[str, Any]:
    figures = verified("nas_mg", "--class", name, "-n", str(ranks), "--device", "cpu", *words)
    assert figures["relative_error"] <= 1e-8
    assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}
    assert (figures["class"], figures["ranks"]) == (name, ranks)
    return figures


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("S", 1),
        ("S", 4),
        # tests/mpi/test_nas_mg.py covers class S on 2, 4 and 8 ranks, too.
        *full(("S", 8), ("W", 2), ("A", 4)),
    ],
)
def test_official_verification(name: str, ranks: int) -> None:
    figures = multigrid(name, ranks)
    assert (
        figures["process_grid"]
        == {
            1: [1, 1, 1],
            2: [2, 1, 1],
            4: [2, 2, 1],
            8: [2, 2, 2],
        }[ranks]
    )
    assert figures["gathered_levels"] == ([1, 2, 3, 4] if ranks > 1 else [])
    assert figures["norm"] == pytest.approx(figures["norms"][-1], rel=1e-12)


def test_bytes_exchanged() -> None:
    # Two ranks, each with 16 x 32 x 32 points of the finest level, send two planes of 32 x 32 points each. Along y and
    # x, each rank is its own neighbour. The planes include ghosts, since the neighbour sends the corners, too.
    plane = 34 * 34 * 8
    # The finest level exchanges u once and r twice; level 4 is gathered from blocks of 8 x 16 x 16.
    expected = 2 * (3 * 2 * plane + 8 * 16 * 16 * 8)
    assert multigrid("S", 2)["exchanged_bytes_an_iteration"] == expected


@pytest.mark.parametrize(
    ("ranks", "text"), [(3, "a power of two of ranks, not on 3"), (2, "--graph needs GPUs")]
)
def test_what_cannot_be_is_told_once(ranks: int, text: str) -> None:
    ended = halox("run", "nas_mg", "-n", str(ranks), "--device", "cpu", "--graph")
    assert ended.returncode == 2
    assert ended.stderr.count(text) == 1 and "Traceback" not in ended.stderr
